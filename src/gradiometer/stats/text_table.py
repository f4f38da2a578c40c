"""A report as a text table."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.stats.module_reports import ModuleReports
    from gradiometer.stats.report import Report
    from gradiometer.stats.tensor_report import TensorReport

__all__ = ["headline", "render", "render_modules"]

_HEADER: Final = ("name", "elements", "norm", "rms", "abs max", "zero %", "NaN", "±Inf", "flags")
_MODULES_HEADER: Final = (
    "module",
    "tensors",
    "elements",
    "norm",
    "min norm",
    "max norm",
    "rms",
    "mean",
    "std",
    "zero %",
    "flags",
)
_LOCAL: Final = "this rank's shards only (reduce() merges them)"
_NOTHING: Final = "nothing measured: no tensors"
_WHEN: Final = f"{_NOTHING} (gradients are there after backward() and before zero_grad())"
_LONGEST_NAME: Final = 44
# that are named in one cell
_RANKS: Final = 3


def headline(report: Report) -> str:
    """Return what matters most in one line."""
    if not report.measured:
        return _NOTHING
    # rounded down: 1.00 says that nothing is flagged
    health = math.floor(100 * report.health) / 100
    found = [f"{len(names)} {what}" for what, names in _findings(report).items() if names]
    where = " of all ranks" if report.is_reduced else f", {_LOCAL}" if report.is_local else ""
    return (
        f"{len(report)} {'tensor' if len(report) == 1 else 'tensors'}{where}, "
        f"{_count(report.total.numel)} elements, total norm {_number(report.total_norm)}, "
        f"health {health:.2f}, "
        + ("step skipped: " if report.skipped else "")
        + (", ".join(found) if found else "no flags")
    )


def render(report: Report, max_rows: int | None) -> str:
    """Return the headline and a row per tensor, worst first, at most ``max_rows`` of them, and a total.

    Where ranks have what is not finite, a column tells which: the first rank of a tensor, all of the total.
    """
    if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 0):
        msg = f"max_rows must be a whole number, 0 or more, or None for all; got {max_rows!r}"
        raise ValueError(msg)
    if not report.measured:
        return _WHEN
    rows = report.worst_first()
    shown = rows if max_rows is None else rows[:max_rows]
    rest = rows[len(shown) :]
    flagged = sum(bool(row.flags) for row in rows)
    # the flags of the merged row would hold a whole model against one tensor's thresholds
    total = (*_cells(report.total)[:-1], f"{flagged} flagged" if flagged else "")
    body = [_cells(row) for row in shown]
    short = _shorten([row[0] for row in body])
    cells = [_HEADER, *((name, *row[1:]) for name, row in zip(short, body, strict=True)), total]
    if report.ranks:
        at = [str(report.ranks.get(row.name, "-")) for row in shown]
        cells = _with_ranks(cells, [*at, _ranks(report)])
    lines, rule = _aligned(cells)
    more = [_rest(rest)] if rest else []
    return "\n".join([headline(report), rule, lines[0], rule, *lines[1:-1], *more, rule, lines[-1]])


def render_modules(reports: ModuleReports) -> str:
    """Return a row per module, in the order of the model."""
    if not reports:
        return _WHEN
    body = [_module_cells(module, report) for module, report in reports.items()]
    short = _shorten([row[0] for row in body])
    cells = [_MODULES_HEADER, *((name, *row[1:]) for name, row in zip(short, body, strict=True))]
    at = [_ranks(report) for report in reports.values()]
    if any(report.ranks for report in reports.values()):
        cells = _with_ranks(cells, at)
    lines, rule = _aligned(cells)
    local = [_LOCAL] if any(report.is_local for report in reports.values()) else []
    return "\n".join([*local, lines[0], rule, *lines[1:]])


def _with_ranks(cells: Sequence[tuple[str, ...]], at: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the cells with a column for the ranks before that of the flags."""
    return [(*row[:-1], rank, row[-1]) for row, rank in zip(cells, ["rank", *at], strict=True)]


def _ranks(report: Report) -> str:
    found = sorted(set(report.ranks.values()))
    more = "…" if len(found) > _RANKS else ""
    return ", ".join(map(str, found[:_RANKS])) + more or "-"


def _aligned(cells: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    widths = [max(_width(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [_line(row, widths) for row in cells], "─" * (sum(widths) + 2 * (len(widths) - 1))


def _findings(report: Report) -> dict[str, list[str]]:
    return {
        "with NaN": report.nan,
        "with Inf": report.inf,
        "exploding": report.exploding,
        "dead": report.dead,
        "vanishing": report.vanishing,
    }


def _module_cells(module: str, report: Report) -> tuple[str, ...]:
    total = report.total
    return (
        _printable(module) or "(root)",
        _count(len(report)),
        _count(total.numel),
        # a digit fewer: there are many columns
        *(_number(x, digits=2) for x in (total.norm, report.min_norm, report.max_norm)),
        *(_of_finite(total, x, digits=2) for x in (total.rms, total.mean, total.std)),
        _percent(report.zero_fraction),
        ", ".join(f"{len(names)} {what}" for what, names in _findings(report).items() if names),
    )


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)[1:-1]


def _cells(row: TensorReport) -> tuple[str, ...]:
    return (
        _printable(row.name),
        _count(row.numel),
        _number(row.norm),
        _of_finite(row, row.rms),
        _of_finite(row, row.abs_max),
        _percent(row.zero_fraction),
        _count(row.n_nan) if row.n_nan else "-",
        _count(row.n_inf) if row.n_inf else "-",
        " ".join(str(flag.name) for flag in row.flags),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, last = cells[0] + " " * (widths[0] - _width(cells[0])), cells[-1]
    middle = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([first, *middle, last]).rstrip()


def _rest(rows: Sequence[TensorReport]) -> str:
    norms = [row.norm for row in rows if row.numel and not row.n_nonfinite]
    bad = sum(row.n_nonfinite > 0 for row in rows)
    flagged = sum(bool(row.flags) for row in rows)
    notes = [f"norm {_number(min(norms))} to {_number(max(norms))}"] if norms else []
    notes += [f"{bad} not finite"] if bad else []
    notes.append(f"{flagged} of them flagged" if flagged else "no flags")
    return f"… {len(rows)} more, " + ", ".join(notes)


def _shorten(names: list[str]) -> list[str]:
    """Shorten long names, but not so that two look the same."""
    first, last = (min(names), max(names)) if names else ("", "")
    # what the first and the last in order share, all share
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    common = first[: first.rfind(".", 0, same) + 1]
    for shortened in (
        [_cut(name) for name in names],
        [_cut("…" + name.removeprefix(common)) for name in names],
    ):
        if len(set(shortened)) == len(names):
            return shortened
    return names


def _cut(name: str) -> str:
    # the end of a name tells more than its beginning
    if len(name) <= _LONGEST_NAME:
        return name
    head = _LONGEST_NAME // 3
    return f"{name[:head]}…{name[head + 1 - _LONGEST_NAME :]}"


def _width(text: str) -> int:
    # in columns of a terminal: wide characters take two, combining ones none
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _number(x: float, digits: int = 3) -> str:
    return "0" if x == 0 else f"{x:.{digits}e}"


def _of_finite(row: TensorReport, x: float, digits: int = 3) -> str:
    # no element is finite: there is nothing that this is the value of
    return "-" if row.n_nonfinite == row.numel > 0 else _number(x, digits)


def _count(n: int) -> str:
    if n < 10**5:
        return f"{n:,}"
    # the first unit in which it does not round to four digits
    units = ((10**3, "k"), (10**6, "M"), (10**9, "B"))
    size, unit = next((pair for pair in units if n / pair[0] < 999.95), units[-1])
    return f"{n / size:.1f}{unit}"


def _percent(fraction: float) -> str:
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}"
    # nothing but an exact 0 or 100 is shown as one
    return "<0.1" if fraction < 0.001 else f"{min(100 * fraction, 99.9):.1f}"
