"""Clipping by value: torch's results, and exact counts of what was clipped, by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradiometer as gm
from support.compiling import graphs, inductor_if_deep, no_recompile, small_model
from support.fake_device import DEVICES, device_of, watch
from support.gradients import assert_unchanged, bits, grads_of, with_grads
from support.strategies import FLOATS, VALUES, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("_dynamo")

INF, NAN = math.inf, math.nan


def counted(tensors: list[Tensor], value: float) -> list[int]:
    """Count in Python the elements above the bound, which is first rounded to the element's format."""
    return [
        sum(
            abs(y) > torch.tensor(value, dtype=torch.float64).to(x.dtype).item() for y in x.flatten().tolist()
        )
        for x in tensors
    ]


@given(
    st.lists(recipes(FLOATS, VALUES, largest=300), max_size=4),
    st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5, 6e4, INF]),
)
def test_it_does_what_torch_does_and_counts_what_that_changes(some, value):
    tensors = [recipe.tensor().clone() for recipe in some]
    twins, before = with_grads(*(x.clone() for x in tensors)), [x.clone() for x in tensors]
    found = gm.clip_grad_value_(with_grads(*tensors), value)
    for twin in twins:
        # torch raises for an empty list
        torch.nn.utils.clip_grad_value_(twin, value)
    assert found.names == tuple(map(str, range(len(tensors))))
    assert (found.counts.dtype, found.counts.shape) == (torch.int64, (len(tensors),))
    assert found.counts.tolist() == counted(before, value)
    for x, twin, old, count in zip(tensors, grads_of(twins), before, found.counts.tolist(), strict=True):
        torch.testing.assert_close(x, twin, rtol=0.0, atol=0.0, equal_nan=True)
        # -0 counts as 0 for both
        assert count == int(((x != old) & ~x.isnan()).sum())


def test_counts_are_by_name_and_in_total():
    model = nn.Linear(3, 2)
    model.weight.grad = torch.tensor([[3.0, -4.0, 0.5], [1.0, -1.0, 1.5]])
    assert gm.clip_grad_value_(model, 1.0).to_dict() == {"weight": 3}
    assert model.weight.grad.tolist() == [[1.0, -1.0, 0.5], [1.0, -1.0, 1.0]]
    model.bias.grad = torch.tensor([2.0, 0.0])
    found = gm.clip_grad_value_(model.named_parameters(), 1.0)
    assert found.to_dict() == {"weight": 0, "bias": 1}
    assert (found.total.item(), found.total.dtype, found.total.shape) == (1, torch.int64, ())
    # the counts are a snapshot
    gm.clip_grad_value_(model, 0.0)
    assert found.to_dict() == {"weight": 0, "bias": 1}
    assert gm.materialize({"clipped": found})["clipped"].to_dict() == found.to_dict()


def test_infinite_elements_become_the_bound_and_nan_stays():
    x = torch.tensor([INF, -INF, NAN, 2.0, -0.5])
    assert gm.clip_grad_value_(with_grads(x), 1.5).counts.tolist() == [3]
    torch.testing.assert_close(x, torch.tensor([1.5, -1.5, NAN, 1.5, -0.5]), rtol=0, atol=0, equal_nan=True)
    y = torch.tensor([INF, 1e30])
    assert gm.clip_grad_value_(with_grads(y), INF).counts.tolist() == [0]
    assert y.tolist() == [INF, torch.tensor(1e30).item()]


def test_a_bound_that_a_format_has_no_number_for():
    # torch rejects 1e6 in half precision
    x = torch.tensor([6e4, INF, -1.0]).half()
    assert gm.clip_grad_value_(with_grads(x), 1e6).counts.tolist() == [0]
    assert x.tolist() == [6e4, INF, -1.0]
    # 0.3 rounds to 0.30078125 in this format, so that such an element is not above it
    y = torch.tensor([0.3, 0.31, -0.2]).bfloat16()
    assert gm.clip_grad_value_(with_grads(y), 0.3).counts.tolist() == [1]
    assert y.tolist() == torch.tensor([0.3, 0.3, -0.2]).bfloat16().tolist()


def test_with_nothing_to_clip_the_result_has_its_type():
    for parameters in ([], nn.Linear(2, 1), iter([])):
        found = gm.clip_grad_value_(parameters, 1.0)
        assert (found.names, found.counts.dtype, found.counts.tolist()) == ((), torch.int64, [])
        assert found.total.item() == 0
        assert found.to_dict() == {}


def test_one_tensor_and_a_gradient_of_two_parameters():
    x = torch.zeros(2)
    x.grad = torch.tensor([3.0, 0.0])
    assert gm.clip_grad_value_(x, 1.0).counts.tolist() == [1]
    shared = torch.tensor([3.0, -2.0, 0.0])
    assert gm.clip_grad_value_(with_grads(shared, shared, shared[:1]), 1.0).counts.tolist() == [2, 2, 1]
    assert shared.tolist() == [1.0, -1.0, 0.0]


def test_a_coalesced_sparse_gradient_is_clipped_in_what_it_stores():
    values = torch.tensor([[1.0, 5.0], [-7.0, 0.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), values, (5, 2)).coalesce()
    table = nn.Parameter(torch.zeros(5, 2))
    table.grad = sparse
    assert gm.clip_grad_value_([table], 2.0).counts.tolist() == [2]
    assert table.grad.to_dense()[[0, 3]].tolist() == [[1.0, 2.0], [-2.0, 0.0]]


BOUNDS: dict[str, tuple[Any, list[float], int]] = {
    "int": (2, [2.0, -2.0, 1.0], 2),
    "tensor": (torch.tensor(2.0), [2.0, -2.0, 1.0], 2),
    "int tensor": (torch.tensor([2]), [2.0, -2.0, 1.0], 2),
    "nan in a tensor": (torch.tensor(NAN), [3.0, -4.0, 1.0], 0),
    "negative in a tensor": (torch.tensor(-1.0), [0.0, 0.0, 0.0], 3),
    "inf in a tensor": (torch.tensor(INF), [3.0, -4.0, 1.0], 0),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_bound_may_be_a_number_or_a_tensor(kind):
    bound, expected, count = BOUNDS[kind]
    x = torch.tensor([3.0, -4.0, 1.0])
    assert gm.clip_grad_value_(with_grads(x), bound).counts.tolist() == [count]
    assert x.tolist() == expected


REFUSED: dict[str, tuple[Callable[[], Tensor], Any, type[Exception], str]] = {
    "negative": (lambda: torch.ones(2), -1.0, ValueError, "clip_value must be a non-negative number"),
    "nan": (lambda: torch.ones(2), NAN, ValueError, "clip_value .* got nan"),
    "string": (lambda: torch.ones(2), "1", ValueError, "clip_value .* got '1'"),
    "two": (lambda: torch.ones(2), torch.ones(2), ValueError, r"clip_value .* a tensor of shape \(2,\)"),
    "complex": (lambda: torch.ones(2) * 1j, 1.0, TypeError, "'odd' is complex, and .* have no order"),
    "fp8": (
        lambda: torch.ones(2).to(torch.float8_e5m2),
        1.0,
        TypeError,
        "'odd' has dtype .*convert it to float16",
    ),
    "sparse": (
        lambda: torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (2,)),
        0.5,
        TypeError,
        r"'odd' is sparse.*parameter\.grad = parameter\.grad\.coalesce\(\)",
    ),
    "expanded": (lambda: torch.ones(1).expand(2), 0.5, TypeError, "'odd' may have elements that share"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_clipped_is_named_before_anything_is_written(case):
    make, bound, error, said = REFUSED[case]
    good, odd = torch.full((4,), 5.0), make()
    before = bits(good)
    pairs = dict(zip(("good", "odd"), with_grads(good, odd), strict=True))
    with pytest.raises(error, match=rf"^clip_grad_value_: .*{said}") as caught:
        gm.clip_grad_value_(pairs, bound)
    assert "\n" not in str(caught.value)
    assert_unchanged([good], [before])


@pytest.mark.parametrize("device", DEVICES)
def test_counting_never_waits(device):
    with device_of(device) as d:
        bound = torch.ones((), device=d)
        grads = [torch.full((4, 3), 2.0, device=d).T, torch.ones((), device=d).half()]
        with watch() as seen:
            found = gm.clip_grad_value_(with_grads(*grads), 1.0)
            gm.clip_grad_value_(with_grads(*grads), bound)
            total = found.total
        assert (found.counts.device.type, total.device.type) == (device, device)
        assert (seen.to_host, seen.to_device) == ([], [])


@inductor_if_deep
def test_it_is_in_the_graph_of_a_step_and_another_bound_is_no_other_graph(backend):
    model = small_model()

    def step(x: Tensor, bound: float) -> tuple[gm.ElementCounts, list[Tensor]]:
        model(x).square().sum().backward()
        found = gm.clip_grad_value_(model, bound)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for p in model.parameters():
            p.grad = None
        return found, grads

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    # the second value turns the bound into an input of the graph
    for bound in (0.5, 0.25):
        compiled(torch.randn(5, 4), bound)
    with no_recompile():
        for bound in [0.1 * i for i in range(3, 23)]:
            x = torch.randn(5, 4)
            found, grads = compiled(x, bound)
            expected, same = step(x, bound)
            assert found.names == expected.names == ("0.weight", "0.bias", "2.weight", "2.bias")
            # gradients of Inductor differ in their last bits
            assert (found.counts - expected.counts).abs().max() <= 1
            for a, b in zip(grads, same, strict=True):
                assert a.abs().max() <= torch.tensor(bound)
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert graphs() <= 2
    assert found.total > 0
