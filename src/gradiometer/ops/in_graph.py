"""The op in a compiled graph: plain operators for a few small tensors on the CPU, an opaque op otherwise.

An opaque op on the CPU takes 0.2 ms or more, since its Python code has left the processor's caches during
the step. So ``gradiometer::tensor_stats_in_graph`` is a composite: AOTAutograd replaces it by plain
operators, which Inductor compiles with the rest of the step, if they pay, and by
``gradiometer::tensor_stats`` if not. Both give the same bits.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from gradiometer.columns import TENSORS, Thresholds
from gradiometer.ops.dispatch import uses_kernels
from gradiometer.ops.eager_plan import FEW, LANES, SMALL, WIDTH_OF
from gradiometer.ops.library import REVISION, define
from gradiometer.ops.row_sums import add_lanes, lanes_of

# The plain operators take seconds to compile, and more with more tensors. With more elements than these, rows
# included their padding, the opaque op takes a small part of the step.
_MOST_TENSORS: Final = 16
_MOST_ELEMENTS: Final = 2**15


def is_exporting() -> bool:
    """Return whether `torch.export` traces the calling function; also in Dynamo of torch 2.11."""
    return torch.compiler.is_exporting()


# Dynamo calls it and takes the result as a constant, as with torch.compiler.assume_constant_result; that of
# torch 2.11 itself takes torch.compiler.is_exporting() for True in every graph
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001


def tensor_stats_in_graph(
    tensors: list[Tensor], thresholds: Thresholds, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do what `gradiometer.ops.tensor_stats` does, in a function that is being compiled."""
    limits = thresholds.vanishing, thresholds.exploding, thresholds.dead
    device = tensors[0].device
    # An exported program may run operator by operator, or on another device. Whether kernels are used is not
    # in the key of a cached graph, so it decides which op is called, and not what replaces the composite op
    if is_exporting() or device.type != "cpu" or uses_kernels(device):
        return torch.ops.gradiometer.tensor_stats(tensors, *limits, inv_scale, REVISION)  # type: ignore[no-any-return]
    return torch.ops.gradiometer.tensor_stats_in_graph(tensors, *limits, inv_scale, REVISION)  # type: ignore[no-any-return]


def _tensor_stats_in_graph(
    tensors: list[Tensor], vanishing: float, exploding: float, dead: float, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        widths = _widths(tensors)
        if widths is None:
            arguments = vanishing, exploding, dead, inv_scale, REVISION
            return torch.ops.gradiometer.tensor_stats(tensors, *arguments)  # type: ignore[no-any-return]
        # Inductor stores a tensor in memory before it views it by strides. Otherwise the statistics could be
        # those of values that it computes again, with other bits than the stored ones
        stored = [x.detach().as_strided(x.shape, x.stride()) for x in tensors]
        columns = _columns(stored, widths)
        if inv_scale is not None:
            columns = TENSORS.scaled(columns, inv_scale.detach().reshape(()).to(columns))
        return columns, TENSORS.flags_of(columns, Thresholds(vanishing, exploding, dead))


def _widths(tensors: list[Tensor]) -> list[int] | None:
    """Return the width to pad each tensor to; None if the opaque op is better, as in eager mode."""
    first, sizes = tensors[0], [x.numel() for x in tensors]
    if type(first) is Tensor or first.device.type != "cpu":
        return None
    # Inductor passes on values of half formats before it rounds them; squares of float64 are not exact
    if len(tensors) > _MOST_TENSORS or not all([x.dtype == torch.float32 for x in tensors]):
        return None
    if not all([type(size) is int and 0 < size <= SMALL for size in sizes]):
        return None
    widths = [max(LANES, WIDTH_OF[size]) for size in sizes]
    if len(widths) * max(widths) <= FEW:
        # trailing zeros change no bit, and fewer operators take less time
        widths = [max(widths)] * len(widths)
    return widths if sum(widths) <= _MOST_ELEMENTS else None


def _columns(tensors: list[Tensor], widths: list[int]) -> Tensor:
    """Return the raw columns of tensors that are padded to these widths, ``(T, C) float64``."""
    # tensors of one width become the rows of a matrix
    order = sorted(range(len(tensors)), key=widths.__getitem__)
    parts = [
        _parts([tensors[index] for index in indices], width)
        for width, indices in groupby(order, key=widths.__getitem__)
    ]
    lanes, others = [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
    columns = torch.cat([others[:1], add_lanes(lanes), others[1:]])
    if order != sorted(order):
        columns = torch.stack([columns[:, order.index(index)] for index in range(len(order))], dim=1)
    return columns.T.contiguous()


def _parts(tensors: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Return the lanes of squares and values, ``(2, R, 64)``, and the other columns, ``(C - 2, R)``."""
    x = torch.stack([functional.pad(x.reshape(-1).double(), (0, width - x.numel())) for x in tensors])
    finite = torch.where(x.abs() < torch.inf, x, 0.0)
    lanes = torch.stack([lanes_of(finite * finite), lanes_of(finite)])
    numel = torch.tensor([x.numel() for x in tensors], dtype=torch.float64, device=x.device)
    # Inductor's code for isnan and for integers has no vectors
    n_nonzero, n_nan, n_posinf, n_neginf = [
        torch.where(which, 1.0, 0.0).to(x.dtype).sum(1)
        for which in (x != 0, x != x, x == torch.inf, x == -torch.inf)  # noqa: PLR0124
    ]
    others = [numel, numel - n_nonzero, n_nan, n_posinf, n_neginf, finite.abs().amax(1)]
    return lanes, torch.stack(others)


define(
    "tensor_stats_in_graph(Tensor[] tensors, float vanishing, float exploding, float dead,"
    " Tensor? inv_scale=None) -> (Tensor columns, Tensor flags)",
    _tensor_stats_in_graph,
    composite=True,
)
