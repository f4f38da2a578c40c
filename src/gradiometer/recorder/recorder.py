"""The recorder: a ring of the last steps on the device, written inside the step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import (
    CURSOR_SIZE,
    DEFAULT_THRESHOLDS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_COLUMNS,
    Cursor,
    Thresholds,
    derived,
)
from gradiometer.inputs import (
    Named,
    check,
    is_dtensor,
    layout,
    local_shards,
    named_parameters,
    on_device,
    present,
)
from gradiometer.recorder.skip_consensus import SkipConsensus
from gradiometer.recorder.step_record import KINDS, Kind, Roster, StepRecord, label
from gradiometer.stats import Float64Module, TensorStats, collect, fetch, measure, settled

if TYPE_CHECKING:
    from typing import Self

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters

__all__ = ["Recorder", "tracked_parameters"]


class Recorder(Float64Module):
    """A flight recorder: the statistics of the last ``capacity`` recorded steps, on the device.

    `record` measures the gradients, inside or outside of a compiled step, and writes them into the
    slot of the current step; `advance` goes on to the next. Both leave the host out: no wait, no graph
    break, the same addresses in every step, right in a CUDA graph. Which steps are recorded
    (``every``) and what is to be skipped are read on the device: changing them compiles nothing again.

    A second `record` in one step writes over it what it measures: so a step of several backward passes,
    models or optimizers is one row, and of accumulated gradients the last is what counts.

    Of a DTensor the local shard is recorded: a ring holds what its own rank has. With ``ranks`` the ranks
    agree on what is skipped, and nothing else of it passes between them.

    Args:
        model: what `gradiometer.collect_grads` takes, or a mapping of names to modules.
        weights: also measure the parameters themselves.
        updates: keep room for updates, which `record_updates` measures.
        capacity: steps that are kept: ``(R + 1) * 72`` bytes each, R tensors.
        every: record the steps that this divides. One with a NaN, an Inf or a norm above
            ``skip_above`` is recorded whenever it is measured.
        skip_nonfinite: whether a NaN or Inf in a gradient makes `skip_step` true.
        skip_above: a total gradient norm above it does so too.
        thresholds: where flags begin.
        ranks: what the ranks have agreed on, of the same model: then `skip_step` is the same on all of them,
            and gradients whose summands they have not added up yet are added up first.

    Attributes:
        roster: which tensors are recorded; shapes are those of whole tensors.
        ring, cursor: the buffers, see `gradiometer.ops.ring`.

    Raises:
        TypeError: for a parameter that cannot be measured; the message names it.
        ValueError: without parameters, for a number out of range, or for ranks of another model.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> recorder = gm.Recorder(model, capacity=4)
    >>> for _ in range(6):
    ...     model.zero_grad()
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     recorder.record()
    ...     recorder.advance()
    >>> [(record.step, record.total()) for record in recorder.read()][-1]
    (5, 5.0990195135927845)
    """

    ring: Tensor
    cursor: Tensor

    def __init__(
        self,
        model: Parameters | Mapping[str, nn.Module],
        *,
        weights: bool = False,
        updates: bool = False,
        capacity: int = 64,
        every: int = 1,
        skip_nonfinite: bool = True,
        skip_above: float = math.inf,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        names, parameters = tracked_parameters(model)
        if not parameters:
            msg = "Recorder: the model has no parameters"
            raise ValueError(msg)
        if not isinstance(capacity, int) or capacity < 1:
            msg = f"Recorder(capacity={capacity!r}): a number of steps, at least 1"
            raise ValueError(msg)
        if not isinstance(thresholds, Thresholds):
            msg = f"Recorder: thresholds must be gm.Thresholds(...), got {thresholds!r}"
            raise TypeError(msg)
        devices = check(Named(names, parameters), "Recorder").devices
        asked = {"grads": True, "weights": weights, "updates": updates}
        kinds = [kind for kind in KINDS if asked[kind]]
        self.roster = Roster(
            names,
            tuple([tuple(p.shape) for p in parameters]),
            tuple([str(p.dtype).removeprefix("torch.") for p in parameters]),
            tuple(kinds),
        )
        # the lock of a cached property is none for Dynamo
        self._places = self.roster.index
        self.thresholds = thresholds
        # a list of its own: they are no parameters of this module
        self._tracked = [list(parameters)]
        home = next((device for device in devices if device.type != "cpu"), devices[0])
        size = (capacity, self.roster.num_rows + 1, NUM_COLUMNS + 1)
        # no step has a negative number
        self.register_buffer(
            "ring", torch.full(size, -1.0, dtype=torch.float64, device=home), persistent=False
        )
        self.register_buffer("cursor", torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=home))
        self._ranks = ranks
        self._verdict = None if ranks is None or ranks.size == 1 else SkipConsensus(names, ranks, home)
        self._has_dtensors = any([is_dtensor(type(p)) for p in parameters])
        self._gated = False
        self.configure_(every=every, skip_nonfinite=skip_nonfinite, skip_above=skip_above)
        self._gated = not skip_nonfinite and skip_above == math.inf
        self._one_device = len(devices) == 1

    @property
    def capacity(self) -> int:
        """Steps that are kept."""
        return len(self.ring)

    @property
    def parameters_tracked(self) -> list[Tensor]:
        """The parameters, in the order of the roster."""
        return self._tracked[0]

    def configure_(
        self,
        *,
        step: int | None = None,
        every: int | None = None,
        skip_nonfinite: bool | None = None,
        skip_above: float | None = None,
    ) -> Self:
        """Change the current step's number, the cadence or what is skipped; nothing is compiled again.

        Raises:
            ValueError: for a number out of range; or to skip, where the recorder was made not to:
                then gradients are read in recorded steps only.
        """
        for name, value, least in (("step", step, 0), ("every", every, 1)):
            if value is not None and (not isinstance(value, int) or value < least):
                msg = f"Recorder({name}={value!r}): a whole number, at least {least}"
                raise ValueError(msg)
        if skip_above is not None and (not isinstance(skip_above, (int, float)) or not skip_above >= 0):
            msg = f"Recorder(skip_above={skip_above!r}): a norm, not negative"
            raise ValueError(msg)
        if self._gated and (skip_nonfinite or (skip_above is not None and skip_above < math.inf)):
            msg = "Recorder: it was made to skip nothing, and reads only the steps that it records; "
            msg += "make it with skip_nonfinite=True"
            raise ValueError(msg)
        if self._verdict is not None and skip_above is not None and skip_above < math.inf:
            # from here on what one op decides by this rank's norm is not enough
            self._verdict.adds_up = True
        new: dict[Cursor, float | None] = {
            Cursor.STEP: step,
            Cursor.EVERY: every,
            Cursor.SKIP_NONFINITE: skip_nonfinite,
            Cursor.SKIP_ABOVE: skip_above,
        }
        for place, number in new.items():
            if number is not None:
                self.cursor[place].fill_(float(number))
        return self

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if asked, and write them into the current step's slot.

        Args:
            stats: gradients that were measured already, by names of the model: they are not read again. Of
                those that are merged over ranks ``stats.local`` is recorded.
            inv_scale: as for `gradiometer.collect_grads`; of gradients alone.

        Raises:
            ValueError: for stats of other tensors, and for groups that are merged over ranks.
            TypeError: for a gradient that cannot be measured; the message names it.
        """
        if self._verdict is not None:
            self._verdict.begin()
        if stats is not None:
            self._append("grads", _of_this_rank(stats))
            if "weights" in self.roster.kinds:
                self._append("weights", self._collect("weights", self._tensors("weights")))
            return
        ring, parameters = self.ring, self._tracked[0]
        # it is the gradients' alone
        plain_scale = inv_scale is None or ("weights" not in self.roster.kinds and _is_scale(inv_scale, ring))
        grads = self._tensors("grads")
        if plain_scale and self._one_device and not (self._verdict is not None and self._verdict.adds_up):
            nothing = ring.new_empty(0)
            tensors = [nothing if grad is None else grad for grad in grads]
            if "weights" in self.roster.kinds:
                tensors += self._tensors("weights")  # type: ignore[arg-type] # none is missing
            if "updates" in self.roster.kinds:
                tensors += [nothing] * len(parameters)
            # like a list that was measured before: it is not looked at again
            known = ops.recognize(tensors)
            if known is not None or all([_is_ordinary(tensor, ring) for tensor in tensors]):
                ops.record_(
                    tensors,
                    self.thresholds,
                    inv_scale,  # type: ignore[arg-type] # a tensor, if it is not None
                    len(parameters),
                    ring,
                    self.cursor,
                    known,
                    gated=self._gated,
                )
                return
        self._append("grads", self._collect("grads", grads, inv_scale))
        if "weights" in self.roster.kinds:
            self._append("weights", self._collect("weights", self._tensors("weights")))

    def record_updates(self, updates: Mapping[str, Tensor]) -> None:
        """Measure updates, by name of their parameter, and write them into the current step's slot."""
        self._append("updates", collect(updates, thresholds=self.thresholds))

    @property
    def skip_step(self) -> Tensor:
        """Whether the current step is to be skipped, 0-d bool on the device, decided by `record`.

        With ``ranks`` it is the same on all of them: a NaN or Inf on any rank counts, and ``skip_above`` is
        compared with the norm of all ranks' gradients. That takes one collective of two numbers, on the
        step's way, when it is read for the first time after `record`; every rank has to read it then.
        """
        if self._verdict is None or self._gated:
            return self.cursor[Cursor.SKIP] > 0
        return self._verdict.give(self.ring, self.cursor)

    def advance(self) -> None:
        """Go on to the next step. Inside or outside of a compiled function."""
        if self._verdict is not None:
            self._verdict.begin()
        self.cursor[Cursor.STEP : Cursor.STEP + 1].add_(1)

    def read(self) -> list[StepRecord]:
        """Return what the ring holds, oldest first. Waits for the device."""
        (ring,) = fetch([self.ring])
        now = time.time()
        written = sorted(
            (int(step), i) for i, step in enumerate(ring[:, 0, HEADER_STEP].tolist()) if step >= 0
        )
        return [self.as_record(step, now, {}, ring[i]) for step, i in written]

    def as_record(
        self, step: int, when: float, scalars: Mapping[str, float], slot: Tensor | None
    ) -> StepRecord:
        """Return the record of a slot that was copied to the host; of a step without one, for None."""
        if slot is None:
            return StepRecord(step, when, scalars, self.roster, None, thresholds=self.thresholds)
        values = slot[1:].view(len(self.roster.kinds), len(self.roster.names), NUM_COLUMNS + 1)
        skipped = bool(slot[0, HEADER_SKIPPED] > 0)
        return StepRecord(step, when, scalars, self.roster, values, skipped, self.thresholds)

    def _tensors(self, kind: Kind) -> list[Tensor | None]:
        """Return what this rank holds of the gradients or weights, in the order of the roster."""
        parameters = self._tracked[0]
        tensors = [p.grad if kind == "grads" else p for p in parameters]
        if not self._has_dtensors:
            return tensors
        found = present(self.roster.names, tensors)
        if kind == "grads":
            found = settled(found, Named(self.roster.names, parameters), self._ranks, "Recorder")
        shards = iter(local_shards(found, "Recorder").tensors)
        return [None if tensor is None else next(shards) for tensor in tensors]

    def _collect(
        self, kind: Kind, tensors: list[Tensor | None], inv_scale: Tensor | float | None = None
    ) -> TensorStats:
        found = [(name, x) for name, x in zip(self.roster.names, tensors, strict=True) if x is not None]
        named = Named(tuple([label(kind, name) for name, _ in found]), [x for _, x in found])
        stats = measure(named, "Recorder", self.thresholds, inv_scale, home=self.ring.device)
        return TensorStats(tuple([name for name, _ in found]), stats.columns, stats.flags, stats.thresholds)

    def _append(self, kind: Kind, stats: TensorStats) -> None:
        """Write statistics into the rows of their names; the other rows are not measured by this."""
        first = self.roster.place(kind) * len(self.roster.names)
        rows = []
        for name in stats.names:
            if name not in self._places:
                msg = f"Recorder: {name!r} is none of the model's parameters when the recorder was made"
                raise ValueError(msg)
            rows.append(first + self._places[name])
        home = self.ring.device
        columns, flags = [on_device(x, home) for x in (stats.columns, stats.flags)]
        if rows != list(range(self.roster.num_rows)):
            columns = derived.spread(columns, rows, self.roster.num_rows)
            flags = derived.spread(flags, rows, self.roster.num_rows)
        # gradients decide
        grads = len(self.roster.names) if kind == "grads" else 0
        if grads and self._verdict is not None:
            self._verdict.hear(columns[:grads])
        ops.append_(columns, flags, grads, self.ring, self.cursor)


def tracked_parameters(model: Parameters | Mapping[str, nn.Module]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return the parameters and their names; of several modules with the module's name before them."""
    if isinstance(model, Mapping) and model and all(isinstance(part, nn.Module) for part in model.values()):
        pairs = [
            (f"{prefix}.{name}", parameter)
            for prefix, part in model.items()
            for name, parameter in zip(*named_parameters(part, "Recorder"), strict=True)
        ]
        return named_parameters(pairs, "Recorder")
    return named_parameters(model, "Recorder")


def _of_this_rank(stats: TensorStats) -> TensorStats:
    if stats.origin is None:
        return stats
    if stats.local is None:
        msg = "Recorder: of groups that are merged over ranks nothing is this rank's; "
        raise ValueError(msg + "pass the stats that collect_grads(..., reduce=ranks) returns")
    return stats.local


def _is_ordinary(tensor: Tensor, ring: Tensor) -> bool:
    """Tell whether the op takes a tensor as it is."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and layout(tensor) == torch.strided
        and tensor.device == ring.device
    )


def _is_scale(inv_scale: Tensor | float, ring: Tensor) -> bool:
    """Tell whether the op takes a scale as it is."""
    return (
        isinstance(inv_scale, Tensor)
        and inv_scale.numel() == 1
        and inv_scale.is_floating_point()
        and inv_scale.device == ring.device
    )
