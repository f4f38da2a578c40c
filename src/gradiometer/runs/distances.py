"""How far two runs are apart: relative distances of gradients and weights in each step, by projections."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import FIRST_PROJECTION, sqrt
from gradiometer.recorder import KINDS
from gradiometer.runs.arrow import codes, numbers, put
from gradiometer.runs.departure import Departure, Measured, find
from gradiometer.stats import INK, new_axes
from gradiometer.terminal import printable

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from gradiometer.recorder import Catalog
    from gradiometer.runs.reader import Run

UNRELATED: Final = 0.5
"""Gradients that are farther apart, and whose cosine is smaller, have little in common."""

PROJECTED: Final = ("grad_projections", "weight_projections")
"""The kinds of projections."""

_GRADS, _WEIGHTS = PROJECTED
_SCHEMA: Final = KINDS[_GRADS].schema.name
# numbers of a table that are in memory at once
_CELLS: Final = 1 << 22
# elements of a tensor that is nearly a multiple of any other
_FEW: Final = 8


@dataclass(frozen=True)
class Apart:
    """How far one gradient, or one update, is apart in one step.

    Attributes:
        step: the step.
        name: such as ``w.grad``; ``w.update`` for the last update before this step.
        distance: its relative distance.
        limit: the largest one that rounding explains, at most 2, that of opposite tensors.
        ratio: the distance, divided by that of the compared step before; None if that is 0 or unknown.
        cosine: that of the tensor in both runs.
        weight: the relative distance of its weight; None if it is not projected.
    """

    step: int
    name: str
    distance: float
    limit: float
    ratio: float | None
    cosine: float | None
    weight: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Distances:
    """Relative distances between two runs, in S steps, of T parameters; projections estimate them.

    A relative distance is ``norm(a - b) / max(norm(a), norm(b))``: about 1e-7 for the rounding of float32,
    1.4 for unrelated tensors, and 2 for opposite ones. With k projections, the estimate has a relative
    standard deviation of about ``sqrt(1 / (2 k))``, 18 % for 16. Elements that are NaN or infinite are left
    out.

    Attributes:
        steps: the steps that are projected in both runs, ascending.
        names: the parameters, from the model's last to its first.
        projections: their number k, the smaller one of the two runs.
        grads: distances of gradients, ``(S, T) float64``; NaN where a run has no finite one.
        cosines: those of gradients between the runs, ``(S, T) float64``.
        weights: distances of weights, ``(S, T) float64``; None if a run has not projected them.
        total: those of all weights together, ``(S,) float64``; None likewise.
        rounding: what explains the distances in the first steps: ``"float32"``, ``"TF32 or float16"`` or
            ``"bfloat16"``.
        limits: the largest distances of gradients that rounding explains, ``(S, T) float64``.
        departure: the first step and tensor beyond; None if there is none. `Departure` tells how it is found.
        updates, update_limits, update_cosines: the same of the updates between a compared step and the one
            before, ``(S, T) float64``; None as for weights.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    projections: int
    grads: Tensor
    cosines: Tensor
    weights: Tensor | None
    total: Tensor | None
    rounding: str
    limits: Tensor
    departure: Departure | None
    updates: Tensor | None = None
    update_limits: Tensor | None = None
    update_cosines: Tensor | None = None

    @property
    def unrelated(self) -> bool:
        """Whether most gradients have little in common in the first compared step."""
        cosine = float(self.cosines[0].nanmedian())
        return bool(self.grads[0].nanmedian() > UNRELATED and abs(cosine) < UNRELATED)

    def drawn(self, most: int = 12) -> list[int]:
        """Return the columns of the tensors to draw: the one of the departure first, then the worst."""
        beyond = (self.grads / self.limits).nan_to_num(nan=0.0)
        order = beyond.amax(dim=0).argsort(descending=True, stable=True).tolist()
        if self.departure is not None:
            labels = [self.departure.name.rpartition(".")[0] == name for name in self.names]
            order.sort(key=lambda i: not labels[i])
        return order[:most]

    def lines(self) -> tuple[str, Tensor, Tensor, list[int]]:
        """Return the name to draw first, its distances and limits, and the columns of other gradients."""
        first, *others = columns = self.drawn()
        kind = "grads" if self.departure is None else self.departure.kind
        label = KINDS[kind].label(self.names[first])
        if kind == "updates" and self.updates is not None and self.update_limits is not None:
            return label, self.updates[:, first], self.update_limits[:, first].clamp(max=2.0), columns
        return label, self.grads[:, first], self.limits[:, first].clamp(max=2.0), others

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw the distances of gradients over steps, as `Comparison.plot` documents."""
        (axes,) = new_axes(1, 8, 4) if ax is None else (ax,)
        name, bold, limit, others = self.lines()
        # a logarithmic axis has no 0
        logs = torch.where(self.grads > 0, self.grads, math.nan)
        for k, i in enumerate(others):
            axes.plot(self.steps, logs[:, i], color="0.7", lw=0.8, label=None if k else "other gradients")
        axes.plot(self.steps, limit, color="#8f5a00", lw=1.2, ls="--", label="rounding explains")
        if self.total is not None:
            total = torch.where(self.total > 0, self.total, math.nan)
            axes.plot(self.steps, total, color="0.3", lw=1, ls=":", label="all weights")
        axes.plot(self.steps, torch.where(bold > 0, bold, math.nan), color=INK, lw=1.8, label=printable(name))
        if self.departure is not None and self.departure.lasts:
            axes.axvline(self.departure.step, color="#b3261e", lw=1)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("relative distance")
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(fontsize=8, framealpha=0.6)
        for text in legend.get_texts():
            text.set_parse_math(False)
        figure: Any = axes.figure
        return figure  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: of each step the median of the gradients, and all of the departure's step."""
        typical = self.grads.nanmedian(dim=1).values.tolist()
        total = None if self.total is None else list(map(_plain, self.total.tolist()))
        return {
            "projections": self.projections,
            "rounding": self.rounding,
            "steps": list(self.steps),
            "grads": list(map(_plain, typical)),
            "weights": total,
            "departure": None if self.departure is None else asdict(self.departure),
            "worst": [asdict(one) for one in self.worst()],
        }

    @property
    def worst_step(self) -> int:
        """The step of the departure; without one, the last compared step."""
        return self.steps[-1] if self.departure is None else self.departure.step

    def worst(self, step: int | None = None, most: int | None = 10) -> list[Apart]:
        """Return the gradients of a compared step that are furthest beyond what rounding explains.

        They are in descending order. If an update is what leaves it in this step, it comes before them.

        Args:
            step: one of `steps`; by default `worst_step`.
            most: the largest number of tensors; None for all.
        """
        row = self.steps.index(self.worst_step if step is None else step)
        beyond = (self.grads[row] / self.limits[row]).nan_to_num(nan=-1.0)
        order = beyond.argsort(descending=True, stable=True).tolist()
        found = [self._apart(row, i) for i in order if beyond[i] >= 0]
        one = self.departure
        if one is not None and one.kind == "updates" and one.step == self.steps[row]:
            found.insert(0, self._apart(row, self.drawn()[0], "updates"))
        return found[:most]

    def _apart(self, row: int, i: int, kind: str = "grads") -> Apart:
        of_updates = self.updates, self.update_limits, self.update_cosines
        of_grads = self.grads, self.limits, self.cosines
        x, limits, cosines = of_updates if kind == "updates" else of_grads
        if x is None or limits is None or cosines is None:
            msg = f"{kind} are not projected"
            raise ValueError(msg)
        before = _plain(x[row - 1, i]) if row else None
        distance = float(x[row, i])
        return Apart(
            step=self.steps[row],
            name=KINDS[kind].label(self.names[i]),
            distance=distance,
            limit=min(float(limits[row, i]), 2.0),
            ratio=distance / before if before else None,
            cosine=_plain(cosines[row, i]),
            weight=None if self.weights is None else _plain(self.weights[row, i]),
        )


def projections_of(catalog: Catalog) -> int:
    """Return the number of projections; 0 if there are none."""
    return catalog.kinds[_GRADS].schema.width - FIRST_PROJECTION if _GRADS in catalog.kinds else 0


def distances_of(a: Run, b: Run, ignore: re.Pattern[str] | None = None) -> Distances | None:
    """Return the distances between two runs; None unless both have projected a tensor in the same step."""
    # the first projections of more are those of fewer
    k = min(projections_of(run.catalog) for run in (a, b))
    if not k:
        return None
    names = _common_names(a.catalog, b.catalog, ignore)
    steps = _common_steps(a, b)
    if not names or not steps:
        return None
    has_weights = all(_WEIGHTS in run.catalog.kinds for run in (a, b))
    sums = Sums(names, has_weights=has_weights)
    size = max(1, _CELLS // (len(names) * (FIRST_PROJECTION + k)))
    for start in range(0, len(steps), size):
        block = steps[start : start + size]
        for kind in (_GRADS, _WEIGHTS)[: 1 + has_weights]:
            sums.add(kind, *[_columns(run, kind, block, names, k) for run in (a, b)])
    return sums.found(steps, _roundoff(a.catalog, b.catalog))


class Sums:
    """Distances block by block, of parameters from the model's last to its first."""

    def __init__(self, names: Sequence[str], *, has_weights: bool) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._names, self._has_weights = tuple(names), has_weights
        self._projections = 0
        # projected weights of the last step in each run
        self._last = [torch.full((1, len(names), 1), math.nan, dtype=torch.float64, device="cpu")] * 2

    def add(self, kind: str, a: Tensor, b: Tensor) -> None:
        """Add a block of steps of each run, ``(s, T, 3 + k)``."""
        p, q = a[..., FIRST_PROJECTION:], b[..., FIRST_PROJECTION:]
        self._projections = p.shape[-1]
        distance, norm = _rms(p - q), sqrt(torch.maximum(a[..., 1], b[..., 1]))
        # by the projections' own norms, the distance from a multiple of a tensor is exact
        relative = _ratio(distance, torch.maximum(_rms(p), _rms(q)))
        if kind == _GRADS:
            # the usual norm of a tensor of this size, if all elements are alike
            numel = a[..., 0].nan_to_num(nan=0.0)
            usual = sqrt((norm * norm).nansum(1, keepdim=True) * numel / numel.sum(1, keepdim=True))
            cosines, across, factors = _multiple(p, q)
            self._put(
                grads=relative,
                size=norm / usual,
                cosines=cosines,
                across=torch.where(numel < _FEW, relative, across),
                factors=factors,
            )
            return
        u, v = (
            torch.cat([last.expand_as(x[:1]), x]).diff(dim=0)
            for last, x in zip(self._last, (p, q), strict=True)
        )
        self._last = [p[-1:], q[-1:]]
        update = torch.maximum(_rms(u), _rms(v))
        updates, (cosines, across, factors) = _ratio(_rms(u - v), update), _multiple(u, v)
        total = [sqrt((x * x).nansum(1)) for x in (distance, norm)]
        self._put(
            weights=relative,
            total=_ratio(*total),
            updates=updates,
            update_cosines=cosines,
            updates_across=torch.where(a[..., 0] < _FEW, updates, across),
            update_factors=factors,
            update_size=_ratio(update, norm),
        )

    def _put(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def found(self, steps: Sequence[int], roundoff: float) -> Distances:
        """Return the distances in all blocks, and what leaves rounding.

        Args:
            steps: those that were added, ascending.
            roundoff: the largest unit roundoff of the parameters' dtypes.
        """
        parts = {name: torch.cat(blocks) for name, blocks in self._parts.items()}
        measured = Measured(
            grads=parts["grads"],
            across=parts["across"],
            factors=parts["factors"],
            size=parts["size"],
            total=parts.get("total"),
            updates=parts.get("updates"),
            updates_across=parts.get("updates_across"),
            update_factors=parts.get("update_factors"),
            update_size=parts.get("update_size"),
            consecutive=torch.tensor(steps, device="cpu").diff(
                prepend=torch.tensor([steps[0] - 1], device="cpu")
            )
            == 1,
            deviation=math.sqrt(2 / self._projections),
            roundoff=roundoff,
        )
        found = find(measured, steps, self._names)
        return Distances(
            steps=tuple(steps),
            names=self._names,
            projections=self._projections,
            grads=measured.grads,
            cosines=parts["cosines"],
            weights=parts.get("weights"),
            total=measured.total,
            rounding=found.rounding,
            limits=found.limits,
            departure=found.departure,
            updates=measured.updates,
            update_limits=found.update_limits,
            update_cosines=parts.get("update_cosines"),
        )


def _plain(x: Tensor | float) -> float | None:
    return value if math.isfinite(value := float(x)) else None


def _rms(x: Tensor) -> Tensor:
    return sqrt((x * x).mean(-1))


def _multiple(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosine of p and q, the distance of q from the nearest multiple of p, and that factor."""
    cosines = (p * q).mean(-1) / (_rms(p) * _rms(q))
    across = sqrt((1 - cosines * cosines).clamp(min=0.0))
    return cosines, across, _ratio(_rms(q), _rms(p)) * cosines.sign()


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y; 0 where both are 0."""
    return (x / y).masked_fill((x == 0) & (y == 0), 0.0)


def _common_names(a: Catalog, b: Catalog, ignore: re.Pattern[str] | None) -> tuple[str, ...]:
    """Return the parameters of one shape in both, from the last to the first."""
    shapes = [dict(zip(own.names, own.parameters.shapes, strict=True)) for own in (a, b)]
    return tuple(
        name
        for name in reversed(a.names)
        if shapes[0][name] == shapes[1].get(name)
        and (ignore is None or not ignore.search(KINDS[_GRADS].label(name)))
    )


def _common_steps(a: Run, b: Run) -> list[int]:
    """Return the steps whose gradients both runs have projected, ascending."""
    found = []
    for run in (a, b):
        pairs = zip(run.steps["step"].to_pylist(), run.steps["kinds"].to_pylist(), strict=True)
        found.append({step for step, kinds in pairs if _GRADS in kinds})
    return sorted(found[0] & found[1])


def _columns(run: Run, kind: str, steps: Sequence[int], names: Sequence[str], k: int) -> Tensor:
    """Return the number of elements, the sum of squares, and projections, ``(s, T, 3 + k)``.

    NaN where there are none, or where elements are not finite.
    """
    columns = ["numel", "sumsq", "n_nonfinite", *[f"p{j}" for j in range(k)]]
    table = run.table(_SCHEMA, columns=["step", "name", *columns], kind=kind, first=steps[0], last=steps[-1])
    found = torch.full((len(steps), len(names), len(columns)), math.nan, dtype=torch.float64, device="cpu")
    values = torch.stack([numbers(table[name]).to(torch.float64) for name in columns], dim=1)
    values[values[:, 2] > 0] = math.nan
    step, wanted = numbers(table["step"]), torch.tensor(steps, device="cpu")
    rows = torch.searchsorted(wanted, step).clamp_(max=len(steps) - 1)
    rows[wanted[rows] != step] = -1
    return put(found, values, (rows, codes(table["name"], {name: i for i, name in enumerate(names)})))


def _roundoff(a: Catalog, b: Catalog) -> float:
    """Return the largest unit roundoff of the parameters' dtypes."""
    found = {getattr(torch, name, None) for own in (a, b) for name in own.parameters.dtypes}
    known = [x for x in found if isinstance(x, torch.dtype) and x.is_floating_point]
    return max([torch.finfo(x).eps / 2 for x in known], default=0.0)
