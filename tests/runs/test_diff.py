"""`compare_runs` finds the first step in which two runs differ, and the tensor that is computed first."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from gradiometer.runs import step_diff
from gradiometer.runs.comparison import BitDifference
from gradiometer.runs.diff import compare_runs, compared
from gradiometer.runs.reader import RunError, read_run
from support.changed_records import changed, column
from support.synthetic_run import NEGATIVES, TAPS, make_catalog, make_records, write_records, write_run

KINDS = ("grads", "weights", "updates")


def write(path, change=None, *, kinds=("grads",), names=None, first=0, keep=None, catalog=None, **info):
    """Write a run; ``change(record)`` may alter each step, and ``keep`` has the steps that are written."""
    catalog, steps = catalog or make_catalog(4, kinds, names), info.pop("steps", 20)
    records = make_records(catalog, steps, first=first, **info)
    kept = [record for record in records if keep is None or record.step in keep]
    records = kept if change is None else map(change, kept)
    return read_run(write_records(path, catalog, records, first, info=info, segment_steps=7))


def at(step, kind, row, name, factor):
    """Multiply one value from this step on."""

    def multiply(table):
        column(table, name)[row] *= factor

    return lambda record: changed(record, multiply, kind) if record.step >= step else record


@pytest.fixture
def a(tmp_path):
    return write(tmp_path / "a", kinds=KINDS)


def test_a_run_is_the_same_as_itself_and_as_one_of_other_segments(a, tmp_path):
    other = write_run(tmp_path / "b", tensors=4, steps=20, kinds=KINDS)

    found = compared(a, read_run(other))

    assert found.same
    assert found.step is None
    assert (found.common, found.compared, found.tensors) == (20, 20, 12)


def test_the_first_step_and_tensor_are_named(a, tmp_path):
    b = write(tmp_path / "b", at(11, "grads", 2, "sumsq", 4.0), kinds=KINDS)

    found = compared(a, b)

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
        record = changed(record, lambda table: table.values.mul_(2))
        return replace(record, scalars={**record.scalars, "loss": 1.0})

    found = compared(a, write(tmp_path / "b", change, kinds=KINDS))

    weights = ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    grads = [f"{name}.grad" for name in reversed(weights)]
    assert [d.name for d in found.first] == [*weights, "loss", *grads, *[f"{w}.update" for w in weights]]
    assert {d.step for d in found.first} == {5}


def test_a_scalar_that_parts_earlier_is_where_the_runs_part(a, tmp_path):
    def change(record):
        changed = at(9, "grads", 0, "sum", 2.0)(record)
        return replace(changed, scalars={**record.scalars, "lr": 1.0}) if record.step >= 3 else changed

    b = write(tmp_path / "b", change, kinds=KINDS)

    assert [(d.step, d.name) for d in compared(a, b).first] == [(3, "lr")]
    found = compared(a, b, ignore=re.compile("^lr$"))
    assert [(d.step, d.name) for d in found.first] == [(9, "blocks.0.weight.grad")]
    assert compared(a, b, ignore=re.compile(r"^lr$|0\.weight")).same


def test_a_nan_is_the_same_as_a_nan_and_a_count_of_them_is_exact(tmp_path):
    def change(record):
        return replace(record, scalars={**record.scalars, "loss": math.nan})

    a, b = write(tmp_path / "a", change), write(tmp_path / "b", change)
    assert compared(a, b).same

    def put(table):
        column(table, "n_nan")[3] = 1.0

    c = write(tmp_path / "c", lambda record: changed(change(record), put))
    (difference,) = compared(a, c, rtol=1e6).first
    assert difference.name == "blocks.1.bias.grad"
    assert difference.values == {"n_nan": (0.0, 1.0)}


def test_scalars_are_compared_step_by_step_only_where_they_differ(tmp_path, monkeypatch):
    def change(record):
        more = {"x": 1.0, "y": math.nan} if record.step % 3 else {}
        return replace(record, scalars={**record.scalars, **more})

    def other(record):
        record = change(record)
        return replace(record, scalars=record.scalars | ({"x": 2.0} if record.step >= 13 else {}))

    monkeypatch.setattr(step_diff, "_BLOCK", 5)
    looked, real = [], step_diff._given
    monkeypatch.setattr(step_diff, "_given", lambda rows: (looked.append(len(rows)), real(rows))[1])
    a, same = write(tmp_path / "a"), write(tmp_path / "b")
    assert compared(a, same).same
    assert looked == []

    found = compared(write(tmp_path / "c", change), write(tmp_path / "d", other, keep=set(range(2, 20))))
    assert [(d.name, d.step, d.values["value"]) for d in found.scalars] == [("x", 13, (1.0, 2.0))]


def test_a_loss_that_one_run_lacks_is_a_difference(tmp_path):
    def change(record):
        return replace(record, scalars={"lr": record.scalars["lr"]})

    (difference,) = compared(write(tmp_path / "a"), write(tmp_path / "b", change)).first

    assert difference.name == "loss"
    assert difference.values["value"][1] is None


def test_other_names_and_shapes_are_named_and_the_rest_is_compared(tmp_path):
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", names=["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "head"])
    c = write(tmp_path / "c", names=["blocks.0.weight", "blocks.0.bias", "blocks.1.bias", "blocks.1.weight"])

    found = compared(a, b)
    assert (found.only_a, found.only_b) == (("blocks.1.bias.grad",), ("head.grad",))
    assert (found.first, found.same, found.tensors) == ((), False, 3)

    found = compared(a, c)
    assert found.shapes["blocks.1.bias.grad"] == ("float32 [64]", "float32 [64, 64]")
    assert {d.name for d in found.first} == {"blocks.1.bias.grad", "blocks.1.weight.grad"}


def test_kinds_that_one_run_recorded_alone_are_noted_and_no_difference(a, tmp_path):
    found = compared(a, write(tmp_path / "b"), ignore=re.compile("loss"))

    # the synthetic noise depends on the number of kinds
    assert found.kinds == (("weights", "updates"), ())
    assert (found.only_a, found.only_b, found.tensors) == ((), (), 4)


def test_steps_that_one_run_lacks_are_noted_and_the_others_compared(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", keep=range(12))
    # a segment in the middle is missing
    c = write(tmp_path / "c", at(15, "grads", 0, "sum", 2.0), keep=[*range(5), *range(15, 18)])

    found = compared(a, b)
    assert found.same
    assert (found.common, found.missing) == (12, ((), ()))
    found = compared(a, c)
    assert found.missing == (tuple(range(5, 15)), ())
    assert found.step == 15


def test_steps_without_tensors_are_compared_by_their_scalars(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", every=5)

    found = compared(a, b)

    assert found.same
    assert (found.common, found.compared) == (20, 4)


def test_with_no_step_in_common_nothing_is_the_same(tmp_path):
    a, b = write(tmp_path / "a", steps=5), write(tmp_path / "b", steps=5, first=10)

    found = compared(a, b)

    assert (found.same, found.common, found.first, found.total_norm) == (False, 0, (), None)


def test_a_tensor_that_is_measured_in_one_run_only_differs(tmp_path):
    found = compared(write(tmp_path / "a"), write(tmp_path / "b", unmeasured))

    assert found.step == 0
    assert found.first[0].values["numel"] == (64.0, 0.0)
    assert torch.equal(read_run(tmp_path / "b").record(0).measured(), torch.tensor([True, False, True, True]))


def unmeasured(record):
    """Return the record without the second row of each table."""

    def clear(table):
        table.values[1] = 0
        if table.fingerprints is not None:
            table.fingerprints[1] = 0

    return changed(record, clear)


# kinds


def test_any_kind_is_compared_by_its_own_columns_in_the_order_of_computation(tmp_path):
    kinds = ("grads", "updates", "activations", "activation_grads", NEGATIVES)

    def change(record):
        for kind, name in (
            ("updates", "n_stuck"),
            ("grads", "sum"),
            ("negatives", "n_negative"),
            ("activation_grads", "sum4"),
            ("activations", "n_zero_channels"),
        ):
            record = changed(record, lambda table, name=name: column(table, name)[:2].add_(1), kind)
        return record if record.step == 7 else replace(record, tables=kept[record.step])

    kept = {record.step: record.tables for record in make_records(make_catalog(4, kinds), 20)}
    a, b = write(tmp_path / "a", kinds=kinds), write(tmp_path / "b", change, kinds=kinds)

    found = compared(a, b)

    taps = list(TAPS[:2])
    assert [(d.kind, d.name, *d.values) for d in found.first] == [
        *[("activations", name, "n_zero_channels") for name in taps],
        *[("activation_grads", f"{name}.grad", "sum4") for name in taps[::-1]],
        *[("grads", f"blocks.0.{name}.grad", "sum") for name in ("bias", "weight")],
        *[("updates", f"blocks.0.{name}.update", "n_stuck") for name in ("weight", "bias")],
        *[("negatives", f"blocks.0.{name}", "n_negative") for name in ("weight", "bias")],
    ]
    assert (found.step, found.compared) == (7, 8)


@pytest.mark.parametrize(
    ("kind", "name", "factor", "rtol", "same"),
    [
        ("grads", "sumsq", 1 + 1e-6, 1e-6, True),
        ("grads", "sumsq", 1 + 3e-6, 1e-6, False),
        ("grads", "abs_max", 1 + 5e-7, 1e-6, True),
        ("grads", "abs_max", 1 + 2e-6, 1e-6, False),
        ("grads", "sum", 1.001, 1e-3, True),
        ("grads", "numel", 2, 1e9, False),
        ("updates", "sumsq_u", 1 + 1e-6, 1e-6, True),
        ("updates", "sumsq_u", 1 + 3e-6, 1e-6, False),
        ("updates", "sumsq_g", 1 + 1e-6, 1e-6, True),
        ("updates", "abs_max_u", 1 + 2e-6, 1e-6, False),
        ("updates", "dot_ug", 1.001, 1e-3, True),
        ("activations", "sum4", 1 + 3e-6, 1e-6, True),
        ("activations", "sum4", 1 + 5e-6, 1e-6, False),
        ("activations", "n_channels", 2, 1e9, False),
        ("grad_exponents", "bin_300", 2, 0, False),
    ],
)
def test_a_tolerance_follows_from_what_a_column_is(tmp_path, kind, name, factor, rtol, same):
    kinds = ("grads", "updates", "activations", "grad_exponents")

    def put(table):
        column(table, name)[0] += 1

    def base(record):
        return changed(record, put, kind) if name.startswith("bin") else record

    a = write(tmp_path / "a", base, kinds=kinds)
    b = write(tmp_path / "b", lambda record: at(4, kind, 0, name, factor)(base(record)), kinds=kinds)
    found = compared(a, b, rtol=rtol)

    assert not compared(a, b).same
    assert found.same is same
    assert [(d.step, d.kind, *d.values) for d in found.first] == ([] if same else [(4, kind, name)])


def test_histograms_are_compared_where_both_runs_have_them(tmp_path):
    kinds = ("grads", "grad_exponents")

    def without(record):
        some = {name: x for name, x in record.tables.items() if name == "grads" or record.step % 3 == 0}
        return replace(record, tables=some)

    a = write(tmp_path / "a", kinds=kinds, every=5, fingerprint=True)
    # their steps need not be those with other tensors
    b = write(
        tmp_path / "b", at(12, "grad_exponents", 1, "n_zero", 2), kinds=kinds, every=5, fingerprint=True
    )
    c = write(tmp_path / "c", without, kinds=kinds, every=5, fingerprint=True)

    assert compared(a, c).identical
    found = compared(a, b)
    assert (found.step, found.identical, found.bits) == (12, False, None)
    assert [d.name for d in found.first] == ["blocks.0.bias.grad"]
    assert found.first[0].values == {"n_zero": (17.0, 34.0)}
    assert "exponents of gradients differ first at step 12" in found.verdict
    assert (found.tensors, found.kinds) == (4, ((), ()))
    assert compared(a, write(tmp_path / "d")).kinds == (("grad_exponents",), ())


# fingerprints


def flip(step, *places, bit=0):
    """Flip a bit of the weighted sum of tensors, given as kind and row, from this step on."""

    def change(record):
        for kind, row in places if record.step >= step else ():

            def turn(table, row=row):
                table.fingerprints[row, 2] ^= -(2**63) if bit == 63 else 1 << bit

            record = changed(record, turn, kind)
        return record

    return change


@pytest.fixture
def printed(tmp_path):
    return write(tmp_path / "printed", kinds=KINDS, fingerprint=True)


def test_equal_fingerprints_are_identical_runs_whatever_statistics_and_scalars_say(printed, tmp_path):
    def change(record):
        # rounded in another way
        for kind, name in (("grads", "sumsq"), ("weights", "sumsq"), ("updates", "sumsq_u")):
            record = at(0, kind, slice(None), name, 1 + 2**-52)(record)
        return replace(record, scalars={**record.scalars, "speed": record.time})

    write(tmp_path / "b", change, kinds=KINDS, fingerprint=True)
    for found in (compare_runs(printed.path, str(printed.path)), compare_runs(printed, tmp_path / "b")):
        assert (found.identical, found.same, found.bits) == (True, True, None)
        assert (found.common, found.recorded, found.fingerprinted) == (20, 20, 20)
        assert found.verdict == "bits: identical for 20 steps"
    assert [d.name for d in found.scalars] == ["speed"]


@pytest.mark.parametrize(
    ("places", "named", "kind"),
    [
        ([("weights", 0), ("grads", 0)], "blocks.0.weight.grad", "grads"),
        ([("grads", 1), ("grads", 3), ("weights", 2)], "blocks.1.bias.grad", "grads"),
        ([("weights", 3), ("weights", 1)], "blocks.0.bias", "weights"),
    ],
)
@pytest.mark.parametrize("bit", [0, 40, 63])
def test_a_bit_that_no_statistic_shows_is_named_gradients_first(printed, tmp_path, places, named, kind, bit):
    change = flip(12, *places, bit=bit)
    b = write(tmp_path / "b", change, kinds=KINDS, fingerprint=True)

    found = compare_runs(printed, b)

    assert found.bits == BitDifference(12, named, kind, len(places))
    assert (found.identical, found.same, found.first, found.fingerprinted) == (False, False, (), 13)
    assert found.verdict.startswith(f"bits differ first at step 12: {named} ({kind.rstrip('s')}")
    assert found.verdict.endswith(f"), {len(places)} tensors")
    assert json.loads(json.dumps(found.to_dict()))["bits"]["name"] == named


def test_an_ignored_tensor_may_differ_and_with_a_tolerance_fingerprints_are_left_out(printed, tmp_path):
    b = write(tmp_path / "b", flip(3, ("grads", 0)), kinds=KINDS, fingerprint=True)

    assert compare_runs(printed, b).verdict.endswith("blocks.0.weight.grad (gradient), 1 tensor")
    assert compare_runs(printed, b, ignore=r"0\.weight").identical
    found = compare_runs(printed, b, rtol=1e-6)
    assert (found.same, found.identical) == (True, False)
    assert found.verdict == "bits: not compared, because a relative tolerance leaves fingerprints out"


def test_of_a_run_without_fingerprints_only_statistics_are_compared(tmp_path):
    a, b = write(tmp_path / "a", fingerprint=True), write(tmp_path / "b")

    found = compare_runs(a, b)

    assert (found.a.fingerprints, found.b.fingerprints) == (True, False)
    assert (found.same, found.identical, found.fingerprinted) == (True, False, 0)
    assert found.verdict == "bits: not compared, because B has no fingerprints"


def test_steps_that_lack_fingerprints_are_said_and_their_statistics_count(tmp_path):
    a = write(tmp_path / "a", unknown_in({5, 6}, 2), fingerprint=True)
    found = compare_runs(a, write(tmp_path / "b", fingerprint=True))
    assert (found.identical, found.same, found.fingerprinted) == (False, True, 18)
    assert "2 have no fingerprints in both runs" in found.verdict

    c = write(tmp_path / "c", at(6, "grads", 2, "sum", 2.0), fingerprint=True)
    assert (compare_runs(a, c).same, compare_runs(a, c).step) == (False, 6)


def unknown_in(steps, *places):
    """Take the fingerprints of gradients away in these steps."""

    def clear(table):
        table.fingerprints[[*places]] = torch.tensor([-1, 0, 0])

    return lambda record: changed(record, clear) if record.step in steps else record


def test_the_last_step_decides_which_tensors_have_no_fingerprints(tmp_path):
    whole = write(tmp_path / "a", fingerprint=True)
    # in either run
    for k, runs in enumerate([(0, 1), (1, 0)]):
        first = write(tmp_path / f"first{k}", unknown_in({0}, 1), fingerprint=True)
        last = write(tmp_path / f"last{k}", unknown_in({19}, 1), fingerprint=True)
        found = compare_runs(*[(whole, first)[i] for i in runs])
        assert (found.unknown, found.fingerprinted) == ((), 19)
        found = compare_runs(*[(whole, last)[i] for i in runs])
        assert (found.unknown, found.fingerprinted) == (("blocks.0.bias.grad",), 20)
    # a last step without any says nothing about the tensors
    none = write(tmp_path / "none", unknown_in({19}, 0, 1, 2, 3), fingerprint=True)
    found = compare_runs(whole, none)
    assert (found.unknown, found.fingerprinted, found.identical) == ((), 19, False)


def test_a_tensor_of_zeros_is_another_than_one_that_was_not_measured(tmp_path):
    def zeros(n_bytes):
        def put(table):
            table.fingerprints[1] = torch.tensor([n_bytes, 0, 0])

        return lambda record: changed(record, put)

    a, b = (write(tmp_path / str(n), zeros(n), fingerprint=True) for n in (0, 256))
    assert compare_runs(a, b).bits == BitDifference(0, "blocks.0.bias.grad", "grads", 1)


def test_a_tensor_that_is_measured_in_one_run_only_has_other_bits(tmp_path):
    a, b = (write(tmp_path / name, x, fingerprint=True) for name, x in (("a", None), ("b", unmeasured)))

    assert compare_runs(a, b).bits == BitDifference(0, "blocks.0.bias.grad", "grads", 1)


def test_the_bits_of_common_steps_are_compared_and_the_others_counted(printed, tmp_path):
    shorter = write(tmp_path / "b", kinds=KINDS, fingerprint=True, keep=range(8))
    some = write(tmp_path / "c", flip(10, ("grads", 0)), kinds=KINDS, fingerprint=True, every=4)

    found = compare_runs(printed, shorter)
    assert found.identical
    assert (found.fingerprinted, found.a.steps, found.b.steps) == (8, 20, 8)
    # the synthetic numbers depend on the number of recorded steps
    found = compare_runs(some, some)
    assert found.identical
    assert (found.common, found.recorded) == (20, 5)
    assert found.verdict == "bits: identical for 5 steps; 15 were not recorded"


def test_bits_of_tensors_with_other_names_shapes_or_dtypes_are_left_out(tmp_path):
    catalog = make_catalog(4)
    a = write(tmp_path / "a", fingerprint=True)
    rows = replace(catalog.parameters, dtypes=("float32", "float32", "bfloat16", "float32"))
    narrow = replace(catalog, parameters=rows)
    other = write(tmp_path / "b", flip(4, ("grads", 2)), catalog=narrow, fingerprint=True)
    names = ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "head"]
    renamed = write(tmp_path / "c", flip(7, ("grads", 3), ("grads", 0)), names=names, fingerprint=True)

    found = compare_runs(a, other)
    assert list(found.shapes) == ["blocks.1.weight.grad"]
    assert (found.bits, found.identical, found.same, found.fingerprinted) == (None, False, False, 20)
    assert found.verdict == "bits: identical for 20 steps in the tensors of the same shape and dtype"
    found = compare_runs(a, renamed)
    assert (found.only_a, found.only_b) == (("blocks.1.bias.grad",), ("head.grad",))
    assert found.bits == BitDifference(7, "blocks.0.weight.grad", "grads", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"first": 30},
            r"no step in common: \S+ has 20 steps from 0 to 19, and \S+ 20 steps from 30 to 49; pass runs of",
        ),
        ({"steps": 0}, r"no step in common: \S+ has 20 steps from 0 to 19, and \S+ no steps yet; pass"),
        (
            {"names": ["x"]},
            r"no tensor in common: \S+ has .*\.grad and 1 more, and \S+ x\.grad; pass runs of one",
        ),
    ],
)
def test_runs_with_nothing_in_common_are_an_error(tmp_path, options, message):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", **options)
    with pytest.raises(RunError, match=message):
        compare_runs(a, b)
    assert not compared(a, b).same
