"""Setters and `load_state_dict`: a refused value raises an error that names it, and changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.monitor.blackbox import BlackBox
from gradiometer.monitor.dispatcher import Dispatcher
from gradiometer.monitor.failures import Failures
from gradiometer.monitor.monitor import Monitor
from gradiometer.recorder.recorder import Recorder
from gradiometer.rules import NormHistory, default_rules
from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.history import History


def set_to(name):
    """Return a function that sets an attribute."""
    return lambda owner, value: setattr(owner, name, value)


def load(owner, state):
    owner.load_state_dict(state)


def configure(owner, values):
    owner.configure_(**values)


class Custom:
    """A rule that changes before it refuses a state."""

    name = "custom"

    def __init__(self):
        self.seen = []

    def check(self, record):
        self.seen.append(record.step)
        return []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen.clear()
        if state["seen"] == "refused":
            raise RuntimeError("not a list")
        self.seen += state["seen"]


def rules():
    return [*default_rules(), Custom()]


@pytest.fixture(scope="module")
def monitor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    monitor = Monitor(model, rules=rules(), every=2, weights=True, updates=True)
    train(monitor, model, 30)
    assert monitor.flush(60)
    # also a finding in the state
    made = Finding("made", Severity.INFO, 1, 2, "grads", "0.weight", 1.0, 2.0, "", "")
    monitor._pipeline.dispatcher.ledger.add([made])
    monitor.model = model
    yield monitor
    monitor.close()


def train(monitor, model, steps):
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        monitor.record()
        monitor.advance(loss=1.0)


def plain(value):
    """Return a value with lists in place of tensors, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def state_of(owner):
    """Return what must not change, as text, in which NaN equals itself."""
    parts = [plain(owner.state_dict())]
    if isinstance(owner, Monitor):
        reader = owner._pipeline.reader
        parts += [owner.step, owner.every, reader.step, owner.findings, plain(owner._recorder.cursor)]
        parts += [owner._pipeline.dispatcher.ledger.gap, owner._recorder.ring[:, 0].tolist()]
    return repr(parts)


def changed(state, *path, to):
    """Return a copy of a state with another value at a path."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return state


NOT_STEPS = ["7", 1.5, -1, None, True, math.nan, 2**60, 10**400, torch.tensor(3), [3]]


@pytest.mark.parametrize("value", NOT_STEPS, ids=lambda value: f"{value!r:.20}")
@pytest.mark.parametrize("name", ["step", "every"])
def test_a_step_or_cadence_that_is_refused(monitor, name, value):
    state = changed(monitor.state_dict(), name, to=value)
    for apply, given in ((set_to(name), value), (load, state)):
        before = state_of(monitor)
        with pytest.raises(ValueError, match=rf"Monitor.*\({name}=.*\): {name} must be an integer, at least"):
            apply(monitor, given)
        assert state_of(monitor) == before
    if value is not None:
        recorder = Recorder(nn.Linear(2, 1), every=3)
        before = state_of(recorder)
        # whichever comes first
        with pytest.raises(ValueError, match=f"{name}=.*: {name} must be an integer, at least"):
            recorder.configure_(**{"step": 5, "every": 7, "skip_nonfinite": False, name: value})
        assert state_of(recorder) == before
        with pytest.raises(ValueError, match=f"{name}=.*: {name} must be an integer, at least"):
            Recorder(nn.Linear(2, 1)).configure_(**{name: value})
    if name == "every":
        with pytest.raises(ValueError, match="every must be an integer, at least 1"):
            Monitor(nn.Linear(2, 1), every=0 if value is None else value)


def part(state, rule):
    """Return the index of a rule's part of a monitor's state."""
    return [name for name, _ in state["rules"]].index(rule)


def bad_states(state):
    """Yield states of a monitor that do not fit, and what the error says."""
    yield None, "got NoneType; pass the result of Monitor.state_dict"
    yield [], "got list; pass"
    yield {}, "the state has no step, every, black_box, rules, findings"
    for key in state:
        yield {name: x for name, x in state.items() if name != key}, f"the state has no {key}"
    for box in (None, {}, "x", changed(state["black_box"], "first", to=3), {"first": None}):
        yield changed(state, "black_box", to=box), "the state's black_box is "
    for given in (None, 3, [3], [("nonfinite",)], [([], {})]):
        yield changed(state, "rules", to=given), "the state's rules do not fit"
    for given in (None, 3, [3], [{}], [{"rule": "x"}]):
        yield changed(state, "findings", to=given), "the state's findings do not fit"
    for field, value in (("value", None), ("first_step", "1"), ("severity", "loud"), ("tensor", 3)):
        yield changed(state, "findings", 0, field, to=value), "the state's findings do not fit"
    yield changed(state, "findings", 0, "more", to=1), "the state's findings do not fit.*more"
    # the last rule refuses, after the others have loaded other histories
    other = copy.deepcopy(state)
    for _, history in other["rules"]:
        if "streak" in history and isinstance(history["streak"], int):
            history["streak"] = 77
    last = part(state, "custom")
    said = "the rule custom does not accept its part of the state .RuntimeError: not a list"
    yield changed(other, "rules", last, to=("custom", {"seen": "refused"})), said
    for name, history in state["rules"]:
        i = part(state, name)
        said = f"the rule {name} does not accept its part of the state"
        yield changed(other, "rules", i, to=(name, None)), said
        yield changed(other, "rules", i, to=(name, {})), said
        for key in history if name != "custom" else ():
            yield changed(other, "rules", i, to=(name, changed(history, key, to={"x": 1}))), said
            if type(history[key]) is int:
                for number in (math.inf, math.nan, 50.0):
                    yield changed(other, "rules", i, to=(name, changed(history, key, to=number))), said


def test_a_state_of_a_monitor_that_is_refused(monitor):
    state = copy.deepcopy(monitor.state_dict())  # the custom rule's list is its own
    before = state_of(monitor)
    count = 0
    for bad, said in bad_states(state):
        with pytest.raises((TypeError, ValueError), match=said):
            monitor.load_state_dict(bad)
        assert state_of(monitor) == before, said
        count += 1
    assert count > 60
    # and one that fits is taken
    monitor.load_state_dict(changed(state, "step", to=1000))
    assert monitor.step == 1000
    monitor.load_state_dict(state)
    assert repr(plain(monitor.state_dict())) == repr(plain(state))


HISTORY = {name: torch.ones(3, dtype=torch.float64) for name in ("count", "mean", "deviation")}
CURSOR = torch.tensor([5.0, 2.0, 3.0, 1.0, math.inf, 0.0, 0.0], dtype=torch.float64)


def cursor(place, value):
    new = CURSOR.clone()
    new[place] = value
    return {"cursor": new}


def recorder():
    return Recorder(nn.Linear(2, 1))


STEP = {"step": 3, "every": 2}
NO_FLAG = "skip_nonfinite='no'.: skip_nonfinite must be True or False"
BOUND = "skip_above must be a non-negative number"
OTHERS = {
    "history without a mean": (History, load, {"count": HISTORY["count"]}, "count, mean and deviation"),
    "history of lists": (History, load, HISTORY | {"mean": [1.0]}, "float64 vectors of one length"),
    "history of two lengths": (History, load, HISTORY | {"mean": HISTORY["mean"][:2]}, "of one length"),
    "history in float32": (History, load, HISTORY | {"mean": HISTORY["mean"].float()}, "float64 vectors"),
    "norms without names": (NormHistory, load, HISTORY, "names must be a list of str"),
    "norms with fewer names": (NormHistory, load, HISTORY | {"names": ["w"]}, "one for each norm"),
    "norms with numbers as names": (NormHistory, load, HISTORY | {"names": [1, 2]}, "a list of str"),
    "black box": (BlackBox, load, {"first": 1, "is_broken": True, "had_bad_loss": False}, "black_box is"),
    "dispatcher": (
        lambda: Dispatcher(rules(), (), 4, BlackBox(), Failures()),
        load,
        {"rules": [("nonfinite", {"streak": 3, "first": {"rule": 1}})], "findings": []},
        "the rule nonfinite does not accept .*NonFinite: first in the state does not fit",
    ),
    "skip_nonfinite": (recorder, configure, STEP | {"skip_nonfinite": "no"}, NO_FLAG),
    "skip_above": (recorder, configure, STEP | {"skip_above": math.nan}, f"skip_above=nan.: {BOUND}"),
    "a large skip_above": (recorder, configure, STEP | {"skip_above": 10**400}, BOUND),
    "a cursor with NaN": (recorder, load, cursor(0, math.nan), "cursor.step=nan.: step must be an integer"),
    "every = 0": (recorder, load, cursor(2, 0), "cursor.every=0.: every must be an integer, at least 1"),
    "project_every = 0.5": (recorder, load, cursor(6, 0.5), "cursor.project_every=0.5.: project_every must"),
    "a cursor with a negative skip_above": (recorder, load, cursor(4, -1), BOUND),
    "a cursor of another size": (recorder, load, {"cursor": CURSOR[:5]}, "size mismatch for cursor"),
    "an average of another shape": (lambda: gm.EMA((3,)), load, {"state": CURSOR}, "size mismatch for state"),
    "an average that is no tensor": (gm.EMA, load, {"state": "x"}, "state"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_refused_value_changes_nothing(case):
    make, apply, value, said = OTHERS[case]
    owner = make()
    before = state_of(owner)
    with pytest.raises((ValueError, RuntimeError), match=said):
        apply(owner, value)
    assert state_of(owner) == before


def test_advance_never_raises_after_refused_values_and_odd_attributes(monitor, caplog):
    for apply, value in ((set_to("step"), "7"), (set_to("every"), "2"), (load, {"step": 1}), (load, 3)):
        with pytest.raises((TypeError, ValueError)):
            apply(monitor, value)
    step, lost = monitor.step, monitor.dropped
    failures = dict(monitor.failures)
    train(monitor, monitor.model, 5)
    assert monitor.flush(60)
    assert (monitor.step, monitor.last.step, monitor.failures) == (step + 5, step + 4, failures)
    monitor.skips = torch.ones(2)  # neither true nor false
    train(monitor, monitor.model, 5)
    monitor.skips = False
    assert monitor.flush(60)
    assert monitor.last.step == step + 9
    assert monitor.failures == failures | {"skips": 5}
    assert monitor.dropped == lost
    assert caplog.text.count("skips: RuntimeError") == 1
