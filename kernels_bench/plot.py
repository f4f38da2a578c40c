"""Plot each provider's time, by case, as a multiple of the time to read the same bytes once.

python -m kernels_bench.plot build/bench/bench.json   # draws bench.png beside it
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kernels_bench import tables
from kernels_bench.machine import one_line

OURS, PEER, BASE, CEILING, WRONG = "#0b63b5", "#8a9097", "#c77700", "#d5d9dd", "#c0392b"
PANEL_WIDTH, ROW_HEIGHT, ACROSS, WIDTH = 4.6, 0.2, 3, 9.2


def draw(result, path):
    """Draw the rows that have a time, with a panel for each case."""
    panels = {
        case: timed
        for case, rows in tables.by_case(result["rows"]).items()
        if len(timed := [row for row in rows if row["ms"] and row["ceiling_share"]]) > 1
    }
    if not panels:
        return False
    mpl.rcParams["font.family"] = "sans-serif"
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    longest = max(len(rows) for rows in panels.values())
    height = down * (longest * ROW_HEIGHT + 0.85) + 1.1
    # a single panel is wider, so that the legend fits
    width = max(across * PANEL_WIDTH, WIDTH)
    figure = Figure(figsize=(width, height), layout="constrained")
    # room for the heading, and for the machine below
    figure.get_layout_engine().set(rect=(0, 0.5 / height, 1, 1 - 1.1 / height), h_pad=0.1, w_pad=0.12)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for ax, (_, rows) in zip(axes, panels.items(), strict=False):
        _panel(ax, rows)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()

    left = 0.12 / width
    figure.text(
        left, 1 - 0.12 / height, "Time as a multiple of one read of the same bytes", va="top", fontsize=13
    )
    marks = [Line2D([], [], color=OURS, marker="o", ls="", label="ours")]
    if any(row["family"] == "base" for rows in panels.values() for row in rows):
        marks.append(
            Line2D([], [], color=BASE, marker="o", ls="", label=f"ours at {result.get('base', 'base')}")
        )
    marks += [
        Line2D([], [], color=PEER, marker="o", ls="", label="peers, all columns"),
        Line2D([], [], color=PEER, marker="o", mfc="white", ls="", label="peers, fewer columns"),
    ]
    figure.legend(
        handles=marks,
        loc="upper left",
        bbox_to_anchor=(left * 0.3, 1 - 0.36 / height),
        ncols=len(marks),
        frameon=False,
        fontsize=9,
        handletextpad=0.1,
        columnspacing=1.4,
    )
    figure.text(left, 0.12 / height, one_line(result["machine"]), va="bottom", fontsize=7.5, color="#555555")
    figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})
    return True


def _panel(ax, rows):
    ceiling = rows[0]
    rows = sorted((row for row in rows if row["family"] != "ceiling"), key=lambda row: row["ms"])
    times = [1 / row["ceiling_share"] for row in rows]
    color = {"ours": OURS, "base": BASE}
    for y, (row, x) in enumerate(zip(rows, times, strict=True)):
        wrong = row["error"] is not None
        hue = WRONG if wrong else color.get(row["family"], PEER)
        ax.plot([1, x], [y, y], color=hue, lw=1.1, alpha=0.55, zorder=2)
        ax.plot(x, y, "o", ms=5.5, color=hue, mfc=hue if row["full"] else "white", zorder=3)
        text = tables.digits(x) + (f"  {row['error']}" if wrong else "")
        # right of the line at 1 even if the point is left of it, so that they do not overlap
        ax.annotate(
            text, (max(1, x), y), (6, 0), textcoords="offset points", va="center", fontsize=7.5, color=hue
        )
    ax.axvline(1, color="#444444", lw=0.9, zorder=1)
    ax.set_xscale("log")
    low, high = min(1, *times), max(1.5, *times)
    span = math.log10(high / low)
    ax.set_xlim(low / 10 ** (0.04 * span), high * 10 ** (0.2 * span))  # room for the last label
    ax.set_yticks(range(len(rows)), [row["provider"] for row in rows], fontsize=8)
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(color.get(row["family"], "#555555"))
        label.set_fontweight("bold" if row["family"] == "ours" else "normal")
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="both", which="both", length=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} times")
    ax.xaxis.set_minor_formatter(lambda *_: "")
    ax.tick_params(axis="x", labelsize=7, labelcolor="#777777")
    ax.grid(axis="x", which="major", color=CEILING, lw=0.6, zorder=0)
    for side in ax.spines.values():
        side.set_visible(False)
    size = f"{ceiling['tensors']} x {ceiling['dtype']}, {ceiling['bytes'] / 2**20:,.0f} MiB"
    ax.set_title(f"{ceiling['case']}", loc="left", fontsize=10, fontweight="bold", pad=16)
    subtitle = f"{size}; one read: {tables.digits(ceiling['ms'])} ms, {tables.digits(ceiling['gb_s'])} GB/s"
    ax.annotate(
        subtitle,
        (0, 1),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=7.5,
        color="#555555",
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m kernels_bench.plot build/bench/bench.json")
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".png"))
