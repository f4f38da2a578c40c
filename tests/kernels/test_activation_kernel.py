"""The kernel of activations: one launch merges all columns of a tensor into a row.

Integers have exact sums in any order, so the columns of most cases are equal to those of the oracle here, bit
for bit. The plain run executes what Triton compiles; see test_compiled_kernels.py.
"""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from conftest import INTERPRETED
from gradiometer.columns import ACTIVATIONS, CURSOR_SIZE, Cursor

if TYPE_CHECKING:
    from torch import Tensor

pytest.importorskip("triton")
if os.name != "posix" or os.uname().machine != "x86_64":
    pytest.skip("the executor reads this machine's memory by 47-bit addresses", allow_module_level=True)

from gradiometer import kernels
from gradiometer.kernels import tuning
from support.kernel_cases import integers, same_bits
from support.kernel_cases import kernels as kernels_of
from support.oracle import SUM_BOUND

# the interpreter uses NumPy, which warns about overflows that the kernel allows and counts
pytestmark = [
    pytest.mark.usefixtures("triton_cache", "_few_programs"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"),
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# sm_89 has few fp64 units, so the kernel adds fp32 numbers with compensation there
GPUS = ("sm_90", "sm_89")
each_gpu = pytest.mark.parametrize("gpu", GPUS)
each_gpu_and_dtype = pytest.mark.parametrize(
    ("gpu", "dtype"), [*[(GPUS[0], dtype) for dtype in DTYPES], *[(GPUS[1], dtype) for dtype in DTYPES[1:3]]]
)
ROW = 1
# more than the channels of any tensor here
SCRATCH = 3000


@pytest.fixture
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs have many tiles in small tensors."""
    monkeypatch.setattr(tuning, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(tuning, "MERGED_PROGRAMS", 2)


class Target:
    """A store of three rows, a cursor and the scratch of launches."""

    def __init__(self, step: float = 0, every: float = 1, gpu: str = GPUS[0]) -> None:
        self.gpu = gpu
        self.store = torch.zeros(3, ACTIVATIONS.width, dtype=torch.float64)
        self.cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
        self.cursor[Cursor.STEP], self.cursor[Cursor.EVERY] = step, every
        self.partials = torch.full(
            (kernels.ACTIVATION_PARTIALS[0], tuning.MAX_PROGRAMS), math.nan, dtype=torch.float64
        )
        self.alive = torch.zeros(SCRATCH, dtype=torch.int32)
        self.counter = torch.zeros(1, dtype=torch.int32)

    def measure(
        self, x: Tensor, channel_dim: int = -1, change: Any = None, flag: Tensor | None = None
    ) -> None:
        scratch = self.partials, self.alive, self.counter
        with kernels_of(self.gpu, change) as launches:
            kernels.activation(x, self.store, ROW, self.cursor, *scratch, channel_dim, flag)
        self.reads = launches[-1].reads(x) if launches else None
        assert self.alive.count_nonzero() == 0
        assert self.counter.item() == 0

    def merge(self, x: Tensor, flag: Tensor, change: Any = None) -> None:
        """Merge the partial sums of the rows of x, whose channels are its columns."""
        scratch = self.partials, self.counter, flag
        size = x.numel(), x.shape[1], 1
        with kernels_of("sm_90", change) as launches:
            kernels.merge_partials(partials_of(x), self.store, ROW, self.cursor, *scratch, *size)
        self.longest = launches[-1].longest if launches else None
        assert self.counter.item() == 0

    @property
    def columns(self) -> dict[str, float]:
        assert self.store[[0, 2]].count_nonzero() == 0
        return dict(zip(ACTIVATIONS.index, self.store[ROW].tolist(), strict=True))


def partials_of(x: Tensor) -> list[Tensor]:
    """Return what compiled code computes of each row."""
    wide = x.double()
    sums = [(wide**power).sum(dim=1) for power in (1, 2, 4)]
    return [*sums, (x == 0).float().sum(dim=1), x.abs().amax(dim=1)]


def measured(x: Tensor, channel_dim: int = -1, gpu: str = GPUS[0]) -> dict[str, float]:
    target = Target(gpu=gpu)
    target.measure(x, channel_dim)
    return target.columns


def expected(x: Tensor, channel_dim: int = -1) -> dict[str, float]:
    """Return the columns of x; sums are rounded once."""
    wide = x.to(torch.float64)
    finite = wide[wide.isfinite()]
    square = finite * finite
    channels = x.shape[channel_dim] if x.ndim else 1
    rows = wide.reshape(1, 1) if x.ndim == 0 else wide.movedim(channel_dim, 0).reshape(channels, -1)
    top = finite.abs().max().item() if finite.numel() else 0.0
    found = {
        "numel": x.numel(),
        "sumsq": math.fsum(square.tolist()),
        "sum": math.fsum(finite.tolist()),
        "n_zero": (wide == 0).sum().item(),
        "n_nan": wide.isnan().sum().item(),
        "n_posinf": (wide == math.inf).sum().item(),
        "n_neginf": (wide == -math.inf).sum().item(),
        "sum4": math.fsum((square * square).tolist()),
        "n_channels": len(rows),
        "n_zero_channels": (rows == 0).all(dim=1).sum().item(),
        "n_calls": 1,
        "abs_max": top,
    }
    assert list(found) == list(ACTIVATIONS.index)
    return found


def shaped(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    return integers(math.prod(shape), dtype, start).reshape(shape)


def assert_exact(x: Tensor, channel_dim: int = -1, gpu: str = GPUS[0]) -> None:
    assert measured(x, channel_dim, gpu) == expected(x, channel_dim), (x.dtype, x.shape)


def with_zero_channels(x: Tensor, channel_dim: int) -> Tensor:
    """Set every third channel to 0 and -0, and leave one value in every sixth."""
    rows = x.movedim(channel_dim, 0)
    rows[::3] = 0.0
    rows[::3].reshape(-1)[::2] = -0.0
    rows[::3] *= torch.tensor(-1.0)
    for i in range(0, len(rows), 6):
        places = rows[i].reshape(-1)
        place = 7 * i % len(places)
        rows[i][torch.unravel_index(torch.tensor(place), rows[i].shape)] = 1.0
    return x


@each_gpu_and_dtype
@pytest.mark.parametrize("start", [0, 1])
def test_sizes_around_those_of_a_tile_are_measured_exactly(gpu, dtype, start):
    tile, unroll, *_ = tuning.ACTIVATIONS[dtype]
    for size in (1, 5, tile - 1, tile, tile + 1, tile * unroll + 3, 9 * tile * unroll + tile // 2 + 1):
        # each element is a channel
        if size < SCRATCH:
            assert_exact(shaped((size,), dtype, start), 0, gpu)
        assert_exact(shaped((size, 1), dtype, start), gpu=gpu)


@each_dtype
@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [
        ((), 0),
        ((70, 3), -1),
        ((40, 256), -1),
        ((7, 11, 96), -1),
        ((5, 2500), 1),
        ((600, 33), 0),
        ((3, 8, 7, 7), 1),
        ((2, 3, 64, 32), -3),
        ((2, 3, 5000), 1),
        ((6, 1, 700), 1),
    ],
)
def test_channels_that_are_always_zero_are_counted(dtype, shape, channel_dim):
    x = shaped(shape, dtype)
    if shape:
        x = with_zero_channels(x, channel_dim)
    assert_exact(x, channel_dim)


def test_every_place_keeps_its_channel_alive():
    for k in (0, 1, 511, 512, 2047, 2048, 3 * 700 - 1):
        x = torch.zeros(3, 700)
        x.view(-1)[k] = 1.0
        assert measured(x)["n_zero_channels"] == 699
        assert measured(x, 0)["n_zero_channels"] == 2


@each_gpu_and_dtype
def test_nan_and_infinities_are_counted_and_left_out(gpu, dtype):
    tile = tuning.ACTIVATIONS[dtype].tile
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, tile + 1, -1):
            x = shaped((3 * tile + 5, 7), dtype)
            x.view(-1)[place] = value
            x[5, 3], x[:, 4] = -math.inf, 0.0
            # not 0
            x[6, 4] = value
            assert_exact(x, gpu=gpu)
    everywhere = torch.full((40, 64), math.nan, dtype=dtype)
    assert_exact(everywhere, gpu=gpu)
    assert measured(everywhere, gpu=gpu)["n_zero_channels"] == 0


def test_squares_beyond_fp64_are_not_taken_for_infinite_elements():
    x = torch.ones(50, 20, dtype=torch.float64)
    x[3, 3] = -1e200
    found = measured(x)
    assert [found[name] for name in ("n_nan", "n_posinf", "n_neginf")] == [0, 0, 0]
    assert (found["abs_max"], found["sumsq"], found["sum4"]) == (1e200, math.inf, math.inf)


@each_gpu
def test_the_largest_elements_have_fourth_powers(gpu):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(4, 300, dtype=dtype)
        x[2, 100] = torch.finfo(dtype).max
        x[1, 7] = torch.finfo(dtype).smallest_normal / 4
        assert measured(x, gpu=gpu)["sum4"] == x[2, 100].double().item() ** 2**2 or dtype == torch.float32
        assert math.isclose(measured(x, gpu=gpu)["sum4"], torch.finfo(dtype).max ** 4, rel_tol=2**-50)
        assert measured(x, gpu=gpu)["n_zero"] == x.numel() - 2


@each_dtype
def test_sums_are_as_accurate_as_fp64(dtype):
    x = torch.randn(97, 133, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, exact = measured(x), expected(x)
    terms = x.double().abs()
    for name, power in (("sum", 1), ("sumsq", 2), ("sum4", 4)):
        # an addition for each element, and at most four roundings of its power
        error = (x.numel() + 4) * 2.0**-53 * (terms**power).sum().item()
        assert abs(found.pop(name) - exact.pop(name)) <= error
    assert found == exact


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_compensated_sums_keep_their_bounds_at_the_ends_of_the_range_of_fp32(dtype):
    # fourth powers lose bits below 2**-125, and their sums overflow from 2**31 on
    values = torch.randn(41, 133, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for power in (-75, -40, -29, -26, -23, 0, 13, 29, 31, 62, 64):
        x = (values * 2.0**power).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter flushes subnormal bf16 to 0
            x[x.abs() < torch.finfo(dtype).smallest_normal] = 0.0
        x[0, :3] = 0.0
        found, exact = measured(x, gpu="sm_89"), expected(x)
        terms = x.double().abs()
        for name, exponent in (("sum", 1), ("sumsq", 2), ("sum4", 4)):
            error = abs(found.pop(name) - exact.pop(name))
            assert error <= SUM_BOUND * (terms**exponent).sum().item(), (name, power)
        assert found == exact


def test_calls_merge():
    target = Target()
    first, second = with_zero_channels(shaped((50, 30)), -1), shaped((4, 9, 16), torch.bfloat16, 1)
    second[0, 0, 0] = 7.0
    target.measure(second, 1)
    target.measure(first)
    a, b = expected(first), expected(second, 1)
    merges = {column.name: max if column.merge == "max" else sum for column in ACTIVATIONS.columns}
    assert target.columns == {name: merge([a[name], b[name]]) for name, merge in merges.items()}
    assert target.columns["n_calls"] == 2
    assert target.columns["abs_max"] == 7


@pytest.mark.parametrize(
    ("step", "every", "is_due"), [(0, 1, True), (6, 3, True), (7, 3, False), (5, 0, False), (5, -1, False)]
)
def test_only_a_step_that_is_due_is_measured(step, every, is_due):
    target = Target(step, every)
    target.store[ROW] = torch.arange(ACTIVATIONS.width)
    before = target.store.clone()
    target.measure(shaped((9, 20)))
    assert target.partials.isnan().all() == (not is_due)
    assert torch.equal(target.store, before) == (not is_due)


def test_an_empty_tensor_is_not_measured():
    target = Target()
    target.measure(torch.zeros(0, 5))
    assert target.store.count_nonzero() == 0


def test_the_result_does_not_depend_on_the_call():
    x = torch.randn(80, 211)
    targets = [Target(), Target()]
    targets[1].measure(torch.randn(3, 500))
    targets[1].store.zero_()
    for target in targets:
        target.measure(x)
    assert same_bits(targets[0].store, targets[1].store)


@each_dtype
# partials of one program, of three, and of three with three blocks each, of which the last is short
@pytest.mark.parametrize("rows", [1, 3, 2050, 8 * 1024 + 7])
@pytest.mark.parametrize(
    ("value", "places", "is_read"),
    [
        (1.0, 1, False),
        (0.0, 1, False),
        # in each row, so that a channel may have only zeros
        (0.0, None, True),
        (math.nan, 1, True),
        (-math.inf, 1, True),
    ],
)
def test_partial_sums_are_merged_or_the_tensor_is_read(dtype, rows, value, places, is_read):
    x = integers(rows * 16, dtype).view(rows, 16)
    x[x == 0] = 3.0
    x[:places, 5] = value
    if rows == 1:
        is_read |= value == 0
    target, flag = Target(), torch.full((1,), 7, dtype=torch.int32)
    for _ in range(2):
        target.merge(x, flag)
        assert flag.item() == is_read
        target.measure(x, flag=flag)
    calls = expected(x)
    assert target.columns == {name: n if name == "abs_max" else 2 * n for name, n in calls.items()}
    if target.reads is not None:
        assert target.reads.any() == is_read


def test_partial_sums_of_a_step_that_is_not_due_are_left_alone():
    x = torch.full((5, 16), math.nan)
    target, flag = Target(7, 3), torch.full((1,), 7, dtype=torch.int32)
    target.merge(x, flag)
    target.measure(x, flag=flag)
    assert not target.store.any()
    assert target.partials.isnan().all()
    assert flag.item() == 7


def test_merged_partial_sums_have_the_same_bits_every_time():
    x = torch.randn(8 * 1024 + 7, 16, generator=torch.Generator().manual_seed(0))
    targets = [Target(), Target()]
    for target in targets:
        # the second uses the scratch of the first
        target.partials = targets[0].partials
        target.merge(x, torch.zeros(1, dtype=torch.int32))
    assert same_bits(targets[0].store, targets[1].store)
    found, exact = targets[0].columns, expected(x)
    for name, power in (("sum", 1), ("sumsq", 2), ("sum4", 4)):
        error = (x.numel() + 4) * 2.0**-53 * (x.double().abs() ** power).sum().item()
        assert abs(found.pop(name) - exact.pop(name)) <= error
    assert found == exact


compiled = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no instructions")


@compiled
@each_dtype
def test_each_element_is_read_once_unless_one_is_not_finite(dtype):
    target = Target()
    x = shaped((95, 70), dtype, 1)
    target.measure(x)
    assert (target.reads == 1).all()
    x[50, 50] = math.nan
    target.measure(x)
    # by one of several programs
    assert 1 < target.reads.mean() < 2
    target.cursor[Cursor.STEP], target.cursor[Cursor.EVERY] = 1, 2
    target.measure(x)
    assert (target.reads == 0).all()


@compiled
def test_partial_sums_of_a_large_activation_are_merged_side_by_side(monkeypatch):
    # those of 25 M elements in rows of 768
    x, longest = torch.ones(2**15, 2), []
    monkeypatch.setattr(tuning, "MERGED_PROGRAMS", 2**8)
    for programs in (1, 2**9):
        monkeypatch.setattr(tuning, "MAX_PROGRAMS", programs)
        target = Target()
        target.merge(x, torch.zeros(1, dtype=torch.int32))
        assert target.columns == expected(x)
        longest.append(target.longest)
    # instructions of the block with most of them
    assert longest[1] < longest[0] / 4


def merge_of_three_programs(target: Target, change: Any) -> None:
    target.merge(torch.ones(3000, 4), torch.zeros(1, dtype=torch.int32), change)


def measure_with_four_programs(target: Target, change: Any) -> None:
    target.measure(shaped((95, 64)), change=change)


# the addition that counts programs does not order what they write, or only what one thread writes
RELAXED = r"\.acq_rel\.", ".relaxed.", "several blocks use global memory"
WITHOUT_BARRIER = r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[^$])*acq_rel)", "", "without a barrier"
# channels are marked by stores
STORED = (
    r"atom\.global\.gpu\.relaxed\.or\.b32 %r\d+, (\[[^]]*\]), (%r\d+)",
    r"st.global.b32 \1, { \2 }",
    "several",
)


@compiled
@pytest.mark.parametrize(
    ("run", "old", "new", "said"),
    [
        (measure_with_four_programs, *RELAXED),
        (measure_with_four_programs, *WITHOUT_BARRIER),
        (measure_with_four_programs, *STORED),
        (merge_of_three_programs, *RELAXED),
        (merge_of_three_programs, *WITHOUT_BARRIER),
    ],
)
def test_a_kernel_that_does_not_order_its_blocks_is_refused(run, old, new, said):
    from support.ptx import Invalid

    def change(_: str, ptx: str) -> str:
        changed, count = re.subn(old, new, ptx)
        assert count
        return changed

    with pytest.raises(Invalid, match=said):
        run(Target(), change)


@compiled
def test_tensors_of_all_sizes_share_a_compilation():
    from kernels_bench.machine_code.compile import recorded_launches

    target = Target()
    rows = (1, 2, 16, 700, 4096)
    with recorded_launches() as launches:
        for row, size in enumerate(rows):
            for shape, dim in (((size, 16), -1), ((1, size, 64), 1)):
                args = target.cursor, target.partials, target.alive, target.counter
                kernels.activation(torch.zeros(shape), target.store, row, *args, dim)
    assert len({launch.variant_of("sm_90") for launch in launches}) == 1
