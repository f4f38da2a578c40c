"""Tensors -> what the kernels read: chunks grouped by dtype, and the table of pointers.

The static part, the `Layout`, depends on the tensors' sizes and dtypes alone: it is built and
uploaded once for each such list and kept. The addresses are compared at every call and uploaded
when one has changed; nothing is keyed by ``id()`` or by a single pointer, since allocators reuse
both.

Device tables are never rewritten: a change makes new ones, and the allocator keeps the old ones'
memory from being reused before the kernels that read it are done. They are kept per stream for
the same reason. While a CUDA graph is being captured the call gets tables of its own, filled inside
the graph from pinned memory that is kept as long as the process lives: whatever later calls
do, a replay reads what it was captured with.
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
    ``num_chunks (T,)``, ``chunk_row (N,)`` and ``chunk_start (N,)``, where a chunk's start counts
    elements of its tensor.
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
    rows, starts, groups = [], [], []
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
        starts.append((torch.arange(done, done + total, device="cpu") - first[row]) * chunk)
        groups.append(Group(dtype, done, total))
        done += total
    return Layout(len(sizes), done, tuple(groups), torch.cat([numel, first, counts, *rows, *starts]))


def pack(tensors: Sequence[Tensor], chunk: int) -> Pack:
    """Pack tensors of one device for the kernels. Runs under that device, on its current stream."""
    flats = [_flat(tensor) for tensor in tensors]
    layout = layout_of(tuple([x.numel() for x in flats]), tuple([x.dtype for x in flats]), chunk)
    device = flats[0].device
    addresses = [x.data_ptr() for x in flats]
    if _is_capturing(device):
        pointers, table = _captured_tables(addresses, layout, device)
    else:
        pointers, table = _current_tables(addresses, layout, device)
    return Pack(layout, pointers, table, flats)


def _flat(tensor: Tensor) -> Tensor:
    x = as_real(tensor)
    if x.dtype in _WIDENED:
        x = x.to(_WIDENED[x.dtype])
    flat = as_flat(x)
    # memory with gaps or overlaps is copied; the copy lives until the kernels are queued
    return x.contiguous().view(-1) if flat is None else flat


@dataclass
class _Tables:
    addresses: list[int]
    pointers: Tensor
    table: Tensor


_tables: dict[tuple[Layout, torch.device, int], _Tables] = {}
# pinned sources and tables that captured graphs read: never freed, see the module's docstring
_captured: list[Tensor] = []


def clear() -> None:
    """Forget the kept layouts and tables; those of captured graphs stay."""
    _tables.clear()
    layout_of.cache_clear()


def _current_tables(addresses: list[int], layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    key = (layout, device, _stream_id(device))
    kept = _tables.pop(key, None)
    if kept is None:
        kept = _Tables([], torch.empty(0), _upload(layout.table, device))
        while len(_tables) >= LAYOUTS_KEPT:
            del _tables[next(iter(_tables))]
    if kept.addresses != addresses:
        kept.addresses = addresses
        kept.pointers = _upload(_int64(addresses), device)
    # last in the dict is the most recently used
    _tables[key] = kept
    return kept.pointers, kept.table


def _captured_tables(addresses: list[int], layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    # both parts begin at a multiple of 16 bytes, as eager tables do: Triton compiles another kernel
    # for pointers that do not, which a capture is no time for
    padded = [*addresses, 0] if len(addresses) % 2 else addresses
    both = _upload(torch.cat([_int64(padded), layout.table]), device, keep=_captured)
    # the device copy belongs to the graph's pool, which the graph keeps
    return both[: len(addresses)], both[len(padded) :]


def _upload(source: Tensor, device: torch.device, keep: list[Tensor] | None = None) -> Tensor:
    if device.type == "cpu":
        return source
    pinned = source.pin_memory()
    if keep is not None:
        keep.append(pinned)
    return pinned.to(device, non_blocking=True)


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_id(device: torch.device) -> int:
    # an integer for the current stream of the device; 0 where there are no streams
    return torch.accelerator.current_stream(device).stream_id if device.type != "cpu" else 0
