"""The eager CPU path against its peers, in one run: times as ratios, and peak extra memory.

    python kernels_bench/cpu_ratios.py            # the table; exit code 1 where a bound is missed
    python kernels_bench/cpu_ratios.py --memory   # peak resident growth alone, as JSON

Every contender runs once in each round, so that a noisy neighbour meets them all; medians are
compared. `foreach64` computes the L2 norm alone, squaring in fp64 like us; `flatten` is the collector
that copies all gradients into one tensor and reads it once a statistic.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import gradiometer as gm

MIB = 2**20
BOUND_MEMORY = 4.0


def foreach64(tensors):
    return torch._foreach_norm(tensors, 2, dtype=torch.float64)


def flatten(tensors):
    flat = torch.cat([t.reshape(-1) for t in tensors])
    zeros = (flat == 0).to(torch.float64).mean()
    nans = flat.isnan().sum()
    infs = flat.isinf().sum()
    norms = torch.stack([t.double().norm() for t in tensors])
    return zeros, nans, infs, norms, flat.abs().max(), flat.double().norm()


def ours(tensors):
    return gm.collect(tensors)


# name, tensors, elements each, dtype, share of zeros; then bounds: times foreach64, and flatten over ours
CASES = [
    ("64M in 16 tensors", 16, 2**22, torch.float32, 0.0, 2.0, 8.0),
    ("64M in 16 tensors", 16, 2**22, torch.bfloat16, 0.0, 2.0, 8.0),
    ("64M in 16, 1 % zeros", 16, 2**22, torch.float32, 0.01, 2.0, None),
    ("1000 x 1000", 1000, 1000, torch.float32, 0.0, 3.0, None),
    ("1000 x 1000", 1000, 1000, torch.bfloat16, 0.0, 3.0, None),
]


def make(count, size, dtype, zeros):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]
    if zeros:
        for tensor in tensors:
            tensor[torch.rand(size, generator=generator) < zeros] = 0
    return tensors


def medians(contenders, tensors, rounds):
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run(tensors)
            times[name].append(time.perf_counter() - start)
    # the first round warms up
    return {name: statistics.median(values[1:]) * 1e3 for name, values in times.items()}


def resident(field):
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024


def peak_growth():
    """Measure peak resident growth of one collection, in MiB, for a large and for a long list of tensors."""
    grown = {}
    cases = {"64M fp32": (16, 2**22, torch.float32), "64M bf16": (16, 2**22, torch.bfloat16)}
    cases |= {"100M fp32": (100, 10**6, torch.float32), "1000 x 1000": (1000, 1000, torch.float32)}
    # code and threads are there before the measured call, not because of it
    gm.collect(make(3, 10**5, torch.float32, 0.5)).materialize()
    for name, (count, size, dtype) in cases.items():
        tensors = make(count, size, dtype, 0.0)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before = resident("VmRSS")
        gm.collect(tensors)
        grown[name] = (resident("VmHWM") - before) / MIB
    return grown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="print peak resident growth as JSON and stop")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds a case")
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(peak_growth()))
        return 0

    from rich.console import Console  # not needed, and not there, where memory alone is measured
    from rich.table import Table

    threads = torch.get_num_threads()
    table = Table(title=f"eager CPU path, torch {torch.__version__}, {threads} threads; medians in ms")
    for column in ("case", "dtype", "ours", "foreach64", "flatten", "ours / foreach64", "flatten / ours"):
        table.add_column(column, justify="left" if column in {"case", "dtype"} else "right")
    met = True
    contenders = {"ours": ours, "foreach64": foreach64, "flatten": flatten}
    for name, count, size, dtype, zeros, most, least in CASES:
        ms = medians(contenders, make(count, size, dtype, zeros), args.rounds + 1)
        over, under = ms["ours"] / ms["foreach64"], ms["flatten"] / ms["ours"]
        met &= over <= most and (least is None or under >= least)
        table.add_row(
            name,
            str(dtype).removeprefix("torch."),
            *(f"{ms[key]:.2f}" for key in contenders),
            f"{over:.2f} (at most {most:g})",
            f"{under:.1f}" + ("" if least is None else f" (at least {least:g})"),
        )
    console = Console(width=120)
    console.print(table)

    # in a process of its own: peaks before it would hide the growth
    output = subprocess.run(
        [sys.executable, __file__, "--memory"], check=True, capture_output=True, text=True
    ).stdout
    for name, grown in json.loads(output).items():
        met &= grown <= BOUND_MEMORY
        console.print(f"peak resident growth, {name}: {grown:.2f} MiB (at most {BOUND_MEMORY:g})")
    console.print("every bound met" if met else "[bold red]a bound was missed")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
