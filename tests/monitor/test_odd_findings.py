"""Findings of custom rules with odd values: converted or refused, and no step of the run record is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules.finding import Finding, Severity, checked
from support.watching import Stateless

pytest.importorskip("pyarrow")

GOOD = Finding("odd", Severity.INFO, 2, 2, "grads", "a tensor", 1.5, 1.0, "a message", "advice")


def good(**fields):
    return replace(GOOD, **fields)


class Odd(Stateless):
    """A rule that reports three objects in every step: two good findings, and an odd object between them."""

    def __init__(self, name, odd):
        self.name, self.odd = name, odd

    def check(self, record):
        at = {"rule": self.name, "first_step": record.step, "last_step": record.step}
        return [good(tensor="weight", **at), self.odd, good(tensor="bias", **at)]


def watched(path, rules, steps=5):
    """Train with rules and a run record; return the monitor and the run that is read back."""
    sink = gm.sinks.RunRecord(path, fsync=False, segment_steps=2)
    with gm.Monitor(nn.Linear(2, 1), rules=rules, sinks=[sink]) as monitor:
        for _ in range(steps):
            monitor.record()
            monitor.advance(loss=1.0)
    return monitor, gm.read_run(path)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


REFUSED = {
    "a tensor of two elements as value": ({"value": torch.ones(2)}, "value is tensor([1., 1.]) (Tensor)"),
    "a tensor without elements as value": ({"value": torch.ones(0)}, "value is tensor([])"),
    "a tensor on another device": ({"value": torch.ones((), device="meta")}, "value is a tensor on meta"),
    "a complex tensor": ({"value": torch.ones((), dtype=torch.complex64)}, "value is tensor(1.+0.j)"),
    "an array as value": ({"value": np.ones(3)}, "value is array([1., 1., 1.]) (ndarray), not a number"),
    "None as value": ({"value": None}, "value is None (NoneType), not a number"),
    "a str as value": ({"value": "1.5"}, "value is '1.5' (str), not a number"),
    "an int too large for a float": ({"value": 10**400}, "value is 1000"),
    "None as threshold": ({"threshold": None}, "threshold is None (NoneType), not a number"),
    "a list as threshold": ({"threshold": [1.0]}, "threshold is [1.0] (list), not a number"),
    "NaN as first_step": ({"first_step": math.nan}, "first_step is nan (float), not an integer"),
    "None as first_step": ({"first_step": None}, "first_step is None (NoneType), not an integer"),
    "a str as last_step": ({"last_step": "7"}, "last_step is '7' (str), not an integer"),
    "an infinite last_step": ({"last_step": math.inf}, "last_step is inf (float), not an integer"),
    "a negative step": ({"first_step": -1}, "first_step is -1 (int), not an integer"),
    "a half count": ({"count": 1.5}, "count is 1.5 (float), not an integer"),
    "None as count": ({"count": None}, "count is None (NoneType), not an integer"),
    "a tensor with NaN as count": ({"count": torch.tensor(math.nan)}, "count is tensor(nan) (Tensor)"),
    "an int beyond 64 bits": ({"count": 2**63}, "count is 9223372036854775808 (int), not an integer"),
    "NaN as worst_step": ({"worst_step": math.nan}, "worst_step is nan (float), not an integer"),
    "an unknown severity": ({"severity": 25}, "severity is 25 (int), not a Severity"),
    "None as severity": ({"severity": None}, "severity is None (NoneType), not a Severity"),
    "a tensor as kind": ({"kind": torch.ones(2)}, "kind is tensor([1., 1.]) (Tensor), not a str or None"),
    "a list as tensor": ({"tensor": ["weight"]}, "tensor is ['weight'] (list), not a str"),
    "None as message": ({"message": None}, "message is None (NoneType), not a str"),
    "bytes as advice": ({"advice": b"x"}, "advice is b'x' (bytes), not a str"),
    "an object without a repr": ({"value": Unprintable()}, "value is an object (Unprintable), not a number"),
}


NOT_FINDINGS = [None, 1.5, "text", {"rule": "odd"}, torch.ones(3), Finding, good().to_dict()]


def test_an_odd_finding_is_refused_and_reported_once_and_all_else_is_recorded(tmp_path, caplog):
    rules = [Odd(name, good(**fields)) for name, (fields, _) in REFUSED.items()]
    rules += [Odd(f"object {i}", thing) for i, thing in enumerate(NOT_FINDINGS)]
    monitor, run = watched(tmp_path, rules)
    assert run.steps["step"].to_pylist() == list(range(5))
    wanted = [(rule.name, tensor, 5, 4) for rule in rules for tensor in ("weight", "bias")]
    assert [(f.rule, f.tensor, f.count, f.last_step) for f in run.findings] == wanted
    assert monitor.findings == run.findings
    # one report per rule, which names the field
    assert monitor.failures == {f"rule {rule.name}": 5 for rule in rules}
    assert monitor.dropped == 0
    lines = [r.getMessage() for r in caplog.records if "a finding was refused" in r.getMessage()]
    said = {name: f"its {said}" for name, (_, said) in REFUSED.items()}
    for rule, line in zip(rules, lines, strict=True):
        assert line.startswith(f"rule {rule.name}: a finding was refused: {said.get(rule.name, 'it is ')}")
        assert rule.name in said or "not a gm.Finding" in line


def test_a_check_that_returns_no_list_is_reported(tmp_path, caplog):
    class Single(Odd):
        def check(self, _):
            return self.odd

    rules = [Single("nothing", None), Single("one", good()), Single("number", 3.0)]
    monitor, run = watched(tmp_path, rules)
    assert run.steps["step"].to_pylist() == list(range(5))
    assert monitor.failures == {"rule nothing": 5, "rule one": 5, "rule number": 5}
    assert "rule nothing: check() returned an object of type NoneType, not a list of findings" in caplog.text


CONVERTED = {
    "a tensor": ({"value": torch.tensor(2.5)}, "value", 2.5),
    "a tensor of one element": ({"value": torch.tensor([[2.5]], dtype=torch.bfloat16)}, "value", 2.5),
    "a tensor with a gradient": ({"value": torch.tensor(2.5, requires_grad=True)}, "value", 2.5),
    "a NumPy float": ({"value": np.float32(2.5)}, "value", 2.5),
    "an array of one element": ({"value": np.array([2.5])}, "value", 2.5),
    "an int": ({"value": 2}, "value", 2.0),
    "a bool": ({"value": True}, "value", 1.0),
    "a fraction": ({"threshold": Fraction(5, 2)}, "threshold", 2.5),
    "an infinite tensor": ({"threshold": torch.tensor(-math.inf)}, "threshold", -math.inf),
    "a NaN tensor": ({"value": torch.tensor(math.nan)}, "value", math.nan),
    "a step as tensor": ({"first_step": torch.tensor(2)}, "first_step", 2),
    "a step as float": ({"last_step": 2.0}, "last_step", 2),
    "a count as NumPy integer": ({"count": np.int64(3)}, "count", 3),
    "a worst step as NumPy integer": ({"worst_step": np.int32(2)}, "worst_step", 2),
    "a severity as number": ({"severity": 20}, "severity", Severity.WARNING),
    "a severity as word": ({"severity": "error"}, "severity", Severity.ERROR),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_a_number_of_another_type_is_converted(case):
    fields, name, wanted = CONVERTED[case]
    converted = getattr(checked(good(**fields)), name)
    assert repr(converted) == repr(wanted)
    assert type(converted) is type(wanted)


def test_a_converted_finding_is_recorded(tmp_path):
    rules = [Odd(name, good(rule=name, **fields)) for name, (fields, _, _) in CONVERTED.items()]
    monitor, run = watched(tmp_path, rules)
    assert run.steps["step"].to_pylist() == list(range(5))
    assert repr(run.findings) == repr(monitor.findings)
    for name, (_, field, wanted) in CONVERTED.items():
        (found,) = [f for f in run.findings if f.rule == name and f.tensor == "a tensor"]
        assert field == "count" or repr(getattr(found, field)) == repr(wanted)
    assert monitor.failures == {}


def test_what_a_rule_found_before_it_failed_reaches_the_sinks(tmp_path):
    class Fails(Odd):
        def check(self, record):
            yield good(first_step=record.step, last_step=record.step)
            raise ZeroDivisionError

    monitor, run = watched(tmp_path, [Fails("odd", None)])
    assert monitor.failures == {"rule odd": 5}
    assert monitor.findings == run.findings
    assert [f.count for f in run.findings] == [5]


class Largest(Odd):
    def check(self, record):
        at = {"first_step": record.step, "last_step": record.step}
        return [good(rule="largest", count=2**63 - 1, worst_step=2**63 - 1, **at)]


def test_the_largest_integers_are_kept_and_counts_do_not_exceed_them(tmp_path):
    monitor, run = watched(tmp_path, [Largest("largest", None)])
    (found,) = run.findings
    assert (found.count, found.worst_step, found.last_step) == (2**63 - 1, 2**63 - 1, 4)
    assert monitor.failures == {}
