"""What the report page holds of a run: plain values, and a matrix of codes for each kind and statistic.

Of each statistic the page has a row per tensor and a column per recorded step, or per few of them. A cell is
a code of 16 bits: 0 not measured, 1 exactly 0, up to 65533 a value, 65534 Inf, 65535 NaN. The larger
code is the worse, so that both here and in the page cells merge by the largest.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from gradiometer.schema import Flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from gradiometer.run import Run
    from gradiometer.steps import Kind

__all__ = ["Page", "page_of"]

MOST_COLUMNS: Final = 1250
MOST_CELLS: Final = 2_400_000  # of a statistic, in all kinds; 2.7 bytes each on the page, or less
MOST_POINTS: Final = 5000  # of a line
MOST_FINDINGS: Final = 1000
MOST_RANGES: Final = 1000
MOST_LETTERS: Final = 600  # of a message
_WINDOW: Final = 1_000_000  # cells that are read at once

ZERO, SMALLEST, LARGEST, INF, NAN = 1, 2, 65533, 65534, 65535
_UNMEASURED: Final = -1.0  # among values, which are not negative
_TIMES: Final = " \u00d7 "
_FLAGS: Final = {
    "NaN": Flag.NAN,
    "Inf": Flag.INF,
    "exploding": Flag.EXPLODING,
    "dead": Flag.DEAD,
    "vanishing": Flag.VANISHING,
}


class Page(NamedTuple):
    """What a page is made of.

    Attributes:
        values: plain values for JSON; no NaN among them.
        matrices: base64 of deflated codes, by the id that the values give them.
    """

    values: dict[str, Any]
    matrices: dict[str, str]


def page_of(run: Run) -> Page:
    """Return what the page of a run holds."""
    steps = run.steps
    step = _numbers(steps["step"])
    recorded = step[_numbers(steps["recorded"].cast("int8")) > 0]
    names, kinds = run.roster.names, run.roster.kinds
    most = max(16, min(MOST_COLUMNS, MOST_CELLS // max(len(names) * len(kinds), 1)))
    binned = max(1, math.ceil(len(recorded) / most))
    norm, loss = (_numbers(steps[name]) for name in ("total_norm", "loss"))
    bad = ~norm.isfinite() & _given(steps["total_norm"]) | ~loss.isfinite() & _given(steps["loss"])
    skipped = _numbers(steps["skipped"].cast("int8")) > 0
    findings = sorted(run.findings, key=lambda f: (-f.severity, f.first_step))
    values: dict[str, Any] = {
        "title": run.path.resolve().name,
        "names": names,
        "shapes": [
            f"{dtype} {_TIMES.join(map(str, shape)) or 'scalar'}"
            for dtype, shape in zip(run.roster.dtypes, run.roster.shapes, strict=True)
        ],
        "kinds": kinds,
        "thresholds": {
            name: _plain(getattr(run.thresholds, name)) for name in ("vanishing", "exploding", "dead")
        },
        "range": [int(step[0]), int(step[-1])] if len(step) else None,
        "lines": {"norm": _line(step, norm), "loss": _line(step, loss)},
        "nonfinite": _ranges(step, bad),
        "skipped": _ranges(step, skipped),
        "binned": binned,
        "columns": {"first": recorded[::binned].tolist(), "last": _lasts(recorded, binned).tolist()},
        "matrices": {},
        "summary": {},
        "findings": [
            {
                "rule": f.rule,
                "severity": str(f.severity),
                "first_step": f.first_step,
                "last_step": f.last_step,
                "kind": f.kind,
                "tensor": None if f.tensor is None else run.roster.index.get(f.tensor),
                "message": f.message[:MOST_LETTERS],
                "advice": f.advice[:MOST_LETTERS],
            }
            for f in findings[:MOST_FINDINGS]
        ],
        "more_findings": max(0, len(findings) - MOST_FINDINGS),
    }
    values |= _header(run, step, recorded, int(skipped.sum()))
    matrices: dict[str, str] = {}
    for kind in kinds:
        binned_values, values["summary"][kind] = _read(run, kind, recorded, binned)
        entries = values["matrices"][kind] = {}
        for statistic, cells in binned_values.items():
            name = f"{kind}-{statistic}"
            matrices[name], low, high = _encode(cells, linear=statistic == "zero_fraction")
            entries[statistic] = {
                "id": name,
                "low": low,
                "high": high,
                "linear": statistic == "zero_fraction",
            }
    return Page(values, matrices)


def _read(
    run: Run, kind: Kind, recorded: Tensor, binned: int
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Return the matrices of a kind and what to say of each tensor.

    A matrix is ``(columns, N) float64``, with `_UNMEASURED`.
    """
    n = len(run.roster.names)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("norm", "rms", "abs_max", "zero_fraction")}
    top = {name: torch.full((n,), _UNMEASURED, dtype=torch.float64) for name in columns}
    at = torch.full((n,), -1)
    broken = torch.zeros(n, dtype=torch.int64)
    flagged = {word: torch.zeros(n, dtype=torch.int64) for word in _FLAGS}
    least, numel = torch.full((n,), math.inf, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for window in _windows(recorded, binned, n):
        cells, flags, size = _cells(run, kind, window)
        measured, finite = cells["norm"] != _UNMEASURED, cells["norm"].isfinite()
        for name, value in cells.items():
            columns[name].append(_worst(value, binned))
            largest, place = torch.where(finite, value, _UNMEASURED).max(dim=0)
            if name == "norm":
                at = torch.where(largest > top[name], window[place], at)
            top[name] = torch.maximum(top[name], largest)
        broken += (measured & ~finite).sum(dim=0)
        for word, flag in _FLAGS.items():
            # a norm that is not finite is exploding too: that goes without saying
            where = finite if flag == Flag.EXPLODING else measured
            flagged[word] += ((flags & int(flag)) > 0).logical_and(where).sum(dim=0)
        least = torch.minimum(least, torch.where(measured, size, math.inf).amin(dim=0))
        numel = torch.maximum(numel, size.amax(dim=0))
    found = {name: torch.cat(parts) for name, parts in columns.items() if parts}
    if (least >= numel).all():
        found.pop("rms", None)  # the page has it from the norm
    words = torch.stack(list(flagged.values()), dim=1).tolist()
    return found, {
        **{name: _largest(value) for name, value in top.items()},
        "numel": numel.to(torch.int64).tolist(),
        "at": [None if step < 0 else step for step in at.tolist()],
        "broken": broken.tolist(),
        "flags": [{word: k for word, k in zip(_FLAGS, counts, strict=True) if k} for counts in words],
    }


def _windows(recorded: Tensor, binned: int, n: int) -> Iterator[Tensor]:
    """Yield the recorded steps, some at a time, without parting what shares a column."""
    size = max(1, _WINDOW // max(n * binned, 1)) * binned
    for start in range(0, len(recorded), size):
        yield recorded[start : start + size]


def _cells(run: Run, kind: Kind, window: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the values, flags and elements of some steps, each ``(S, N)``."""
    # one reading for all statistics: run.matrix would read, and place, anew for each
    read = _place(run, kind, window, ("numel", "norm", "abs_max", "n_zero", "flags"))
    size, norm = read["numel"], read["norm"]
    measured, some = size > 0, size.clamp(min=1.0)
    values = {
        "norm": norm,
        "rms": norm / some.sqrt(),
        "abs_max": read["abs_max"],
        "zero_fraction": read["n_zero"] / some,
    }
    # what is not finite is so in every statistic
    broken = ~norm.isfinite()
    cells = {
        name: torch.where(measured, torch.where(broken, norm, value), _UNMEASURED)
        for name, value in values.items()
    }
    return cells, read["flags"].to(torch.int32), size


def _place(run: Run, kind: Kind, window: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """Return columns of the tensors of some steps, each ``(S, N) float64``; 0 where nothing was measured."""
    names = run.roster.names
    read = {name: torch.zeros(len(window), len(names), dtype=torch.float64) for name in columns}
    table = run.tensors(
        columns=["step", "name", *columns], kind=kind, first=int(window[0]), last=int(window[-1])
    )
    for batch in table.to_batches():
        step = from_dlpack(batch["step"])
        index = [run.roster.index.get(name, -1) for name in batch["name"].dictionary.to_pylist()]
        name = torch.tensor(index)[from_dlpack(batch["name"].indices)]
        row = torch.searchsorted(window, step).clamp(max=len(window) - 1)
        known = (window[row] == step) & (name >= 0)
        place = (row * len(names) + name)[known]
        # a run of tensors that always have gradients fills its matrix in order, which copies sooner
        is_run = len(place) == len(known) > 0 and bool((place.diff() == 1).all())
        where = slice(int(place[0]), int(place[-1]) + 1) if is_run else place
        for column, out in read.items():
            values = from_dlpack(batch[column])
            out.view(-1)[where] = (values if is_run else values[known]).to(torch.float64)
    return read


def _worst(values: Tensor, binned: int) -> Tensor:
    """Return the largest of every few rows, NaN before all. ``(S, N) -> (columns, N)``."""
    if binned == 1:
        return values
    missing = -len(values) % binned
    padded = torch.cat([values, values.new_full((missing, values.shape[1]), _UNMEASURED)])
    return padded.view(-1, binned, values.shape[1]).amax(dim=1)


def _encode(values: Tensor, *, linear: bool) -> tuple[str, float, float]:
    """Return codes, tensor by tensor, deflated and in base64, and what the outermost values stand for.

    Args:
        values: ``(columns, N) float64``.
        linear: between 0 and 1; otherwise the codes are even in the logarithm to base 10.
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
    # high bytes and low bytes apart: the high ones are much alike
    planes = torch.stack([codes >> 8, codes & 255]).to(torch.uint8)
    raw = bytearray(planes.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(planes.flatten())
    return base64.b64encode(zlib.compress(raw, 6)).decode(), low, high


def _numbers(column: Any) -> Tensor:
    """Return an Arrow column of numbers as a tensor; NaN where it is null."""
    return torch.tensor([math.nan if x is None else x for x in column.to_pylist()])


def _given(column: Any) -> Tensor:
    return torch.tensor(column.is_valid().to_pylist(), dtype=torch.bool)


def _lasts(recorded: Tensor, binned: int) -> Tensor:
    if not len(recorded):
        return recorded
    ends = torch.arange(binned - 1, len(recorded) + binned - 1, binned).clamp(max=len(recorded) - 1)
    return recorded[ends]


def _line(step: Tensor, values: Tensor) -> dict[str, list[float]]:
    """Return the points of a line: the finite ones, or where they are too many the extremes of every few."""
    keep = values.isfinite().nonzero().flatten()
    if len(keep) > MOST_POINTS:
        size = math.ceil(len(keep) / (MOST_POINTS // 2))
        places = torch.cat([keep, keep[-1:].expand(-len(keep) % size)]).view(-1, size)
        of = values[places]
        keep = torch.cat(
            [places.gather(1, of.argmin(1, keepdim=True)), places.gather(1, of.argmax(1, keepdim=True))]
        )
        keep = keep.flatten().unique()
    return {"x": step[keep].tolist(), "y": [float(f"{y:.6g}") for y in values[keep].tolist()]}


def _ranges(step: Tensor, where: Tensor) -> list[list[int]]:
    """Return the first and last step of every run of true; close ones are joined if they are too many."""
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


def _plain(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _header(run: Run, step: Tensor, recorded: Tensor, skipped: int) -> dict[str, Any]:
    """Return what the head of the page says."""
    info, blackbox, n = run.info, run.blackbox, len(run.roster.names)
    attempts = info.get("attempts", [])
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(info.get("created", 0)))
    elements = sum(math.prod(shape) for shape in run.roster.shapes)
    facts = [
        ("Model", str(info.get("model", ""))),
        ("Tensors", f"{n:,}, {elements:,} elements, {', '.join(run.roster.kinds)}"),
        ("Steps", _steps(step, recorded)),
        ("Started", created),
        ("Device", str(info.get("device", ""))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())),
    ]
    if skipped:
        facts.insert(3, ("Skipped updates", f"{skipped:,}"))
    if len(attempts) > 1:
        facts.insert(3, ("Attempts", f"{len(attempts)}: the run was resumed"))
    lost = sum(attempt.get("lost", 0) for attempt in attempts)
    if lost:
        facts.insert(3, ("Steps lost", f"{lost:,}, which a sink was too slow for"))
    state = {"text": "✓ closed", "mood": "good"}
    if blackbox:
        state = {"text": f"✖ {blackbox.get('reason', 'fault')}", "mood": "broken"}
    elif not info.get("closed"):
        state = {"text": "◌ not closed: it still runs, or was killed", "mood": "open"}
    starts = [attempt.get("first_step", 0) for attempt in attempts]
    return {"facts": facts, "state": state, "fault": _fault(blackbox), "attempts": starts}


def _steps(step: Tensor, recorded: Tensor) -> str:
    if not len(step):
        return "none yet"
    text = f"{int(step[0]):,} to {int(step[-1]):,}" if len(step) > 1 else f"one, number {int(step[0]):,}"
    return text if len(recorded) == len(step) else f"{text}, {len(recorded):,} of {len(step):,} recorded"


def _fault(blackbox: dict[str, Any] | None) -> Sequence[str] | None:
    """Return the lines that say what ended the run."""
    if not blackbox:
        return None
    lines = [f"Black box: {blackbox.get('reason', 'fault')} at step {blackbox.get('step', '?')}"]
    if blackbox.get("first_nonfinite"):
        lines.append(f"First non-finite: {blackbox['first_nonfinite']}")
    if blackbox.get("message"):
        lines.append(str(blackbox["message"])[:2000])
    return lines
