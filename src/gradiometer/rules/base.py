"""Base classes of rules: saving and restoring a history, and choosing the tensors to name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradiometer.recorder import label
from gradiometer.rules.finding import Finding, Severity, times
from gradiometer.rules.history import FLOOR, CopyHistory, History, NormHistory, SpikeHistory, is_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradiometer.recorder import Rows, StepRecord


_HISTORIES = (CopyHistory, History, NormHistory, SpikeHistory)
# maximum number of tensors that one rule names in one step
MOST = 5
# the kinds that show how weights change, the exact one first
CHANGES = ("updates", "weights")


class Observation(NamedTuple):
    """An observation about one tensor."""

    value: float
    threshold: float
    message: str
    advice: str
    severity: Severity


@dataclass(eq=False, repr=False)
class BaseRule:
    """A rule whose history is in the attributes listed in ``kept``. Its options are fields.

    Attributes:
        name: as in `Finding.rule`.
        severity: the severity of its findings.
    """

    name: str = field(init=False)
    kept: ClassVar[tuple[str, ...]] = ()
    _: KW_ONLY
    severity: Severity = Severity.WARNING

    def __post_init__(self) -> None:
        self.severity = Severity(self.severity)

    def finding(
        self,
        record: StepRecord,
        since: int,
        tensor: str | None,
        value: float,
        threshold: float,
        message: str,
        advice: str,
        severity: Severity | None = None,
        kind: str | None = "grads",
    ) -> Finding:
        """Return a finding from step ``since`` to this one."""
        severity = self.severity if severity is None else severity
        fields = severity, since, record.step, kind, tensor, value, threshold, message, advice
        return Finding(self.name, *fields)

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of the history, as plain values and tensors."""
        return {key: _plain(getattr(self, key)) for key in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; raise ValueError, and change nothing, for an unfit state."""
        if not isinstance(state, Mapping) or set(state) != set(self.kept):
            keys = f"with the keys {list(state)}" if isinstance(state, Mapping) else f"{state!r:.40}"
            msg = f"{type(self).__name__}: got the state of another rule, {keys}; "
            raise ValueError(msg + f"pass one with the keys {list(self.kept)}")
        new = {key: _plain(value) for key, value in state.items()}
        for key, value in new.items():
            try:
                self.check_value(key, value)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                msg = f"{type(self).__name__}: {key} in the state does not fit ({error})"
                raise ValueError(msg) from None
        for key, value in new.items():
            mine = getattr(self, key)
            if isinstance(mine, _HISTORIES):
                mine.load_state_dict(value)
            else:
                setattr(self, key, value)

    def check_value(self, key: str, value: Any) -> None:
        """Raise an error unless the value can replace the attribute ``key``."""
        mine = getattr(self, key)
        if key in {"before_step", "after_step"}:
            if value is not None and type(value) is not int:
                raise ValueError(f"expected a step or None, got {value!r:.40}")
        elif isinstance(mine, _HISTORIES):
            mine.check_state(value)
        elif isinstance(mine, Tensor):
            if not isinstance(value, Tensor) or value.dtype != mine.dtype or value.dim() != mine.dim():
                raise ValueError(f"expected a tensor of {mine.dtype} with {mine.dim()} dimensions")
        elif isinstance(mine, list):
            if not is_names(value):
                raise ValueError("expected a list of str")
        elif isinstance(mine, (int, float)) and (
            # no float in place of a number of steps
            not isinstance(value, (int, float) if isinstance(mine, float) else int)
            or isinstance(value, bool) != isinstance(mine, bool)
        ):
            raise ValueError(f"expected {type(mine).__name__}, got {value!r:.40}")


@dataclass(eq=False, repr=False)
class WholeRule(BaseRule):
    """A rule about the tensors of recorded steps, with findings about all of them or about groups of them."""

    # `names` are the tensors that the history is about
    kept: ClassVar[tuple[str, ...]] = ("names",)

    # it checks steps with a table of the first of these kinds that the run records
    kinds: ClassVar[tuple[str, ...]] = ("grads",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names: list[str] = []
        self._known_rows: Rows | None = None
        self.restart(0)

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return the findings of this step; none if the tensors that it checks were not measured."""
        kind = recorded_kind(record, self.kinds)
        if kind is None or not record.has(kind):
            return []
        rows = record.catalog.rows(kind)
        if rows is not self._known_rows:
            self._known_rows = rows
            if self.names != list(rows.names):  # other tensors need a new history
                self.names = list(rows.names)
                self.restart(len(self.names))
            self.prepare(rows)
        return self.examine(record)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history; the next `check` compares its names again."""
        super().load_state_dict(state)
        self._known_rows = None

    def prepare(self, rows: Rows) -> None:
        """Prepare for other rows, or for a restored history."""

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Return the findings of a step with a table of one of `kinds`."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class TensorRule(WholeRule):
    """A rule that names a few tensors.

    It names at most ``most`` tensors: first those that it named before, then the worst. So a run in which
    everything goes wrong has a few findings, not one per tensor. The first message counts the others.
    """

    kept: ClassVar[tuple[str, ...]] = (*WholeRule.kept, "named")
    _: KW_ONLY
    most: int = MOST

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most < 1:
            raise ValueError(f"{type(self).__name__}(most={self.most!r}): most must be at least 1")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.named = torch.zeros(size, dtype=torch.bool, device="cpu")

    def findings(
        self,
        record: StepRecord,
        kind: str,
        found: Tensor,
        badness: Tensor,
        describe: Callable[[int], Observation],
        since: Tensor | None = None,
    ) -> list[Finding]:
        """Return findings about the worst of the tensors in ``found``.

        Args:
            record: the step.
            kind: the kind of the tensors.
            found: ``(N,) bool``.
            badness: ``(N,)``, larger is worse.
            describe: returns the observation about the tensor at an index; its message continues after the
                name.
            since: ``(N,)``, the step at which each began; None for this step.
        """
        places = found.nonzero().flatten()
        if not len(places):
            return []
        places = places[badness[places].argsort(descending=True, stable=True)]
        places = places[self.named[places].to(torch.int8).argsort(descending=True, stable=True)]
        chosen = places[: self.most]
        self.named = torch.zeros_like(found).index_fill_(0, chosen, True)
        more = len(places) - len(chosen)
        others = f"; {more:,} more {'tensor is' if more == 1 else 'tensors are'} affected" if more else ""
        made: list[Finding] = []
        for place in chosen.tolist():
            value, limit, message, advice, severity = describe(place)
            name = record.names(kind)[place]
            begun = record.step if since is None else int(since[place])
            text = f"{label(kind, name)}: {message}{'' if made else others}"
            made.append(self.finding(record, begun, name, value, limit, text, advice, severity, kind))
        return made


class Spike(NamedTuple):
    """A total norm that is a spike, its usual value, the limit, and a message."""

    total: float
    usual: float
    limit: float
    message: str


@dataclass(eq=False, repr=False)
class SpikeRule(BaseRule):
    """A rule about a total norm far above its recent past."""

    kept: ClassVar[tuple[str, ...]] = ("history", "known")
    _: KW_ONLY
    deviations: float = 8.0
    history: SpikeHistory = field(default_factory=SpikeHistory, init=False)
    known: int = field(default=0, init=False)

    def spike(
        self, record: StepRecord, kind: str, subject: str, squares: Tensor, scale: float = 1.0
    ) -> Spike | None:
        """Return a total norm that is a spike, with its usual value, the limit and a message.

        ``squares``: of the norms, ``(N,)``; they are divided by ``scale``. A total that is 0 or not finite is
        left out. ``subject`` begins the message.
        """
        total = math.sqrt(float(squares.sum()))
        if not (0.0 < total < math.inf and 0.0 < scale < math.inf):
            return None
        # tensors that are measured for the first time, such as unfrozen ones, raise the total for good
        count = int(squares.count_nonzero())
        if count > self.known:
            self.known = count
            self.history.restart()
        z, usual, deviation = self.history.score(math.log(total / scale), FLOOR)
        if z <= self.deviations:
            return None
        limit, usual, place = math.exp(usual + self.deviations * deviation), math.exp(usual), squares.argmax()
        text = f"{subject} {total:.3g}, {times(total / (usual * scale))} its usual {usual * scale:.3g}; "
        text += f"{float(squares[place]) / total**2:.0%} of its square comes from "
        return Spike(total, usual * scale, limit * scale, text + label(kind, record.names(kind)[int(place)]))


@dataclass(eq=False, repr=False)
class ChangeRule(WholeRule):
    """A rule that asks whether weights change."""

    kept: ClassVar[tuple[str, ...]] = (*WholeRule.kept, "before")

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        # the weights' columns of the last step in which they, or their updates, were measured
        self.before = torch.zeros(size, 0, dtype=torch.float64, device="cpu")

    def moved(self, record: StepRecord) -> Tensor | None:
        """Return which weights have, or may have, changed since the last call, ``(N,) bool``.

        None if neither updates nor weights are recorded, if they were not measured in this step, or if
        weights were not measured before. A change that leaves sum, sum of squares and largest magnitude as
        they were is not noticed.
        """
        kind, before = recorded_kind(record, CHANGES), self.before
        if record.model is not None and record.model.has_master_updates and record.has("weights"):
            # an update of master weights need not be written to the parameters
            kind = "weights"
        if kind is None or not record.has(kind):
            return None
        if kind == "updates":
            self.before = record.value("sumsq_b", "updates").unsqueeze(1)
            # by an update, or between two of them, such as by an optimizer that steps in the backward
            moved = record.value("abs_max", "updates") + record.value("n_nonfinite", "updates") > 0
            moved |= ~record.measured("updates")
            is_known = before.shape == self.before.shape
            return moved | ((self.before - before).abs() > 0).any(dim=1) if is_known else moved
        self.before = record.columns("weights")
        return (self.before != before).any(dim=1) if before.shape == self.before.shape else None


@dataclass(eq=False, repr=False)
class LastingRule(TensorRule):
    """A rule about conditions that last for ``patience`` recorded steps.

    It checks tensors of at least ``min_dims`` dimensions. A step in which a tensor was not measured, for
    example because it is frozen, neither counts nor interrupts the sequence.
    """

    kept: ClassVar[tuple[str, ...]] = (*TensorRule.kept, "streak", "since", "counting")
    _: KW_ONLY
    patience: int = 10
    min_dims: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1:
            msg = f"{type(self).__name__}(patience={self.patience!r}): patience must be at least 1"
            raise ValueError(msg)

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        self.streak, self.since = torch.zeros(2, size, dtype=torch.float64, device="cpu").unbind()
        self.counting = False

    def prepare(self, rows: Rows) -> None:
        """Find the tensors with at least ``min_dims`` dimensions."""
        self.wide = mask([len(shape) >= self.min_dims for shape in rows.shapes])

    def lasting(self, now: Tensor, known: Tensor, step: int) -> Tensor | None:
        """Return where the condition has lasted, ``(N,) bool``, or None if that is nowhere.

        ``now``: where it holds in this step; ``known``: which tensors were measured; both ``(N,) bool``.
        """
        if not now.any():
            if self.counting:
                self.streak = self.streak * known.logical_not()
                self.counting = bool(self.streak.any())
            return None
        self.counting = True
        self.streak = torch.where(known, (self.streak + 1.0).mul_(now), self.streak)
        self.since = torch.where(now & (self.streak == 1.0), float(step), self.since)
        found = now & (self.streak >= self.patience)
        return found if found.any() else None


def recorded_kind(record: StepRecord, kinds: Iterable[str]) -> str | None:
    """Return the first of these kinds that the run of a step records; None if it records none of them."""
    return next((kind for kind in kinds if kind in record.catalog.kinds), None)


def mask(values: Sequence[bool]) -> Tensor:
    """Return booleans as a tensor, ``(N,)``."""
    return torch.tensor(values, dtype=torch.bool, device="cpu")


def _plain(value: Any) -> Any:
    """Return a plain copy that shares no mutable data with the value."""
    if isinstance(value, Tensor):
        # a checkpoint may have been loaded onto another device
        return value.detach().to("cpu", copy=True)
    if isinstance(value, _HISTORIES):
        value = value.state_dict()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, list) else value
