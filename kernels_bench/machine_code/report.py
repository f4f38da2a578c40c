"""Report the machine code of the kernels, and the resulting bound for each GPU; no GPU is needed.

    python -m kernels_bench.machine_code.report [--out build/machine-code]
    python -m kernels_bench.machine_code.report --targets sm_90,sm_100 --dtypes float32 --kernels moments
    python -m kernels_bench.machine_code.report --targets sm_90 --sass build/sass   # writes the disassembly
    python -m kernels_bench.machine_code.report --join A/report.json B/report.json  # compares two compilers

Prints the work of the main loops, the predicted bounds, and the rates they use; writes the same to
`report.json` and `report.md`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

from kernels_bench import scripts
from kernels_bench.machine_code.latency import flight
from kernels_bench.machine_code.roofline import GPUS, binding, times
from kernels_bench.machine_code.tables import joined, markdown, show

# the moments kernel without and with fingerprints, the one that merges, the same for pairs of tensors, and
# those for counts by magnitude, for activations, for rows and columns, and for projections
KERNELS = (
    "moments",
    "fingerprint",
    "finalize",
    "pairs",
    "pairs+g",
    "finalize pairs",
    "exponents",
    "activation",
    "lines",
    "projections",
)
# those that read tensors, and how many
READS = dict.fromkeys(("moments", "fingerprint", "exponents", "activation", "lines", "projections"), 1) | {
    "pairs": 2,
    "pairs+g": 3,
}


def code_rows(target: str, dtypes: list[str], kernels: list[str], sass: Path | None) -> list[dict]:
    """Compile for one target; return a row for each variant, with an error if it does not compile."""
    import torch

    from kernels_bench.machine_code import compile as compiler

    rows = []
    for variant in compiler.variants(target, [getattr(torch, dtype) for dtype in dtypes]):
        if variant.kernel not in kernels:
            continue
        row = {"target": target, "kernel": variant.kernel, "dtype": compiler.short(variant.dtype)}
        row["variant"] = variant.note
        try:
            code = variant.launch.compile(target)
            row |= measures(code, variant.tensors * variant.dtype.itemsize)
            row["threads"] = variant.launch.kwargs["num_warps"] * compiler.gpu_target(target).warp_size
        except Exception as error:  # noqa: BLE001 a compiler may not know a target; other rows count
            lines = str(error).strip().splitlines() or [""]
            rows.append(row | {"error": f"{type(error).__name__}: {lines[0]}"})
            continue
        rows.append(row)
        if sass:
            name = " ".join([target, row["kernel"], row["dtype"], variant.note]).strip()
            (sass / f"{name.replace(' ', '-')}.s").write_text(code.marked)
    return rows


def in_own_process(target: str, dtypes: list[str], kernels: list[str], sass: Path | None) -> list[dict]:
    """Run `code_rows` in a separate process: LLVM aborts the process on an unsupported operation."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(code_rows, target, dtypes, kernels, sass).result()
        except BrokenProcessPool:
            error = "the compiler ended the process; its message is above"
            return [{"target": target, "kernel": "", "dtype": "", "variant": "", "error": error}]


def measures(code, itemsize: int) -> dict:
    """Return a row's figures: the main loop's per element, and the whole kernel's.

    ``itemsize``: the bytes of an element, or of a pair's elements together.
    """
    loop = code.main_loop
    elements = loop.elements(itemsize)
    return {
        "loop": len(loop.opcodes),
        "elements": elements,
        "instructions": len(loop.opcodes) / elements,
        "slots": loop.slots / elements,
        "nops": loop.count(r"NOP|s_nop") / elements,
        "fp64": (loop.fp64_arithmetic + loop.fp64_comparisons) / elements,
        "conversions": loop.conversions / elements,
        "reads_ahead": loop.count("LDGSTS") > 0,
        "loads": {str(size): number for size, number in sorted(Counter(loop.loads).items())},
        "registers": code.registers,
        "spills": code.spills,
        "stack": code.stack,
        "shared": code.shared,
        "code": len(code.opcodes),
    }


def bound_rows(rows: list[dict]) -> list[dict]:
    """Predict the time of each dtype's kernels on each GPU whose target was compiled."""
    first = {}
    for row in rows:
        if row["kernel"] in READS and "error" not in row:
            first.setdefault((row["target"], row["dtype"], row["kernel"]), row)
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    bounds = []
    for gpu in GPUS:
        for (dtype, size), (kernel, tensors) in product(itemsize.items(), READS.items()):
            if row := first.get((gpu.target, dtype, kernel)):
                seconds = times(gpu, size * tensors, row["slots"], row["fp64"], row["conversions"])
                rate = size * tensors * 1e9 / max(seconds.values())
                found = flight(gpu, row)
                others = max(value for name, value in seconds.items() if name != "memory")
                bounds.append(
                    {"gpu": gpu.name, "target": gpu.target, "kernel": kernel, "dtype": dtype}
                    | {"bound": binding(seconds)}
                    | {"milliseconds": {name: 1e3 * value for name, value in seconds.items()}}
                    | {"bytes_per_second": rate, "share": rate / gpu.bandwidth}
                    # below this clock, memory bandwidth is no longer the bottleneck
                    | {"clock_needed": gpu.clock * others / seconds["memory"]}
                    | {"flight": found and found._asdict()}
                )
    return bounds


def versions(targets: list[str]) -> dict[str, str]:
    import torch
    import triton

    from kernels_bench.machine_code import compile as compiler

    named = {"torch": torch.__version__, "triton": triton.__version__}
    return named | {target: compiler.assembler(target) for target in targets}


def chosen(text: str, known: tuple[str, ...], what: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"machine_code.report: unknown {what} {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def main() -> int:
    parser = scripts.parser("kernels_bench.machine_code.report", __doc__)
    parser.add_argument("--out", type=Path, default=Path("build/machine-code"), help="folder of the report")
    parser.add_argument("--targets", help="like sm_90,gfx942; all by default")
    parser.add_argument("--dtypes", help="like float32,bfloat16; all by default")
    parser.add_argument("--kernels", help="like moments; all by default")
    parser.add_argument("--sass", type=Path, help="folder for each variant's code; > marks the main loop")
    parser.add_argument("--join", type=Path, nargs="+", help="report.json of several compilers, to compare")
    args = parser.parse_args()
    if missing := [str(path) for path in args.join or () if not path.is_file()]:
        sys.exit(f"machine_code.report: no report at {', '.join(missing)}; write one with --out")
    if args.join:
        try:
            print(joined([json.loads(path.read_text()) for path in args.join]))
        except (ValueError, KeyError, TypeError):
            sys.exit("machine_code.report: --join takes the files report.json that --out has written")
        return 0
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("machine_code.report: unset TRITON_INTERPRET; interpreted kernels have no machine code")

    from kernels_bench.machine_code import compile as compiler

    targets = chosen(args.targets or ",".join(compiler.TARGETS), compiler.TARGETS, "target")
    known = tuple(map(compiler.short, compiler.DTYPES))
    dtypes = chosen(args.dtypes or ",".join(known), known, "dtype")
    kernels = chosen(args.kernels or ",".join(KERNELS), KERNELS, "kernel")
    for folder in filter(None, (args.out, args.sass)):
        folder.mkdir(parents=True, exist_ok=True)

    alone = partial(in_own_process, dtypes=dtypes, kernels=kernels, sass=args.sass)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rows = [row for part in threads.map(alone, targets) for row in part]
    report = {"versions": versions(targets), "code": rows, "bounds": bound_rows(rows)}
    report["rates"] = [asdict(gpu) for gpu in GPUS]
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "report.md").write_text(markdown(report))
    show(report)
    print(f"written: {args.out / 'report.json'}, {args.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
