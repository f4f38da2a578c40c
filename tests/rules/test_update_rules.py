"""Rules about updates: lost in rounding, larger than usual, and out of proportion to the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name

import gradiometer as gm
from gradiometer.rules import LossSpike, NormSpike, NotUpdated, Severity, Stuck, UpdateRatio, UpdateSpike
from support.real_runs import digits


class Half(nn.Module):
    """Weights of 1, which an update of less than 1/512 does not change in bf16, and of 0, which any does."""

    def __init__(self, dtype=torch.bfloat16, stuck=90):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([torch.ones(stuck), torch.zeros(100 - stuck)]).to(dtype))


def constant_steps(
    model, rules, steps=12, *, lr=1e-3, rates=None, skips=False, when="end", every=1, grad=None, **options
):
    """Train with gradients of 1 and return the monitor; ``when`` they are cleared: start, end, zeros."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    monitor = gm.Monitor(model, rules=rules, updates=True, every=every, **options)
    monitor.skips = skips
    with monitor:
        for step in range(steps):
            if when == "start":
                optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.ones_like(p) if grad is None else grad.to(p.dtype)
            monitor.record()
            given = {}
            if rates is not None:
                optimizer.param_groups[0]["lr"] = given["lr"] = rates(step)
            if not (skips and monitor.skip_step):
                optimizer.step()
            if when != "start":
                optimizer.zero_grad(set_to_none=when == "end")
            monitor.advance(**given)
    assert monitor.failures == {}
    return monitor


@pytest.mark.parametrize("when", ["start", "end", "zeros"])
def test_lost_updates_are_found_with_and_without_the_gradients_of_that_moment(when):
    (found,) = constant_steps(Half(stuck=95), [NotUpdated(), Stuck()], when=when).findings
    assert (found.rule, found.severity) == ("stuck", Severity.WARNING)
    assert (found.tensor, found.kind) == ("weight", "updates")
    assert (found.first_step, found.last_step, found.value) == (0, 11, 0.95)
    assert "95% of the elements whose gradient is not 0 stay the same since step 0" in found.message
    assert "rounding of bfloat16" in found.message
    for cure in ("float32 master weights", "stochastic rounding", "larger learning rate"):
        assert cure in found.advice


def test_severity_follows_the_share_the_dtype_and_the_schedule():
    def severity(model, **options):
        return [found.severity for found in constant_steps(model, [Stuck()], **options).findings]

    assert severity(Half(stuck=40)) == []
    assert severity(Half(stuck=60)) == [Severity.INFO]
    assert severity(Half(stuck=95)) == [Severity.WARNING]
    assert severity(Half(torch.float32, stuck=95), lr=1e-9) == [Severity.INFO]
    assert severity(Half(stuck=95), steps=9) == []
    # a warm-up, a learning rate of 0, the end of a schedule
    assert severity(Half(stuck=95), rates=lambda step: 1e-5 * (step + 1), steps=40) == []
    assert severity(Half(stuck=95), rates=lambda _: 0.0, steps=40) == []
    assert severity(Half(stuck=95), rates=lambda step: 1.0 if step < 2 else 1e-3, steps=40) == [Severity.INFO]


def test_gradients_that_are_0_or_not_finite_and_skipped_steps_do_not_count():
    sparse = torch.zeros(100)
    sparse[95:] = 1.0  # as for the rows of an embedding; these elements move
    for when in ("start", "end", "zeros"):
        assert constant_steps(Half(stuck=95), [Stuck()], when=when, grad=sparse).findings == []
    bad = torch.full((100,), float("nan"))
    assert constant_steps(Half(stuck=95), [Stuck()], skips=True, grad=bad).findings == []
    frozen = Half(stuck=95).requires_grad_(requires_grad=False)
    assert constant_steps(frozen, [Stuck()], grad=sparse).findings == []


def test_a_bf16_tensor_that_is_wholly_stuck_is_reported_once():
    (found,) = constant_steps(Half(stuck=100), [NotUpdated(), Stuck()]).findings
    assert found.rule == "stuck"
    assert found.message.startswith("weight.update: all of the elements")
    assert "or optimizer.step() is not called" in found.message
    (found,) = constant_steps(Half(torch.float32, stuck=100), [NotUpdated(), Stuck()], lr=1e-9).findings
    assert found.rule == "not_updated"


def test_stuck_counts_recorded_steps_of_a_cadence():
    (found,) = constant_steps(Half(stuck=95), [Stuck(patience=3)], steps=12, every=4).findings
    assert (found.first_step, found.last_step, found.count) == (0, 8, 1)
    with pytest.raises(ValueError, match="fraction must be at least 0"):
        Stuck(fraction=1.0)


def test_the_update_ratio_is_exact_and_needs_no_weights():
    model = nn.Linear(8, 8, bias=False)
    monitor = gm.Monitor(model, rules=[UpdateRatio()], updates=True)
    with monitor:
        for _ in range(40):
            model.weight.grad = torch.ones_like(model.weight)
            monitor.record()
            with torch.no_grad():
                model.weight.mul_(0.75)
            monitor.advance()
    (found,) = monitor.findings
    # the rounding of float32 weights
    assert found.value == pytest.approx(0.25, rel=2**-23)
    assert found.kind == "updates"


# a run in which second moments collapse


def train(beta2, weight_of, steps=90):
    """Train with AdamW on a loss that is multiplied by ``weight_of(step)``, as a mask over examples would be.

    Returns the findings, and the unweighted losses.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, beta2), eps=1e-30)
    losses = []
    with gm.Monitor(model, rules=[UpdateSpike(), NormSpike(), LossSpike()], updates=True) as monitor:
        for step in range(steps):
            x, y = digits(64, generator)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            (loss * weight_of(step)).backward()
            monitor.record()
            optimizer.step()
            monitor.advance(loss=loss, lr=1e-3)
            losses.append(loss.item())
    assert monitor.failures == {}
    return {found.rule: found for found in monitor.findings}, losses


def test_an_update_spike_comes_before_the_loss_when_second_moments_collapse():
    # with a beta2 of 0.5 the second moment falls faster than the momentum, by 0.9 / sqrt(0.5) in each step
    findings, losses = train(0.5, lambda step: 1.0 if step < 60 else 1e-6)
    spike = findings["update_spike"]
    usual = max(losses[40:60])
    departs = next(step for step, loss in enumerate(losses) if step >= 60 and loss > 2 * usual)
    assert 60 < spike.first_step < departs
    assert spike.severity == Severity.WARNING
    # neither the gradients nor the loss say it as early
    for rule in ("norm_spike", "loss_spike"):
        assert rule not in findings or findings[rule].first_step > spike.first_step
    assert "second moment" in spike.advice


def test_without_the_collapse_there_is_no_spike():
    findings, _ = train(0.99, lambda step: 1.0 if step < 60 else 1e-6)
    assert "update_spike" not in findings
