"""Snapshot: a copy of weights on their device, whole or as a fixed sample."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.inputs import Named, as_flat, check, check_names, local_shards, named_parameters, present
from gradiometer.stats.float64_module import Float64Module
from gradiometer.stats.measure import dense

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from gradiometer.inputs import Parameters

# elements of a chunk, which the kernels read in one piece
CHUNK: Final = 2**12


class Snapshot(Float64Module):
    """A copy of a model's weights on their device, for `gradiometer.collect_updates`.

    It takes as much memory as the parameters that require a gradient, in their dtypes; for a DTensor, as the
    local shard. `update_` copies the current weights, inside or outside a compiled step.

    With ``sample`` it keeps a fixed sample of each large tensor: of its chunks of 4096 elements, every
    ``1 / sample``-th one, from a first one that depends on the name. Memory and time shrink by that factor.
    Tensors with less than ``1 / sample`` chunks, and those whose memory has gaps, are kept whole. The samples
    of all first chunks are a partition of the complete chunks; elements after the last complete chunk are in
    none. Sums are multiplied by the number of elements per sampled element. If elements are independent and
    normal, a norm from n sampled elements has a relative standard error of ``1 / sqrt(2 * n)``: 1.1 % for one
    chunk, 0.3 % for ``sample=1/16`` of 2**20 elements. It is larger if chunks differ more than chunks of such
    elements do.

    Args:
        model: a module, of which the parameters that require a gradient are kept, or parameters as a mapping,
            an iterable, or (name, parameter) pairs, which are all kept.
        sample: 1, or 1 divided by an integer.

    Attributes:
        names: the names of the parameters.
        scale: ``(T, 1) float64``: elements of each tensor per sampled element; None without sampling.

    Raises:
        TypeError: for a parameter that cannot be measured; the message names it.
        ValueError: for a duplicate name, or an invalid ``sample``.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(512, 256)
    >>> snapshot = gm.Snapshot(model, sample=1/16)
    >>> [tuple(weight.shape) for weight in snapshot.buffers()][:2]
    [(2, 4096), (256,)]
    """

    scale: Tensor | None

    @torch.no_grad()
    def __init__(self, model: Parameters, *, sample: float = 1.0) -> None:
        super().__init__()
        # a step has to be an integer that float64 holds
        if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 2.0**-53 <= sample <= 1:
            msg = f"Snapshot(sample={sample!r}): sample must be 1, or 1 divided by an integer, such as 1/16"
            raise ValueError(msg)
        self.step = round(1 / sample)
        if abs(self.step * sample - 1) > 1e-9:
            msg = f"Snapshot(sample={sample!r}): sample must be 1, or 1 divided by an integer; "
            raise ValueError(msg + f"the nearest is 1/{self.step}")
        named = named_parameters(model, "Snapshot")
        if isinstance(model, nn.Module):
            named = present(named.names, [p if p.requires_grad else None for p in named.tensors])
        check_names(named.names, "Snapshot")
        local = local_shards(named, "Snapshot")
        check(local, "Snapshot")
        self.names = named.names
        # Dynamo cannot trace the checksum
        self._first = {
            name: zlib.crc32(name.encode(errors="backslashreplace")) % self.step for name in named.names
        }
        self._shapes = [x.shape for x in local.tensors]
        # a sample is in the order of memory
        self._orders = [x.stride() if self._is_large(x) else None for x in local.tensors]
        parts = [self._part(name, x) for name, x in zip(*local, strict=True)]
        for i, part in enumerate(parts):
            self.register_buffer(f"_{i}", part.detach().clone(), persistent=False)
        scale = None
        if self.step > 1 and parts:
            factors = [x.numel() / max(part.numel(), 1) for x, part in zip(local.tensors, parts, strict=True)]
            home = next((x.device for x in parts if x.device.type != "cpu"), parts[0].device)
            scale = torch.tensor(factors, dtype=torch.float64, device=home).unsqueeze(1)
        self.register_buffer("scale", scale, persistent=False)

    @torch.no_grad()
    def update_(self, model: Parameters) -> Self:
        """Copy the current weights; the buffers keep their addresses.

        Raises:
            ValueError: if a parameter is missing, or has another shape now, or a dtype whose numbers would
                be rounded.
        """
        what = "Snapshot.update_"
        return self.keep_(self.parameters_in(model, what), what)

    @torch.no_grad()
    def keep_(self, weights: Named, what: str) -> Self:
        """Do what `update_` does, with the parameters of the snapshot's names, in order."""
        named = local_shards(weights, what)
        parts, kept = self.local_parts(named, what), self._kept()
        rounded = [x.dtype for x in kept] != [x.dtype for x in parts]
        for name, x, part in zip(named.names, kept, parts, strict=True) if rounded else ():
            if x.dtype != part.dtype and not _holds(x.dtype, part.dtype):
                here, there = [str(dtype).removeprefix("torch.") for dtype in (part.dtype, x.dtype)]
                msg = f"{what}: {name!r} is {here}, but was {there} in the snapshot, which would round it; "
                raise ValueError(msg + "take a new one: gm.Snapshot(model)")
        ops.keep_(kept, parts)
        return self

    def fits(self, names: tuple[str, ...], weights: Sequence[Tensor]) -> bool:
        """Return whether these weights can be copied: in a narrower dtype they would be rounded."""
        return names == self.names and [x.dtype for x in self._kept()] == [x.dtype for x in weights]

    def parameters_in(self, model: Parameters, what: str) -> Named:
        """Return the parameters of the snapshot's names.

        Raises:
            ValueError: if one is missing.
        """
        there = dict(zip(*named_parameters(model, what), strict=True))
        missing = [name for name in self.names if name not in there]
        if missing:
            msg = f"{what}: the model has no parameter {missing[0]!r}, which is in the snapshot; pass the "
            msg += "model that the snapshot was taken of, or take a new one: gm.Snapshot(model)"
            raise ValueError(msg)
        return Named(self.names, [there[name] for name in self.names])

    @torch.no_grad()
    def pairs_of(
        self, weights: Named, grads: list[Tensor | None], what: str
    ) -> tuple[Named, Named, list[Tensor | None]]:
        """Return the parts of weights to measure, those in the snapshot, and those of gradients.

        ``weights`` and ``grads`` are those that this rank holds, in the order of the names.

        Raises:
            ValueError: if a weight has another shape or device now.
        """
        parts = self.local_parts(weights, what)
        if self.step > 1:
            grads = [
                g if g is None or part is x else self._part(name, _in_order_of(x, g))
                for name, x, part, g in zip(*weights, parts, grads, strict=True)
            ]
        return Named(weights.names, parts), Named(weights.names, self._kept()), grads

    def local_parts(self, weights: Named, what: str) -> list[Tensor]:
        """Return the parts of weights that correspond to those in the snapshot, as views."""
        kept = self._kept()
        shapes, devices = [x.shape for x in weights.tensors], [x.device for x in weights.tensors]
        if shapes != self._shapes or devices != [x.device for x in kept]:
            now = zip(shapes, devices, strict=True)
            then = [(shape, x.device) for shape, x in zip(self._shapes, kept, strict=True)]
            name, here, there = next(x for x in zip(weights.names, now, then, strict=True) if x[1] != x[2])
            text = [f"{tuple(shape)} on {device}" for shape, device in (here, there)]
            msg = f"{what}: {name!r} is {text[0]}, but was {text[1]} in the snapshot; take a new one: "
            raise ValueError(msg + "gm.Snapshot(model)")
        if self.step == 1:
            return weights.tensors
        for name, x, order in zip(*weights, self._orders, strict=True):
            if order is not None and x.stride() != order:
                msg = f"{what}: {name!r} has the strides {x.stride()}, but had {order} in the snapshot, a "
                raise ValueError(msg + "sample of its memory; take a new one: gm.Snapshot(model, sample=...)")
        return [self._part(name, x) for name, x in zip(*weights, strict=True)]

    def _kept(self) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return [getattr(self, f"_{i}") for i in range(len(self.names))]
        # attributes of a module are found slowly; they were registered in this order
        return list(self._buffers.values())[: len(self.names)]  # type: ignore[return-value]

    def _is_large(self, x: Tensor) -> bool:
        return self.step > 1 and x.numel() // CHUNK >= self.step

    def _part(self, name: str, x: Tensor) -> Tensor:
        flat = as_flat(x) if self._is_large(x) else None
        if flat is None:
            return x
        part = flat[self._first[name] * CHUNK :].unfold(0, CHUNK, self.step * CHUNK)
        # Inductor would compute a view of new weights in a buffer of the whole size, to keep its strides
        return part.contiguous() if torch.compiler.is_compiling() else part


def _holds(kept: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a dtype has all numbers of another one."""
    # torch does not promote fp8
    return dtype.itemsize == 1 < kept.itemsize or (
        kept.itemsize > 1 and torch.promote_types(kept, dtype) == kept
    )


def _in_order_of(x: Tensor, g: Tensor) -> Tensor:
    """Return a gradient whose elements are in the order of its parameter's memory."""
    g = dense(g)
    return g if g.stride() == x.stride() else torch.empty_like(x, dtype=g.dtype).copy_(g)
