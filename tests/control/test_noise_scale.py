"""The gradient noise scale: unbiased, of least variance for running sums, and near an exact oracle."""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradiometer as gm
from gradiometer.control.noise_scale import _estimate
from support.compiling import graphs, inductor_if_deep, no_recompile, small_model
from support.fake_device import DEVICES, device_of, watch
from support.noise_oracle import least_squares

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("_dynamo", "_one_thread")

F64 = torch.float64
NAN, INF = math.nan, math.inf
EPS = 2.0**-53
# the gradients of three examples
EXAMPLES = torch.tensor([[1.0, 2.0, 0.0], [-3.0, 1.0, 0.5], [2.5, 0.0, 1.0]], dtype=F64)
# gradients of three micro-batches with little noise, so that each step has a finite noise scale
CLEAR = EXAMPLES + 5.0


def mean_and_trace(examples: Tensor) -> tuple[float, float]:
    """Return |G|² and tr(Σ) of gradients of which each is as likely."""
    mean = examples.mean(0)
    return mean.square().sum().item(), (examples - mean).square().sum(1).mean().item()


def assert_unbiased(found: list[Any], atol: float) -> None:
    mean = torch.tensor(found, dtype=F64).mean(0)
    expected = torch.tensor(mean_and_trace(EXAMPLES), dtype=F64)
    torch.testing.assert_close(mean, expected, rtol=0.0, atol=atol)


def stats_of(*grads: Tensor) -> gm.TensorStats:
    return gm.collect([(f"{i}.weight", grad) for i, grad in enumerate(grads)])


def accumulate(noise: gm.NoiseScale, gradients: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    """Make a step of which each micro-batch has one of the gradients, times ``scale``."""
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total = total + gradient * scale
        noise.add(stats_of(total))
    return noise.step()


def of_norms(squares: Sequence[float], **options: Any) -> gm.NoiseScale:
    """Return a noise scale after one step with these squared norms."""
    noise = gm.NoiseScale(1, decay=0.0, reduction="sum", **options)
    for square in squares:
        noise.add(stats_of(torch.tensor([math.sqrt(square)], dtype=F64)))
    noise.step()
    return noise


# the estimates


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_the_estimates_are_unbiased(micro_batches, reduction):
    """Their mean over all sequences of examples is exact."""
    noise = gm.NoiseScale(1, decay=0.0, reduction=reduction)
    found = []
    for chosen in itertools.product(EXAMPLES, repeat=micro_batches):
        accumulate(noise, chosen, 1 / micro_batches if reduction == "mean" else 1.0)
        found.append([noise.squared_norm, noise.trace])
    # each is a sum of a few terms of up to (3 K)² times weights of up to 3
    assert_unbiased(found, 1e4 * EPS * micro_batches)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_result_is_in_examples(batch_size):
    noise = gm.NoiseScale(batch_size, decay=0.0)
    found = []
    for chosen in itertools.product(EXAMPLES, repeat=2 * batch_size):
        parts = torch.stack(chosen).view(2, batch_size, -1).mean(1)
        accumulate(noise, list(parts), 0.5)
        found.append([noise.squared_norm, noise.trace])
    assert_unbiased(found, 1e5 * EPS)


def test_the_estimates_of_two_micro_batches_are_those_of_the_paper():
    # |G|² = (B |G_B|² - b |G_b|²) / (B - b), S = (|G_b|² - |G_B|²) / (1/b - 1/B)
    small, big = 7.0, 3.0
    noise = gm.NoiseScale(16, decay=0.0)
    for square in (small / 4, big):  # the loss is divided by two
        noise.add(stats_of(torch.tensor([math.sqrt(square)], dtype=F64)))
    scale = noise.step()
    squared_norm, trace = (32 * big - 16 * small) / 16, (small - big) / (1 / 16 - 1 / 32)
    assert noise.squared_norm.item() == pytest.approx(squared_norm, rel=1e-13)
    assert noise.trace.item() == pytest.approx(trace, rel=1e-13)
    assert scale.item() == pytest.approx(INF if squared_norm <= 0 else trace / squared_norm, rel=1e-13)


CASES = [(1, 1, 2), (4, 1, 5), (7, 1, 8), (1, 2, 1), (1, 3, 2), (2, 2, 2), (3, 4, 4), (3, 3, 3), (1, 49, 1)]


@pytest.mark.parametrize(("own", "size", "micro_batches"), CASES)
def test_they_are_the_best_linear_estimates_for_large_noise(own, size, micro_batches):
    ranks = torch.rand(size, own, dtype=F64)
    mean = torch.rand((), dtype=F64)
    each = []
    for squares in ranks:
        noise = gm.NoiseScale(1)
        for square in (*squares, mean):
            noise._add(square)
        each.append(noise.sums[:5])
    # not reading out more than what the ranks add up
    sums = torch.stack(each).sum(0)
    signal, noise, count, is_known = _estimate(sums, size, same_last=own == micro_batches)
    every = torch.cat([ranks.mean(0), size**2 * mean[None]])
    expected = least_squares(every, own, size, micro_batches)
    # the condition number of this system is below 1e4 n²
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(torch.stack([signal, noise]), expected, **close)
    assert is_known
    assert count == micro_batches


@pytest.mark.parametrize(("size", "micro_batches", "own"), [(2, 1, 1), (2, 2, 1), (2, 2, 2), (3, 1, 1)])
def test_estimates_from_ranks_are_unbiased(size, micro_batches, own):
    found = []
    for chosen in itertools.product(EXAMPLES, repeat=size * micro_batches):
        runs = torch.stack(chosen).view(size, micro_batches, -1).cumsum(1)
        sums = torch.zeros(5, dtype=F64)
        for run in runs:
            noise = gm.NoiseScale(1)
            for total in (*run[:own], runs[:, -1].mean(0)):
                noise.add(stats_of(total))
            sums += noise.sums[:5]
        found.append(_estimate(sums, size, same_last=own == micro_batches)[:2])
    assert_unbiased(found, 1e5 * EPS)


# a training step, and the exact noise scale from the gradient of each example

N, WIDTH, BATCH, MICRO, STEPS = 512, 64, 32, 8, 200
GROUPS = {"first": r"^0\.", "second": r"^2\.", "all": ""}


class Oracle(NamedTuple):
    scale: float
    # of the value after all steps, relative to it
    deviation: float


def oracle(examples: Tensor, decay: float) -> Oracle:
    """Return the exact noise scale of equally likely gradients, and the deviation of its estimate.

    Of two running sums of M <= N examples ξ + G, the squared norms times b² have the covariance

        4 M²N GᵀΣG + 2 M (M + N) E[G·ξ |ξ|²] + M Var |ξ|² + 2 M (M - 1) tr(Σ²)
    """
    mean = examples.mean(0)
    xi = examples - mean
    squares, along = xi.square().sum(1), xi @ mean
    signal, trace = mean @ mean, squares.mean()
    moments = along.square().mean(), (along * squares).mean(), squares.var(correction=0)
    of_square = (xi @ xi.T).square().mean()
    sizes = BATCH * torch.arange(1, MICRO + 1, dtype=F64)
    small, large = torch.minimum(sizes[:, None], sizes), torch.maximum(sizes[:, None], sizes)
    covariance = 4 * small**2 * large * moments[0] + 2 * small * (small + large) * moments[1]
    covariance += small * moments[2] + 2 * small * (small - 1) * of_square
    covariance /= BATCH**4
    # the estimates are linear: columns are their weights; the last norm counts as that of one rank
    weights = least_squares(torch.eye(MICRO, dtype=F64), MICRO - 1, 1, MICRO)
    relative = weights[1] / (trace / BATCH) - weights[0] / signal
    # the share of each step in the average
    share = (1 - decay) * decay ** torch.arange(STEPS, dtype=F64) / (1 - decay**STEPS)
    variance = relative @ covariance @ relative * share.square().sum()
    return Oracle((trace / signal).item(), variance.sqrt().item())


def test_after_200_steps_it_is_within_5_percent_of_the_oracle():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(N, WIDTH, dtype=F64)
    y = x + 0.5 * torch.randn(N, WIDTH, dtype=F64)
    each = []
    for example in zip(x, y, strict=True):
        grads = torch.autograd.grad(nn.functional.mse_loss(model(example[0]), example[1]), model.parameters())
        each.append([grad.flatten() for grad in grads])
    parts = [torch.stack(grads) for grads in zip(*each, strict=True)]
    decay = 0.999
    expected = {
        "first": oracle(torch.cat(parts[:2], 1), decay),
        "second": oracle(torch.cat(parts[2:], 1), decay),
        "all": oracle(torch.cat(parts, 1), decay),
    }
    # four standard deviations, so 5 % is a fair bound
    assert 4 * expected["all"].deviation < 0.05

    noise, total = gm.NoiseScale(BATCH, groups=GROUPS, decay=decay), gm.NoiseScale(BATCH, decay=decay)
    # drawn with replacement, so that micro-batches are independent
    for indices in torch.randint(N, (STEPS, MICRO, BATCH)):
        for index in indices:
            loss = nn.functional.mse_loss(model(x[index]), y[index])
            (loss / MICRO).backward()
            stats = gm.collect_grads(model)
            noise.add(stats)
            total.add(stats)
        found, scale = noise.step(), total.step()
        model.zero_grad()
    assert noise.names == tuple(GROUPS)
    assert noise.steps.tolist() == [STEPS] * 3
    # sums in another order
    assert scale.item() == pytest.approx(found[2].item(), rel=1e-9)
    assert abs(scale.item() / expected["all"].scale - 1) < 0.05
    for value, each_group in zip(found.tolist(), expected.values(), strict=True):
        assert abs(value / each_group.scale - 1) < 4 * each_group.deviation


# averages


def test_estimates_are_averaged_before_they_are_divided():
    noise = gm.NoiseScale(1, decay=0.5)
    norms = torch.rand(3, 4, 3, dtype=F64)
    signals, traces = gm.EMA(decay=0.5), gm.EMA(decay=0.5)
    for gradients in norms:
        accumulate(noise, list(gradients), 1 / 4)
        alone = gm.NoiseScale(1, decay=0.0)
        accumulate(alone, list(gradients), 1 / 4)
        signals(alone.squared_norm)
        traces(alone.trace)
    assert torch.equal(noise.squared_norm, signals.value)
    assert torch.equal(noise.trace, traces.value)
    assert torch.equal(noise.value, traces.value / signals.value)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_number_of_micro_batches_may_change(reduction):
    """Two numbers, and all sequences of each: the mean of all is exact."""
    squared_norm, trace = mean_and_trace(EXAMPLES)
    noise = gm.NoiseScale(1, decay=1 - 1e-9, reduction=reduction)
    three = list(itertools.product(EXAMPLES, repeat=3))
    for chosen, *others in zip(itertools.cycle(itertools.product(EXAMPLES, repeat=2)), three, strict=False):
        accumulate(noise, chosen, 0.5 if reduction == "mean" else 1.0)
        accumulate(noise, others[0], 1 / 3 if reduction == "mean" else 1.0)
    # 27 and 27 steps; weights differ by 54 times 1 - decay
    assert noise.squared_norm.item() == pytest.approx(squared_norm, abs=1e-6)
    assert noise.trace.item() == pytest.approx(trace, abs=1e-6)


def test_it_does_not_depend_on_the_unit_of_the_loss_if_the_number_is_constant():
    gradients = 2 + torch.randn(5, 4, 3, dtype=F64)
    found = []
    for reduction, scale in (("mean", 0.25), ("sum", 1.0), ("mean", 1.0)):
        noise = gm.NoiseScale(2, reduction=reduction)
        found.append([accumulate(noise, list(each), scale).item() for each in gradients])
    # all factors are powers of two
    assert all(map(math.isfinite, found[0]))
    assert found[0] == found[1] == found[2]


def test_before_there_is_data_the_value_is_nan():
    noise = gm.NoiseScale(4)
    assert noise.value.isnan()
    assert noise.squared_norm.isnan()
    assert noise.trace.isnan()
    assert noise.steps == 0
    # a step without a backward
    assert noise.step().isnan()


@pytest.mark.parametrize("known", [False, True])
def test_a_step_with_one_micro_batch_changes_nothing(known):
    noise = gm.NoiseScale(4)
    if known:
        accumulate(noise, list(EXAMPLES))
    before = noise.average.state.clone()
    value = accumulate(noise, list(EXAMPLES[:1]))
    assert torch.equal(noise.average.state, before)
    assert value.isnan() != known
    # not counted with the next step
    again = gm.NoiseScale(4)
    again.load_state_dict(noise.state_dict())
    assert torch.equal(accumulate(noise, list(EXAMPLES)), accumulate(again, list(EXAMPLES)))
    assert torch.equal(noise.sums, torch.zeros_like(noise.sums))


@pytest.mark.parametrize(
    ("squares", "squared_norm", "trace", "value"),
    [
        # |G|² = (q₂ - 2 q₁) / 2, tr(Σ) = 2 q₁ - q₂ / 2
        ([1.0, 3.0], 0.5, 0.5, 1.0),
        ([1.0, 2.0], 0.0, 1.0, INF),
        ([1.0, 1.0], -0.5, 1.5, INF),
        ([1.0, 4.0], 1.0, 0.0, 0.0),
        ([1.0, 6.0], 2.0, -1.0, 0.0),
        ([0.0, 0.0], 0.0, 0.0, NAN),
    ],
    ids=["usual", "no signal", "negative signal", "no noise", "negative noise", "no gradient"],
)
def test_an_estimate_that_is_not_positive(squares, squared_norm, trace, value):
    noise = of_norms(squares)
    for found, expected in ((noise.squared_norm, squared_norm), (noise.trace, trace)):
        assert found.item() == pytest.approx(expected, abs=1e-14)
    if squared_norm:
        assert noise.value.item() == pytest.approx(value, rel=1e-13, abs=1e-14)
    elif trace:
        # up to the rounding of the norms
        assert noise.value > 1e14
    else:
        assert noise.value.isnan()


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1.0, 1e3, 1e150, NAN, INF]), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_the_value_is_never_negative_and_nan_only_without_an_estimate_or_gradient(norms, steps):
    noise = gm.NoiseScale(1)
    for _ in range(steps):
        for norm in norms:
            noise.add(stats_of(torch.tensor([norm], dtype=F64)))
        value = noise.step()
    assert not value < 0
    if value.isnan():
        assert noise.steps == 0 or (noise.squared_norm <= 0 and noise.trace <= 0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_non_finite_gradient_leaves_the_averages_unchanged(bad, place):
    noise = gm.NoiseScale(4)
    accumulate(noise, list(CLEAR))
    before = noise.average.state.clone()
    total = CLEAR.cumsum(0)
    for i, row in enumerate(total):
        spoilt = torch.cat([row, row.new_tensor([bad])])
        noise.add(stats_of(spoilt if i == place else row))
    value = noise.step()
    assert torch.equal(noise.average.state, before)
    assert value.isfinite()
    # nor does it persist
    twin = gm.NoiseScale(4)
    for _ in range(2):
        accumulate(twin, list(CLEAR))
    assert torch.equal(accumulate(noise, list(CLEAR)), twin.value)


def test_a_non_finite_gradient_leaves_the_averages_of_its_group_alone_unchanged():
    noise = gm.NoiseScale(4, groups={"a": r"^0", "b": r"^1", "all": ""})
    for i, row in enumerate(CLEAR.cumsum(0)):
        noise.add(stats_of(row, row * NAN if i == 1 else row))
    value = noise.step()
    assert noise.steps.tolist() == [1.0, 0.0, 0.0]
    assert value.isnan().tolist() == [False, True, True]
    alone = gm.NoiseScale(4)
    assert torch.equal(accumulate(alone, list(CLEAR)), value[0])


def test_reset_forgets_everything_in_place():
    noise = gm.NoiseScale(4)
    accumulate(noise, list(EXAMPLES))
    noise.add(stats_of(EXAMPLES[0]))
    addresses = [buffer.data_ptr() for buffer in noise.buffers()]
    assert noise.reset_() is noise
    assert [buffer.data_ptr() for buffer in noise.buffers()] == addresses
    assert noise.value.isnan()
    assert torch.equal(accumulate(noise, list(EXAMPLES)), accumulate(gm.NoiseScale(4), list(EXAMPLES)))


def test_scaled_gradients_are_measured_unscaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = small_model()
    twin = copy.deepcopy(model)
    noise, expected = gm.NoiseScale(5, decay=0.0), gm.NoiseScale(5, decay=0.0)
    for _ in range(3):
        x = torch.randn(5, 4)
        scaler.scale(model(x).square().mean() / 3).backward()
        noise.add(gm.collect_grads(model, inv_scale=gm.inverse_scale(scaler)))
        (twin(x).square().mean() / 3).backward()
        expected.add(gm.collect_grads(twin))
    # a power of two
    assert torch.equal(noise.step(), expected.step())


# as a module

GRADIENTS = 2 + torch.randn(6, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def owner_of(noise: gm.NoiseScale) -> nn.Module:
    owner = nn.Linear(3, 2)
    owner.noise = noise
    return owner


@pytest.mark.parametrize("copied", ["state_dict", "assign", "deepcopy"])
def test_a_copy_goes_on_identically(copied):
    noise = gm.NoiseScale(4, groups={"a": r"^0", "all": ""})
    for gradients in GRADIENTS[:3]:
        accumulate(noise, list(gradients))
    # in the middle of a step
    noise.add(stats_of(GRADIENTS[3, 0]))
    owner = owner_of(noise)
    if copied == "deepcopy":
        again = copy.deepcopy(owner).noise
    else:
        again = gm.NoiseScale(4, groups={"a": r"^0", "all": ""})
        state = copy.deepcopy(owner.state_dict())
        owner_of(again).load_state_dict(state, assign=copied == "assign")
    for each in (noise, again):
        each.add(stats_of(GRADIENTS[3, :2].sum(0)))
    assert torch.equal(again.step(), noise.step())
    for gradients in GRADIENTS[4:]:
        assert torch.equal(accumulate(again, list(gradients)), accumulate(noise, list(gradients)))
    # and independently
    accumulate(again, list(EXAMPLES))
    assert not torch.equal(again.average.state, noise.average.state)


CASTS = {"half": lambda m: m.half(), "to": lambda m: m.to(torch.bfloat16), "float": lambda m: m.float()}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_of_its_owner_leaves_it_as_it_is(cast):
    noise, twin = gm.NoiseScale(4), gm.NoiseScale(4)
    for each in (noise, twin):
        accumulate(each, list(GRADIENTS[0]))
        each.add(stats_of(GRADIENTS[1, 0]))
    cast(owner_of(noise))
    assert {buffer.dtype for buffer in noise.buffers()} == {F64}
    for each in (noise, twin):
        each.add(stats_of(GRADIENTS[1].sum(0)))
    assert torch.equal(noise.step(), twin.step())


def test_its_repr_says_what_it_is():
    said = "NoiseScale(\n  batch_size=8, reduction='mean'\n  (average): EMA("
    assert repr(gm.NoiseScale(8)).startswith(said)
    assert "groups=['a', 'all']" in repr(gm.NoiseScale(8, groups={"a": "x", "all": ""}))


# refused arguments


@pytest.mark.parametrize("batch_size", [0, -1, NAN, INF, "8", None, True])
def test_a_batch_size_out_of_range_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"batch_size must be a positive number of examples"):
        gm.NoiseScale(batch_size)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reduction": "none"}, ValueError, r"reduction='none'\): reduction must be 'mean', .* or 'sum'"),
        ({"decay": 1.0}, ValueError, r"decay must be a number in \[0, 1\)"),
        ({"ranks": True}, TypeError, r"ranks must be gm.Ranks\(model\), got bool"),
        ({"groups": "all"}, TypeError, "rules must be a mapping"),
        ({"groups": [("a", "x"), ("a", "y")]}, ValueError, "unique strings"),
        ({"groups": {"a": nn.Linear(2, 1)}}, TypeError, "the rule of group 'a' is a module; use a pattern"),
        ({"groups": {"a": [nn.Linear(2, 1)]}}, TypeError, "the rule of group 'a' is a module; use a pattern"),
    ],
    ids=["reduction", "decay", "ranks", "groups", "names", "module", "modules"],
)
def test_invalid_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        gm.NoiseScale(8, **options)


def test_groups_take_the_rules_of_group():
    rules = {"pattern": r"^0", "names": ["1.weight"], "predicate": lambda name: name.startswith("0")}
    noise = gm.NoiseScale(4, groups=rules, decay=0.0)
    for row in CLEAR.cumsum(0):
        noise.add(stats_of(row, 2 * row))
    assert noise.step().isfinite().all()
    assert noise.trace.tolist() == [noise.trace[0], 4 * noise.trace[0], noise.trace[0]]


@pytest.mark.parametrize(
    ("stats", "error", "words"),
    [
        (torch.ones(()), TypeError, "expected the TensorStats that collect_grads returns, got Tensor"),
        (None, TypeError, "got NoneType"),
        (gm.collect([]), ValueError, r"no parameter has a gradient; call add after each backward"),
        (gm.collect_grads(nn.Linear(2, 1)), ValueError, "no parameter has a gradient"),
    ],
    ids=["tensor", "none", "no rows", "no gradients"],
)
def test_statistics_that_do_not_fit_are_refused_and_change_nothing(stats, error, words):
    noise = gm.NoiseScale(8)
    noise.add(stats_of(EXAMPLES[0]))
    before = noise.sums.clone()
    with pytest.raises(error, match=words):
        noise.add(stats)
    assert torch.equal(noise.sums, before)


def test_statistics_on_another_device_are_refused():
    with pytest.raises(ValueError, match=r"stats are on cpu, but its state is on meta; .*device='cpu'"):
        gm.NoiseScale(8, device="meta").add(stats_of(EXAMPLES[0]))


def test_a_hook_needs_ranks_and_ddp():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"has no ranks; create it with ranks=gm.Ranks\(model\)"):
        gm.NoiseScale(8).register_comm_hook(model)
    with pytest.raises(TypeError, match=r"expected a DistributedDataParallel model, got Linear; with FSDP2"):
        gm.NoiseScale(8, ranks=gm.Ranks(model)).register_comm_hook(model)


def test_with_one_rank_it_is_that_of_one_process():
    model = nn.Linear(3, 1, bias=False)
    alone, one = gm.NoiseScale(4), gm.NoiseScale(4, ranks=gm.Ranks(model))
    for gradients in GRADIENTS:
        assert torch.equal(accumulate(alone, list(gradients)), accumulate(one, list(gradients)))


# on the device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [None, {"a": r"^0", "all": ""}])
def test_a_step_never_waits(device, groups):
    with device_of(device) as d:
        noise = gm.NoiseScale(4, groups=groups, device=d)
        stats = [gm.collect([("0.weight", torch.ones(3, device=d))]) for _ in range(3)]
        with watch() as seen:
            for each in stats:
                noise.add(each)
            scale = noise.step()
            noise.trace.add(noise.squared_norm).add(noise.steps)
            noise.reset_()
        assert scale.device.type == device
        assert (seen.to_host, seen.to_device) == ([], [])


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.noise = gm.NoiseScale(5)
        self.groups = gm.NoiseScale(5, groups={"first": r"^0\.", "all": ""}, decay=0.9)


def accumulation(model: Trained, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A whole step: three micro-batches, and an update that depends on the noise scale."""
    for part in range(3):
        (nn.functional.mse_loss(model.body(x[part]), y[part]) / 3).backward()
        stats = gm.collect_grads(model.body)
        model.noise.add(stats)
        model.groups.add(stats)
    scale, groups = model.noise.step(), model.groups.step()
    with torch.no_grad():
        rate = torch.where(scale < 100.0, 0.1, 0.01)
        for p in model.body.parameters():
            p.sub_(rate * p.grad)
    for p in model.body.parameters():
        p.grad = None
    return scale, groups


@inductor_if_deep
def test_one_compiled_step_holds_the_whole_accumulation(backend):
    model, twin = Trained(), Trained()
    step = torch.compile(accumulation, fullgraph=True, backend=backend)

    def compare(factor: float = 1.0) -> None:
        x, y = factor * torch.randn(3, 5, 4), torch.randn(3, 5, 3)
        found, expected = step(model, x, y), accumulation(twin, x, y)
        if backend == "aot_eager":
            # the operators of an eager step, so its bits too
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))
            assert torch.equal(model.noise.average.state, twin.noise.average.state)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, equal_nan=True)

    compare()
    with no_recompile():
        compare()
        compare(NAN)
        saved = copy.deepcopy(model.state_dict())
        for each in (model, twin):
            for p in each.body.parameters():
                p.data.nan_to_num_(0.1)
            each.noise.load_state_dict({k[6:]: v for k, v in saved.items() if k.startswith("noise.")})
        compare()
    assert model.noise.steps == 3
    assert graphs() == 1


@inductor_if_deep
def test_micro_batches_of_any_number_run_in_one_graph(backend):
    """The count is on the device, so that each micro-batch runs in the same graph, and so does each step."""
    noise, twin = gm.NoiseScale(4), gm.NoiseScale(4)

    def add_norm(x: Tensor) -> Tensor:
        noise.add(gm.collect({"w": x}))
        # torch may lose a None that a graph returns
        return x

    add = torch.compile(add_norm, fullgraph=True, backend=backend)
    step = torch.compile(noise.step, fullgraph=True, backend=backend)
    add(EXAMPLES[0])
    step()
    with no_recompile():
        for number in (2, 5, 1, 3):
            total = torch.zeros(3, dtype=F64)
            for _ in range(number):
                total = total + 2 + torch.randn(3, dtype=F64)
                add(total)
                twin.add(gm.collect({"w": total}))
            found, expected = step(), twin.step()
            # Inductor may fuse a multiplication and an addition
            close = {"rtol": 0.0, "atol": 0.0} if backend == "aot_eager" else {"rtol": 1e-12, "atol": 0.0}
            torch.testing.assert_close(found, expected, **close)
    assert noise.steps == 3
    assert graphs() == 2
