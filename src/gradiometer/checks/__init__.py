"""Examine a model before it trains: `check_model` asks questions, its contracts, and reports each answer.

A model and a batch go in; a `ModelReport` comes out, with a line for each contract. A `Probe` runs the model
with changed inputs, in float64 where it has that. Contracts are functions of a probe, each in a table under
its name. Everything that was changed is restored. Nothing here knows runs, sinks or trainers.
"""

from gradiometer.checks.check_gradients import check_gradients
from gradiometer.checks.check_model import check_model
from gradiometer.checks.gradient_report import GradientReport
from gradiometer.checks.loss_graph import bounded_logits, leaves_of
from gradiometer.checks.report import ContractResult, Evidence, ModelReport, Status
from gradiometer.checks.save_reference import save_reference

__all__ = [
    "ContractResult",
    "Evidence",
    "GradientReport",
    "ModelReport",
    "Status",
    "bounded_logits",
    "check_gradients",
    "check_model",
    "leaves_of",
    "save_reference",
]
