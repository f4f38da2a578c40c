"""In-place scaling of gradients by a coefficient c, or by one for each, whose value is only on the device.

fp64 gradients are scaled in fp64. All others are scaled in fp32 and rounded to their dtype once, so that
c itself is never rounded to fp16 or bf16. An fp32 gradient of 1e38 may need a c below the normal numbers
of fp32: then c is split into ``high * low`` with ``low = 2**-126``; otherwise low is 1. The kernel,
Inductor's code and the CPU's operators all do this, and give the same bits.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from gradiometer import ops
from gradiometer.columns import number, realized, take
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
    from collections.abc import Sequence

    from gradiometer.ops import LaunchPlan

# as in torch: added to a norm before dividing by it
EPS: Final = 1e-6
LARGEST: Final = torch.finfo(torch.float64).max
# the least normal number of fp32
TINY: Final = 2.0**-126
# partial placements whose parts can be scaled one by one
_LINEAR: Final = ("sum", "avg")
# the dtypes that foreach operators on the CPU take, and that of their factors
_FACTORS: Final = dict.fromkeys([torch.float32, torch.bfloat16, torch.float16], torch.float32)
_FACTORS[torch.float64] = torch.float64
# most lists of factors kept for the host, by length and dtype
_LISTS_KEPT: Final = 8
# types whose values are in memory
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def limit_of(value: float | Tensor, name: str, what: str) -> float | Tensor:
    """Return a bound: a non-negative number, or a one-element tensor, whose value is not checked."""
    if isinstance(value, Tensor):
        if is_one_number(value) and not value.is_complex() and value.dtype != torch.bool:
            return value.detach()
    elif is_limit(value):
        return float(value)
    msg = f"{what}: {name} must be a non-negative number, or a one-element real tensor, "
    raise ValueError(msg + f"got {describe(value)}")


def coefficient_of(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return the coefficient, 0-d float64 from 0 to 1; 1 if the norm or the limit is NaN."""
    if isinstance(limit, Tensor):
        limit = on_device(limit, norm.device, torch.float64).reshape(())
    else:
        limit = number(limit, norm.device)
    ratio = limit / (norm + EPS).clamp(max=LARGEST)
    # the value of a tensor was not checked: NaN clips nothing
    return realized(torch.where(ratio < 1.0, ratio, 1.0)).clamp(min=0.0)


def unscaled(norm: Tensor, inv_scale: Tensor | float) -> Tensor:
    """Return norms of unscaled gradients, from those of scaled ones."""
    if isinstance(inv_scale, Tensor):
        inv_scale = on_device(inv_scale.detach(), norm.device, torch.float64).reshape(()).abs()
    return norm * inv_scale


class Part(NamedTuple):
    """Tensors of one device to scale.

    ``rows``: the place of each among all gradients. ``plan``: the launch plan of the kernels, if they apply.
    """

    tensors: list[Tensor]
    rows: Sequence[int]
    plan: LaunchPlan | None


def parts_of(grads: Named, what: str) -> list[Part]:
    """Group gradients by device, each memory once; raise if one cannot be scaled in place.

    For a DTensor, a part has the tensor that this rank holds: a shard, a copy, or a summand.
    """
    if any([is_dtensor(kind) for kind in set(map(type, grads.tensors))]):
        held = [_held(x, name, what) for x, name in zip(grads.tensors, grads.names, strict=True)]
        grads = Named(grads.names, held)
    whole = _planned(grads, range(len(grads.tensors)), what)
    if whole is not None:
        return [whole]
    parts = []
    devices = dict.fromkeys([x.device for x in grads.tensors])
    for device in devices:
        named = grads
        rows: Sequence[int] = range(len(grads.tensors))
        if len(devices) > 1:
            named = present(grads.names, [x if x.device == device else None for x in grads.tensors])
            rows = [i for i, x in enumerate(grads.tensors) if x.device == device]
            part = _planned(named, rows, what)
            if part is not None:
                parts.append(part)
                continue
        memories = [memory_of(x, name, what) for x, name in zip(named.tensors, named.names, strict=True)]
        kept = _once(named.names, memories, what)
        if is_watched():
            # tensors have no addresses here, so one gradient of several parameters is found by identity
            first = {grad: i for i, grad in reversed(list(enumerate(named.tensors)))}
            kept = sorted(first.values())
        if len(kept) < len(memories):
            memories, rows = [memories[i] for i in kept], [rows[i] for i in kept]
        parts.append(Part(memories, rows, None))
    return parts


def _planned(grads: Named, rows: Sequence[int], what: str) -> Part | None:
    """Return a part that the kernels scale, or None if they do not apply to these gradients."""
    names, tensors = grads
    # Dynamo cannot trace how Triton loads its driver
    if torch.compiler.is_compiling() or not (tensors and ops.uses_kernels(tensors[0].device)):
        return None
    plan = ops.writable(tensors)
    if plan is None:
        return None
    addresses = [] if is_watched() else list(map(Tensor.data_ptr, tensors))
    if not addresses or plan.separate != addresses:
        if len(_once(names, tensors, what)) < plan.count:
            return None
        plan.separate = addresses
    return Part(tensors, rows, plan)


def scale_(part: Part, factors: Tensor) -> None:
    """Multiply a part's tensors in place.

    ``factors``: 0-d float64 from 0 to 1, or ``(G,)`` with one for each of all G gradients, on any device.
    """
    tensors, rows, plan = part
    if not tensors:
        return
    device = tensors[0].device
    factors = on_device(factors, device)
    if plan is not None:
        ops.scale_(tensors, _own(factors, rows), plan)
        return
    if device.type == "cpu" and type(factors) is Tensor and not is_watched():
        if factors.dim():
            _scale_on_host(tensors, rows, factors)
        else:
            _scale_by_one_on_host(tensors, factors)
        return
    own = _own(factors, rows)
    high, low = _factors(own)
    if torch.compiler.is_compiling():
        own, high, low = realized(own), realized(high), realized(low)
    # one for each tensor: the same, or views
    each, highs, lows = [list(x.unbind()) if x.dim() else [x] * len(tensors) for x in (own, high, low)]
    left: Sequence[int] = range(len(tensors))
    if torch.compiler.is_compiling():
        # a foreach call has fewer nodes in the graph
        singles = [i for i in left if tensors[i].dtype == torch.float32]
        if singles:
            alike = [tensors[i] for i in singles]
            for value, values in ((high, highs), (low, lows)):
                torch._foreach_mul_(alike, [values[i] for i in singles] if value.dim() else value)
        left = [i for i in left if tensors[i].dtype != torch.float32]
    for i in left:
        x = tensors[i]
        if x.dtype == torch.float64:
            x.mul_(each[i])
        else:
            x.copy_(x.to(torch.float32) * highs[i] * lows[i])


def scale_by_(x: Tensor, factors: Tensor) -> None:
    """Multiply a tensor in place by factors, float64 from 0 to 1, that broadcast to it."""
    if x.dtype == torch.float64:
        x.mul_(factors)
    else:
        high, low = _factors(factors)
        x.copy_(x.to(torch.float32) * high * low)


def _own(factors: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the factors of these gradients, or the one of all."""
    return take(factors, rows) if factors.dim() and len(rows) < len(factors) else factors


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
    x = real_memory(x)
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


def real_memory(x: Tensor) -> Tensor:
    """Return the real view of a complex tensor, without its lazy conjugation, and others as they are."""
    if not x.is_complex():
        return x
    # Dynamo cannot query it
    return torch.view_as_real(x.conj() if not torch.compiler.is_compiling() and x.is_conj() else x)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements may share memory; also true for some interleaved layouts that share none."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += (size - 1) * stride
    return False


def _once(names: tuple[str, ...], tensors: list[Tensor], what: str) -> Sequence[int]:
    """Return the places of the tensors without duplicates of the same memory, if they have addresses."""
    if is_watched() or any([type(x) not in _PLAIN for x in tensors]):
        return range(len(tensors))
    spans = sorted([(x.data_ptr(), x.numel() * x.itemsize, i) for i, x in enumerate(tensors)])
    if all([start + size <= after for (start, size, _), (after, _, _) in pairwise(spans)]):
        return range(len(tensors))
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
    return sorted(kept.values())


def _scale_by_one_on_host(tensors: list[Tensor], factor: Tensor) -> None:
    value = factor.item()
    if value == 1.0:
        return
    others = tensors
    if value >= TINY:
        # low is 1. The CPU's operators keep a factor that is a tensor in fp32, also for half types
        others = []
        lists: dict[bool, list[Tensor]] = {True: [], False: []}
        for x in tensors:
            # foreach operators take neither fp8 nor lazy negation
            is_alone = x.dtype not in _FACTORS or x.is_neg()
            (others if is_alone else lists[x.dtype == torch.float64]).append(x)
        for is_wide, alike in lists.items():
            if alike:
                torch._foreach_mul_(alike, factor if is_wide else factor.to(torch.float32))
    for x in others:
        _scale_alone(x, value)


def _scale_on_host(tensors: list[Tensor], rows: Sequence[int], factors: Tensor) -> None:
    values = factors.tolist()
    alike: list[Tensor] = []
    own: list[Tensor] = []
    # a factor that is a tensor is kept in fp32 by the CPU's operators for half types, unlike a number
    numbers: dict[torch.dtype, tuple[Tensor, ...]] = {}
    for x, row in zip(tensors, rows, strict=True):
        value = values[row]
        if value == 1.0:
            continue
        dtype = x.dtype
        if value < TINY or dtype not in _FACTORS or x.is_neg():
            _scale_alone(x, value)
            continue
        if dtype not in numbers:
            numbers[dtype] = _NUMBERS.of(factors, _FACTORS[dtype])
        alike.append(x)
        own.append(numbers[dtype][row])
    if alike:
        torch._foreach_mul_(alike, own)


class _Numbers(threading.local):
    """Tensors with one factor each, kept for the next call: to make them takes as long as to scale."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, torch.dtype], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def of(self, factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return 0-d views of a copy of the factors, valid until the next call."""
        key = len(factors), dtype
        if key not in self.kept:
            while len(self.kept) >= _LISTS_KEPT:
                self.kept.pop(next(iter(self.kept)))
            # a tensor made in inference mode could not be written outside
            with torch.inference_mode(mode=False):
                memory = torch.empty(len(factors), dtype=dtype, device="cpu")
                self.kept[key] = memory, memory.unbind()
        memory, numbers = self.kept[key]
        memory.copy_(factors)
        return numbers


_NUMBERS: Final = _Numbers()


def _scale_alone(x: Tensor, value: float) -> None:
    if x.dtype == torch.float64:
        x.mul_(value)
    else:
        high, low = (value / TINY, TINY) if value < TINY else (value, 1.0)
        x.copy_(x.to(torch.float32) * high * low)


def is_watched() -> bool:
    """Return whether calls are traced, by a compiler or by a mode such as that of fake tensors."""
    return bool(torch.compiler.is_compiling() or _len_torch_dispatch_stack())


def _factors(c: Tensor) -> tuple[Tensor, Tensor]:
    """Split c into two fp32 numbers, ``high * low``, as the kernel does."""
    below = c < TINY
    high = torch.where(below, c / TINY, c).to(torch.float32)
    return high, torch.where(below, TINY, torch.ones_like(c)).to(torch.float32)
