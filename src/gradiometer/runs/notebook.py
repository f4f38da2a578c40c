"""A run in a notebook: its name and state, curves of its norm and loss, and its findings."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Final

from gradiometer.rules import counts_text, headlines, table_of
from gradiometer.runs.files import RunError
from gradiometer.stats import html as table_html
from gradiometer.stats import number, preformatted
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.runs.opened import OpenedRun

_WIDTH, _HEIGHT = 320, 44
_POINTS: Final = 320
# values that span a larger factor are drawn by their logarithms
_WIDE: Final = 50.0


def run_html(run: OpenedRun) -> str:
    """Return a run as HTML; a run with an unreadable file as the error's text."""
    try:
        steps, findings = run.steps, run.findings
        numbers = steps["step"].to_pylist()
        curves = [(name, steps[column].to_pylist()) for name, column in _CURVES]
    except RunError as error:
        return preformatted(printable(f"{run!r}\n{error}"))
    info = run.info
    facts = [str(run.path), str(info.get("model", "")), "closed" if info.get("closed") else "not closed"]
    facts.append(f"{len(numbers):,} steps" + (f", {numbers[0]:,} to {numbers[-1]:,}" if numbers else ""))
    table = table_of(headlines(findings))
    lines = [f"<p>{html.escape(printable(', '.join(filter(None, facts))))}</p>"]
    lines += [_curve(name, [x for x in values if x is not None]) for name, values in curves]
    return "\n".join([*filter(None, lines), table_html(table._replace(headline=counts_text(findings)))])


_CURVES: Final = (("total norm", "total_norm"), ("loss", "loss"))


def _curve(name: str, values: Sequence[float]) -> str:
    """Return a small picture of a curve, and its last value; empty without values."""
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return ""
    is_log = min(finite) > 0 and max(finite) > _WIDE * min(finite)
    size = max(1, math.ceil(len(values) / _POINTS))
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    # the largest of the values that share a point; a gap if one of them is not finite
    tops = [max(part) if all(map(math.isfinite, part)) else None for part in parts]
    tops = [None if x is None else math.log(x) if is_log else x for x in tops]
    known = [x for x in tops if x is not None]
    low, extent = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    path, before = "", None
    for k, x in enumerate(tops):
        if x is not None:
            across = k * (_WIDTH - 4) / max(1, len(tops) - 1) + 2
            down = (_HEIGHT - 4) * (1 - (x - low) / extent) + 2
            path += f"{'M' if before is None else 'L'}{across:.1f} {down:.1f}"
        before = x
    label = f"{name}{', log scale' if is_log else ''}, last {number(values[-1], 4)}"
    return (
        f'<div><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.2"/></svg> {label}</div>'
    )
