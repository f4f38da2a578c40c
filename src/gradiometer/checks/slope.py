"""Whether gradients are those of the loss that a step returned: by the slope of the loss along them.

With the same random state, the loss is a function of the weights. Along the gradient, its slope is the norm
of the gradient, whatever random numbers the step draws. A backward pass that uses others than the forward, as
one that recomputes dropout, has another gradient.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from gradiometer.checks.compared_tensors import GradientRow
from gradiometer.checks.gradient_runs import eagerly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from gradiometer.checks.reference_runs import Runs
    from gradiometer.checks.step_run import StepRun

# by how much the loss and the weights change, at most; more if rounding hides that, as in bfloat16
_CHANGES: Final = (1e-2, 5e-2)
# of the norm; healthy steps in float32 have 1e-3
_ALLOWED: Final = 0.03
# more can't be told from healthy steps
_TOO_MUCH: Final = 0.15
# tensors that are looked at one by one, if all together have a wrong slope
_MOST: Final = 64


class _Slope(NamedTuple):
    """The slope of a loss along a gradient, which should be the norm; and how far it can be trusted."""

    norm: float
    slope: float
    spread: float

    @property
    def error(self) -> float:
        return abs(self.norm - self.slope)


def slope_rows(
    runs: Runs, step: Callable[..., Any], given: StepRun, eager: StepRun, modules: Mapping[str, str]
) -> tuple[list[GradientRow], str]:
    """Return rows about the slope of a step's loss; or none, and why it can't be measured.

    ``eager``: the same step in eager mode, which shows how exact the slope is. If the slope is wrong, the
    first rows are those of single tensors with a wrong slope, in the order of the backward pass.
    """
    loss = _loss(given)
    if loss is None or _loss(eager) is None:
        return [], "the step does not return its loss, as one number"
    if any(p.dtype not in {torch.float32, torch.float64} for p in runs.names):
        return [], "parameters have a dtype with too few digits"
    theirs = _measured(runs, step, eager, eager.grads, eagerly)
    ours = _measured(runs, step, given, given.grads)
    if theirs is None or ours is None:
        return [], "the gradients are 0 or not finite"
    scale = ours.norm / theirs.norm
    spread = max(ours.spread, scale * theirs.spread, scale * theirs.error)
    allowed = max(_ALLOWED * ours.norm, 4.0 * spread)
    if 4.0 * max(ours.spread, scale * theirs.spread) > _TOO_MUCH * ours.norm:
        return [], "its rounding is too coarse"
    if allowed > _TOO_MUCH * ours.norm:
        return [], "in eager mode, the returned loss does not change along the gradients as these say"
    rows = [_row("the loss", "", ours, allowed)]
    if rows[0].fails:
        for name in [name for name in eager.grads if name in given.grads][:_MOST]:
            one = _measured(runs, step, given, {name: given.grads[name]})
            if one is not None and one.norm > _ALLOWED * ours.norm and one.spread < _ALLOWED * one.norm:
                rows.append(_row(name, modules.get(name, ""), one, allowed * one.norm / ours.norm))
        rows = [*(row for row in rows[1:] if row.fails), rows[0]]
    return rows, ""


def _loss(run: StepRun) -> float | None:
    numbers = [x for x in run.outputs.values() if x.numel() == 1]
    return float(numbers[0]) if len(numbers) == 1 else None


def _measured(
    runs: Runs, step: Any, run: StepRun, grads: Mapping[str, Tensor], context: Any = None
) -> _Slope | None:
    """Return the slope along some gradients of a run, by central differences of two lengths."""
    loss = _loss(run)
    parameters = {name: p for p, name in runs.names.items() if name in grads}
    norm = _norm(grads.values())
    weights = _norm(parameters.values())
    if loss is None or not 0.0 < norm < float("inf"):
        return None
    found = None
    for change in _CHANGES:
        length = min(change * max(abs(loss), 1e-3) / norm, change * (weights or 1.0))
        slopes = []
        for distance in (length, length / 2):
            ends = []
            for each in (distance, -distance):
                moved = [(p, grads[name], each / norm) for name, p in parameters.items()]
                contexts = [] if context is None else [context()]
                end = _loss(runs.run(step, *contexts, _moved(moved)))
                ends.append(float("nan") if end is None else end)
            slopes.append((ends[0] - ends[1]) / (2.0 * distance))
        spread = abs(slopes[0] - slopes[1])
        if spread < (float("inf") if found is None else found.spread):
            found = _Slope(norm, slopes[1], spread)
        if found is not None and found.spread < _ALLOWED / 4.0 * norm:
            break
    return found


def _norm(tensors: Any) -> float:
    return float(sum(float(x.detach().double().square().sum()) for x in tensors) ** 0.5)


@contextmanager
def _moved(parameters: list[tuple[Tensor, Tensor, float]]) -> Iterator[None]:
    """Move parameters along gradients; the state around it is restored by the caller."""
    with torch.no_grad():
        for p, grad, distance in parameters:
            p.add_(grad.to(p.dtype), alpha=distance)
    yield


def _row(name: str, module: str, found: _Slope, allowed: float) -> GradientRow:
    fails = not found.error <= allowed
    text = (
        "the loss does not change along the gradient as it says: the backward pass may have used other "
        "random numbers than the forward"
    )
    ratio = found.norm / found.slope if found.slope else float("nan")
    size = abs(found.slope)
    return GradientRow(
        name, "slope", module, 1, size, found.error, allowed, float("nan"), ratio, fails, text * fails
    )
