"""Projections: the op against plain Python, on the eager path and on kernels.

Where elements are small integers, sums are exact in any order, and results are compared bit for bit.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from conftest import GPU_TARGET, INTERPRETED, KERNELS
from gradiometer.columns import CURSOR_SIZE, PROJECTIONS, Cursor
from gradiometer.columns.projections import FIRST_PROJECTION, sign_hash, sign_keys
from gradiometer.inputs import Box, Part
from gradiometer.ops import encode, index_boxes, launch_plans, projection_chunks, projection_reference
from gradiometer.ops.projections import may_project, measure_projections
from support import strategies

COUNTS = tuple(PROJECTIONS)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def integers(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def project(tensors, count=16, parts=None, seed=0, names=None, cursor=None):
    names = names or [f"w{i}" for i in range(len(tensors))]
    boxes = encode(parts) if parts else []
    return measure_projections(tensors, names, count, seed, boxes, cursor)


def numbers(x):
    """Return the elements in row-major order, as Python numbers."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().to(torch.float64).reshape(-1).tolist()


def plain(x, name, count, seed=0, index=None):
    """Return the row of a tensor by `sign_hash`, one element at a time; ``index``: of each element."""
    values = numbers(x)
    index = range(len(values)) if index is None else index
    finite = [(i, v) for i, v in zip(index, values, strict=True) if math.isfinite(v)]
    row = [len(values), sum(v * v for _, v in finite), len(values) - len(finite)]
    for word in range(-(-count // 32)):
        keys = sign_keys(name, seed, word)
        hashed = [(sign_hash(i, keys), v) for i, v in finite]
        row += [sum(-v if h >> j & 1 else v for h, v in hashed) for j in range(min(count, 32))]
    return torch.tensor(row, dtype=torch.float64)


@pytest.mark.parametrize("count", COUNTS)
def test_signs_are_those_of_the_documented_hash(count):
    tensors = [integers(37), integers(), integers(5, 3).t(), integers(0)]
    found = project(tensors, count, seed=9)
    assert found.shape == (4, FIRST_PROJECTION + count)
    expected = [plain(x, f"w{i}", count, 9) for i, x in enumerate(tensors)]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", strategies.ALL_DTYPES, ids=str)
def test_every_dtype_is_read_exactly(dtype):
    x = integers(700, dtype=torch.float32)
    values = torch.complex(x, x.flip(0)) if dtype.is_complex else x
    if dtype == torch.float8_e8m0fnu:
        values = values.abs().clamp(1)
    values = values.to(dtype)
    found = project([values, values[1:]])
    assert torch.equal(found, torch.stack([plain(values, "w0", 16), plain(values[1:], "w1", 16)]))


def layouts(dtype):
    x = integers(4000, dtype=dtype)
    yield from (x, x[1:], x[3:900], x[::3], x[:0], x[5], x[:1].expand(7), x[:3].reshape(3, 1).expand(3, 50))
    matrix = x[:3900].reshape(130, 30)
    yield from (matrix.t(), matrix[:, 1:2], matrix[:, :2], matrix[3:, 4:27], matrix[:, ::7], matrix.t()[:3])
    cube = x[:3360].reshape(8, 14, 30)
    yield from itertools.islice((cube.permute(p) for p in itertools.permutations(range(3))), 1, None)
    yield cube[:, 1:9, 2:5]
    yield x[: 2 * 3 * 4 * 5].reshape(2, 3, 4, 5).permute(3, 1, 0, 2)
    yield x[: 2 * 3 * 4 * 5].reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    yield torch._neg_view(x[:100])


@pytest.mark.parametrize("dtype", FLOATS[1:3] if KERNELS else FLOATS, ids=str)
def test_indices_do_not_depend_on_the_layout_in_memory(dtype):
    tensors = list(layouts(dtype))
    found = project(tensors)
    # the same numbers, contiguous and on the eager path
    names = [f"w{i}" for i in range(len(tensors))]
    copies = [x.clone().contiguous().resolve_neg() for x in tensors]
    expected = projection_reference.project(copies, names, 16, 0, [None] * len(tensors))
    assert torch.equal(found, expected)
    assert torch.equal(expected[7], plain(tensors[7], "w7", 16))


def test_sizes_around_those_of_tiles_and_chunks():
    borders = [128, 256, 512, 1024, 2048, 2**13, 2**14, *([] if KERNELS else [2**15, 2**16])]
    if GPU_TARGET and not INTERPRETED:
        borders = borders[:5]
    tensors = [integers(size + step) for size in borders for step in (-1, 0, 1)]
    tensors += [integers(size + 3)[3:] for size in borders]
    names = [f"w{i}" for i in range(len(tensors))]
    found = project(tensors, 8)
    for x, name, row in zip(tensors, names, found, strict=True):
        h = np.array([sign_hash(i, sign_keys(name, 0, 0)) for i in range(len(x))])
        signs = 1 - 2 * (h[:, None] >> np.arange(8) & 1)
        assert row[FIRST_PROJECTION:].tolist() == (x.double().numpy() @ signs).tolist()
        assert row[:3].tolist() == [len(x), x.square().sum(), 0]


@given(
    st.lists(
        strategies.recipes(
            dtypes=strategies.ALL_DTYPES,
            values=("normal", "moderate", "some zeros", "nonfinite"),
            largest=2**11 if KERNELS else 2**15,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(COUNTS[:4]),
)
def test_any_list_of_tensors(recipes, count):
    tensors = [recipe.tensor() for recipe in recipes]
    found = project(tensors, count)
    for i, (x, row) in enumerate(zip(tensors, found, strict=True)):
        values = np.array(numbers(x))
        finite = np.isfinite(values)
        assert row[[0, 2]].tolist() == [len(values), len(values) - finite.sum()]
        values = np.where(finite, values, 0.0)
        # twice n roundings of numbers that are at most the sum of magnitudes
        error = 2 * (len(values) + 2**9) * 2.0**-53 * abs(values).sum()
        words = [sign_keys(f"w{i}", 0, word) for word in range(-(-count // 32))]
        index = range(min(len(values), 200))
        signs = np.array(
            [
                [1 - 2 * (sign_hash(e, keys) >> j & 1) for keys in words for j in range(min(32, count))]
                for e in index
            ]
        ).reshape(len(index), count)
        if len(values) <= 200:
            assert (abs(row[FIRST_PROJECTION:].numpy() - values @ signs) <= error).all()
        assert math.isclose(row[1], math.fsum(values**2), rel_tol=1e-12)


# parts of whole tensors


def boxes_of(draw, shape):
    """Split a shape into boxes that do not overlap."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        origin, size = boxes.pop(place)
        at = draw(st.integers(0, size[dim]))
        lower, upper, moved = list(size), list(size), list(origin)
        lower[dim], upper[dim], moved[dim] = at, size[dim] - at, origin[dim] + at
        boxes[place:place] = [(origin, tuple(lower)), (tuple(moved), tuple(upper))]
    return boxes


@st.composite
def splits(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return tuple(shape), boxes_of(draw, shape), draw(st.permutations(range(len(shape))))


@given(splits(), st.sampled_from(FLOATS), st.sampled_from(COUNTS[:4]))
def test_parts_add_up_to_the_whole(split, dtype, count):
    shape, boxes, order = split
    whole = integers(*shape, dtype=dtype)
    parts, tensors = [], []
    for origin, size in boxes:
        parts.append(Part(shape, (Box((0,) * len(shape), size, origin),)))
        piece = whole[tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))]
        # in memory in any order of dimensions
        inverse = [order.index(i) for i in range(len(shape))]
        tensors.append(piece.permute(*order).contiguous().permute(*inverse))
    rows = project(tensors, count, parts, names=["w"] * len(parts))
    assert torch.equal(rows.sum(dim=0), plain(whole, "w", count))


def test_a_local_tensor_may_hold_several_boxes():
    whole = integers(12, 10)
    local = torch.cat([whole[2:4], whole[8:12]])
    part = Part((12, 10), (Box((0, 0), (2, 10), (2, 0)), Box((2, 0), (4, 10), (8, 0))))
    rest = torch.cat([whole[:2], whole[4:8]])
    other = Part((12, 10), (Box((0, 0), (2, 10), (0, 0)), Box((2, 0), (4, 10), (4, 0))))
    rows = project([local, rest], 32, [part, other], names=["w", "w"])
    assert torch.equal(rows.sum(dim=0), plain(whole, "w", 32))
    # together with a tensor that is whole
    rows = project([whole, local], 32, [None, part], names=["w", "w"])
    assert torch.equal(rows[0], plain(whole, "w", 32))


@pytest.mark.parametrize("columns", [1, 2])
def test_a_shard_of_one_or_two_columns(columns):
    whole = integers(300, 8)
    shards = [whole[:, i : i + columns].contiguous() for i in range(0, 8, columns)]
    parts = [Part((300, 8), (Box((0, 0), (300, columns), (0, i)),)) for i in range(0, 8, columns)]
    rows = project(shards, 16, parts, names=["w"] * len(parts))
    assert torch.equal(rows.sum(dim=0), plain(whole, "w", 16))


@pytest.mark.parametrize("first", [2**31 - 40, 2**32 - 40, 3 * 2**32 - 1, 2**40 + 7])
def test_indices_beyond_32_bits(first):
    # rows of a large whole: adjacent elements, those that cross a multiple of 2**32, and columns far apart
    line = integers(100)
    column = integers(6)
    parts = [
        Part((2**41,), (Box((0,), (100,), (first,)),)),
        Part((8, 2**31 + 3), (Box((0, 0), (6, 1), (1, 17)),)),
        Part((8, 2**31 + 3), (Box((0, 0), (6, 2), (0, 2**31 - 1)),)),
    ]
    tensors = [line, column.view(6, 1), integers(6, 2)]
    wide = 2**31 + 3
    indices = [
        range(first, first + 100),
        [(1 + r) * wide + 17 for r in range(6)],
        [r * wide + 2**31 - 1 + c for r in range(6) for c in range(2)],
    ]
    found = project(tensors, 32, parts)
    expected = [
        plain(x, f"w{i}", 32, index=index) for i, (x, index) in enumerate(zip(tensors, indices, strict=True))
    ]
    assert torch.equal(found, torch.stack(expected))


def test_a_tensor_in_too_many_pieces_is_copied(monkeypatch):
    monkeypatch.setattr(projection_reference, "MOST_PIECES", 3)
    x = integers(4, 5, 6, 7).permute(2, 0, 3, 1)[1:]
    assert len(index_boxes.pieces_of(x.shape, x.stride(), None)) > 3
    for _ in range(2):
        found = project([x, integers(5)])
        assert torch.equal(found[0], plain(x, "w0", 16))
    launch_plans.clear()


# values


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinite_elements_are_left_out_and_counted(dtype):
    tensors = []
    for place, value in itertools.product((0, 3, 700, 1199), (math.nan, math.inf, -math.inf)):
        x = integers(1200, dtype=dtype)
        x[place] = value
        tensors += [x, x.reshape(40, 30).t()] if place == 3 else [x]
    found = project(tensors, 8)
    assert found[:, 2].tolist() == [1.0] * len(tensors)
    assert torch.equal(found[0], plain(tensors[0], "w0", 8))
    assert torch.equal(found[4], plain(tensors[4], "w4", 8))
    assert found.isfinite().all()


def test_squares_that_overflow_do_not_hide_projections():
    x = integers(1000, dtype=torch.float64)
    x[7] = 2.0**600
    found = project([x], 8)
    assert found[0, :3].tolist() == [1000, math.inf, 0]
    assert (found[0, FIRST_PROJECTION:].abs() == 2.0**600).all()


def test_rows_have_the_same_bits_in_every_call_and_list():
    tensors = [torch.randn(5000), torch.randn(60, 50).t(), torch.randn(700).bfloat16(), torch.randn(3)]
    found = project(tensors, 32)
    assert torch.equal(project(tensors, 32), found)
    for i in range(len(tensors)):
        assert torch.equal(project([tensors[i]], 32, names=[f"w{i}"])[0], found[i])
    order = [2, 0, 3, 1]
    shuffled = project([tensors[i] for i in order], 32, names=[f"w{i}" for i in order])
    assert torch.equal(shuffled, found[order])


def test_a_known_list_with_other_names_seeds_or_parts_is_measured_anew():
    x = integers(40)
    rows = [
        project([x], 8),
        project([x], 8, names=["v"]),
        project([x], 8, seed=1),
        project([x], 16),
        project([x], 8, [Part((80,), (Box((0,), (40,), (40,)),))]),
        project([x], 8),
    ]
    assert torch.equal(rows[0], rows[5])
    expected = [
        plain(x, "w0", 8),
        plain(x, "v", 8),
        plain(x, "w0", 8, 1),
        plain(x, "w0", 16),
        plain(x, "w0", 8, index=range(40, 80)),
    ]
    assert [row[0].tolist() for row in rows[:5]] == [row.tolist() for row in expected]
    x.add_(1)
    assert torch.equal(project([x], 8)[0], plain(x, "w0", 8))


# the op


def cursor_of(step, every, of_them):
    cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
    cursor[[Cursor.STEP, Cursor.EVERY, Cursor.PROJECT_EVERY]] = torch.tensor(
        [step, every, of_them], dtype=torch.float64
    )
    return cursor


def test_rows_are_0_in_steps_that_are_not_due():
    tensors = [integers(300), integers(20, 9)[:, :4], integers(0)]
    expected = project(tensors, 64)
    cases = itertools.product((0, 1, 6, 12), (0, 1, 2, 4), (0, 1, 3))
    for step, every, of_them in [(6, 2, 3), (6, 4, 3), (4, 2, 3), (6, 0, 1), (6, 1, 0)] if KERNELS else cases:
        due = every > 0 and of_them > 0 and step % every == 0 and step % of_them == 0
        found = project(tensors, 64, cursor=cursor_of(step, every, of_them))
        assert torch.equal(found, expected if due else torch.zeros_like(expected)), (step, every, of_them)
        assert may_project(cursor_of(step, every, of_them)) == (due or INTERPRETED or bool(GPU_TARGET))


@pytest.mark.usefixtures("_dynamo")
def test_it_works_inside_a_compiled_function():
    model = torch.nn.Linear(20, 30)

    def step(x, cursor):
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        stats = gm.collect_projections({"weight": grads[0], "bias": grads[1]}, projections=32)
        gated = project([model.weight.detach()], 8, cursor=cursor)
        model.zero_grad()
        return stats, gated

    x = torch.randn(8, 20)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    stats, gated = compiled(x, cursor_of(4, 2, 1))
    assert compiled(x, cursor_of(3, 2, 1))[1].count_nonzero() == 0
    expected, due = step(x, cursor_of(4, 2, 1))
    torch.testing.assert_close(stats.columns, expected.columns, rtol=1e-5, atol=1e-5)
    assert torch.equal(gated, due)
    assert (stats.names, stats.numel.tolist()) == (("weight", "bias"), [600, 30])


def test_the_op_fits_torchs_checks():
    tensors, names = [integers(30), integers(4, 3).t()], ["a", "b"]
    arguments = (tensors, names, 8, 0, [], cursor_of(0, 1, 1))
    torch.library.opcheck(
        torch.ops.gradiometer.project, arguments, test_utils=("test_schema", "test_faketensor")
    )


# what the kernels are given


def test_chunks_cover_each_element_once():
    pieces = index_boxes.pieces_of((70, 50), (64, 1), None)
    for tile in (64, 512):
        assert 0 <= projection_chunks._log_of(pieces[0], tile) < tile.bit_length()
    # tiles that fit
    for columns, log in ((1, 0), (2, 1), (3, 0), (512, 9), (4096, 9), (520, 6), (1000, 9)):
        piece = index_boxes.Piece(4096, columns, 0, columns + 5, 1, 0, columns, 1)
        assert projection_chunks._log_of(piece, 512) == log
    long = index_boxes.Piece(1, 2**33, 5, 0, 1, 100, 0, 1)
    found = list(projection_chunks._within_upper([long]))
    assert [(x.offset, x.first, x.columns) for x in found] == [
        (5, 100, 2**32 - 100),
        (5 + 2**32 - 100, 2**32, 2**32),
        (5 + 2**33 - 100, 2**33, 100),
    ]
