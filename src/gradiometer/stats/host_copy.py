"""Tensors on their way to the host: one copy, however many there are."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from gradiometer.ops import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Pending", "fetch", "outside_of_a_graph"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A copy to the host that is under way.

    >>> import torch, gradiometer as gm
    >>> pending = gm.collect({"w": torch.ones(4)}).materialize_async()
    >>> pending.ready(), pending.result().total_norm
    (True, 2.0)
    """

    def __init__(self, tensors: Sequence[Tensor], build: Callable[[list[Tensor]], T]) -> None:
        """Start to copy strided tensors; ``build`` makes the result of the copies."""
        self._build: Callable[[list[Tensor]], T] | None = build
        self._result: T
        self._event: torch.Event | None = None
        self._host: Tensor | None = None
        self._parcel = _Parcel(tensors)
        flat = self._parcel.flat
        if flat is not None:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.Event(flat.device)
            self._event.record(torch.accelerator.current_stream(flat.device))
            # Made on this stream: what its memory becomes next comes after the copy. What it was made from
            # may be another stream's, and is kept alive by `build` until the copy has arrived.
            self._parcel.flat = None

    def __repr__(self) -> str:
        """Return one line. Never waits."""
        return f"<Pending: {'ready' if self.ready() else 'on its way'}>"

    def ready(self) -> bool:
        """Tell whether `result` would return at once. Never waits."""
        return self._event is None or self._event.query()

    def result(self) -> T:
        """Return the result, after waiting for this copy, and nothing else, if it must."""
        # in this order, and written in the other one below: another thread may have been here meanwhile
        host, build = self._host, self._build
        if build is not None:
            if self._event is not None:
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
    """Snapshots of tensors: of those on the host at once, of the others as one flat tensor on a device."""

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
                msg = "a copy to the host cannot be part of a CUDA graph: materialize after the capture"
                raise RuntimeError(msg)
            parts = [x.to(home, non_blocking=True).reshape(-1) for x in away]
            # bytes of several dtypes side by side: nothing is converted
            parts = parts if self._same else [x.view(torch.uint8) for x in parts]
            self.flat = parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, host: Tensor | None) -> list[Tensor]:
        """Return the tensors; ``host``: the flat tensor, where there is one, copied to the host."""
        arrived = iter([] if host is None else self._cut(host))
        return [next(arrived) if x is None else x for x in self._on_host]

    def _cut(self, host: Tensor) -> list[Tensor]:
        sizes = [shape.numel() * (1 if self._same else dtype.itemsize) for dtype, shape in self._kinds]
        bounds = pairwise(accumulate(sizes, initial=0))
        # each in memory of its own: pinned memory goes back, and every dtype is aligned
        return [
            host[start:stop].clone().view(dtype).view(shape)
            for (start, stop), (dtype, shape) in zip(bounds, self._kinds, strict=True)
        ]


def outside_of_a_graph(what: str) -> None:
    """Refuse to go on inside a compiled function."""
    if torch.compiler.is_compiling():
        msg = f"{what} copies to the host: return the stats from the compiled function and call it outside"
        raise RuntimeError(msg)
