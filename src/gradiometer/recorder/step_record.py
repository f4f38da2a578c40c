"""The record of one step on the host, and the roster of recorded tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from gradiometer.columns import (
    COLUMN_INDEX,
    DEFAULT_THRESHOLDS,
    NUM_COLUMNS,
    NUM_TAP_COLUMNS,
    NUM_UPDATE_COLUMNS,
    RING_WIDTH,
    Fingerprint,
    Thresholds,
    derived,
    has_tap_value,
    has_update_value,
    tap_value,
    update_value,
)
from gradiometer.stats import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.recorder.model_state import ModelState
    from gradiometer.recorder.step_exponents import StepExponents

__all__ = ["KINDS", "TAP_KINDS", "Kind", "Roster", "RunInfo", "StepRecord", "label"]

Kind = Literal["grads", "weights", "updates", "activations", "activation_grads"]
TAP_KINDS: Final[tuple[Kind, ...]] = ("activations", "activation_grads")
KINDS: Final[tuple[Kind, ...]] = ("grads", "weights", "updates", *TAP_KINDS)

# the columns that count NaN and Inf
_COUNTS: Final = slice(COLUMN_INDEX["n_nan"], COLUMN_INDEX["n_neginf"] + 1)
_SUFFIX: Final[dict[Kind, str]] = {
    "grads": ".grad",
    "weights": "",
    "updates": ".update",
    "activations": "",
    "activation_grads": ".grad",
}


def label(kind: Kind, name: str) -> str:
    """Return a tensor's display name.

    ``blocks.3.w.grad``, ``blocks.3.w`` and ``blocks.3.w.update`` of a parameter; ``blocks.3.mlp.out`` and
    ``blocks.3.mlp.out.grad`` of a tap.
    """
    return name + _SUFFIX[kind]


@dataclass(frozen=True)
class Roster:
    """The tensors of a recorded step: every kind of every name, kind by kind.

    The names are those of parameters and of taps. A parameter has no row of the kinds in `TAP_KINDS`, and a
    tap has none of the other kinds: these rows are never measured.

    Attributes:
        names: the N names.
        shapes: of the parameters; ``(0,)`` for a tap.
        dtypes: of the parameters, as ``"float32"``; ``""`` for a tap.
        kinds: K kinds, from `KINDS`, in that order; the first is ``"grads"``.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    kinds: tuple[Kind, ...] = ("grads",)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The index of each name."""
        return {name: i for i, name in enumerate(self.names)}

    @property
    def num_rows(self) -> int:
        """The number of rows, K * N."""
        return len(self.kinds) * len(self.names)

    @property
    def num_tensors(self) -> int:
        """The number of rows that can be measured."""
        taps, tap_kinds = sum(self.is_tap), len({*self.kinds} & {*TAP_KINDS})
        return (len(self.kinds) - tap_kinds) * (len(self.names) - taps) + tap_kinds * taps

    @cached_property
    def is_tap(self) -> tuple[bool, ...]:
        """Whether each name is that of a tap."""
        return tuple([dtype == "" for dtype in self.dtypes])

    def has(self, kind: Kind, place: int) -> bool:
        """Return whether the name at an index has a row of this kind."""
        return kind in self.kinds and (kind in TAP_KINDS) == self.is_tap[place]

    @cached_property
    def of_parameters(self) -> Roster:
        """The roster without taps."""
        if not any(self.is_tap):
            return self
        kept = [not is_tap for is_tap in self.is_tap]
        return Roster(
            tuple(itertools.compress(self.names, kept)),
            tuple(itertools.compress(self.shapes, kept)),
            tuple(itertools.compress(self.dtypes, kept)),
            tuple([kind for kind in self.kinds if kind not in TAP_KINDS]),
        )

    def with_taps(self, names: tuple[str, ...]) -> Roster:
        """Return the roster with taps of these names after the parameters."""
        shapes, dtypes = (*self.shapes, *[(0,)] * len(names)), (*self.dtypes, *[""] * len(names))
        return Roster((*self.names, *names), shapes, dtypes, (*self.kinds, *TAP_KINDS))

    def place(self, kind: Kind) -> int:
        """Return the index of a kind; raise a KeyError if it was not recorded."""
        if kind not in self.kinds:
            msg = f"{kind} were not recorded, only {', '.join(self.kinds)}; create the Monitor or "
            msg += "Recorder with taps" if kind in TAP_KINDS else f"Recorder with {kind}=True"
            raise KeyError(msg)
        return self.kinds.index(kind)


@dataclass(frozen=True, eq=False, repr=False)
class StepRecord:
    """The record of one training step; a snapshot on the host.

    Attributes:
        step: its number.
        time: when it ended, in seconds since 1970; for `gradiometer.Recorder.read`, when it was read.
        scalars: given to ``Monitor.advance``, by name: ``loss``, ``lr`` and others; may be NaN.
        roster: the tensors.
        values: ``(K, N, C + 1) float64``: for each kind and parameter the raw columns, then the flags; with
            fingerprints three more, see `gradiometer.ops.ring`.
            Rows that were not measured, as for a parameter without a gradient, have ``numel`` 0. None if
            this step was not recorded (``every``), or its tensors were lost before they were read.
        further: ``(N, 6) float64``: for each parameter the columns of its update that tensors do not have, in
            the order of `gradiometer.columns.UPDATE_COLUMNS`; None without updates, or if they were recorded
            by a release that had no such columns.
        tap_sums: ``(2, N, 4) float64``: for each of `TAP_KINDS` and each name the columns that tensors do not
            have, in the order of `gradiometer.columns.TAP_COLUMNS`; None without taps.
        skipped: whether the update was skipped: ``skip_step`` was true and something acts on it, see
            `gradiometer.Monitor.skips`. For a `gradiometer.Recorder` alone, whether ``skip_step`` was true.
        thresholds: limits of the flags.
        origin: ``(K, N) int64``, for a step merged over several ranks: the first rank, by its index in the
            group, whose part has a NaN or Inf; -1 if none has.
        ranks: the agreement of these ranks.
        loss_rank: for a merged step: the first rank whose loss is not finite.
        model: the state of the model, of this rank; None if it is unknown, as in a run that was read.
        diverged: for a merged step with fingerprints of weights: the parameters whose copies differ between
            ranks -> a text that names the ranks in the minority, ``rank 5 differs from 7 others``.
        exponents: histograms of the gradients and weights, in a step that ``precision`` divides, also if its
            tensors were not recorded; None in other steps, and in a run that was read: see
            `gradiometer.runs.Run.precision`.
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
    model: ModelState | None = None
    diverged: Mapping[str, str] = field(default_factory=dict)
    further: Tensor | None = None
    tap_sums: Tensor | None = None
    exponents: StepExponents | None = None
    _kept: dict[tuple[str, Kind], Any] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        """Return a one-line summary."""
        what = "no tensors" if self.values is None else f"{self.roster.num_tensors} tensors"
        return f"<StepRecord: step {self.step}, {what}>"

    @property
    def recorded(self) -> bool:
        """Whether this step has tensors."""
        return self.values is not None

    def columns(self, kind: Kind = "grads") -> Tensor:
        """Return the raw columns, ``(N, C) float64``; zeros where nothing was measured."""
        place = self.roster.place(kind)
        if self.values is None:
            return torch.zeros((len(self.roster.names), NUM_COLUMNS), dtype=torch.float64, device="cpu")
        return self.values[place, :, :NUM_COLUMNS]

    def flags(self, kind: Kind = "grads") -> Tensor:
        """Return the flags, ``(N,) int32``, bits of `gradiometer.Flag`."""
        place = self.roster.place(kind)
        if self.values is None:
            return torch.zeros(len(self.roster.names), dtype=torch.int32, device="cpu")
        values = self.values[place, :, NUM_COLUMNS]
        kept: Tensor = self._keep("flags", kind, lambda: values.to(torch.int32))
        return kept

    def measured(self, kind: Kind = "grads") -> Tensor:
        """Return which parameters were measured, ``(N,) bool``."""
        kept: Tensor = self._keep("measured", kind, lambda: self.value("numel", kind) > 0)
        return kept

    def value(self, statistic: str, kind: Kind = "grads") -> Tensor:
        """Return a raw column or derived value by name, ``(N,) float64``; 0 where nothing was measured.

        Updates also have ``update_ratio``, ``descent_cosine``, ``unchanged_fraction``, ``stuck_fraction`` and
        `gradiometer.columns.UPDATE_COLUMNS`, see `gradiometer.PairStats`: NaN where they are not known.
        Activations and their gradients also have ``outlier_ratio``, ``kurtosis``, ``zero_channel_fraction``
        and `gradiometer.columns.TAP_COLUMNS`, see `gradiometer.ActivationStats`.
        """
        kept: Tensor = self._keep(
            f"value {statistic}",
            kind,
            lambda: self._value(self.columns(kind), self._further_of(kind), statistic, kind),
        )
        return kept

    def _further_of(self, kind: Kind) -> Tensor | None:
        """Return the columns of this kind that other tensors do not have, ``(N, ...) float64``."""
        if kind in TAP_KINDS:
            return None if self.tap_sums is None else self.tap_sums[TAP_KINDS.index(kind)]
        return self.further if kind == "updates" else None

    def _value(self, columns: Tensor, further: Tensor | None, statistic: str, kind: Kind) -> Tensor:
        is_tap = kind in TAP_KINDS
        if not (has_tap_value(statistic) if is_tap else kind == "updates" and has_update_value(statistic)):
            return derived.value(columns, statistic)
        if further is None:
            size = NUM_TAP_COLUMNS if is_tap else NUM_UPDATE_COLUMNS
            further = columns.new_full((*columns.shape[:-1], size), math.nan)
        return (tap_value if is_tap else update_value)(columns, further, statistic)

    def with_taps(
        self, roster: Roster, rows: Tensor, sums: Tensor, origin: Tensor | None = None
    ) -> StepRecord:
        """Return a recorded step with the rows of M taps, which follow the parameters.

        Args:
            roster: that of this record, `Roster.with_taps`.
            rows: ``(2, M, C + 1) float64``, and three more with fingerprints, as in ``values``.
            sums: ``(2, M, 4) float64``, as in ``tap_sums``.
            origin: ``(2, M) int64``, if ranks are merged.
        """
        own: Tensor = self.values  # type: ignore[assignment]
        kinds, size, width = own.shape
        # every kind of every name: of most there is nothing
        values = own.new_zeros(len(roster.kinds), len(roster.names), width)
        values[:kinds, :size], values[kinds:, size:] = own, rows
        tap_sums = sums.new_zeros(len(TAP_KINDS), len(roster.names), sums.shape[2])
        tap_sums[:, size:] = sums
        further, origins = self.further, self.origin
        if further is not None:
            further = torch.cat([further, further.new_zeros(rows.shape[1], further.shape[1])])
        if origins is not None and origin is not None:
            origins = origins.new_full(values.shape[:2], -1)
            origins[:kinds, :size], origins[kinds:, size:] = self.origin, origin  # type: ignore[assignment]
        return replace(self, roster=roster, values=values, further=further, tap_sums=tap_sums, origin=origins)

    @cached_property
    def of_parameters(self) -> StepRecord:
        """The record without taps."""
        roster = self.roster.of_parameters
        if roster is self.roster:
            return self
        kept = [not is_tap for is_tap in self.roster.is_tap]
        rows = torch.tensor(kept, dtype=torch.bool, device="cpu")
        kinds = [self.roster.place(kind) for kind in roster.kinds]
        return replace(
            self,
            roster=roster,
            values=None if self.values is None else self.values[kinds][:, rows],
            origin=None if self.origin is None else self.origin[kinds][:, rows],
            further=None if self.further is None else self.further[rows],
            tap_sums=None,
        )

    def total(self, statistic: str = "norm", kind: Kind = "grads") -> float:
        """Return a raw column or derived value, by name, of all parameters together."""
        if statistic == "finite_norm":
            return math.sqrt(self.total("sumsq", kind))
        kept: float = self._keep(f"total {statistic}", kind, lambda: self._total(statistic, kind))
        return kept

    def _total(self, statistic: str, kind: Kind) -> float:
        further = self._further_of(kind)
        further = None if further is None else further.sum(dim=0)
        return float(self._value(self.merged(kind), further, statistic, kind))

    @cached_property
    def is_finite(self) -> bool:
        """Whether no tensor of any kind has a NaN or Inf."""
        # one sum over all kinds: nearly every step is finite
        return self.values is None or float(self.values[..., _COUNTS].sum()) == 0

    def merged(self, kind: Kind = "grads") -> Tensor:
        """Return the raw columns of all parameters together, ``(C,) float64``."""
        kept: Tensor = self._keep("merged", kind, lambda: derived.merge_rows(self.columns(kind)))
        return kept

    def _keep(self, what: str, kind: Kind, compute: Callable[[], Any]) -> Any:
        """Return what was computed from the values before, or compute it."""
        key = what, kind
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def where(self, name: str, kind: Kind = "grads") -> str | None:
        """Return the first rank with a NaN or Inf in this tensor: ``rank 5, dp_shard 1 of 4``.

        None if the tensor is finite, or if this is the record of one rank.
        """
        if self.origin is None or self.ranks is None:
            return None
        rank = int(self.origin[self.roster.place(kind), self.roster.index[name]])
        if rank >= 0 and kind in TAP_KINDS:
            return f"rank {rank}"
        return None if rank < 0 else self.ranks.where(name, rank)

    @property
    def loss(self) -> float | None:
        """The loss, if it was given."""
        return self.scalars.get("loss")

    @property
    def loss_text(self) -> str:
        """The loss as text, such as ``nan on rank 1``."""
        return f"{self.loss}" if self.loss_rank is None else f"{self.loss} on rank {self.loss_rank}"

    def fingerprints(self, kind: Kind = "grads") -> Tensor | None:
        """Return the fingerprints, as in `TensorStats.fingerprints`; None if they were not recorded."""
        place = self.roster.place(kind)
        if self.values is None or self.values.shape[2] == RING_WIDTH:
            return None
        return self.values[place, :, RING_WIDTH:].view(torch.int64)

    def bits_of(self, kind: Kind, names: Iterable[str]) -> dict[str, str]:
        """Return the fingerprints of those of these parameters that have one, as text."""
        rows = self.fingerprints(kind)
        if rows is None:
            return {}
        index, measured = self.roster.index, self.measured(kind)
        found = {
            name: Fingerprint.of_row(rows[index[name]].tolist())
            for name in names
            if name in index and measured[index[name]]
        }
        return {name: str(bits) for name, bits in found.items() if bits is not None}

    def report(self, kind: Kind = "grads") -> Report:
        """Return the report of the measured tensors."""
        keep = self.measured(kind)
        bits = self.fingerprints(kind)
        names = tuple(itertools.compress(self.roster.names, keep.tolist()))
        return Report(
            names,
            self.columns(kind)[keep],
            flags=self.flags(kind)[keep],
            thresholds=self.thresholds,
            fingerprints=None if bits is None else bits[keep],
        )


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known when it starts; given to every sink.

    Attributes:
        roster: the tensors.
        thresholds: limits of the flags.
        every, capacity: of the recorder.
        model: the class of the model, or of the models.
        started: seconds since 1970.
        first_step: the step at which this process began; above 0 if the run was resumed.
        versions: of Python, torch, triton and gradiometer, by name.
        device: of the ring.
        ranks: number of ranks whose steps are merged.
        fingerprint: whether the steps have fingerprints.
        precision: steps divisible by this have histograms of exponents; None: none has.
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
    fingerprint: bool = False
    precision: int | None = None
