"""Tune the kernels: time chunks, tiles, loads in flight, threads and registers other than in tuning.py.

    python -m kernels_bench.gpu.sweep --out build/gpu   # on a GPU, two minutes
    TRITON_INTERPRET=1 python -m kernels_bench.gpu.sweep --device cpu --divide 100000 --tensors 3  # a test

For each dtype the search changes one group of values at a time (tile, unroll and threads; registers; chunk;
finalize) and keeps the best so far. A candidate counts only if its norms are right. Its time is measured with
a CUDA graph, alternating with the current table.
Writes sweep.json and sweep.md; edit the table itself by hand.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

import torch

from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.kernels import tuning
from gradiometer.ops import launch_plans
from kernels_bench import machine, scripts
from kernels_bench.cases import CASES, shapes

if TYPE_CHECKING:
    import argparse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# name -> a function from an element's size in bytes to the elements of each tensor
LISTS = {
    "1 GiB": lambda itemsize: [2**30 // itemsize],
    "64 MiB": lambda itemsize: [2**26 // itemsize],
    "gpt2": lambda _: [math.prod(shape) for shape in shapes(CASES["gpt2"])],
    "2000 x 1 KiB": lambda itemsize: [1024 // itemsize] * 2000,
}
CHUNKS = (2**13, 2**14, 2**15, 2**16, 2**17)
UNROLLS, THREADS, REGISTERS = (1, 2, 4, 8), (64, 128, 256), (48, 64, 72, 80, 96, 128, 168)
FINALIZES = (
    (128, 32),
    (128, 64),
    (256, 64),
    (256, 128),
    (512, 64),
    (512, 128),
    (512, 256),
    (1024, 128),
    (1024, 256),
)
# bytes of a load
LOAD = 16
TURNS, SAMPLE_MS = 5, 3.0
# torch's own norm in fp64 is off by up to 4e-11
TOLERANCE = 1e-10


@contextmanager
def tuned(dtype: torch.dtype, change: dict):
    """Change the table in this context: ``chunk``, ``moments`` of this dtype, or ``finalize``."""
    before = {"chunk": tuning.CHUNK, "moments": tuning.MOMENTS[dtype], "finalize": tuning.FINALIZE}
    try:
        _set(dtype, **{**before, **change})
        yield
    finally:
        _set(dtype, **before)


def _set(dtype: torch.dtype, chunk: int, moments: tuning.Moments, finalize: tuning.Tiles) -> None:
    tuning.CHUNK = chunk
    tuning.MOMENTS[dtype] = moments
    tuning.FINALIZE = finalize
    launch_plans.clear()


def steps(dtype: torch.dtype):
    """Yield functions that take the best changes so far and return the changes to try."""
    moments, finalize, per_load = tuning.MOMENTS[dtype], tuning.FINALIZE, LOAD // dtype.itemsize
    shapes = [(threads * per_load, unroll, threads) for threads in THREADS for unroll in UNROLLS]
    yield lambda best: [
        best | {"moments": moments._replace(tile=tile, unroll=unroll, threads=threads)}
        for tile, unroll, threads in shapes
        if (tile, unroll, threads) != tuple(moments)[:3]
    ]
    yield lambda best: [
        best | {"moments": best.get("moments", moments)._replace(registers=registers)}
        for registers in REGISTERS
        if registers != moments.registers
    ]
    yield lambda best: [best | {"chunk": chunk} for chunk in CHUNKS if chunk != tuning.CHUNK]
    yield lambda best: [
        best | {"finalize": finalize._replace(tile=tile, threads=threads)}
        for tile, threads in FINALIZES
        if (tile, threads) != tuple(finalize)[:2]
    ]


def measure(tensors):
    return ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)


def prepare(tensors, norms, change: dict, device: str):
    """Check a candidate on one list; return a call that measures the list with it."""
    dtype = tensors[0].dtype
    with tuned(dtype, change):
        found = measure(tensors)[0][:, TENSORS.index["sumsq"]].sqrt()
        if not torch.all((found - norms).abs() <= TOLERANCE * norms):
            raise AssertionError("wrong norms")
        if device == "cpu":

            def call():
                with tuned(dtype, change):
                    measure(tensors)

            return call
        measure(tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = measure(tensors)
    # the outputs of a graph live as long as the graph
    return lambda kept=result: (graph.replay(), kept)[1]


def sample(call, device: str) -> float:
    """Return milliseconds a call."""
    count, elapsed = 1, 0.0
    while True:
        if device == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                call()
            elapsed = 1e3 * (time.perf_counter() - start)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        if elapsed >= SAMPLE_MS or count >= 4096:
            return elapsed / count
        count = min(4096, max(2 * count, math.ceil(SAMPLE_MS / max(elapsed / count, 1e-4))))


def compare(inputs: dict, dtype: torch.dtype, change: dict, options: argparse.Namespace) -> list[dict]:
    """Time one candidate against the current table, alternating, on every list; return a row for each."""
    rows = []
    for name, (tensors, norms) in inputs.items():
        row = {"list": name, **described(dtype, change)}
        try:
            calls = [prepare(tensors, norms, each, options.device) for each in ({}, change)]
            times = [[sample(call, options.device) for call in calls] for _ in range(options.turns)]
            base, own = (median(column) for column in zip(*times, strict=True))
            row |= {"ms": own, "table_ms": base, "ratio": median(b / a for a, b in times)}
        except Exception as error:  # noqa: BLE001 it may need too many registers; its row reports it
            row["error"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        rows.append(row)
    return rows


def described(dtype: torch.dtype, change: dict) -> dict:
    finalize = change.get("finalize", tuning.FINALIZE)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "chunk": change.get("chunk", tuning.CHUNK),
        **change.get("moments", tuning.MOMENTS[dtype])._asdict(),
        **{f"finalize_{field}": value for field, value in finalize._asdict().items()},
    }


def score(rows: list[dict]) -> float:
    """Return the geometric mean of the times relative to the table's; infinite if a list failed."""
    return math.inf if any("error" in row for row in rows) else geometric_mean(row["ratio"] for row in rows)


def make(dtype: torch.dtype, options: argparse.Namespace) -> dict:
    """Return list -> tensors and their norms in fp64."""
    inputs = {}
    for name, sizes in LISTS.items():
        # each tensor is aligned as an allocation is
        tensors = [
            torch.randn(-(-size // options.divide), device=options.device).to(dtype)
            for size in sizes(dtype.itemsize)[: options.tensors]
        ]
        norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors])
        inputs[name] = tensors, norms
    return inputs


def sweep(dtype: torch.dtype, deadline: float, options: argparse.Namespace) -> tuple[list[dict], dict]:
    """Search for one dtype. Returns all rows, and the best candidate with its score."""
    inputs, rows, best, lowest, whole = make(dtype, options), [], {}, 1.0, True
    for step in steps(dtype):
        for change in step(best):
            if time.perf_counter() > deadline:
                whole = False
                break
            found = compare(inputs, dtype, change, options)
            rows += found
            if score(found) < lowest:
                lowest, best = score(found), change
    return rows, {**described(dtype, best), "ratio": lowest, "is_table": not best, "whole": whole}


def markdown(result: dict) -> str:
    head = ("dtype", "", "chunk", "tile", "unroll", "threads", "registers", "finalize", "time / table's")
    lines = [machine.one_line(result["machine"]), "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for table, best in zip(result["table"], result["best"], strict=True):
        for row, name in ((table, "table"), (best, "best")):
            cells = [row["dtype"], name, *(row[key] for key in head[2:7])]
            cells += [f"{row['finalize_tile']} by {row['finalize_threads']}"]
            cells += [
                "1" if row is table else f"{best['ratio']:.3f}{'' if best['whole'] else ', not all tried'}"
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    failed = sum("error" in row for row in result["rows"])
    if not torch.cuda.is_available():
        lines += ["", "Interpreted, to test the code: these times say nothing about a GPU."]
    lines += ["", f"{len(result['rows'])} timings of candidates, {failed} of them failed."]
    return "\n".join(lines) + "\n"


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.sweep", __doc__)
    parser.add_argument("--device", default="cuda")
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    parser.add_argument("--dtypes", default=",".join(names), help="searched in this order")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the whole search")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--divide", type=int, default=1, help="divide the size of every tensor by this")
    parser.add_argument("--tensors", type=int, help="maximum number of tensors in a list")
    parser.add_argument("--out", type=Path, help="a folder for sweep.json and sweep.md")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no GPU here")
    if not ops.uses_kernels(device):
        parser.error(f"--device {options.device}: kernels do not run there; set TRITON_INTERPRET=1")
    if unknown := {*options.dtypes.split(",")} - {*names}:
        parser.error(f"--dtypes: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    dtypes = [names[name] for name in options.dtypes.split(",")]
    command = scripts.command_line("kernels_bench.gpu.sweep", argv)
    result = {"machine": machine.describe(), "command": command, "table": [], "rows": [], "best": []}
    torch.manual_seed(0)
    start = time.perf_counter()
    for i, dtype in enumerate(dtypes):
        # each dtype gets an equal share of the time, plus what earlier ones left
        rows, best = sweep(dtype, start + options.seconds * (i + 1) / len(dtypes), options)
        result["rows"] += rows
        result["table"].append(described(dtype, {}))
        result["best"].append(best)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "sweep.json").write_text(json.dumps(result, indent=2) + "\n")
            (options.out / "sweep.md").write_text(markdown(result))
    print(markdown(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
