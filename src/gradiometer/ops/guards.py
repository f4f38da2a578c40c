"""Compiled checks that a list of tensors matches a list that was seen before, using Dynamo's guards."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _dispatch_tls_is_dispatch_key_excluded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether as many tensors differ from these at most in their addresses.

    It keeps no tensor alive. Call both functions with grad mode disabled.
    """
    if guards_tell():
        firsts = _firsts(tensors)
        if firsts == list(range(len(tensors))):
            return _guards(tensors)
        # the guards match no list in which a tensor occurs again
        check = _guards(_distinct(tensors, firsts))

        def match(*others: Tensor) -> bool:
            return _firsts(others) == firsts and check(*_distinct(others, firsts))

        return match
    met = [_traits(tensor) for tensor in tensors]
    # stops at the first difference
    return lambda *others: all(_traits(other) == traits for other, traits in zip(others, met, strict=True))


def guards_tell() -> bool:
    """Return whether torch has tensor guards that currently detect every relevant difference.

    Inside the handler of a dispatch mode they miss lazy conjugation and negation.
    """
    hidden = [
        _dispatch_tls_is_dispatch_key_excluded(key) for key in (DispatchKey.Negative, DispatchKey.Conjugate)
    ]
    return not any(hidden) and _guards_tell()


@cache
def _guards_tell() -> bool:
    x, z = (torch.zeros(2, 2, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.complex64))
    others = [x[:1], x[:, :1], x.t(), x.view(2, 2, 1), x.double(), x.view(torch.int32), nn.Parameter(x)]
    others += [torch.complex(x, x).conj().imag, z]
    try:
        like_x, like_z = _guards([x]), _guards([z])
        tell = not any([like_x(other) for other in others]) and not like_z(z.conj())
        # a different state of the thread's dispatch keys is a difference too
        with torch.inference_mode(not torch.is_inference_mode_enabled()):
            tell = tell and not like_x(x)
        return tell and like_x(x.clone()) and like_z(z.clone())
    except (ImportError, SystemError, TypeError):
        return False


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    # Dynamo's own guards: one call compares types, dispatch keys, dtypes, devices, sizes and strides of all,
    # and creates no Python objects. The keys also show what intercepts the calls of this thread
    from torch._C._dynamo.guards import TensorGuards  # noqa: PLC0415 private: it may be removed

    # no dimension is dynamic
    return TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check


def _firsts(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the index at which it occurs first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(x), i) for i, x in enumerate(tensors)]


def _distinct(tensors: Sequence[Tensor], firsts: list[int]) -> list[Tensor]:
    return [x for i, (x, first) in enumerate(zip(tensors, firsts, strict=True)) if i == first]


def _traits(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg(), x.is_conj()
