"""`compare` finds the first step in which two runs differ, and the tensor that is computed first in it."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from gradiometer.columns.schema import COLUMN_INDEX
from gradiometer.runs import diff
from gradiometer.runs.diff import compare
from gradiometer.runs.reader import read_run
from gradiometer.runs.writer import RunRecord
from support.synthetic_run import make_info, make_records, make_roster, write_run

KINDS = ("grads", "weights", "updates")


def write(path, change=None, *, steps=20, kinds=("grads",), names=None, every=1, first=0, keep=None):
    """Write a run; ``change(record)`` may alter each step."""
    roster = make_roster(4, kinds, names)
    sink = RunRecord(path, segment_steps=7, segment_seconds=math.inf, fsync=False)
    sink.start(make_info(roster, first, every=every))
    for record in make_records(roster, steps, first=first, every=every):
        if keep is not None and record.step not in keep:
            continue
        sink.write([record if change is None else change(record)], [])
    sink.close()
    return read_run(path)


def at(step, kind, place, column, factor):
    """Multiply one value from this step on."""

    def change(record):
        if record.step < step or record.values is None:
            return record
        values = record.values.clone()
        values[record.roster.place(kind), place, COLUMN_INDEX[column]] *= factor
        return replace(record, values=values)

    return change


@pytest.fixture
def a(tmp_path):
    return write(tmp_path / "a", kinds=KINDS)


def test_a_run_is_the_same_as_itself_and_as_one_of_other_segments(a, tmp_path):
    other = write_run(tmp_path / "b", tensors=4, steps=20, kinds=KINDS)

    found = compare(a, read_run(other))

    assert found.same
    assert found.step is None
    assert (found.common, found.compared, found.tensors) == (20, 20, 12)


def test_the_first_step_and_tensor_are_named(a, tmp_path):
    b = write(tmp_path / "b", at(11, "grads", 2, "sumsq", 4.0), kinds=KINDS)

    found = compare(a, b)

    assert not found.same
    (difference,) = found.first
    assert (found.step, difference.name, difference.kind) == (11, "blocks.1.weight.grad", "grads")
    (here, there) = difference.values["sumsq"]
    assert there == 4 * here
    assert found.compared == 12
    assert found.total_norm[0] == 19
    assert found.total_norm[1] < found.total_norm[2]


def test_what_a_step_makes_first_comes_first(a, tmp_path):
    def change(record):
        if record.step < 5:
            return record
        return replace(record, values=record.values * 2, scalars={**record.scalars, "loss": 1.0})

    found = compare(a, write(tmp_path / "b", change, kinds=KINDS))

    weights = ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    grads = [f"{name}.grad" for name in reversed(weights)]
    assert [d.name for d in found.first] == [*weights, "loss", *grads, *[f"{w}.update" for w in weights]]
    assert {d.step for d in found.first} == {5}


def test_a_scalar_that_parts_earlier_is_where_the_runs_part(a, tmp_path):
    def change(record):
        changed = at(9, "grads", 0, "sum", 2.0)(record)
        return replace(changed, scalars={**record.scalars, "lr": 1.0}) if record.step >= 3 else changed

    b = write(tmp_path / "b", change, kinds=KINDS)

    assert [(d.step, d.name) for d in compare(a, b).first] == [(3, "lr")]
    found = compare(a, b, ignore=re.compile("^lr$"))
    assert [(d.step, d.name) for d in found.first] == [(9, "blocks.0.weight.grad")]
    assert compare(a, b, ignore=re.compile(r"^lr$|0\.weight")).same


@pytest.mark.parametrize(
    ("column", "factor", "rtol", "same"),
    [
        ("sumsq", 1 + 1e-6, 1e-6, True),
        ("sumsq", 1 + 3e-6, 1e-6, False),
        ("abs_max", 1 + 5e-7, 1e-6, True),
        ("abs_max", 1 + 2e-6, 1e-6, False),
        ("sum", 1.001, 1e-3, True),
        ("numel", 2, 1e9, False),
    ],
)
def test_what_rtol_allows(tmp_path, column, factor, rtol, same):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", at(4, "grads", 1, column, factor))

    assert not compare(a, b).same
    assert compare(a, b, rtol=rtol).same is same


def test_a_nan_is_the_same_as_a_nan_and_a_count_of_them_is_exact(tmp_path):
    def change(record):
        return replace(record, scalars={**record.scalars, "loss": math.nan})

    a, b = write(tmp_path / "a", change), write(tmp_path / "b", change)
    assert compare(a, b).same

    def put(record):
        values = record.values.clone()
        values[0, 3, COLUMN_INDEX["n_nan"]] = 1.0
        return replace(change(record), values=values)

    c = write(tmp_path / "c", put)
    (difference,) = compare(a, c, rtol=1e6).first
    assert difference.name == "blocks.1.bias.grad"
    assert difference.values == {"n_nan": (0.0, 1.0)}


def test_scalars_are_compared_step_by_step_only_where_they_differ(tmp_path, monkeypatch):
    def change(record):
        more = {"x": 1.0, "y": math.nan} if record.step % 3 else {}
        return replace(record, scalars={**record.scalars, **more})

    def other(record):
        record = change(record)
        return replace(record, scalars=record.scalars | ({"x": 2.0} if record.step >= 13 else {}))

    monkeypatch.setattr(diff, "_BLOCK", 5)
    looked, real = [], diff._given
    monkeypatch.setattr(diff, "_given", lambda rows: (looked.append(len(rows)), real(rows))[1])
    a, same = write(tmp_path / "a"), write(tmp_path / "b")
    assert compare(a, same).same
    assert looked == []

    found = compare(write(tmp_path / "c", change), write(tmp_path / "d", other, keep=set(range(2, 20))))
    assert [(d.name, d.step, d.values["value"]) for d in found.scalars] == [("x", 13, (1.0, 2.0))]


def test_a_loss_that_one_run_lacks_is_a_difference(tmp_path):
    def change(record):
        return replace(record, scalars={"lr": record.scalars["lr"]})

    (difference,) = compare(write(tmp_path / "a"), write(tmp_path / "b", change)).first

    assert difference.name == "loss"
    assert difference.values["value"][1] is None


def test_other_names_and_shapes_are_named_and_the_rest_is_compared(tmp_path):
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", names=["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "head"])
    c = write(tmp_path / "c", names=["blocks.0.weight", "blocks.0.bias", "blocks.1.bias", "blocks.1.weight"])

    found = compare(a, b)
    assert (found.only_a, found.only_b) == (("blocks.1.bias.grad",), ("head.grad",))
    assert (found.first, found.same, found.tensors) == ((), False, 3)

    found = compare(a, c)
    assert found.shapes["blocks.1.bias.grad"] == ("float32 [64]", "float32 [64, 64]")
    assert {d.name for d in found.first} == {"blocks.1.bias.grad", "blocks.1.weight.grad"}


def test_kinds_that_one_run_recorded_alone_are_noted_and_no_difference(a, tmp_path):
    found = compare(a, write(tmp_path / "b"), ignore=re.compile("loss"))

    # the synthetic noise depends on the number of kinds
    assert found.kinds == (("weights", "updates"), ())
    assert (found.only_a, found.only_b, found.tensors) == ((), (), 4)


def test_steps_that_one_run_lacks_are_noted_and_the_others_compared(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", keep=range(12))
    # a segment in the middle is missing
    c = write(tmp_path / "c", at(15, "grads", 0, "sum", 2.0), keep=[*range(5), *range(15, 18)])

    found = compare(a, b)
    assert found.same
    assert (found.common, found.missing) == (12, ((), ()))
    found = compare(a, c)
    assert found.missing == (tuple(range(5, 15)), ())
    assert found.step == 15


def test_steps_without_tensors_are_compared_by_their_scalars(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", every=5)

    found = compare(a, b)

    assert found.same
    assert (found.common, found.compared) == (20, 4)


def test_with_no_step_in_common_nothing_is_the_same(tmp_path):
    a, b = write(tmp_path / "a", steps=5), write(tmp_path / "b", steps=5, first=10)

    found = compare(a, b)

    assert (found.same, found.common, found.first, found.total_norm) == (False, 0, (), None)


def test_a_tensor_that_is_measured_in_one_run_only_differs(tmp_path):
    def freeze(record):
        values = record.values.clone()
        values[0, 1] = 0
        return replace(record, values=values)

    found = compare(write(tmp_path / "a"), write(tmp_path / "b", freeze))

    assert found.step == 0
    assert found.first[0].values["numel"] == (64.0, 0.0)
    assert torch.equal(read_run(tmp_path / "b").record(0).measured(), torch.tensor([True, False, True, True]))
