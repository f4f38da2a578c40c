"""What the distances between two runs say, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradiometer.runs.distances import UNRELATED
from gradiometer.stats import number

if TYPE_CHECKING:
    from gradiometer.runs.departure import Departure
    from gradiometer.runs.distances import Distances

# a limit that hides a gradient of twice the size
_BLIND: Final = 0.5
# a share of tensors
_MOST: Final = 0.5


def verdict(found: Distances) -> str:
    """Return how far the runs are apart."""
    first, last = found.steps[0], found.steps[-1]
    typical, one = (
        [number(x, 2) for x in found.grads.nanmedian(dim=1).values[[0, -1]].tolist()],
        found.departure,
    )
    if found.unrelated:
        return _unrelated(found)
    if one is not None and one.lasts:
        if one.step == first:
            text = (
                f"not the same up to rounding from the first compared step, {first:,}, on: `{one.name}` is "
            )
            text += f"{number(one.distance, 2)} apart, where {found.rounding} explains "
            return text + number(one.explained, 2) + _factor(one)
        text = f"the same up to rounding until step {one.step:,}; then {_name(found, one)} leaves it, "
        return f"{text}{number(one.ratio, 2)} times what the steps before explain{_factor(one)}"
    if not found.grads.nan_to_num(nan=0.0).any():
        return f"no distance in {_steps(found)}: projections are equal"
    # a fault that is smaller is not seen
    blind = (found.limits.nanmedian(dim=1).values > _BLIND).nonzero().flatten().tolist()
    if not blind:
        text = f"the same up to rounding in {_steps(found)}, as in {found.rounding}"
    elif blind[0]:
        text = f"the same up to rounding until step {found.steps[blind[0]]:,}, as in {found.rounding}, "
        text += "and from there on too far apart to tell a fault from it"
    else:
        text = f"too far apart to tell a fault from rounding from the first compared step, {first:,}, on"
    text += f": most gradients are {typical[0]} apart in step {first:,}"
    if last != first:
        text += f", {typical[1]} in step {last:,}"
    if one is not None:
        text += f"; {_name(found, one)} is {number(one.distance, 2)} apart in step {one.step:,}, "
        text += f"{number(one.ratio, 2)} times what is explained before it, and "
        if one.lasts is not None:
            text += "this does not last"
        elif one.step in found.steps[-2:]:
            text += "too few steps follow to tell"
        else:
            text += "whether it lasts can't be told"
        is_grad = one.kind == "grads"
        cause = (
            "an activation near 0 that changed sign" if is_grad else "a gradient near 0 that Adam amplifies"
        )
        text += _factor(one) or f": a fault, or {cause}"
    if blind and found.total is None:
        text += "; projected weights of both runs would tell more"
    return text


def _unrelated(found: Distances) -> str:
    cosine = float(found.cosines[0].nanmedian())
    text = f"different from the first compared step, {found.steps[0]:,}, on: the cosine of most gradients is "
    text += f"{cosine:.2f}"
    if found.total is None:
        return text
    start = float(found.total[0])
    if start > UNRELATED:
        return f"{text}, and the weights are {number(start, 2)} apart"
    text += f", though the weights are only {number(start, 2)} apart"
    return text + ": the batches, the random numbers or the loss differ"


def _factor(one: Departure) -> str:
    """Return the factor, and how many tensors have it."""
    if one.factor is None:
        return ""
    text = f": in B it is {number(one.factor, 3)} times that of A"
    if one.kind == "updates" and one.shared > _MOST:
        which = "all updates" if one.shared == 1 else "most updates"
        text += f", and so are {which}, as with another learning rate"
    return text


def _name(found: Distances, one: Departure) -> str:
    """Return the name, for an update with the step that made it."""
    if one.kind == "grads":
        return f"`{one.name}`"
    before = found.steps[found.steps.index(one.step) - 1]
    made = (
        f"the update of step {before:,}" if before == one.step - 1 else f"the updates since step {before:,}"
    )
    return f"`{one.name}` ({made})"


def _steps(found: Distances) -> str:
    return f"{len(found.steps):,} compared step{'s' if len(found.steps) > 1 else ''}"
