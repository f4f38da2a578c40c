"""Parameters that the loss depends on, and the model does not have."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Severity
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import ModelState, StepRecord
    from gradiometer.rules.finding import Finding

REGISTER: Final = (
    "keep layers in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList or nn.ParameterDict, "
    "so that model.parameters(), .to() and state_dict() include them; if they are kept apart on purpose, "
    "freeze them with requires_grad_(False)"
)
FOREIGN: Final = (
    "that is right for a second model, such as the discriminator of a GAN; layers of this model have to be "
    "attributes of a module"
)
CREATE: Final = (
    "create these layers in __init__() of a module, not in forward(), and pass them to the optimizer"
)


@dataclass(eq=False, repr=False)
class NotRegistered(BaseRule):
    """Parameters that the loss depends on, but that the model does not have.

    It needs a loss that is passed with its autograd graph, and looks at that of the first one. Layers that a
    module keeps in a Python list are not registered: ``model.parameters()`` does not return them, so the
    optimizer does not train them. Parameters that a known optimizer holds are left out. If parameters are in
    no list of the model, they may be those of another model, and the finding has severity info, unless they
    are gone some steps later, as those that ``forward()`` creates in each step.
    """

    name = "not_registered"
    kept = ("since",)
    _: KW_ONLY
    since: int = field(default=-1, init=False)

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding if the graph of the loss leads to such parameters."""
        model = record.model
        if model is None or not (model.unregistered or (model.foreign and model.reached)):
            return []
        self.since = record.step if self.since < 0 else self.since
        if not model.unregistered:
            return [self._foreign(record, model)]
        some = "; ".join(model.unregistered[:3])
        more = len(model.unregistered) - 3
        some += f"; and {more} more containers" if more > 0 else ""
        text = f"the loss depends on parameters that are not registered in the model: {some}: "
        text += "model.parameters() does not return them, so the optimizer does not train them"
        count = float(len(model.unregistered))
        return [self.finding(record, self.since, None, count, 0.0, text, REGISTER, self.severity, None)]

    def _foreign(self, record: StepRecord, model: ModelState) -> Finding:
        watched = " or a watched optimizer" if optimizers_of(record) is not None else ""
        text = f"the loss depends on {model.foreign} parameters that are not in the model{watched}"
        severity, advice = min(self.severity, Severity.INFO), FOREIGN
        if model.is_foreign_gone:
            text += ", and that were gone some steps later: they are created anew in each step, so they "
            text += "never learn"
            severity, advice = self.severity, CREATE
        return self.finding(record, self.since, None, float(model.foreign), 0.0, text, advice, severity, None)
