"""Draw a value of named rows with matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import Flag
from gradiometer.extras import require
from gradiometer.stats.text_table import short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from gradiometer.columns import Schema

INK: Final = "#0068a5"
# flags, most severe first: their word, and a color and a marker, which also tell them apart in greyscale
_FLAGS: Final = (
    (Flag.NAN | Flag.INF, "NaN or Inf", "#d62728", "X"),
    (Flag.EXPLODING, "exploding", "#b4460f", "^"),
    (Flag.DEAD, "dead", "#111111", "s"),
    (Flag.VANISHING, "vanishing", "#7a6000", "v"),
)
_PLAIN: Final = (Flag(0), None, INK, "o")
# where values without a place on the axis are drawn: 0 on a logarithmic one, and NaN and infinity
_START, _END = 0.015, 0.985
_LETTERS: Final = 75


def drawable(schema: Schema, names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the label of each value, and whether it takes a logarithmic axis; counts are last."""
    found = {}
    for name in sorted(dict.fromkeys(names), key=lambda name: schema[name].style in {"count", "rare"}):
        label = schema[name].heading or name.replace("_", " ")
        found[name] = label, schema[name].style not in {"fraction", "cosine"}
    return found


def new_axes(rows: int, width: float, height: float) -> list[Axes]:
    """Return axes, one below the other, of a new figure with this size in inches."""
    pyplot = require("matplotlib.pyplot", "plot", "plot()")
    _, axes = pyplot.subplots(rows, figsize=(width, height), sharex=True, squeeze=False, layout="constrained")
    return [row[0] for row in axes]


def plot_rows(
    names: Sequence[str],
    values: Sequence[float],
    flags: Sequence[int],
    *,
    title: str,
    label: str,
    is_log: bool,
    ax: Axes | None = None,
) -> Axes:
    """Draw a dot for each row, the first at the top, and return the axes.

    ``flags`` are the bits of `Flag`; ``is_log`` asks for a logarithmic axis, if no value is negative.
    """
    if ax is None:
        # a line of text for each row
        (ax,) = new_axes(1, 8, 1.4 + 0.24 * max(len(names), 3))
    finite = [x for x in values if math.isfinite(x)]
    is_log = is_log and any(x > 0 for x in finite) and min(finite) >= 0
    if is_log:
        ax.set_xscale("log")
        # labels of minor ticks would overlap
        ax.xaxis.set_minor_formatter("")
    styles = [_style(bits, x) for bits, x in zip(flags, values, strict=True)]
    for style in (_PLAIN, *_FLAGS):
        _, word, color, marker = style
        own = [k for k, one in enumerate(styles) if one is style]
        inside = [k for k in own if math.isfinite(values[k]) and not (is_log and values[k] == 0)]
        dots: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "", "markersize": 5}
        if own:
            ax.plot([values[k] for k in inside], inside, label=word, **dots)
        for k in sorted({*own} - {*inside}):
            at, side, text = (_START, "left", "    0")
            if not math.isfinite(values[k]):
                at, side, text = (_END, "right", f"{values[k]:g}   ")
            across = ax.get_yaxis_transform()
            ax.plot([at], [k], transform=across, **dots)
            ax.text(at, k, text, color=color, fontsize=8, va="center", ha=side, transform=across, zorder=1)
    # names are not parsed as formulas
    ax.set_yticks(range(len(names)), short_names(list(names)), parse_math=False, fontsize=8)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.set_xlabel(label, loc="left", parse_math=False)
    ax.set_title(_wrapped(title), fontsize=9, loc="left", parse_math=False)
    ax.grid(visible=True, alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    if any(style is not _PLAIN for style in styles):
        # below the axis, where it hides no dot
        ax.legend(
            fontsize=8, loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=2.6, ncols=4, frameon=False
        )
    return ax


def _style(bits: int, value: float) -> Any:
    if not math.isfinite(value):
        return _FLAGS[0]
    return next((one for one in _FLAGS if bits & int(one[0])), _PLAIN)


def _wrapped(title: str) -> str:
    lines = [""]
    for part in title.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > _LETTERS:
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    return ",\n".join(lines)
