"""Run everything that needs a GPU, in parts; what ran on a GPU the least comes first.

    make gpu PY=python3                    # on a GPU machine with torch 2.11 or newer; needs no network
    python -m kernels_bench.gpu.run --out build/gpu --seconds 540
    python -m kernels_bench.gpu.run --out build/gpu --seconds 540 --from ranks

Each part is a process with a time limit, and prints as it runs. At its limit it is interrupted, and 10 s
later ended; its written results count, and the other parts still run. A part of tests that was cut says after
how many tests, and how many of them passed. With ``--seconds`` no part is started that could take longer than
that, but the benchmarks take the time that is left. The last lines name the parts that were cut, and the part
to go on with. ``--from`` keeps the results of earlier calls. After each part gpu.json and gpu.md are written
anew, with all figures so far and whether they meet their bounds; PART.log and PART.jsonl are written as a
part runs. The exit code is 1 if a test, a memory checker or a part failed, else 0: a part that was cut off
without a failure, and a missed bound, are only reported. Without a GPU the same parts run with small inputs
on the CPU, and the tests on interpreted kernels, to test the scripts.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
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
from kernels_bench.scripts import ROOT

# seconds between an interrupt and the end
GRACE = 10.0
# the checkers' exit code if they found something
FOUND = 9
# bytes: the bounds apply to larger lists
LARGE = 256e6
# short cases and those with a bound come first, because the last ones may be cut off
CASES = "one-1.5e9,2000x1m,2000x1k,gpt2,llama-1b,moe,misaligned,beyond-2^31"
PROVIDERS = "ceiling,ours-eager,ours-graph,ours-pairs,foreach,foreach64,foreach-graph,foreach64-graph"
# they compile a long list, so they come last
PEERS = "ours-eager,ours-graph,loop,loop-graph,inductor,inductor-graph,inductor-combo,inductor-combo-graph"
# files that a run writes to its folder, besides logs
WRITTEN = [
    f"{name}.{kind}" for name in ("gpu", "bench", "gpt2", "sweep", "peers/bench") for kind in ("json", "md")
]
WRITTEN += ["host.json", "bench.png", "peers/bench.png"]
SMALL = "--layers 1 --width 32 --heads 2 --vocabulary 64 --context 16 --batch 2 --seconds 0.2"
METRICS = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
METRICS += ",sm__inst_executed.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread"

# tools of compute-sanitizer, and their time limits in seconds
CHECKERS = {"memcheck": 150, "racecheck": 150, "initcheck": 120}
# a finding of theirs, in the log of one that was cut off before its summary
FINDING = re.compile(
    r"^=+ *(Invalid|Error|Warning|Uninitialized|Race|Potential|Unused|Barrier)", re.MULTILINE
)
# The tests by name of the part, see `tests`: marker, seconds, and files. Those that compile with Inductor
# are parts of their own. The first ones have run on no GPU; the last ones have.
NEW = {
    "taps": ("not compiles", 150, "test_gpu_taps.py"),
    "compiled-taps": ("compiles", 240, "test_gpu_taps.py"),
    "pairs": ("not compiles", 90, "test_gpu_pairs.py"),
    "exponents": ("not compiles", 90, "test_gpu_exponents.py"),
    "clip": ("not compiles", 90, "test_gpu_adaptive_clip.py"),
    "noise-scale": ("not compiles", 60, "test_gpu_noise_scale.py"),
}
RECORDED = {
    "captures": ("not compiles", 120, "test_gpu_captures.py"),
    "ranks": ("not compiles", 180, "test_gpu_ranks.py"),
    "compiled-pairs": ("compiles", 120, "test_gpu_pairs.py"),
    "compiled-exponents": ("compiles", 120, "test_gpu_exponents.py"),
    "compiled-clip": ("compiles", 150, "test_gpu_adaptive_clip.py"),
    "compiled-noise-scale": ("compiles", 90, "test_gpu_noise_scale.py"),
    "compiled-captures": ("compiles", 120, "test_gpu_captures.py"),
}
KNOWN = {
    "kernels": ("not compiles", 240, "test_gpu.py"),
    "recorder": ("not compiles", 60, "test_gpu_recorder.py"),
    "async": ("not compiles", 120, "test_gpu_async.py"),
    "devices": ("not compiles", 60, "test_gpu_devices.py"),
    "compiled-kernels": ("compiles", 240, "test_gpu.py"),
    "compiled-recorder": ("compiles", 120, "test_gpu_recorder.py"),
    "compiled-others": ("compiles", 120, "test_gpu_async.py", "test_gpu_devices.py", "test_gpu_ranks.py"),
}


# the command `gradiometer doctor` needs typer and rich
DOCTOR = "import json; from gradiometer.cli.doctor import examine; "
DOCTOR += (
    "found = examine(); print(json.dumps(found.to_dict(), indent=1)); raise SystemExit(bool(found.problems))"
)


class Part(NamedTuple):
    """A command, and its time limit in seconds; with ``least``, that many seconds are enough to start it."""

    name: str
    command: list[str]
    seconds: float
    env: dict[str, str] = {}  # noqa: RUF012 never written to
    least: float | None = None


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


def parts(out: Path, device: str, *, sweep: bool = False) -> list[Part]:
    """Return the parts in the order in which they run; on the CPU with small inputs."""
    small = device == "cpu"
    on = ("--device", device)

    def script(name: str, *arguments: object) -> list[str]:
        return scripts.command(f"kernels_bench{name}", *on, *arguments)

    def some(listed: dict[str, tuple]) -> list[Part]:
        return [
            tests(name, out, marker, seconds, *files, device=device)
            for name, (marker, seconds, *files) in listed.items()
        ]

    odd = script(".gpu.odd_sizes", *(["--small"] if small else []))
    monitor = script(".gpu.probe", "monitor", "--out", out, *(["--steps", 20] if small else []))
    listed = [
        Part("doctor", [sys.executable, "-c", DOCTOR], 60),
        *some(NEW),
        Part("odd-sizes", odd, 120),
    ]
    if sanitizer := shutil.which("compute-sanitizer"):
        for tool, seconds in CHECKERS.items():
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *odd]
            # with the caching allocator a read beyond a tensor would read its neighbor, undetected
            listed.append(Part(tool, command, seconds, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    listed += [
        *some(RECORDED),
        Part("replays", script(".gpu.probe", "captures"), 90),
        Part("monitor", monitor, 120),
        *some(KNOWN),
    ]
    bench = ["--cases", "64m-fp32" if small else CASES, "--seconds", 0.1 if small else 1, "--no-memory"]
    listed.append(Part("bench", script("", *bench, "--providers", PROVIDERS, "--out", out), 240, least=60))
    if ncu := shutil.which("ncu"):
        one = script("", "--cases", bench[1].split(",")[0], "--providers", "ours-eager", "--seconds", 0.1)
        one += ["--out", str(out / "ncu")]
        # the clocks stay as they are: the machine may be shared
        options = [
            "--clock-control",
            "none",
            "--kernel-name",
            "regex:moments",
            "--launch-count",
            "2",
            "--metrics",
            METRICS,
        ]
        listed.append(Part("ncu", [ncu, *options, *one], 90, least=45))
    host = script(".host_path", "--json", out / "host.json", *(["--rounds", 2] if small else []))
    gpt2 = [*SMALL.split(), "--modes", "eager"] if small else ["--modes", "compiled,reduce-overhead"]
    peers = ["--cases", "2000x1k" if small else "gpt2", "--seconds", 0.1 if small else 1, "--no-memory"]
    peers += ["--providers", "ours-eager,loop" if small else PEERS, "--out", out / "peers"]
    listed += [
        Part("host", host, 40),
        Part("gpt2", script(".gpu.gpt2", *gpt2, "--limit", 180, "--out", out), 240, least=120),
        Part("peers", script("", *peers), 240, least=90),
    ]
    if sweep:
        few = ["--divide", 1_000_000, "--tensors", 3, "--turns", 1] if small else []
        listed.append(Part("sweep", script(".gpu.sweep", "--seconds", 240, "--out", out, *few), 300))
    return listed


def tests(name: str, out: Path, marker: str, seconds: float, *files: str, device: str = "cuda") -> Part:
    """Return a part that runs the tests of files in one process, and names each before it runs."""
    folder = ROOT / "tests" / "gpu"
    # a configuration of its own, since the project's needs plugins and the latest pytest
    command = [sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("pytest.ini"))]
    command += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-v", "--tb=short", "--durations=5"]
    command += ["-p", "kernels_bench.gpu.progress", "--progress", str(out / f"{name}.jsonl")]
    command += ["-m", f"gpu and {marker}", *[str(folder / file) for file in files]]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if device == "cpu":
        env |= {"TRITON_INTERPRET": "1", "GPU_TESTS_DEVICE": "cpu", "HYPOTHESIS_PROFILE": "ci"}
        seconds *= 4
    return Part(name, command, seconds, env)


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
    titles = {"gpt2": "A training step of GPT-2", "bench": "Benchmark", "peers/bench": "Other collectors"}
    for name, title in {**titles, "sweep": "Tuning"}.items():
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
    if options.first is not None and options.first not in names:
        parser.error(f"--from {options.first}: the parts here are {', '.join(names)}")
    first = 0 if options.first is None else names.index(options.first)
    command = scripts.command_line("kernels_bench.gpu.run", argv)
    result = {"machine": machine.describe(), "command": command, "parts": []}
    if first and (read := text_of(out / "gpu.json")):
        # parts that run again below are replaced
        result["parts"] = [part for part in json.loads(read)["parts"] if part["part"] not in names[first:]]
    elif out.exists():
        # other files stay
        for path in [out / name for part in names for name in (f"{part}.log", f"{part}.jsonl")]:
            path.unlink(missing_ok=True)
        for name in WRITTEN:
            (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    print(machine.one_line(result["machine"]), flush=True)
    rest = listed[first:]
    while rest:
        part = rest[0]
        left = options.seconds - (time.perf_counter() - begin)
        # the first part of a call runs anyway
        if rest != listed[first:] and left < (part.least or part.seconds):
            break
        if part.least is not None:
            part = part._replace(seconds=max(part.least, min(part.seconds, left)))
        del rest[0]
        result["parts"].append(run(part, out / f"{part.name}.log"))
        text = combine(result, out)
    print(f"\n{text}\n{out / 'gpu.md'}, {time.perf_counter() - begin:.0f} s")
    for part in filter(was_cut, result["parts"]):
        print(f"{part['part']}: {part['ended']}; run it again with --from {part['part']}")
    if rest:
        print(f"{len(rest)} parts are left; go on with --from {rest[0].name}")
    return int(any(map(failed, result["parts"])))


if __name__ == "__main__":
    raise SystemExit(main())
