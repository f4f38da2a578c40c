"""The parts of `make gpu`: commands with time limits, in the order in which they run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from kernels_bench import scripts
from kernels_bench.scripts import ROOT

# the checkers' exit code if they found something
FOUND = 9
# short cases and those with a bound come first, because the last ones may be cut off
CASES = "one-1.5e9,2000x1m,2000x1k,gpt2,llama-1b,moe,misaligned,beyond-2^31"
PROVIDERS = "ceiling,ours-eager,ours-graph,ours-pairs,foreach,foreach64,foreach-graph,foreach64-graph"
# each kind of measurement, beside a replayed `torch.sum` over the same bytes
KINDS = "ceiling-graph,ours-graph,ours-once-graph,ours-fingerprint-graph,ours-pairs-graph,ours-updates-graph"
KINDS += ",ours-exponents-graph,ours-taps-graph,ours-clip-graph"
KIND_CASES = "gpt2,gpt2-bf16,gpt2-fp16,llama-1b,activation-fp32,activation-bf16,activation-fp16"
# they compile a long list, so they come last
PEERS = "ours-eager,ours-graph,loop,loop-graph,inductor,inductor-graph,inductor-combo,inductor-combo-graph"
SMALL = "--layers 1 --width 32 --heads 2 --vocabulary 64 --context 16 --batch 2 --seconds 0.2"
# blocks of GPT-2 124M; decides whether taps are fused by default
FUSED = "--mode reduce-overhead --layers 4 --width 768 --context 1024 --batch 8 --rounds 30"
METRICS = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
METRICS += ",sm__inst_executed.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread"

# tools of compute-sanitizer, and their time limits in seconds
CHECKERS = {"memcheck": 180, "racecheck": 180, "initcheck": 150}
# The tests by name of the part, see `tests`: marker, seconds, and files. Those that compile with Inductor
# are parts of their own. NEW and RECORDED ones have run on no GPU, KNOWN ones have.
NEW = {
    "taps": ("not compiles", 150, "taps"),
    "compiled-taps": ("compiles", 240, "taps"),
    "pairs": ("not compiles", 150, "pairs"),
    "exponents": ("not compiles", 120, "exponents"),
    "lines": ("not compiles", 60, "lines"),
    "clip": ("not compiles", 150, "adaptive_clip", "noise_scale"),
}
RECORDED = {
    "captures": ("not compiles", 120, "captures"),
    "ranks": ("not compiles", 180, "ranks"),
    "compiled-new": ("compiles", 300, "captures", "adaptive_clip", "noise_scale", "exponents", "pairs"),
}
# in the folders of what they test
ELSEWHERE = ("stats/test_report.py", "inputs/test_inputs.py")
KNOWN = {
    "kernels": ("not compiles", 240, ""),
    "others": ("not compiles", 180, "recorder", "async", "devices", *ELSEWHERE),
    "compiled-kernels": ("compiles", 240, ""),
    "compiled-others": ("compiles", 240, "recorder", "async", "devices", "ranks"),
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
        Part("odd-sizes", odd, 180),
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
    kinds = ["--cases", "64m-fp32" if small else KIND_CASES, "--seconds", 0.1 if small else 1, "--no-memory"]
    kinds += ["--providers", "ceiling,ours-fingerprint" if small else KINDS, "--out", out / "kinds"]
    listed.append(Part("kinds", script("", *kinds), 240, least=60))
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
    fused = ["--layers", 1, "--width", 64, "--context", 16, "--rounds", 1] if small else FUSED.split()
    peers = ["--cases", "2000x1k" if small else "gpt2", "--seconds", 0.1 if small else 1, "--no-memory"]
    peers += ["--providers", "ours-eager,loop" if small else PEERS, "--out", out / "peers"]
    listed += [
        Part("host", host, 40),
        Part("gpt2", script(".gpu.gpt2", *gpt2, "--limit", 180, "--out", out), 240, least=120),
        Part("fused-taps", script(".monitoring.fused_taps", *fused), 300, least=150),
        Part("peers", script("", *peers), 240, least=90),
    ]
    if sweep:
        few = ["--divide", 1_000_000, "--tensors", 3, "--turns", 1] if small else []
        listed.append(Part("sweep", script(".gpu.sweep", "--seconds", 240, "--out", out, *few), 300))
    return listed


def tests(name: str, out: Path, marker: str, seconds: float, *files: str, device: str) -> Part:
    """Return a part that runs the tests of ``test_gpu_<file>.py``, or of other files, in one process."""
    # a configuration of its own, since the project's needs plugins and the latest pytest
    command = [sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("pytest.ini"))]
    command += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-v", "--tb=short", "--durations=5"]
    command += ["-p", "kernels_bench.gpu.progress", "--progress", str(out / f"{name}.jsonl")]
    paths = [
        file if file.endswith(".py") else f"gpu/{'_'.join(['test_gpu', *filter(None, [file])])}.py"
        for file in files
    ]
    command += ["-m", f"gpu and {marker}", *[str(ROOT / "tests" / path) for path in paths]]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if device == "cpu":
        env |= {
            "TRITON_INTERPRET": "1",
            "GPU_TESTS_DEVICE": "cpu",
            "HYPOTHESIS_PROFILE": "ci",
            "OMP_NUM_THREADS": "1",
        }
        seconds *= 4
    return Part(name, command, seconds, env)
