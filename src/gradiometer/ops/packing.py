"""Pack tensors for the kernels: chunks grouped by dtype, and the table of pointers.

The first call with a list of tensors makes its `LaunchPlan`. It holds everything that follows from sizes,
strides, dtypes and lazy conjugation or negation, including the `ChunkMap`. Later calls recognize the list in
one C++ call; addresses are compared at every call. Nothing is keyed by ``id()`` or by a single pointer, since
allocators reuse both, and no tensor is kept alive.

If no graph is being made, the caller can pass ``keep``. Then the tables stay on the device: the static one
until the list is forgotten, the pointers until an address changes. They are never rewritten: a change makes
new ones, and so does a call on another stream. They belong to the stream that they were copied on, so that
kernels that read them, and later uses of their memory, come after the copy.

Such a table would be wrong in a CUDA graph. If it is made while a graph is warmed up or captured, it lies in
the graph's pool, and freeing or rewriting it later changes what a replay reads. There each call copies its
tables from pinned memory, in stream order; the copies live as long as the call.

Pinned memory is either copied from once and released at once, outside of any capture, or made in a capture
and kept as long as the process lives. So none is released that a stream being captured has used: PyTorch's
allocator would record an event in that capture, and a later allocation would fail when it queries it.
"""

from __future__ import annotations

import warnings
from array import array
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.columns import WORD_BYTES
from gradiometer.inputs import as_flat, as_real
from gradiometer.ops.guards import alike, guards_tell

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = [
    "ChunkMap",
    "Group",
    "LaunchPlan",
    "Pack",
    "chunk_map_of",
    "clear",
    "in_float32",
    "is_capturing",
    "pack",
    "pack_pairs",
    "recognize",
    "remember",
    "upload",
]

# distinct lists kept; a training step has one or two (gradients, weights)
LISTS_KEPT: Final = 64
# addresses of one list in captured graphs that are not suspicious: layers of equal shapes share a plan
CAPTURES_EXPECTED: Final = 64

# dtypes that the kernels read
_READ: Final = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# the conversion is exact
_WIDENED: Final = {
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e4m3fnuz: torch.float16,
    torch.float8_e5m2: torch.float16,
    torch.float8_e5m2fnuz: torch.float16,
    torch.float8_e8m0fnu: torch.bfloat16,
}


# lengths of rows that are read as chunks where the rows of a pair lie apart
_LEAST_BLOCK: Final = 2**10
_MOST_BLOCK: Final = 2**16


@dataclass(frozen=True)
class Group:
    """The chunks of one dtype, or of one tuple of a pair's dtypes, which one launch reads."""

    dtype: Any
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """How a list of tensors is split into chunks.

    ``table``: int64 on the host, the concatenation of ``numel (T,)``, ``chunk (T,)`` (elements of one chunk
    of that tensor), ``first_chunk (T,)``, ``num_chunks (T,)`` and ``chunk_row (N,)``. A tensor's chunks are
    adjacent and in order. For pairs there follow ``pitch (T,)`` of all a, of all b and, if there are any, of
    all g: elements from the beginning of one chunk to that of the next.
    """

    num_tensors: int
    num_chunks: int
    groups: tuple[Group, ...]
    table: Tensor


@dataclass(frozen=True)
class Pack:
    """The input of one call's kernels, on the device.

    ``pointers``: ``(T,) int64``. ``table``: the chunk_map's table. ``tensors``: the tensors that the pointers
    refer to, kept alive until the kernels are launched.
    """

    chunk_map: ChunkMap
    pointers: Tensor
    table: Tensor
    tensors: Sequence[Tensor]


@dataclass(frozen=True)
class _Kept:
    """Tables that stay on the device, for calls on one stream."""

    stream: int
    addresses: list[int]
    pointers: Tensor
    table: Tensor


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
        eager: the `eager_plan.Plan` of a direct list.
        exponents: the `exponent_reference.Plan` of a direct list.
        kept: tables that stay on the device.
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
    eager: Any = None
    exponents: Any = None
    kept: _Kept | None = None
    captured: int = 0


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
    lengths = [max(chunk, _power_of_two(-(-size // max_chunks))) for size in sizes]
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
            groups.append(Group(dtype, done, len(rows) - done))
    apart = [lengths[i % len(sizes)] if pitch < 0 else pitch for i, pitch in enumerate(pitches)]
    table = _int64([*sizes, *lengths, *first, *counts, *rows, *apart])
    return ChunkMap(len(sizes), len(rows), tuple(groups), table)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1


def _int64(values: Sequence[int]) -> Tensor:
    # takes half the time of torch.tensor
    return torch.frombuffer(array("q", values), dtype=torch.int64)


# the most recently used plan is the last
_plans: dict[LaunchPlan, None] = {}
# pinned memory that captured graphs read at every replay: never written again and never freed
_captured: list[Tensor] = []


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


def pack(
    tensors: Sequence[Tensor],
    chunk: int,
    max_chunks: int,
    plan: LaunchPlan | None = None,
    *,
    keep: bool = False,
    in_words: bool = False,
) -> Pack:
    """Pack tensors of one device for the kernels. That device must be current; its current stream is used.

    Args:
        tensors: at least one.
        chunk: elements of a chunk, see `chunk_map_of`.
        max_chunks: the most chunks of one tensor.
        plan: the result of `recognize` for them, if it was called.
        keep: whether tables may stay on the device, as no graph is being warmed up or captured.
        in_words: whether elements have to be in row-major order and begin with a whole word, for
            fingerprints; other tensors are copied.
    """
    plan = plan or recognize(tensors) or remember(tensors)
    flats = tensors if plan.direct else [_flat(tensor) for tensor in tensors]
    chunk_map = plan.chunk_map
    if chunk_map is None or plan.cut != (chunk, max_chunks, 1):
        sizes, dtypes = tuple([x.numel() for x in flats]), tuple([x.dtype for x in flats])
        chunk_map = chunk_map_of(sizes, dtypes, chunk, max_chunks)
        plan.kept = None
        plan.chunk_map, plan.cut = chunk_map, (chunk, max_chunks, 1)
    addresses = list(map(Tensor.data_ptr, flats))
    if in_words and not (plan.is_ordered and all([address % WORD_BYTES == 0 for address in addresses])):
        flats = [_in_words(tensor) for tensor in tensors]
        addresses = list(map(Tensor.data_ptr, flats))
    return _packed(plan, chunk_map, flats, addresses, keep=keep)


def pack_pairs(
    sides: Sequence[Sequence[Tensor]],
    chunk: int,
    max_chunks: int,
    plan: LaunchPlan | None = None,
    *,
    keep: bool = False,
) -> Pack:
    """Pack pairs of tensors, as `pack` does; ``pointers`` are those of all a, all b and all g.

    Args:
        sides: all a, all b and, if there are any, all g; an empty g stands for none.
        chunk: as for `pack`.
        max_chunks: as for `pack`.
        plan: the result of `recognize` for all a, b and g in one list.
        keep: as for `pack`.
    """
    tensors = list(chain.from_iterable(sides))
    plan = plan or recognize(tensors) or remember(tensors)
    flats, pairs = tensors, []
    if not (plan.direct and plan.is_ordered):
        pairs = [_together(pair) for pair in zip(*sides, strict=True)]
        flats = [x for side in zip(*[views for views, _ in pairs], strict=True) for x in side]
    chunk_map, cut = plan.chunk_map, (chunk, max_chunks, len(sides))
    if chunk_map is None or plan.cut != cut:
        count = len(sides[0])
        sizes = [x.numel() for x in flats[:count]]
        dtypes = [
            tuple([None if size and not x.numel() else x.dtype for x in pair])
            for size, *pair in zip(
                sizes, *[flats[i : i + count] for i in range(0, len(flats), count)], strict=True
            )
        ]
        blocks = [block for _, block in pairs] or [0] * count
        pitches = [x.stride(0) if blocks[i % count] and x.dim() == 2 else -1 for i, x in enumerate(flats)]
        chunk_map = chunk_map_of(
            tuple(sizes), tuple(dtypes), chunk, max_chunks, tuple(blocks), tuple(pitches)
        )
        plan.kept = None
        plan.chunk_map, plan.cut = chunk_map, cut
    return _packed(plan, chunk_map, flats, list(map(Tensor.data_ptr, flats)), keep=keep)


def _together(pair: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return a pair as views whose elements are in the same order, and the block that they are cut into.

    The block is 0 if all are contiguous; else they are 2-D and it is the length of their rows.
    """
    given = [_comparable(as_real(x)) for x in pair]
    a, b, *_ = pair
    if a.dtype != b.dtype and given[0].dtype == given[1].dtype:
        # compared as numbers, not by the bits that NaN happens to have after a conversion
        given[0] = given[0].to(torch.float32)
    # a gradient that is not there
    present = [x for x in given if x.numel() or not given[0].numel()]
    if len({(x.shape, x.stride()) for x in present}) == 1:
        flats = [as_flat(x) for x in given]
        if all([x is not None for x in flats]):
            return flats, 0  # type: ignore[return-value]
    if all([_has_blocks(x) for x in present]):
        return given, given[0].shape[1]
    return [x.contiguous().view(-1) for x in given], 0


def _comparable(x: Tensor) -> Tensor:
    """Return fp8 numbers in a dtype that the kernels read, with the bits of a NaN in the lower byte."""
    if x.dtype not in _WIDENED:
        return x
    wide = x.to(_WIDENED[x.dtype])
    quiet = 0x7E00 if wide.dtype == torch.float16 else 0x7FC0
    return torch.where(wide.isnan(), (x.view(torch.uint8).short() | quiet).view(wide.dtype), wide)


def _has_blocks(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and _LEAST_BLOCK <= x.shape[1] <= _MOST_BLOCK


def _packed(
    plan: LaunchPlan, chunk_map: ChunkMap, flats: Sequence[Tensor], addresses: list[int], *, keep: bool
) -> Pack:
    device = plan.device
    if is_capturing(device):
        pointers = _upload(_captured_pointers(plan, addresses), device)
        table = _upload(_lasting(chunk_map.table, device)[0], device)
    elif keep:
        kept = _keep(plan, chunk_map, addresses)
        pointers, table = kept.pointers, kept.table
    else:
        pointers, table = _copy(_int64(addresses), device), _copy(chunk_map.table, device)
    return Pack(chunk_map, pointers, table, flats)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return values that are the same in all calls, on the device, for the kernels of one call."""
    return _upload(_lasting(host, device)[0], device) if is_capturing(device) else _copy(host, device)


def _flat(tensor: Tensor) -> Tensor:
    x = as_real(tensor)
    if x.dtype in _WIDENED:
        x = x.to(_WIDENED[x.dtype])
    flat = as_flat(x)
    # memory with gaps or overlaps is copied; the copy lives until the kernels are queued
    return x.contiguous().view(-1) if flat is None else flat


def _in_words(tensor: Tensor) -> Tensor:
    x = _flat(tensor.contiguous())
    return x.clone() if x.data_ptr() % WORD_BYTES else x


def in_float32(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes as float32, padded with zeros to whole words."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    padded = flat.new_zeros(-(-len(flat) // WORD_BYTES) * WORD_BYTES)
    padded[: len(flat)] = flat
    return padded.view(torch.float32)


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


def _keep(plan: LaunchPlan, chunk_map: ChunkMap, addresses: list[int]) -> _Kept:
    device, kept = plan.device, plan.kept
    stream = _stream_of(device)
    if kept is None or kept.stream != stream:
        table = _copy(chunk_map.table, device)
    elif kept.addresses == addresses:
        return kept
    else:
        table = kept.table
    plan.kept = kept = _Kept(stream, addresses, _copy(_int64(addresses), device), table)
    return kept


def _captured_pointers(plan: LaunchPlan, addresses: list[int]) -> Tensor:
    pointers, is_new = _lasting(_int64(addresses), plan.device)
    plan.captured += is_new
    if is_new and plan.captured == CAPTURES_EXPECTED:
        msg = (
            f"{plan.count} tensors were recorded in CUDA graphs at {plan.captured} sets of addresses; "
            f"each set keeps {pointers.nbytes} bytes of pinned memory until the process ends. Keep "
            "gradients at fixed addresses: compute them inside the compiled step, or clear them with "
            "zero_grad(set_to_none=False)"
        )
        warnings.warn(msg, stacklevel=2)
    return pointers


def _lasting(values: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """Return pinned memory for captured copies that holds these values, and whether it is new."""
    # recordings with the same addresses share it, as do all of one list share the static table
    for host in _captured:
        if torch.equal(host, values):
            return host, False
    host = _pinned(values, device)
    _captured.append(host)
    return host, True


def _copy(host: Tensor, device: torch.device) -> Tensor:
    # outside of a capture: the pinned memory is released when the copy is queued, and reused when it is done
    return _upload(_pinned(host, device), device)


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    return host if device.type == "cpu" else host.pin_memory()


def _upload(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, non_blocking=True)


def _stream_of(device: torch.device) -> int:
    return 0 if device.type == "cpu" else _module_of(device).current_stream(device).stream_id


def is_capturing(device: torch.device) -> bool:
    """Return whether work queued on this device now becomes part of a CUDA or XPU graph."""
    if device.type not in {"cuda", "xpu"}:
        return False
    module = _module_of(device)
    # a fake tensor's device may not exist
    return bool(module.is_initialized() and module.is_current_stream_capturing())


def _module_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else torch.xpu
