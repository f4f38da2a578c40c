"""What formats with a scale for each block of elements would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradiometer.columns import power_of_two
from gradiometer.inputs import as_real, check_names, local_shards, named_tensors
from gradiometer.stats.measure import plain

if TYPE_CHECKING:
    from gradiometer.inputs import Tensors

# elements that are converted to float64 at a time
_PIECE: Final = 2**22


class BlockLosses(NamedTuple):
    """What a cast of T tensors to a block format would lose: names, and ``(T,) int64`` each.

    ``numel``: elements. ``n_flushed``: nonzero elements that become 0. ``n_saturated``: elements that
    round to more than the largest number, and become it. NaN and Inf count in ``numel`` only.
    """

    names: tuple[str, ...]
    numel: Tensor
    n_flushed: Tensor
    n_saturated: Tensor


class _BlockFormat(NamedTuple):
    """A block format and its elements.

    ``block``: elements per scale. ``exponent``: that of the largest number. ``most``: the largest magnitude
    that becomes 0. ``least``: the least that rounds to more than the largest number; ``is_tie_even``: it is a
    tie that rounds down.
    """

    block: int
    exponent: int
    most: float
    least: float
    is_tie_even: bool = False


# "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5 and 6.3
_FORMATS: Final = {
    "mxfp8_e4m3": _BlockFormat(32, 8, 2.0**-10, 464.0, is_tie_even=True),
    "mxfp8_e5m2": _BlockFormat(32, 15, 2.0**-17, 61440.0),
    "mxfp4": _BlockFormat(32, 2, 0.25, 7.0),
    "nvfp4": _BlockFormat(16, 2, 0.25, 7.0),
}
# the largest numbers of e2m1 and of e4m3fn, and the range of E8M0 scales
_FP4_MAX: Final = 6.0
_FP8_MAX: Final = 448.0
_SCALES: Final = (-127, 127)


def block_losses(tensors: Tensors, format: str) -> BlockLosses:  # noqa: A002
    """Count what a cast to a format with block scales would lose, without host synchronization.

    Blocks are of adjacent elements along the last dimension; the last block of a row may be shorter. The
    scale of a block follows from its largest finite magnitude m:

    - ``"mxfp8_e4m3"``, ``"mxfp8_e5m2"``, ``"mxfp4"``: blocks of 32; ``2**(floor(log2(m)) - e)``, where e is
      8, 15 or 2, as in the OCP MX specification;
    - ``"nvfp4"``: blocks of 16; ``m / 6 / t`` rounded to e4m3fn, times ``t = M / (6 * 448)``, where M is the
      largest finite magnitude of the tensor.

    Args:
        tensors: as for `gradiometer.collect_exponents`. Of a DTensor, the local shard is measured.
        format: one of these four.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for another format, or for names that occur twice.

    >>> import torch, gradiometer as gm
    >>> gm.block_losses({"w": torch.tensor([1000.0, 1.0, 100.0])}, "mxfp4").n_flushed
    tensor([1])
    """
    what = "block_losses"
    if format not in _FORMATS:
        raise ValueError(f"{what}: {format!r} is not one of the formats {', '.join(_FORMATS)}")
    named = named_tensors(tensors, what)
    check_names(named.names, what)
    named = local_shards(named, what)
    values = plain(named, what)
    with torch.no_grad():
        counts = [_count(_rows(x), format) for x in values]
    if not counts:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return BlockLosses(named.names, none, none, none)
    home = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
    stacked = torch.stack([x.to(home, non_blocking=True) for x in counts])
    return BlockLosses(named.names, *stacked.unbind(1))


def _rows(x: Tensor) -> Tensor:
    if x.is_complex():
        x = as_real(x)
        x = x.flatten(-2) if x.dim() > 1 else x
    return x.reshape(1, -1) if x.dim() < 2 or not x.numel() else x.reshape(-1, x.shape[-1])


def _count(x: Tensor, name: str) -> Tensor:
    """Return numel, n_flushed and n_saturated of a matrix, ``(3,) int64``."""
    form = _FORMATS[name]
    pieces = x.split(max(1, _PIECE // max(1, x.shape[1])))
    top = None
    if name == "nvfp4" and x.numel():
        top = torch.stack([_finite(piece).amax() for piece in pieces]).amax()
    flushed, saturated = [], []
    for piece in pieces:
        padded = functional.pad(_finite(piece), (0, -piece.shape[1] % form.block))
        blocks = padded.unflatten(-1, (-1, form.block))
        scaled = _scaled(blocks, form, top)
        flushed.append(((blocks > 0) & (scaled <= form.most)).sum())
        over = scaled > form.least if form.is_tie_even else scaled >= form.least
        saturated.append(over.sum())
    numel = torch.full_like(flushed[0], x.numel())
    return torch.stack([numel, torch.stack(flushed).sum(), torch.stack(saturated).sum()])


def _finite(x: Tensor) -> Tensor:
    """Return magnitudes in float64, 0 for NaN and Inf."""
    wide = (x.float() if x.itemsize == 1 else x).double().abs()
    return torch.where(wide.isfinite(), wide, 0.0)


def _scaled(blocks: Tensor, form: _BlockFormat, top: Tensor | None) -> Tensor:
    """Return magnitudes divided by the scales of their blocks; 0 where a scale is 0."""
    tops = blocks.amax(-1, keepdim=True)
    if top is None:
        # frexp's mantissa is from 0.5 to 1
        exponents = torch.frexp(tops).exponent - 1 - form.exponent
        return blocks * power_of_two(-exponents.clamp(*_SCALES).long())
    whole = top / (_FP4_MAX * _FP8_MAX)
    scales = (tops / _FP4_MAX / whole).nan_to_num(nan=0.0).clamp(max=_FP8_MAX).to(torch.float8_e4m3fn)
    divisor = scales.double() * whole
    return torch.where(divisor > 0, blocks / divisor, 0.0)
