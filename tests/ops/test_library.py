"""The op itself: schema, fake implementation, contexts; and the kernels against the eager reference."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import gradiometer as gm
from conftest import KERNELS
from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import reference
from gradiometer.ops.launch_plans import chunk_map_of
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

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def tensors_of(which):
    return [recipe.tensor() for recipe in LISTS[which]]


def call(tensors, inv_scale=None):
    return torch.ops.gradiometer.tensor_stats(tensors, *LIMITS, inv_scale)


SCALES = (None, torch.tensor(0.5), torch.tensor([0.25], dtype=torch.float64))


# all pairs; those with neither member in `always` are marked `once`
def pairs(lists, others, *, always):
    return [
        pytest.param(which, other, marks=[] if which == always[0] or other is always[1] else pytest.mark.once)
        for which in lists
        for other in others
    ]


@pytest.mark.parametrize(("which", "inv_scale"), pairs(LISTS, SCALES, always=("dtypes", None)))
def test_opcheck_passes(which, inv_scale):
    # the schema check compares inputs with arithmetic that torch lacks for fp8
    checks = ALL_CHECKS[1:] if which == "fp8" else ALL_CHECKS
    args = (tensors_of(which), *LIMITS, inv_scale)
    torch.library.opcheck(torch.ops.gradiometer.tensor_stats.default, args, test_utils=checks)


def test_opcheck_passes_with_inputs_that_require_grad():
    tensors = [x.requires_grad_() for x in tensors_of("dtypes")]
    inv_scale = torch.tensor(0.5, requires_grad=True)
    torch.library.opcheck(torch.ops.gradiometer.tensor_stats.default, (tensors, *LIMITS, inv_scale))


@pytest.mark.parametrize("which", LISTS)
def test_the_fake_has_the_shape_dtype_and_device_of_the_real_result(which):
    tensors = tensors_of(which)
    with FakeTensorMode() as mode:
        fake = call([mode.from_tensor(x) for x in tensors])
    for f, real in zip(fake, call(tensors), strict=True):
        assert (f.shape, f.dtype, f.device) == (real.shape, real.dtype, real.device)
        assert f.stride() == real.stride()


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_fakes_of_a_device_that_is_not_there_stay_on_it(device):
    with FakeTensorMode():
        x = torch.empty(4, 5, dtype=torch.bfloat16, device=device)
        columns, flags = call([x, x.t(), x.to(torch.complex64)], torch.ones((), device=device))
    assert (columns.shape, columns.dtype, columns.device) == ((3, len(NAMES)), torch.float64, x.device)
    assert (flags.shape, flags.dtype, flags.device) == ((3,), torch.int32, x.device)


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
        results = [*call([x, y], scale), stats.columns, stats.flags, stats.norm, stats.total_norm, stats.std]
    assert not any(result.requires_grad for result in results)
    # the autograd graph of the inputs is unchanged
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 5


@given(lists())
def test_inputs_are_not_modified(some):
    tensors = [recipe.tensor() for recipe in some]
    memories = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in tensors]
    before = [(memory.clone(), x._version) for memory, x in zip(memories, tensors, strict=True)]
    call(tensors, torch.tensor(0.5))
    for memory, x, (content, version) in zip(memories, tensors, before, strict=True):
        assert torch.equal(memory, content)
        assert x._version == version


def test_results_share_no_memory_with_inputs_or_with_later_results():
    x = torch.full((5000,), 2.0)
    columns, flags = call([x, x[:10]])
    kept = bit_patterns((columns, flags))
    x.fill_(math.nan)
    call([x, x[:10]])
    assert bit_patterns((columns, flags)) == kept


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
    tensors = tensors_of(which)
    # 1/3, so that a scale in another precision would show
    scale = torch.tensor(1 / 3, dtype=torch.float64)

    def all_results():
        stats = gm.collect(tensors, inv_scale=scale)
        grouped = stats.group({"all": "."})
        derived = torch.stack([stats.norm, stats.std, stats.zero_fraction])
        pairs = [(stats.columns, stats.flags), (grouped.columns, grouped.flags), (derived, stats.total_norm)]
        return [bit_patterns(pair) for pair in (call(tensors), *pairs)]

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


@needs_kernels
@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("chunks", [1, 1023, 1024, 1025, 3000])
def test_finalize_adds_up_all_chunks_of_a_tensor(chunks, nonfinite):
    from gradiometer import kernels
    from gradiometer.kernels import tuning

    # the middle one of three tensors has this many chunks; partials are given, so no such tensor is needed
    sizes = (5, chunks * tuning.CHUNK, 7)
    layout = chunk_map_of(sizes, (torch.float32,) * 3, tuning.CHUNK, tuning.MAX_CHUNKS)
    assert layout.num_chunks == chunks + 2
    g = torch.Generator().manual_seed(chunks)
    partials = torch.randint(1, 2**20, (len(kernels.PARTIALS), chunks + 2), generator=g).double()
    parts = dict(zip(kernels.PARTIALS, partials, strict=True))
    # in one chunk of each tensor only
    here = torch.zeros(chunks + 2, dtype=torch.float64)
    here[[0, chunks, chunks + 1]] = float(nonfinite)
    parts["n_nan"] *= here
    parts["n_posinf"] *= here
    parts["n_nonfinite"].copy_(parts["n_nan"] + parts["n_posinf"] + 3 * here)
    columns, flags = kernels.finalize(layout.table, partials, 3, DEFAULT_THRESHOLDS)
    for i, part in enumerate(partials.split([1, chunks, 1], dim=1)):
        row = dict(zip(NAMES, columns[i].tolist(), strict=True))
        total = dict(zip(kernels.PARTIALS, part.sum(dim=1).tolist(), strict=True))
        assert row.pop("numel") == sizes[i]
        assert row.pop("abs_max") == part[kernels.PARTIALS.index("abs_max")].max().item()
        assert row.pop("n_neginf") == 3 * nonfinite
        assert row == {name: total[name] for name in row}
        anomalies = gm.Flag.NAN | gm.Flag.INF
        assert flags[i].item() & anomalies == (anomalies if nonfinite else 0)
