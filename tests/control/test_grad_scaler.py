"""Mixed precision: statistics of scaled gradients, and steps that a GradScaler skips.

Real GradScalers on the CPU are used, fp16 autocast included: the scale overflows as it does on a GPU.
"""

from __future__ import annotations

import copy
import math
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp import GradScaler

import gradiometer as gm
from gradiometer import collect_and_clip_
from gradiometer.columns import TENSORS
from support.fake_device import HostWaitError, device_of, watch
from support.gradients import bit_patterns

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.once

COUNTS = ("numel", "n_nan", "n_posinf", "n_neginf")
# the relative error of one rounding to fp32
HALF_ULP = 2.0**-24


def used(scaler: GradScaler) -> GradScaler:
    """Make the scaler create its tensors, which it does at the first loss."""
    scaler.scale(torch.ones(()))
    return scaler


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def backward(model: nn.Module, scaler: GradScaler, dtype: torch.dtype = torch.float16) -> None:
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(8, 6)).float().square().mean()
    scaler.scale(loss).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


# inverse_scale


@pytest.mark.parametrize("scale", [2.0**16, 1.0, 2.0**-3, 3.0, 1000.0, 65537.0, 1e-3])
def test_it_is_what_unscale_multiplies_by(scale):
    scaler = GradScaler("cpu", init_scale=scale)
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter])
    before = gm.inverse_scale(scaler)
    used(scaler)
    inv_scale = gm.inverse_scale(scaler)
    parameter.grad = torch.ones(())
    scaler.unscale_(optimizer)
    assert torch.equal(inv_scale, parameter.grad)
    assert torch.equal(before, inv_scale)
    assert (inv_scale.shape, inv_scale.dtype, inv_scale.device.type) == ((), torch.float32, "cpu")
    assert inv_scale.item() == pytest.approx(1 / scaler.get_scale(), rel=HALF_ULP)


def test_a_scaler_that_is_disabled_scales_by_one():
    assert gm.inverse_scale(GradScaler("cpu", enabled=False)).item() == 1.0
    # it may be made for a device that this machine does not have
    assert gm.inverse_scale(GradScaler("cuda", enabled=False)).item() == 1.0
    # unscale_ does nothing then, whatever the scale was before
    scaler = used(GradScaler("cpu", init_scale=8.0))
    scaler._enabled = False
    assert gm.inverse_scale(scaler).item() == 1.0


def test_the_scaler_of_fsdp_is_one():
    # imported by name: some builds of torch lack it, and this package works without it
    sharded = pytest.importorskip("torch.distributed.fsdp.sharded_grad_scaler")
    scaler = sharded.ShardedGradScaler("cpu", init_scale=8.0)
    assert gm.inverse_scale(scaler).item() == 0.125
    used(scaler).update(new_scale=32.0)
    assert gm.inverse_scale(scaler).item() == 1 / 32
    assert gm.inverse_scale(sharded.ShardedGradScaler("cpu", enabled=False)).item() == 1.0


def test_a_restored_scaler_has_its_old_scale():
    state = {**GradScaler("cpu").state_dict(), "scale": 32.0}
    for scaler in (GradScaler("cpu"), used(GradScaler("cpu"))):
        scaler.load_state_dict(state)
        assert gm.inverse_scale(scaler).item() == 1 / 32


def test_it_is_a_snapshot():
    scaler = used(GradScaler("cpu", init_scale=8.0))
    before = gm.inverse_scale(scaler)
    scaler.update(new_scale=2.0)
    assert (before.item(), gm.inverse_scale(scaler).item()) == (0.125, 0.5)
    before.zero_()
    assert scaler.get_scale() == 2.0


def test_a_scale_of_one_element_is_one_number():
    scaler = used(GradScaler("cpu"))
    scaler._scale = torch.tensor([8.0])
    assert gm.inverse_scale(scaler).shape == ()
    assert gm.inverse_scale(scaler).item() == 0.125


def test_a_scaler_that_keeps_its_scale_elsewhere_is_asked_for_it():
    class Renamed:
        # not used without _scale
        _init_scale = 2.0

        def get_scale(self) -> float:
            return 8.0

    assert gm.inverse_scale(Renamed()).item() == 0.125


@pytest.mark.parametrize("wrong", [65536.0, None, "scaler", torch.ones(()), nn.Linear(1, 1)])
def test_what_is_no_scaler_is_refused(wrong):
    message = rf"inverse_scale: .*GradScaler, got {type(wrong).__name__}; .*inv_scale="
    with pytest.raises(TypeError, match=message):
        gm.inverse_scale(wrong)


def test_nothing_waits():
    with device_of("cuda") as d:
        # a GradScaler for cuda is disabled without a GPU; its scale is on the device of its first loss
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones((), device=d))
        x = {"x": torch.ones(3, device=d)}
        with watch() as seen:
            inv_scale = gm.inverse_scale(scaler)
            stats = gm.collect(x, inv_scale=inv_scale, skip_nonfinite=True)
            assert stats.skipped.device.type == "cuda"
        assert (inv_scale.device.type, inv_scale.shape) == ("cuda", ())
        assert (seen.to_host, seen.to_device) == ([], [])
        with watch(), pytest.raises(HostWaitError):
            # the alternative, which waits
            scaler.get_scale()


# found_inf shared by ranks; with several processes: tests/distributed/test_ranks_clip.py


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("seen_by", ["the scaler", "nobody"])
def test_what_was_found_elsewhere_is_added_to_what_the_scaler_found(found, seen_by):
    model, scaler = small_model(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model, scaler)
    model[0].bias.grad[0] = math.nan if seen_by == "the scaler" else 0.0
    gm.share_found_inf_(scaler, optimizer, gm.collect([torch.tensor([math.inf if found else 0.0])]))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if found or seen_by == "the scaler" else 8.0)


@pytest.mark.parametrize("gradients", [True, False])
def test_to_share_waits_for_nothing(gradients):
    with device_of("cuda") as d:
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones((), device=d))
        parameter = torch.nn.Parameter(torch.ones(3, device=d))
        parameter.grad = torch.ones(3, device=d) if gradients else None
        optimizer = torch.optim.SGD([parameter])
        stats = gm.collect([torch.ones(3, device=d)])
        with watch() as seen:
            gm.share_found_inf_(scaler, optimizer, stats)
        assert (seen.to_host, seen.to_device) == ([], [])


# compiled


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("state", ["used", "unused", "disabled"])
def test_a_compiled_step_reads_the_scale_of_the_moment(state):
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=state != "disabled")
    if state == "used":
        used(scaler)
    model = small_model()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def measure() -> tuple[gm.TensorStats, Tensor]:
        inv_scale = gm.inverse_scale(scaler)
        return gm.collect_grads(model, inv_scale=inv_scale), inv_scale

    backward(model, GradScaler("cpu", enabled=False))
    for i in range(4):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            stats, inv_scale = measure()
        assert inv_scale.item() == 1 / scaler.get_scale()
        expected = gm.collect_grads(model, inv_scale=1 / scaler.get_scale())
        assert torch.equal(stats.columns, expected.columns)
        if state == "used":
            # in place, as GradScaler does
            scaler.update(new_scale=float(2**i))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_dynamo")
def test_a_whole_compiled_step_takes_the_scale_as_an_input():
    scaler = used(GradScaler("cpu", init_scale=2.0**10))
    model = small_model()

    # the methods of a GradScaler cannot be traced
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, inv_scale: Tensor) -> tuple[gm.TensorStats, list[Tensor]]:
        (model(x).square().mean() / inv_scale).backward()
        stats = gm.collect_grads(model, inv_scale=inv_scale, skip_nonfinite=True)
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return stats, grads

    for i in range(4):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            stats, grads = step(torch.randn(8, 6), gm.inverse_scale(scaler))
        expected = gm.collect(dict(zip(stats.names, grads, strict=True)), inv_scale=1 / scaler.get_scale())
        assert torch.equal(stats.columns, expected.columns)
        scaler.update(new_scale=float(2**i))
    assert counters["stats"]["unique_graphs"] == 1


# before and after unscale_


def before_and_after(
    model: nn.Module, scaler: GradScaler, optimizer: torch.optim.Optimizer
) -> tuple[gm.TensorStats, gm.TensorStats]:
    """Measure scaled gradients, which stay as they are, and then the same after unscale_."""
    scaled = gradients(model)
    before = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler), skip_nonfinite=True)
    assert bit_patterns(gradients(model)) == bit_patterns(scaled)
    scaler.unscale_(optimizer)
    assert not torch.equal(gradients(model)[0], scaled[0])
    return before, gm.collect_grads(model, skip_nonfinite=True)


@pytest.mark.parametrize("scale", [2.0**k for k in (-3, 1, 10, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_before_unscale_are_those_after_it(scale, dtype):
    model = small_model()
    scaler = GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters())
    backward(model, scaler, dtype)
    # as in a half-precision layer: some gradients are 0, and one tensor is not finite
    model[0].weight.grad[:, 1] = 0.0
    model[0].bias.grad[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    before, after = before_and_after(model, scaler, optimizer)
    # a power of two causes no rounding, so every column is bit-identical
    for name in TENSORS.index:
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert torch.equal(before.flags, after.flags)
    assert before.skipped.item() is after.skipped.item() is True


@given(scale=st.floats(2.0**-10, 2.0**20, width=32), exponent=st.integers(-20, 20))
def test_for_any_other_scale_they_differ_by_what_unscale_rounds(scale, exponent):
    parameter = nn.Parameter(torch.zeros(1001))
    optimizer = torch.optim.SGD([parameter])
    scaler = used(GradScaler("cpu", init_scale=scale))
    parameter.grad = torch.randn(1001) * 2.0**exponent
    parameter.grad[::7] = 0.0
    magnitudes = parameter.grad.double().abs().sum().item() * gm.inverse_scale(scaler).item()
    before = gm.collect([parameter.grad], inv_scale=gm.inverse_scale(scaler))
    scaler.unscale_(optimizer)
    after = gm.collect([parameter.grad])
    for name in (*COUNTS, "n_zero"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    # each element is rounded once
    for name in ("norm", "abs_max"):
        torch.testing.assert_close(getattr(before, name), getattr(after, name), rtol=1.01 * HALF_ULP, atol=0)
    assert abs(before.sum - after.sum).item() <= 1.01 * HALF_ULP * magnitudes


def test_numbers_that_unscale_rounds_to_zero_are_measured_before_it():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    scaler = used(GradScaler("cpu", init_scale=2.0**16))
    # 2**-136 is a subnormal of fp32; 2**-156 is below its smallest subnormal
    parameter.grad = torch.tensor([2.0**-120, 2.0**-140, 0.0, 1.0])
    inv_scale = gm.inverse_scale(scaler)
    before = gm.collect([parameter.grad], inv_scale=inv_scale)
    scaler.unscale_(optimizer)
    after = gm.collect([parameter.grad])
    assert (before.n_zero.item(), after.n_zero.item()) == (1, 2)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_scaled_gradients_is_clipping_before_they_are_scaled(max_norm):
    model = small_model()
    scaler = GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters())
    backward(model, scaler)
    scaled = gradients(model)
    inv_scale = gm.inverse_scale(scaler)
    stats = collect_and_clip_(model, max_norm, inv_scale=inv_scale, skip_nonfinite=True)
    clipped = gradients(model)
    for p, grad in zip(model.parameters(), scaled, strict=True):
        p.grad = grad.clone()
    scaler.unscale_(optimizer)
    after = collect_and_clip_(model, max_norm, skip_nonfinite=True)
    assert torch.equal(stats.columns, after.columns)
    # multiplication by a power of two commutes with rounding
    assert bit_patterns([grad * inv_scale for grad in clipped]) == bit_patterns(gradients(model))
    assert torch.equal(clipped[0], scaled[0]) is (max_norm == 1e3)


def test_without_inv_scale_norms_are_as_many_times_too_large_as_the_scale():
    model = small_model()
    scaler = GradScaler("cpu", init_scale=2.0**12)
    backward(model, scaler)
    right = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler)).total_norm
    assert torch.equal(gm.collect_grads(model).total_norm, right * 2.0**12)


# uses of found_inf


def overflowing_run(steps: int, optimizer_of: Any = torch.optim.SGD) -> Iterator[dict[str, Any]]:
    """Train in fp16 with a scale that grows until it overflows, again and again."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    # from a scale that overflows down to one that fits, and doubled again every four steps
    scaler = GradScaler("cpu", init_scale=2.0**28, growth_interval=4)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, scaler)
        stats = gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler), skip_nonfinite=True)
        scale, weights = scaler.get_scale(), [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        yield {"stats": stats, "found_inf": sum(found.values()), "scale": scale, "model": model} | {
            "unchanged": all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)),
            "scaler": scaler,
        }
        scaler.update()


@cache
def an_overflowing_run() -> list[dict[str, Any]]:
    """Return 48 training steps; three tests share this computation."""
    return list(overflowing_run(48))


def test_it_agrees_with_what_a_scaler_finds():
    found = [(step["stats"].found_inf, step["found_inf"]) for step in an_overflowing_run()]
    for ours, theirs in found:
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert {ours.item() for ours, _ in found} == {0.0, 1.0}


def test_a_skipped_step_is_skipped_and_does_not_explode():
    skipped, reported = [], []
    for i, step in enumerate(an_overflowing_run()):
        report = step["stats"].materialize()
        if step["unchanged"]:
            skipped.append(i)
        if report.skipped:
            reported.append(i)
            assert report.nan or report.inf
            assert "step skipped" in str(report).splitlines()[0]
        else:
            assert report.total_norm < 10.0
            assert "skipped" not in str(report)
        assert report.exploding == []
        assert not report.has_exploding
    assert reported == skipped
    # at the beginning, and then whenever the scale grows beyond the range of fp16
    assert skipped[:3] == [0, 1, 2]
    assert 3 < len([i for i in skipped if i >= 20]) < 20


def test_what_explodes_in_a_step_that_is_not_skipped_still_does():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e3)
    for skip in (False, True):
        assert gm.collect_grads({"w": parameter}, skip_nonfinite=skip).materialize().exploding == ["w"]
    # unscaled, the values are small
    assert not gm.collect_grads({"w": parameter}, inv_scale=2.0**-10, skip_nonfinite=True).has_exploding


def test_the_scale_follows_it_as_it_follows_the_scaler():
    scale, tracker = torch.full((), 2.0**28), torch.zeros((), dtype=torch.int32)
    for step in an_overflowing_run():
        assert scale.item() == step["scale"]
        torch._amp_update_scale_(scale, tracker, step["stats"].found_inf, 2.0, 0.5, 4)


# fused optimizers

FUSED = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
}
every_fused = pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
    return [x.clone() for state in states for x in state.values() if isinstance(x, Tensor)]


def fused_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    """Step without GradScaler.step and without a wait: the kernel reads both tensors."""
    inv_scale = None if scaler is None else gm.inverse_scale(scaler)
    stats = gm.collect_grads(model, inv_scale=inv_scale)
    optimizer.found_inf = stats.found_inf
    if inv_scale is not None:
        optimizer.grad_scale = inv_scale.reciprocal()
    optimizer.step()


@every_fused
def test_a_fused_optimizer_skips_what_it_finds(fused):
    model = small_model()
    optimizer = fused(model.parameters(), lr=0.1, fused=True)
    off = GradScaler("cpu", enabled=False)
    for bad in (None, math.inf, None, math.nan):
        optimizer.zero_grad()
        backward(model, off, torch.bfloat16)
        if bad is not None:
            model[2].bias.grad[1] = bad
        weight = model[0].weight.detach().clone()
        before = bit_patterns(p.detach() for p in model.parameters()), bit_patterns(state_of(optimizer))
        fused_step(model, optimizer, None)
        if bad is None:
            assert not torch.equal(model[0].weight, weight)
        else:
            assert bit_patterns(p.detach() for p in model.parameters()) == before[0]
            assert bit_patterns(state_of(optimizer)) == before[1]


@every_fused
def test_a_fused_optimizer_unscales_as_a_scaler_makes_it(fused):
    model = small_model()
    twin = copy.deepcopy(model)
    models = [(m, fused(m.parameters(), lr=0.01, fused=True)) for m in (model, twin)]
    scaler = used(GradScaler("cpu", init_scale=2.0**10))
    for i in range(5):
        for k, (m, optimizer) in enumerate(models):
            torch.manual_seed(i)
            optimizer.zero_grad()
            backward(m, scaler)
            if i == 2:
                m[0].weight.grad[0, 0] = math.inf
            if k == 0:
                fused_step(m, optimizer, scaler)
            else:
                scaler.step(optimizer)
        scaler.update()
        ours, theirs = [[*[p.detach() for p in m.parameters()], *state_of(o)] for m, o in models]
        assert bit_patterns(ours) == bit_patterns(theirs)
    assert scaler.get_scale() == 2.0**9


def test_a_scaler_for_a_device_that_is_not_there_is_a_disabled_one():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = GradScaler("cuda")
    assert gm.inverse_scale(scaler).item() == 1.0
    assert gm.inverse_scale(scaler).device.type == "cpu"
