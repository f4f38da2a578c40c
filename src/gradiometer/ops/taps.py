"""The ops of taps: they measure an activation in the forward pass, and its gradient in the backward pass.

``gradiometer::tap`` is composed of two calls of ``gradiometer::tap_``: one now, and one in a hook of the
tensor's gradient. So autograd and AOTAutograd trace both, and a compiler sees two opaque ops that change
their store. If the tap is fused, it sees plain operators and two calls of ``gradiometer::tap_partials_``,
which merges their results: see `gradiometer.ops.tap_partials`.

The stores of values and gradients are two tensors: with one, the backward graph would depend on the store of
the forward pass, and activation checkpointing would compute that again.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import ACTIVATIONS
from gradiometer.inputs import as_real
from gradiometer.ops import activation_reference, dispatch, ring, tap_partials
from gradiometer.ops.library import REVISION, by_device, define

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.ops.stream_order import StreamOrder

# channels for which a store has scratch; more take a tensor of their own at each call
_MOST_CHANNELS: Final = 2**16


def tap(
    x: Tensor,
    values: Tensor,
    grads: Tensor,
    cursor: Tensor,
    row: int,
    channel_dim: int,
    *,
    fused: bool | None = False,
    orders: tuple[StreamOrder, StreamOrder] | None = None,
) -> None:
    """Measure a tensor, and its gradient when it is known, in a step that is due.

    Args:
        x: floating-point or complex; not a leaf that requires a gradient.
        values: the store of values; a measured call is merged into ``values[row]``.
        grads: the store of gradients.
        cursor: `gradiometer.columns.Cursor`; the call is measured if EVERY is positive and divides STEP.
        row: the row in both stores.
        channel_dim: the dimension of the channels.
        fused: whether a compiled graph gets plain operators, where they can be fused, instead of the op
            alone; None for the one that costs less.
        orders: those of the uses of both stores, in eager code. Each has scratch for one call at a time.
    """
    if torch.compiler.is_compiling():
        torch.ops.gradiometer.tap(x, values, grads, cursor, row, channel_dim, fused, REVISION)
    elif may_measure(cursor):
        _tap(x, values, grads, cursor, row, channel_dim, orders=orders)


def may_measure(cursor: Tensor) -> bool:
    """Return whether this step may be due. Kernels read the cursor, so the host does not know."""
    return dispatch.uses_kernels(cursor.device) or ring.is_due(cursor)


def _tap(
    x: Tensor,
    values: Tensor,
    grads: Tensor,
    cursor: Tensor,
    row: int,
    channel_dim: int,
    fused: bool | None = False,  # noqa: FBT001, FBT002 in the order of the schema
    orders: tuple[StreamOrder, StreamOrder] | None = None,
) -> None:
    def measure(x: Tensor, store: Tensor, *, is_forward: bool) -> None:
        x, dim = x.detach(), channel_dim
        if x.is_complex():
            # Inductor's pass for ops that change an argument does not support complex ones
            x, dim = as_real(x if x.dim() else x.unsqueeze(0)), dim - (dim < 0)
        is_fused = tap_partials.is_better(x) if fused is None else fused
        pieces = tap_partials.fusible(x) if is_fused else None
        with nullcontext() if orders is None else orders[0 if is_forward else 1].on(x.device):
            if pieces is None:
                torch.ops.gradiometer.tap_(x, store, cursor, row, dim, is_forward)
            else:
                partials = tap_partials.partials_of(pieces)
                torch.ops.gradiometer.tap_partials_(x, partials, store, cursor, row, dim, is_forward)

    measure(x, values, is_forward=True)
    if x.requires_grad and torch.is_grad_enabled():
        # a hook, and not an autograd.Function: its output would be a view, which cannot be changed in place
        x.register_hook(lambda g: measure(g, grads, is_forward=False))


def _tap_partials(
    x: Tensor,
    partials: list[Tensor] | None,
    store: Tensor,
    cursor: Tensor,
    row: int,
    channel_dim: int,
    is_forward: bool,  # noqa: FBT001 in the order of the schema
) -> None:
    # activation checkpointing runs the forward pass again, inside the backward pass
    if is_forward and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 it has no public name
        return
    if x.numel():
        _measure(x, partials, store, cursor, row, channel_dim)


def _by_reference(
    x: Tensor, partials: list[Tensor] | None, store: Tensor, cursor: Tensor, row: int, channel_dim: int
) -> None:
    if not ring.is_due(cursor):
        return
    if partials is None:
        _merge(store[row], activation_reference.activation_stats(x, channel_dim))
    else:
        _merge(store[row], tap_partials.columns_of(x, partials, channel_dim))


def _merge(kept: Tensor, columns: list[float]) -> None:
    """Merge the columns of a call into a row of a store."""
    if kept.device.type != "cpu":
        there = kept.cpu()
        _merge(there, columns)
        kept.copy_(there)
        return
    numbers = ring.numbers(kept)
    for index, value in enumerate(columns):
        before = numbers[index]
        numbers[index] = before + value if index < ACTIVATIONS.num_sums else max(before, value)


def new_store(rows: int, device: torch.device) -> Tensor:
    """Return a store with this many rows, ``(rows + S, A) float64``; the last S are scratch of the kernel."""
    if dispatch.uses_kernels(device):
        from gradiometer import kernels  # noqa: PLC0415 as in dispatch.py

        scratch = math.prod(kernels.ACTIVATION_PARTIALS) + _MOST_CHANNELS // 2 + 1
        rows += -(-scratch // ACTIVATIONS.width)
    return torch.zeros((rows, ACTIVATIONS.width), dtype=torch.float64, device=device)


def _by_kernels(
    x: Tensor, partials_of_x: list[Tensor] | None, store: Tensor, cursor: Tensor, row: int, channel_dim: int
) -> None:
    """Measure with the kernels, which read the cursor and use the end of the store as scratch."""
    from gradiometer import kernels  # noqa: PLC0415 as above

    x = x if x.dim() else x.unsqueeze(0)
    dim = channel_dim % x.dim()
    x = as_real(x)
    # the order of dimensions in memory, so that most tensors are not copied
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    x = x.permute(order)
    dim = order.index(dim)
    flat = store.view(-1)
    size = math.prod(kernels.ACTIVATION_PARTIALS)
    *_, partials, alive, counter = flat.split(
        [flat.numel() - size - _MOST_CHANNELS // 2 - 1, size, _MOST_CHANNELS // 2, 1]
    )
    partials, marks = partials.view(kernels.ACTIVATION_PARTIALS), alive.view(torch.int32)
    channels = x.shape[dim]
    # the two halves of a number
    (count, state), flag = counter.view(torch.int32).split(1), None
    if partials_of_x is not None:
        flag = state
        most = tap_partials.most_of_a_channel(x, partials_of_x[0], dim)
        scratch = partials, count, flag
        kernels.merge_partials(partials_of_x, store, row, cursor, *scratch, x.numel(), channels, most)
    if channels > _MOST_CHANNELS:
        marks = torch.zeros(channels, dtype=torch.int32, device=x.device)
    kernels.activation(
        kernels.contiguous(x, cursor, flag),
        store,
        row,
        cursor,
        partials,
        marks,
        count,
        dim,
        flag,
    )


_measure = by_device(_by_reference, _by_kernels)
_ARGUMENTS: Final = "Tensor(a!) store, Tensor cursor, int row, int channel_dim, bool is_forward"
define(
    f"tap_(Tensor x, {_ARGUMENTS}) -> ()", lambda x, *args: _tap_partials(x, None, *args), any_strides=True
)
define(f"tap_partials_(Tensor x, Tensor[] partials, {_ARGUMENTS}) -> ()", _tap_partials)
define(
    "tap(Tensor x, Tensor(a!) values, Tensor(b!) grads, Tensor cursor, int row, int channel_dim, "
    "bool? fused=False) -> ()",
    _tap,
    composite=True,
)
