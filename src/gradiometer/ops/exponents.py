"""The op for histograms of magnitudes: schema, fake, and the choice between kernels and eager PyTorch.

``gradiometer::exponent_stats`` is opaque to the compiler, functional and not differentiable, as
``gradiometer::tensor_stats`` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradiometer.columns import NUM_EXPONENT_COLUMNS
from gradiometer.ops import exponent_reference, packing, warm_up
from gradiometer.ops.library import LIBRARY, launching_on, uses_kernels, without_autocast, without_grad

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure_exponents"]

LIBRARY.define("exponent_stats(Tensor[] tensors) -> Tensor")


def measure_exponents(tensors: Sequence[Tensor]) -> Tensor:
    """Return the histograms of tensors of one device.

    Args:
        tensors: at least one floating-point or complex strided tensor.

    Returns:
        ``(T, C) int64``, see `gradiometer.columns.exponents`, on their device.
    """
    with torch.no_grad():
        return torch.ops.gradiometer.exponent_stats(tensors)  # type: ignore[no-any-return]


def _exponent_stats(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device
    with without_grad(), without_autocast(device):
        if not uses_kernels(device):
            return exponent_reference.exponent_stats(tensors)
        with launching_on(device):
            return _run_kernels(tensors)


def _run_kernels(tensors: list[Tensor]) -> Tensor:
    from gradiometer import kernels  # noqa: PLC0415 as in library.py

    keep = not warm_up.is_possible()
    packed = packing.pack(tensors, kernels.tuning.CHUNK, kernels.tuning.MAX_CHUNKS, keep=keep)
    chunk_map = packed.chunk_map
    rows = torch.zeros(
        (chunk_map.num_tensors, NUM_EXPONENT_COLUMNS), dtype=torch.int64, device=packed.table.device
    )
    for group in chunk_map.groups:
        kernels.exponents(
            packed.pointers,
            packed.table,
            packing.upload(kernels.classes(group.dtype), packed.table.device),
            rows,
            group.dtype,
            group.first_chunk,
            group.num_chunks,
            chunk_map.num_tensors,
        )
    return rows


def _fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), NUM_EXPONENT_COLUMNS), dtype=torch.int64)


LIBRARY.impl("exponent_stats", _exponent_stats, "CompositeExplicitAutograd")
LIBRARY.impl("exponent_stats", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("gradiometer::exponent_stats", _fake, lib=LIBRARY)
