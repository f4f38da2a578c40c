"""Gradients that something else changes before a step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord
    from gradiometer.rules.finding import Finding

ADVICE: Final = (
    "if this is clipping by value, or a clip that gm.watch does not see, such as FSDP1's, the norms before "
    "it are not recorded: use torch.nn.utils.clip_grad_norm_ or gm.clip_grad_norm_, or a gm.Monitor with "
    "record() right after backward()"
)


@dataclass(eq=False, repr=False)
class ChangedGradients(BaseRule):
    """Gradients that something has changed between ``backward()`` and ``optimizer.step()``.

    It needs `gradiometer.watch`, which sees each clip by `torch.nn.utils.clip_grad_norm_` and by gradiometer
    and records the gradients before it. Other changes are known only by the version counter of one gradient
    of each param group: the recorded gradients are then those after the change. It is not noticed if the
    backward pass was compiled together with the forward pass.
    """

    name = "changed_gradients"
    kept = ("streak", "since")
    _: KW_ONLY
    severity: Severity = Severity.INFO
    patience: int = 3
    streak: int = field(default=0, init=False)
    since: int = field(default=0, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding if gradients were changed in ``patience`` steps in a row."""
        if record.model is None or not record.recorded:
            return []
        self.streak = self.streak + 1 if record.model.changed_gradients else 0
        if self.streak == 1:
            self.since = record.step
        if self.streak < self.patience:
            return []
        text = "something changed the gradients between backward() and step(): the recorded ones are those "
        text += "after it"
        patience = float(self.patience)
        return [self.finding(record, self.since, None, patience, 0.0, text, ADVICE, self.severity, None)]
