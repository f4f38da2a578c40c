"""Copies of tensors to the host, in one transfer for any number of tensors."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from gradiometer.ops import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Pending(Generic[T]):
    """A copy to the host that is in progress.

    >>> import torch, gradiometer as gm
    >>> pending = gm.collect({"w": torch.ones(4)}).materialize_async()
    >>> pending.ready(), pending.result().total_norm
    (True, 2.0)
    """

    def __init__(self, tensors: Sequence[Tensor], build: Callable[[list[Tensor]], T]) -> None:
        """Start copying strided tensors; ``build`` makes the result from the copies."""
        self._build: Callable[[list[Tensor]], T] | None = build
        self._result: T
        self._event: torch.Event | None = None
        self._host: Tensor | None = None
        self._device = torch.device("cpu")
        self._parcel = _Parcel(tensors)
        flat = self._parcel.flat
        if flat is not None:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._device = flat.device
            self._event = torch.Event(flat.device)
            self._event.record(torch.accelerator.current_stream(flat.device))
            # The flat tensor was allocated on this stream, so its memory is reused only after the copy. The
            # tensors in it may belong to another stream; `build` keeps those alive until the copy is done.
            self._parcel.flat = None

    def __repr__(self) -> str:
        """Return a one-line summary. Never waits."""
        return f"<Pending: {'ready' if self.ready() else 'in progress'}>"

    def ready(self) -> bool:
        """Return whether `result` would return at once. Never waits.

        False while the current stream is capturing a CUDA graph, since the device cannot be asked then.
        """
        return self._event is None or (not is_capturing(self._device) and self._event.query())

    def result(self) -> T:
        """Return the result; if needed, wait for this copy and nothing else.

        Raises:
            RuntimeError: while the current stream is capturing a CUDA graph.
        """
        # read in this order and written below in reverse: another thread may call this at the same time
        host, build = self._host, self._build
        if build is not None:
            if self._event is not None:
                if is_capturing(self._device):
                    msg = "a copy to the host cannot be waited for while a CUDA graph is captured; "
                    raise RuntimeError(msg + "call result() before or after the capture")
                self._event.synchronize()
            self._result = build(self._parcel.unpack(host))
            self._build = None
            self._host = None
        return self._result


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of strided tensors on the host, after one transfer. Waits for the device."""
    parcel = _Parcel(tensors)
    return parcel.unpack(None if parcel.flat is None else parcel.flat.cpu())


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class _Parcel:
    """Snapshots of tensors: a copy of each host tensor, and one flat device tensor for all others."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        self._on_host = [x.clone() if _is_on_host(x) else None for x in plain]
        away = [x for x in plain if not _is_on_host(x)]
        self._kinds = [(x.dtype, x.shape) for x in away]
        self._same = len({x.dtype for x in away}) == 1
        self.flat: Tensor | None = None
        if away:
            home = away[0].device
            if is_capturing(home):
                msg = "a copy to the host cannot be part of a CUDA graph; materialize after the capture"
                raise RuntimeError(msg)
            parts = [x.to(home, non_blocking=True).reshape(-1) for x in away]
            # bytes of several dtypes side by side, without conversion
            parts = parts if self._same else [x.view(torch.uint8) for x in parts]
            self.flat = parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, host: Tensor | None) -> list[Tensor]:
        """Return the tensors; ``host`` is the host copy of the flat tensor, if there is one."""
        arrived = iter([] if host is None else self._cut(host))
        return [next(arrived) if x is None else x for x in self._on_host]

    def _cut(self, host: Tensor) -> list[Tensor]:
        sizes = [shape.numel() * (1 if self._same else dtype.itemsize) for dtype, shape in self._kinds]
        bounds = pairwise(accumulate(sizes, initial=0))
        # clone each: the pinned memory is released, and every dtype is aligned
        return [
            host[start:stop].clone().view(dtype).view(shape)
            for (start, stop), (dtype, shape) in zip(bounds, self._kinds, strict=True)
        ]


def outside_of_a_graph(what: str) -> None:
    """Raise a RuntimeError if called inside a compiled function."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{what} copies to the host, which a compiled function cannot do; call it outside")
