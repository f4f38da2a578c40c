"""Codes for histograms of magnitudes in eager PyTorch: each path, against a look-up in the edges."""

from __future__ import annotations

import pytest
import torch

from conftest import KERNELS
from gradiometer.columns import EXPONENT_EDGES, EXPONENTS, bin_of
from gradiometer.ops import exponent_codes, exponent_reference
from gradiometer.ops.openmp import one_thread

pytestmark = pytest.mark.skipif(KERNELS, reason="tests the eager path")

PIECE = exponent_reference._PIECE
# the most elements of a tensor that is counted together with others
SMALL = exponent_reference._LARGE


def expected(x):
    """Return the histogram by the definition of the bins."""
    # torch.set_flush_denormal sets the mode of the calling thread only
    with one_thread():
        x = (x.float() if x.itemsize < 4 else x).double().reshape(-1) * 1.0
        columns = bin_of(x.abs().view(torch.int64))
    return torch.bincount(columns, minlength=EXPONENTS.width)


def check(tensors):
    rows = exponent_reference.exponent_stats(tensors)
    for x, row in zip(tensors, rows, strict=True):
        assert torch.equal(row, expected(x)), (x.dtype, x.shape)


def next_to_edges():
    """Return each edge as float32 numbers, with neighbors, ties between two cells, and both signs."""
    edges = torch.tensor(EXPONENT_EDGES).view(torch.float64).float().view(torch.int32)
    near = torch.arange(-3, 4, dtype=torch.int32)
    steps = torch.cat([near, *[near + sign * 2**k for k in (12, 15, 16) for sign in (1, -1)]])
    bits = (edges[:, None] + steps).view(-1).clamp_(0, 2**31 - 1)
    return torch.cat([bits, bits | -(2**31)]).view(torch.float32)


def random_bits(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), generator=g, dtype=torch.int32).view(torch.float32)


@pytest.fixture(params=[False, True], ids=["kept", "flushed"])
def _subnormal(request):
    """Keep subnormal numbers, or make 0 of them."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("_subnormal")
def test_float32_of_any_bits_at_every_path():
    for x in (next_to_edges(), random_bits(300_000)):
        # a large tensor, small ones, and float64 neighbors that round to the same numbers
        check([x.repeat(-(-SMALL // len(x)) + 1), *x.split(SMALL), *x[:20_000].split(999)])
        wide = x.double()
        check([wide, wide * (1 + 2**-30), wide[:SMALL] * (1 - 2**-30)])


@pytest.mark.usefixtures("_subnormal")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_patterns_of_16_bits_at_every_path(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check([x, x.repeat(5), x.repeat(5).view(256, -1).t(), *x.split(1000)])


def test_what_is_kept_does_not_depend_on_whether_subnormal_numbers_were_flushed():
    tiny = [torch.full((SMALL + 1,), 1e-45), torch.full((SMALL + 1,), 1e-40).bfloat16()]
    tiny.append(torch.full((SMALL + 1,), 1e-310, dtype=torch.float64))
    tiny.append(torch.zeros(SMALL + 1, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    tensors = [*tiny, *[x[:5] for x in tiny]]
    for kept in (
        exponent_codes.window_columns,
        exponent_reference._window,
        exponent_reference._last_of_words,
    ):
        kept.cache_clear()
    for flush in (True, False, True):
        try:
            torch.set_flush_denormal(flush)
            check(tensors)
        finally:
            torch.set_flush_denormal(False)


def test_every_code_of_the_middle_window_lies_in_one_bin():
    _, is_wide = exponent_codes.window_columns(exponent_codes.MIDDLE)
    assert not is_wide.any()
    # at the ends of the range, few codes do not
    for window in range(exponent_codes.NUM_WINDOWS):
        columns, is_wide = exponent_codes.window_columns(window)
        assert (columns.diff() >= 0).all()
        assert is_wide.sum() < 2**15 / 10 or window == exponent_codes.NUM_WINDOWS - 1


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, PIECE - 1, PIECE, 2 * PIECE + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_sizes_around_those_of_pieces(size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    x[: size // 3 : 7] = 0
    check([x.to(dtype)])


def test_strides_and_several_dtypes_in_one_call():
    x = random_bits(2**19).view(512, 1024)
    views = [x.t(), x[:, ::2], x[::3, 5:], x[:100, :100].t(), x[0].expand(300, -1), x[:, :1], x[3, 4]]
    halves = [view.bfloat16() for view in views]
    check([y for pair in zip(views, halves, strict=True) for y in pair])
    check([x.double()[:, ::2], x.half().t(), x.to(torch.float8_e5m2)[:, 1::2]])


@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-100, 2.0**-60, 2.0**-45, 2.0**30, 2.0**100])
def test_numbers_outside_of_the_middle_window(scale):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2**18 + 7, generator=g) * torch.tensor(scale)
    x[::100] = 0
    x[1::100] = torch.randn(len(x[1::100]), generator=g)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check([x.to(dtype), x[:5000].to(dtype), x[:100].to(dtype)])


def test_zeros_infinities_and_nan_alone():
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, torch.finfo(torch.float32).max, 1e-45):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check([torch.full((n,), value).to(dtype) for n in (1, 40, 3 * SMALL)])


def test_more_small_tensors_than_are_counted_together():
    g = torch.Generator().manual_seed(0)
    sizes = [*([7] * 300), *torch.randint(0, 50, (300,), generator=g).tolist(), *([30_000] * 9)]
    tensors = [torch.randn(n, generator=g) for n in sizes]
    tensors[3][2], tensors[299][0], tensors[-1][5] = 0, 1e-30, torch.nan
    check(tensors)
    check([x.bfloat16() for x in tensors])


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-42, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_some_small_tensors_have_numbers_outside_of_the_middle(dtype, value):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=g).to(dtype) for n in (3, 40, 40, 500, 40, 7000, 0)]
    for x, step in zip(tensors, (1, 2, 100, 7, 3, 999, 1), strict=True):
        x[::step] = value
    tensors[2][0] = 2.0**-150 if dtype == torch.float64 else 0.0
    check(tensors)
    # all of them, and none
    check([torch.full(x.shape, value).to(dtype) for x in tensors])
    check([torch.ones_like(x) for x in tensors])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_numbers_next_to_zero_are_not_zeros(zero):
    tiny = torch.arange(-300, 300, dtype=torch.int32)
    for bits in (tiny, tiny + 2**16, tiny + 2**23):
        x = torch.cat([bits.clamp(min=0), bits.clamp(min=0) | -(2**31)]).view(torch.float32)
        x[::3] = zero
        check([x, x[:100], x.double(), x.bfloat16(), x.half()])


def test_small_tensors_in_any_order_of_sizes():
    # sorted by size, the first and the last of these are as far apart as if nothing had moved
    g = torch.Generator().manual_seed(0)
    check([torch.randn(n, generator=g) for n in (10, 30, 20, 40)])
    check([torch.randn(n, generator=g).half() for n in (500, 10, 0, 1, 30, 20, 40, 600)])


def test_threads_change_nothing(number_of_threads):
    x = random_bits(2**21 + 5)
    for threads in (1, 2, 3, 8):
        number_of_threads(threads)
        check([x, x[:1000], x.bfloat16()])
    with one_thread():
        check([x])


def test_pieces_are_short_where_a_thread_cannot_be_alone(monkeypatch):
    monkeypatch.setattr(exponent_reference.openmp, "can_run_alone", lambda: False)
    check([random_bits(300_001), random_bits(300_001).bfloat16(), random_bits(700_000).view(7, -1).t()])
    check([random_bits(70_000).view(7, -1).t()])
