"""The data of the report page: plain values, and a matrix of codes for each kind and statistic.

A matrix has a row per tensor and a column per recorded step, or per group of consecutive ones. A cell is a
16-bit code: 0 not measured, 1 exactly 0, 2 to 65533 a value, 65534 Inf, 65535 NaN. A larger code is worse, so
merged cells take the maximum, here and in the page.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.columns import Flag, derived
from gradiometer.rules import headlines
from gradiometer.runs import scalars_of
from gradiometer.web.exponents import exponents_of
from gradiometer.web.head import head_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gradiometer.recorder import Kind
    from gradiometer.runs import Run

__all__ = ["Page", "page_of"]

MOST_COLUMNS: Final = 1250
MOST_CELLS: Final = 2_400_000  # per statistic, over all kinds; at most 2.7 bytes each on the page
MOST_SCALARS: Final = 100
MOST_POINTS: Final = 5000  # per line
ALL_POINTS: Final = 200_000  # of all lines
MOST_FINDINGS: Final = 1000
MOST_RANGES: Final = 1000
MOST_LETTERS: Final = 600  # per message
_WINDOW: Final = 1_000_000  # cells that are read at once

ZERO, SMALLEST, LARGEST, INF, NAN = 1, 2, 65533, 65534, 65535
_UNMEASURED: Final = -1.0  # marks a missing value; values are not negative
_LINEAR: Final = frozenset({"zero_fraction", "cosine", "stuck"})  # between 0 and 1
_TIMES: Final = " \u00d7 "
_FIRST: Final = {"loss": 0, "lr": 1}
_FLAGS: Final = {
    "NaN": Flag.NAN,
    "Inf": Flag.INF,
    "exploding": Flag.EXPLODING,
    "dead": Flag.DEAD,
    "vanishing": Flag.VANISHING,
}


class Page(NamedTuple):
    """The data of a page.

    Attributes:
        values: plain values for JSON, without NaN.
        matrices: deflated codes in base64, by the id that ``values`` gives them.
    """

    values: dict[str, Any]
    matrices: dict[str, str]


def page_of(run: Run) -> Page:
    """Return the data of a run's page."""
    steps = run.steps
    step = torch.tensor(steps["step"].to_pylist(), dtype=torch.int64, device="cpu")
    recorded = step[_truth(steps["recorded"])]
    names, kinds = run.roster.names, run.roster.kinds
    # updates have more statistics than other kinds
    shares = len(kinds) + ("updates" in kinds)
    most = max(16, min(MOST_COLUMNS, MOST_CELLS // max(len(names) * shares, 1)))
    binned = max(1, math.ceil(len(recorded) / most))
    norm, has_norm = _numbers(steps["total_norm"]), _truth(steps["total_norm"].is_valid())
    scalars = _scalars(run)
    loss, has_loss = scalars.get("loss", (norm, torch.zeros_like(has_norm)))
    bad_norm, bad_loss = has_norm & ~norm.isfinite(), has_loss & ~loss.isfinite()
    drawn = dict(list(scalars.items())[:MOST_SCALARS])
    for name in ("update_ratio", "stuck_fraction"):
        if steps[name].null_count < len(steps):
            drawn[name.replace("_", " ")] = _numbers(steps[name]), _truth(steps[name].is_valid())
    most = min(MOST_POINTS, ALL_POINTS // (len(drawn) + 1))
    skipped = _truth(steps["skipped"])
    found, more_findings = _findings(run)
    values: dict[str, Any] = {
        "title": run.path.resolve().name,
        "names": names,
        "shapes": [
            f"{dtype} {_TIMES.join(map(str, shape)) or 'scalar'}" if dtype else "activation"
            for dtype, shape in zip(run.roster.dtypes, run.roster.shapes, strict=True)
        ],
        "is_tap": run.roster.is_tap,
        "kinds": kinds,
        "thresholds": {
            # null stands for infinity, which JSON lacks
            name: x if math.isfinite(x := getattr(run.thresholds, name)) else None
            for name in ("vanishing", "exploding", "dead")
        },
        "range": [int(step[0]), int(step[-1])] if len(step) else None,
        "norm": _line(step, norm, bad_norm, most),
        "scalars": [
            {"name": name, **_line(step, value, given & ~value.isfinite(), most)}
            for name, (value, given) in drawn.items()
        ],
        "more_scalars": max(0, len(scalars) - MOST_SCALARS),
        "nonfinite": _ranges(step, bad_norm | bad_loss),
        "skipped": _ranges(step, skipped),
        "binned": binned,
        "columns": {"first": recorded[::binned].tolist(), "last": _lasts(recorded, binned).tolist()},
        "matrices": {},
        "summary": {},
        "findings": found,
        "more_findings": more_findings,
    }
    values |= head_of(run, step, recorded, loss[has_loss], int(skipped.sum()))
    matrices: dict[str, str] = {}
    for kind in kinds:
        binned_values, values["summary"][kind] = _read(run, kind, recorded, binned)
        if kind == "updates":
            binned_values |= _of_updates(run, recorded, binned)
        entries = values["matrices"][kind] = {}
        for statistic, cells in binned_values.items():
            name, linear = f"{kind}-{statistic}", statistic in _LINEAR
            matrices[name], low, high = _encode(cells, linear=linear)
            if statistic == "cosine":
                low, high = 1.0, -1.0  # of 0 and 1 in `_of_updates`
            entries[statistic] = {"id": name, "low": low, "high": high, "linear": linear}
    values["exponents"], of_exponents = exponents_of(run)
    return Page(values, matrices | of_exponents)


def _findings(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Return the list of findings, and the number that were left out.

    Each headline's first finding has its message; the headline's other findings, and those that it explains,
    follow it, with its place in the list as ``under``.
    """
    kept: list[dict[str, Any]] = []
    for headline in headlines(run.findings):
        place = len(kept)
        for f in (*headline.findings, *headline.explained):
            is_first = len(kept) == place
            kept.append(
                {
                    "rule": f.rule,
                    "severity": str(headline.severity if is_first else f.severity),
                    "first_step": f.first_step,
                    "last_step": f.last_step,
                    "kind": f.kind,
                    "tensor": None if f.tensor is None else run.roster.index.get(f.tensor),
                    "message": (headline.message if is_first else f.message)[:MOST_LETTERS],
                    "advice": f.advice[:MOST_LETTERS],
                    "under": None if is_first else place,
                }
            )
    return kept[:MOST_FINDINGS], max(0, len(kept) - MOST_FINDINGS)


def _read(
    run: Run, kind: Kind, recorded: Tensor, binned: int
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Return the matrices of a kind, and a summary of each tensor.

    A matrix is ``(columns, N) float64``, with `_UNMEASURED`.
    """
    n = len(run.roster.names)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("norm", "rms", "abs_max", "zero_fraction")}
    top = {name: torch.full((n,), _UNMEASURED, dtype=torch.float64, device="cpu") for name in columns}
    at = torch.full((n,), -1, device="cpu")
    broken = torch.zeros(n, dtype=torch.int64, device="cpu")
    flagged = {word: torch.zeros(n, dtype=torch.int64, device="cpu") for word in _FLAGS}
    least = torch.full((n,), math.inf, dtype=torch.float64, device="cpu")
    numel = torch.zeros(n, dtype=torch.float64, device="cpu")
    for window in _windows(recorded, binned, n):
        cells, flags, size = _cells(run, kind, window)
        measured, finite = cells["norm"] != _UNMEASURED, cells["norm"].isfinite()
        for name, value in cells.items():
            columns[name].append(_worst(value, binned))
            largest, place = torch.where(finite & value.isfinite(), value, _UNMEASURED).max(dim=0)
            if name == "norm":
                at = torch.where(largest > top[name], window[place], at)
            top[name] = torch.maximum(top[name], largest)
        broken += (measured & ~finite).sum(dim=0)
        for word, flag in _FLAGS.items():
            # non-finite norms are flagged as exploding too; do not count them twice
            where = finite if flag == Flag.EXPLODING else measured
            flagged[word] += ((flags & int(flag)) > 0).logical_and(where).sum(dim=0)
        least = torch.minimum(least, torch.where(measured, size, math.inf).amin(dim=0))
        numel = torch.maximum(numel, size.amax(dim=0))
    found = {name: torch.cat(parts) for name, parts in columns.items() if parts}
    if (least >= numel).all():
        found.pop("rms", None)  # the page computes it from the norm
    words = torch.stack(list(flagged.values()), dim=1).tolist()
    return found, {
        **{name: _largest(value) for name, value in top.items()},
        "numel": numel.to(torch.int64).tolist(),
        "at": [None if step < 0 else step for step in at.tolist()],
        "broken": broken.tolist(),
        "flags": [{word: k for word, k in zip(_FLAGS, counts, strict=True) if k} for counts in words],
    }


def _of_updates(run: Run, recorded: Tensor, binned: int) -> dict[str, Tensor]:
    """Return the statistics that only updates have, those that are known; ``(columns, N) float64`` each.

    ``ratio``: of the update's norm to that of the weight before it. ``cosine``: its distance from 1, as half
    of 1 - cosine, so that the worst is the largest. ``stuck``: the share of stuck elements.
    """
    columns: dict[str, list[Tensor]] = {"ratio": [], "cosine": [], "stuck": []}
    names = ("n_nonfinite", "sumsq_b", "n_nonzero_g", "update_ratio", "descent_cosine", "stuck_fraction")
    for window in _windows(recorded, binned, len(run.roster.names)):
        _, read = run.matrices(names, "updates", first=int(window[0]), last=int(window[-1]))
        # NaN where nothing was measured, and in runs of earlier releases
        known = read["sumsq_b"] >= 0
        ratio = torch.where(read["n_nonfinite"] > 0, torch.nan, read["update_ratio"])
        # a code of 0 would be an exact 0
        cosine = ((1.0 - read["descent_cosine"]) / 2.0).clamp(min=1e-9)
        has_grads = read["n_nonzero_g"] > 0
        for name, value, where in (
            ("ratio", ratio, known),
            ("cosine", cosine, has_grads & ~cosine.isnan()),
            ("stuck", read["stuck_fraction"], has_grads),
        ):
            columns[name].append(_worst(torch.where(where, value, _UNMEASURED), binned))
    found = {name: torch.cat(parts) for name, parts in columns.items() if parts}
    found = {name: cells for name, cells in found.items() if (cells != _UNMEASURED).any()}
    if "ratio" not in found and "weights" in run.roster.kinds:
        found["ratio"] = _ratios(run, recorded, binned)
    return found


def _ratios(run: Run, recorded: Tensor, binned: int) -> Tensor:
    """Return each update's norm divided by its weight's, ``(columns, N) float64``, with `_UNMEASURED`."""
    columns = []
    for window in _windows(recorded, binned, len(run.roster.names)):
        update, weight = (_norms(run, kind, window) for kind in ("updates", "weights"))
        # of a weight that is 0, the ratio is undefined; if either is not finite, the ratio is not
        known = (update != _UNMEASURED) & (weight != _UNMEASURED) & (weight != 0)
        ratio = torch.where(weight.isfinite() & update.isfinite(), update / weight, update + weight)
        columns.append(_worst(torch.where(known, ratio, _UNMEASURED), binned))
    none = torch.zeros((0, len(run.roster.names)), dtype=torch.float64, device="cpu")
    return torch.cat([none, *columns])


def _norms(run: Run, kind: Kind, window: Tensor) -> Tensor:
    """Return the norms of some steps, ``(S, N) float64``, with `_UNMEASURED`."""
    _, read = run.matrices(("numel", "norm"), kind, first=int(window[0]), last=int(window[-1]))
    # NaN where nothing was measured, and NaN > 0 is false
    return torch.where(read["numel"] > 0, read["norm"], _UNMEASURED)


def _windows(recorded: Tensor, binned: int, n: int) -> Iterator[Tensor]:
    """Yield the recorded steps in blocks, without splitting the steps of one column."""
    size = max(1, _WINDOW // max(n * binned, 1)) * binned
    for start in range(0, len(recorded), size):
        yield recorded[start : start + size]


def _cells(run: Run, kind: Kind, window: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the values, flags and element counts of some steps, each ``(S, N)``."""
    names = ("numel", "norm", "abs_max", "n_zero", "flags")
    _, read = run.matrices(names, kind, first=int(window[0]), last=int(window[-1]))
    # NaN where nothing was measured
    size, norm = read["numel"].nan_to_num_(nan=0.0), read["norm"]
    measured, some = size > 0, size.clamp(min=1.0)
    values = {
        "norm": norm,
        "rms": norm / derived.sqrt(some),
        "abs_max": read["abs_max"],
        "zero_fraction": read["n_zero"] / some,
    }
    # a tensor that is not finite is non-finite in every statistic
    broken = ~norm.isfinite()
    cells = {
        name: torch.where(measured, torch.where(broken, norm, value), _UNMEASURED)
        for name, value in values.items()
    }
    return cells, read["flags"].nan_to_num_(nan=0.0).to(torch.int32), size


def _worst(values: Tensor, binned: int) -> Tensor:
    """Return the maximum of every ``binned`` rows; NaN wins. ``(S, N) -> (columns, N)``."""
    if binned == 1:
        return values
    missing = -len(values) % binned
    padded = torch.cat([values, values.new_full((missing, values.shape[1]), _UNMEASURED)])
    return padded.view(-1, binned, values.shape[1]).amax(dim=1)


def _encode(values: Tensor, *, linear: bool) -> tuple[str, float, float]:
    """Return deflated codes in base64, tensor by tensor, and the values of the lowest and highest code.

    Args:
        values: ``(columns, N) float64``.
        linear: whether codes are linear between 0 and 1; otherwise they are linear in log10.
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
    planes = torch.stack([codes >> 8, codes & 255]).to(torch.uint8)
    raw = bytearray(planes.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(planes.flatten())
    return base64.b64encode(zlib.compress(raw, 6)).decode(), low, high


def _numbers(column: Any) -> Tensor:
    """Return an Arrow column of numbers as ``(S,) float64``; NaN where it is null."""
    return torch.tensor(
        [math.nan if x is None else x for x in column.to_pylist()], dtype=torch.float64, device="cpu"
    )


def _truth(column: Any) -> Tensor:
    return torch.tensor(column.to_pylist(), dtype=torch.bool, device="cpu")


def _lasts(recorded: Tensor, binned: int) -> Tensor:
    if not len(recorded):
        return recorded
    ends = torch.arange(binned - 1, len(recorded) + binned - 1, binned, device="cpu").clamp(
        max=len(recorded) - 1
    )
    return recorded[ends]


def _scalars(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each scalar by name, loss and lr first: its values, ``(S,) float64``, and where it was given."""
    rows = scalars_of(run.steps)
    # sorting is stable: the others keep the order in which they were first passed
    names = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: _FIRST.get(name, 2))
    found = {}
    for name in names:
        values = [row.get(name) for row in rows]
        given = torch.tensor([x is not None for x in values], dtype=torch.bool, device="cpu")
        numbers = [math.nan if x is None else x for x in values]
        found[name] = torch.tensor(numbers, dtype=torch.float64, device="cpu"), given
    return found


def _line(step: Tensor, values: Tensor, bad: Tensor, most: int = MOST_POINTS) -> dict[str, list[Any]]:
    """Return the points of a line: all finite ones, or the minimum and maximum of each group if too many.

    Args:
        step: step numbers, ``(S,) int64``.
        values: ``(S,) float64``, NaN where none was given.
        bad: which values were given and are not finite. The first of consecutive ones becomes a point without
            a value, so that the line has a gap.
        most: the largest number of points.
    """
    keep = values.isfinite().nonzero().flatten()
    if not len(keep):
        return {"x": [], "y": []}
    if len(keep) > most:
        size = math.ceil(len(keep) / (most // 2))
        places = torch.cat([keep, keep[-1:].expand(-len(keep) % size)]).view(-1, size)
        of = values[places]
        keep = torch.cat(
            [places.gather(1, of.argmin(1, keepdim=True)), places.gather(1, of.argmax(1, keepdim=True))]
        )
    gaps = torch.tensor(
        [first for first, _ in _ranges(torch.arange(len(bad), device="cpu"), bad)],
        dtype=torch.int64,
        device="cpu",
    )
    keep = torch.cat([keep.flatten(), gaps]).unique()
    points = [float(f"{y:.6g}") if math.isfinite(y) else None for y in values[keep].tolist()]
    return {"x": step[keep].tolist(), "y": points}


def _ranges(step: Tensor, where: Tensor) -> list[list[int]]:
    """Return the first and last step of each range of true; join close ranges if there are too many."""
    places = where.nonzero().flatten()
    gap = 1
    while len(places):
        breaks = (places.diff() > gap).nonzero().flatten()
        if len(breaks) < MOST_RANGES:
            firsts = torch.cat([places[:1], places[breaks + 1]])
            lasts = torch.cat([places[breaks], places[-1:]])
            return torch.stack([step[firsts], step[lasts]], dim=1).tolist()
        gap *= 2
    return []


def _largest(values: Tensor) -> list[float | None]:
    return [None if x < 0 else float(f"{x:.6g}") for x in values.tolist()]
