"""The projections kernel, compiled for GPUs and executed on this CPU, and interpreted; sums are exact."""

from __future__ import annotations

import math
import os

import pytest
import torch

from conftest import INTERPRETED
from gradiometer.columns import CURSOR_SIZE, Cursor
from gradiometer.ops import projection_reference
from gradiometer.ops.projections import measure_projections

pytest.importorskip("triton")
if os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("the executor reads this machine's memory by 47-bit addresses", allow_module_level=True)

from gradiometer.kernels import tuning
from support.kernel_cases import integers, kernels

pytestmark = pytest.mark.usefixtures("triton_cache")

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TARGETS = ("sm_90",) if INTERPRETED else ("sm_80", "sm_89", "sm_90", "sm_100")
# the kernel is the same on all targets: each dtype on one, and all of them in the deep profile
CHOSEN = {"sm_80": (BF16,), "sm_89": (FP64,), "sm_90": (FP32, BF16), "sm_100": (FP16,)}
each_pair = pytest.mark.parametrize(
    ("target", "dtype"),
    [
        pytest.param(target, dtype, marks=() if dtype in CHOSEN[target] else pytest.mark.deep)
        for target in TARGETS
        for dtype in (FP64, FP32, BF16, FP16)
    ],
    ids=str,
)


def expected(tensors, count):
    names = [f"w{i}" for i in range(len(tensors))]
    return projection_reference.project(tensors, names, count, 0, [None] * len(tensors))


def project(tensors, count, cursor=None):
    return measure_projections(tensors, [f"w{i}" for i in range(len(tensors))], count, 0, (), cursor)


def inputs(dtype):
    tile = tuning.PROJECTION_THREADS * 16 // dtype.itemsize * tuning.PROJECTION_UNROLL[dtype.itemsize]
    sizes = [0, 1, 127, 129, tile - 1, tile, tile + 1, 2 * tile + 5]
    tensors = [integers(n, dtype, start) for start, n in enumerate(sizes)]
    matrix = integers(40 * 30, dtype).view(40, 30)
    return [*tensors, matrix.t(), matrix[:, 1:3], matrix[3:, :29], matrix[:1].expand(7, 30)]


@each_pair
def test_every_size_and_layout_is_projected_exactly_and_read_once(target, dtype):
    tensors = inputs(dtype)
    with kernels(target) as launches:
        found = project(tensors, 16)
        again = project(tensors, 16)
    assert torch.equal(found, expected(tensors, 16))
    assert torch.equal(again, found)
    if launches:
        names = [launch.kernel for launch in launches]
        # adjacent elements, elements with gaps, the sums of all chunks
        assert names == ["_project_kernel", "_project_kernel", "_merge_projections_kernel"] * 2
        assert {int((launches[0].reads(x) != 1).sum()) for x in tensors[1:8]} == {0}


@pytest.mark.parametrize("count", [8, 64, pytest.param(256, marks=pytest.mark.deep)])
def test_a_chunk_is_read_once_for_each_32_projections(count):
    tensors = [integers(700, FP32, 1), integers(60, FP32).view(12, 5)[:, :3]]
    with kernels("sm_90") as launches:
        found = project(tensors, count)
    assert torch.equal(found, expected(tensors, count))
    if launches:
        assert (launches[0].reads(tensors[0]) == -(-count // 32)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_chunk_with_nan_or_inf_is_read_again_without_them(value):
    tensors = [integers(1500, FP32), integers(600, BF16), integers(90, FP64).view(9, 10).t()]
    tensors[0][1024], tensors[1][0], tensors[2][3, 4] = value, value, value
    with kernels("sm_90"):
        found = project(tensors, 16)
    assert found[:, 2].tolist() == [1, 1, 1]
    assert torch.equal(found, expected(tensors, 16))


@pytest.mark.parametrize(
    ("step", "every", "of_them"), [(6, 2, 3), (6, 4, 3), (4, 2, 3), (6, 0, 1), (6, 1, 0)]
)
def test_nothing_is_read_in_a_step_that_is_not_due(step, every, of_them):
    cursor = torch.zeros(CURSOR_SIZE, dtype=FP64)
    cursor[Cursor.STEP], cursor[Cursor.EVERY], cursor[Cursor.PROJECT_EVERY] = step, every, of_them
    tensors = [integers(700, FP32), integers(60, FP32).view(12, 5)[:, :3]]
    with kernels("sm_90") as launches:
        found = project(tensors, 16, cursor)
    is_due = (step, every, of_them) == (6, 2, 3)
    assert torch.equal(found, expected(tensors, 16) * is_due)
    if launches:
        assert (launches[0].reads(tensors[0]) == is_due).all()


# changes of the kernel that must be noticed
CHANGES = {
    "the other sign": ("setp.eq.b32 p", "setp.ne.b32 p"),
    "no addition": ("add.rn.f64", "sub.rn.f64"),
    "another shift": ("shr.u32", "shr.s32"),
}


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no PTX")
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_kernel_is_noticed(change):
    old, new = CHANGES[change]
    tensors = [integers(700, FP32)]

    def changed(kernel, code):
        if kernel != "_project_kernel":
            return code
        assert old in code
        return code.replace(old, new)

    with kernels("sm_90", changed):
        found = project(tensors, 8)
    assert not torch.equal(found, expected(tensors, 8))
