"""Gradients that never arrive: at any parameter, or at some of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import WholeRule, modules_text
from gradiometer.rules.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Roster, StepRecord

__all__ = ["NoGradientFlow", "NoGradients"]

# names of layers that are used only for some inputs
ROUTED: Final = "expert"

CALL_ORDER: Final = (
    "in each step call loss.backward(), then monitor.record(), then optimizer.step(), and zero_grad() last "
    "or first"
)
WATCH: Final = "create the Monitor with the model whose output the loss is computed from"
CONNECT: Final = (
    "look for .detach(), .item(), torch.no_grad() or NumPy between these layers and the loss, and for layers "
    "that forward() does not call; freeze layers that are not meant to learn with requires_grad_(False)"
)
THAW: Final = "if they are meant to learn, call requires_grad_(True) on them before creating the optimizer"


class NoGradients(WholeRule):
    """No gradient at all, or gradients of exactly 0 only, for a while.

    The message names the likely mistake, from what else is known: whether weights change, and whether the
    loss depends on the model. If gradients were seen before and all of them are now exactly 0, as when a
    hinge loss has converged, it has severity info.

    Args:
        patience: number of recorded steps in a row.
        severity: the severity of the finding.
    """

    name = "no_gradients"
    kept = (*WholeRule.kept, "row", "since", "has_seen", "has_changed")

    def __init__(self, *, patience: int = 5, severity: Severity = Severity.WARNING) -> None:
        super().__init__(severity)
        self.patience = patience
        self.row = self.since = 0
        self.has_seen = self.has_changed = False

    def restart(self, size: int) -> None:
        """Start a new history."""
        super().restart(size)
        self.row = self.since = 0
        self.has_seen = self.has_changed = False

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding if nothing was measured for ``patience`` steps."""
        if record.value("abs_max").any() or record.value("n_nonfinite").any():
            self.has_seen, self.row = True, 0
            self.keep(record)
            return []
        moved = self.moved(record)
        self.row += 1
        if self.row == 1:
            self.since, self.has_changed = record.step, False
        elif moved is not None:
            self.has_changed = self.has_changed or bool(moved.any())
        if self.row < self.patience:
            return []
        are_zero = bool(record.measured().any())
        severity = min(self.severity, Severity.INFO) if are_zero and self.has_seen else self.severity
        message, advice = self._cause(record, are_zero=are_zero, knows_updates=moved is not None)
        return [self.finding(record, self.since, None, 0.0, 0.0, message, advice, severity)]

    def _cause(self, record: StepRecord, *, are_zero: bool, knows_updates: bool) -> tuple[str, str]:
        what = "every gradient is exactly 0" if are_zero else "record() finds no gradient"
        what = f"{what} since step {self.since}"
        reached = None if record.model is None else record.model.reached
        if self.has_changed:
            return (
                f"{what}, but the weights change: record() is called after zero_grad(), which must follow it",
                CALL_ORDER,
            )
        if reached is False:
            return f"{what}: the loss does not depend on the watched model, so another one is trained", WATCH
        if are_zero:
            text = f"{what}: the loss is multiplied by 0 or constant, or record() is called after zero_grad()"
            return text, CALL_ORDER
        if reached:
            return f"{what}: backward() is not called before it", CALL_ORDER
        if knows_updates:
            text = f"{what}, and no weight changes: backward() is not called, or another model is trained"
            return text, f"{CALL_ORDER}; {WATCH}"
        text = f"{what}: backward() is not called before it, zero_grad() is, or another model is trained"
        return text, f"{CALL_ORDER}; {WATCH}"


class NoGradientFlow(WholeRule):
    """Parameters that require a gradient but do not get one, while others do.

    The finding names their modules. Parameters that get none from the start, or from some step on, count
    after ``patience`` recorded steps; gradients of exactly 0 are reported by `Dead`. Layers whose names
    contain ``expert`` have severity info, since a step may route nothing to them. Frozen parameters,
    ``requires_grad=False``, are one finding of severity info.

    Args:
        patience: number of recorded steps in a row.
        severity: the severity of a finding.
    """

    name = "no_gradient_flow"
    kept = (*WholeRule.kept, "row", "since")

    def __init__(self, *, patience: int = 10, severity: Severity = Severity.WARNING) -> None:
        super().__init__(severity)
        self.patience = patience
        self.row = self.since = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._holds = torch.zeros(0, dtype=torch.bool, device="cpu")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.row, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()

    def prepare(self, roster: Roster) -> None:
        """Find the tensors with elements."""
        self._holds = torch.tensor(
            [math.prod(shape) > 0 for shape in roster.shapes], dtype=torch.bool, device="cpu"
        )

    def look(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about parameters without a gradient."""
        measured = record.measured()
        missing = self._holds & ~measured
        if not missing.any():
            if self.row.any():
                self.row = torch.zeros_like(self.row)
            return []
        if not measured.any() or record.model is None or len(record.model.requires_grad) != len(measured):
            return []
        self.row = (self.row + 1.0).mul_(missing)
        self.since = torch.where(self.row == 1.0, float(record.step), self.since)
        lasting = self.row >= self.patience
        if not lasting.any():
            return []
        wanted = torch.tensor(record.model.requires_grad, dtype=torch.bool, device="cpu")
        names = record.roster.names
        found = []
        routed = torch.tensor([ROUTED in name for name in names], dtype=torch.bool, device="cpu")
        for which, severity in ((wanted & ~routed, self.severity), (wanted & routed, Severity.INFO)):
            for since in self.since[lasting & which].unique().tolist():
                places = (lasting & which & (self.since == since)).nonzero().flatten().tolist()
                text = f"no gradient flows to {modules_text(names, places)}, since step {int(since)}"
                found.append(self._finding(record, int(since), places, text, CONNECT, severity))
        frozen = (lasting & ~wanted).nonzero().flatten().tolist()
        if frozen:
            text = f"{modules_text(names, frozen)}: frozen, requires_grad is False"
            since = int(self.since[frozen].min())
            found.append(self._finding(record, since, frozen, text, THAW, Severity.INFO))
        return found

    def _finding(
        self, record: StepRecord, since: int, places: list[int], text: str, advice: str, severity: Severity
    ) -> Finding:
        first, share = record.roster.names[places[0]], len(places) / len(record.roster.names)
        return self.finding(record, since, first, share, 0.0, text, advice, min(severity, self.severity))
