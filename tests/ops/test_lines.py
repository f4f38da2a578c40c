"""Rows and columns of matrices: against exact sums, and equal lines have equal bits wherever they are.

These tests run on the eager path and on interpreted kernels; tests/kernels/test_compiled_kernels.py executes
compiled ones.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import KERNELS
from gradiometer import ops
from gradiometer.columns import LINES, line_weights
from gradiometer.ops import line_reference
from support import oracle, strategies

U = oracle.U
# sizes at which an implementation changes its method, and one more and one less
BORDERS = (8, 256) if KERNELS else (8, line_reference._ROWS, 256, line_reference._COLUMNS)
SIZES = [0, 1, 2, 3, *[border + step for border in BORDERS for step in (-1, 0, 1)]]


def call(tensor):
    """Return the columns of the rows, and those of the columns."""
    return torch.ops.gradiometer.line_stats([tensor]).split(ops.line_counts(tensor))


def matrix(tensor):
    """Return the numbers of a tensor as a matrix in fp64."""
    return oracle.numbers(tensor).view(ops.line_counts(tensor))


def murmur(x):
    """Return the hash of a 32-bit integer as a signed one, as in the source of MurmurHash3."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


WEIGHTS = [murmur(i + 1) / 2**31 for i in range(5000)]


def assert_lines(found, x):
    assert (found.shape, found.dtype) == ((len(x), LINES.width), torch.float64)
    for row, line in zip(found.tolist(), x.tolist(), strict=True):
        got = dict(zip(LINES.index, row, strict=True))
        finite = [value if math.isfinite(value) else 0.0 for value in line]
        assert got["numel"] == len(line)
        assert got["n_nonfinite"] == len(line) - sum(map(math.isfinite, line))
        assert got["abs_max"] == max(map(abs, finite), default=0.0)
        terms = {
            "sum": finite,
            "sumsq": [value * value for value in finite],
            "projection": [value * weight for value, weight in zip(finite, WEIGHTS, strict=False)],
        }
        for name, values in terms.items():
            # each of fewer than n additions is off by U of the sum of magnitudes at most
            bound = len(line) * U * math.fsum(map(abs, values))
            assert abs(got[name] - math.fsum(values)) <= bound, name


@st.composite
def shapes(draw):
    rows = draw(st.sampled_from(SIZES))
    columns = draw(st.sampled_from([n for n in SIZES if n * rows <= 2**13]))
    if rows == 1 and draw(st.booleans()):
        return (columns,)
    inner = draw(st.sampled_from([1, 2, 3, 8]))
    return (
        (rows, columns // inner, inner) if columns % inner == 0 and draw(st.booleans()) else (rows, columns)
    )


@given(
    shapes(),
    st.sampled_from(strategies.FLOATS * 2 + strategies.ALL_DTYPES),
    st.sampled_from(strategies.LAYOUTS),
    st.sampled_from(strategies.VALUES),
    st.sampled_from((0, 0, 1, 9)),
)
def test_every_line_has_the_sums_of_its_elements(shape, dtype, layout, values, specials):
    x = strategies.Recipe(dtype, shape, layout, values, specials, seed=sum(shape)).tensor()
    for found, lines in zip(call(x), (matrix(x), matrix(x).t()), strict=True):
        assert_lines(found, lines)


# several parts are merged, in each direction
@pytest.mark.parametrize("shape", [(2, 4097), (4100, 2), (3, 515, 3)])
def test_long_lines_have_the_sums_of_their_elements(shape):
    x = strategies.Recipe(torch.float32, shape, specials=2).tensor()
    for found, lines in zip(call(x), (matrix(x), matrix(x).t()), strict=True):
        assert_lines(found, lines)


def test_a_list_is_measured_tensor_by_tensor():
    shapes = [(3, 5), (4,), (), (0, 2, 3), (2, 0), (2, 3, 5, 7)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [torch.randn(5, 3, dtype=torch.complex64).conj(), torch.randn(6).bfloat16()]
    counts = [ops.line_counts(x) for x in tensors]
    assert counts == [(3, 5), (1, 4), (1, 1), (0, 6), (2, 0), (2, 105), (5, 6), (1, 6)]
    found = ops.measure_lines(tensors).split([count for pair in counts for count in pair])
    expected = [lines for x in tensors for lines in call(x)]
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert found[6].tolist() == [[0.0] * LINES.width] * 0
    assert found[7].tolist() == [[0.0] * LINES.width] * 6


# equal lines


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_equal_lines_have_equal_bits_wherever_they_are(by, dtype):
    # several tiles and parts; the lines are at their ends and in between
    count, length = (70, 300) if KERNELS else (600, 700)
    g = torch.Generator().manual_seed(0)
    line = torch.randn(length, generator=g)
    line[[5, length - 1]] = torch.tensor([math.nan, math.inf])
    others = torch.randn(count, length, generator=g)
    others[:, 7] = math.nan
    others[3] = math.inf
    places = [0, 1, 7, 8, 37, 64, 69, *([255, 256, 511, 599] if not KERNELS else [])]
    others[places] = line
    rows = others.to(dtype)
    # the same lines in a tensor with more of them, at other addresses, with gaps
    apart = torch.zeros(count + 9, 2 * length + 3, dtype=dtype)[:, 3::2]
    apart[9:] = rows
    if by == "rows":
        found = [call(x)[0] for x in (rows, rows.t().contiguous().t(), apart)]
    else:
        found = [call(x)[1] for x in (rows.t(), rows.t().contiguous(), apart.t())]
    same = torch.cat([found[0][places], found[1][places], found[2][9:][places]]).view(torch.int64)
    assert (same == same[0]).all()
    # and no other line has them
    different = [i for i in range(count) if i not in places]
    projections = LINES.value(found[0], "projection")
    assert (projections[different] != projections[0]).all()
    assert torch.equal(found[0].view(torch.int64), found[1].view(torch.int64))


def test_a_permutation_of_a_line_has_another_projection():
    g = torch.Generator().manual_seed(0)
    # small integers: all sums are exact, so the other columns are the same
    line = torch.randint(1, 100, (300,), generator=g).float()
    lines = [line, line.flip(0), line.sort().values]
    lines += [line.roll(shift) for shift in (1, 2, 64, 128, 256)]
    for i in range(0, 299, 9 if KERNELS else 1):
        if line[i] != line[i + 1]:
            swapped = line.clone()
            swapped[[i, i + 1]] = line[[i + 1, i]]
            lines.append(swapped)
    x = torch.stack(lines)
    for found in (call(x)[0], call(x.t())[1]):
        for name in LINES.index:
            values = LINES.value(found, name)
            assert len(set(values.tolist())) == (len(lines) if name == "projection" else 1), name


# the weights


def test_weights_are_those_of_the_hash():
    # the known hash of an empty string with seed 1
    assert murmur(1) == 0x514E28B7
    assert line_weights(0, 5000).tolist() == WEIGHTS
    assert line_weights(2**32 - 2, 4).tolist() == [murmur(x) / 2**31 for x in (2**32 - 1, 0, 1, 2)]


def test_weights_are_distinct_and_like_random_numbers():
    weights = line_weights(0, 2**17)
    assert len(weights.unique()) == len(weights)
    assert (weights != 0).all()
    # uniform in [-1, 1): standard errors of the mean, the variance and correlations are below 0.003
    assert abs(weights.mean()) < 0.01
    assert abs(weights.var() - 1 / 3) < 0.01
    for lag in (1, 2, 64, 768):
        assert abs((weights[lag:] * weights[:-lag]).mean()) < 0.01


# the op


def test_it_works_inside_a_compiled_function():
    def measured(x):
        return ops.measure_lines([x, x.t()]) * 2.0

    x = torch.randn(5, 7)
    compiled = torch.compile(measured, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), measured(x))


def test_lines_merge_as_a_schema_does():
    x = torch.randint(-9, 9, (6, 40)).double()
    x[2, 3] = math.nan
    # the weights of a part begin anew, so the projection merges only with itself
    parts = [call(part)[0] for part in x.split(20, dim=1)]
    merged, whole = LINES.merge(*parts), call(x)[0]
    for name in LINES.index:
        same = torch.equal(LINES.value(merged, name), LINES.value(whole, name))
        assert same == (name != "projection")
