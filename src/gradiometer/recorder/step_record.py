"""What was recorded of one step, on the host, and the table of the tensors that are recorded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from gradiometer.columns import DEFAULT_THRESHOLDS, NUM_COLUMNS, Thresholds, derived
from gradiometer.stats import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gradiometer.distributed import Ranks

__all__ = ["KINDS", "Kind", "Roster", "RunInfo", "StepRecord", "label"]

Kind = Literal["grads", "weights", "updates"]
KINDS: Final[tuple[Kind, ...]] = ("grads", "weights", "updates")

_SUFFIX: Final[dict[Kind, str]] = {"grads": ".grad", "weights": "", "updates": ".update"}


def label(kind: Kind, name: str) -> str:
    """Return how a tensor is spoken of: ``blocks.3.w.grad``, ``blocks.3.w``, ``blocks.3.w.update``."""
    return name + _SUFFIX[kind]


@dataclass(frozen=True)
class Roster:
    """Which tensors a row of the ring holds: every kind of every parameter, kind by kind.

    Attributes:
        names: N parameters.
        shapes: of the parameters.
        dtypes: of the parameters, as ``"float32"``.
        kinds: K kinds, from `KINDS`, in that order; the first is ``"grads"``.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    kinds: tuple[Kind, ...] = ("grads",)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The place of a name among the names."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def num_rows(self) -> int:
        """K * N."""
        return len(self.kinds) * len(self.names)

    def place(self, kind: Kind) -> int:
        """Return the place of a kind; a KeyError says that it was not recorded."""
        if kind not in self.kinds:
            msg = f"{kind} were not recorded, only {', '.join(self.kinds)}: make the monitor with {kind}=True"
            raise KeyError(msg)
        return self.kinds.index(kind)


@dataclass(frozen=True, eq=False, repr=False)
class StepRecord:
    """What was recorded of one training step; on the host, a snapshot.

    Attributes:
        step: its number.
        time: when it ended, seconds since 1970.
        scalars: what was given to ``advance``: ``loss``, ``lr`` and others, by name; may be NaN.
        roster: the tensors.
        values: ``(K, N, C + 1) float64``: of each kind and parameter the raw columns, then the flags.
            What was not measured, such as a parameter without a gradient, has ``numel`` 0. None: this
            step was not recorded (``every``), or its row was lost.
        skipped: whether the update was skipped: ``skip_step`` said so, and something heeds it, see
            `gradiometer.Monitor.skips`. Of a `gradiometer.Recorder` alone, whether it said so.
        thresholds: where the flags begin.
        origin: ``(K, N) int64``, of a step that several ranks have merged: the first rank whose part of it
            has a NaN or Inf, by its place in the group; -1 where none has.
        ranks: what they have agreed on.
        loss_rank: of such a step: the first rank whose loss is not finite.
    """

    step: int
    time: float
    scalars: Mapping[str, float]
    roster: Roster
    values: Tensor | None
    skipped: bool = False
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    origin: Tensor | None = None
    ranks: Ranks | None = None
    loss_rank: int | None = None
    _kept: dict[tuple[str, Kind], Any] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        """Return one line."""
        what = "no tensors" if self.values is None else f"{self.roster.num_rows} tensors"
        return f"<StepRecord: step {self.step}, {what}>"

    @property
    def recorded(self) -> bool:
        """Whether there are tensors of this step."""
        return self.values is not None

    def columns(self, kind: Kind = "grads") -> Tensor:
        """Return the raw columns, ``(N, C) float64``; zeros where nothing was measured."""
        place = self.roster.place(kind)
        if self.values is None:
            return torch.zeros((len(self.roster.names), NUM_COLUMNS), dtype=torch.float64)
        return self.values[place, :, :NUM_COLUMNS]

    def flags(self, kind: Kind = "grads") -> Tensor:
        """Return the flags, ``(N,) int32``, bits of `gradiometer.Flag`."""
        place = self.roster.place(kind)
        if self.values is None:
            return torch.zeros(len(self.roster.names), dtype=torch.int32)
        return self.values[place, :, NUM_COLUMNS].to(torch.int32)

    def measured(self, kind: Kind = "grads") -> Tensor:
        """Return which parameters were measured, ``(N,) bool``."""
        return self.value("numel", kind) > 0

    def value(self, statistic: str, kind: Kind = "grads") -> Tensor:
        """Return a raw column or derived value by name, ``(N,) float64``; 0 where nothing was measured."""
        key = (statistic, kind)
        if key not in self._kept:
            self._kept[key] = derived.value(self.columns(kind), statistic)
        kept: Tensor = self._kept[key]
        return kept

    def total(self, statistic: str = "norm", kind: Kind = "grads") -> float:
        """Return a raw column or derived value of all parameters together."""
        key = ("total", kind)
        if key not in self._kept:
            self._kept[key] = derived.merge_rows(self.columns(kind))
        return float(derived.value(self._kept[key], statistic))

    def where(self, name: str, kind: Kind = "grads") -> str | None:
        """Return the first rank with a NaN or Inf in this tensor: ``rank 5, dp_shard 1 of 4``.

        None: all is finite; or this is what one rank recorded.
        """
        if self.origin is None or self.ranks is None:
            return None
        rank = int(self.origin[self.roster.place(kind), self.roster.index[name]])
        return None if rank < 0 else self.ranks.where(name, rank)

    @property
    def loss(self) -> float | None:
        """The loss, if it was given."""
        return self.scalars.get("loss")

    @property
    def loss_text(self) -> str:
        """Return the loss in words: ``nan on rank 1``."""
        return f"{self.loss}" if self.loss_rank is None else f"{self.loss} on rank {self.loss_rank}"

    def report(self, kind: Kind = "grads") -> Report:
        """Return the report of what was measured."""
        keep = self.measured(kind)
        names = tuple(itertools.compress(self.roster.names, keep.tolist()))
        flags = self.flags(kind).to(torch.float64).unsqueeze(1)
        packed = torch.cat([self.columns(kind), flags], dim=1)[keep]
        return Report(names, packed, self.thresholds)


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run when it starts; given to every sink.

    Attributes:
        roster: the tensors.
        thresholds: where flags begin.
        every, capacity: of the recorder.
        model: the class of the model, or of the models.
        started: seconds since 1970.
        first_step: the step at which this process began; above 0 where a run was resumed.
        versions: of Python, torch, triton and gradiometer, by name.
        device: where the ring is.
        ranks: whose steps are merged.
    """

    roster: Roster
    thresholds: Thresholds
    every: int
    capacity: int
    model: str
    started: float
    first_step: int
    versions: Mapping[str, str]
    device: str
    ranks: int = 1
