"""The cells of the page's heat maps: a matrix of codes for each kind and statistic that its schema draws.

A matrix has a row per tensor and a column per recorded step, or per group of consecutive ones. A cell is a
16-bit code: 0 not measured, 1 exactly 0, 2 to 65533 a value, 65534 Inf, 65535 NaN. A larger code is worse, so
merged cells take the maximum, here and in the page. Codes are linear in the value for shares and cosines, and
otherwise in log10 of its magnitude. Those of a cosine are larger for lower values.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import TENSORS, Column, Flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from gradiometer.columns import Derived
    from gradiometer.recorder import Kind
    from gradiometer.runs import Run

MOST_COLUMNS: Final = 1250
MOST_CELLS: Final = 7_200_000  # over all kinds and statistics; at most 2.7 bytes each on the page
_WINDOW: Final = 1_000_000  # cells of a statistic that are read at once

ZERO, SMALLEST, LARGEST, INF, NAN = 1, 2, 65533, 65534, 65535
_UNMEASURED: Final = -1.0  # marks a missing value; values are not negative
_FLAGS: Final = {
    "NaN": Flag.NAN,
    "Inf": Flag.INF,
    "exploding": Flag.EXPLODING,
    "dead": Flag.DEAD,
    "vanishing": Flag.VANISHING,
}


def drawn_of(kind: Kind) -> tuple[str, ...]:
    """Return the statistics of a kind that have a heat map; without any choice, all raw columns."""
    schema = kind.schema
    # of a schema that is not registered, only the columns are known
    if schema.drawn is not None:
        return schema.drawn
    return tuple(schema.index)[1:] if schema.storage == "columns" else ()


def describe(kind: Kind, statistics: Iterable[str]) -> dict[str, Any]:
    """Return what the page shows about a kind and its statistics."""
    found = {name: kind.schema[name] for name in statistics}
    return {
        **{key: getattr(kind, key) for key in ("name", "noun", "suffix", "rows")},
        "flags": [word for word, flag in _FLAGS.items() if flag in kind.schema.flags],
        "statistics": [
            {"name": name, "heading": x.heading or name, "meaning": x.meaning, "style": x.style}
            for name, x in found.items()
        ],
    }


def steps_per_column(run: Run, kinds: Iterable[Kind], recorded: int) -> int:
    """Return the number of recorded steps that share a column, so that a page is not too large."""
    cells = sum([len(run.catalog.rows(kind.name)) * (len(drawn_of(kind)) - _has_rms(kind)) for kind in kinds])
    most = max(16, min(MOST_COLUMNS, MOST_CELLS // max(cells, 1)))
    return max(1, math.ceil(recorded / most))


def read_kind(
    run: Run, kind: Kind, recorded: Tensor, binned: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, Any]]:
    """Return the entries of a kind's matrices by statistic, their codes by id, and a summary of each tensor.

    Statistics that are not known of any tensor are left out. A root mean square that the page can compute
    from the norm has no matrix.
    """
    names, n = drawn_of(kind), len(run.catalog.rows(kind.name))
    columns: dict[str, list[Tensor]] = {name: [] for name in names}
    top = {name: torch.full((n,), _UNMEASURED, dtype=torch.float64, device="cpu") for name in names}
    at = torch.full((n,), -1, device="cpu")
    broken = torch.zeros(n, dtype=torch.int64, device="cpu")
    flagged = {word: torch.zeros(n, dtype=torch.int64, device="cpu") for word in _FLAGS}
    least = torch.full((n,), math.inf, dtype=torch.float64, device="cpu")
    numel = torch.zeros(n, dtype=torch.float64, device="cpu")
    for window in _windows(recorded, binned, n):
        read = _Window(run, kind, names, window)
        for name, value in read.cells.items():
            columns[name].append(_worst(value, binned))
            largest, place = torch.where(read.broken | ~value.isfinite(), _UNMEASURED, value).max(dim=0)
            if name == names[0]:
                at = torch.where(largest > top[name], window[place], at)
            top[name] = torch.maximum(top[name], largest)
        broken += read.broken.sum(dim=0)
        for word, flag in _FLAGS.items():
            # non-finite norms are flagged as exploding too; do not count them twice
            where = read.measured & ~read.broken if flag == Flag.EXPLODING else read.measured
            flagged[word] += ((read.flags & int(flag)) > 0).logical_and(where).sum(dim=0)
        least = torch.minimum(least, torch.where(read.measured, read.numel, math.inf).amin(dim=0))
        numel = torch.maximum(numel, read.numel.amax(dim=0))
    found = {name: torch.cat(parts) for name, parts in columns.items() if parts}
    found = {name: x for name, x in found.items() if name == names[0] or (x != _UNMEASURED).any()}
    words = torch.stack(list(flagged.values()), dim=1).tolist()
    summary = {
        "largest": {name: _largest(top[name], kind.schema[name]) for name in found},
        "numel": numel.to(torch.int64).tolist(),
        "at": [None if step < 0 else step for step in at.tolist()],
        "broken": broken.tolist(),
        "flags": [{word: k for word, k in zip(_FLAGS, counts, strict=True) if k} for counts in words],
    }
    if _has_rms(kind) and (least >= numel).all():
        found.pop("rms", None)  # the page computes it from the norm
    entries, codes = {}, {}
    for name, cells in found.items():
        style, key = kind.schema[name].style, f"{kind.name}-{name}"
        codes[key], low, high = _encode(cells, linear=style in {"fraction", "cosine"})
        if style == "cosine":
            low, high = 1.0, -1.0  # of a distance of 0 and 1, see `_Window`
        entries[name] = {"id": key, "low": low, "high": high, "linear": style in {"fraction", "cosine"}}
    return entries, codes, summary


def _has_rms(kind: Kind) -> bool:
    """Return whether the page draws a root mean square, and can compute it from the norm."""
    names = ("norm", "rms")
    return {*names} <= {*drawn_of(kind)} and all([kind.schema[name] == TENSORS[name] for name in names])


class _Window:
    """The values of a kind in some steps.

    Attributes:
        numel: ``(S, N) float64``, 0 where nothing was measured.
        measured, broken: ``(S, N) bool``, which tensors were measured, and which have a NaN or Inf.
        flags: ``(S, N) int32``.
        cells: by statistic, ``(S, N) float64``, with `_UNMEASURED`; a cosine as half of 1 - cosine, so that
            the worst is the largest.
    """

    def __init__(self, run: Run, kind: Kind, names: tuple[str, ...], window: Tensor) -> None:
        schema = kind.schema
        known = {name: x.per for name in names if not isinstance(x := schema[name], Column) and x.per}
        wanted = dict.fromkeys(["numel", *names, *known.values()])
        wanted |= dict.fromkeys(["norm"] * ("norm" in schema) + ["flags"] * bool(schema.flags))
        _, read = run.matrices(tuple(wanted), kind.name, first=int(window[0]), last=int(window[-1]))
        # NaN where nothing was measured
        self.numel = read["numel"].nan_to_num(nan=0.0)
        self.measured = self.numel > 0
        self.flags = read.get("flags", torch.zeros_like(self.numel)).nan_to_num(nan=0.0).to(torch.int32)
        norm = read.get("norm", torch.zeros_like(self.numel))
        self.broken = self.measured & ~norm.isfinite()
        self.cells = {}
        for name in names:
            value, style = read[name], schema[name].style
            if style == "cosine":
                # a code of 0 would be an exact 0
                value = ((1.0 - value) / 2.0).clamp(min=1e-9)
            elif name not in known:
                # a tensor that is not finite is so in every statistic of all its elements
                value = torch.where(self.broken, norm, value.abs())
            is_known = self.measured & (read[known[name]] > 0) if name in known else self.measured
            if style == "cosine":
                is_known = is_known & ~value.isnan()
            self.cells[name] = torch.where(is_known, value, _UNMEASURED)


def _windows(recorded: Tensor, binned: int, n: int) -> Iterator[Tensor]:
    """Yield the recorded steps in blocks, without splitting the steps of one column."""
    size = max(1, _WINDOW // max(n * binned, 1)) * binned
    for start in range(0, len(recorded), size):
        yield recorded[start : start + size]


def _worst(values: Tensor, binned: int) -> Tensor:
    """Return the maximum of every ``binned`` rows; NaN wins. ``(S, N) -> (columns, N)``."""
    if binned == 1:
        return values
    missing = -len(values) % binned
    padded = torch.cat([values, values.new_full((missing, values.shape[1]), _UNMEASURED)])
    return padded.view(-1, binned, values.shape[1]).amax(dim=1)


def _largest(values: Tensor, statistic: Column | Derived) -> list[float | None]:
    """Return the largest values, or the lowest cosines; None where nothing is known."""
    shown = 1.0 - 2.0 * values if statistic.style == "cosine" else values
    pairs = zip(values.tolist(), shown.tolist(), strict=True)
    return [None if x < 0 else float(f"{y:.6g}") for x, y in pairs]


def _encode(values: Tensor, *, linear: bool) -> tuple[str, float, float]:
    """Return deflated codes in base64, tensor by tensor, and the values of the lowest and highest code.

    ``values`` are ``(columns, N) float64``. Codes are linear between 0 and 1, or else in log10.
    """
    values = values.T.contiguous()
    is_value = (values > 0) & values.isfinite()
    scaled = values if linear else values.log10()
    low, high = 0.0, 1.0
    if not linear and is_value.any():
        low, high = float(scaled[is_value].amin()), float(scaled[is_value].amax())
        high = max(high, low + 1e-3)
    share = ((scaled - low) / (high - low)).clamp(0.0, 1.0)
    codes = SMALLEST + (share * (LARGEST - SMALLEST)).round().nan_to_num_(nan=0.0).to(torch.int32)
    codes = torch.where(is_value, codes, torch.where(values == 0, ZERO, 0))
    codes = torch.where(values.isnan(), NAN, torch.where(values == math.inf, INF, codes))
    # store high and low bytes apart: similar high bytes compress well
    return deflated(torch.stack([codes >> 8, codes & 255]).to(torch.uint8)), low, high


def deflated(values: Tensor) -> str:
    """Return uint8 values deflated, in base64."""
    raw = bytearray(values.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(values.flatten())
    return base64.b64encode(zlib.compress(raw, 6)).decode()
