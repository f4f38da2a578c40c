"""Supported inputs, each against a plain double-precision formula; and unsupported ones, refused by name."""

from __future__ import annotations

import itertools
import math
import random
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradiometer as gm
from conftest import INTERPRETED
from gradiometer import ops
from gradiometer.inputs import checks
from gradiometer.inputs import named as checks_named

if TYPE_CHECKING:
    from collections.abc import Iterator

DENSE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX_DTYPES = (torch.complex128, torch.complex64, torch.complex32)
# format -> exponent bits, mantissa bits, bias, codes of NaN, codes of infinity (add 0x80 for the sign)
FP8_FORMATS = {
    torch.float8_e4m3fn: (4, 3, 7, {0x7F, 0xFF}, set()),
    torch.float8_e4m3fnuz: (4, 3, 8, {0x80}, set()),
    torch.float8_e5m2: (5, 2, 15, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
    torch.float8_e5m2fnuz: (5, 2, 16, {0x80}, set()),
}
FP8_DTYPES = (*FP8_FORMATS, torch.float8_e8m0fnu)
# a tensor of a few elements, and one that spans several rows of the eager path's buffer
SIZES = (7, 5003)


def numbers(count: int, seed: int = 0) -> list[float]:
    """Many values of both signs, and some zeros; exact in every dtype down to the 8 bits of bf16."""
    source = random.Random(seed)  # noqa: S311 test data
    return [source.randrange(-128, 128) / 16 for _ in range(count)]


def assert_row(stats: gm.TensorStats, name: str, values: list[float]) -> None:
    """Compare a row with plain formulas. Counts, extremes: exact. Sums: 1e-13, the documented bound."""
    row = {
        column.name: float(x)
        for column, x in zip(gm.COLUMNS, stats.columns[stats.names.index(name)], strict=True)
    }
    finite = [x for x in values if math.isfinite(x)]
    assert row["numel"] == len(values)
    assert row["n_zero"] == sum(x == 0 for x in values)
    assert row["n_nan"] == sum(math.isnan(x) for x in values)
    assert row["n_posinf"] == sum(x == math.inf for x in values)
    assert row["n_neginf"] == sum(x == -math.inf for x in values)
    assert row["abs_max"] == max([abs(x) for x in finite], default=0.0)
    norm = math.sqrt(math.fsum(x * x for x in finite))
    assert abs(math.sqrt(row["sumsq"]) - norm) <= 1e-13 * norm
    assert abs(row["sum"] - math.fsum(finite)) <= 1e-13 * math.fsum(abs(x) for x in finite)


def assert_measures(tensor: torch.Tensor, values: list[float], **options: object) -> None:
    """Measure it alone, and between tensors of another dtype and of its own."""
    assert_row(gm.collect({"x": tensor}, **options), "x", values)
    stats = gm.collect({"a": torch.ones(3), "x": tensor, "b": torch.ones(2, dtype=torch.float64)}, **options)
    assert_row(stats, "x", values)


def parts(values: list[complex]) -> list[float]:
    return [part for z in values for part in (z.real, z.imag)]


def grid(rows: int, columns: int) -> tuple[torch.Tensor, list[list[float]]]:
    flat = numbers(rows * columns)
    lists = [flat[i * columns : (i + 1) * columns] for i in range(rows)]
    return torch.tensor(lists), lists


# dtypes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_every_dense_dtype_is_measured_and_its_nan_and_infinities(dtype: torch.dtype, size: int) -> None:
    values = numbers(size)
    assert_measures(torch.tensor(values).to(dtype), values)
    values[1], values[3], values[-2], values[-1] = math.nan, math.inf, -math.inf, math.nan
    assert_measures(torch.tensor(values).to(dtype), values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", COMPLEX_DTYPES, ids=str)
def test_a_complex_tensor_is_measured_as_two_numbers_an_element(dtype: torch.dtype, size: int) -> None:
    values = [complex(a, b) for a, b in zip(numbers(size, 1), numbers(size, 2), strict=True)]
    values[0] = complex(math.inf, 2.0)
    values[2] = complex(0.0, math.nan)
    # not by complex arithmetic, which would spread the NaN to the other part
    tensor = torch.view_as_complex(
        torch.tensor(parts(values)).view(-1, 2).to(torch.empty(0, dtype=dtype).real.dtype)
    )
    assert tensor.dtype == dtype
    assert_measures(tensor, parts(values))


def decode_fp8(code: int, dtype: torch.dtype) -> float:
    """Return the value of a code of an 8-bit format, by the definition of the format."""
    if dtype == torch.float8_e8m0fnu:
        return math.nan if code == 0xFF else 2.0 ** (code - 127)
    _, mantissa_bits, bias, nan_codes, inf_codes = FP8_FORMATS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    if code in nan_codes:
        return math.nan
    if code in inf_codes:
        return sign * math.inf
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_code_of_an_fp8_format_is_read_as_the_format_defines_it(dtype: torch.dtype) -> None:
    # 8 adjacent codes per tensor: their sums are exact, so no code is lost beside a larger one
    codes = [list(range(start, start + 8)) for start in range(0, 256, 8)]
    if INTERPRETED and dtype == torch.float8_e8m0fnu:
        # 2**-127 is read as bf16, and Triton's interpreter flushes subnormal bf16 to zero
        codes[0].remove(0)
    tensors = {str(c[0]): torch.tensor(c, dtype=torch.uint8).view(dtype) for c in codes}
    stats = gm.collect(tensors)
    for c, total in zip(codes, stats.sum.tolist(), strict=True):
        values = [decode_fp8(code, dtype) for code in c]
        assert_row(stats, str(c[0]), values)
        assert total == math.fsum(x for x in values if math.isfinite(x))


@pytest.mark.parametrize("columns", [5, 5003])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_a_strided_fp8_tensor_is_measured(dtype: torch.dtype, columns: int) -> None:
    codes = [1 + (7 * i) % 255 for i in range(3 * columns)]
    tensor = torch.tensor(codes, dtype=torch.uint8).view(dtype).view(3, columns)[:, 1::3]
    values = [decode_fp8(codes[columns * i + j], dtype) for i in range(3) for j in range(1, columns, 3)]
    assert not tensor.is_contiguous()
    assert_measures(tensor, values)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_an_empty_and_a_0d_fp8_tensor_are_measured(dtype: torch.dtype) -> None:
    stats = gm.collect({"empty": torch.empty(0, dtype=dtype), "0d": torch.tensor(0.5).to(dtype)})
    assert_row(stats, "empty", [])
    assert_row(stats, "0d", [0.5])


def test_all_dtypes_share_one_call_and_keep_their_order() -> None:
    values = [0.5, 4.0, 1.0, 2.0, 0.25]
    tensors = {
        f"{i}{dtype}": (torch.tensor(values) * (i + 1 if dtype not in FP8_DTYPES else 1)).to(dtype)
        for i, dtype in enumerate((*DENSE_DTYPES, *FP8_DTYPES, *DENSE_DTYPES, *COMPLEX_DTYPES[:2]))
    }
    stats = gm.collect(tensors)
    assert stats.names == tuple(tensors)
    for i, (name, tensor) in enumerate(tensors.items()):
        scaled = [x * (i + 1 if tensor.dtype not in FP8_DTYPES else 1) for x in values]
        assert_row(stats, name, parts([complex(x) for x in scaled]) if tensor.is_complex() else scaled)


# strides


def _transposed(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(rows, columns)
    return tensor.t(), [x for row in lists for x in row]


def _permuted(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(rows, 2 * columns)
    return tensor.view(rows, 2, 1, columns).permute(3, 2, 0, 1), [x for row in lists for x in row]


def _channels_last(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(2 * rows, 3 * columns)
    image = tensor.view(2, rows, 3, columns).to(memory_format=torch.channels_last)
    return image, [x for row in lists for x in row]


def _channels_last_slice(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(2 * rows, 3 * columns)
    image = tensor.view(2, rows, 3, columns).to(memory_format=torch.channels_last)
    # image[n, c, h, w] is in row n * rows + c, column h * columns + w
    return image[1:, :, :2], [x for row in lists[rows:] for x in row[: 2 * columns]]


def _sliced(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(rows + 2, columns + 3)
    return tensor[1:-1, 2:-1], [x for row in lists[1:-1] for x in row[2:-1]]


def _step_sliced(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(3 * rows, 2 * columns)
    return tensor[1::3, ::2], [x for row in lists[1::3] for x in row[::2]]


def _expanded(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(1, columns)
    return tensor.expand(rows, columns), lists[0] * rows


def _expanded_scalar(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    return torch.tensor(1.5).expand(rows, columns), [1.5] * (rows * columns)


def _expanded_twice(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(rows, 1)
    return tensor.unsqueeze(0).expand(2, rows, columns), [row[0] for row in lists] * (2 * columns)


def _diagonal(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(rows, columns)
    return tensor.diagonal(), [lists[i][i] for i in range(min(rows, columns))]


def _windows(rows: int, columns: int) -> tuple[torch.Tensor, list[float]]:
    tensor, lists = grid(1, rows * columns)
    window = columns // 2 + 1
    starts = range(0, rows * columns - window + 1, columns)
    return tensor.view(-1).unfold(0, window, columns), [x for s in starts for x in lists[0][s : s + window]]


STRIDED = (
    _transposed,
    _permuted,
    _channels_last,
    _channels_last_slice,
    _sliced,
    _step_sliced,
    _expanded,
    _expanded_scalar,
    _expanded_twice,
    _diagonal,
    _windows,
)


@pytest.mark.parametrize("shape", [(3, 4), (70, 75)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", STRIDED, ids=lambda make: make.__name__[1:])
def test_any_strides_are_measured(make: object, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor, values = make(*shape)
    if dtype == torch.bfloat16:
        # the same bits and strides
        wide = torch.as_strided(
            tensor, (tensor.untyped_storage().nbytes() // 4,), (1,), storage_offset=0
        ).bfloat16()
        tensor = wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    assert_measures(tensor, values)


@pytest.mark.parametrize("make", STRIDED, ids=lambda make: make.__name__[1:])
def test_any_strides_of_a_complex_tensor_are_measured(make: object) -> None:
    real, values = make(5, 6)
    storage = torch.as_strided(real, (real.untyped_storage().nbytes() // 4,), (1,), storage_offset=0)
    tensor = torch.complex(storage, -2 * storage).as_strided(real.shape, real.stride(), real.storage_offset())
    assert_measures(tensor, parts([complex(x, -2 * x) for x in values]))


@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("size", SIZES)
def test_the_real_and_imaginary_parts_of_a_complex_tensor_are_views_with_gaps(part: str, size: int) -> None:
    real, imag = numbers(size, 1), numbers(size, 2)
    tensor = torch.complex(torch.tensor(real), torch.tensor(imag))
    assert_measures(getattr(tensor, part), {"real": real, "imag": imag}[part])


@pytest.mark.once
def test_a_strided_view_larger_than_the_buffer_of_the_eager_path_is_measured() -> None:
    # the buffer has 2**18 elements; NaN and Inf are in different pieces of the tensor
    flat = torch.arange(2 * 700 * 401, dtype=torch.float64).remainder_(257) - 128
    base = flat.view(2, 700, 401)
    base[0, 0, 0], base[1, 699, 400], base[1, 350, 200] = math.nan, math.inf, -math.inf
    tensor = base.transpose(1, 2)[:, ::2]
    assert tensor.numel() > 2**18
    values = base.tolist()
    assert_row(gm.collect({"x": tensor}), "x", [x for plane in values for line in plane for x in line[::2]])


@given(st.data())
def test_a_view_by_any_strides_is_measured(data: st.DataObject) -> None:
    storage = numbers(200, seed=data.draw(st.integers(0, 10**6)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    strides = data.draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 40))
    indices = itertools.product(*[range(size) for size in shape])
    values = [storage[offset + sum(i * s for i, s in zip(index, strides, strict=True))] for index in indices]
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16]))
    view = torch.tensor(storage, dtype=dtype).as_strided(shape, strides, offset)
    assert_row(gm.collect({"x": view}), "x", values)


def test_0d_and_one_element_tensors_are_measured() -> None:
    stats = gm.collect(
        {"0d": torch.tensor(-3.0), "1": torch.tensor([[[2.0]]]), "nan": torch.tensor(math.nan)}
    )
    assert_row(stats, "0d", [-3.0])
    assert_row(stats, "1", [2.0])
    assert_row(stats, "nan", [math.nan])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
def test_a_tensor_without_elements_has_a_row_of_zeros_and_no_flag(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    empty = torch.empty(shape, dtype=dtype)
    stats = gm.collect([torch.ones(2), empty, torch.full((3,), 2.0), empty.t() if empty.dim() > 1 else empty])
    assert_row(stats, "0", [1.0, 1.0])
    assert_row(stats, "1", [])
    assert_row(stats, "2", [2.0, 2.0, 2.0])
    assert_row(stats, "3", [])
    assert stats.flags.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_views_that_do_not_start_at_16_bytes_are_measured(dtype: torch.dtype, size: int) -> None:
    values = numbers(size + 8)
    base = torch.tensor(values).to(dtype)
    assert base.data_ptr() % 16 == 0
    per_line = 16 // base.element_size()
    for offset in sorted({1, per_line - 1, per_line}):
        view = base[offset : offset + size]
        assert (view.data_ptr() % 16 == 0) == (offset == per_line)
        assert_row(gm.collect({"x": view}), "x", values[offset : offset + size])


@pytest.mark.parametrize("size", SIZES)
def test_a_negative_bit_view_is_measured_with_its_sign(size: int) -> None:
    values = [*numbers(size - 2), math.inf, 3.0]
    view = torch._neg_view(torch.tensor(values))
    assert view.is_neg()
    assert_measures(view, [-x for x in values])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", COMPLEX_DTYPES, ids=str)
def test_a_conjugate_bit_view_is_measured_with_its_signs(dtype: torch.dtype, size: int) -> None:
    values = [complex(a, b) for a, b in zip(numbers(size, 1), numbers(size, 2), strict=True)]
    tensor = torch.tensor(values, dtype=torch.complex128).to(dtype)
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    assert_measures(conjugate, parts([z.conjugate() for z in values]))
    if dtype != torch.complex32:  # torch itself cannot read one with both bits
        both = torch._neg_view(conjugate)
        assert both.is_conj()
        assert both.is_neg()
        assert_measures(both, parts([-z.conjugate() for z in values]))
    assert_measures(torch._neg_view(tensor), parts([-z for z in values]))
    # the imaginary part of a conjugate is a strided real view with the negative bit
    assert conjugate.imag.is_neg()
    assert_measures(conjugate.imag, [-z.imag for z in values])


# sparse


def test_duplicate_coordinates_of_a_sparse_tensor_are_added_up_first() -> None:
    indices = torch.tensor([[0, 0, 2, 3, 3], [1, 1, 3, 0, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, -5.0, 4.0, -4.0]), (4, 5))
    assert not tensor.is_coalesced()
    # (0, 1): 3; (2, 3): -5; (3, 0): 0, one more zero among 18
    assert_measures(tensor, [3.0, -5.0, *[0.0] * 18])
    assert not tensor.is_coalesced()
    assert_measures(tensor.coalesce(), [3.0, -5.0, *[0.0] * 18])


@pytest.mark.parametrize("dtype", [*DENSE_DTYPES, *COMPLEX_DTYPES[:2]], ids=str)
def test_a_sparse_tensor_of_many_coordinates_is_measured(dtype: torch.dtype) -> None:
    shape, count = (97, 101), 6000
    coordinates = random.Random(3).choices(range(shape[0] * shape[1]), k=count)  # noqa: S311 test data
    # multiples of 1/2 up to 2, and few per coordinate: their sums are exact in every dtype
    values = [x // 4 / 2 for x in numbers(count)]
    sums = dict.fromkeys(range(shape[0] * shape[1]), 0.0)
    for coordinate, x in zip(coordinates, values, strict=True):
        sums[coordinate] += x
    indices = torch.tensor([divmod(c, shape[1]) for c in coordinates]).t()
    tensor = torch.sparse_coo_tensor(indices, torch.tensor(values).to(dtype), shape)
    dense = list(sums.values())
    assert_measures(tensor, parts([complex(x) for x in dense]) if dtype.is_complex else dense)


def test_a_hybrid_sparse_tensor_is_measured() -> None:
    rows = torch.tensor([[1.0, 2.0, 0.0], [4.0, math.inf, 6.0], [0.5, 0.5, math.nan]])
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 4, 0]]), rows, (6, 3))
    assert tensor.sparse_dim() == tensor.dense_dim() == 1
    assert_measures(tensor, [1.5, 2.5, math.nan, 4.0, math.inf, 6.0, *[0.0] * 12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_sparse_tensor_that_stores_nothing_is_all_zeros(dtype: torch.dtype) -> None:
    stats = gm.collect(
        {
            "zeros": torch.sparse_coo_tensor(size=(3, 4), dtype=dtype),
            "nothing": torch.sparse_coo_tensor(size=(0, 4), dtype=dtype),
            "ones": torch.ones(5),
        }
    )
    assert_row(stats, "zeros", [0.0] * (12 * (2 if dtype.is_complex else 1)))
    assert_row(stats, "nothing", [])
    assert_row(stats, "ones", [1.0] * 5)
    assert stats.flags.tolist() == [gm.Flag.VANISHING | gm.Flag.DEAD, 0, 0]


def test_a_complex_sparse_tensor_counts_two_zeros_for_each_element_it_does_not_store() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1 + 2j, 3 - 2j]), (4,))
    assert_measures(tensor, [4.0, 0.0, *[0.0] * 6])
    assert_measures(tensor.conj(), [4.0, 0.0, *[0.0] * 6])


def test_the_flags_of_a_sparse_tensor_are_those_of_the_dense_one() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 7]]), torch.tensor([3.0, 4.0]), (10,))
    for thresholds, expected in (
        (gm.Thresholds(), 0),
        (gm.Thresholds(dead=0.8), gm.Flag.DEAD),
        (gm.Thresholds(dead=0.81), 0),
        (gm.Thresholds(exploding=4.9, dead=0.1), gm.Flag.DEAD | gm.Flag.EXPLODING),
        (gm.Thresholds(exploding=5.0, vanishing=5.1), gm.Flag.VANISHING),
    ):
        assert gm.collect([tensor, tensor.to_dense()], thresholds=thresholds).flags.tolist() == [expected] * 2


def test_a_sparse_embedding_gradient_is_measured_as_the_dense_one_would_be() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    (model(torch.tensor([1, 1, 3])) * torch.tensor([1.0, -2.0])).sum().backward()
    assert model.weight.grad.layout == torch.sparse_coo
    stats = gm.collect_grads(model)
    assert stats.names == ("weight",)
    assert_row(stats, "weight", [2.0, -4.0, 1.0, -2.0, *[0.0] * 6])
    assert gm.collect_grads(model, thresholds=gm.Thresholds(dead=0.6)).flags.tolist() == [gm.Flag.DEAD]
    assert gm.collect_grads(model, thresholds=gm.Thresholds(dead=0.61)).flags.tolist() == [0]


# several devices


@pytest.mark.gpu
def test_tensors_of_the_cpu_and_a_gpu_are_measured_in_one_call() -> None:
    values = {"a": numbers(40, 1), "b": numbers(5003, 2), "c": [math.nan, 1.0], "d": numbers(300, 3)}
    tensors = {
        name: torch.tensor(row, device="cuda" if name in "bd" else "cpu") for name, row in values.items()
    }
    stats = gm.collect(tensors)
    assert stats.names == tuple(values)
    assert stats.columns.device.type == "cuda"
    for name, row in values.items():
        assert_row(stats, name, row)


# parameters and grad mode


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_tensors_that_require_grad_are_measured_without_a_trace_in_autograd(layout: str) -> None:
    leaf = torch.tensor([3.0, -4.0], requires_grad=True)
    tensor = leaf * 1.0
    if layout == "sparse":
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), tensor, (2,))
    assert torch.is_grad_enabled()
    assert tensor.requires_grad
    scale = torch.tensor(0.5, requires_grad=True)
    stats = gm.collect({"leaf": leaf, "x": tensor}, inv_scale=scale)
    assert not stats.columns.requires_grad
    assert not stats.total_norm.requires_grad
    assert_row(stats, "leaf", [1.5, -2.0])
    assert_row(stats, "x", [1.5, -2.0])


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x.as_subclass(Labelled)])
def test_parameters_and_subclasses_are_measured_as_tensors(kind: Any) -> None:
    stats = gm.collect({"x": kind(torch.tensor([3.0, -4.0]))})
    assert_row(stats, "x", [3.0, -4.0])
    assert type(stats.columns) is torch.Tensor
    assert type(stats.total_norm) is torch.Tensor


# inv_scale

SCALES = {
    "float": 0.125,
    "int": 2,
    "0-d fp32": torch.tensor(0.125),
    "(1,) fp32": torch.tensor([0.125]),
    "(1, 1) fp32": torch.tensor([[0.125]]),
    "0-d fp64": torch.tensor(0.125, dtype=torch.float64),
    "(1,) fp64": torch.tensor([0.125], dtype=torch.float64),
    "0-d fp16": torch.tensor(0.125, dtype=torch.float16),
    "(1,) bf16": torch.tensor([0.125], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_inv_scale_gives_the_statistics_of_the_scaled_tensor(scale: object, size: int) -> None:
    values = [*numbers(size - 1), math.nan]
    tensor = torch.tensor(values)
    before = tensor.clone()
    stats = gm.collect({"x": tensor, "y": tensor.double()}, inv_scale=scale)
    for name in stats.names:
        assert_row(stats, name, [x * float(scale) for x in values])
    assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0))


def test_flags_are_those_of_the_scaled_tensor() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([65536.0]), (2,))
    tensors = {"x": torch.tensor([65536.0]), "s": sparse, "v": torch.tensor([1e-3])}
    exploding, vanishing = int(gm.Flag.EXPLODING), int(gm.Flag.VANISHING)
    assert gm.collect(tensors).flags.tolist() == [exploding, exploding, 0]
    assert gm.collect(tensors, inv_scale=1 / 65536).flags.tolist() == [0, 0, vanishing]


def test_scaled_gradients_are_measured_as_if_unscaled_and_stay_as_they_are() -> None:
    model = nn.Linear(3, 2)
    scale = torch.tensor(65536.0)
    (model(torch.tensor([[1.0, -2.0, 0.5]])).sum() * scale).backward()
    stats = gm.collect_grads(model, inv_scale=scale.double().reciprocal().float())
    assert_row(stats, "weight", [1.0, -2.0, 0.5] * 2)
    assert_row(stats, "bias", [1.0, 1.0])
    assert model.bias.grad.tolist() == [65536.0, 65536.0]


BAD_SCALES = {
    "two elements": torch.ones(2),
    "no element": torch.ones(0),
    "integer tensor": torch.tensor(2),
    "bool tensor": torch.tensor(True),
    "complex tensor": torch.tensor(1j),
    "string": "0.5",
    "complex": 1j,
    "NaN": math.nan,
    "infinite": math.inf,
    "negative": -0.5,
    "zero": 0.0,
    "too large": 10**400,
    "digits that have no text": -(10**5000),
    "sparse": torch.ones(1).to_sparse(),
    "sparse CSR": torch.ones(1, 1).to_sparse_csr(),
    "meta": torch.ones(1, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(1)]),
    "quantized": torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("scale", BAD_SCALES.values(), ids=BAD_SCALES)
def test_an_inv_scale_that_is_not_one_positive_finite_number_is_refused(scale: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^collect: inv_scale"):
        gm.collect([torch.ones(3)], inv_scale=scale)
    with pytest.raises(ValueError, match=r"^collect: inv_scale"):
        gm.collect({}, inv_scale=scale)
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    recorder = gm.Recorder(model)
    with pytest.raises(ValueError, match=r"^Recorder: inv_scale"):
        recorder.record(inv_scale=scale)


def test_a_duplicate_name_among_many_is_found_in_linear_time() -> None:
    class Name(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(i) for i in range(2000)]
    with pytest.raises(ValueError, match="two tensors have the name '1999'"):
        checks_named.check_names((*names, Name("1999")), "collect")
    # in quadratic time there would be two million
    assert Name.compared < 20 * len(names)


# refused inputs


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _half_complex() -> torch.Tensor:
    return torch._neg_view(torch.ones(3, dtype=torch.complex32).conj())


def _negated_fp8() -> torch.Tensor:
    return torch._neg_view(torch.ones(3).to(torch.float8_e5m2))


# case -> how to make it, the expected error, and the expected advice
REFUSED = {
    "int64": (lambda: torch.ones(3, dtype=torch.int64), r"torch\.int64", "convert it"),
    "uint8": (lambda: torch.ones(3, dtype=torch.uint8), r"torch\.uint8", "convert it"),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), r"torch\.bool", "convert it"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device", "materialize the model"),
    "nested, strided": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested tensor",
        r"tensor\.values\(\)",
    ),
    "nested, jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested tensor",
        r"tensor\.values\(\)",
    ),
    "quantized": (_quantized, "quantized", r"tensor\.dequantize\(\)"),
    "sparse CSR": (lambda: torch.eye(3).to_sparse_csr(), r"torch\.sparse_csr", r"tensor\.values\(\)"),
    "sparse BSR": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), r"torch\.sparse_bsr", r"tensor\.values\(\)"),
    "sparse fp8": (
        lambda: torch.ones(3).to_sparse().to(torch.float8_e5m2),
        r"sparse torch\.float8_e5m2",
        "convert it to float16 first",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), r"layout torch\._mkldnn", r"pass tensor\.to_dense\(\)"),
    "negated and conjugated half complex": (_half_complex, "torch cannot read", "negate it in"),
    "negated fp8": (_negated_fp8, "torch cannot read", "negate it in"),
    "None": (lambda: None, "NoneType", r"omit it|torch\.as_tensor"),
    "float": (lambda: 1.0, "float", r"torch\.as_tensor"),
    "list": (lambda: [1.0, 2.0], "list", r"torch\.as_tensor"),
    "ndarray": (lambda: pytest.importorskip("numpy").ones(3), "ndarray", r"torch\.as_tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused_by_name_with_advice(case: str) -> None:
    make, says, advises = REFUSED[case]
    with pytest.raises(TypeError, match=rf"^collect: 'layer\.3\.bad' .*{says}.*({advises})"):
        gm.collect({"fine": torch.ones(2), "layer.3.bad": make(), "fine too": torch.ones(2)})
    with pytest.raises(TypeError, match=rf"^total_norm: '0' .*{says}.*({advises})"):
        gm.total_norm([make()])


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_changes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _, _ = REFUSED[case]
    good = torch.tensor([3.0, -4.0], requires_grad=True)
    good.grad = torch.tensor([1.0, 2.0])
    bad = make()
    tensors = {"good": good, "bad": bad, "empty": torch.empty(0)}
    state = (good.tolist(), good._version, good.grad.tolist(), id(good.grad), torch.get_rng_state().tolist())
    expected = gm.collect({"good": good})

    with monkeypatch.context() as patch:
        patch.setattr(ops, "measure", lambda *_: pytest.fail("measured before refusing"))
        with pytest.raises(TypeError):
            gm.collect(tensors)
    assert list(tensors) == ["good", "bad", "empty"]
    assert tensors["bad"] is bad
    after = (good.tolist(), good._version, good.grad.tolist(), id(good.grad), torch.get_rng_state().tolist())
    assert after == state
    assert torch.equal(gm.collect({"good": good}).columns, expected.columns)
    assert_row(gm.collect({"good": good}), "good", [3.0, -4.0])


def test_a_refused_gradient_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: grad.clone() for name, grad in grads.items()}
    right = gm.collect_grads(model)
    weight = model[0].weight
    model[0].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model[0].weight.grad = torch.empty(2, 2, device="meta")
    with pytest.raises(TypeError, match=r"^collect_grads: '0\.weight' is on the meta device"):
        gm.collect_grads(model)
    with pytest.raises(TypeError, match=r"^collect_weights: '0\.weight' is on the meta device"):
        gm.collect_weights(model)
    with pytest.raises(TypeError, match=r"^grad_norm: '0\.weight' is on the meta device"):
        gm.grad_norm(model)
    model[0].weight = weight
    for name, p in model.named_parameters():
        assert p.grad is grads[name]
        assert torch.equal(p.grad, copies[name])
        assert p.grad._version == 0
        assert torch.equal(p, state[name])
    assert torch.equal(gm.collect_grads(model).columns, right.columns)


@pytest.fixture
def fake_mesh() -> Iterator[Any]:
    """A mesh of two ranks: this process is the first, and the second does not exist."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch without distributed")
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield dist.device_mesh.DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


def _dtensor(local: torch.Tensor, mesh: Any, placement: str) -> Any:
    from torch.distributed import tensor

    return tensor.DTensor.from_local(local, mesh, [getattr(tensor, placement)()])


def test_of_a_dtensor_the_local_shard_is_measured(fake_mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    weight = nn.Parameter(DTensor.from_local(torch.tensor([3.0, 4.0]), fake_mesh, [Shard(0)]))
    stats = gm.collect_weights({"w": weight})
    assert stats.norm.tolist() == [5.0]
    assert stats.sharding.specs[0].shape == (4,)
    assert "this rank's shard" in repr(stats)


def test_a_gradient_of_summands_is_refused_by_its_parameters_name(fake_mesh: Any) -> None:
    weight = nn.Parameter(_dtensor(torch.ones(3), fake_mesh, "Replicate"))
    weight.grad = _dtensor(torch.ones(3), fake_mesh, "Partial")
    with pytest.raises(TypeError, match=r"^collect_grads: 'w' is a DTensor with .*Partial.* reduce=gm.Ranks"):
        gm.collect_grads({"v": nn.Parameter(torch.ones(3)), "w": weight})
    # the weight itself can be measured
    assert gm.collect_weights({"w": weight}).norm.tolist() == [math.sqrt(3.0)]


def test_a_device_without_float64_is_refused_with_the_advice_to_move_to_the_cpu() -> None:
    with FakeTensorMode():
        tensors = {"fine": torch.empty(2), "w": torch.empty(3, device="mps")}
    with pytest.raises(
        TypeError, match=r"^collect: 'w' is on mps.*not support float64; pass tensor\.cpu\(\)"
    ):
        gm.collect(tensors)


def test_a_lazy_parameter_that_has_no_values_yet_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises((TypeError, ValueError), match=r"^collect_weights: '1\.weight' "):
        gm.collect_weights(model)
    assert gm.collect_grads(model).measured is False
    model(torch.ones(1, 2)).sum().backward()
    assert gm.collect_weights(model).numel.tolist() == [4.0, 2.0, 6.0, 3.0]
    assert gm.collect_grads(model).numel.tolist() == [4.0, 2.0, 6.0, 3.0]


@pytest.mark.parametrize("has_fp64", [False, True])
def test_an_xpu_is_measured_only_if_it_has_float64(has_fp64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(has_fp64=has_fp64)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    assert checks.has_float64(torch.device("xpu", 0)) is has_fp64


def test_any_device_said_to_have_no_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_float64", lambda device: device.type != "cpu")
    with pytest.raises(TypeError, match=r"^collect: 'w' is on cpu, which does not support float64"):
        # a new shape: a list like one that was measured before is not checked again
        gm.collect({"w": torch.ones(19, 3)})


def test_the_first_that_cannot_be_measured_is_named() -> None:
    with pytest.raises(TypeError, match=r"^collect: 'b' "):
        gm.collect({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.int32), "c": None})


def test_a_name_that_stands_twice_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match=r"^collect: two tensors have the name 'w'; give each tensor"):
        gm.collect([("v", x), ("w", x), ("w", x)])
    # a position is a name too
    with pytest.raises(ValueError, match=r"^collect: two tensors have the name '1'"):
        gm.collect([("1", x), x])
    # and so is a wrapped name without the wrapper's prefix
    with pytest.raises(ValueError, match=r"^collect: two tensors have the name 'w'"):
        gm.collect({"w": x, "_orig_mod.w": x})
    with pytest.raises(ValueError, match=r"^total_norm: two tensors have the name 'w'"):
        gm.total_norm([("w", x), ("w", x)])


@pytest.mark.parametrize("name", [3, None, ("a", "b"), b"w"], ids=repr)
def test_a_name_that_is_no_string_is_refused(name: object) -> None:
    with pytest.raises(TypeError, match=r"^collect: a name must be a string, got "):
        gm.collect({name: torch.ones(2)})
    with pytest.raises(TypeError, match=r"^collect_grads: a name must be a string, got "):
        gm.collect_grads([(name, torch.ones(2))])


@pytest.mark.parametrize("function", [gm.collect, gm.total_norm, gm.collect_grads, gm.collect_weights])
def test_a_bare_tensor_is_refused_with_the_advice_to_name_it(function: object) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__}: .*got one.*; pass {{'name': tensor}}"):
        function(torch.ones(3))


@pytest.mark.parametrize("function", [gm.collect, gm.total_norm])
def test_a_module_is_refused_where_it_does_not_say_what_to_measure(function: object) -> None:
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}: got a module, not .* collect_grads.*collect_weights"
    ):
        function(nn.Linear(2, 1))


@pytest.mark.parametrize("source", [None, 3, 1.5], ids=repr)
@pytest.mark.parametrize("function", [gm.collect, gm.total_norm, gm.collect_grads, gm.collect_weights])
def test_what_holds_no_tensors_is_refused(function: object, source: object) -> None:
    kind = type(source).__name__
    with pytest.raises(TypeError, match=rf"^{function.__name__}: expected .*got {kind}$"):
        function(source)


@pytest.mark.parametrize("function", [gm.collect_grads, gm.collect_weights, gm.grad_norm])
def test_parameters_that_are_no_tensors_are_refused_by_name(function: object) -> None:
    with pytest.raises(TypeError, match=r"'head' has type NoneType, not Tensor"):
        function({"body": nn.Parameter(torch.ones(1)), "head": None})


@pytest.mark.parametrize(
    ("threshold", "value"),
    [
        (name, value)
        for name in ("vanishing", "exploding", "dead")
        for value in (math.nan, -1.0, -math.inf, -1e-300, "1", None)
    ]
    + [("dead", 0.0), ("dead", 0)],
)
def test_thresholds_that_make_no_sense_are_refused(threshold: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Thresholds\({threshold}="):
        gm.Thresholds(**{threshold: value})


# names


def _wrapped(attribute: str, inner: nn.Module) -> nn.Module:
    wrapper = nn.Module()
    wrapper.add_module(attribute, inner)
    return wrapper


@pytest.mark.parametrize("part", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_names_lose_the_parts_that_wrappers_put_in(part: str) -> None:
    block = nn.Sequential(OrderedDict(proj=nn.Linear(2, 2, bias=False)))
    model = _wrapped(part, nn.Sequential(OrderedDict(block=_wrapped(part, _wrapped(part, block)))))
    assert next(iter(dict(model.named_parameters()))) == f"{part}.block.{part}.{part}.proj.weight"
    assert gm.collect_weights(model).names == ("block.proj.weight",)
    assert gm.collect(dict(model.named_parameters())).names == ("block.proj.weight",)
    model._modules[part].block._modules[part]._modules[part].proj.weight.grad = torch.ones(2, 2)
    assert gm.collect_grads(model).names == ("block.proj.weight",)


def test_wrappers_inside_each_other_are_all_left_out() -> None:
    inner = _wrapped("_checkpoint_wrapped_module", nn.Linear(1, 1))
    model = _wrapped("_orig_mod", _wrapped("_fsdp_wrapped_module", nn.Sequential(inner)))
    assert gm.collect_weights(model).names == ("0.weight", "0.bias")


def test_a_module_whose_own_name_ends_like_a_wrappers_keeps_it() -> None:
    model = nn.Module()
    model.my_orig_mod = nn.Linear(1, 1, bias=False)
    model.pre_fsdp_wrapped_module = nn.Linear(1, 1, bias=False)
    assert gm.collect_weights(model).names == ("my_orig_mod.weight", "pre_fsdp_wrapped_module.weight")


@pytest.mark.parametrize("name", ["_orig_mod", "block._orig_mod", "_fsdp_wrapped_module"])
def test_a_tensor_that_is_itself_called_like_a_wrapper_keeps_its_name(name: str) -> None:
    assert gm.collect({name: torch.ones(1)}).names == (name,)


def test_a_compiled_model_has_the_names_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    assert all(name.startswith("_orig_mod.") for name, _ in compiled.named_parameters())
    assert gm.collect_weights(compiled).names == gm.collect_weights(model).names
    assert gm.collect_weights(model).names == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_a_checkpointed_block_has_the_names_of_the_block() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = nn.Sequential(wrapper.checkpoint_wrapper(nn.Linear(2, 1)))
    assert isinstance(model[0], wrapper.CheckpointWrapper)
    assert gm.collect_weights(model).names == ("0.weight", "0.bias")


# models and iterables of parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_count_once_under_their_first_name() -> None:
    model = Tied()
    model.embed.weight.data.copy_(torch.arange(12.0).view(4, 3))
    model.embed.weight.grad = torch.ones(4, 3)
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert set(everything) == {"embed.weight", "head.weight"}
    for source in (model, everything, list(everything.items()), iter(everything.items())):
        stats = gm.collect_weights(source)
        assert stats.names == ("embed.weight",)
        assert_row(stats, "embed.weight", [float(i) for i in range(12)])
    assert gm.collect_grads(everything).names == ("embed.weight",)
    assert gm.collect_grads([model.embed.weight, model.head.weight]).names == ("0",)
    assert gm.grad_norm(everything) == math.sqrt(12.0)
    # two equal parameters are still two
    assert gm.collect_weights([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]).names == ("0", "1")


def test_parameters_without_a_gradient_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    (model[1].weight.sum() * 2 + model[2].bias.sum() * 3).backward()
    stats = gm.collect_grads(model)
    assert stats.names == ("1.weight", "2.bias")
    assert_row(stats, "1.weight", [2.0] * 4)
    assert_row(stats, "2.bias", [3.0])
    # positions among the parameters, not among the gradients
    assert gm.collect_grads(model.parameters()).names == ("2", "5")


def _nothing() -> dict[str, gm.TensorStats]:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return {
        "before backward": gm.collect_grads(nn.Linear(2, 2)),
        "frozen": gm.collect_grads(frozen),
        "no parameters": gm.collect_grads(nn.ReLU()),
        "weights of no parameters": gm.collect_weights(nn.ReLU()),
        "empty list": gm.collect_grads([]),
        "empty generator": gm.collect(x for x in ()),
        "empty mapping": gm.collect({}, inv_scale=torch.tensor(0.5)),
        "on meta": gm.collect_grads(nn.Linear(2, 2, device="meta")),
    }


@pytest.mark.parametrize("case", ["before backward", "frozen", "no parameters", *list(_nothing())[3:]])
def test_nothing_to_measure_gives_the_same_type_with_no_rows(case: str) -> None:
    stats = _nothing()[case]
    assert type(stats) is gm.TensorStats
    assert stats.names == ()
    assert stats.columns.shape == (0, len(gm.COLUMNS))
    assert stats.columns.dtype == torch.float64
    assert stats.flags.shape == (0,)
    assert stats.flags.dtype == torch.int32
    assert stats.measured is False
    assert stats.norm.shape == (0,)
    assert stats.total_norm.shape == ()
    assert stats.total_norm.item() == 0.0
    assert stats.found_inf.item() == 0.0
    assert stats.total.tolist() == [0.0] * len(gm.COLUMNS)
    assert stats.group({"all": ""}).norm.tolist() == [0.0]
    report = stats.materialize()
    assert report.measured is False
    assert report.total_norm == 0.0
    assert report.found_inf is False
    assert list(report) == []
    assert "nothing measured" in str(report)


def test_gradients_of_a_frozen_model_on_another_device_would_be_there() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(2, device="cuda:0"), requires_grad=False)
        stats = gm.collect_grads([parameter])
    assert stats.measured is False
    assert stats.columns.device == stats.flags.device == torch.device("cuda:0")


@pytest.mark.parametrize("function", [gm.collect_grads, gm.grad_norm, lambda x: gm.clip_grad_norm_(x, 1.0)])
def test_gradients_where_parameters_are_wanted_are_not_taken_for_none(function: object) -> None:
    grads = [torch.ones(2), torch.ones(3)]
    for source in (grads, {"a": grads[0]}, nn.Linear(2, 1).state_dict()):
        with pytest.raises(TypeError, match=r": none of these \d tensors is a parameter or has a \.grad"):
            function(source)
    # weights may be tensors of any kind
    assert gm.collect_weights(grads).norm.shape == (2,)


def test_a_model_some_of_whose_weights_have_no_elements_is_measured() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.empty(0)), "b": nn.Parameter(torch.ones(2))})
    stats = gm.collect_weights(model)
    assert_row(stats, "a", [])
    assert_row(stats, "b", [1.0, 1.0])


def test_a_generator_is_read_once_and_whole() -> None:
    stats = gm.collect(torch.full((i + 1,), float(i)) for i in range(4))
    assert stats.names == ("0", "1", "2", "3")
    for i in range(4):
        assert_row(stats, str(i), [float(i)] * (i + 1))
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert gm.collect_grads(model.parameters()).names == ("0", "1")
    assert gm.collect_weights(model.parameters()).names == ("0", "1")


def test_named_parameters_and_mappings_give_the_names() -> None:
    model = nn.Linear(2, 1)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    for source in (
        model,
        model.named_parameters(),
        list(model.named_parameters()),
        dict(model.named_parameters()),
        types.MappingProxyType(dict(model.named_parameters())),
    ):
        stats = gm.collect_grads(source)
        assert stats.names == ("weight", "bias")
        assert_row(stats, "weight", [3.0, 4.0])
        assert_row(stats, "bias", [1.0])


def test_names_and_positions_mix_in_one_iterable() -> None:
    stats = gm.collect([torch.ones(1), ("named", torch.ones(2)), torch.ones(3)])
    assert stats.names == ("0", "named", "2")
    assert stats.numel.tolist() == [1.0, 2.0, 3.0]


def test_thresholds_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^collect: thresholds must be gm\.Thresholds"):
        gm.collect([torch.ones(1)], thresholds=3.0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            [nn.Linear(1, 1), nn.Linear(1, 1)],
            r"'0' is a module.*; pass one module by itself, or its named_parameters\(\)",
        ),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]).param_groups, r"pass group\['params'\]"),
        (nn.Linear(1, 1).parameters, "got a function, not tensors; call it"),
        ("model", "expected a module, a mapping or an iterable of tensors, got str"),
    ],
)
def test_what_is_nearly_right_is_told_what_is_right(source: object, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        gm.collect_grads(source)
