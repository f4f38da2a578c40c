"""Rules about the state of the optimizer, on planted faults and on healthy trainings of the same kinds."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import Epsilon, Severity, StaleSecondMoment, StateReset, default_rules, headlines

OPTIMIZERS = {
    "adam": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "fused": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9),
}
LABELS = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))


def rules():
    return [Epsilon(), StateReset(), StaleSecondMoment()]


def model_of(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).to(
        dtype
    )


def loss_of(model, step):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    out = model(x.to(next(model.parameters()).dtype)).float()
    return nn.functional.cross_entropy(out, (x @ LABELS).argmax(1))


def train(model, optimizer, monitor, first, last, scale=lambda _: 1.0, clip=None):
    for step in range(first, last):
        loss = loss_of(model, step) * scale(step)
        loss.backward()
        monitor.note(loss=loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def resumed(name, *, restore, is_told=True, change=lambda _: None, at=120, **options):
    """Train, then train on in another monitor with another optimizer; return the findings."""
    make = OPTIMIZERS[name]
    model = model_of()
    optimizer = make(model.parameters())
    with gm.watch(model, optimizer, rules=rules(), **options) as monitor:
        train(model, optimizer, monitor, 0, at)
        state = monitor.state_dict()
    other = model_of(1)
    other.load_state_dict(model.state_dict())
    later = make(other.parameters())
    if restore:
        later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    change(later)
    with gm.watch(other, later, rules=rules(), **options) as monitor:
        if is_told:
            monitor.load_state_dict(state)
        else:
            monitor.step = at
        train(other, later, monitor, at, at + 60)
    assert monitor.failures == {}
    return monitor.findings


# a state that is lost


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [120, 133])
def test_a_resume_without_the_optimizer_is_told_and_one_with_it_is_not(name, at):
    assert resumed(name, restore=True, at=at) == []
    (found,) = resumed(name, restore=False, at=at)
    assert (found.rule, found.severity, found.first_step) == ("state_reset", Severity.WARNING, at)
    assert found.message.startswith("the optimizer's state was lost: ")
    assert "load it when the run is resumed" in found.advice


def test_a_run_that_goes_on_at_a_later_step_with_a_fresh_optimizer():
    assert resumed("adam", restore=True, is_told=False) == []
    (found,) = resumed("adam", restore=False, is_told=False)
    assert found.message == (
        "the optimizer's state was not restored: the run goes on at step 120, but no parameter was updated "
        "before (found at step 120)"
    )


@pytest.mark.parametrize("at", [120, 133, 150])
def test_updates_after_a_resume_are_compared_where_no_state_is_measured(at):
    given = {"states": None, "updates": True, "at": at}
    for name in ("adam", "momentum"):
        assert resumed(name, restore=True, **given) == []
    (found,) = resumed("adam", restore=False, **given)
    assert (found.rule, found.first_step) == ("state_reset", at)
    assert "the optimizer's state was lost: updates are " in found.message
    assert "while the gradients are as usual" in found.message


def test_a_state_that_is_cleared_again_and_again_is_a_part_of_the_loop():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        for first in range(0, 160, 40):
            train(model, optimizer, monitor, first, first + 40)
            optimizer.state.clear()
    # the second and third are info, and extend the first
    (found,) = monitor.findings
    assert (found.severity, found.first_step, found.last_step, found.count) == (Severity.WARNING, 40, 120, 3)
    assert found.message == (
        "the optimizer's state was lost: it counts 1 update of all tensors now, after 31 before "
        "(found at step 40)"
    )


def test_a_second_moment_that_falls_faster_than_it_can_was_replaced():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 60)
        optimizer.state[model[2].weight]["exp_avg_sq"].mul_(1e-4)
        train(model, optimizer, monitor, 60, 80)
    (found,) = monitor.findings
    assert found.rule == "state_reset"
    assert "was replaced: the second moment of 1 of 6 tensors fell to " in found.message


def test_parameters_that_are_unfrozen_or_added_have_no_state_to_lose():
    model = model_of()
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[2].parameters()], lr=3e-3)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 60)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[4].parameters())})
        train(model, optimizer, monitor, 60, 120)
    assert monitor.findings == []


@pytest.mark.parametrize("fall", [0.0, 1e-6])
def test_gradients_that_fall_to_nothing_lose_no_state(fall):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 150, scale=lambda step: fall if step >= 50 else 1.0)
    assert [f for f in monitor.findings if f.rule == "state_reset"] == []


def test_a_spike_of_the_gradient_is_no_reset_of_the_momentum():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 100, scale=lambda step: 1e4 if step == 60 else 1.0)
    assert monitor.findings == []


def test_skipped_steps_before_the_first_update_are_no_resume():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)
    records = []
    with gm.watch(model, optimizer, scaler=scaler, rules=rules(), sinks=[records.append]) as monitor:
        for step in range(60):
            scaler.scale(loss_of(model, step) * 1e8).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert sum(record.skipped for record in records) > 20
    assert [f for f in monitor.findings if f.rule == "state_reset"] == []


# eps


@pytest.mark.parametrize("foreach", [True, False])
def test_an_eps_that_is_0_in_the_dtype_of_the_state_is_told_in_the_first_step(foreach):
    model = model_of(dtype=torch.float16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach)
    with gm.watch(model, optimizer, rules=default_rules()) as monitor:
        train(model, optimizer, monitor, 0, 12)
    first, *_ = headlines(monitor.findings)
    assert (first.rule, first.first_step) == ("epsilon", 0)
    assert "eps=1e-08 is 0 in float16" in first.message
    assert {finding.rule for finding in first.explained} == {"nonfinite"}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"eps": 1e-4}),
        (torch.bfloat16, {}),
        (torch.float32, {}),
        (torch.float32, {"eps": 0.0}),
        (torch.float16, {"fused": True, "eps": 1e-7}),
    ],
)
def test_an_eps_that_the_dtype_holds_is_fine(dtype, options):
    model = model_of(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 40)
    assert monitor.findings == []


@pytest.mark.parametrize(
    ("scale", "eps", "severity"),
    [
        (1e-8, 1e-8, Severity.WARNING),
        (1e-4, 1e-8, None),
        (1.0, 1.0, Severity.INFO),
        (1e-8, 1e-15, None),
    ],
)
def test_an_eps_that_outweighs_the_second_moments_from_the_start(scale, eps, severity):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 40, scale=lambda _: scale)
    assert [(f.rule, f.severity, f.first_step) for f in monitor.findings] == (
        [] if severity is None else [("epsilon", severity, 0)]
    )
    for found in monitor.findings:
        assert "the root of the second moments, in half of all elements or more" in found.message


def test_gradients_that_fall_below_eps_later_have_converged():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 200, scale=lambda step: 10.0 ** (-step / 5))
    assert monitor.findings == []
    # as if the run were resumed from there, with no history
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 200, 240, scale=lambda _: 1e-30)
    assert [f for f in monitor.findings if f.rule == "epsilon"] == []


# a second moment that does not follow


@pytest.mark.parametrize(("beta2", "is_stale"), [(0.99999, True), (0.999, False), (0.95, False)])
def test_gradients_that_grow_and_a_beta2_close_to_1(beta2, is_stale):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, betas=(0.9, beta2))
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 20)
        for state in optimizer.state.values():
            # as after many steps with such gradients
            state["exp_avg_sq"] /= 1 - beta2**20
            state["step"].fill_(1e6)
        train(model, optimizer, monitor, 20, 400, scale=lambda step: 1e3 if step >= 200 else 1.0)
    found = [f for f in monitor.findings if f.rule == "stale_second_moment"]
    assert bool(found) == is_stale
    if found:
        assert found[0].first_step == 200
        assert "times the second moment since step 200" in found[0].message


def test_gradients_that_are_clipped_afterwards_are_not_those_of_the_state():
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with gm.Monitor(model, optimizer=optimizer, states=10, rules=rules()) as monitor:
        for step in range(120):
            (loss_of(model, step) * 1e4).backward()
            monitor.record()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.advance()
    assert monitor.findings == []
    with gm.watch(model, optimizer, rules=rules()) as monitor:
        train(model, optimizer, monitor, 0, 120, scale=lambda _: 1e4, clip=1.0)
    assert monitor.findings == []


@pytest.mark.parametrize(("factor", "is_told"), [(65536.0, True), (1 / 65536.0, True), (4.0, False)])
def test_moments_that_were_loaded_from_gradients_of_another_scale(factor, is_told):
    def scaled(optimizer):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(factor)
            state["exp_avg_sq"].mul_(factor**2)

    found = [
        f
        for f in resumed("adam", restore=True, is_told=False, change=scaled)
        if f.rule == "stale_second_moment"
    ]
    assert bool(found) == is_told
    for each in found[:1]:
        assert each.first_step == 120
        assert "the second moment that was loaded " in each.message


# healthy


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_training_has_no_findings(name):
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
    given = rules()
    with gm.watch(model, optimizer, rules=given, updates=True, states=1) as monitor:
        for step in range(200):
            train(model, optimizer, monitor, step, step + 1, clip=1.0 if step % 2 else None)
            schedule.step()
    assert monitor.findings == []
    # a history can be stored, and is refused if it does not fit
    for rule in given:
        rule.load_state_dict(rule.state_dict())
        with pytest.raises(ValueError, match="the state of another rule"):
            rule.load_state_dict({"first": math.nan})
