"""The ops themselves: schemas, fakes and contexts; and the kernels against the eager reference."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import gradiometer as gm
from conftest import INTERPRETED, KERNELS
from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, EXPONENTS, LINES, PAIRS, TENSORS
from gradiometer.ops import reference
from support import oracle, strategies
from support.gradients import bit_patterns
from support.strategies import Recipe, lists

NAMES = tuple(column.name for column in gm.COLUMNS)
LIMITS = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)

LISTS = {
    "one": [Recipe(torch.float32, (5, 7))],
    "empty": [Recipe(torch.float32, (0,)), Recipe(torch.bfloat16, (3, 0))],
    "dtypes": [Recipe(dtype, (9, 3), specials=1) for dtype in strategies.FLOATS],
    "strides": [Recipe(torch.float32, (2, 3, 4, 5), layout) for layout in strategies.LAYOUTS],
    "complex": [Recipe(dtype, (6,)) for dtype in (torch.complex64, torch.complex128)],
    "fp8": [Recipe(dtype, (30,)) for dtype in strategies.FP8],
    "sizes": [
        Recipe(torch.float16, ()),
        Recipe(torch.float16, (5000,)),
        Recipe(torch.float16, (40,), values="nonfinite"),
        Recipe(torch.float16, (5000,), values="nonfinite"),
    ],
}

SCALES = (None, torch.tensor(0.5), torch.tensor([0.25], dtype=torch.float64))
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
EACH = ("tensor_stats", "tensor_stats_fingerprints", "pair_stats", "line_stats")
if INTERPRETED or not KERNELS:
    # support/ptx.py does not execute its kernel
    EACH += ("exponent_stats",)
each_op = pytest.mark.parametrize("name", EACH)


def tensors_of(which, seed=0):
    return [replace(recipe, seed=seed).tensor() for recipe in LISTS[which]]


def op(name):
    return getattr(torch.ops.gradiometer, name).default


def call(tensors, inv_scale=None):
    return op("tensor_stats")(tensors, *LIMITS, inv_scale)


def arguments(name, make, inv_scale=None):
    """Return the arguments of an op; ``make`` returns tensors of the same form for each seed."""
    if name == "pair_stats":
        return make(0), make(1), make(2)
    return (make(0),) if name in {"exponent_stats", "line_stats"} else (make(0), *LIMITS, inv_scale)


def results(name, args):
    return pytree.tree_leaves(op(name)(*args))


# all pairs; those with neither member in `always` are marked `once`
def pairs(lists, others, *, always):
    return [
        pytest.param(which, other, marks=[] if which == always[0] or other is always[1] else pytest.mark.once)
        for which in lists
        for other in others
    ]


def check(name, which, args):
    # the schema check compares inputs with arithmetic that torch lacks for fp8
    torch.library.opcheck(op(name), args, test_utils=ALL_CHECKS[1:] if which == "fp8" else ALL_CHECKS)


@pytest.mark.parametrize(("which", "inv_scale"), pairs(LISTS, SCALES, always=("dtypes", None)))
def test_opcheck_passes(which, inv_scale):
    check("tensor_stats", which, arguments("tensor_stats", partial(tensors_of, which), inv_scale))


@pytest.mark.parametrize(("which", "name"), pairs(LISTS, EACH[1:], always=("dtypes", "")))
def test_opcheck_of_other_ops_passes(which, name):
    check(name, which, arguments(name, partial(tensors_of, which), SCALES[1]))


def test_opcheck_of_pairs_of_two_dtypes_and_strides_passes():
    dtypes, nothing = strategies.FLOATS, torch.empty(0)
    a, b = [[torch.randn(30).to(dtype) for dtype in each] for each in (dtypes, dtypes[::-1])]
    check("pair_stats", "", (a, b, [torch.randn(30), nothing, torch.randn(30).double(), nothing]))
    check("pair_stats", "", ([torch.randn(5, 7)], [torch.randn(7, 5).t()], None))


@each_op
def test_opcheck_passes_with_inputs_that_require_grad(name):
    args = arguments(name, lambda seed: tensors_of("dtypes", seed), torch.tensor(0.5))
    check(name, "", pytree.tree_map_only(torch.Tensor, lambda x: x.requires_grad_(), args))


@each_op
@pytest.mark.parametrize("which", LISTS)
def test_the_fake_has_the_shape_dtype_and_device_of_the_real_result(which, name):
    args = arguments(name, partial(tensors_of, which))
    with FakeTensorMode() as mode:
        fake = results(name, pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
    for f, real in zip(fake, results(name, args), strict=True):
        assert (f.shape, f.dtype, f.device) == (real.shape, real.dtype, real.device)
        assert f.stride() == real.stride()


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_fakes_of_a_device_that_is_not_there_stay_on_it(device):
    with FakeTensorMode():
        x = torch.empty(4, 5, dtype=torch.bfloat16, device=device)
        columns, flags = call([x, x.t(), x.to(torch.complex64)], torch.ones((), device=device))
        of_pairs = op("pair_stats")([x, x.t()], [x.float(), x.t()], [x, x.new_empty(0)])
        counts = op("exponent_stats")([x, x.t()])
        lines = op("line_stats")([x, x.t(), x.to(torch.complex64)])
    for found, shape, dtype in (
        (columns, (3, TENSORS.width), torch.float64),
        (flags, (3,), torch.int32),
        (of_pairs, (2, PAIRS.width), torch.float64),
        (counts, (2, EXPONENTS.width), torch.int64),
        (lines, (9 + 9 + 14, LINES.width), torch.float64),
    ):
        assert (found.shape, found.dtype, found.device) == (shape, dtype, x.device)


def test_fakes_of_cuda_tensors_are_collected_without_cuda():
    with FakeTensorMode():
        x = torch.empty(4, 5, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(4, 5, device="cpu")
        stats = gm.collect({"x": x, "y": y, "z": x}, inv_scale=torch.ones((), device="cuda"))
        grouped = stats.group({"all": "."})
        derived = [stats.norm, stats.std, stats.total_norm, stats.found_inf, grouped.columns, grouped.flags]
    assert stats.columns.shape == (3, len(NAMES))
    # with several devices, the rows are combined on the first that is not the CPU
    assert {result.device for result in (stats.columns, stats.flags, *derived)} == {x.device}


def test_nothing_is_differentiable():
    x = torch.ones(5, requires_grad=True)
    y = (x * 2).half()
    scale = torch.tensor(0.5, requires_grad=True)
    with torch.enable_grad():
        stats = gm.collect([x, y], inv_scale=scale)
        found = [*call([x, y], scale), stats.columns, stats.flags, stats.norm, stats.total_norm, stats.std]
        of_pairs = gm.compare([x, y], [x * 2, y])
        found += [op("pair_stats")([x, y], [x * 2, y], [y, y]), of_pairs.columns, of_pairs.norm_u]
        found += [of_pairs.cosine, of_pairs.total_value("update_ratio")]
    assert not any(each.requires_grad for each in found)
    # the autograd graph of the inputs is unchanged
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 5


@each_op
@given(lists())
def test_inputs_are_not_modified(name, some):
    args = arguments(name, lambda _: [recipe.tensor() for recipe in some], torch.tensor(0.5))
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    memories = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in tensors]
    before = [(memory.clone(), x._version) for memory, x in zip(memories, tensors, strict=True)]
    op(name)(*args)
    for memory, x, (content, version) in zip(memories, tensors, before, strict=True):
        assert torch.equal(memory, content)
        assert x._version == version


@each_op
def test_results_share_no_memory_with_inputs_or_with_later_results(name):
    x = torch.full((5000,), 2.0)
    args = arguments(name, lambda _: [x, x[:10]])
    found = results(name, args)
    kept = bit_patterns(found)
    x.fill_(math.nan)
    results(name, args)
    assert bit_patterns(found) == kept


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": deterministic_algorithms,
    "default device": lambda: torch.device("meta"),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype fp16": lambda: default_dtype(torch.float16),
}


@pytest.mark.parametrize(("which", "context"), pairs(LISTS, CONTEXTS, always=("one", "autocast to bf16")))
def test_no_context_changes_a_result(which, context):
    tensors, others = tensors_of(which), tensors_of(which, 1)
    # 1/3, so that a scale in another precision would show
    scale = torch.tensor(1 / 3, dtype=torch.float64)
    args = {name: arguments(name, partial(tensors_of, which), scale) for name in EACH}

    def all_results():
        stats = gm.collect(tensors, inv_scale=scale)
        grouped = stats.group({"all": "."})
        derived = torch.stack([stats.norm, stats.std, stats.zero_fraction])
        found = [stats.columns, stats.flags, grouped.columns, grouped.flags, derived, stats.total_norm]
        found.append(gm.compare(tensors, others).columns)
        return bit_patterns([*found, *[x for name in EACH for x in results(name, args[name])]])

    expected = all_results()
    with CONTEXTS[context]():
        measured = all_results()
    assert repr(measured) == repr(expected)


@pytest.mark.parametrize("which", LISTS)
def test_tensors_made_in_inference_mode_are_measured(which):
    expected = bit_patterns(call(tensors_of(which)))
    with torch.inference_mode():
        tensors = tensors_of(which)
    assert bit_patterns(call(tensors)) == expected


# the kernels against the reference; in the plain run both are the reference

needs_kernels = pytest.mark.skipif(not KERNELS, reason="needs kernels")


@needs_kernels
@given(lists(), st.sampled_from([None, 0.5, 3.0]))
def test_kernels_and_reference_agree(some, scale):
    tensors = [recipe.tensor() for recipe in some]
    inv_scale = None if scale is None else torch.tensor(scale)
    ours = ops.tensor_stats(tensors, DEFAULT_THRESHOLDS, inv_scale)
    theirs = reference.tensor_stats(tensors, DEFAULT_THRESHOLDS, inv_scale)[:2]
    for i, x in enumerate(tensors):
        a, b = (dict(zip(NAMES, columns[i].tolist(), strict=True)) for columns, _ in (ours, theirs))
        for name in (*oracle.COUNTS, "abs_max"):
            assert a[name] == b[name], name
        # each is within its bound of the exact value, so they are within twice that bound of each other
        norm, other = math.sqrt(a["sumsq"]), math.sqrt(b["sumsq"])
        assert abs(norm - other) <= 2 * oracle.NORM_BOUND * max(norm, other)
        magnitudes = oracle.numbers(x).nan_to_num(0, 0, 0).abs().sum().item() * (scale or 1.0)
        assert abs(a["sum"] - b["sum"]) <= 2 * oracle.SUM_BOUND * magnitudes
        at_a_threshold = any(abs(norm - limit) <= 2 * oracle.NORM_BOUND * limit for limit in LIMITS[:2])
        assert ours[1][i] == theirs[1][i] or at_a_threshold
