"""`total_norm` of every order: torch's norm of norms in fp64, with its NaN and Inf, without overflow."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.compiling import graphs, inductor_if_deep, no_recompile
from support.fake_device import DEVICES, device_of, watch

pytestmark = pytest.mark.usefixtures("_dynamo")

INF, NAN = math.inf, math.nan
ORDERS = (0, 0.1, 0.5, 1, 1.5, 2, 3, 3.5, 10, INF, "inf", -0.5, -1, -2, -3.5, -INF, "-inf")
every_order = pytest.mark.parametrize("order", ORDERS, ids=repr)


def torchs(tensors, order):
    """Return torch's own norm of fp64 copies."""
    # for some orders torch drops the imaginary part of complex elements, with a warning
    wide = [x.to(torch.complex128).abs() if x.is_complex() else x.double() for x in tensors]
    return torch.nn.utils.get_total_norm(wide, float(order))


@every_order
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_every_order_is_torchs_norm_of_norms(order, dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in ((31, 7), (), (4097,), (5, 3))]
    tensors[3] = tensors[3].t()
    if order != 0:
        tensors += [torch.zeros(4, dtype=dtype)] * (dtype == torch.float32)
    else:
        # for order 0, torch counts the tensors with a nonzero norm
        tensors += [torch.zeros(4, dtype=dtype)]
    norm = gm.total_norm(tensors, order)
    assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float64, (), False)
    # each of 4351 powers has an error of an ulp, and their pairwise sum adds another error
    torch.testing.assert_close(norm, torchs(tensors, order), rtol=1e-12, atol=0.0)


SPECIAL = {
    "finite": [[3.0, -4.0], [0.5]],
    "zeros": [[0.0, -0.0], [0.0]],
    "a zero": [[3.0, 0.0], [0.5]],
    "nan": [[3.0, NAN], [0.5]],
    "inf": [[3.0, INF], [0.5]],
    "-inf": [[3.0], [0.5, -INF]],
    "both": [[NAN, 1.0], [INF, 0.0]],
    "all inf": [[INF, -INF], [INF]],
    "all nan": [[NAN], [NAN]],
}


@every_order
@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_what_is_not_finite_counts_as_torch_says(order, case, dtype):
    tensors = [torch.tensor(values, dtype=dtype) for values in SPECIAL[case]]
    expected = torchs(tensors, order)
    if order == 0:
        # a norm that is NaN is not 0
        expected = torch.tensor(float(sum(any(x != 0 for x in values) for values in SPECIAL[case]))).double()
    torch.testing.assert_close(gm.total_norm(tensors, order), expected, rtol=1e-14, atol=0.0, equal_nan=True)


@every_order
def test_with_nothing_to_measure_it_is_zero(order):
    for tensors in ([], [torch.empty(0)], {"a": torch.empty(0, 3), "b": torch.empty(0)}):
        norm = gm.total_norm(tensors, order)
        assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float64, ())
    # and an empty tensor adds nothing
    x = torch.tensor([3.0, 4.0])
    assert torch.equal(gm.total_norm([torch.empty(0), x], order), gm.total_norm([x], order))


@pytest.mark.parametrize(
    ("order", "value", "dtype"),
    [
        (10, 1e35, torch.float32),
        (8.1, 1e38, torch.float32),
        (-10, 1e35, torch.float32),
        (10, 1e-40, torch.float64),
        (-10, 1e-40, torch.float64),
        (0.3, 1e-3, torch.float32),
        (3, 1e300, torch.float64),
        (-3, 1e-300, torch.float64),
        (1, 6e4, torch.float16),
        (2, 6e4, torch.float16),
        (2, 3e38, torch.float32),
    ],
)
def test_no_power_leaves_the_range_of_float64(order, value, dtype):
    x = torch.tensor([value, value / 2, -value, value], dtype=dtype)
    expected = math.fsum(abs(y / value) ** order for y in x.tolist()) ** (1 / order) * value
    assert gm.total_norm([x[:2], x[2:]], order).item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("order", [0, 0.5, 1, 3, -1, -INF])
def test_a_tensor_of_several_pieces_has_one_norm(order, monkeypatch):
    from gradiometer.stats import norms

    tensors = [torch.randn(5, 8).t(), torch.tensor([2.0, 0.5, INF, -3.0]), torch.randn(20)]
    for each in (tensors, [*tensors, torch.tensor([1.0, 0.0]), torch.zeros(3)]):
        monkeypatch.undo()
        expected = gm.total_norm(each, order)
        monkeypatch.setattr(norms, "_PIECE", 7)
        assert gm.total_norm(each, order).item() == pytest.approx(expected.item(), rel=1e-14)


@every_order
@pytest.mark.parametrize("zeros", [False, True])
def test_a_sparse_tensor_counts_with_all_its_zeros(order, zeros):
    indices, values = torch.tensor([[0, 2, 0]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4 if zeros else 3,))
    if not zeros:
        sparse = sparse + torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([5.0]), (3,))
    torch.testing.assert_close(
        gm.total_norm([sparse], order), torchs([sparse.to_dense()], order), rtol=1e-14, atol=0.0
    )


@every_order
def test_clipping_and_the_norm_alone_say_the_same(order):
    grads = [torch.randn(31, 7), torch.tensor([1.0, NAN, 2.0]), torch.randn(5).bfloat16()]
    for kept in (grads, grads[::2], [torch.tensor([INF, 1.0])]):
        parameters = [nn.Parameter(torch.zeros_like(x)) for x in kept]
        for parameter, x in zip(parameters, kept, strict=True):
            parameter.grad = x.clone()
        norm = gm.clip_grad_norm_(parameters, 1e30, order)
        assert torch.equal(norm.nan_to_num(nan=-1.0), gm.total_norm(kept, order).nan_to_num(nan=-1.0))


def test_gradients_are_taken_from_tensors_that_need_one():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    for order in (1, 2, INF, -1, 0):
        assert not gm.total_norm([x * 1.0], order).requires_grad


@pytest.mark.parametrize("norm_type", ["two", NAN, None, [2]], ids=repr)
def test_what_is_no_order_is_refused(norm_type):
    with pytest.raises(ValueError, match=r"^total_norm: norm_type must be the order of a norm.* got "):
        gm.total_norm([torch.ones(2)], norm_type)


@pytest.mark.parametrize("order", [1, 2, -1])
def test_what_cannot_be_measured_is_named(order):
    with pytest.raises(TypeError, match=r"^total_norm: 'b' has dtype torch.int64"):
        gm.total_norm({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, order)


@pytest.mark.parametrize("device", DEVICES)
def test_no_order_waits(device):
    with device_of(device) as d:
        tensors = [torch.ones(4, 3, device=d).T, torch.ones((), device=d) * 1j, torch.ones(0, device=d)]
        with watch() as seen:
            for order in ORDERS:
                norm = gm.total_norm(tensors, order)
        assert (norm.device.type, norm.dtype, norm.shape) == (device, torch.float64, ())
        assert (seen.to_host, seen.to_device) == ([], [])


@inductor_if_deep
def test_every_order_is_in_one_graph_of_a_compiled_step(backend):
    orders = (0, 0.5, 1, 2, INF, -1, -INF)

    def step(x, y):
        return [gm.total_norm([x, y, x[:0]], order) for order in orders]

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for x, y in itertools.islice(((torch.randn(5, 3), torch.randn(7)) for _ in itertools.count()), 3):
        for found, expected in zip(compiled(x, y), step(x, y), strict=True):
            # Inductor adds in another order
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    with no_recompile():
        compiled(torch.full((5, 3), NAN), torch.zeros(7))
    assert graphs() == 1
