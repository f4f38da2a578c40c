"""Draw a run with matplotlib: its total norm with the limit of the clip, its loss, and its findings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules import Severity, headlines
from gradiometer.runs.steps_table import CLIP_FACTOR, CLIP_LIMIT, scalars_of
from gradiometer.stats import INK, new_axes, number
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradiometer.runs.opened import OpenedRun

_NORM: Final = "total_norm"
_FIRST: Final = (_NORM, "loss", "lr")
_SEVERITIES: Final = {
    Severity.ERROR: ("X", "#b3261e"),
    Severity.WARNING: ("^", "#8f5a00"),
    Severity.INFO: ("o", "#2f5fa8"),
}
# a logarithmic axis is used if values span more than this factor
_WIDE: Final = 50.0


def lines_of(run: OpenedRun) -> dict[str, list[float | None]]:
    """Return what a run can draw by name: the numbers of each step, None where there is none."""
    steps = run.steps
    found: dict[str, list[float | None]] = {}
    for name in steps.column_names:
        if name.endswith(("_norm", "_ratio", "_fraction", "abs_max")) and steps[name].null_count < len(steps):
            found[name] = steps[name].to_pylist()
    rows = scalars_of(steps)
    for name in dict.fromkeys(name for row in rows for name in row):
        found[name] = [row.get(name) for row in rows]
    return found


def plot_run(run: OpenedRun, what: Sequence[str], ax: Axes | None) -> Figure:
    """Draw lines of a run, as `Run.plot` documents."""
    lines = lines_of(run)
    steps = run.steps["step"].to_pylist()
    unknown = [name for name in what if name not in lines]
    if unknown:
        allowed = ", ".join(map(repr, lines)) or "nothing yet"
        raise ValueError(f"Run.plot: the run has no {unknown[0]!r}; it has {allowed}")
    names = list(what) or [name for name in _FIRST if name in lines]
    if ax is None:
        axes = new_axes(max(len(names), 1), 8, 0.8 + 1.9 * max(len(names), 1))
    else:
        names, axes = names[:1], [ax]
        if len(what) > 1:
            raise ValueError(f"Run.plot: ax= has room for one line, got {', '.join(map(repr, what))}")
    for name, place in zip(names, axes, strict=False):
        _draw(place, name, steps, lines)
    if _NORM in names:
        _draw_findings(axes[names.index(_NORM)], run)
    axes[0].set_title(printable(run.path.resolve().name), fontsize=10, loc="left", parse_math=False)
    axes[-1].set_xlabel("step")
    figure: Any = axes[0].figure
    return figure  # type: ignore[no-any-return]


def _draw(ax: Axes, name: str, steps: Sequence[int], lines: dict[str, list[float | None]]) -> None:
    known = [(step, x) for step, x in zip(steps, lines[name], strict=True) if x is not None]
    finite = [x for _, x in known if math.isfinite(x)]
    # a value that is not finite is a gap
    ax.plot(
        [step for step, _ in known],
        [x if math.isfinite(x) else math.nan for _, x in known],
        color=INK,
        lw=1.2,
    )
    bad = [step for step, x in known if not math.isfinite(x)]
    top = ax.get_xaxis_transform()
    if bad:
        ax.plot(bad, [0.97] * len(bad), "|", color="#d62728", transform=top, label="NaN or Inf")
    positive = sorted(x for x in finite if x > 0)
    if positive and min(finite) >= 0 and positive[-1] > _WIDE * positive[len(positive) // 2]:
        ax.set_yscale("log")
    if name == _NORM:
        _draw_limit(ax, steps, lines)
    ax.set_ylabel(name.replace("_", " ") if name == _NORM else printable(name), parse_math=False)
    ax.grid(visible=True, alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    if bad or (name == _NORM and CLIP_LIMIT in lines):
        ax.legend(fontsize=8, framealpha=0.6)


def _draw_limit(ax: Axes, steps: Sequence[int], lines: dict[str, list[float | None]]) -> None:
    """Draw the limit of the clip, and say how often gradients were clipped."""
    # a limit of infinity clips nothing
    limits = [math.nan if x is None or math.isinf(x) else x for x in lines.get(CLIP_LIMIT, ())]
    found = [x for x in limits if not math.isnan(x)]
    if not found:
        return
    label = f"{CLIP_LIMIT} {number(found[-1])}"
    factors = [x for x in lines.get(CLIP_FACTOR, ()) if x is not None]
    if factors:
        label += f", clipped in {sum(x < 1 for x in factors):,} of {len(factors):,} steps"
    ax.plot(steps, limits, color="#8f5a00", lw=1.2, ls="--", label=label)


def _draw_findings(ax: Axes, run: OpenedRun) -> None:
    """Mark the steps at which the causes of findings begin."""
    for severity, (marker, color) in _SEVERITIES.items():
        steps = [one.first_step for one in headlines(run.findings) if one.severity == severity]
        if steps:
            transform = ax.get_xaxis_transform()
            dots: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "", "clip_on": False}
            ax.plot(steps, [1.04] * len(steps), transform=transform, label=f"{severity}", **dots)
            ax.legend(fontsize=8, framealpha=0.6)
