"""Clipping by value: clamp gradients in place, element by element, and count the clipped elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import number
from gradiometer.control.clip_events import value_clip_begins
from gradiometer.control.scale import limit_of, memory_of
from gradiometer.inputs import check, is_dtensor, is_partial, local_shard, named_parameters, on_device
from gradiometer.stats import grads_of

if TYPE_CHECKING:
    from gradiometer.inputs import Parameters


class ElementCounts(NamedTuple):
    """The number of elements that `clip_grad_value_` clipped, by gradient.

    ``names``: T names, those of the parameters. ``counts``: ``(T,) int64``, on the gradients' device.
    """

    names: tuple[str, ...]
    counts: Tensor

    @property
    def total(self) -> Tensor:
        """The count of all gradients together, 0-d int64."""
        return self.counts.sum()

    def to_dict(self) -> dict[str, int]:
        """Return the count of each name, after one transfer."""
        return dict(zip(self.names, self.counts.tolist(), strict=True))


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Parameters,
    clip_value: float | Tensor,
    foreach: bool | None = None,  # noqa: FBT001 torch's signature
) -> ElementCounts:
    """Clamp every gradient to [-clip_value, clip_value] in place, and count clipped elements by tensor.

    The results are those of `torch.nn.utils.clip_grad_value_`: an infinite element becomes the bound with its
    sign and is counted; NaN stays NaN and is not counted. The bound is rounded to the gradient's dtype, so
    that exactly the changed elements are counted. Works the same inside and outside ``torch.compile``, and
    does not wait for a device.

    Args:
        parameters: as for `gradiometer.clip_grad_norm_`. For a DTensor the local shard is clamped and
            counted. A gradient of two parameters counts for each.
        clip_value: not negative; ``math.inf`` clips nothing. The value of a one-element tensor is not
            checked, so that it can change in a compiled step without a recompilation. A tensor
            that is NaN clips nothing, and a negative one counts as 0.
        foreach: ignored; there is one implementation.

    Returns:
        The names of the gradients, and the number of clipped elements of each, on their device.

    Raises:
        ValueError: for a ``clip_value`` that is negative, NaN or not a number.
        TypeError: for a gradient that cannot be clamped in place: complex, 8-bit, sparse but not
            coalesced, a partial DTensor, or with elements that share memory. Gradients are then
            unchanged.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, -0.1]])).sum().backward()
    >>> clipped = gm.clip_grad_value_(model, 0.5)
    >>> clipped.to_dict(), clipped.total
    ({'weight': 1, 'bias': 1}, tensor(2))
    >>> model.weight.grad
    tensor([[ 0.5000, -0.1000]])
    """
    del foreach
    what = "clip_grad_value_"
    limit = limit_of(clip_value, "clip_value", what)
    source = [parameters] if isinstance(parameters, Tensor) else parameters
    named = named_parameters(source, what)
    value_clip_begins(named.tensors)
    grads, home = grads_of(named, what)
    check(grads, what)
    memories = [_clampable(grad, name, what) for name, grad in zip(*grads, strict=True)]
    if not memories:
        return ElementCounts((), torch.empty(0, dtype=torch.int64, device=home))
    # the first that is not the CPU, as for collected statistics
    home = next((x.device for x in memories if x.device.type != "cpu"), memories[0].device)
    bounds = {kind: _bound(limit, *kind) for kind in dict.fromkeys([(x.device, x.dtype) for x in memories])}
    # count all before the first is written: two may share memory
    counts = [(x.abs() > bounds[x.device, x.dtype]).count_nonzero() for x in memories]
    for x in memories:
        bound = bounds[x.device, x.dtype]
        x.clamp_(-bound, bound)
    counts = [count.to(home, non_blocking=True) for count in counts]
    return ElementCounts(grads.names, torch.stack(counts))


def _bound(limit: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the bound in this dtype, inf if it is too large for it; 0-d, on the device."""
    if isinstance(limit, Tensor):
        bound = on_device(limit, device, torch.float64).reshape(())
        bound = torch.where(bound.isnan(), torch.inf, bound.clamp(min=0.0))
    else:
        bound = number(limit, device)
    return bound.to(dtype)


def _clampable(grad: Any, name: str, what: str) -> Tensor:
    """Return the memory of a gradient's local elements; raise if they cannot be clamped there."""
    reason = None
    if is_dtensor(type(grad)):
        if is_partial(grad):
            reason = f"is a DTensor with placements {grad.placements}, and clamping its parts does not clamp "
            reason += "their sum; redistribute it first"
        else:
            grad = local_shard(grad)
    if grad.is_complex():
        reason = "is complex, and complex numbers have no order; clip its norm with clip_grad_norm_"
    elif grad.itemsize == 1:
        reason = f"has dtype {grad.dtype}, which torch cannot clamp; convert it to float16 first"
    elif grad.layout == torch.sparse_coo and not grad.is_coalesced():
        reason = "is sparse and not coalesced, so it may store an element as several values; coalesce it "
        reason += "first: parameter.grad = parameter.grad.coalesce()"
    if reason is not None:
        raise TypeError(f"{what}: the gradient of {name!r} {reason}")
    return memory_of(grad, name, what)
