"""Cosines between micro-batches: those of the projections themselves, in eager and compiled steps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.control.gradient_cosines import cosines_of, mean_cosine, twins, unit
from support.compiling import batch, graphs, no_recompile, small_model
from support.fake_device import DEVICES, device_of, watch

pytestmark = pytest.mark.usefixtures("_dynamo", "_one_thread")

F64 = torch.float64
EPS = 2.0**-53
# whole numbers, so that sums and their differences are exact
PARTS = [
    {"0.weight": torch.tensor([[3.0, 1.0, -2.0]]), "0.bias": torch.tensor([1.0])},
    {"0.weight": torch.tensor([[2.0, 2.0, -1.0]]), "0.bias": torch.tensor([-4.0])},
    {"0.weight": torch.tensor([[-3.0, 0.0, 5.0]]), "0.bias": torch.tensor([2.0])},
    {"0.weight": torch.tensor([[0.0, 7.0, 1.0]]), "0.bias": torch.tensor([6.0])},
]
GROUPS = {"weight": "weight", "bias": "bias"}


def model_of():
    return nn.Sequential(nn.Linear(3, 1))


def projected(grads, count=64, seed=0):
    return gm.collect_projections(grads, projections=count, seed=seed)


def accumulate(agreement, parts, scale=1.0):
    total = {name: torch.zeros_like(x) for name, x in PARTS[0].items()}
    for part in parts:
        total = {name: total[name] + scale * part[name] for name in total}
        agreement.add(projected(total, agreement.projections))
    return agreement.step()


def pairwise(vectors):
    """Return the cosines of all pairs, in order."""
    return torch.stack(
        [nn.functional.cosine_similarity(a, b, dim=0) for a, b in itertools.combinations(vectors, 2)]
    )


def expected(parts, rows=slice(None)):
    return pairwise([projected(part).projections[rows].sum(0) for part in parts])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_cosines_are_those_of_the_projections(count):
    agreement = gm.GradientAgreement(model_of(), groups=GROUPS)
    found = accumulate(agreement, PARTS[:count])
    assert found.names == ("total", "weight", "bias")
    assert found.micro_batches == count
    for row, of in enumerate([slice(None), slice(0, 1), slice(1, 2)]):
        cosines = expected(PARTS[:count], of)
        # sums of 64 products of small whole numbers
        torch.testing.assert_close(found.cosine[row], cosines.mean(), rtol=0, atol=100 * EPS)
        torch.testing.assert_close(found.lowest[row], cosines.min(), rtol=0, atol=100 * EPS)
        pair = list(itertools.combinations(range(count), 2))[int(cosines.argmin())]
        # of a bias of one element, several cosines may be -1
        assert tuple(found.lowest_pair[row].tolist()) == pair or row == 2


def test_a_scale_changes_nothing():
    plain, scaled = (accumulate(gm.GradientAgreement(model_of()), PARTS, scale) for scale in (1.0, 2.0**-14))
    assert torch.equal(plain.cosine, scaled.cosine)
    assert torch.equal(plain.lowest, scaled.lowest)


def test_separate_gradients_give_the_same():
    agreement = gm.GradientAgreement(model_of(), accumulates=False)
    for part in PARTS:
        agreement.add(projected(part))
    assert torch.equal(agreement.step().cosine, accumulate(gm.GradientAgreement(model_of()), PARTS).cosine)


def test_the_number_of_micro_batches_may_differ():
    agreement = gm.GradientAgreement(model_of())
    for count in (3, 2, 4, 2):
        found = accumulate(agreement, PARTS[:count])
        alone = accumulate(gm.GradientAgreement(model_of()), PARTS[:count])
        assert found.micro_batches == count
        assert torch.equal(found.cosine, alone.cosine)
        assert not agreement.counts.any()


def test_one_micro_batch_and_none_have_no_cosine():
    agreement = gm.GradientAgreement(model_of(), groups=GROUPS)
    for parts in ([], PARTS[:1]):
        found = accumulate(agreement, parts)
        assert found.micro_batches == len(parts)
        assert found.cosine.isnan().all()
        assert found.lowest.isnan().all()


def test_equal_micro_batches_are_twins():
    found = accumulate(gm.GradientAgreement(model_of()), [PARTS[i] for i in (0, 1, 0, 2, 1)])
    assert found.twins[:5].tolist() == [0, 1, 0, 3, 1]


def test_a_zero_gradient_is_left_out_and_is_no_twin():
    zero = {name: torch.zeros_like(x) for name, x in PARTS[0].items()}
    found = accumulate(gm.GradientAgreement(model_of()), [zero, PARTS[0], zero, PARTS[1]])
    torch.testing.assert_close(found.cosine[0], expected(PARTS[:2])[0], rtol=0, atol=100 * EPS)
    assert found.lowest_pair[0].tolist() == [1, 3]
    assert found.twins[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pairs_with_a_nan_or_inf_are_left_out(bad):
    broken = {"0.weight": torch.tensor([[3.0, 1.0, bad]]), "0.bias": torch.tensor([1.0])}
    agreement = gm.GradientAgreement(model_of(), groups=GROUPS, accumulates=True)
    found = accumulate(agreement, [PARTS[0], PARTS[1], broken, PARTS[2]])
    # the running sums after it have it, too
    torch.testing.assert_close(found.cosine[0], expected(PARTS[:2])[0], rtol=0, atol=100 * EPS)
    # the group of biases has none
    parts = [PARTS[0], PARTS[1], broken, PARTS[2]]
    cosines = expected([{"0.bias": part["0.bias"]} for part in parts])
    torch.testing.assert_close(found.cosine[2], cosines.mean(), rtol=0, atol=100 * EPS)
    # the next step is not affected
    assert found.twins[:4].tolist() == [0, 1, 2, 3]
    again = accumulate(agreement, PARTS)
    alone = accumulate(gm.GradientAgreement(model_of(), groups=GROUPS), PARTS)
    assert torch.equal(again.cosine, alone.cosine)


def test_a_missing_gradient_counts_as_zero():
    agreement = gm.GradientAgreement(model_of(), accumulates=False)
    agreement.add(projected({"0.weight": PARTS[0]["0.weight"]}))
    agreement.add(projected(PARTS[1]))
    zero = {**PARTS[0], "0.bias": torch.zeros(1)}
    torch.testing.assert_close(agreement.step().cosine[0], expected([zero, PARTS[1]])[0])


def test_from_the_64th_on_micro_batches_count_as_one():
    agreement = gm.GradientAgreement(model_of(), accumulates=False)
    for i in range(70):
        agreement.add(projected({"0.weight": torch.full((1, 3), float(i + 1)), "0.bias": torch.ones(1)}))
    found = agreement.step()
    assert found.micro_batches == 64
    last = {"0.weight": torch.full((1, 3), float(sum(range(64, 71)))), "0.bias": torch.full((1,), 7.0)}
    first = {"0.weight": torch.full((1, 3), 1.0), "0.bias": torch.ones(1)}
    cosine = expected([first, last])[0]
    assert found.lowest <= cosine + 100 * EPS
    assert found.lowest_pair[0].tolist()[0] == 0


def test_the_model_itself_is_measured_and_only_due_steps():
    torch.manual_seed(0)
    model = small_model()
    given, own = gm.GradientAgreement(model), gm.GradientAgreement(model, every=2)
    for step in range(4):
        for size in (5, 6):
            x, y = batch(size)
            nn.functional.mse_loss(model(x), y).backward()
            given.add(gm.collect_projections(model, projections=64))
            own.add()
        assert own.is_due == (step % 2 == 0)
        found, mine = given.step(), own.step()
        assert mine.micro_batches == (0 if step % 2 else 2)
        wanted = torch.full_like(found.cosine, math.nan) if step % 2 else found.cosine
        torch.testing.assert_close(mine.cosine, wanted, equal_nan=True)
        model.zero_grad()


def test_names_of_scalars():
    agreement = gm.GradientAgreement(model_of(), groups=GROUPS)
    scalars = agreement.scalars(accumulate(agreement, PARTS))
    assert list(scalars) == ["micro_batch_cosine", "micro_batch_cosine.weight", "micro_batch_cosine.bias"]
    assert all(x.dim() == 0 for x in scalars.values())


# the deviation of an estimate, and the noise scale


def test_the_deviation_of_a_cosine_is_as_stated():
    torch.manual_seed(0)
    a, noise = torch.randn(2, 2000, dtype=F64)
    b = a + noise
    truth = nn.functional.cosine_similarity(a, b, dim=0)
    errors = []
    for seed in range(200):
        agreement = gm.GradientAgreement({"w": a}, accumulates=False, seed=seed)
        for x in (a, b):
            # in one tensor, or in many: the number of projections matters
            parts = {"w": x} if seed % 2 else {f"{i}": part for i, part in enumerate(x.split(100))}
            agreement.add(projected(parts, seed=seed))
        errors.append(agreement.step().cosine[0] - truth)
    deviation = torch.stack(errors).std() / ((1 - truth**2) / 8)
    # the deviation of 200 values is known to 5 %
    assert 0.8 < deviation < 1.2


def test_it_agrees_with_the_noise_scale():
    """E cos = |G|² / (|G|² + tr(Σ) / b) if both are far larger than what differs between micro-batches."""
    torch.manual_seed(0)
    size, examples = 2000, 8
    gradient = torch.randn(size, dtype=F64)
    noise = gm.NoiseScale(examples, decay=0.999, reduction="sum")
    cosines = []
    for step in range(100):
        # signs of their own in each step, so that their errors average out
        agreement = gm.GradientAgreement({"w": gradient}, seed=step)
        total = torch.zeros(size, dtype=F64)
        for _ in range(4):
            # tr(Σ) / b = 2 |G|² on average
            total += gradient + math.sqrt(2.0) * torch.randn(size, dtype=F64)
            agreement.add(projected({"w": total}, seed=step))
            noise.add(gm.collect({"w": total}))
        noise.step()
        cosines.append(agreement.step().cosine[0])
    predicted = noise.squared_norm / (noise.squared_norm + noise.trace / examples)
    # (1 - c²) / sqrt(64), over 100 steps: 0.011, with four pairs or so in each
    assert abs(torch.stack(cosines).mean() - predicted) < 0.04
    assert abs(predicted - 1 / 3) < 0.02


# compiled steps, devices


def test_a_compiled_step_gives_the_same():
    torch.manual_seed(0)
    eager, compiled = model_of().to(F64), model_of().to(F64)
    compiled.load_state_dict(eager.state_dict())
    inputs = torch.randn(3, 2, 4, 3, dtype=F64)

    def step_of(model, agreement):
        def step(parts):
            for p in model.parameters():
                p.grad = None
            for x in parts:
                model(x).square().mean().backward()
                agreement.add()
            return agreement.step()

        return step

    alone = step_of(eager, gm.GradientAgreement(eager, groups=GROUPS))
    whole = step_of(compiled, gm.GradientAgreement(compiled, groups=GROUPS))
    whole = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for i, parts in enumerate(inputs):
        with no_recompile() if i > 1 else torch.no_grad().__class__(), torch.enable_grad():
            found = whole(parts.unbind())
        wanted = alone(parts.unbind())
        assert found.names == wanted.names
        for a, b in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert graphs() <= 2


@pytest.mark.parametrize("name", DEVICES)
def test_nothing_waits_for_the_device(name):
    with device_of(name) as device:
        grads = {key: torch.ones(x.shape, device=device) for key, x in PARTS[0].items()}
        agreement = gm.GradientAgreement(grads, groups=GROUPS)
        stats = projected(grads)
        with watch() as seen:
            for _ in range(3):
                agreement.add(stats)
            found = agreement.step()
            agreement.scalars(found)
        assert found.cosine.device.type == name
        assert (seen.to_host, seen.to_device) == ([], [])
        if name == "cuda":
            other = gm.GradientAgreement(grads, device="cpu")
            with pytest.raises(ValueError, match=r"stats are on cuda:0, but its state is on cpu; create it"):
                other.add(stats)


# arguments


def test_it_keeps_nothing_in_a_state_dict():
    model = model_of()
    agreement = gm.GradientAgreement(model)
    assert not agreement.state_dict()
    assert not list(agreement.parameters())
    assert repr(agreement) == "GradientAgreement(2 tensors, projections=64)"
    agreement = gm.GradientAgreement(model, groups=GROUPS, every=3, projections=8)
    assert repr(agreement) == (
        "GradientAgreement(2 tensors, projections=8, groups=['weight', 'bias'], every=3)"
    )
    assert agreement.half().sums.dtype == F64


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"projections": 10}, ValueError, "projections must be one of 8, 16"),
        ({"ranks": True}, TypeError, "ranks must be gm.Ranks"),
        ({"every": 0}, ValueError, "every must be a positive integer"),
        ({"groups": "weight"}, TypeError, "rules must be a mapping"),
        (
            {"groups": {"a": nn.Linear(1, 1)}},
            TypeError,
            "GradientAgreement: the rule of group 'a' is a module",
        ),
        ({"groups": {"a": "("}}, ValueError, "not a regular expression"),
        ({"seed": -1}, ValueError, "seed must be an integer"),
    ],
)
def test_options_that_cannot_be_used(options, error, said):
    with pytest.raises(error, match=said):
        gm.GradientAgreement(model_of(), **options)


def test_statistics_that_do_not_fit():
    agreement = gm.GradientAgreement(model_of())
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        agreement.add()
    with pytest.raises(ValueError, match=r"these are 16 projections, .* with 64; use .*projections=64"):
        agreement.add(projected(PARTS[0], 16))
    with pytest.raises(TypeError, match=r"expected gm.collect_projections\(model\), got TensorStats"):
        agreement.add(gm.collect(PARTS[0]))
    with pytest.raises(ValueError, match="this GradientAgreement has no ranks"):
        agreement.register_comm_hook(model_of())
    # without ranks there is nothing to compare
    agreement.add_averaged()
    assert agreement.step().differing.shape == (0,)


# the functions


@pytest.mark.parametrize("seed", range(5))
def test_twins_are_found_in_any_order(seed):
    torch.manual_seed(seed)
    vectors = torch.randn(6, 8, dtype=F64) * 10.0 ** torch.arange(-3, 3, dtype=F64).unsqueeze(1)
    chosen = torch.randint(6, (40,))
    # up to rounding, and one that is another by 1 %
    found = twins(vectors[chosen] * (1 + 1e-7 * torch.randn(40, 1, dtype=F64)))
    first = [chosen.tolist().index(c) for c in chosen.tolist()]
    assert found.tolist() == first
    other = vectors[chosen]
    other[39] *= 1.01
    assert twins(other)[39] == 39


def test_twins_of_what_is_not_known():
    vectors = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [1.0, 2.0], [0.0, 0.0], [math.nan, 1.0], [1.0, 2.0]])
    assert twins(vectors.to(F64)).tolist() == [0, 1, 2, 3, 4, 2]


def test_ranks_are_compared_with_their_median():
    torch.manual_seed(0)
    common = torch.randn(1, 64, dtype=F64)
    ranks = (common + 0.3 * torch.randn(7, 64, dtype=F64)).unsqueeze(1)
    ranks[3] *= -1.0
    ranks[5] = math.nan
    nothing = torch.full((64, 1, 64), math.nan, dtype=F64)
    none = torch.zeros(0, dtype=torch.bool)
    found = cosines_of(["total"], torch.zeros((), dtype=F64), nothing, ranks, none)
    cosines = found.rank_cosines
    assert cosines[5].isnan()
    assert cosines[3] < -0.9
    assert (cosines[[0, 1, 2, 4, 6]] > 0.9).all()
    known = ranks[[0, 1, 2, 3, 4, 6], 0]
    torch.testing.assert_close(found.rank_cosine[0], pairwise(list(known)).mean(), rtol=0, atol=100 * EPS)
    # two ranks have no majority
    few = cosines_of(["total"], torch.zeros((), dtype=F64), nothing, ranks[[0, 5, 3]], found.differing)
    assert few.rank_cosines.isnan().all()
    assert mean_cosine(unit(ranks[:1])).isnan().all()
