"""The ops of taps: they measure an activation in the forward pass, and its gradient in the backward pass.

``gradiometer::tap`` is composed of two calls of ``gradiometer::tap_``: one now, and one in a hook of the
tensor's gradient. So autograd and AOTAutograd trace both, and a compiler sees two opaque ops that change
their store. The stores of values and gradients are two tensors: with one, the backward graph would depend
on the store of the forward pass, and activation checkpointing would compute that again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.columns import NUM_ACTIVATION_SUMS, Cursor
from gradiometer.ops import activation_reference, ring
from gradiometer.ops.library import LIBRARY, without_autocast

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["tap"]

LIBRARY.define(
    "tap_(Tensor x, Tensor(a!) store, Tensor cursor, int row, int channel_dim, bool is_forward) -> ()"
)
LIBRARY.define(
    "tap(Tensor x, Tensor(a!) values, Tensor(b!) grads, Tensor cursor, int row, int channel_dim) -> ()"
)


def tap(x: Tensor, values: Tensor, grads: Tensor, cursor: Tensor, row: int, channel_dim: int) -> None:
    """Measure a tensor, and its gradient when it is known, in a step that is due.

    Args:
        x: floating-point or complex; not a leaf that requires a gradient.
        values: the store of values; a measured call is merged into ``values[row]``.
        grads: the store of gradients.
        cursor: `gradiometer.columns.Cursor`; the call is measured if EVERY is positive and divides STEP.
        row: the row in both stores.
        channel_dim: the dimension of the channels.
    """
    if torch.compiler.is_compiling():
        torch.ops.gradiometer.tap(x, values, grads, cursor, row, channel_dim)
    elif cursor.device.type != "cpu" or _is_due(cursor):
        _tap(x, values, grads, cursor, row, channel_dim)


def _tap(x: Tensor, values: Tensor, grads: Tensor, cursor: Tensor, row: int, channel_dim: int) -> None:
    tap_ = torch.ops.gradiometer.tap_
    tap_(x.detach(), values, cursor, row, channel_dim, True)
    if x.requires_grad and torch.is_grad_enabled():
        # a hook, and not an autograd.Function: its output would be a view, which cannot be changed in place
        x.register_hook(lambda g: tap_(g.detach(), grads, cursor, row, channel_dim, False))


def _tap_once(
    x: Tensor,
    store: Tensor,
    cursor: Tensor,
    row: int,
    channel_dim: int,
    is_forward: bool,  # noqa: FBT001 in the order of the schema
) -> None:
    # activation checkpointing runs the forward pass again, inside the backward pass
    if is_forward and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 it has no public name
        return
    if cursor.device.type != "cpu" or not _is_due(cursor) or x.numel() == 0:
        return
    with torch.no_grad(), without_autocast(x.device):
        columns = activation_reference.activation_stats(x, channel_dim)
    kept = ring.numbers(store[row])
    for index, value in enumerate(columns):
        kept[index] = kept[index] + value if index < NUM_ACTIVATION_SUMS else max(kept[index], value)


def _is_due(cursor: Tensor) -> bool:
    state = ring.numbers(cursor)
    every = state[Cursor.EVERY]
    return bool(every > 0 and state[Cursor.STEP] % every == 0)


LIBRARY.impl("tap_", _tap_once, "CompositeExplicitAutograd")
LIBRARY.impl("tap_", torch.library.fallthrough_kernel, "Autograd")
LIBRARY.impl("tap", _tap, "CompositeImplicitAutograd")
torch.library.register_fake("gradiometer::tap_", lambda *_: None, lib=LIBRARY)
