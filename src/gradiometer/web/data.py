"""The data of the report page: plain values, and the matrices of its heat maps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.columns import TENSORS
from gradiometer.recorder import OPTION
from gradiometer.rules import headlines
from gradiometer.runs import CLIP_FACTOR, CLIP_LIMIT, scalars_of
from gradiometer.web.exponents import exponents_of
from gradiometer.web.head import head_of
from gradiometer.web.matrices import describe, drawn_of, read_kind, steps_per_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.runs import Run

MOST_SCALARS: Final = 100
MOST_POINTS: Final = 5000  # per line
ALL_POINTS: Final = 200_000  # of all lines
MOST_FINDINGS: Final = 1000
MOST_RANGES: Final = 1000
MOST_LETTERS: Final = 600  # per message
_TIMES: Final = " \u00d7 "
_FIRST: Final = {"loss": 0, "lr": 1}


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
    catalog = run.catalog
    kinds = [kind for kind in catalog.kinds.values() if drawn_of(kind)]
    if any(kind.of == "states" for kind in kinds):
        # a state that an optimizer of an unknown class lacks
        seen = {name for names in steps["kinds"].to_pylist() for name in names}
        kinds = [kind for kind in kinds if kind.of != "states" or kind.name in seen]
    binned = steps_per_column(run, kinds, len(recorded))
    norm, has_norm = _numbers(steps["total_norm"].to_pylist())
    scalars = _scalars(run)
    loss, has_loss = scalars.get("loss", (norm, torch.zeros_like(has_norm)))
    bad_norm, bad_loss = has_norm & ~norm.isfinite(), has_loss & ~loss.isfinite()
    limit, factor = (
        scalars.get(name, (norm, torch.zeros_like(has_norm))) for name in (CLIP_LIMIT, CLIP_FACTOR)
    )
    for name in [name for name in scalars if name.startswith(OPTION)]:
        value, given = scalars[name]
        # constants
        if len(value[given].unique()) == 1:
            scalars.pop(name)
    # the limit is drawn with the norm
    scalars.pop(CLIP_LIMIT, None)
    drawn = dict(list(scalars.items())[:MOST_SCALARS])
    # the totals of other kinds than gradients
    own = [name for kind in kinds for name in kind.schema.names if name not in TENSORS]
    for name in dict.fromkeys(own):
        if name in steps.column_names and steps[name].null_count < len(steps):
            drawn[name.replace("_", " ")] = _numbers(steps[name].to_pylist())
    most = min(MOST_POINTS, ALL_POINTS // (len(drawn) + 2))
    skipped = _truth(steps["skipped"])
    found, more_findings = _findings(run)
    values: dict[str, Any] = {
        "title": run.path.resolve().name,
        "rows": {
            "parameter": {
                "names": catalog.names,
                "shapes": [
                    f"{dtype} {_TIMES.join(map(str, shape)) or 'scalar'}"
                    for dtype, shape in zip(catalog.parameters.dtypes, catalog.parameters.shapes, strict=True)
                ],
            },
            "tap": {"names": catalog.taps.names, "shapes": ["activation"] * len(catalog.taps)},
        },
        "kinds": [],
        "thresholds": {
            # null stands for infinity, which JSON lacks
            name: x if math.isfinite(x := getattr(run.thresholds, name)) else None
            for name in ("vanishing", "exploding", "dead")
        },
        "range": [int(step[0]), int(step[-1])] if len(step) else None,
        "norm": line_of(step, norm, bad_norm, most),
        # a limit of infinity clips nothing, and is not drawn
        "limit": line_of(step, limit[0].where(limit[1], torch.nan), torch.zeros_like(has_norm), most),
        "clipped": [int((factor[0][factor[1]] < 1).sum()), int(factor[1].sum())] if factor[1].any() else None,
        "scalars": [
            {"name": name, **line_of(step, value, given & ~value.isfinite(), most)}
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
        entries, codes, summary = read_kind(run, kind, recorded, binned)
        values["kinds"].append(describe(kind, summary["largest"] or drawn_of(kind)))
        values["matrices"][kind.name], values["summary"][kind.name] = entries, summary
        matrices |= codes
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
                    "tensor": None if f.tensor is None else _row_of(run, f.kind, f.tensor),
                    "message": (headline.message if is_first else f.message)[:MOST_LETTERS],
                    "advice": f.advice[:MOST_LETTERS],
                    "under": None if is_first else place,
                }
            )
    return kept[:MOST_FINDINGS], max(0, len(kept) - MOST_FINDINGS)


def _row_of(run: Run, kind: str | None, tensor: str) -> int | None:
    catalog = run.catalog
    rows = catalog.parameters if kind is None or kind not in catalog.kinds else catalog.rows(kind)
    return rows.index.get(tensor)


def _numbers(values: Sequence[float | None]) -> tuple[Tensor, Tensor]:
    """Return numbers as ``(S,) float64``, NaN where there is none, and where there is one."""
    found = [math.nan if x is None else x for x in values]
    given = torch.tensor([x is not None for x in values], dtype=torch.bool, device="cpu")
    return torch.tensor(found, dtype=torch.float64, device="cpu"), given


def _truth(column: Any) -> Tensor:
    return torch.tensor(column.to_pylist(), dtype=torch.bool, device="cpu")


def _lasts(recorded: Tensor, binned: int) -> Tensor:
    if not len(recorded):
        return recorded
    ends = torch.arange(binned - 1, len(recorded) + binned - 1, binned, device="cpu")
    return recorded[ends.clamp(max=len(recorded) - 1)]


def _scalars(run: Run) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each scalar by name, loss and lr first: its values, ``(S,) float64``, and where it was given."""
    rows = scalars_of(run.steps)
    # sorting is stable: the others keep the order in which they were first passed
    names = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: _FIRST.get(name, 2))
    return {name: _numbers([row.get(name) for row in rows]) for name in names}


def line_of(step: Tensor, values: Tensor, bad: Tensor, most: int = MOST_POINTS) -> dict[str, list[Any]]:
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
        ends = torch.stack([of.argmin(1), of.argmax(1)], dim=1)
        keep = places.gather(1, ends)
    starts = [first for first, _ in _ranges(torch.arange(len(bad), device="cpu"), bad)]
    gaps = torch.tensor(starts, dtype=torch.int64, device="cpu")
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
