"""Measure the run record: speed of writing and reading, pauses of other threads, bytes per tensor and step.

    python -m kernels_bench.monitoring.run_record                     # 1000 tensors, 2000 steps
    python -m kernels_bench.monitoring.run_record --check --json PATH # exit code 1 if a bound is missed

The script writes random numbers, and those of a small transformer that it trains; the real numbers take
less space on disk. Times are of one core: one thread of torch and one of pyarrow. CPU time is the cost
of writing for a training process; wall time also includes the wait for the disk. A pause is how long a
thread that only reads the clock is stopped while another one writes 50 steps/s. The interpreter switches
threads after 5 ms, so a longer pause means that the GIL was held. On Linux a pause excludes the
wait for a core.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.recorder import Catalog, RunInfo, StepRecord, Table
from gradiometer.recorder.recorder import Recorder
from gradiometer.runs.parquet import to_parquet
from gradiometer.runs.reader import read_run
from gradiometer.runs.schema_table import schema_table
from gradiometer.runs.writer import RunRecord
from kernels_bench import scripts

RATE = 50  # steps/s, of 1000 tensors
# the largest share of a core for writing at RATE; the most seconds for reading a matrix of 1000 x 5000
BOUND_SHARE, BOUND_MATRIX = 0.5, 2.0


def made_up(tensors, steps):
    """Return records of random numbers."""
    names = tuple([f"model.layers.{i}.attention.weight" for i in range(tensors)])
    catalog = Catalog.of(names, ((64, 64),) * tensors, ("float32",) * tensors)
    random = torch.Generator().manual_seed(0)
    values = torch.zeros((min(steps, 256), tensors, TENSORS.width), dtype=torch.float64)
    values[..., TENSORS.index["numel"]] = 4096
    for name in ("sumsq", "sum", "abs_max"):
        values[..., TENSORS.index[name]].normal_(generator=random).abs_()
    records = []
    for step in range(steps):
        kept, flags = values[step % len(values)].clone(), torch.zeros(tensors, dtype=torch.int32)
        tables = {"grads": Table(catalog.kinds["grads"], catalog.parameters, kept, flags)}
        scalars = {"loss": 1 / (1 + step), "lr": 1e-3}
        records.append(StepRecord(step, 1e9 + step, scalars, catalog, tables))
    return records


def trained(steps):
    """Return records of gradients and weights of a transformer that learns to copy."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(32, 32), nn.TransformerEncoder(layer, 4), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    recorder = Recorder(model, weights=True, capacity=steps)
    losses = []
    for _ in range(steps):
        x = torch.randint(32, (8, 16))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        recorder.record()
        optimizer.step()
        recorder.advance()
        losses.append(loss.item())
    return [
        replace(r, time=1e9 + r.step, scalars={"loss": loss})
        for r, loss in zip(recorder.read(), losses, strict=True)
    ]


def start(path, records, **options):
    sink = RunRecord(path, **options)
    catalog = records[0].catalog
    sink.start(RunInfo(catalog, DEFAULT_THRESHOLDS, 1, 64, "Bench", 1e9, records[0].step, {}, "cpu"))
    return sink


def write(path, records, batch=16, **options):
    """Return wall and CPU seconds, and bytes, for writing all records."""
    sink = start(path, records, **options)
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(0, len(records), batch):
        sink.write(records[i : i + batch], [])
    sink.close()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = {
        table: sum(file.stat().st_size for file in (path / table).iterdir()) for table in ("steps", "tensors")
    }
    return {"wall_s": wall, "cpu_s": cpu, "bytes": size, "files": 2 * len(list((path / "steps").iterdir()))}


def cost(path, records):
    """Return the figures for writing these records."""
    found = write(path, records, segment_seconds=math.inf)
    rows = len(records) * records[0].catalog.num_tensors
    per_step = found["cpu_s"] / len(records)
    return found | {
        "steps": len(records),
        "rows_per_step": records[0].catalog.num_tensors,
        "steps_per_cpu_s": 1 / per_step,
        "steps_per_wall_s": len(records) / found["wall_s"],
        "bytes_per_row": found["bytes"]["tensors"] / rows,
        "bytes_per_step": found["bytes"]["steps"] / len(records),
    }


def share(path, records):
    """Return the share of a core for writing at RATE, including rewriting of open segments."""
    sink = start(path, records)
    begin, cpu = time.perf_counter(), time.process_time()
    for i, record in enumerate(records):
        time.sleep(max(begin + i / RATE - time.perf_counter(), 0))
        sink.write([record], [])
    taken = (time.process_time() - cpu) / (time.perf_counter() - begin)
    sink.close()
    return taken


def pauses(seconds, work=None):
    """Return the longest gaps, in ms, between two clock reads while ``work`` runs in another thread."""
    thread = threading.Thread(target=work or (lambda: time.sleep(seconds)))
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path("/proc/thread-self/schedstat").open("rb", buffering=0))
        except OSError:
            file = None
        thread.start()
        gaps, last, waited = [], *now(file)
        while thread.is_alive():
            here, queued = now(file)
            # less the wait for a core
            gaps.append((here - last) - (queued - waited))
            last, waited = here, queued
    return [gap * 1e3 for gap in sorted(gaps, reverse=True)[:5]]


def now(file):
    """Return the time, and this thread's total wait for a core so far, in s."""
    queued = int(os.pread(file.fileno(), 100, 0).split()[1]) * 1e-9 if file else 0.0
    return time.perf_counter(), queued


def reading(path):
    """Return the seconds of each way to read, the best of three."""
    run = read_run(path)
    steps, names = len(run.steps), run.catalog.names
    asks = {
        "matrix_norm": lambda: read_run(path).matrix("norm"),
        "matrix_rms": lambda: read_run(path).matrix("rms"),
        "one_step": lambda: run.record(steps // 2),
        "one_tensor": lambda: run.tensors(names=[names[len(names) // 2]]),
        "open": lambda: read_run(path),
    }
    found = {}
    for name, ask in asks.items():
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            ask()
            times.append(time.perf_counter() - begin)
        found[name] = min(times)
    return found


def layouts(records):
    """Return bytes a row and CPU s a million rows of several ways to write; the first is the one in use."""
    table = schema_table(TENSORS, records, 1, records[0].catalog)
    floats = [field.name for field in table.schema if field.type == "double"]
    words = [name for name in table.column_names if name not in floats]
    by_tensor = table.take(pa.array(_by_tensor(len(records), records[0].catalog.num_tensors).tolist()))
    split = {"use_byte_stream_split": floats}
    ways = {
        "zstd 3, streams split": (table, {"compression_level": 3, **split}),
        "zstd 1": (table, {"compression_level": 1}),
        "snappy, streams split": (table, {"compression": "snappy", **split}),
        "by tensor, then step": (by_tensor, {"compression_level": 1, **split}),
    }
    found = {}

    def measure(name, write):
        cpu = time.process_time()
        size = write()
        seconds = time.process_time() - cpu
        found[name] = {"bytes_per_row": size / len(table), "cpu_s_per_million": seconds / len(table) * 1e6}

    def other(rows, options):
        out = pa.BufferOutputStream()
        pq.write_table(rows, out, **{"compression": "zstd", "use_dictionary": words, **options})
        return out.getvalue().size

    measure("in use: zstd 1, streams split", lambda: to_parquet(table).size)
    for name, (rows, options) in ways.items():
        measure(name, lambda rows=rows, options=options: other(rows, options))
    return found


def _by_tensor(steps, rows):
    return torch.arange(steps * rows).view(steps, rows).t().flatten()


def show(result):
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "made up", "trained here", title="written")
    rows = {
        "steps x tensors a step": lambda c: f"{c['steps']} x {c['rows_per_step']}",
        "steps/s by CPU time": lambda c: f"{c['steps_per_cpu_s']:.0f}",
        "steps/s by wall time": lambda c: f"{c['steps_per_wall_s']:.0f}",
        "bytes a tensor and step": lambda c: f"{c['bytes_per_row']:.1f}",
        "bytes a step, of all tensors": lambda c: f"{c['bytes_per_step']:.0f}",
        "files": lambda c: f"{c['files']}",
    }
    for label, of in rows.items():
        table.add_row(label, of(result["made_up"]), of(result["trained"]))
    console.print(table)
    table = Table("", "bytes a row", "CPU s a million rows", title="ways to write the trained records")
    for name, way in result["layouts"].items():
        table.add_row(name, f"{way['bytes_per_row']:.1f}", f"{way['cpu_s_per_million']:.2f}")
    console.print(table)
    table = Table("", "", title=f"at {RATE} steps/s")
    table.add_row("share of a core", f"{result['share']:.1%}")
    for name, gaps in result["pauses_ms"].items():
        table.add_row(f"longest pauses {name}, ms", " ".join(f"{gap:.1f}" for gap in gaps))
    console.print(table)
    table = Table("", "s", title="read")
    for name, seconds in result["read_s"].items():
        table.add_row(name, f"{seconds:.3f}")
    console.print(table)


def main():
    parser = scripts.parser("kernels_bench.monitoring.run_record", __doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--trained-steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of writing at the rate")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        records, real = made_up(options.tensors, options.steps), trained(options.trained_steps)
        result = {
            "made_up": cost(home / "made_up", records),
            "trained": cost(home / "trained", real),
            "layouts": layouts(real),
        }
        timed = records[: max(int(options.seconds * RATE), 1)]
        result["share"] = share(home / "share", timed)
        result["pauses_ms"] = {
            "without": pauses(options.seconds),
            "while it writes": pauses(options.seconds, lambda: share(home / "pauses", timed)),
        }
        result["read_s"] = reading(home / "made_up")
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.check and (missed := over(result, options.tensors * options.steps)):
        sys.exit(f"over its bound: {', '.join(missed)}")


def over(result, rows):
    """Return the names of the figures that exceed their bound."""
    # the bound of the matrix is for 5 million rows
    limits = {"share": BOUND_SHARE, "matrix_norm": BOUND_MATRIX * max(rows / 5e6, 0.1)}
    found = {"share": result["share"], "matrix_norm": result["read_s"]["matrix_norm"]}
    return [name for name, limit in limits.items() if not found[name] <= limit]


if __name__ == "__main__":
    main()
