"""An update is what optimizer.step() does; what changes weights between two steps is a finding of its own."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import (
    ChangedOutside,
    LossSpike,
    NotUpdated,
    Severity,
    UpdateRatio,
    UpdateSpike,
    headlines,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "closure": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2),
}


def scaled(model):
    with torch.no_grad():
        model["q"].weight.mul_(0.5)


def written(model):
    model["q"].weight.data[0, 0] += 1e-3


def loaded(model):
    model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()})


def replaced(model):
    model["q"].weight.data = model["q"].weight.data * 0.9


def train(change=lambda _: None, at=(), *, steps=40, optimizer="sgd", dtype=torch.float32, **options):
    """Train; return the monitor, the records, and the true norm of each update."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(8, 8), "t": nn.Linear(8, 8)}).to(dtype)
    made = OPTIMIZERS[optimizer](model["q"].parameters())
    records, true = [], []
    options.setdefault("rules", [ChangedOutside()])
    with gm.watch(model, made, updates=True, sinks=[records.append], **options) as monitor:
        for step in range(steps):
            if step in at:
                change(model)

            def closure():
                made.zero_grad()
                loss = model["q"](torch.ones(2, 8, dtype=dtype)).square().mean()
                loss.backward()
                monitor.note(loss=loss)
                return loss

            before = copy.deepcopy(list(model["q"].parameters()))
            if optimizer == "closure":
                made.step(closure)
            else:
                closure()
                made.step()
            pairs = zip(model["q"].parameters(), before, strict=True)
            true.append(sum((a.double() - b.double()).square().sum() for a, b in pairs).sqrt().item())
    assert monitor.failures == {}
    return monitor, records, true


@pytest.mark.parametrize("change", [scaled, written, loaded, replaced])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_change_between_two_steps_is_no_part_of_an_update(change, optimizer):
    monitor, records, true = train(change, {30}, optimizer=optimizer)
    recorded = [record.total("norm", "updates") for record in records]
    assert recorded == pytest.approx(true, rel=1e-9, abs=1e-12)
    (finding,) = monitor.findings
    assert (finding.rule, finding.severity, finding.first_step) == ("changed_outside", Severity.WARNING, 30)
    if change is loaded:
        text = (
            "q (2 tensors): something other than optimizer.step() has changed these weights between steps 29 "
        )
        assert finding.message == text + "and 30, all by the factor 0.9"
    else:
        assert finding.tensor == "q.weight"
        assert "this weight between steps 29 and 30, its norm from" in finding.message


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_run_without_such_a_change_has_no_finding(optimizer, dtype):
    if optimizer == "closure":
        # LBFGS does not run in bfloat16
        dtype = torch.promote_types(dtype, torch.float32)
    assert train(optimizer=optimizer, dtype=dtype)[0].findings == []


def test_a_weight_that_always_changes_between_steps_is_info():
    monitor, *_ = train(scaled, range(1, 40, 2))
    (found,) = monitor.findings
    assert (found.rule, found.severity, found.tensor) == ("changed_outside", Severity.INFO, "q.weight")


def test_weights_that_no_optimizer_holds_may_change():
    monitor, *_ = train(lambda model: model["t"].weight.data.mul_(0.9), {20, 30})
    assert monitor.findings == []


def test_it_explains_what_follows_and_nothing_else_explains_it():
    rules = [ChangedOutside(), LossSpike(), UpdateSpike(), UpdateRatio()]
    monitor, *_ = train(lambda model: model["q"].weight.data.mul_(30.0), {30}, rules=rules)
    first, *others = headlines(monitor.findings)
    assert (first.rule, others) == ("changed_outside", [])
    assert {x.rule for x in first.explained} >= {"loss_spike"}


def test_steps_that_are_not_recorded_are_not_compared():
    assert train(scaled, {3, 20}, every=2)[0].findings == []


def test_values_that_are_not_finite_are_not_compared():
    monitor, *_ = train(lambda model: model["q"].weight.data.fill_(torch.inf), {30})
    assert monitor.findings == []


def test_a_monitor_compares_if_it_is_told_where_an_update_begins():
    for begins in (False, True):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with gm.Monitor(model, updates=True, rules=[ChangedOutside()]) as monitor:
            for step in range(20):
                if step == 15:
                    model.weight.data.mul_(2.0)
                model(torch.ones(2, 4)).square().mean().backward()
                monitor.record()
                if begins:
                    monitor.begin_updates()
                    model.weight.data.mul_(1.0)
                    monitor.begin_updates()
                optimizer.step()
                optimizer.zero_grad()
                monitor.advance()
        assert [x.first_step for x in monitor.findings] == ([15] if begins else [])
        # the first update that is measured again with the copy at the end of a step
        assert monitor.last.total("numel", "updates") == 20


def test_several_optimizers_and_a_scaler():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    first, second = [torch.optim.SGD(model[x].parameters(), lr=0.1) for x in ("a", "b")]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    records = []
    options = {"updates": True, "rules": [ChangedOutside()], "sinks": [records.append]}
    with gm.watch(model, [first, second], scaler=scaler, **options) as monitor:
        for step in range(20):
            if step == 15:
                model["b"].weight.data.mul_(0.5)
            scaler.scale(sum(model[x](torch.ones(2, 4)).square().mean() for x in "ab")).backward()
            for optimizer in (first, second):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert [(x.tensor, x.first_step) for x in monitor.findings] == [("b.weight", 15)]
    assert all(bool((record.value("abs_max", "updates") > 0).all()) for record in records)


def test_its_history_is_saved():
    rule = ChangedOutside()
    _, records, _ = train(scaled, {30})
    for record in records[:29]:
        assert not list(rule.check(record))
    other = ChangedOutside()
    other.load_state_dict(rule.state_dict())
    found = [list(x.check(record)) for x in (rule, other) for record in records[29:31]]
    assert found[:2] == found[2:]
    assert [len(x) for x in found[:2]] == [0, 1]
    with pytest.raises(ValueError, match="after_step"):
        other.load_state_dict(rule.state_dict() | {"after_step": "x"})


@pytest.mark.parametrize("between", ["clipped", "toggled"])
def test_each_of_several_optimizers_has_updates_of_its_own(between):
    torch.manual_seed(0)
    model = nn.ModuleDict({"d": nn.Linear(4, 1), "g": nn.Linear(4, 4)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.01) for name in model}
    records, true = [], {name: [] for name in model}
    options = {"updates": True, "weights": True, "rules": [ChangedOutside(), NotUpdated()]}
    with gm.watch(model, list(optimizers.values()), sinks=[records.append], **options) as monitor:
        for _ in range(15):
            for name, optimizer in optimizers.items():
                if between == "toggled":
                    for other, part in model.items():
                        part.requires_grad_(other == name)
                optimizer.zero_grad()
                model["d"](model["g"](torch.ones(2, 4))).square().mean().backward()
                before = copy.deepcopy(list(model[name].parameters()))
                optimizer.step()
                pairs = zip(model[name].parameters(), before, strict=True)
                true[name].append([(x - y).norm().item() for x, y in pairs])
                if between == "clipped":
                    model["d"].weight.data.clamp_(-0.1, 0.1)
    assert monitor.failures == {}
    for i, record in enumerate(records):
        for place, name in enumerate(record.names()):
            change = true[name[0]][i][name.endswith("bias")]
            assert float(record.value("norm", "updates")[place]) == pytest.approx(change, rel=1e-5)
    rare = [x for x in monitor.findings if x.severity >= Severity.WARNING]
    assert [(x.rule, x.tensor) for x in rare] == []


def test_a_step_that_fails_in_its_closure_leaves_no_old_weights():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    with gm.watch(model, optimizer, updates=True, rules=(), sinks=[records.append]):
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                loss.backward()
                if step == 1:
                    raise RuntimeError
                return loss

            with contextlib.suppress(RuntimeError):
                optimizer.step(closure)
            if step == 1:
                with torch.no_grad():
                    model.weight.add_(5.0)
    norms = [record.total("norm", "updates") for record in records]
    assert norms == pytest.approx([0.1 * 3**0.5] * 3, rel=1e-5)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


def changed(change, *, steps=60):
    """Train, call ``change(step, model)`` before each step, and return the findings."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    truth = torch.randn(8, 8)
    with gm.watch(model, optimizer, updates=True, rules=[ChangedOutside(), LossSpike()]) as monitor:
        for step in range(steps):
            change(step, model)
            x = torch.randn(32, 8)
            loss = (model(x) - x @ truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
    assert monitor.failures == {}
    return headlines(monitor.findings)


def test_weights_that_go_back_to_those_of_an_earlier_step():
    saved = {}

    def change(step, model):
        if step == 21:
            saved.update(copy.deepcopy(model.state_dict()))
        if step == 41:
            model.load_state_dict(saved)

    (found,) = changed(change)
    assert (found.rule, found.first_step, len(found.findings)) == ("changed_outside", 41, 1)
    assert found.message.startswith("all 8 tensors: something other than optimizer.step() has changed these ")
    assert found.message.endswith(" between steps 40 and 41, back to what they were after step 20")


def test_averaged_weights_that_are_swapped_in():
    average = torch.optim.swa_utils.AveragedModel(
        Stack(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def change(step, model):
        if step == 0:
            with torch.no_grad():
                # from here the weights grow
                for parameter in model.parameters():
                    parameter.mul_(0.2)
        average.update_parameters(model)
        if step == 25:
            model.load_state_dict(average.module.state_dict())

    (found,) = changed(change)
    assert "nearly all norms are smaller, by " in found.message
    assert found.message.endswith("in the median, as if averaged weights had taken their place")


def test_a_layer_that_is_initialized_anew_explains_the_loss():
    def change(step, model):
        if step == 40:
            for name, parameter in model.layers[1].named_parameters():
                nn.init.normal_(parameter, std=5.0 if name == "weight" else 1.0)

    (found,) = changed(change)
    assert (found.rule, found.first_step) == ("changed_outside", 40)
    assert found.message.startswith("layers.1 (2 tensors): something other than optimizer.step() has changed")
    assert "their norms by" in found.message
    assert [x.rule for x in found.explained] == ["loss_spike"]


def averaged(decay):
    average = torch.optim.swa_utils.AveragedModel(
        Stack(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )

    def change(step, model):
        if step:
            average.update_parameters(model)
            model.load_state_dict(average.module.state_dict())
        else:
            average.module.load_state_dict(model.state_dict())
            average.n_averaged.fill_(1)

    return change


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_averages_that_are_written_into_the_model_in_each_step(decay):
    found = [one for one in changed(averaged(decay)) if one.severity >= Severity.WARNING]
    (undone,) = [one for one in found if "takes back" in one.message]
    assert f"takes back {decay:.1%} of each update, since step 1, as if moving averages" in undone.message
    assert "in a copy of the model" in undone.advice
    assert undone.last_step == 59


@torch.no_grad()
def clipped(_, model):
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


@torch.no_grad()
def projected(_, model):
    for parameter in model.parameters():
        parameter.div_(parameter.norm())


@torch.no_grad()
def rounded(_, model):
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def decayed(_, model):
    for parameter in model.parameters():
        parameter.mul_(0.999)


@torch.no_grad()
def noisy(_, model):
    for parameter in model.parameters():
        parameter.add_(1e-3 * torch.randn_like(parameter))


def looked_ahead():
    slow = []

    @torch.no_grad()
    def change(step, model):
        if step % 5 == 0:
            if slow:
                for parameter, kept in zip(model.parameters(), slow, strict=True):
                    parameter.copy_(kept.lerp(parameter, 0.5))
            slow[:] = [parameter.clone() for parameter in model.parameters()]

    return change


OTHERS = {
    "clipped": lambda: clipped,
    "projected": lambda: projected,
    "rounded": lambda: rounded,
    "decayed": lambda: decayed,
    "noisy": lambda: noisy,
    "looked ahead": looked_ahead,
    "half averaged": lambda: averaged(0.5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_in_each_step_take_no_share_of_it_back(name):
    assert not any("takes back" in one.message for one in changed(OTHERS[name]()))
