"""Pack tensors for the kernels: views that they can read, and the tables of pointers and chunks.

If no graph is being made, the caller can pass ``keep``. Then the tables stay on the device: the static one
until the list is forgotten, the pointers until an address changes. They are never rewritten: a change makes
new ones, and so does a call on another stream. They belong to the stream that they were copied on, so that
kernels that read them, and later uses of their memory, come after the copy.

Such a table would be wrong in a CUDA graph. If it is made while a graph is warmed up or captured, it lies in
the graph's pool, and freeing or rewriting it later changes what a replay reads. There each call copies its
tables from pinned memory, in stream order; the copies live as long as the call.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns import WORD_BYTES
from gradiometer.inputs import as_flat, as_real
from gradiometer.ops import uploads
from gradiometer.ops.launch_plans import Kept, chunk_map_of, int64, recognize, remember

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.ops.launch_plans import ChunkMap, LaunchPlan

# addresses of one list in captured graphs that are not suspicious: layers of equal shapes share a plan
CAPTURES_EXPECTED: Final = 64
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
class Pack:
    """The input of one call's kernels, on the device.

    ``pointers``: ``(T,) int64``. ``table``: the chunk map's table. ``tensors``: the tensors that the pointers
    refer to, kept alive until the kernels are launched. ``constants``: those that stay on the device.
    """

    chunk_map: ChunkMap
    pointers: Tensor
    table: Tensor
    tensors: Sequence[Tensor]
    constants: dict[Tensor, Tensor] | None = None

    def constant(self, host: Tensor) -> Tensor:
        """Return a table that is the same object in all calls, on the device."""
        if self.constants is None:
            return uploads.upload(host, self.table.device)
        if host not in self.constants:
            self.constants[host] = uploads.upload(host, self.table.device)
        return self.constants[host]


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
    return packed_at(plan, chunk_map, flats, addresses, keep=keep)


def pack_pairs(
    sides: Sequence[Sequence[Tensor]],
    chunk: int,
    max_chunks: int,
    plan: LaunchPlan | None = None,
    *,
    keep: bool = False,
) -> Pack:
    """Pack pairs of tensors, as `pack` does; ``pointers`` are those of all a, all b and all g.

    ``sides``: all a, all b and, if there are any, all g; an empty g stands for none. ``plan``: the result of
    `recognize` for all of them in one list.
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
    return packed_at(plan, chunk_map, flats, list(map(Tensor.data_ptr, flats)), keep=keep)


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


def packed_at(
    plan: LaunchPlan, chunk_map: ChunkMap, flats: Sequence[Tensor], addresses: list[int], *, keep: bool
) -> Pack:
    """Return the input of kernels that read tensors at these addresses as the chunk map says."""
    device = plan.device
    if uploads.is_capturing(device):
        pointers, table = _captured(plan, chunk_map, addresses)
    elif keep:
        kept = _keep(plan, chunk_map, addresses)
        return Pack(chunk_map, kept.pointers, kept.table, flats, kept.constants)
    else:
        pointers, table = uploads.copy(int64(addresses), device), uploads.copy(chunk_map.table, device)
    return Pack(chunk_map, pointers, table, flats)


def readable(tensor: Tensor) -> Tensor:
    """Return a real tensor of a dtype that the kernels read, with the same numbers."""
    x = as_real(tensor)
    return x.to(_WIDENED[x.dtype]) if x.dtype in _WIDENED else x


def _flat(tensor: Tensor) -> Tensor:
    x = readable(tensor)
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


def _keep(plan: LaunchPlan, chunk_map: ChunkMap, addresses: list[int]) -> Kept:
    device, kept = plan.device, plan.kept
    stream = uploads.stream_of(device)
    constants: dict[Tensor, Tensor] = {}
    if kept is None or kept.stream != stream:
        table = uploads.copy(chunk_map.table, device)
    elif kept.addresses == addresses:
        return kept
    else:
        table, constants = kept.table, kept.constants
    plan.kept = kept = Kept(stream, addresses, uploads.copy(int64(addresses), device), table, constants)
    return kept


def _captured(plan: LaunchPlan, chunk_map: ChunkMap, addresses: list[int]) -> tuple[Tensor, Tensor]:
    """Return the tables that a captured call reads, from one copy: each takes 2 to 3 us of a replay."""
    # an even number, so that the table begins at a multiple of 16 bytes, which the kernels were compiled for
    end = len(addresses) + len(addresses) % 2
    joined = torch.zeros(end + len(chunk_map.table), dtype=torch.int64, device="cpu")
    joined[: len(addresses)] = int64(addresses)
    joined[end:] = chunk_map.table
    copied, is_new = uploads.copy_lasting(joined, plan.device)
    plan.captured += is_new
    if is_new and plan.captured == CAPTURES_EXPECTED:
        msg = (
            f"{plan.count} tensors were recorded in CUDA graphs at {plan.captured} sets of addresses; "
            f"each set keeps {joined.nbytes} bytes of pinned memory until the process ends. Keep "
            "gradients at fixed addresses: compute them inside the compiled step, or clear them with "
            "zero_grad(set_to_none=False)"
        )
        warnings.warn(msg, stacklevel=2)
    return copied[: len(addresses)], copied[end:]
