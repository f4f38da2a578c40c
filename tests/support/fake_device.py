"""A fake device: any wait of the host for it is an error."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._dynamo  # it subclasses torch.Event, so it is imported before that is replaced
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


DEVICES = ("cpu", "cuda")
# functions that return values to Python; some of them do not call the dispatcher for a tensor on the CPU
_READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.is_nonzero,
        Tensor.equal,
        torch.equal,
        torch.is_nonzero,
    }
)
_INDEXING = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default})
# those that measure
_OPS = frozenset(
    getattr(torch.ops.gradiometer, name).default
    for name in ("tensor_stats", "pair_stats", "exponent_stats", "project")
)


class HostWaitError(AssertionError):
    """The host would have waited for the device."""


class Watch(TorchDispatchMode):
    """Observes every call of the dispatcher: refuses those that wait for the device, and counts the rest.

    Calls inside an op are not observed: the mode is off while it is handled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.op_calls = 0
        # (blocking, into pinned memory), from the device and to it
        self.to_host: list[tuple[bool, bool]] = []
        self.to_device: list[tuple[bool, bool]] = []
        self._pinned: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._waits(func, args):
            raise HostWaitError(str(func))
        out = func(*args, **kwargs)
        self.op_calls += func in _OPS
        if kwargs.get("pin_memory"):
            # a fake tensor does not remember that it is pinned
            self._pinned.append(out.untyped_storage()._cdata)
        self._see_copy(func, args, kwargs, out)
        return out

    @staticmethod
    def _waits(func: Any, args: tuple[Any, ...]) -> bool:
        if func in _INDEXING:
            # the elements of a mask have to be counted, indices need not
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # _local_scalar_dense, equal; nonzero, masked_select, unique
        return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))

    def _see_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        def devices(tree: Any) -> set[str]:
            return {leaf.device.type for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}

        if func in _INDEXING and "cpu" in devices(args[1]) and args[0].device.type != "cpu":
            # indices on the host are copied with a wait
            self.to_device.append((True, False))
            return
        if func is torch.ops.aten.copy_.default:
            source, target = args[1].device.type, out.device.type
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            pinned = out.untyped_storage()._cdata in self._pinned
        elif "cpu" in devices(out) and devices((args, kwargs)) - {"cpu"}:
            source, target, blocking, pinned = "device", "cpu", not kwargs.get("non_blocking", False), False
        elif func is torch.ops.aten._to_copy.default:
            source, target = args[0].device.type, out.device.type
            blocking, pinned = not kwargs.get("non_blocking", False), False
        else:
            return
        if source != target:
            (self.to_host if target == "cpu" else self.to_device).append((blocking, pinned))


class _Reads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in _READS:
            raise HostWaitError(str(func))
        return func(*args, **(kwargs or {}))


class _NoGuard(TorchFunctionMode):
    """Makes calls on fake cuda tensors work on a CPU build of torch.

    Some of torch's Python functions request a device guard before they call the dispatcher,
    and a CPU build has none. This mode calls the dispatcher directly instead.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        if func is Tensor.__getitem__:
            return _index(*args)
        if func is Tensor.to:
            return torch.ops.aten._to_copy(args[0], device=args[1])
        names = {"__float__": "item", "__int__": "item", "__invert__": "bitwise_not"}
        return getattr(torch.ops.aten, names.get(func.__name__, func.__name__))(*args, **kwargs)


def _index(x: Tensor, index: Any) -> Tensor:
    if isinstance(index, Tensor):
        return torch.ops.aten.index.Tensor(x, [index])
    index = index if isinstance(index, tuple) else (index,)
    if index[0] is Ellipsis:
        index = (slice(None),) * (x.dim() - len(index) + 1) + index[1:]
    dim = 0
    for i in index:
        if isinstance(i, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, i.start, i.stop)
            dim += 1
        else:
            x = x.select(dim, i)
    return x


@contextmanager
def watch() -> Iterator[Watch]:
    with _Reads(), Watch() as seen:
        yield seen


@contextmanager
def device_of(name: str) -> Iterator[torch.device]:
    """Return a device: the CPU with its real tensors, or a fake one."""
    if name == "cpu":
        yield torch.device("cpu")
    else:
        with FakeTensorMode(), no_guard():
            yield torch.device(name)


@contextmanager
def no_guard() -> Iterator[None]:
    """Let fake tensors of a device that is not there be used, on one stream."""
    with (
        nullcontext() if torch.backends.cuda.is_built() else _NoGuard(),
        patch.object(torch, "Event", FakeEvent),
        patch.object(torch.accelerator, "current_stream", lambda device: device),
    ):
        yield


class Model(nn.Module):
    """Parameters of the given shapes and dtypes, with gradients."""

    def __init__(self, device: torch.device, parameters: int = 7) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for i in range(parameters):
            shape = (i % 5 + 1, 3)
            parameter = nn.Parameter(torch.ones(shape, dtype=dtypes[i % 4], device=device))
            parameter.grad = torch.ones(shape, dtype=dtypes[i % 4], device=device)
            self.register_parameter(f"w{i}", parameter)


class FakeEvent:
    """Replaces `torch.Event`, which needs an existing device."""

    waits = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.recorded = False

    def record(self, _: object) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded
        FakeEvent.waits += 1
