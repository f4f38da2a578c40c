"""Tensors -> what the kernels read: chunks grouped by dtype, and the table of pointers.

The static part, the `Layout`, depends on the tensors' sizes and dtypes alone: it is built once for
each such list and kept. The addresses are compared at every call; nothing is keyed by ``id()`` or by
a single pointer, since allocators reuse both.

What is kept, is kept in pinned host memory that is written once: a change makes a new one. Every
call copies it into a table of its own on the device, in the stream's order, which lives as long as
the call. A table kept on the device would be wrong in a CUDA graph: made while one is warmed up or
captured it lies in the graph's pool, and rewritten later it changes what a replay reads. The pinned
source of a captured copy is kept as long as the process lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.views import as_flat, as_real

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Group", "Layout", "Pack", "clear", "layout_of", "pack"]

# distinct lists of sizes kept; a training step has one or two (gradients, weights)
LAYOUTS_KEPT: Final = 64

# exact in the wider format, which the kernels read
_WIDENED: Final = {
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e4m3fnuz: torch.float16,
    torch.float8_e5m2: torch.float16,
    torch.float8_e5m2fnuz: torch.float16,
    torch.float8_e8m0fnu: torch.bfloat16,
}


@dataclass(frozen=True)
class Group:
    """The chunks of one dtype: one launch."""

    dtype: torch.dtype
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True, eq=False)
class Layout:
    """How a list of tensors is cut into chunks.

    ``table``: int64 on the host, the concatenation of ``numel (T,)``, ``first_chunk (T,)``,
    ``num_chunks (T,)`` and ``chunk_row (N,)``. A tensor's chunks stand together, in its order.
    """

    num_tensors: int
    num_chunks: int
    groups: tuple[Group, ...]
    table: Tensor


@dataclass(frozen=True)
class Pack:
    """What one call's kernels read, on the device.

    ``pointers``: ``(T,) int64``. ``table``: the layout's table. ``tensors``: the flat tensors that
    are pointed to, kept alive until the kernels are launched.
    """

    layout: Layout
    pointers: Tensor
    table: Tensor
    tensors: list[Tensor]


@lru_cache(maxsize=LAYOUTS_KEPT)
def layout_of(sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], chunk: int) -> Layout:
    """Cut tensors of these sizes into chunks of ``chunk`` elements, grouped by dtype."""
    numel = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (numel + chunk - 1) // chunk
    first = torch.zeros_like(counts)
    rows, groups = [], []
    done = 0
    for dtype in dict.fromkeys(dtypes):
        members = torch.tensor([i for i, d in enumerate(dtypes) if d == dtype], device="cpu")
        ends = counts[members].cumsum(0)
        first[members] = done + ends - counts[members]
        row = members.repeat_interleave(counts[members])
        total = row.numel()
        if total == 0:
            continue
        rows.append(row)
        groups.append(Group(dtype, done, total))
        done += total
    return Layout(len(sizes), done, tuple(groups), torch.cat([numel, first, counts, *rows]))


def pack(tensors: Sequence[Tensor], chunk: int) -> Pack:
    """Pack tensors of one device for the kernels. Runs under that device, on its current stream."""
    flats = [_flat(tensor) for tensor in tensors]
    layout = layout_of(tuple([x.numel() for x in flats]), tuple([x.dtype for x in flats]), chunk)
    device = flats[0].device
    addresses = [x.data_ptr() for x in flats]
    pointers, table = _tables(addresses, layout, device)
    return Pack(layout, pointers, table, flats)


def _flat(tensor: Tensor) -> Tensor:
    x = as_real(tensor)
    if x.dtype in _WIDENED:
        x = x.to(_WIDENED[x.dtype])
    flat = as_flat(x)
    # memory with gaps or overlaps is copied; the copy lives until the kernels are queued
    return x.contiguous().view(-1) if flat is None else flat


@dataclass(frozen=True)
class _Source:
    addresses: list[int]
    host: Tensor


_sources: dict[tuple[Layout, torch.device], _Source] = {}
# what captured graphs read at every replay: never freed
_captured: list[Tensor] = []


def clear() -> None:
    """Forget the kept layouts and sources; those of captured graphs stay."""
    _sources.clear()
    layout_of.cache_clear()


def _tables(addresses: list[int], layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    # both parts begin at a multiple of 16 bytes: Triton compiles another kernel for pointers that do not
    padded = [*addresses, 0] if len(addresses) % 2 else addresses
    source = _sources.pop((layout, device), None)
    if source is None or source.addresses != addresses:
        host = torch.cat([_int64(padded), layout.table])
        source = _Source(addresses, host if device.type == "cpu" else host.pin_memory())
    while len(_sources) >= LAYOUTS_KEPT:
        del _sources[next(iter(_sources))]
    # last in the dict is the most recently used
    _sources[layout, device] = source
    if _is_capturing(device):
        _captured.append(source.host)
    both = source.host.to(device, non_blocking=True)
    return both[: len(addresses)], both[len(padded) :]


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
