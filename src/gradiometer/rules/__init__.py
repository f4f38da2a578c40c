"""Rules: checks of every step, which report findings.

Each rule takes one `StepRecord` after the other (`check`) and keeps its own history
(``state_dict``, ``load_state_dict``). A custom rule is any object with the methods of
`gradiometer.rules.Rule`. Nothing here reads a device or a disk.

Rules share these options, where their signatures have them: ``severity`` of a finding; ``patience``, the
number of recorded steps in a row in which a condition holds before there is a finding; ``most``, the maximum
number of tensors, taps or routers named in a step; ``norms``, a history that several rules may share.
"""

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
from gradiometer.rules.defaults import default_rules
from gradiometer.rules.epsilon import Epsilon
from gradiometer.rules.fault import Fault, summarize
from gradiometer.rules.finding import Finding, Severity, checked
from gradiometer.rules.first_nonfinite import first_nonfinite_text
from gradiometer.rules.flow import NoGradientFlow, NoGradients
from gradiometer.rules.headlines import Headline, counts_text, headlines
from gradiometer.rules.history import NormHistory
from gradiometer.rules.hyperparameters import Hyperparameters
from gradiometer.rules.initialization import EvalMode, HighDropout, Initialization, Untied
from gradiometer.rules.layers import Dead, LayerImbalance
from gradiometer.rules.ledger import Ledger
from gradiometer.rules.levels import ChanceLevel, FadingGradients, StaysHigh
from gradiometer.rules.listing import first_of, table_of
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
from gradiometer.rules.protocol import Rule
from gradiometer.rules.ratios import GroupRatio, UpdateRatio
from gradiometer.rules.registered import NotRegistered
from gradiometer.rules.replicas import ReplicaDivergence
from gradiometer.rules.rows import UnusedRows
from gradiometer.rules.stuck import Stuck
from gradiometer.rules.update_bound import UpdateBound
from gradiometer.rules.values import CrossedZero, NonFiniteBuffer

__all__ = [
    "Accumulating",
    "AttentionDirection",
    "AttentionEntropy",
    "AttentionMask",
    "AttentionSum",
    "BaseNotFrozen",
    "BiasCorrection",
    "ChanceLevel",
    "ChangedGradients",
    "ChangedOutside",
    "CollapsingRouter",
    "Criterion",
    "CrossedZero",
    "Dead",
    "DeadUnits",
    "DecayedNorms",
    "DisagreeingRank",
    "Epsilon",
    "EvalMode",
    "Exploding",
    "FadingGradients",
    "Fault",
    "Finding",
    "FirstLoss",
    "GroupRates",
    "GroupRatio",
    "GrowingLogits",
    "Headline",
    "HighDropout",
    "Hyperparameters",
    "Initialization",
    "LabelShift",
    "LayerImbalance",
    "LearningRate",
    "Ledger",
    "LogitScale",
    "LoopOrder",
    "LossSpike",
    "MisplacedMoments",
    "NoGradientFlow",
    "NoGradients",
    "NonFinite",
    "NonFiniteBuffer",
    "NormHistory",
    "NormSpike",
    "Normalization",
    "NotAveraged",
    "NotRegistered",
    "NotUpdated",
    "OneClass",
    "Padding",
    "ReplicaDivergence",
    "Residual",
    "Rule",
    "SameBatch",
    "SameData",
    "Severity",
    "StaleSecondMoment",
    "StateReset",
    "StaysHigh",
    "Stuck",
    "UnknownTokens",
    "Untied",
    "UnusedRows",
    "UpdateBound",
    "UpdateRatio",
    "UpdateSpike",
    "Vanishing",
    "checked",
    "counts_text",
    "default_rules",
    "first_nonfinite_text",
    "first_of",
    "headlines",
    "summarize",
    "table_of",
]
