"""The statistics of an activation as plain operators, which a compiler fuses with those beside them.

They are partial sums of adjacent elements. ``gradiometer::tap_partials_`` merges them into a store, and reads
the activation itself only if it has a NaN or Inf, or enough zeros for a channel of zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.ops import activation_reference, openmp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Elements of a partial sum. The most: n additions in fp64, one after the other, lose at most n * 2**-53 of
# the sum of magnitudes, so 768 stay within 1e-13. Kernels of GPUs add up many lanes beside one another.
_MOST: Final = 768
_MOST_ON_GPUS: Final = 4096
# those that Inductor computes and rounds as in memory
_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16)
# the least, so that the partial sums are few; dimensions are joined until they have more
_LEAST: Final = 64
_ENOUGH: Final = 256


def fusible(x: Tensor) -> Tensor | None:
    """Return a view ``(..., n)`` of a tensor in pieces of n adjacent elements, or None if there is none.

    Depends only on sizes and strides that are known when the graph is compiled, and adds no guard.
    """
    if x.dtype not in _DTYPES:
        return None
    shape, strides, dims = x.shape, x.stride(), list(range(x.dim()))
    if all(isinstance(stride, int) for stride in strides):
        dims.sort(key=lambda dim: strides[dim], reverse=True)
    length = 1
    while dims and length < _ENOUGH:
        # a symbolic size is not compared, which would add a guard
        size, stride = shape[dims[-1]], strides[dims[-1]]
        if not isinstance(size, int) or not isinstance(stride, int) or (size != 1 and stride != length):
            break
        length *= size
        dims.pop()
    most = _MOST if _is_on_cpu(x) else _MOST_ON_GPUS
    piece = next((n for n in range(min(length, most), 0, -1) if length % n == 0), 0)
    if piece < _LEAST:
        return None
    # Not a view by permute and unflatten: a compiler computes the input of as_strided once, and stores it. It
    # might compute that of other views again, with other bits in its last places.
    return x.as_strided(
        [shape[dim] for dim in dims] + [length // piece, piece], [strides[dim] for dim in dims] + [piece, 1]
    )


def is_better(x: Tensor) -> bool:
    """Return whether plain operators cost less than the op, in a step that is measured.

    For bf16 on a CPU, rounding to the stored values takes longer than the op. On a GPU they may change the
    last bits of the model's results, since Inductor then fuses other operators, and no GPU was measured.
    """
    return _is_on_cpu(x) and x.dtype != torch.bfloat16


def partials_of(pieces: Tensor) -> list[Tensor]:
    """Return the sums of each piece: x, x**2 and x**4 in fp64; zeros in fp32; and the largest magnitude.

    All ``(...)``, of pieces ``(..., n)``. A NaN gives a maximum of NaN.
    """
    stored = _as_stored(pieces)
    wide = stored.double()
    square = wide * wide
    sums = [x.sum(dim=-1) for x in (wide, square, square * square)]
    # at most 4096 in a piece, which fp32 counts exactly, and in fewer instructions than integers
    zeros = (stored == 0).float().sum(dim=-1)
    return [*sums, zeros, pieces.abs().amax(dim=-1)]


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _as_stored(x: Tensor) -> Tensor:
    """Return the values that memory has.

    In a kernel that also computes a bf16 tensor, Inductor passes on the fp32 values before their rounding.
    Operators on bits round them to the nearest bf16, ties to even; they do not change rounded ones.
    """
    if x.dtype != torch.bfloat16:
        return x
    if not _is_on_cpu(x):
        return (x.view(torch.int16).int() << 16).view(torch.float32)
    # vector code for CPUs has no such view
    bits = x.float().view(torch.int32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) & -0x10000).view(torch.float32)


def columns_of(x: Tensor, partials: Sequence[Tensor], channel_dim: int) -> list[float]:
    """Return the columns of one call of `ACTIVATIONS`, given the result of `partials_of`. Waits."""
    sums, squares, fourths, zeros, tops = partials
    with openmp.one_thread():
        top = tops.max().item()
        if not top < math.inf:
            return activation_reference.activation_stats(x, channel_dim)
        total, sumsq, sum4 = [y.sum().item() for y in (sums, squares, fourths)]
        n_zero = zeros.sum(dtype=torch.float64).item()
        of_a_channel = (
            zeros.clamp(max=most_of_a_channel(x, zeros, channel_dim)).sum(dtype=torch.float64).item()
        )
    numel, channels = x.numel(), x.shape[channel_dim]
    # a channel of zeros has as many zeros as it has elements
    dead = activation_reference.zero_channels(x, channel_dim) if of_a_channel * channels >= numel else 0
    return [numel, sumsq, total, n_zero, 0.0, 0.0, 0.0, sum4, channels, dead, 1, top]


def most_of_a_channel(x: Tensor, partials: Tensor, channel_dim: int) -> int:
    """Return the most elements of one channel in a partial sum, or more."""
    piece = x.numel() // partials.numel()
    return -(-piece // x.shape[channel_dim]) if x.stride(channel_dim) == 1 else piece
