"""The launch plan of a list of tensors: everything that the next call with such a list can reuse.

The first call with a list makes its `LaunchPlan`. It holds everything that follows from sizes, strides,
dtypes and lazy conjugation or negation, including the `ChunkMap`. Later calls recognize the list in one C++
call; addresses are compared at every call. Nothing is keyed by ``id()`` or by a single pointer, since
allocators reuse both, and no tensor is kept alive.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gradiometer.inputs import as_flat
from gradiometer.ops.guards import alike, guards_tell

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

HostPlan = TypeVar("HostPlan")

# distinct lists kept; a training step has one or two (gradients, weights)
LISTS_KEPT: Final = 64
# dtypes that the kernels read
_READ: Final = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class LaunchGroup(NamedTuple):
    """The chunks of one dtype, or of one tuple of a pair's dtypes, which one launch reads."""

    dtype: Any
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """How a list of tensors is split into chunks.

    ``table``: int64 on the host, the concatenation of ``numel (T,)``, ``chunk (T,)`` (elements of one chunk
    of that tensor), ``first_chunk (T,)``, ``num_chunks (T,)`` and ``chunk_row (N,)``, which is int32 and
    followed by one or two zeros. A tensor's chunks are adjacent and in order. For pairs there follow
    ``pitch (T,)`` of all a, of all b and, if there are any, of all g: elements from the beginning of one
    chunk to that of the next.
    """

    num_tensors: int
    num_chunks: int
    groups: tuple[LaunchGroup, ...]
    table: Tensor


@lru_cache(maxsize=LISTS_KEPT)
def chunk_map_of(
    sizes: tuple[int, ...],
    dtypes: tuple[Hashable, ...],
    chunk: int,
    max_chunks: int,
    blocks: tuple[int, ...] = (),
    pitches: tuple[int, ...] = (),
) -> ChunkMap:
    """Split tensors of these sizes into chunks, grouped by dtype, or by the dtypes of a pair.

    A chunk has ``chunk`` elements. If a tensor would have more than ``max_chunks`` chunks, its chunk size is
    the smallest power of two that avoids this. The size depends on the tensor alone, so that a row has the
    same bits whichever tensors share the call.

    ``blocks``: for pairs, the chunk size that the layout of each requires, or 0. ``pitches``: of all lists;
    -1 where chunks are adjacent in memory.
    """
    # a power of two, at least size / max_chunks
    lengths = [max(chunk, 1 << max((size - 1) // max_chunks, 0).bit_length()) for size in sizes]
    lengths = [block or length for block, length in zip(blocks or [0] * len(sizes), lengths, strict=True)]
    counts = [-(-size // length) for size, length in zip(sizes, lengths, strict=True)]
    first = [0] * len(sizes)
    rows: list[int] = []
    groups = []
    for dtype in dict.fromkeys(dtypes):
        done = len(rows)
        for i, count in enumerate(counts):
            if dtypes[i] == dtype:
                first[i] = len(rows)
                rows += [i] * count
        if len(rows) > done:
            groups.append(LaunchGroup(dtype, done, len(rows) - done))
    apart = [lengths[i % len(sizes)] if pitch < 0 else pitch for i, pitch in enumerate(pitches)]
    rows += [0] * (2 - len(rows) % 2)
    chunk_row = array("q", array("i", rows).tobytes())
    table = int64([*sizes, *lengths, *first, *counts, *chunk_row, *apart])
    return ChunkMap(len(sizes), sum(counts), tuple(groups), table)


def int64(values: Sequence[int]) -> Tensor:
    """Return integers as a tensor on the host."""
    # takes half the time of torch.tensor
    return torch.frombuffer(array("q", values), dtype=torch.int64)


@dataclass(frozen=True)
class Kept:
    """Tables that stay on the device, for calls on one stream; ``constants``: by the table on the host."""

    stream: int
    addresses: list[int]
    pointers: Tensor
    table: Tensor
    constants: dict[Tensor, Tensor]


@dataclass(eq=False)
class LaunchPlan:
    """Everything about a list of tensors that the next call can reuse: all but the addresses.

    Attributes:
        count: the number of tensors.
        check: ``check(*tensors)`` tells whether ``count`` other tensors differ at most in their addresses.
        guarded: whether ``check`` uses torch's guards, which also detect interception of calls.
        device: the device of all tensors.
        direct: whether they are guarded, ordinary tensors whose memory the kernels can read as it is.
        is_ordered: whether they are also contiguous.
        cut: the chunk size, the maximum number of chunks, and the number of lists in this one (1; 2 or 3 for
            pairs), that ``chunk_map`` was made for.
        host_plans: those of `host_plan` for a direct list, by the function that made each, and the table of
            projections.
        kept: tables that stay on the device.
        separate: addresses at which the tensors were last found to share no memory.
        captured: how many different lists of addresses were captured.
    """

    count: int
    check: Callable[..., bool]
    guarded: bool
    device: torch.device
    direct: bool
    is_ordered: bool
    cut: tuple[int, int, int] | None = None
    chunk_map: ChunkMap | None = None
    host_plans: dict[Callable[..., Any], Any] = field(default_factory=dict)
    kept: Kept | None = None
    separate: list[int] = field(default_factory=list)
    captured: int = 0


# the most recently used plan is the last
_plans: dict[LaunchPlan, None] = {}


def clear() -> None:
    """Forget the kept lists and chunk maps, but not the memory that captured graphs read."""
    _plans.clear()
    chunk_map_of.cache_clear()


def recognize(tensors: Sequence[Tensor]) -> LaunchPlan | None:
    """Return the plan of a known list that differs from this one at most in its addresses, or None.

    Call it with grad mode disabled.
    """
    count, guarded = len(tensors), guards_tell()
    # iterate over a copy: another thread may add a plan meanwhile
    candidates = [one for one in reversed(list(_plans)) if one.count == count and one.guarded == guarded]
    if not candidates or not _have_strides(tensors):
        return None
    for plan in candidates:
        if plan.check(*tensors):
            # now the most recently used; other threads may run between the two steps
            _plans.pop(plan, None)
            _plans[plan] = None
            return plan
    return None


def _have_strides(tensors: Sequence[Tensor]) -> bool:
    # torch's guards crash the process on a nested tensor. The caller handles objects that are not tensors, or
    # are not initialized
    try:
        return not any(map(attrgetter("is_nested"), tensors))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


def remember(tensors: Sequence[Tensor]) -> LaunchPlan:
    """Keep the plan of a list of tensors of one device for `recognize`. Call it with grad mode disabled."""
    guarded = guards_tell()
    direct = guarded and {type(tensor) for tensor in tensors} <= {Tensor, nn.Parameter}
    direct = direct and _READ.issuperset([tensor.dtype for tensor in tensors])
    direct = direct and all([_is_own_memory(tensor) for tensor in tensors])
    is_ordered = direct and all([tensor.is_contiguous() for tensor in tensors])
    plan = LaunchPlan(len(tensors), alike(tensors), guarded, tensors[0].device, direct, is_ordered)
    _plans[plan] = None
    for old in list(_plans)[:-LISTS_KEPT]:
        _plans.pop(old, None)
    return plan


def _is_own_memory(tensor: Tensor) -> bool:
    flat = None if tensor.is_neg() else as_flat(tensor)
    return flat is not None and flat.data_ptr() == tensor.data_ptr()


def host_plan(
    tensors: Sequence[Tensor], plan: LaunchPlan | None, plan_of: Callable[[Sequence[Tensor]], HostPlan]
) -> HostPlan | None:
    """Return ``plan_of(tensors)``, kept in the plan of a direct list; None for other lists.

    ``plan``: the result of `recognize`, if it was called.
    """
    plan = plan or recognize(tensors) or remember(tensors)
    found: HostPlan | None = plan.host_plans.get(plan_of)
    if found is None and plan.direct:
        found = plan.host_plans[plan_of] = plan_of(tensors)
    return found
