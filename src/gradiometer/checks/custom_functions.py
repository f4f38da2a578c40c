"""Custom autograd functions in a step in float64: no mode sees their calls, and some have no float64."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function

from gradiometer.checks.lifting import WIDE, Lifting
from gradiometer.checks.random_replay import ReplayError
from gradiometer.control.operations import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.originals import Originals

_WIDEST = frozenset(WIDE.values())


@contextmanager
def custom_functions(originals: Originals, lifting: Lifting) -> Iterator[None]:
    """Call custom functions with the copies of tensors; those that raise an error, in a narrower dtype.

    The backward of such a function gets, and gives, gradients in the narrower dtype, too.
    """
    method = inspect.getattr_static(Function, "apply")

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    def apply(cls: Any, *given: Any, **kwargs: Any) -> Any:
        # the method is one for all threads
        if not lifting.is_on or lifting.is_paused:
            return call(cls, *given, **kwargs)
        args = originals.mapped(given)
        name = f"{cls.__module__}.{cls.__qualname__}"
        try:
            result = call(cls, *args, **kwargs)
        except (ReplayError, torch.OutOfMemoryError):
            raise
        except Exception:
            devices = [x.device for x in tensors_in(args)]
            for dtype in lifting.dtypes(devices[0]) if devices else ():
                own = [
                    _narrow(x, y.dtype if isinstance(y, Tensor) and y.dtype in WIDE else dtype)
                    for x, y in zip(args, given, strict=True)
                ]
                try:
                    with lifting.paused():
                        result = call(cls, *own, **kwargs)
                except Exception:  # noqa: BLE001, S112 the first error is raised
                    continue
                lifting.narrow.setdefault(name, dtype)
                return _widened(result, own)
            raise
        lifting.examine(name, result, args)
        return result

    def _narrow(x: Any, dtype: torch.dtype) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in _WIDEST:
            return x
        return call(_Narrow, x, dtype if dtype.is_complex == x.is_complex() else torch.complex64, lifting)

    def _widened(result: Any, args: list[Any]) -> Any:
        """Return results in float64, and run their backward in the dtypes of the arguments."""
        nodes: set[Any] = {x.grad_fn for x in tensors_in(result)} - {None}
        for node in nodes:
            node.register_prehook(lambda _: lifting.pause(True))
            node.register_hook(lambda grads, _: _fitting(grads, args))
        wide = [call(_Wide, x, lifting) if x.dtype in WIDE else x for x in tensors_in(result)]
        return tuple(wide) if isinstance(result, tuple) else wide[0]

    def _fitting(grads: Any, args: list[Any]) -> Any:
        dtypes = [x.dtype for x in args if isinstance(x, Tensor)]
        # autograd would cast them after the pause
        fitting = tuple([None if x is None else x.to(y) for x, y in zip(grads, dtypes, strict=True)])
        lifting.pause(False)
        return fitting

    with patch.object(Function, "apply", classmethod(apply)):
        yield


class _Narrow(Function):
    """Casts to a narrower dtype, also while `Lifting` is on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, lifting: Lifting) -> Tensor:
        ctx.dtype = x.dtype
        with lifting.paused():
            return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None, None


class _Wide(Function):
    """Casts to float64, and its gradient to the narrower dtype, also while `Lifting` is on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lifting: Lifting) -> Tensor:
        ctx.dtype, ctx.lifting = x.dtype, lifting
        return x.to(WIDE[x.dtype])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.lifting.paused():
            return grads[0].to(ctx.dtype), None
