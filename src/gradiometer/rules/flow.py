"""Gradients that never arrive: at any parameter, or at some of them."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.rules.base import ChangeRule, WholeRule, mask
from gradiometer.rules.finding import Finding, Severity, modules_text
from gradiometer.rules.known import driver_of, optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.recorder import Rows, StepRecord


# names of layers that are used only for some inputs
ROUTED: Final = "expert"

# what the loop has to do, by the name of the driver, see `gradiometer.recorder.Driver`
CALL_ORDER: Final = {
    "loop": "in each step call loss.backward(), then monitor.record(), then optimizer.step(), and "
    "zero_grad() last or first",
    "watch": "in each step call loss.backward(), then optimizer.step(), and zero_grad() last or first",
    "trainer": "look for .detach(), .item() or torch.no_grad() between the model and the loss; with manual "
    "optimization, clear the gradients after optimizer.step() or before the backward",
}
CUT: Final = "look for .detach(), .item() or torch.no_grad() between it and the loss"
WATCH: Final = {
    "loop": "create the Monitor with the model whose output the loss is computed from",
    "watch": "pass gm.watch the model whose output the loss is computed from, and its optimizer",
    "trainer": "watch the trainer whose model is trained",
}
# the beginning of a message
_FINDS_NONE: Final = {
    "loop": "record() finds no gradient",
    "watch": "optimizer.step() finds no gradient",
    "trainer": "the trainer's optimizer finds no gradient",
}
# what may clear gradients too early, and what makes gradients that are 0
# by the framework of `ModelState.framework`
_WATCHED: Final = {
    "DeepSpeed": "use gm.watch(engine) instead of gm.Monitor",
    "Megatron-LM": "use gm.watch(model, optimizer) instead of gm.Monitor",
}
_CLEARED: Final = {
    "loop": "record() is called after zero_grad()",
    "watch": "zero_grad() is called between backward() and optimizer.step()",
    "trainer": "the gradients are cleared before the optimizer's step",
}
_ZERO: Final = "the loss is constant (such as multiplied by 0, or fully masked), the gradients underflow"
_TAKEN: Final = (
    "other code takes the gradients, such as an optimizer that steps in the backward or one that moves them "
    "to master weights"
)
CONNECT: Final = (
    "look for .detach(), .item(), torch.no_grad() or NumPy between these layers and the loss, and for layers "
    "that forward() does not call; freeze layers that are not meant to learn, such as a target network or a "
    "teacher, with requires_grad_(False)"
)
THAW: Final = "if they are meant to learn, call requires_grad_(True) on them, and pass them to the optimizer"
HOLD: Final = "if they are meant to learn, pass them to an optimizer, and connect them to the loss"


@dataclass(eq=False, repr=False)
class NoGradients(ChangeRule):
    """No gradient at all, or gradients of exactly 0 only, for a while.

    The message names the likely mistakes, from what else is known: who calls the monitor, whether weights
    change, and whether the loss depends on the model. If gradients were seen before and all of them are now
    exactly 0, as when a hinge loss has converged, it has severity info.
    """

    name = "no_gradients"
    kept = (*ChangeRule.kept, "streak", "since", "has_seen", "has_changed")
    _: KW_ONLY
    patience: int = 5

    def restart(self, size: int) -> None:
        """Start a new history."""
        super().restart(size)
        self.streak = self.since = 0
        self.has_seen = self.has_changed = False

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return a finding if nothing was measured for ``patience`` steps."""
        moved = self.moved(record)
        if record.value("abs_max").any() or record.value("n_nonfinite").any():
            self.has_seen, self.streak = True, 0
            return []
        self.streak += 1
        if self.streak == 1:
            self.since, self.has_changed = record.step, False
        elif moved is not None:
            self.has_changed = self.has_changed or bool(moved.any())
        if self.streak < self.patience:
            return []
        are_zero = bool(record.measured().any())
        severity = min(self.severity, Severity.INFO) if are_zero and self.has_seen else self.severity
        message, advice = self._cause(record, are_zero=are_zero, knows_updates=moved is not None)
        return [self.finding(record, self.since, None, 0.0, 0.0, message, advice, severity)]

    def _cause(self, record: StepRecord, *, are_zero: bool, knows_updates: bool) -> tuple[str, str]:
        driver, model = driver_of(record), record.model
        text = "every gradient is exactly 0" if are_zero else _FINDS_NONE[driver]
        text = f"{text} since step {self.since}"
        order, watch, cleared = CALL_ORDER[driver], WATCH[driver], _CLEARED[driver]
        if model is not None and model.requires_grad and not any(model.requires_grad):
            return f"{text}: every parameter of the watched model is frozen, requires_grad is False", THAW
        if model is not None and model.framework and driver == "loop" and not are_zero:
            return f"{text}: {model.framework} keeps them in its own buffers", _WATCHED[model.framework]
        if self.has_changed:
            other = "weight decay or momentum alone changes them" if are_zero else _TAKEN
            return f"{text}, but the weights change: {cleared}, or {other}", order
        if model is not None and model.reached is False:
            text += ": the loss does not depend on the watched model's parameters: another model is trained, "
            return f"{text}or the graph is cut", f"{watch}; {CUT}"
        if are_zero:
            return f"{text}: {_ZERO}, or {cleared}", order
        if driver == "trainer":
            return f"{text}: the loss does not depend on the parameters, or {cleared}", order
        causes = ["backward() is not called before it", cleared]
        # without weights it is not known whether something else trains the model
        causes += [] if knows_updates else [_TAKEN]
        if model is None or not model.reached:
            causes, order = [*causes, "another model is trained"], f"{order}; {watch}"
        still = ", and no weight changes" if knows_updates else ""
        return f"{text}{still}: {', '.join(causes[:-1])}, or {causes[-1]}", order


@dataclass(eq=False, repr=False)
class NoGradientFlow(WholeRule):
    """Parameters that require a gradient but do not get one, while others do.

    The finding names their modules. Parameters that get none from the start, or from some step on, count
    after ``patience`` recorded steps; gradients of exactly 0 are reported by `Dead`. Layers whose names
    contain ``expert`` have severity info, since a step may route nothing to them. Frozen parameters,
    ``requires_grad=False``, are one finding of severity info. With `gradiometer.watch` and trainers, so are
    parameters that no optimizer holds, such as a target network or a teacher.
    """

    name = "no_gradient_flow"
    kept = (*WholeRule.kept, "streak", "since", "state")
    _: KW_ONLY
    patience: int = 10

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.streak, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        # 2 for parameters that are meant to get a gradient, 1 for those that no optimizer holds, 0 for frozen
        self.state = torch.zeros(size, dtype=torch.int64, device="cpu")

    def prepare(self, rows: Rows) -> None:
        """Find the tensors with elements."""
        self._holds = mask([math.prod(shape) > 0 for shape in rows.shapes])

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about parameters without a gradient."""
        measured = record.measured()
        missing = self._holds & ~measured
        if not missing.any():
            if self.streak.any():
                self.streak = torch.zeros_like(self.streak)
            return []
        if not measured.any() or record.model is None or len(record.model.requires_grad) != len(measured):
            return []
        wanted = mask(record.model.requires_grad)
        names, known = record.names(), optimizers_of(record)
        left_out = torch.zeros_like(wanted)
        if known is not None:
            # a target network or a teacher, which is not meant to get a gradient
            left_out = wanted & ~(known.held | known.keeps_small_updates)
            wanted = wanted & ~left_out
        before, self.state = self.state, 2 * wanted + 1 * left_out
        # steps in which a parameter was frozen do not count after it is not
        self.streak = (self.streak * (self.state == before) + 1.0).mul_(missing)
        self.since = torch.where(self.streak == 1.0, float(record.step), self.since)
        lasting = self.streak >= self.patience
        if not lasting.any():
            return []
        found = []
        routed = mask([ROUTED in name for name in names])
        for which, severity in ((wanted & ~routed, self.severity), (wanted & routed, Severity.INFO)):
            for since in self.since[lasting & which].unique().tolist():
                places = (lasting & which & (self.since == since)).nonzero().flatten().tolist()
                text = f"no gradient flows to {modules_text(names, places)}, since step {int(since)}"
                if known is not None and known.idle(measured)[places].all():
                    text += ", or their optimizer does not step"
                found.append(self._finding(record, int(since), places, text, CONNECT, severity))
        watched = "watched " if driver_of(record) == "watch" else ""
        for which, state, advice in (
            (~wanted & ~left_out, "frozen, requires_grad is False", THAW),
            (left_out, f"no {watched}optimizer holds them, and they get no gradient", HOLD),
        ):
            places = (lasting & which).nonzero().flatten().tolist()
            if places:
                since, text = int(self.since[places].min()), f"{modules_text(names, places)}: {state}"
                found.append(self._finding(record, since, places, text, advice, Severity.INFO))
        return found

    def _finding(
        self, record: StepRecord, since: int, places: list[int], text: str, advice: str, severity: Severity
    ) -> Finding:
        names = record.names()
        first, share = names[places[0]], len(places) / len(names)
        return self.finding(record, since, first, share, 0.0, text, advice, min(severity, self.severity))
