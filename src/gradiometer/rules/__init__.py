"""Rules: what is looked for in every step, and said as findings.

Each rule takes one `StepRecord` after the other (`check`) and keeps a history of its own
(``state_dict``, ``load_state_dict``). `docs/rules.md` has their formulas and defaults. A rule of your own is
any object with the methods of `gradiometer.protocols.Rule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.rules.history import NormHistory
from gradiometer.rules.layers import Dead, LayerImbalance
from gradiometer.rules.loss import LossSpike
from gradiometer.rules.nonfinite import NonFinite
from gradiometer.rules.norms import Exploding, NormSpike, Vanishing
from gradiometer.rules.ratios import GroupRatio, UpdateRatio

if TYPE_CHECKING:
    from gradiometer.protocols import Rule

__all__ = [
    "Dead",
    "Exploding",
    "GroupRatio",
    "LayerImbalance",
    "LossSpike",
    "NonFinite",
    "NormHistory",
    "NormSpike",
    "UpdateRatio",
    "Vanishing",
    "default_rules",
]


def default_rules() -> list[Rule]:
    """Return one of each rule, new; all but `GroupRatio`, which needs to know the groups."""
    norms = NormHistory()
    return [
        NonFinite(),
        NormSpike(norms=norms),
        LossSpike(),
        Exploding(norms=norms),
        Vanishing(norms=norms),
        Dead(),
        LayerImbalance(norms=norms),
        UpdateRatio(),
    ]
