"""What a recorder writes of taps: the tables of activations, of attention heads and of residual blocks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import ACTIVATIONS, rows
from gradiometer.inputs import describe, on_device
from gradiometer.recorder.kinds import ACTIVATION_VALUES, ATTENTION_HEADS, RESIDUALS
from gradiometer.stats import Taps

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.kinds import Kind
    from gradiometer.recorder.step_ring import StepRing
    from gradiometer.recorder.store import RingLayout

_OWN: Final = (ATTENTION_HEADS, RESIDUALS)

OWNERS: Final[weakref.WeakKeyDictionary[Taps, Callable[[], StepRing | None]]] = weakref.WeakKeyDictionary()
"""Which recorder clears these taps."""


def kinds_of_taps(taps: object) -> list[Kind]:
    """Return the kinds of heads and blocks that taps measure, beside activations."""
    return [kind for kind in _OWN if isinstance(taps, Taps) and taps.measures(kind.schema)]


def append_taps(
    taps: Taps,
    inv_scale: Tensor | float | None,
    ring: Tensor,
    cursor: Tensor,
    layout: RingLayout,
    thresholds: Thresholds,
) -> None:
    """Write what taps have measured into the current step's slot, which the gradients opened."""
    columns, size = taps.stats().columns, len(taps.names)
    # of values, then of gradients
    both = columns.view(2, len(columns) // 2, ACTIVATIONS.width)
    both = nn.functional.pad(both, (0, 0, 0, size - both.shape[1]))
    columns = both.flatten(0, 1)
    if inv_scale is not None:
        if not isinstance(inv_scale, Tensor):
            inv_scale = rows.number(inv_scale, columns.device)
        scale = on_device(inv_scale.detach(), columns.device).to(torch.float64).reshape(())
        columns = torch.cat([columns[:size], ACTIVATIONS.scaled(columns[size:], scale)])
    columns = on_device(columns, ring.device)
    section = layout.adjacent(ACTIVATION_VALUES.name, 2)
    ops.append_(columns, ACTIVATIONS.flags_of(columns, thresholds), 0, ring, cursor, section)
    for kind in kinds_of_taps(taps):
        columns = on_device(taps.columns_of(kind.schema), ring.device)
        flags = kind.schema.flags_of(columns, thresholds)
        ops.append_(columns, flags, 0, ring, cursor, layout.sections[kind.name])


def names_of_taps(taps: Taps | None, parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of taps; raise ValueError if a parameter has one of them."""
    if taps is None:
        return ()
    if not isinstance(taps, Taps):
        msg = f"Recorder(taps=...): expected gm.Taps(model, ...), got {describe(taps)}"
        raise TypeError(msg)
    owner = OWNERS.get(taps, lambda: None)()
    if owner is not None and any([own is taps for own in owner._taps]):  # noqa: SLF001 of this package
        msg = "Recorder(taps=...): another Recorder or Monitor records these Taps, and clears them after "
        raise ValueError(msg + "each step; close that Monitor, or make other Taps: gm.Taps(model, ...)")
    twice = {*taps.names} & {*parameters}
    if twice:
        msg = f"Recorder(taps=...): {min(twice)!r} is the name of a tap and of a parameter; rename the tap"
        raise ValueError(msg)
    return taps.names
