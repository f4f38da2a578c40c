"""The histogram of magnitudes that tells, afterwards, what a cast to a narrow format would lose.

A row counts zeros, then finite magnitudes in ascending bins, then infinities, then NaN. The bins' edges are
those of the binades ``[2**e, 2**(e + 1))``, and, within a binade, each magnitude at which a cast of ``x * s``
begins to round to something else than 0 or to overflow, for each `Format` and each power of two s from
2**MIN_SCALE to 2**MAX_SCALE. So both counts are sums of bins, exactly. Counts are int64 and merge by sum.

A magnitude is written as an integer, the bits of the float64 number. PyTorch rounds a float64 number to
float32 before it casts it to a narrower format; the edges allow for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns.schema import Derived, Schema
from gradiometer.columns.tensors import count_of

if TYPE_CHECKING:
    from gradiometer.columns.schema import Row

MIN_SCALE: Final = -32
"""log2 of the smallest scale for which counts are exact."""
MAX_SCALE: Final = 64
"""log2 of the largest scale for which counts are exact."""

_BIAS: Final = 1023
# bits of a float64 mantissa, and of those that float32 does not have
_MANTISSA: Final = 52
_REST: Final = 29
_INF_BITS: Final = 2047 << _MANTISSA


def _bits(exponent: int, mantissa: float = 0.0) -> int:
    """Return ``(1 + mantissa) * 2**exponent`` as the bits of a float64 number."""
    return ((exponent + _BIAS) << _MANTISSA) + int(mantissa * 2.0**_MANTISSA)


def _from(exponent: int, mantissa: float = 0.0) -> int:
    # the least number that rounds to this float32 number or above: ties go to the even one, which this is
    return _bits(exponent, mantissa) - (1 << (_REST - 1))


def _above(exponent: int, mantissa: float = 0.0) -> int:
    # the least number that rounds to a float32 number above this one, which is even
    return _bits(exponent, mantissa) + (1 << (_REST - 1)) + 1


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format, as magnitudes in the bits of float64.

    ``name``: of the torch dtype. ``tiny``: the least magnitude that does not round to 0. ``top``: the least
    one that rounds to more than the largest finite number. ``normal``: log2 of the smallest normal number.
    ``peak``: the largest finite number.
    """

    name: str
    short: str
    tiny: int
    top: int
    normal: int
    peak: float


# Half of the smallest subnormal number is a tie, and rounds to 0. Half a unit above the largest number is a
# tie too: it rounds up where the largest mantissa is odd, and down in e4m3fn, whose largest mantissa is even.
# (IEEE 754-2019, section 4.3.1; "OCP 8-bit Floating Point Specification", section 5.3)
FORMATS: Final = {
    form.name: form
    for form in (
        Format("float16", "fp16", _above(-25), _from(15, 1 - 2**-11), -14, 65504.0),
        # its subnormal numbers are also those of float32: a float64 number is rounded twice, so that numbers
        # up to 2**-150 above the tie become the tie
        Format("bfloat16", "bf16", _bits(-134, 2**-16) + 1, _from(127, 1 - 2**-8), -126, 255 * 2.0**120),
        Format("float8_e4m3fn", "e4m3", _above(-10), _above(8, 0.8125), -6, 448.0),
        Format("float8_e5m2", "e5m2", _above(-17), _from(15, 0.875), -14, 57344.0),
    )
}
"""The formats by the name of their torch dtype."""


def _step(log2: int) -> int:
    return log2 << _MANTISSA


def _edges() -> list[int]:
    scales = range(MIN_SCALE, MAX_SCALE + 1)
    exact = {
        edge - _step(scale) for form in FORMATS.values() for edge in (form.tiny, form.top) for scale in scales
    }
    lowest = (min(exact) >> _MANTISSA) - _BIAS
    highest = (max(exact) >> _MANTISSA) - _BIAS + 1
    return sorted(exact | {_from(e) for e in range(lowest, highest + 1)})


EXPONENT_EDGES: Final = tuple(_edges())
"""The first magnitude of each bin but the lowest, as bits of float64, in ascending order."""
LOWEST_BINADE: Final = ((EXPONENT_EDGES[0] + (1 << _REST)) >> _MANTISSA) - _BIAS
"""The lowest binade with a bin of its own; the bin below it has all smaller magnitudes."""
HIGHEST_BINADE: Final = ((EXPONENT_EDGES[-1] + (1 << _REST)) >> _MANTISSA) - _BIAS - 1
"""The highest binade with a bin of its own; the bin above it has all larger finite magnitudes."""

# zeros; finite numbers; infinities; NaN
_FIRST_BITS: Final = (1, *EXPONENT_EDGES, _INF_BITS, _INF_BITS + 1)
_INF: Final = len(_FIRST_BITS) - 1


@cache
def _first_bits() -> Tensor:
    return torch.tensor(_FIRST_BITS, dtype=torch.int64, device="cpu")


def bin_of(magnitudes: Tensor) -> Tensor:
    """Return the column of each magnitude, given as the bits of float64, int64; of the same shape."""
    return torch.bucketize(magnitudes, _first_bits().to(magnitudes.device), right=True)


# dictionaries, which Dynamo folds
_COLUMN: Final = {edge: column for column, edge in enumerate(EXPONENT_EDGES, start=2)}
_LOG2: Final = {2.0**log2: log2 for log2 in range(MIN_SCALE, MAX_SCALE + 1)}


def _last_columns() -> list[slice]:
    """Return slices of `numbers_of` that have, in order, the last column of each binade."""
    binades = [((edge + (1 << _REST)) >> _MANTISSA) - _BIAS for edge in EXPONENT_EDGES]
    last = [
        i
        for i, (one, other) in enumerate(zip([None, *binades], [*binades, None], strict=True))
        if one != other
    ]
    found: list[slice] = []
    while last:
        step = last[1] - last[0] if len(last) > 1 else 1
        count = next((i for i in range(1, len(last)) if last[i] - last[i - 1] != step), len(last))
        found.append(slice(last[0], last[count - 1] + 1, step))
        last = last[count:]
    return found


_LAST_COLUMNS: Final = _last_columns()


def power_of_two(exponents: Tensor) -> Tensor:
    """Return ``2.0**exponents``, exact, float64; int64 from -1022 to 1023."""
    return ((exponents + _BIAS) << _MANTISSA).view(torch.float64)


def numbers_of(columns: Tensor) -> Tensor:
    """Return the counts of finite nonzero magnitudes. ``(..., C) -> (..., B)``."""
    return columns[..., 1:_INF]


def of_binades(columns: Tensor) -> Tensor:
    """Return the counts by binade, from below the lowest to above the highest. ``(..., C) -> (..., E)``."""
    # slices need no index tensor on the device
    total = numbers_of(columns).cumsum(-1)
    upto = torch.cat([total[..., last] for last in _LAST_COLUMNS], dim=-1)
    return upto.diff(dim=-1, prepend=torch.zeros_like(upto[..., :1]))


def format_of(given: object, what: str) -> Format:
    """Return a format by its name, its short name or its dtype.

    Raises:
        ValueError: for any other.
    """
    name = str(given).removeprefix("torch.")
    for form in FORMATS.values():
        if name in (form.name, form.short):
            return form
    known = ", ".join(FORMATS)
    msg = f"{what}: {given!r} is not one of the formats {known}"
    raise ValueError(msg)


def log2_of(scale: object, what: str) -> int:
    """Return log2 of a scale.

    Raises:
        ValueError: if it is not a power of two, or outside of the range.
    """
    log2 = _LOG2.get(scale) if isinstance(scale, (int, float)) else None
    if log2 is not None:
        return log2
    msg = f"{what}: scale={scale!r}; pass a power of two from 2**{MIN_SCALE} to 2**{MAX_SCALE}"
    raise ValueError(msg)


def losses(columns: Tensor, form: Format, log2: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many finite nonzero x a cast of ``x * 2**log2`` makes 0, subnormal, and overflow.

    ``(..., C) -> (...)`` each, int64. Subnormal are those whose product is below the smallest normal number,
    before rounding, and does not become 0.
    """
    # the first columns whose numbers, times 2**log2, do not round to 0, are normal and overflow
    tiny, normal, top = [
        _COLUMN[edge] for edge in (form.tiny - _step(log2), _from(form.normal - log2), form.top - _step(log2))
    ]
    flushed = columns[..., 1:tiny].sum(-1)
    return flushed, columns[..., tiny:normal].sum(-1), columns[..., top:_INF].sum(-1)


def best_scales(columns: Tensor, form: Format) -> Tensor:
    """Return log2 of the best scale of each row. ``(..., C) -> (...) int64``.

    It is the one with the fewest elements that overflow, then the fewest that become 0, then the fewest that
    become subnormal, then the one nearest to 1, then the larger one.
    """
    scales = sorted(range(MIN_SCALE, MAX_SCALE + 1), key=lambda log2: (abs(log2), -log2))
    # (..., S) each
    flushed, subnormal, over = [
        torch.stack(x, dim=-1) for x in zip(*[losses(columns, form, log2) for log2 in scales], strict=True)
    ]
    allowed = torch.ones_like(over, dtype=torch.bool)
    for count in (over, flushed, subnormal):
        left = torch.where(allowed, count, torch.iinfo(torch.int64).max)
        allowed = left == left.amin(-1, keepdim=True)
    place = allowed.to(torch.int8).argmax(-1)
    # 0, 1, -1, 2, -2 ... MIN_SCALE, and then those above -MIN_SCALE
    near = torch.where(place % 2 == 1, (place + 1) // 2, -(place // 2))
    return torch.where(place <= -2 * MIN_SCALE, near, place + MIN_SCALE)


def quantile(columns: Tensor, q: float) -> Tensor:
    """Return a lower bound of the q-quantile of |x| over finite elements, within a factor of two of it.

    ``(..., C) -> (...) float64``: the power of two at or below it, or 0. NaN without finite elements.
    """
    finite = torch.cat([columns[..., :1], of_binades(columns)], dim=-1)
    total = finite.sum(-1, keepdim=True)
    rank = (q * (total - 1).clamp(min=0)).floor().to(torch.int64)
    place = (finite.cumsum(-1) <= rank).sum(-1)
    value = torch.where(place > 0, power_of_two(place + (LOWEST_BINADE - 2)), 0.0)
    return torch.where(total.squeeze(-1) > 0, value, torch.nan)


def _min_exponent(row: Row) -> Tensor:
    found = of_binades(row.columns) > 0
    first = found.to(torch.int8).argmax(-1) + (LOWEST_BINADE - 1)
    return torch.where(found.any(-1), first, 0)


def _max_exponent(row: Row) -> Tensor:
    found = of_binades(row.columns) > 0
    last = found.shape[-1] - 1 - found.flip(-1).to(torch.int8).argmax(-1) + (LOWEST_BINADE - 1)
    return torch.where(found.any(-1), last, 0)


_OF: Final = "floor(log2 |x|) of the {} finite element; 0 if there is none"

EXPONENTS: Final = Schema(
    "exponents",
    (
        count_of("n_zero", "elements equal to 0", "zeros"),
        *[count_of(f"bin_{i}", "finite elements in this bin") for i in range(1, _INF)],
        count_of("n_inf", "+Inf and -Inf elements", "±Inf", "rare"),
        count_of("n_nan", "NaN elements", "NaN", "rare"),
    ),
    (
        Derived("numel", lambda row: row.columns.sum(-1), "elements", "elements", "count"),
        Derived(
            "n_nonfinite", lambda row: row("n_nan") + row("n_inf"), "NaN and infinite elements", style="rare"
        ),
        Derived("min_exponent", _min_exponent, _OF.format("smallest nonzero"), "min log2 |x|"),
        Derived("max_exponent", _max_exponent, _OF.format("largest"), "max log2 |x|"),
    ),
    dtype=torch.int64,
    storage="sparse",
    shown=("numel", "n_zero", "min_exponent", "max_exponent", "n_nan", "n_inf"),
)
"""The schema of `gradiometer.ExponentStats`. Multiplication by s moves elements to other bins."""
