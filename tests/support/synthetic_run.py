"""A run on disk with made-up, reproducible numbers: for tests of its readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import MappingProxyType

import torch

from gradiometer.columns import DEFAULT_THRESHOLDS, Column, Derived, Schema
from gradiometer.extras import require
from gradiometer.recorder import KINDS, Catalog, Kind, RunInfo, StepRecord, Table
from gradiometer.runs import json_writer as json_writer_module
from gradiometer.runs import open_segment, read_run
from gradiometer.runs.digest import Claims, with_claims
from gradiometer.runs.directory import prepare
from gradiometer.runs.journal import JournalWriter
from gradiometer.runs.writer import RunRecord

STARTED = 1_700_000_000.0
VERSIONS = MappingProxyType({"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1", "gradiometer": "0.0"})
TAPS = ("blocks.0.out", "blocks.1.out", "logits")

NEGATIVES = Kind(
    "negatives",
    Schema(
        "negatives",
        (
            Column("numel", "sum", "1", "elements", "elements", "count", "elements"),
            Column("n_negative", "sum", "1", "elements below 0", "negative", "count", "elements"),
            Column("sum_negative", "sum", "s", "sum of elements below 0", signed=True),
            Column("abs_max_negative", "max", "|s|", "largest magnitude of an element below 0"),
        ),
        (Derived("negative_fraction", lambda row: row("n_negative") / row("numel"), "n_negative / numel"),),
        shown=("numel", "negative_fraction"),
    ),
    "gradient",
)
"""A kind of a user's own, which is not registered."""


def make_catalog(tensors=20, kinds=("grads",), names=None):
    """Weights of (64, 64) and biases of (64,), alternating; and `TAPS`, if a kind is measured of taps."""
    if names is None:
        names = [f"blocks.{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(tensors)]
    shapes = [(64,) if i % 2 else (64, 64) for i in range(len(names))]
    found = [kind if isinstance(kind, Kind) else KINDS[kind] for kind in kinds]
    taps = TAPS if any(kind.rows == "tap" for kind in found) else ()
    return Catalog.of(names, shapes, ["float32"] * len(names), kinds, taps)


def make_info(catalog, first_step=0, started=STARTED, **more):
    fields = {"every": 1, "capacity": 64, "model": "Synthetic", "device": "cpu", "versions": VERSIONS}
    fields |= {"thresholds": DEFAULT_THRESHOLDS} | more
    return RunInfo(catalog=catalog, started=started, first_step=first_step, **fields)


def make_table(catalog, values, kind="grads", **more):
    """A table of a kind with these raw columns."""
    return Table(catalog.kinds[kind], catalog.rows(kind), values, **more)


def make_values(schema, numel, rms, noise):
    """Return raw columns, ``(S, N, C)``, of N tensors, from ``(N,)`` and twice ``(S, N)``."""
    values = torch.zeros((*rms.shape, schema.width), dtype=torch.float64)
    for i, column in enumerate(schema.columns):
        name = column.name
        if name in {"numel", "n_nonzero_g"}:
            values[..., i] = numel
        elif name.startswith("sumsq"):
            values[..., i] = rms**2 * numel
        elif name.startswith("abs_max"):
            values[..., i] = 4 * rms
        elif name in {"n_zero", "n_unchanged", "n_negative", "n_stuck"}:
            values[..., i] = (noise > 2.5) * 1.0
        elif name in {"n_calls", "n_channels"}:
            values[..., i] = 8.0
        elif name == "sum4":
            values[..., i] = 3 * rms**4 * numel
        elif column.signed:
            values[..., i] = 0.01 * noise * rms * numel
    return values


def make_counts(schema, rows, step):
    """Return sparse columns that depend on the step: some rows have only the first, or the last two."""
    random = torch.Generator().manual_seed(step)
    counts = torch.zeros(rows, schema.width, dtype=schema.dtype)
    for row in range(0, rows, 4):
        start = int(torch.randint(1, schema.width - 60, (), generator=random))
        counts[row, start : start + 40] = torch.randint(0, 5, (40,), generator=random)
        counts[row, [start, 1, -3]] = torch.tensor([2**40, 1, 1])
    counts[1::4, 0], counts[2::4, -1], counts[2::4, -2] = 17, 3, 2
    return counts


def make_records(
    catalog,
    steps=200,
    *,
    first=0,
    every=1,
    nonfinite_at=None,
    seed=0,
    batch=256,
    fingerprint=False,
    precision=1,
):
    """Yield steps: norms fall slowly, differ by tensor and are noisy; the loss falls.

    Args:
        nonfinite_at: in this step the first gradient has 3 NaN, the second 2 +Inf, and the loss is NaN.
        fingerprint: whether the steps have fingerprints, whose sums are random.
        precision: steps divisible by it have tables of kinds that are stored sparsely.
    """
    bits = torch.Generator().manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    of_parameters = [kind for kind in catalog.dense if kind.rows == "parameter"]
    others = [kind for kind in catalog.dense if kind.rows == "tap"]
    k, n = len(of_parameters), len(catalog.names)
    numel = torch.tensor([math.prod(shape) for shape in catalog.parameters.shapes], dtype=torch.float64)
    levels = torch.tensor([0.05, 1.0, 0.001, *[1.0] * k], dtype=torch.float64)[:k, None]
    level = levels * torch.linspace(1.0, 0.1, max(n, 1), dtype=torch.float64)[:n].expand(k, n)
    for start in range(first, first + steps, batch):
        count = min(batch, first + steps - start)
        at = torch.arange(start, start + count, dtype=torch.float64)[:, None, None]
        noise = torch.randn((count, k, n), generator=random, dtype=torch.float64)
        rms = level * (1 + at / 50) ** -0.5 * (0.1 * noise).exp()
        values = {
            kind: make_values(kind.schema, numel, rms[:, i], noise[:, i])
            for i, kind in enumerate(of_parameters)
        }
        if nonfinite_at is not None and start <= nonfinite_at < start + count:
            index, grads = of_parameters[0].schema.index, values[of_parameters[0]][nonfinite_at - start]
            grads[0, index["n_nan"]] = 3
            grads[min(1, n - 1), index["n_posinf"]] = 2
        sums = {}
        for kind in [kind for kind in of_parameters if fingerprint and kind.has_fingerprints]:
            n_bytes = (4 * numel).to(torch.int64).expand(count, n).unsqueeze(-1)
            words = torch.randint(-(2**63), 2**63 - 1, (count, n, 2), generator=bits)
            sums[kind] = torch.cat([n_bytes, words], dim=-1)
        wobble = torch.randn(count, generator=random, dtype=torch.float64)
        loss = 0.5 + 4 / (1 + at.flatten() / 30) + 0.05 * wobble
        for kind in others:
            noise = torch.randn((count, len(catalog.taps)), generator=random, dtype=torch.float64)
            values[kind] = make_values(kind.schema, torch.tensor(512.0), (0.1 * noise).exp(), noise)
        for i, value in enumerate(loss.tolist()):
            step = start + i
            bad = step == nonfinite_at
            scalars = {"loss": math.nan if bad else value, "lr": 1e-3 * 0.999**step}
            tables = {}
            for place, kind in enumerate(catalog.kinds.values()):
                rows = catalog.rows(kind.name)
                if kind in catalog.sparse and step % precision == 0:
                    tables[kind.name] = Table(kind, rows, make_counts(kind.schema, len(rows), step + place))
                elif kind in catalog.dense and step % every == 0:
                    bits_of_step = sums[kind][i] if kind in sums else None
                    tables[kind.name] = Table(kind, rows, values[kind][i], fingerprints=bits_of_step)
            yield StepRecord(step, STARTED + 0.1 * step, scalars, catalog, tables, skipped=bad)


def same_bits(one, other):
    """Return whether two records hold the same, bit by bit."""
    texts = [repr(dict(x.scalars)) for x in (one, other)]  # because NaN differs from itself
    found = texts[0] == texts[1] and list(one.tables) == list(other.tables)
    found = found and (one.step, one.time, one.skipped) == (other.step, other.time, other.skipped)
    return found and all(same_table(table, other.tables[name]) for name, table in one.tables.items())


def same_table(one, other):
    """Return whether two tables hold the same, bit by bit."""
    pairs = [(x.values.contiguous().view(torch.int64), x.flags, x.fingerprints) for x in (one, other)]
    return one.rows.names == other.rows.names and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*pairs, strict=True)
    )


def same_records(ones, others):
    """Return whether there are as many records on both sides, and each holds the same, bit by bit."""
    ones, others = list(ones), list(others)
    return len(ones) == len(others) and all(map(same_bits, ones, others))


def steps_of(path):
    return read_run(path).steps["step"].to_pylist()


def open_run(path, catalog, first=0, info=None, **options):
    """Start a run record, whose steps are in the journal until a segment is full.

    Args:
        path, catalog, first: the folder, the tables of the steps, and the first step.
        info: more for `make_info`.
        options: for `RunRecord`.
    """
    sink = RunRecord(path, **({"segment_seconds": math.inf, "fsync": False} | options))
    sink.start(make_info(catalog, first, **(info or {})))
    return sink


def write_records(path, catalog, records, first=0, *, findings=(), fault=None, close=True, **options) -> Path:
    """Write these records one by one, and return the folder; ``close`` as for `write_run`."""
    sink = open_run(path, catalog, first, **options)
    for record in records:
        sink.write([record], [])
    sink.write([], findings)
    if fault is not None:
        sink.fault(fault)
    if close:
        sink.close()
    else:
        sink._flush(now=True)
        sink._free()
    return Path(path)


def write_run(
    path,
    tensors=20,
    steps=200,
    *,
    kinds=("grads",),
    nonfinite_at=None,
    seed=0,
    names=None,
    first=0,
    every=1,
    fingerprint=False,
    precision=1,
    **options,
) -> Path:
    """Write a run with the public sink and return its folder.

    Args:
        path: the folder; an existing run in it is resumed.
        tensors, names: the number of tensors, or their names.
        steps, first, every: ``steps`` steps from ``first``; those divisible by ``every`` have tensors.
        fingerprint, precision: as for `make_records`.
        options: ``findings`` of type `gradiometer.Finding`; ``close``: False leaves the run as a live process
            does, written data is on disk all the same; and those of `RunRecord`.
    """
    catalog = make_catalog(tensors, kinds, names)
    more = {"every": every, "fingerprint": fingerprint}
    numbers = {"nonfinite_at": nonfinite_at, "seed": seed, "precision": precision}
    records = make_records(catalog, steps, first=first, **more, **numbers)
    return write_records(path, catalog, records, first, info=more, **options)


def write_each(sink, records):
    """Write one step after another, whatever fails; return how many calls failed."""
    failed = 0
    for record in records:
        try:
            sink.write([record], [])
        except OSError:
            failed += 1
    return failed


def fail_writes(monkeypatch):
    """Return a set: writes of a run's files whose names contain one of its words fail, as on a full disk."""
    words, append = set(), JournalWriter.append

    def check(path):
        if any(word in path.name for word in words):
            raise OSError(28, "No space left on device", str(path))

    def checked_prepare(run, path, data, *, sync):
        check(path)
        return prepare(run, path, data, sync=sync)

    def checked_append(journal, records):
        check(journal.path)
        append(journal, records)

    for module in (json_writer_module, open_segment):
        monkeypatch.setattr(module, "prepare", checked_prepare)
    monkeypatch.setattr(JournalWriter, "append", checked_append)
    return words


def flip_bit(path, place):
    """Damage a byte of a file, and return the new content."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    return data


def edit_info(path, **changes):
    """Change run.json by hand: its digest is null then. None removes a key."""
    info = json.loads((path / "run.json").read_text()) | changes
    kept = {key: value for key, value in info.items() if value is not None}
    (path / "run.json").write_text(json.dumps(kept | {"digest": None}))


def seal(path):
    """Give all files the digests that go with what they are now, as one could who changes them by hand."""
    edit_info(path, files=None)
    steps = sorted((path / "steps").glob("*.parquet"))
    for of_steps in steps:
        attempt, first = map(int, of_steps.stem.split("-")[1:])
        count = require("pyarrow.parquet", "monitor", "A run record").read_metadata(of_steps).num_rows
        tables = {}
        for file in sorted(path.glob(f"*/*-{attempt:04d}-{first:010d}.parquet")):
            if file != of_steps:
                claims = Claims(file.parent.name, attempt, first, count)
                data, tables[file.parent.name] = with_claims(unsealed(file), claims)
                file.write_bytes(data)
        claims = Claims("steps", attempt, first, count, tables, None)
        of_steps.write_bytes(with_claims(unsealed(of_steps), claims)[0])


def unsealed(file):
    """Return the content of a Parquet file without its digest, if it has one."""
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if data[footer - 8 : footer] != b"GRADDIG1":
        return data
    end = footer - 8 - 32 - 4
    return data[: end - int.from_bytes(data[end : end + 4], "little")] + data[footer:]
