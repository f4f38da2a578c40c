"""Run everything that needs a GPU, in parts; what ran on a GPU the least comes first.

    make gpu PY=python3                    # on a GPU machine with torch 2.11 or newer; needs no network
    python -m kernels_bench.gpu.run --out build/gpu --seconds 540
    python -m kernels_bench.gpu.run --out build/gpu --seconds 540 --from ranks

Each part is a process with a time limit, and prints as it runs. At its limit it is interrupted, and 10 s
later ended; its written results count, and the other parts still run. A part of tests that was cut says after
how many tests, and how many of them passed. With ``--seconds`` no part is started that could take longer than
that, but the benchmarks take the time that is left. The last lines name the parts that were cut, and the part
to go on with. ``--from`` and ``--only`` keep the results of earlier calls. After each part gpu.json and
gpu.md are written anew, with all figures so far and whether they meet their bounds; PART.log and PART.jsonl
are written as a part runs. The exit code is 1 if a test, a memory checker or a part failed, else 0: a part
that was cut without a failure, and a missed bound, are only reported. Without a GPU the same parts run with
small inputs on the CPU, and the tests on interpreted kernels, to test the scripts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from kernels_bench import machine, scripts
from kernels_bench.gpu import odd_sizes, progress
from kernels_bench.gpu.plan import CHECKERS, FOUND, Part, parts
from kernels_bench.scripts import ROOT

# seconds between an interrupt and the end
GRACE = 10.0
# bytes: the bounds apply to larger lists
LARGE = 256e6
# files that a run writes to its folder, besides logs
WRITTEN = [
    f"{name}.{kind}"
    for name in ("gpu", "bench", "gpt2", "sweep", "kinds/bench", "peers/bench")
    for kind in ("json", "md")
]
WRITTEN += ["host.json", "bench.png", "kinds/bench.png", "peers/bench.png"]
# A finding of a memory checker, in the log of one that was cut off before its summary. That the program did
# not end by itself is none.
FINDING = re.compile(
    r"^=+ *(Invalid|Misaligned|Uninitialized|Potential|Barrier|(Error|Warning): Race)", re.MULTILINE
)


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


def start(part: Part) -> subprocess.Popen:
    sources = scripts.environment(ROOT / "src", ROOT / "tests")
    sources.pop("TRITON_INTERPRET", None)
    env = {**sources, "PYTHONUNBUFFERED": "1", **part.env}
    # its own process group, so that its compiler processes end with it
    return subprocess.Popen(
        part.command,
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def tee(process: subprocess.Popen, log: Path) -> None:
    """Copy what a process prints to a file and to this process's output, as it comes."""
    with process.stdout, log.open("wb") as file:
        while block := os.read(process.stdout.fileno(), 2**16):
            file.write(block)
            file.flush()
            sys.stdout.write(block.decode(errors="replace"))
            sys.stdout.flush()


def end(process: subprocess.Popen) -> None:
    """Interrupt a process, so that it writes its results; later kill it and all that it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL or process.poll() is None:
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def run(part: Part, log: Path) -> dict:
    """Run one part; return its name, command, seconds, how it ended, and the counts of its tests."""
    print(f"\n== {part.name}: at most {part.seconds:.0f} s: {shlex.join(part.command)}", flush=True)
    begin = time.perf_counter()
    process = start(part)
    reader = threading.Thread(target=tee, args=(process, log))
    reader.start()
    ended = None
    try:
        status = process.wait(timeout=part.seconds)
        ended = "ok" if status == 0 else f"exit code {status}"
        if part.name in {*CHECKERS, "ncu"} and status not in {0, FOUND, odd_sizes.WRONG}:
            ended = f"does not run here ({ended})"
    except subprocess.TimeoutExpired:
        pass
    finally:
        end(process)
        reader.join()
    seconds = time.perf_counter() - begin
    result = {"part": part.name, "command": shlex.join(part.command), "seconds": seconds}
    if "--progress" in part.command:
        results = progress.read(log.with_suffix(".jsonl"))
        ended = ended or results.cut()
        result["tests"] = results.counts()
    elif ended is None:
        findings = len(FINDING.findall(text_of(log))) if part.name in CHECKERS else 0
        ended = f"cut off after {part.seconds:.0f} s" + f", {findings} findings" * bool(findings)
    print(f"== {part.name}: {seconds:.0f} s, {ended}", flush=True)
    return result | {"ended": ended}


def was_cut(part: dict) -> bool:
    return part["ended"].startswith("cut ")


def failed(part: dict) -> bool:
    """Return whether a part failed. One that was cut did only if there was a failure before."""
    if was_cut(part):
        tests = part.get("tests", {})
        return part["ended"].endswith("findings") or bool(tests.get("failed") or tests.get("errors"))
    return part["ended"].startswith("exit code")


def counts(parts: list[dict]) -> dict[str, int]:
    """Return the numbers of all tests that ran, and of those that passed and so on; empty without any."""
    found = [part["tests"] for part in parts if "tests" in part]
    return {name: sum(each[name] for each in found) for name in found[0]} if found else {}


def times_of(rows: list[dict]) -> dict[tuple[str, str], float]:
    return {(row["case"], row["provider"]): row["ms"] for row in rows if row["ms"] and not row["error"]}


def level_of(ms: dict[tuple[str, str], float]) -> tuple[str, str]:
    """Return our provider, and the suffix of the others': replayed graphs, or eager calls without a GPU."""
    has_graphs = any([provider == "ours-graph" for _, provider in ms])
    return ("ours-graph", "-graph") if has_graphs else ("ours-eager", "")


def ratio_of(ms: dict[tuple[str, str], float], case: str, ours: str, *others: str) -> float | None:
    """Return our time over that of the fastest of ``others``."""
    peers = [ms[case, other] for other in others if (case, other) in ms]
    return ms[case, ours] / min(peers) if peers and (case, ours) in ms else None


def figures(bench: list[dict], peers: list[dict], gpt2: list[dict], host: dict) -> list[Figure]:
    """Return the figures that have a bound, from the benchmarks' and GPT-2's rows, and from host.json.

    Times of the device are those of replayed graphs: the host alone is slower than the device.
    """
    ms = times_of(bench)
    mine, suffix = level_of(ms)
    large = [
        row for row in bench if row["provider"] == mine and (row["case"], mine) in ms and row["bytes"] > LARGE
    ]
    found = []
    for dtype in ("float32", "bfloat16"):
        shares = [
            (r["ceiling_share"], r["case"]) for r in large if r["dtype"] == dtype and r["ceiling_share"]
        ]
        share, where = min(shares, default=(None, ""))
        found.append(
            Figure(f"share of torch.sum's bandwidth, {dtype} above 256 MB", share, 0.95, False, where)
        )

    names = [row["case"] for row in large if row["dtype"] == "float32"]
    over = [(ratio_of(ms, case, mine, f"foreach{suffix}"), case) for case in names]
    ratio, where = max([pair for pair in over if pair[0]], default=(None, ""))
    found.append(Figure("time / _foreach_norm's, float32 above 256 MB", ratio, 1.05, True, where))
    ours, suffix = level_of(times_of(peers))
    compiled, eager = (f"inductor{suffix}", f"inductor-combo{suffix}"), (f"loop{suffix}",)
    for what, others, bound in (("compiled", compiled, 4.0), ("eager", eager, 10.0)):
        share = ratio_of(times_of(peers), "gpt2", ours, *others)
        found.append(
            Figure(
                f"times faster than all columns {what}", 1 / share if share else None, bound, False, "gpt2"
            )
        )
    found.append(
        Figure(
            "time / _foreach_norm's, 2000 tiny",
            ratio_of(ms, "2000x1k", "ours-eager", "foreach"),
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
    sections = {"doctor.log": "Versions", "ncu.log": "Nsight Compute"}
    for name, title in sections.items():
        if text := text_of(out / name):
            lines += [f"\n## {title}\n", "```text", text.strip(), "```"]
    titles = {"gpt2": "A training step of GPT-2", "bench": "Benchmark", "kinds/bench": "Kinds of measurement"}
    for name, title in {**titles, "peers/bench": "Other collectors", "sweep": "Tuning"}.items():
        if text := text_of(out / f"{name}.md"):
            lines += [f"\n## {title}\n", text.strip()]
    return "\n".join(lines) + "\n"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def load(path: Path) -> list[dict]:
    return json.loads(text)["rows"] if (text := text_of(path)) else []


def combine(result: dict, out: Path) -> str:
    """Write gpu.json and gpu.md from all that is in the folder; return the Markdown."""
    result["tests"] = counts(result["parts"])
    host = json.loads(read) if (read := text_of(out / "host.json")) else {}
    rows = [load(out / f"{name}.json") for name in ("bench", "peers/bench", "gpt2")]
    result["figures"] = [
        {**each._asdict(), "met": each.met} for each in figures(*rows, host.get("bound", {}))
    ]
    (out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = markdown(result, out)
    (out / "gpu.md").write_text(text, encoding="utf-8")
    return text


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.run", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--from", dest="first", metavar="PART", help="the first part; keep earlier results")
    parser.add_argument("--only", metavar="PART,...", help="these parts; keep the results of the others")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no part that may take longer")
    parser.add_argument("--sweep", action="store_true", help="also try other chunks, tiles and threads")
    options = parser.parse_args(argv)
    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out.resolve()
    if device == "cpu":
        print("There is no GPU here: this run tests the scripts, and measures nothing")
        out /= "rehearsal"
    listed = parts(out, device, sweep=options.sweep)
    names = [part.name for part in listed]
    only = options.only.split(",") if options.only else []
    for name in [*only, *filter(None, [options.first])]:
        if name not in names:
            parser.error(f"there is no part {name!r}; the parts here are {', '.join(names)}")
    listed = listed[names.index(options.first) if options.first else 0 :]
    listed = [part for part in listed if not only or part.name in only]
    command = scripts.command_line("kernels_bench.gpu.run", argv)
    result = {"machine": machine.describe(), "command": command, "parts": []}
    if (options.first or only) and (read := text_of(out / "gpu.json")):
        # parts that run again below are replaced
        again = {part.name for part in listed}
        result["parts"] = [part for part in json.loads(read)["parts"] if part["part"] not in again]
    elif out.exists():
        # other files stay
        for path in [out / name for part in names for name in (f"{part}.log", f"{part}.jsonl")]:
            path.unlink(missing_ok=True)
        for name in WRITTEN:
            (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    print(machine.one_line(result["machine"]), flush=True)
    rest = list(listed)
    while rest:
        part = rest[0]
        left = options.seconds - (time.perf_counter() - begin)
        # the first part of a call runs anyway
        if len(rest) < len(listed) and left < (part.least or part.seconds):
            break
        if part.least is not None:
            part = part._replace(seconds=max(part.least, min(part.seconds, left)))
        del rest[0]
        result["parts"].append(run(part, out / f"{part.name}.log"))
        text = combine(result, out)
    print(f"\n{text}\n{out / 'gpu.md'}, {time.perf_counter() - begin:.0f} s")
    for part in filter(was_cut, result["parts"]):
        print(f"{part['part']}: {part['ended']}; run it again with --only {part['part']}")
    if rest:
        print(f"{len(rest)} parts are left; go on with --from {rest[0].name}")
    return int(any(map(failed, result["parts"])))


if __name__ == "__main__":
    raise SystemExit(main())
