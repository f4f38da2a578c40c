"""The option ``check`` of `watch`: broken contracts of the model, as findings of the first step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from gradiometer.checks import ModelReport, check_model
from gradiometer.integrations.frameworks import is_first
from gradiometer.rules import default_rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding

_LOG = logging.getLogger("gradiometer")


class ModelContracts:
    """A rule that reports the broken contracts of a model once, in the first step it sees."""

    name = "contracts"

    def __init__(self, report: ModelReport) -> None:
        self._report = report
        self._is_told = False

    def check(self, record: StepRecord) -> Sequence[Finding]:
        """Return the findings in the first step."""
        if self._is_told:
            return ()
        self._is_told = True
        return self._report.findings(record.step)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty history: a resumed run examines the model again."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def with_contracts(
    options: Mapping[str, Any], model: object, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return options of a `Monitor`: without ``check``, and with a rule that reports what it found.

    Args:
        options: those of `watch`; ``check`` is a batch, or a `ModelReport`.
        model: the model.
        optimizers: what updates it.

    Raises:
        TypeError: if the model is not a module.
        ValueError: if the model fails on the batch.
    """
    if options.get("check") is None:
        return {name: value for name, value in options.items() if name != "check"}
    options = dict(options)
    batch, rules = options.pop("check"), options.get("rules")
    # only the first rank has findings
    if is_first() or options.get("ranks", True) is False:
        report = batch
        if not isinstance(batch, ModelReport):
            if not isinstance(model, nn.Module):
                raise TypeError(f"watch: check= needs a module as the model, got {type(model).__name__}")
            report = check_model(model, batch, optimizer=list(optimizers) or None)
        if not report:
            _LOG.warning("check_model: %s", report.summary)
        options["rules"] = [ModelContracts(report), *(default_rules() if rules is None else rules)]
    return options
