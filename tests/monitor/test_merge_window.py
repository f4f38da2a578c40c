"""Windows: tables, scalars and fingerprints of all ranks merge as their schemas say, whatever the kind."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradiometer as gm
from gradiometer.columns import DEFAULT_THRESHOLDS, EXPONENTS, TENSORS, Column, Derived, Schema
from gradiometer.monitor.merge_window import MergeWindow
from gradiometer.recorder import KINDS, Kind, StepRecord, Table
from support.rank_threads import Agreed, catalog_of


def schema_of(name, column, *derived, **options):
    """Return a schema of a user's own, which no module of the package knows."""
    numel, largest = Column("numel", "sum", "1", "elements"), Column("largest", "max", "|s|", "the largest")
    return Schema(name, (numel, column, largest), derived, **options)


SIGNS = Kind(
    "signs",
    schema_of(
        "signs",
        Column("n_negative", "sum", "1", "negative elements"),
        Derived("negative_fraction", lambda row: row("n_negative") / row("numel"), "of all"),
    ),
    "sign",
)
# a sparse one of taps, with a maximum
RARE = Kind(
    "rare",
    schema_of(
        "rare",
        Column("n_nan", "sum", "1", "NaN elements"),
        Derived("n_nonfinite", lambda row: row("n_nan"), "NaN elements"),
        dtype=torch.int64,
        storage="sparse",
    ),
    "rarity",
    rows="tap",
)
ALL = (*KINDS.values(), SIGNS, RARE)
TAPS = ("0.out", "1.out", "2.out")


def windows_of(size, kinds=ALL, **options):
    catalog = catalog_of(size, kinds, TAPS)
    return [MergeWindow(Agreed(rank, size), catalog, DEFAULT_THRESHOLDS, **options) for rank in range(size)]


def record_of(catalog, number, tables=(), **options):
    tables = {table.kind.name: table for table in tables}
    return StepRecord(number, 0.0, options.pop("scalars", {}), catalog, tables, **options)


def all_reduce(sums, tops):
    return torch.stack(sums).sum(0), torch.stack(tops).amax(0)


def merge(windows, steps, included):
    """Return the steps of the job, from the steps of each rank."""
    packed = [window.pack(own, included) for window, own in zip(windows, steps, strict=True)]
    sums, tops = all_reduce(*zip(*packed, strict=True))
    numbers = windows[0].numbers_of(sums, tops, included)
    sparse = merge_sparse(windows, steps, numbers)
    return windows[0].unpack(sums, tops, included, steps[0], sparse)


def merge_sparse(windows, steps, numbers):
    packed = []
    for window, own in zip(windows, steps, strict=True):
        packed.append([])
        window.merge_sparse(numbers, own, lambda *vectors: packed[-1].append(vectors) or vectors)
    reduced = iter([all_reduce(*zip(*vectors, strict=True)) for vectors in zip(*packed, strict=True)])
    return windows[0].merge_sparse(numbers, steps[0], lambda *_: next(reduced))


def columns_of(kind, *, seed=0, is_bad=False):
    """Return random columns of this rank's parts: two elements of ``w`` and three of ``b``, or taps."""
    schema, numel = kind.schema, [2, 3] if kind.rows == "parameter" else [4] * len(TAPS)
    values = torch.randint(9, (len(numel), schema.width), generator=torch.Generator().manual_seed(seed))
    for name, i in schema.index.items():
        if name in {"n_nan", "n_posinf", "n_neginf", "n_nonfinite"} or schema is EXPONENTS:
            values[:, i] = 0
    values[:, 0] = torch.tensor(numel)
    if is_bad and "n_nan" in schema:
        values[0, schema.index["n_nan"]] = 1
    return values.to(schema.dtype)


def expected_of(kind, size, parts):
    """Return the merged columns by the law of merging, or None."""
    present = [part.clone() for part in parts.values()]
    if kind.rows == "parameter":
        for rank, part in zip(parts, present, strict=True):
            part[1] *= rank == 0
    if not present:
        return None
    merged = reduce(kind.schema.merge, present)
    if len(present) == size:
        return merged
    for i, numel in enumerate([2 * size, 3] if kind.rows == "parameter" else [None] * len(TAPS)):
        bad = "n_nonfinite" in kind.schema and kind.schema.value(merged[i], "n_nonfinite") > 0
        if kind.schema.value(merged[i], "numel") != numel and not bad:
            merged[i] = 0
    return merged if (kind.schema.value(merged, "numel") > 0).any() else None


def test_the_tables_of_a_recorder_stay_the_same_in_one_process():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    options = {"weights": True, "fingerprint": True, "precision": 1, "taps": gm.Taps(model, {"all": "1"})}
    recorder = gm.Recorder(model, **options)
    model(torch.ones(4, 3)).sum().backward()
    recorder.record()
    (step,) = recorder.read()
    step = replace(step, tables={**step.tables, **recorder.read_exponents(0)})
    assert list(step.tables) == list(recorder.catalog.kinds)
    given = gm.Ranks(model), recorder.catalog, recorder.thresholds
    window = MergeWindow(*given, fingerprint=True, precision=1)
    assert window.catalog == recorder.catalog
    (merged,) = merge([window], [[step]], [True])
    assert list(merged.tables) == list(step.tables)
    for name, table in step.tables.items():
        assert torch.equal(merged.columns(name), table.values)
        assert torch.equal(merged.flags(name), table.flags)
        found = merged.fingerprints(name)
        assert found is table.fingerprints or torch.equal(found, table.fingerprints)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
@given(data=st.data())
def test_tables_merge_by_their_schemas(kind, data):
    size, index = data.draw(st.integers(1, 3)), kind.schema.index
    windows = windows_of(size, {KINDS["weights"], kind}, precision=1)
    catalog, included = windows[0].catalog, [True, False, True]
    steps, parts = [[] for _ in range(size)], []
    for number, is_included in enumerate(included):
        has = data.draw(st.lists(st.integers(0, size - 1), unique=True)) if is_included else []
        bad, seed = data.draw(st.integers(-1, size - 1)), data.draw(st.integers(0, 99))
        parts.append({rank: columns_of(kind, seed=seed + rank, is_bad=rank == bad) for rank in sorted(has)})
        for rank, own in enumerate(steps):
            values = parts[-1].get(rank)
            tables = [] if values is None else [Table(kind, catalog.rows(kind.name), values)]
            own.append(record_of(catalog, number, tables))
    for record, own in zip(merge(windows, steps, included), parts, strict=True):
        expected = expected_of(kind, size, own)
        assert record.has(kind.name) == (expected is not None)
        assert list(record.tables) == ([] if expected is None else [kind.name])
        if expected is None:
            continue
        table = record.tables[kind.name]
        assert torch.equal(table.values, expected)
        assert table.values.dtype == kind.schema.dtype
        assert table.values.is_contiguous()
        assert torch.equal(table.flags, kind.flags_of(expected, DEFAULT_THRESHOLDS))
        assert table.rows.names == (("w", "b") if kind.rows == "parameter" else TAPS)
        bad = [rank for rank, part in own.items() if "n_nan" in kind.schema and part[0, index["n_nan"]]]
        assert table.origin.tolist() == [*(bad or [-1])[:1], *[-1] * (len(table.rows) - 1)]


def test_each_table_counts_the_ranks_that_measured_it():
    windows = windows_of(2, ("grads", "weights", "activations", SIGNS))
    catalog = windows[0].catalog
    steps = []
    for rank in range(2):
        names = ["grads", "signs"] if rank else ["grads", "weights", "activations"]
        kinds = {name: kind for name, kind in catalog.kinds.items() if name in names}
        tables = [Table(kind, catalog.rows(name), columns_of(kind)) for name, kind in kinds.items()]
        steps.append([record_of(catalog, 4, tables)])
    (record,) = merge(windows, steps, [True])
    assert record.recorded
    # rank 0 has a part of w and all of b; taps have no whole; rank 1's copy of b does not count
    assert list(record.tables) == ["grads", "weights"]
    assert record.value("numel").tolist() == [4, 3]
    assert record.value("numel", "weights").tolist() == [0, 3]
    assert not record.has("signs")
    # the window is not kept alive by a record
    assert record.tables["weights"].values.untyped_storage().nbytes() == 2 * TENSORS.width * 8


def test_one_kind_takes_nine_numbers_a_row_and_ten_more_with_fingerprints():
    for fingerprint, width in ((False, 9), (True, 19)):
        (window,) = windows_of(1, ("grads",), fingerprint=fingerprint)
        lengths = [sum(map(len, window.pack([], [True] * n))) for n in (0, 1, 2)]
        # and for each step one for the ranks that measured it, and four of the step itself
        assert [b - a for a, b in pairwise(lengths)] == [2 * width + 5] * 2
        assert lengths[0] == 0


def test_sparse_tables_are_summed_as_integers_in_steps_that_are_due():
    windows = windows_of(2, ("grads", "grad_exponents"), precision=3)
    catalog, kind = windows[0].catalog, KINDS["grad_exponents"]
    many = 2**53 + 1
    steps = [[], []]
    for number in range(2, 5):
        for rank in range(2):
            counts = torch.zeros(2, kind.schema.width, dtype=torch.int64)
            counts[0, 5], counts[1, 7] = many, 3
            steps[rank].append(record_of(catalog, number, [Table(kind, catalog.parameters, counts)]))
    records = merge(windows, steps, [False] * 3)
    assert [record.has(kind.name) for record in records] == [False, True, False]
    assert not any(record.recorded for record in records)
    assert records[1].value("bin_5", kind.name).tolist() == [2 * many, 0]
    assert records[1].value("bin_7", kind.name).tolist() == [0, 3]
    # a rank that has fewer steps takes part
    records = merge(windows, [steps[0], steps[1][:1]], [False] * 3)
    assert records[1].value("numel", kind.name).tolist() == [0, 3]
    # nothing is exchanged without a cadence
    assert windows_of(1, ALL)[0].merge_sparse([0], [], None) == {}


def test_fingerprints_merge_and_copies_that_differ_are_found():
    windows = windows_of(3, ("grads", "weights", "updates", "activations"), fingerprint=True)
    catalog, included = windows[0].catalog, [False, True, True]
    steps = []
    for rank in range(3):
        own = [record_of(catalog, 0)]
        for number in (1, 2):
            tables = []
            for name, kind in catalog.kinds.items():
                rows = catalog.rows(name)
                values = columns_of(kind)
                bits = torch.tensor([[8, 1 + rank, 4], [24, 7, 9]]) if kind.has_fingerprints else None
                if bits is not None and (rank, number) == (2, 2):
                    bits[1, 1] += 1
                tables.append(Table(kind, rows, values, fingerprints=bits))
            own.append(record_of(catalog, number, tables))
        steps.append(own)
    packed = [window.pack(own, included) for window, own in zip(windows, steps, strict=True)]
    sums, tops = all_reduce(*zip(*packed, strict=True))
    assert [window.diverged(sums, tops, included) for window in windows] == [{2: ["b"]}] * 3
    records = windows[0].unpack(sums, tops, included, steps[0])
    for kind in ("grads", "weights"):
        assert records[1].fingerprints(kind).tolist() == [[24, 6, 12], [24, 7, 9]]
    assert records[1].fingerprints("updates") is None
    assert records[1].fingerprints("activations") is None
    # without fingerprints of weights nothing is known
    (window,) = windows_of(1, ("grads",), fingerprint=True)
    assert window.diverged(*window.pack([], [True]), [True]) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.1, 0.1, 0.1], 0.1),
        ([-0.0, -0.0, -0.0], -0.0),
        ([1.0, 2.0, None], 1.5),
        ([1.0, math.nan, 2.0], math.nan),
        ([math.inf, 1.0, 1.0], math.inf),
        ([math.inf, -math.inf, 1.0], math.nan),
        ([None, None, -3.0], -3.0),
    ],
)
def test_scalars_of_ranks(given, expected):
    windows, steps = windows_of(3, ("grads",)), []
    for window, value in zip(windows, given, strict=True):
        scalars = {} if value is None else {"loss": value}
        steps.append([record_of(window.catalog, 4, scalars=scalars)])
        window.add_scalars(["loss"])
    packed = [window.pack(own, [False]) for window, own in zip(windows, steps, strict=True)]
    (record,) = windows[0].unpack(*all_reduce(*zip(*packed, strict=True)), [False], [])
    assert (record.step, record.recorded) == (4, False)
    assert repr(record.loss) == repr(expected)
    bad = [rank for rank, value in enumerate(given) if value is not None and not math.isfinite(value)]
    assert record.loss_rank == (bad[0] if bad else None)


def test_scalars_get_an_index_up_to_a_limit_and_others_stay_those_of_the_rank():
    windows = windows_of(2, ("grads",))
    names = [f"s{i}" for i in range(300)]
    catalog, model = windows[0].catalog, SimpleNamespace()
    steps = [[record_of(catalog, 1, scalars=dict.fromkeys(names, rank + 1.0))] for rank in range(2)]
    steps[0][0] = record_of(catalog, 1, scalars=steps[0][0].scalars, model=model, skipped=False)
    steps[1][0] = record_of(catalog, 1, scalars=steps[1][0].scalars, skipped=True)
    for window, own in zip(windows, steps, strict=True):
        assert window.new_scalars(own) == names[:256]
        window.add_scalars(names)
        window.add_scalars(names)
        assert window.scalars == names[:256]
        assert window.new_scalars(own) == []
    (record,) = merge(windows, steps, [False])
    assert list(record.scalars.values()) == [1.5] * 256 + [1.0] * 44
    assert (record.skipped, record.model) == (True, model)


def test_the_numbers_of_steps_must_be_the_same():
    windows = windows_of(2, ("grads",))
    catalog, included = windows[0].catalog, [False, False]

    def numbers(first, second):
        records = [[record_of(catalog, number) for number in own] for own in (first, second)]
        packed = [window.pack(own, included) for window, own in zip(windows, records, strict=True)]
        sums, tops = all_reduce(*zip(*packed, strict=True))
        return windows[0].numbers_of(sums, tops, included)

    assert numbers([3, 4], [3, 4]) == [3, 4]
    assert numbers([3, 4], [3]) == [3, 4]
    assert numbers([3, 4], [3, 5]) is None


def test_a_window_is_limited_in_bytes():
    narrow, wide = [windows_of(1, kinds)[0].most for kinds in (("grads",), ("grads", "updates"))]
    assert narrow > 2 * wide > 0


def test_a_step_that_is_not_merged_keeps_its_scalars():
    (window,) = windows_of(1)
    tables = [Table(KINDS["grads"], window.catalog.parameters, torch.ones(2, TENSORS.width))]
    alone = window.alone(record_of(window.catalog, 5, tables, scalars={"loss": 2.0}, skipped=True))
    assert (alone.step, alone.loss, alone.skipped, alone.recorded) == (5, 2.0, True, False)
