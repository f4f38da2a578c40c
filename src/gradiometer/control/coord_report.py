"""CoordCheck: how activations scale with width, at initialization and after each step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gradiometer.control.coord_svg import Line, draw
from gradiometer.stats import aligned, preformatted, with_short_names
from gradiometer.terminal import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

# standard errors by which a slope has to exceed the tolerance
_ERRORS: Final = 2.0
# the exponent with which outputs and attention logits may shrink at first
_TRANSIENT: Final = 0.5
# columns of the table for each of the two values
_SHOWN: Final = 5
_NOTE: Final = "slopes of log2(rms) against log2(width); x_t: after t steps, Δx_t = x_t - x_0"


@dataclass(frozen=True)
class Slope:
    """The slope of log2(rms) against log2(width): the exponent of the width.

    Attributes:
        value: the mean over seeds of the least-squares slope of each; NaN if all values are 0; inf or -inf if
            only some are.
        error: its standard error over the seeds; 0 with one seed.
    """

    value: float
    error: float = 0.0

    def exceeds(self, tolerance: float) -> bool:
        """Whether it is above the tolerance by more than two standard errors."""
        return self.value - _ERRORS * self.error > tolerance

    def __neg__(self) -> Slope:
        return Slope(-self.value, self.error)

    def __str__(self) -> str:
        return f"{self.value:+.2f} ± {self.error:.2f}"


@dataclass(frozen=True)
class CoordRow:
    """One activation x at all widths: rms(x_t) and rms(x_t - x_0) after t = 0, 1, ... steps.

    Attributes:
        name: as in `Taps`, such as ``blocks.3.mlp.out``.
        widens: whether it has more elements in a wider model. If not, it is an output of the network, or such
            as attention logits.
        rms: geometric means over seeds, for each t a value per width.
        changes: the same of x_t - x_0; 0 for t = 0, NaN where the shapes of x_t and x_0 differ.
        slopes: the `Slope` of rms(x_t) for each t.
        change_slopes: the `Slope` of rms(x_t - x_0) for each t; NaN for t = 0.
        faults: what is wrong, as text; empty if nothing is.
    """

    name: str
    widens: bool
    rms: tuple[tuple[float, ...], ...]
    changes: tuple[tuple[float, ...], ...]
    slopes: tuple[Slope, ...]
    change_slopes: tuple[Slope, ...]
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


@dataclass(frozen=True)
class CoordCheck:
    """How activations scale with width, as `coord_check` returns it. True if every activation passes.

    ``print(result)`` shows the slopes, `save_svg` draws the values.

    Attributes:
        widths: the W widths.
        steps: the number of optimizer steps.
        seeds: the number of seeds.
        tolerance: the largest slope that passes.
        rows: a `CoordRow` per activation, in the order of the model.
        losses: for each t the mean loss at each width, over seeds.
    """

    widths: tuple[int, ...]
    steps: int
    seeds: int
    tolerance: float
    rows: tuple[CoordRow, ...] = field(repr=False)
    losses: tuple[tuple[float, ...], ...] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether every activation passes."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the activations that do not pass."""
        return tuple([row.name for row in self.rows if not row.passed])

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, name: str) -> CoordRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no activation {name!r} was measured; see [row.name for row in result.rows]")

    def to_string(self) -> str:
        """Return the table that ``print`` shows: slopes at some t, and the first fault of each activation."""
        first, rest = _evenly(0, self.steps), _evenly(1, self.steps)
        header = ("slopes", *[f"x_{t}" for t in first], *[f"Δx_{t}" for t in rest], "")
        body = []
        for row in self.rows:
            slopes = [row.slopes[t] for t in first] + [row.change_slopes[t] for t in rest]
            cells = ["-" if math.isnan(x.value) else f"{x.value:+.2f}" for x in slopes]
            body.append((printable(row.name), *cells, (*row.faults, "ok")[0]))
        lines, rule = aligned([header, *with_short_names(body)])
        return "\n".join([self._headline(), rule, lines[0], rule, *lines[1:], rule, _NOTE])

    def __str__(self) -> str:
        return self.to_string()

    def _repr_html_(self) -> str:
        """Return the same text for a notebook."""
        return preformatted(str(self))

    def save_svg(self, path: str | os.PathLike[str]) -> None:
        """Draw rms(x_t) and rms(x_t - x_0) against the width, on logarithmic axes, a panel per t.

        Thick lines, and crosses in the legend, are activations that do not pass.

        Args:
            path: the file to write; an existing file is replaced.
        """
        lines = [Line(printable(x.name), x.rms, x.changes, (*x.faults, None)[0]) for x in self.rows]
        # drawn before the file is opened
        picture = draw(self._headline(), self.widths, lines)
        Path(path).write_text(picture, encoding="utf-8")

    def _headline(self) -> str:
        n, bad = len(self.rows), len(self.failed)
        verdict = f"FAILED, {bad} of {n} activations" if bad else f"passed, {n} activations"
        widths = ", ".join(map(str, self.widths))
        counts = ((self.steps, "step"), (self.seeds, "seed"))
        steps, seeds = [f"{x} {what}{'s' * (x != 1)}" for x, what in counts]
        return f"coordinate check {verdict}; widths {widths}; {steps}, {seeds}, tolerance {self.tolerance:g}"


def row_of(
    name: str,
    widths: Sequence[int],
    numel: Sequence[int],
    rms: Sequence[Sequence[Sequence[float]]],
    changes: Sequence[Sequence[Sequence[float]]],
    tolerance: float,
) -> CoordRow:
    """Return the row of an activation; ``rms`` and ``changes`` have a value per width for each t and seed."""
    widens = numel[-1] > numel[0]
    slopes = tuple([_slope(widths, values) for values in rms])
    change_slopes = (Slope(math.nan), *[_slope(widths, values) for values in changes[1:]])
    means, mean_changes = [tuple([_means(values) for values in both]) for both in (rms, changes)]
    faults = _faults(slopes, change_slopes, tolerance, widens=widens)
    return CoordRow(name, widens, means, mean_changes, slopes, change_slopes, faults)


def _faults(
    slopes: Sequence[Slope], changes: Sequence[Slope], tolerance: float, *, widens: bool
) -> tuple[str, ...]:
    faults = []
    last = len(slopes) - 1
    for what, found in (("Δx", changes), ("x", slopes)):
        for t, slope in enumerate(found):
            if slope.exceeds(tolerance):
                faults.append(f"{what}_{t} grows: {slope}")
                break
    # Products with random weights shrink as width**-0.5 where μP has a constant size in the limit. In outputs
    # they may hide for a while what was learned.
    lowest = tolerance if widens else _TRANSIENT + tolerance
    # the last one: nothing reaches the layers behind a readout of zeros in the first step
    if (-changes[last]).exceeds(lowest):
        faults.append(f"Δx_{last} vanishes: {changes[last]}")
    for t, slope in enumerate(slopes):
        # an output may begin near 0, and has to grow by its changes
        if widens and (-slope).exceeds(tolerance):
            faults.append(f"x_{t} vanishes: {slope}")
            break
    return tuple(faults)


def _slope(widths: Sequence[int], values: Sequence[Sequence[float]]) -> Slope:
    """Return the slope of values, for each seed one per width."""
    flat = [x for seed in values for x in seed]
    if not any(flat) or any(math.isnan(x) for x in flat):
        return Slope(math.nan)
    if not all(flat):
        return Slope(-math.inf if any(seed[-1] == 0 for seed in values) else math.inf)
    logs = [math.log2(width) for width in widths]
    found = [statistics.linear_regression(logs, [math.log2(x) for x in seed]).slope for seed in values]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return Slope(statistics.fmean(found), error)


def _means(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the geometric mean over seeds for each width."""
    columns = list(zip(*values, strict=True))
    return tuple([0.0 if 0.0 in x else math.exp(statistics.fmean(map(math.log, x))) for x in columns])


def _evenly(first: int, last: int) -> list[int]:
    """Return some numbers from first to last, both included."""
    n = min(_SHOWN, last - first + 1)
    return [first + round(i * (last - first) / (n - 1)) for i in range(n)] if n > 1 else [first]
