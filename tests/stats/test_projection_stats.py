"""Projections of named tensors: distances, cosines, and the statistics that come with them."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import gradiometer as gm
from gradiometer.columns import PROJECTIONS

SHAPES = {"a": (300, 40), "b": (7,), "c": ()}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def projected(named, count=256, **options):
    return gm.collect_projections(named, projections=count, **options)


def test_distances_and_norms_are_those_of_the_tensors():
    x, y = tensors(0), tensors(1)
    left, right = projected(x), projected(y)
    exact = torch.stack([(x[name].double() - y[name].double()).norm() for name in x])
    # six standard deviations of the square
    most = 6 * math.sqrt(2 / 256)
    assert ((left.distance(right) / exact) ** 2 - 1).abs().max() < most
    norms = torch.stack([x[name].double().norm() for name in x])
    assert torch.allclose(left.finite_norm, norms, rtol=1e-12, atol=0)
    assert ((left.estimated_norm / norms) ** 2 - 1).abs().max() < most
    # one element has no direction but its sign
    assert left.distance(right)[2] == pytest.approx(float(exact[2]), rel=1e-12)


def test_a_small_difference_is_estimated_as_well_as_a_large_one():
    x = {name: value.double() for name, value in tensors(0).items()}
    noise = tensors(1)
    y = {name: value + 1e-9 * noise[name].double() for name, value in x.items()}
    exact = torch.stack([1e-9 * noise[name].double().norm() for name in x])
    assert ((projected(x).distance(projected(y)) / exact) ** 2 - 1).abs().max() < 6 * math.sqrt(2 / 256)


def test_cosines():
    x = tensors(0)
    y = {name: -3 * value for name, value in x.items()}
    left = projected(x)
    assert torch.allclose(left.cosine(left), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(left.cosine(projected(y)), -torch.ones(3, dtype=torch.float64))
    assert left.cosine(projected(tensors(1)))[0].abs() < 6 / 16
    zero = projected({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert left.cosine(zero).isnan().all()
    assert torch.equal(left.distance(zero), left.estimated_norm)


def test_rows_add_up_to_a_total_since_each_name_has_its_own_signs():
    ones = torch.ones(50_000)
    stats = projected({"v": ones, "w": ones})
    assert not torch.equal(*stats.projections)
    assert stats.total_value("estimated_norm") == pytest.approx(
        float(stats.total_value("finite_norm")), rel=0.3
    )
    # equal signs would have made it sqrt(2) times larger
    assert abs(float(stats.cosine(projected({"v": -ones, "w": ones}))[0]) + 1) < 1e-12


def test_a_seed_gives_other_signs():
    x = tensors(0)
    assert not torch.equal(projected(x).projections, projected(x, seed=1).projections)
    assert torch.equal(projected(x, 16).projections, projected(x, 16).projections)
    # the first projections are the same, however many there are
    assert torch.allclose(projected(x).projections[:, :16], projected(x, 16).projections, rtol=1e-12)


def test_others_cannot_be_compared():
    x = tensors(0)
    for other, message in (
        (projected(x, 16), "256 and 16"),
        (projected({"d": torch.ones(3)}), "'a' is only in one"),
        (projected(dict(reversed(x.items()))), "their order differs"),
    ):
        with pytest.raises(ValueError, match=message):
            projected(x).distance(other)
    found = projected(x).distance(projected({**x, "b": torch.ones(8)}))
    assert found.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("options", [{"projections": 5}, {"projections": True}, {"seed": -1}, {"seed": 1.0}])
def test_numbers_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"collect_projections\({name}=.*{name} must be"):
        gm.collect_projections({"w": torch.ones(2)}, **options)


def test_other_tensors_are_refused_by_name():
    with pytest.raises(TypeError, match="'w'"):
        gm.collect_projections({"w": torch.ones(2, dtype=torch.int64)})
    assert gm.collect_projections({}).columns.shape == (0, PROJECTIONS[16].width)


def test_the_gradients_of_a_module():
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    model.bias.grad = None
    found = gm.collect_projections(model)
    assert found.names == ("weight",)
    assert torch.equal(found.columns, gm.collect_projections({"weight": model.weight.grad}).columns)


def test_statistics_can_have_projections():
    model = torch.nn.Linear(3, 2)
    (8 * model(torch.ones(1, 3)).sum()).backward()
    scaled = gm.collect_grads(model, projections=16, inv_scale=0.125)
    plain = gm.collect_grads(model, projections=16)
    assert torch.allclose(scaled.projections.finite_norm, scaled.norm)
    assert torch.equal(scaled.projections.projections * 8, plain.projections.projections)
    assert torch.equal(plain.projections.columns, gm.collect_projections(model).columns)
    weights = gm.collect_weights(model, projections=32).projections
    named = dict(model.named_parameters())
    assert torch.equal(weights.columns, gm.collect_projections(named, projections=32).columns)
    assert torch.equal(gm.collect(named, projections=32).projections.columns, weights.columns)
    assert copy.deepcopy(plain).projections.names == plain.names
    # what they are of groups is not known
    assert plain.group({"all": ""}).projections is gm.collect_grads(model).projections is None
    with pytest.raises(ValueError, match=r"collect_grads\(projections=3\)"):
        gm.collect_grads(model, projections=3)


def test_compiled_code_returns_the_same():
    x = tensors(0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def collected(named):
        return gm.collect(named, projections=64), gm.collect_projections(named, projections=64)

    both, alone = collected(x)
    assert torch.equal(both.projections.columns, projected(x, 64).columns)
    assert torch.equal(alone.columns, projected(x, 64).columns)
    assert alone.names == both.names == tuple(x)
