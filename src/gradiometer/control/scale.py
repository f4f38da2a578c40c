"""In-place scaling of gradients by one coefficient c, whose value is only on the device.

fp64 gradients are scaled in fp64. All others are scaled in fp32 and rounded to their dtype once, so that
c itself is never rounded to fp16 or bf16. An fp32 gradient of 1e38 may need a c below the normal numbers
of fp32: then c is split into ``high * low`` with ``low = 2**-126``; otherwise low is 1. The kernel,
Inductor's code and the CPU's operators all do this, and give the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from gradiometer import ops
from gradiometer.columns import derived
from gradiometer.inputs import (
    Named,
    as_flat,
    describe,
    is_dtensor,
    is_limit,
    is_one_number,
    is_plain_subclass,
    layout,
    local_shard,
    on_device,
    present,
    reduction_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.ops import LaunchPlan

__all__ = ["Part", "limit_of", "memory_of", "parts_of", "scale_"]

# the least normal number of fp32
TINY: Final = 2.0**-126
# partial placements whose parts can be scaled one by one
_LINEAR: Final = ("sum", "avg")
# types whose values are in memory
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def limit_of(number: float | Tensor, name: str, what: str) -> float | Tensor:
    """Return a bound: a non-negative number, or a one-element tensor, whose value is not checked.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(number, Tensor):
        if is_one_number(number) and not number.is_complex() and number.dtype != torch.bool:
            return number.detach()
    elif is_limit(number):
        return float(number)
    msg = (
        f"{what}: {name} must be a non-negative number, or a one-element real tensor, got {describe(number)}"
    )
    raise ValueError(msg)


class Part(NamedTuple):
    """Tensors of one device to scale; ``plan`` is the launch plan of the kernels, if they apply."""

    tensors: list[Tensor]
    plan: LaunchPlan | None


def parts_of(grads: Named, what: str) -> list[Part]:
    """Group gradients by device, each memory once; raise if one cannot be scaled in place.

    For a DTensor, a part has the tensor that this rank holds: a shard, a copy, or a summand.
    """
    if any([is_dtensor(kind) for kind in {type(x) for x in grads.tensors}]):
        held = [_held(x, name, what) for x, name in zip(grads.tensors, grads.names, strict=True)]
        grads = Named(grads.names, held)
    parts = []
    devices = dict.fromkeys([x.device for x in grads.tensors])
    for device in devices:
        named = grads
        if len(devices) > 1:
            named = present(grads.names, [x if x.device == device else None for x in grads.tensors])
        # Dynamo cannot trace how Triton loads its driver
        kernels_scale = not torch.compiler.is_compiling() and ops.uses_kernels(device)
        plan = ops.writable(named.tensors) if kernels_scale else None
        if plan is not None and len(_once(named.names, named.tensors, what)) == plan.count:
            parts.append(Part(named.tensors, plan))
            continue
        pairs: Iterable[tuple[Tensor, str]] = zip(named.tensors, named.names, strict=True)
        if _is_watched():
            # tensors have no addresses here, so one gradient of several parameters is found by identity
            pairs = dict(pairs).items()
        memories = [memory_of(grad, name, what) for grad, name in pairs]
        parts.append(Part(_once(named.names, memories, what), None))
    return parts


def scale_(part: Part, coefficient: Tensor) -> None:
    """Multiply a part's tensors in place by ``coefficient``, 0-d float64 from 0 to 1, on any device."""
    tensors, plan = part
    if not tensors:
        return
    device = tensors[0].device
    factor = on_device(coefficient, device)
    if plan is not None:
        ops.scale_(tensors, factor, plan)
        return
    high, low = _factors(factor)
    if device.type == "cpu" and type(factor) is Tensor and not _is_watched():
        value = factor.item()
        if value == 1.0:
            return
        if value >= TINY:
            # low is 1. The CPU's operators keep a factor that is a tensor in fp32, also for half types
            others: list[Tensor] = []
            lists: dict[bool, list[Tensor]] = {True: [], False: []}
            for x in tensors:
                # fp8 has no such operator, and foreach lists take no lazy negation
                (others if x.itemsize == 1 or x.is_neg() else lists[x.dtype == torch.float64]).append(x)
            for is_wide, alike in lists.items():
                if alike:
                    torch._foreach_mul_(alike, factor if is_wide else high)
            tensors = others
    if torch.compiler.is_compiling():
        factor, high, low = derived.realized(factor), derived.realized(high), derived.realized(low)
        # a foreach call has fewer nodes in the graph
        singles = [x for x in tensors if x.dtype == torch.float32]
        if singles:
            torch._foreach_mul_(singles, high)
            torch._foreach_mul_(singles, low)
        tensors = [x for x in tensors if x.dtype != torch.float32]
    for x in tensors:
        if x.dtype == torch.float64:
            x.mul_(factor)
        else:
            x.copy_(x.to(torch.float32) * high * low)


def _held(grad: Any, name: str, what: str) -> Tensor:
    """Return the part of a gradient that this rank holds; raise if it cannot be scaled by itself."""
    if not is_dtensor(type(grad)):
        return grad  # type: ignore[no-any-return]
    for placement in grad.placements:
        if placement.is_partial() and reduction_of(placement) not in _LINEAR:
            msg = f"{what}: the gradient of {name!r} is a DTensor with placements {grad.placements}, "
            raise TypeError(msg + "whose parts cannot be scaled one by one; redistribute it first")
    return local_shard(grad)


def memory_of(grad: Tensor, name: str, what: str) -> Tensor:
    """Return a real tensor that holds the gradient's elements; raise if it cannot be scaled in place."""
    x = grad
    if type(x) is not Tensor and is_plain_subclass(type(x)):
        x = x.as_subclass(Tensor)
    if layout(x) == torch.sparse_coo:
        # duplicate coordinates are scaled like others
        x = x._values()  # noqa: SLF001
    if x.is_complex():
        # the memory without its lazy conjugation, which does not matter here and which Dynamo cannot query
        x = torch.view_as_real(x.conj() if not torch.compiler.is_compiling() and x.is_conj() else x)
    if torch.compiler.is_compiling():
        # not every version of Dynamo traces the checks below
        return x
    if not x.is_contiguous() and _overlaps(x):
        reason = "may have elements that share memory"
    elif x.is_inference() and not torch.is_inference_mode_enabled():
        reason = "was made in inference mode"
    else:
        return x
    msg = f"{what}: the gradient of {name!r} {reason}, so it cannot be scaled in place; "
    raise TypeError(msg + "replace it first: parameter.grad = parameter.grad.clone()")


def _overlaps(x: Tensor) -> bool:
    """Return whether elements may share memory; also true for some interleaved layouts that share none."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += (size - 1) * stride
    return False


def _once(names: tuple[str, ...], tensors: list[Tensor], what: str) -> list[Tensor]:
    """Drop duplicates of the same memory, if tensors have addresses; raise if memory overlaps in part."""
    if _is_watched() or any([type(x) not in _PLAIN for x in tensors]):
        return tensors
    spans = sorted([(x.data_ptr(), x.numel() * x.itemsize, i) for i, x in enumerate(tensors)])
    if all([start + size <= after for (start, size, _), (after, _, _) in pairwise(spans)]):
        return tensors
    kept: dict[object, int] = {}
    end, last = 0, 0
    for start, size, i in spans:
        x = tensors[i]
        if size > 0 and as_flat(x) is None:
            # views with gaps may interleave, such as columns of a matrix
            kept.setdefault((start, x.shape, x.stride()), i)
        elif size > 0 and (start, size) not in kept:
            if start < end:
                msg = f"{what}: the gradients of {names[last]!r} and {names[i]!r} share part of their memory"
                raise TypeError(msg + ", which would be scaled twice; replace one by its clone()")
            kept[start, size] = i
            end, last = start + size, i
    return [tensors[i] for i in sorted(kept.values())]


def _is_watched() -> bool:
    """Return whether calls are traced, by a compiler or by a mode such as that of fake tensors."""
    return bool(torch.compiler.is_compiling() or _len_torch_dispatch_stack())


def _factors(c: Tensor) -> tuple[Tensor, Tensor]:
    """Split c into two fp32 numbers, ``high * low``, as the kernel does."""
    below = c < TINY
    high = torch.where(below, c / TINY, c).to(torch.float32)
    return high, torch.where(below, TINY, torch.ones_like(c)).to(torch.float32)
