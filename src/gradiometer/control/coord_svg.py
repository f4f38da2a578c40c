"""The picture of a coordinate check: values against width on logarithmic axes, as SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# in pixels
_PANEL: Final = (190, 180)
_GAP: Final = (14, 46)
_LEFT, _TOP, _MARGIN = 74, 64, 20
# the height of an entry of the legend, and the width of its letters
_ENTRY, _LETTER = 20, 7
# from the first layer to the last
_COLORS: Final = ((68, 1, 84), (49, 104, 142), (33, 145, 140), (94, 170, 70), (240, 160, 30))
_FONT: Final = "system-ui, 'DejaVu Sans', 'Liberation Sans', sans-serif"
_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_INK, _SOFT, _EDGE, _GRID, _WRONG = "#1c2127", "#59636e", "#c3c9d1", "#e4e7eb", "#b3261e"


class Line(NamedTuple):
    """One activation: for each t a value per width, of x_t and of x_t - x_0."""

    name: str
    rms: Sequence[Sequence[float]]
    changes: Sequence[Sequence[float]]
    # None if it passes
    fault: str | None


def draw(title: str, widths: Sequence[int], lines: Sequence[Line]) -> str:
    """Return an SVG: a column per t; a row of panels for x_t, and one for x_t - x_0."""
    steps = len(lines[0].rms)
    width = _LEFT + steps * (_PANEL[0] + _GAP[0]) - _GAP[0] + _MARGIN
    parts = [_text(_MARGIN, 28, title, size=15, weight=600)]
    colors = [_color(i / max(1, len(lines) - 1)) for i in range(len(lines))]
    rms, changes = [line.rms for line in lines], [line.changes for line in lines]
    for row, (what, values) in enumerate((("rms of xₜ", rms), ("rms of Δxₜ = xₜ - x₀", changes))):
        top = _TOP + row * (_PANEL[1] + _GAP[1])
        ends = _ends([x for line in values for panel in line for x in panel])
        # the change is 0 at initialization
        beside = _LEFT + row * (_PANEL[0] + _GAP[0]) - 50
        parts.append(_text(beside, top + _PANEL[1] / 2, what, turn=True))
        for t in range(row, steps):
            left = _LEFT + t * (_PANEL[0] + _GAP[0])
            panel = _Panel(left, top, math.log2(widths[0]), math.log2(widths[-1]), *ends)
            parts.append(panel.frame(widths, labels=t == row))
            label = f"after {t} step{'s' * (t != 1)}" if t else "at initialization"
            parts.append(_text(left + _PANEL[0] / 2, top - 8, label, anchor="middle"))
            for line, series, color in zip(lines, values, colors, strict=True):
                parts.append(panel.line(widths, series[t], line, color))
    top = _TOP + 2 * (_PANEL[1] + _GAP[1])
    legend, height = _legend(lines, colors, top, width)
    parts += [_text(_LEFT + (width - _LEFT - _MARGIN) / 2, top - 12, "width", anchor="middle"), *legend]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    head += f'height="{height}" font-family="{_FONT}">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
    return head + "\n".join(filter(None, parts)) + "\n</svg>\n"


class _Panel(NamedTuple):
    """A pair of axes; the ends are log2 of what they show."""

    left: float
    top: float
    first: float
    last: float
    low: float
    high: float

    def x(self, log2: float) -> float:
        inset = 12
        return self.left + inset + (log2 - self.first) / (self.last - self.first) * (_PANEL[0] - 2 * inset)

    def y(self, log2: float) -> float:
        return self.top + (self.high - log2) / (self.high - self.low) * _PANEL[1]

    def frame(self, widths: Sequence[int], *, labels: bool) -> str:
        place = f'x="{self.left}" y="{self.top}" width="{_PANEL[0]}" height="{_PANEL[1]}"'
        parts = [f'<rect {place} fill="none" stroke="{_EDGE}"/>']
        for tick in _ticks(self.low, self.high):
            y = self.y(tick)
            if self.low < tick < self.high:
                right = self.left + _PANEL[0]
                parts.append(f'<path d="M{self.left} {y:.1f}H{right}" stroke="{_GRID}"/>')
            if labels:
                label = f"2{str(tick).translate(_SUPERSCRIPTS)}"
                parts.append(_text(self.left - 6, y + 4, label, anchor="end", color=_SOFT))
        # as many labels as fit
        every = math.ceil(len(widths) / 5)
        for width in widths[::every]:
            x, y = self.x(math.log2(width)), self.top + _PANEL[1]
            parts.append(f'<path d="M{x:.1f} {y}v4" stroke="{_EDGE}"/>')
            parts.append(_text(x, y + 16, str(width), anchor="middle", color=_SOFT))
        return "\n".join(parts)

    def line(self, widths: Sequence[int], values: Sequence[float], line: Line, color: str) -> str:
        shown = [(width, x) for width, x in zip(widths, values, strict=True) if 0 < x < math.inf]
        points = [f"{self.x(math.log2(width)):.1f},{self.y(math.log2(x)):.1f}" for width, x in shown]
        if not points:
            return ""
        # shown by a browser at the pointer
        thickness, title = _thickness(line), f"<title>{escape(line.name)}</title>"
        stroke = f'stroke="{color}" stroke-width="{thickness}"'
        dot = f'r="{thickness / 2 + 1.3:.1f}" fill="{color}"/>'
        dots = [f'<circle cx="{x}" cy="{y}" {dot}' for x, y in (point.split(",") for point in points)]
        path = f'<polyline points="{" ".join(points)}" fill="none" {stroke}>{title}</polyline>'
        return path + "".join(dots)


def _legend(
    lines: Sequence[Line], colors: Sequence[str], top: float, width: float
) -> tuple[list[str], float]:
    """Return an entry per activation, and the height of the picture."""
    texts = [line.name + (f" ✗ {line.fault}" if line.fault else "") for line in lines]
    size = 56 + _LETTER * max(map(len, texts))
    columns = max(1, int((width - 2 * _MARGIN) // size))
    rows = math.ceil(len(lines) / columns)
    parts = []
    for i, (line, color, text) in enumerate(zip(lines, colors, texts, strict=True)):
        x, y = _MARGIN + i // rows * size, top + 18 + i % rows * _ENTRY
        parts.append(f'<path d="M{x:.1f} {y - 4}h24" stroke="{color}" stroke-width="{_thickness(line)}"/>')
        parts.append(_text(x + 32, y, text, color=_WRONG if line.fault else _INK))
    return parts, top + 18 + rows * _ENTRY + 6


def _thickness(line: Line) -> float:
    return 2.6 if line.fault else 1.2


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return log2 of the ends of an axis that shows all positive values, at least two octaves apart."""
    logs = [math.log2(x) for x in values if 0 < x < math.inf] or [0.0]
    low, high = min(logs) - 0.4, max(logs) + 0.4
    more = max(0.0, 2.0 - (high - low)) / 2
    return low - more, high + more


def _ticks(low: float, high: float) -> list[int]:
    every = max(1, math.ceil((high - low) / 6))
    return [x for x in range(math.ceil(low), math.floor(high) + 1) if x % every == 0]


def _color(share: float) -> str:
    place = share * (len(_COLORS) - 1)
    i = min(int(place), len(_COLORS) - 2)
    mixed = [round(a + (b - a) * (place - i)) for a, b in zip(_COLORS[i], _COLORS[i + 1], strict=True)]
    return f"#{bytes(mixed).hex()}"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
    color: str = _INK,
    turn: bool = False,
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{"middle" if turn else anchor}"'
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    font = f'font-size="{size}" font-weight="{weight}" fill="{color}"'
    return f"<text {where}{turned} {font}>{escape(text)}</text>"
