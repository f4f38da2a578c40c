"""Rules and the tables of a step: an absent table is not a table of zeros, and kinds may be a user's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import TENSORS, Column, Derived, Schema
from gradiometer.recorder import Catalog, Kind
from gradiometer.rules import (
    ChangedOutside,
    Fault,
    NoGradients,
    NonFinite,
    NotUpdated,
    Severity,
    Stuck,
    UpdateRatio,
    UpdateSpike,
    default_rules,
    first_nonfinite_text,
)
from support.real_runs import Run, batches, perceptron
from support.recording import record_of

pytestmark = pytest.mark.usefixtures("_one_thread")

MOMENTS = Kind("moments", TENSORS, "moment", ".moment")
# counts what is not finite, but not what it is
COARSE = Schema(
    "coarse",
    (Column("numel", "sum", "1", "elements"), Column("n_bad", "sum", "1", "not finite")),
    (Derived("n_nonfinite", lambda row: row("n_bad"), "not finite"),),
)


@pytest.fixture(scope="module")
def records():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = Run(model, batches(), optimizer, [], weights=True, updates=True)
    run.go(45)
    return run.records


def without(record, *kinds):
    return replace(record, tables={kind: x for kind, x in record.tables.items() if kind not in kinds})


def own(record):
    """Return a step with a table of another kind alone."""
    catalog = replace(record.catalog, kinds={**record.catalog.kinds, "moments": MOMENTS})
    columns = torch.zeros(len(record.names()), TENSORS.width, dtype=torch.float64)
    columns[:, TENSORS.index["numel"]] = 6.0
    return record_of(record.step, catalog, {"moments": columns})


def texts(rules):
    return {rule.name: str(rule.state_dict()) for rule in rules}


@pytest.mark.parametrize("kinds", [("grads",), ("weights",), ("updates",), ("weights", "updates")])
def test_a_table_that_is_absent_in_some_steps_is_no_finding(records, kinds):
    rules = default_rules()
    for record in records:
        seen = without(record, *kinds) if record.step % 2 or record.step > 30 else record
        assert [str(x) for rule in rules for x in rule.check(seen)] == []


def test_a_step_with_other_tables_changes_no_history(records):
    rules = default_rules()
    for record in records[:30]:
        for rule in rules:
            list(rule.check(record))
    before = texts(rules)
    for record in records[30:]:
        assert [x for rule in rules for x in rule.check(own(record))] == []
    assert texts(rules) == before
    assert [str(x) for rule in rules for x in rule.check(records[-1])] == []


@pytest.mark.parametrize("make", [ChangedOutside, NotUpdated, Stuck, UpdateRatio, UpdateSpike])
def test_a_rule_about_updates_skips_a_step_without_updates(records, make):
    rule = make()
    for record in records[:30]:
        list(rule.check(record))
    before = texts([rule])
    for record in records[30:]:
        # not even by the change of the weights, which is a lower bound
        assert list(rule.check(without(record, "updates"))) == []
    assert texts([rule]) == before


def test_gradients_that_are_not_known_are_not_gradients(records):
    rule, found = NoGradients(), []
    for record in records[:10]:
        columns = torch.zeros_like(record.columns())
        columns[:, TENSORS.index["numel"]] = 4.0
        seen = record_of(record.step, record.catalog, {"grads": columns})
        found.append(len(list(rule.check(without(record, "grads") if record.step % 2 else seen))))
    assert found == [0] * 8 + [1, 0]


def test_a_step_without_any_gradient_has_a_table_of_gradients():
    recorder = gm.Recorder(perceptron(), capacity=1, updates=True)
    rule = NoGradients()
    for step in range(5):
        recorder.record()
        (record,) = recorder.read()
        assert record.recorded
        assert record.has("grads")
        assert not record.has("updates")
        assert not record.measured().any()
        found = list(rule.check(record))
        assert len(found) == (step == 4)
        recorder.advance()


@pytest.mark.parametrize(("schema", "count"), [(TENSORS, "3 NaN"), (COARSE, "3 NaN or Inf")])
def test_a_kind_of_a_users_own_is_named_with_a_general_advice(schema, count):
    kind = Kind("moments", schema, "moment", ".moment")
    catalog = Catalog.of(("a.w", "b.w"), ((2, 3),) * 2, ("float32",) * 2, ("grads", kind))
    columns = torch.zeros(2, schema.width, dtype=torch.float64)
    columns[:, 0] = 6.0
    columns[1, schema.index["n_nan" if schema is TENSORS else "n_bad"]] = 3.0
    record = record_of(7, catalog, {"moments": columns}, skipped=True)
    text = first_nonfinite_text(record)
    assert text.startswith("step 7, b.w")
    assert text.endswith(f", {count} of 6")
    (found,) = NonFinite().check(record)
    assert (found.kind, found.tensor, found.value) == ("moments", "b.w", 3.0)
    assert found.severity == Severity.WARNING
    assert found.advice.startswith("look at what computes these values")
    for rule in default_rules():
        list(rule.check(record))
    fault = Fault("exit", "", 7, text, [found], [record])
    assert "total_norm" not in fault.to_dict()["last"][0]
