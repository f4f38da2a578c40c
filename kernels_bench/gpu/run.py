"""Run everything that needs a GPU, in under 8 minutes: tests, memory checker, benchmark, a training step.

    make gpu PY=python3              # on a GPU machine with torch 2.11 or newer; needs no network
    python -m kernels_bench.gpu.run --sweep --out build/gpu

Each part is a process with a time limit. A part that overruns is stopped; its written results count, and
the other parts still run. Writes gpu.json and gpu.md, with the figures and whether they meet their bounds.
The exit code is 1 if a test or a part failed. A missed bound or a stopped benchmark is reported, but does
not fail the run. Without a GPU the script collects the tests and takes a small step on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import torch

from kernels_bench import machine, scripts
from kernels_bench.gpu import odd_sizes
from kernels_bench.scripts import ROOT

SECONDS = 460
# LIMIT is replaced by a part's seconds in its command, less MARGIN for its start and end
LIMIT, MARGIN = "{limit}", 15
# the memory checker's exit code if it found something
FOUND = 9
# bytes: the bounds apply to larger lists
LARGE = 256e6
# short cases and those with a bound come first, because the last ones may be cut off
CASES = "one-1.5e9,2000x1m,2000x1k,gpt2,llama-1b,moe,misaligned,beyond-2^31"
# files that a run writes to its folder, besides logs
WRITTEN = [f"{name}.{kind}" for name in ("gpu", "bench", "gpt2", "sweep") for kind in ("json", "md")]
WRITTEN += ["host.json", "tests.xml", "bench.png"]
SMALL = "--layers 1 --width 32 --heads 2 --vocabulary 64 --context 16 --batch 2 --seconds 0.2"


# tools of compute-sanitizer, and their time limits in seconds
CHECKERS = {"memcheck": 35, "racecheck": 20}


class Part(NamedTuple):
    """A command, and its time limit in seconds; unused seconds of earlier parts are added."""

    name: str
    command: list[str]
    seconds: float
    env: dict[str, str] = {}  # noqa: RUF012 never written to


class Figure(NamedTuple):
    """``reached`` is None if it was not measured; ``most``: whether the bound is an upper one."""

    what: str
    reached: float | None
    bound: float
    most: bool
    where: str = ""

    @property
    def met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached <= self.bound if self.most else self.reached >= self.bound


def parts(out: Path, *, sweep: bool, sanitizer: str | None) -> list[Part]:
    """Return the parts in the order in which they run."""
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--durations=5", "-p", "no:cacheprovider"]
    tests += ["--continue-on-collection-errors", f"--junitxml={out / 'tests.xml'}", str(ROOT / "tests")]
    if importlib.util.find_spec("pytest_timeout"):
        tests += ["-p", "timeout"]
    if importlib.util.find_spec("xdist"):  # most of the tests' time is compilation
        tests += ["-p", "xdist", "-n", "4"]
    # other installed plugins may warn, and warnings are errors
    listed = [Part("tests", tests, 130, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})]
    for tool, seconds in CHECKERS.items() if sanitizer else ():
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
        command += scripts.command("kernels_bench.gpu.odd_sizes")
        # with the caching allocator a read beyond a tensor would read its neighbor, undetected
        listed.append(Part(tool, command, seconds, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    host = scripts.command("kernels_bench.host_path", "--device", "cuda", "--json", out / "host.json")
    bench = ["--device", "cuda", "--cases", CASES, "--seconds", 1, "--out", out]
    gpt2 = scripts.command("kernels_bench.gpu.gpt2", "--limit", LIMIT, "--out", out)
    listed += [
        Part("host", host, 20),
        Part("bench", scripts.command("kernels_bench", *bench), 130),
        Part("gpt2", gpt2, 100),
    ]
    left = SECONDS - sum(part.seconds for part in listed)
    if sweep:
        search = scripts.command("kernels_bench.gpu.sweep", "--seconds", LIMIT, "--out", out)
        listed.append(Part("sweep", search, left))
    return listed


def warm_ups(out: Path) -> list[list[str]]:
    """Return commands that compile while the tests run, so that later parts find a warm compiler cache."""
    bench = ("--device", "cuda", "--cases", "gpt2", "--providers", "inductor,inductor-combo,ours-compiled")
    modes = ("compiled", "reduce-overhead")
    return [
        scripts.command("kernels_bench", *bench, "--seconds", 0.1, "--out", out / "warm"),
        *(scripts.command("kernels_bench.gpu.gpt2", "--warm", "--modes", mode) for mode in modes),
    ]


def start(command: list[str], log: Path | None = None, **env: str) -> subprocess.Popen:
    env = {**scripts.environment(ROOT / "src"), "PYTHONUNBUFFERED": "1", **env}
    env.pop("TRITON_INTERPRET", None)
    # its own process group, so that its compiler processes end with it
    with log.open("wb") if log else open(os.devnull, "wb") as sink:  # noqa: PTH123
        return subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def within(command: list[str], limit: float) -> list[str]:
    """Return a part's command with its time limit filled in."""
    return [f"{max(1.0, limit - MARGIN):.0f}" if word == LIMIT else word for word in command]


def run(part: Part, log: Path, limit: float) -> dict:
    """Run one part; return its name, command, seconds, and how it ended."""
    print(f"{part.name}: at most {limit:.0f} s ... ", end="", flush=True)
    begin = time.perf_counter()
    command = within(part.command, limit)
    process = start(command, log, **part.env)
    try:
        status = process.wait(timeout=limit)
        ended = "ok" if status == 0 else f"exit code {status}"
        if part.name in CHECKERS and status not in {0, FOUND, odd_sizes.WRONG}:
            ended = f"does not run here ({ended})"
    except subprocess.TimeoutExpired:
        ended = f"cut off after {limit:.0f} s"
    finally:
        end(process)
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s, {ended}", flush=True)
    if ended != "ok":
        print("".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-25:]), end="")
    return {"part": part.name, "command": shlex.join(command), "seconds": seconds, "ended": ended}


def failed(part: dict) -> bool:
    needed = part["part"] in {"tests", *CHECKERS} and part["ended"].startswith("cut off")
    return needed or part["ended"].startswith("exit code")


def counts(xml: Path) -> dict[str, int]:
    """Return the numbers of all, failed and skipped tests; empty without the file."""
    if not xml.exists():
        return {}
    suites = ET.parse(xml).getroot().iter("testsuite")  # noqa: S314 pytest wrote it
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, "0"))
    return total


def figures(bench: list[dict], gpt2: list[dict], host: dict) -> list[Figure]:
    """Return the figures that have a bound, from the rows of bench.json and gpt2.json, and from host.json."""
    ms = {(row["case"], row["provider"]): row["ms"] for row in bench if row["ms"] and not row["error"]}
    ours = [row for row in bench if row["provider"] == "ours-eager" and (row["case"], "ours-eager") in ms]
    large = [row for row in ours if row["bytes"] > LARGE]
    found = []
    for dtype in ("float32", "bfloat16"):
        shares = [
            (r["ceiling_share"], r["case"]) for r in large if r["dtype"] == dtype and r["ceiling_share"]
        ]
        share, where = min(shares, default=(None, ""))
        found.append(
            Figure(f"share of torch.sum's bandwidth, {dtype} above 256 MB", share, 0.95, False, where)
        )

    def times(case: str, one: str, *others: str) -> float | None:
        """Return the time of ``one`` over that of the fastest of ``others``."""
        peers = [ms[case, other] for other in others if (case, other) in ms]
        return ms[case, one] / min(peers) if peers and (case, one) in ms else None

    over = [
        (times(row["case"], "ours-eager", "foreach"), row["case"])
        for row in large
        if row["dtype"] == "float32"
    ]
    ratio, where = max([pair for pair in over if pair[0]], default=(None, ""))
    found.append(Figure("time / _foreach_norm's, float32 above 256 MB", ratio, 1.05, True, where))
    compiled, eager = ("inductor", "inductor-combo"), ("loop",)
    for what, peers, bound in (("compiled", compiled, 4.0), ("eager", eager, 10.0)):
        share = times("gpt2", "ours-eager", *peers)
        found.append(
            Figure(
                f"times faster than all columns {what}", 1 / share if share else None, bound, False, "gpt2"
            )
        )
    found.append(
        Figure(
            "time / _foreach_norm's, 2000 tiny",
            times("2000x1k", "ours-eager", "foreach"),
            1.0,
            True,
            "2000x1k",
        )
    )
    steps = {(row["mode"], row["collects"]): row for row in gpt2 if "ms" in row}
    added = steps.get(("compiled", "grads"), {}).get("added_percent")
    found.append(Figure("% of a compiled step of GPT-2", added, 1.0, True, "gpu.gpt2"))
    # the number of tensors that is nearest to its bound
    count = max(host, key=lambda count: host[count]["beyond_us"] / host[count]["limit_us"], default="")
    beyond, limit = (host[count]["beyond_us"], host[count]["limit_us"]) if host else (None, math.nan)
    where = f"host_path, {count} tensors" if host else "host_path"
    found.append(Figure("us of the host's beyond a list of data_ptr()", beyond, limit, True, where))
    return found


def markdown(result: dict, out: Path) -> str:
    lines = [f"# On a GPU\n\n{machine.one_line(result['machine'])}\n", "    " + result["command"] + "\n"]
    lines += ["| figure | where | reached | bound | met |", "|---|---|---|---|---|"]
    for figure in result["figures"]:
        reached = "not measured" if figure["reached"] is None else f"{figure['reached']:.3g}"
        met = {None: "", True: "yes", False: "no"}[figure["met"]]
        bound = f"{'at most' if figure['most'] else 'at least'} {figure['bound']:g}"
        lines.append(f"| {figure['what']} | {figure['where']} | {reached} | {bound} | {met} |")
    lines += ["", "| part | seconds | ended |", "|---|---|---|"]
    for part in result["parts"]:
        lines.append(f"| {part['part']} | {part['seconds']:.0f} | {part['ended']} |")
    tests = result["tests"]
    lines += ["", "Tests: " + (", ".join(f"{n} {what}" for what, n in tests.items()) or "no result")]
    for name, title in (("gpt2", "A training step of GPT-2"), ("bench", "Benchmark"), ("sweep", "Tuning")):
        if text := text_of(out / f"{name}.md"):
            lines += [f"\n## {title}\n", text.strip()]
    return "\n".join(lines) + "\n"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def load(path: Path) -> list[dict]:
    return json.loads(text)["rows"] if (text := text_of(path)) else []


def without_gpu(out: Path) -> int:
    """Collect the tests, which skip themselves, and take a small step on the CPU."""
    print("There is no GPU here, so nothing is measured. On a machine with one this would run:\n")
    for part in parts(out, sweep=True, sanitizer="compute-sanitizer"):
        print(f"    {shlex.join(within(part.command, part.seconds))}")
    print("\nThis run checks that the tests are found and that a step runs on the CPU:\n")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--device", "cpu", "--modes", "eager", *SMALL.split(), "--out", folder]
        small = scripts.command("kernels_bench.gpu.gpt2", *options)
        tests = parts(Path(folder), sweep=False, sanitizer=None)[0]
        dry = [tests, Part("gpt2, small, on the CPU", small, 120)]
        ended = [run(part, Path(folder) / "log", part.seconds) for part in dry]
        skipped = counts(Path(folder) / "tests.xml")
    print(f"{skipped.get('skipped', 0)} of {skipped.get('tests', 0)} tests wait for a GPU")
    return int(any(map(failed, ended)))


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.run", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--sweep", action="store_true", help="also try other chunks, tiles and threads")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    if not torch.cuda.is_available():
        return without_gpu(out)
    # remove files of an earlier run; other files stay
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    (out / "warm").mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    command = scripts.command_line("kernels_bench.gpu.run", argv)
    result = {"machine": machine.describe(), "command": command, "parts": [], "tests": {}, "figures": []}
    print(machine.one_line(result["machine"]), flush=True)
    beside = [start(each, out / "warm" / f"{i}.log") for i, each in enumerate(warm_ups(out))]
    granted = 0.0
    try:
        for part in parts(out, sweep=options.sweep, sanitizer=shutil.which("compute-sanitizer")):
            granted += part.seconds
            if part.name == "bench":
                # they may use the rest of the tests' time, but must not disturb the benchmark
                while (
                    any(p.poll() is None for p in beside)
                    and time.perf_counter() - begin < granted - part.seconds
                ):
                    time.sleep(0.2)
                for process in beside:
                    end(process)
            limit = max(1.0, granted - (time.perf_counter() - begin))
            result["parts"].append(run(part, out / f"{part.name}.log", limit))
    finally:
        for process in beside:
            end(process)
    result["tests"] = counts(out / "tests.xml")
    host = json.loads(read) if (read := text_of(out / "host.json")) else {}
    found = figures(load(out / "bench.json"), load(out / "gpt2.json"), host.get("bound", {}))
    result["figures"] = [{**figure._asdict(), "met": figure.met} for figure in found]
    (out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result, out)
    (out / "gpu.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{out / 'gpu.md'}, {time.perf_counter() - begin:.0f} s")
    return int(any(map(failed, result["parts"])))


if __name__ == "__main__":
    raise SystemExit(main())
