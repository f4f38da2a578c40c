"""A run on disk with made-up, reproducible numbers: for tests of its readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import MappingProxyType

import torch

from gradiometer.columns import COLUMN_INDEX, DEFAULT_THRESHOLDS, NUM_COLUMNS, derived
from gradiometer.extras import require
from gradiometer.recorder.step_record import Roster, RunInfo, StepRecord
from gradiometer.runs import open_segment, writer
from gradiometer.runs.directory import prepare
from gradiometer.runs.journal import JournalWriter
from gradiometer.runs.writer import RunRecord

STARTED = 1_700_000_000.0
VERSIONS = MappingProxyType({"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1", "gradiometer": "0.0"})


def make_roster(tensors=20, kinds=("grads",), names=None):
    """Weights of (64, 64) and biases of (64,), alternating."""
    if names is None:
        names = [f"blocks.{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(tensors)]
    shapes = [(64,) if i % 2 else (64, 64) for i in range(len(names))]
    return Roster(tuple(names), tuple(shapes), ("float32",) * len(names), tuple(kinds))


def make_info(roster, first_step=0, started=STARTED, **more):
    fields = {"every": 1, "capacity": 64, "model": "Synthetic", "device": "cpu", "versions": VERSIONS}
    fields |= {"thresholds": DEFAULT_THRESHOLDS} | more
    return RunInfo(roster=roster, started=started, first_step=first_step, **fields)


def make_records(
    roster, steps=200, *, first=0, every=1, nonfinite_at=None, seed=0, batch=256, fingerprint=False
):
    """Yield steps: norms fall slowly, differ by tensor and are noisy; the loss falls.

    Args:
        nonfinite_at: in this step the first gradient has 3 NaN, the second 2 +Inf, and the loss is NaN.
        fingerprint: whether the steps have fingerprints, whose sums are random.
    """
    bits = torch.Generator().manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    k, n = len(roster.kinds), len(roster.names)
    numel = torch.tensor([float(math.prod(shape)) for shape in roster.shapes], dtype=torch.float64)
    level = torch.tensor([0.05, 1.0, 0.001], dtype=torch.float64)[:k, None] * torch.linspace(
        1.0, 0.1, max(n, 1), dtype=torch.float64
    )[:n].expand(k, n)
    for start in range(first, first + steps, batch):
        count = min(batch, first + steps - start)
        at = torch.arange(start, start + count, dtype=torch.float64)[:, None, None]
        noise = torch.randn((count, k, n), generator=random, dtype=torch.float64)
        rms = level * (1 + at / 50) ** -0.5 * (0.1 * noise).exp()
        values = torch.zeros((count, k, n, NUM_COLUMNS + 1), dtype=torch.float64)
        put = {"numel": numel.expand(count, k, n), "sumsq": rms**2 * numel, "abs_max": 4 * rms}
        put |= {"sum": 0.01 * noise * rms * numel, "n_zero": (noise > 2.5) * 1.0}
        for name, column in put.items():
            values[..., COLUMN_INDEX[name]] = column
        if nonfinite_at is not None and start <= nonfinite_at < start + count:
            values[nonfinite_at - start, 0, 0, COLUMN_INDEX["n_nan"]] = 3
            values[nonfinite_at - start, 0, min(1, n - 1), COLUMN_INDEX["n_posinf"]] = 2
        values[..., NUM_COLUMNS] = derived.compute_flags(values[..., :NUM_COLUMNS], DEFAULT_THRESHOLDS)
        if fingerprint:
            sums = torch.randint(-(2**63), 2**63 - 1, (count, k, n, 2), generator=bits)
            n_bytes = (4 * numel).to(torch.int64).expand(count, k, n).unsqueeze(-1)
            values = torch.cat([values, torch.cat([n_bytes, sums], dim=-1).view(torch.float64)], dim=-1)
        wobble = torch.randn(count, generator=random, dtype=torch.float64)
        loss = 0.5 + 4 / (1 + at.flatten() / 30) + 0.05 * wobble
        for i, value in enumerate(loss.tolist()):
            step = start + i
            bad = step == nonfinite_at
            scalars = {"loss": math.nan if bad else value, "lr": 1e-3 * 0.999**step}
            kept = values[i] if step % every == 0 else None
            yield StepRecord(step, STARTED + 0.1 * step, scalars, roster, kept, skipped=bad)


def write_run(
    path,
    tensors=20,
    steps=200,
    *,
    kinds=("grads",),
    nonfinite_at=None,
    seed=0,
    names=None,
    findings=(),
    first=0,
    every=1,
    close=True,
    fingerprint=False,
    **options,
) -> Path:
    """Write a run with the public sink and return its folder.

    Args:
        path: the folder; an existing run in it is resumed.
        tensors, names: the number of tensors, or their names.
        steps, first, every: ``steps`` steps from ``first``; those divisible by ``every`` have tensors.
        fingerprint: as for `make_records`.
        findings: of type `gradiometer.Finding`.
        close: False leaves the run as a live process does; written data is on disk all the same.
        options: for `RunRecord`.
    """
    roster = make_roster(tensors, kinds, names)
    sink = RunRecord(path, **({"segment_seconds": math.inf, "fsync": False} | options))
    sink.start(make_info(roster, first, every=every, fingerprint=fingerprint))
    options = {"first": first, "every": every, "nonfinite_at": nonfinite_at, "seed": seed}
    records = make_records(roster, steps, **options, fingerprint=fingerprint)
    for record in records:
        sink.write([record], [])
    sink.write([], findings)
    if close:
        sink.close()
    else:
        sink._flush(now=True)
        sink._free()
    return Path(path)


def fail_writes(monkeypatch, check):
    """Call ``check`` with the path of each file of a run before it is written; it may raise."""
    append = JournalWriter.append

    def checked_prepare(run, path, data, *, sync):
        check(path)
        return prepare(run, path, data, sync=sync)

    def checked_append(journal, records):
        check(journal.path)
        append(journal, records)

    for module in (writer, open_segment):
        monkeypatch.setattr(module, "prepare", checked_prepare)
    monkeypatch.setattr(JournalWriter, "append", checked_append)


def edit_info(path, **changes):
    """Change run.json by hand: its digest is null then. None removes a key."""
    info = json.loads((path / "run.json").read_text()) | changes
    kept = {key: value for key, value in info.items() if value is not None}
    (path / "run.json").write_text(json.dumps(kept | {"digest": None}))


def as_without_digests(path):
    """Make the run one that an earlier release might have written, without digests."""
    pq = require("pyarrow.parquet", "monitor", "A run record")
    edit_info(path, digests_from=None, files=None)
    for file in path.glob("*/*.parquet"):
        pq.write_table(pq.read_table(file), file)
