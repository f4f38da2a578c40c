"""NaN and Inf: one finding, with the first tensor."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Finding, Severity, checked
from gradiometer.rules.first_nonfinite import FirstNonfinite, first_nonfinite, first_nonfinite_text
from gradiometer.rules.known import driver_of, has_loss_scale, most_skips

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import StepRecord


ADVICE: Final = {
    "grads": "{skip}look for a division by 0, log(0), sqrt(0) or an fp16 "
    "overflow in the backward of this layer",
    "weights": "go back to a checkpoint before this step, or look at how the weights were initialized or "
    "loaded; skip steps whose gradients are not finite{how}",
    "activations": "look at what this layer computes, and at its inputs: log(0), a division by 0, an "
    "overflow; a mask of -inf is no fault: tap the values before it",
    "activation_grads": "{skip}look for a division by 0, log(0), sqrt(0) or "
    "an fp16 overflow in the backward of what follows this activation",
    "updates": "the gradients were finite, so look at the optimizer: its eps, its state in half precision, "
    "the learning rate",
    "other": "look at what computes these values, and at its inputs: log(0), a division by 0, an overflow",
    "loss": "look at this step's batch, and for log(0), an empty mean or an overflow in the loss",
    "nothing": "look for a batch without samples, a mask that selects nothing, and targets that are all "
    "ignored (ignore_index); divide a sum by max(count, 1) instead",
    "both": "the loss is not finite either, so it began before the backward: look at this step's batch, at "
    "the weights, and for log(0), an empty mean or an overflow in the forward pass",
}

# how to skip a step, by the name of the driver, see `gradiometer.recorder.Driver`
SKIP: Final = {
    "loop": " (monitor.skip_step)",
    "watch": " (gm.check_finite before optimizer.step())",
    "trainer": "",
}
SCALE: Final = "if the loss scale is too large, start the GradScaler with a smaller init_scale; else "
LOCATE: Final = "; gm.locate_nonfinite(step, batch) names the operation"


@dataclass(eq=False, repr=False)
class NonFinite(BaseRule):
    """A NaN or Inf in a loss, gradient, weight, update or activation; names the first of several tensors.

    Consecutive non-finite steps are one finding. A skipped step has the severity ``skipped``, and at most
    info if the gradients have a loss scale, which such a step lowers, and the loss is finite. After
    ``patience`` non-finite steps in a row, which a loss scale cannot explain, it has ``severity``. If only
    activations are not finite, as scores with a mask of -inf, the finding is info.

    Args:
        skipped: severity of a skipped step.
        patience: number of steps in a row.
        severity: of a step that is not skipped, and of a weight that is not finite.
    """

    name = "nonfinite"
    kept = ("streak", "first")
    _: KW_ONLY
    skipped: Severity = Severity.WARNING
    patience: int = 10
    severity: Severity = Severity.ERROR
    streak: int = field(default=0, init=False)
    first: dict[str, object] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.skipped = Severity(self.skipped)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return one finding if any value of this step is not finite."""
        first = first_nonfinite(record)
        loss_is_bad = record.loss is not None and not math.isfinite(record.loss)
        if first is None and not loss_is_bad:
            if record.recorded:
                self.streak, self.first = 0, None
            return []
        kind = None if first is None else first.kind.name
        if first is not None and kind == "activations" and not loss_is_bad and len(record.nonfinite) == 1:
            self.streak, self.first = 0, None
            return [self._harmless(record, first)]
        self.streak += 1
        has_scale = has_loss_scale(record) and not loss_is_bad
        lasts = self.streak >= (max(self.patience, most_skips(record)) if has_scale else self.patience)
        harmless = record.skipped and not lasts and kind != "weights"
        skipped = self.skipped
        if has_scale:
            skipped = min(skipped, Severity.INFO)
        severity = min(skipped, self.severity) if harmless else self.severity
        if self.first is not None:
            # later steps have the same cause: they extend the first finding
            found = Finding.from_dict(self.first)
            if severity > found.severity and lasts:
                message = f"{found.message}; {self.streak} steps in a row are not finite"
                advice = (SCALE if has_scale else "") + found.advice
                found = replace(found, message=message, advice=advice)
        elif first is not None:
            # without the step's number, which the finding has separately
            message = str(first_nonfinite_text(record)).partition(", ")[2]
            advice = ADVICE.get(first.kind.name, ADVICE["other"])
            if loss_is_bad and first.kind.is_backward:
                # the loss comes before its gradients
                message = f"the loss is {record.loss_text}; then {message}"
                advice = ADVICE["both"]
            elif loss_is_bad:
                message += f"; the loss is {record.loss_text}"
            how = SKIP[driver_of(record)]
            advice = advice.format(how=how, skip="" if record.skipped else f"skip such steps{how}; ")
            found = self._finding(kind, first.name, float(first.n_nonfinite), message, advice + LOCATE)
        else:
            text, advice = f"the loss is {record.loss_text}", ADVICE["loss"]
            if record.recorded and record.measured().any() and not record.value("abs_max").any():
                text += ", though every gradient is 0, as for a mean over nothing"
                advice = ADVICE["nothing"]
            found = self._finding(None, None, math.nan, text, advice + LOCATE)
        found = replace(found, severity=severity, first_step=record.step, last_step=record.step)
        if self.first is None or severity > Finding.from_dict(self.first).severity:
            self.first = found.to_dict()
        return [found]

    def _harmless(self, record: StepRecord, first: FirstNonfinite) -> Finding:
        message = str(first_nonfinite_text(record)).partition(", ")[2]
        message += "; the loss and all gradients are finite"
        count = float(first.n_nonfinite)
        found = self._finding(first.kind.name, first.name, count, message, ADVICE["activations"])
        severity = min(self.severity, Severity.INFO)
        return replace(found, severity=severity, first_step=record.step, last_step=record.step)

    def check_value(self, key: str, value: Any) -> None:
        """Raise an error unless the value can replace the attribute ``key``."""
        super().check_value(key, value)
        if key == "first" and value is not None:
            checked(Finding.from_dict(value))

    def _finding(
        self, kind: str | None, tensor: str | None, value: float, message: str, advice: str
    ) -> Finding:
        return Finding(self.name, self.severity, 0, 0, kind, tensor, value, 0.0, message, advice)
