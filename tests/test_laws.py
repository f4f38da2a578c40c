"""Laws that hold between measurements for any values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm
from conftest import KERNELS
from gradiometer import ops
from support import oracle, strategies
from support.gradients import bits
from support.strategies import Recipe, lists, recipes

NAMES = tuple(column.name for column in gm.COLUMNS)
EXACT = [i for i, name in enumerate(NAMES) if name not in {"sumsq", "sum"}]

# a merge adds two sums that are within their bounds, and rounds once
MERGED = 2 * oracle.U


def assert_same_bits(a, b):
    assert bits(a.columns).tolist() == bits(b.columns).tolist()
    assert bits(a.flags).tolist() == bits(b.flags).tolist()


def row(stats, index=0):
    return dict(zip(NAMES, stats.columns[index].tolist(), strict=True))


def cut_at(x, share):
    flat = x.reshape(-1)
    at = round(share * len(flat))
    return flat[:at], flat[at:]


# merging


@given(recipes(), st.floats(0, 1))
def test_merging_two_parts_is_measuring_the_whole(recipe, share):
    a, b = cut_at(recipe.tensor(), share)
    merged = gm.collect({"x": a}).merge(gm.collect({"x": b}))
    whole = gm.collect({"x": torch.cat([a, b])})
    assert merged.columns[0, EXACT].tolist() == whole.columns[0, EXACT].tolist()
    expected = oracle.exact(a, b)
    oracle.assert_within_bounds(row(merged), expected, slack=MERGED)
    oracle.assert_within_bounds(row(whole), expected)


@given(recipes(), st.floats(0, 1))
def test_merging_two_rows_into_a_group_is_merging_two_stats(recipe, share):
    a, b = cut_at(recipe.tensor(), share)
    grouped = gm.collect({"x.a": a, "x.b": b}).group({"x": r"^x\."})
    assert_same_bits(grouped, gm.collect({"x": a}).merge(gm.collect({"x": b})))


@given(recipes(), recipes(), recipes())
def test_merging_is_commutative_and_associative(first, second, third):
    a, b, c = (gm.collect({"x": recipe.tensor()}) for recipe in (first, second, third))
    assert_same_bits(a.merge(b), b.merge(a))
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert left.columns[0, EXACT].tolist() == right.columns[0, EXACT].tolist()


@given(recipes())
def test_merging_with_nothing_changes_nothing(recipe):
    stats = gm.collect({"x": recipe.tensor()})
    nothing = gm.collect({"x": torch.empty(0)})
    assert stats.merge(nothing).columns.tolist() == stats.columns.tolist()
    assert bits(nothing.merge(stats).flags).tolist() == bits(stats.flags).tolist()


@given(lists())
def test_grouping_all_rows_is_the_total(some):
    stats = gm.collect([recipe.tensor() for recipe in some])
    grouped = stats.group({"all": ".*"})
    assert bits(grouped.columns[0]).tolist() == bits(stats.total).tolist()
    assert bits(grouped.norm[0]).tolist() == bits(stats.total_norm).tolist()
    assert stats.found_inf.item() == float(grouped.n_nonfinite[0] > 0)


# values


@given(
    recipes(strategies.FLOATS, values=("moderate", "nonfinite"), layouts=("contiguous", "transposed")),
    st.integers(-6, 6),
)
def test_scaling_by_a_power_of_two_scales_exactly(recipe, power):
    x, scale = recipe.tensor(), 2.0**power
    factors = torch.tensor(
        [{"sumsq": scale**2, "sum": scale, "abs_max": scale}.get(name, 1) for name in NAMES]
    )
    stats, scaled = gm.collect([x]), gm.collect([x * scale])
    assert (stats.columns * factors).tolist() == scaled.columns.tolist()


@given(st.integers(-400, 400), st.integers(0, 9))
def test_scaling_fp64_by_a_power_of_two_scales_exactly_far_away(power, seed):
    x = Recipe(torch.float64, (5000,), values="moderate", seed=seed).tensor()
    stats, scaled = gm.collect([x, x[:50]]), gm.collect([x * 2.0**power, x[:50] * 2.0**power])
    assert (stats.norm * 2.0**power).tolist() == scaled.norm.tolist()


@given(recipes())
def test_permuting_elements_keeps_counts_and_the_largest_magnitude(recipe):
    x = recipe.tensor().reshape(-1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(recipe.seed))
    stats, permuted = gm.collect([x]), gm.collect([x[order]])
    assert stats.columns[0, EXACT].tolist() == permuted.columns[0, EXACT].tolist()
    oracle.assert_within_bounds(row(permuted), oracle.exact(x))


@given(recipes(layouts=("transposed", "channels_last")))
def test_a_transposed_tensor_is_measured_like_its_memory_in_order(recipe):
    x = recipe.tensor()
    stats, contiguous = gm.collect([x]), gm.collect([x.contiguous()])
    assert stats.columns[0, EXACT].tolist() == contiguous.columns[0, EXACT].tolist()
    expected = oracle.exact(x)
    oracle.assert_within_bounds(row(stats), expected)
    oracle.assert_within_bounds(row(contiguous), expected)


# identical bits

STRANGERS = (
    Recipe(torch.float32, (33,), values="nonfinite", seed=1),
    Recipe(torch.bfloat16, (5000,), values="nonfinite", seed=2),
    Recipe(torch.float64, (0,)),
    Recipe(torch.float16, (7, 11), "stepped", specials=9),
    Recipe(torch.float32, (9000,), values="wide"),
    Recipe(torch.complex64, (3,)),
)


@given(lists(), st.randoms(use_true_random=False))
def test_no_other_tensor_of_the_call_changes_a_bit_of_a_row(some, random):
    tensors = [recipe.tensor() for recipe in some]
    alone = [gm.collect({str(i): x}) for i, x in enumerate(tensors)]
    strangers = [recipe.tensor() for recipe in STRANGERS]
    company = [*enumerate(tensors), *enumerate(strangers, start=len(tensors))]
    random.shuffle(company)
    together = gm.collect({str(i): x for i, x in company})
    for name, stats in zip(together.names, zip(together.columns, together.flags, strict=True), strict=True):
        if int(name) < len(tensors):
            expected = alone[int(name)]
            assert bits(stats[0]).tolist() == bits(expected.columns[0]).tolist()
            assert bits(stats[1]).tolist() == bits(expected.flags[0]).tolist()


@given(st.integers(1, 40 if KERNELS else 600), st.integers(1, 70), st.sampled_from(strategies.FLOATS))
def test_a_crowd_of_equal_tensors_gets_equal_rows(count, n, dtype):
    tensors = [Recipe(dtype, (n,), seed=n).tensor() for _ in range(count)]
    columns = bits(gm.collect(tensors).columns).tolist()
    assert columns == [columns[0]] * count


@given(lists())
def test_the_same_call_twice_gives_the_same_bits(some):
    tensors = [recipe.tensor() for recipe in some]
    assert_same_bits(gm.collect(tensors), gm.collect(tensors))


@pytest.mark.skipif(KERNELS, reason="kernels run in one thread here")
@pytest.mark.parametrize("values", ["normal", "wide", "nonfinite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, values, number_of_threads):
    shapes = [(n,) for n in (40, 4096, 4097, 40_000, 262_143, 600_001)] + [(700, 900)]
    tensors = [
        Recipe(dtype, shape, layout, values, specials=3).tensor()
        for shape in shapes
        for layout in ("contiguous", "stepped")
    ]
    tensors += [tensor[:30] for tensor in tensors] * 9
    number_of_threads(1)
    one = gm.collect(tensors)
    for count in (2, 3):
        number_of_threads(count)
        assert_same_bits(one, gm.collect(tensors))


@given(recipes(layouts=("contiguous",)), st.integers(0, 3), st.integers(0, 3))
def test_two_equal_tensors_at_different_aligned_addresses_get_the_same_bits(recipe, here, there):
    x = recipe.tensor()
    copies = []
    for places in (here, there):
        memory = torch.empty(x.numel() * x.itemsize + 128, dtype=torch.uint8)
        first = -memory.data_ptr() % 64 + 16 * places
        raw = memory[first : first + x.numel() * x.itemsize]
        copy = raw.view(x.dtype).view(x.shape).copy_(x)
        assert x.numel() == 0 or copy.data_ptr() % 64 == 16 * places
        copies.append(copy)
    assert_same_bits(gm.collect(copies[:1]), gm.collect(copies[1:]))


LISTS = {
    "one": [Recipe(torch.float32, (5, 7))],
    "mixed": [
        Recipe(torch.float32, (64, 65), values="wide"),
        Recipe(torch.bfloat16, (4097,)),
        Recipe(torch.float16, (0,)),
        Recipe(torch.float64, ()),
        Recipe(torch.float16, (3, 5), "transposed", specials=2),
        Recipe(torch.float32, (40,), "misaligned", "some zeros"),
    ],
    "strided": [
        Recipe(torch.float32, (2, 3, 4, 5), "channels_last"),
        Recipe(torch.bfloat16, (30, 31), "stepped"),
        Recipe(torch.float32, (30, 31), "expanded"),
        Recipe(torch.float32, (8, 9), "sliced", "nonfinite"),
    ],
    "complex": [Recipe(torch.complex64, (9, 4)), Recipe(torch.complex64, (9,), "lazy sign")],
    "fp8": [Recipe(torch.float8_e4m3fn, (50,)), Recipe(torch.float8_e5m2, (50,), specials=3)],
}


@pytest.mark.parametrize("inv_scale", [pytest.param(False, marks=pytest.mark.deep), True])
@pytest.mark.parametrize(
    "which", ["mixed", *[pytest.param(which, marks=pytest.mark.once) for which in LISTS if which != "mixed"]]
)
def test_a_compiled_call_gives_the_bits_of_an_eager_one(which, inv_scale):
    tensors = {f"{i}.weight": recipe.tensor() for i, recipe in enumerate(LISTS[which])}
    scale = torch.tensor(1 / 3) if inv_scale else None

    def collect(tensors, scale):
        stats = gm.collect(tensors, inv_scale=scale)
        return stats, stats.total, stats.group({"few": r"^[01]\."})

    torch._dynamo.reset()
    compiled = torch.compile(collect, fullgraph=True, backend="aot_eager")
    stats, total, few = compiled(tensors, scale)
    expected = collect(tensors, scale)
    assert_same_bits(stats, expected[0])
    assert bits(total).tolist() == bits(expected[1]).tolist()
    assert_same_bits(few, expected[2])
    assert stats.names == tuple(tensors)


def test_these_laws_are_tested_on_the_implementation_that_was_asked_for():
    assert ops.uses_kernels(torch.device("cpu")) == KERNELS
    assert math.isnan(gm.collect([torch.tensor([math.nan])]).norm.item())
