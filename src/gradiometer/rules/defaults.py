"""The default rules of a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.rules.activations import CollapsingRouter, DeadUnits, GrowingLogits
from gradiometer.rules.agreement import DisagreeingRank, NotAveraged, SameData
from gradiometer.rules.attention import (
    AttentionEntropy,
    AttentionMask,
    AttentionSum,
    LogitScale,
    Residual,
)
from gradiometer.rules.attention_direction import AttentionDirection
from gradiometer.rules.bias_correction import BiasCorrection
from gradiometer.rules.changed_gradients import ChangedGradients
from gradiometer.rules.criterion import Criterion, FirstLoss
from gradiometer.rules.data import LabelShift, OneClass, Padding, SameBatch, UnknownTokens
from gradiometer.rules.epsilon import Epsilon
from gradiometer.rules.flow import NoGradientFlow, NoGradients
from gradiometer.rules.history import NormHistory
from gradiometer.rules.hyperparameters import Hyperparameters
from gradiometer.rules.initialization import EvalMode, HighDropout, Initialization, Untied
from gradiometer.rules.layers import Dead, LayerImbalance
from gradiometer.rules.levels import ChanceLevel, FadingGradients, StaysHigh
from gradiometer.rules.loop_order import LoopOrder
from gradiometer.rules.loss import LossSpike
from gradiometer.rules.moments import MisplacedMoments
from gradiometer.rules.nonfinite import NonFinite
from gradiometer.rules.normalization import Normalization
from gradiometer.rules.norms import Exploding, NormSpike, Vanishing
from gradiometer.rules.not_updated import NotUpdated
from gradiometer.rules.optimizer import Accumulating, LearningRate, UpdateSpike
from gradiometer.rules.optimizer_states import StaleSecondMoment, StateReset
from gradiometer.rules.outside import ChangedOutside
from gradiometer.rules.param_groups import BaseNotFrozen, DecayedNorms, GroupRates
from gradiometer.rules.ratios import UpdateRatio
from gradiometer.rules.registered import NotRegistered
from gradiometer.rules.replicas import ReplicaDivergence
from gradiometer.rules.rows import UnusedRows
from gradiometer.rules.stuck import Stuck
from gradiometer.rules.update_bound import UpdateBound
from gradiometer.rules.values import CrossedZero, NonFiniteBuffer

if TYPE_CHECKING:
    from gradiometer.rules.protocol import Rule


def default_rules() -> list[Rule]:
    """Return a new instance of each rule except `GroupRatio`, which needs to know the groups."""
    norms = NormHistory()
    return [
        NonFinite(),
        NonFiniteBuffer(),
        Normalization(),
        CrossedZero(),
        ReplicaDivergence(),
        ChangedOutside(),
        UpdateBound(),
        MisplacedMoments(),
        LearningRate(),
        GroupRates(),
        Hyperparameters(),
        DecayedNorms(),
        BaseNotFrozen(),
        NotRegistered(),
        Epsilon(),
        BiasCorrection(),
        StateReset(),
        StaleSecondMoment(),
        NoGradients(),
        NoGradientFlow(),
        NotUpdated(),
        Stuck(),
        Accumulating(),
        Initialization(),
        Untied(),
        EvalMode(),
        HighDropout(),
        LoopOrder(),
        ChangedGradients(),
        Criterion(),
        FirstLoss(),
        LabelShift(),
        Padding(),
        SameBatch(),
        SameData(),
        DisagreeingRank(),
        NotAveraged(),
        OneClass(),
        UnknownTokens(),
        UpdateSpike(),
        NormSpike(),
        LossSpike(),
        StaysHigh(),
        ChanceLevel(),
        FadingGradients(),
        Exploding(norms=norms),
        Vanishing(norms=norms),
        Dead(),
        DeadUnits(),
        GrowingLogits(),
        CollapsingRouter(),
        AttentionMask(),
        AttentionDirection(),
        AttentionSum(),
        AttentionEntropy(),
        LogitScale(),
        Residual(),
        LayerImbalance(norms=norms),
        UpdateRatio(),
        UnusedRows(),
    ]
