# ruff: noqa: PLC0415 interim
"""The report of a table of any schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradiometer.columns import ACTIVATIONS, EXPONENTS, PAIRS, Schema
from gradiometer.stats.activation_report import ActivationReport
from gradiometer.stats.pair_report import PairReport
from gradiometer.stats.precision_report import PrecisionReport
from gradiometer.stats.report import Report

if TYPE_CHECKING:
    from torch import Tensor

TableReport = Any


def report_of(
    schema: Schema, names: tuple[str, ...], columns: Tensor, *, flags: Any, thresholds: Any, fingerprints: Any
) -> Any:
    """Return the report."""
    if schema is PAIRS:
        return PairReport(names, columns)
    if schema is ACTIVATIONS:
        return ActivationReport(names, columns)
    if schema is EXPONENTS:
        return PrecisionReport(names, columns)
    packed = torch.cat([columns, flags.to(torch.float64).unsqueeze(1)], dim=1)
    return Report(names, packed, thresholds, fingerprints=fingerprints)


def stats_of(schema: Schema, names: tuple[str, ...], columns: Tensor) -> Any:
    """Return stats of these columns."""
    from gradiometer.stats.exponent_stats import ExponentStats
    from gradiometer.stats.pair_stats import PairStats

    return {EXPONENTS: ExponentStats, PAIRS: PairStats}[schema](names, columns)
