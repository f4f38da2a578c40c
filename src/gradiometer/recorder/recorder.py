"""The recorder: a ring of the last steps on the device, written inside the step."""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import (
    CURSOR_SIZE,
    DEFAULT_THRESHOLDS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    NUM_TAP_COLUMNS,
    NUM_UPDATE_COLUMNS,
    RING_WIDTH,
    Cursor,
    Thresholds,
    activations_from,
    compute_flags,
    derived,
    from_activations,
    from_pairs,
    pairs_from,
    scaled_activations,
    tap_flags,
)
from gradiometer.inputs import (
    Named,
    check,
    check_names,
    describe,
    is_dtensor,
    is_one_number,
    layout,
    local_shards,
    on_device,
    present,
    tracked_parameters,
)
from gradiometer.recorder.catalog import Catalog
from gradiometer.recorder.exponent_stores import ExponentStores
from gradiometer.recorder.kinds import KINDS, label
from gradiometer.recorder.settings import check_cursor, check_integer, check_skips, set_step
from gradiometer.recorder.skip_consensus import SkipConsensus
from gradiometer.recorder.step_record import StepRecord
from gradiometer.recorder.stream_order import StreamOrder
from gradiometer.recorder.table import Table
from gradiometer.stats import (
    Float64Module,
    PairStats,
    Taps,
    TensorStats,
    fetch,
    keep_in_repeats,
    measure,
    settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from typing import Self

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters

_Stats = TypeVar("_Stats", TensorStats, PairStats)

# which recorder clears these taps
_owners: weakref.WeakKeyDictionary[Taps, Callable[[], Recorder | None]] = weakref.WeakKeyDictionary()


class Recorder(Float64Module):
    """A flight recorder: the statistics of the last ``capacity`` recorded steps, on the device.

    `record` measures the gradients, inside or outside of a compiled step, and writes them into the
    slot of the current step; `advance` moves on to the next step. Neither involves the host: there is no
    wait and no graph break, all addresses stay the same, and both work in a CUDA graph. The device reads
    which steps to record (``every``) and which to skip, so changing these recompiles nothing.

    A second `record` in one step overwrites the rows that it measures. So a step with several backward
    passes, models or optimizers fills one slot, and with accumulated gradients the last `record` counts.

    For a DTensor the local shard is recorded: each ring holds the data of its own rank. With ``ranks`` the
    ranks agree on which steps to skip; nothing else of the ring is exchanged.

    Args:
        model: a model as for `gradiometer.collect_grads`, or a mapping of names to modules.
        weights: whether to measure the parameters themselves too.
        updates: whether to reserve rows for updates, which `record_updates` measures.
        capacity: number of steps that are kept, ``(R + 1) * 72`` bytes each for R recorded tensors; an update
            counts as two, and a tap as four.
        every: record the steps that are multiples of ``every``. A step with a NaN, an Inf or a norm above
            ``skip_above`` is recorded whenever it is measured.
        skip_nonfinite: whether a NaN or Inf in a gradient makes `skip_step` true.
        skip_above: a total gradient norm above it makes `skip_step` true, too.
        thresholds: limits of the flags.
        fingerprint: whether to record the fingerprints of all these tensors too, in the same read; they take
            24 bytes more for each tensor.
        taps: taps of the model, whose activations and gradients of activations are recorded, too. `advance`
            then advances them, and their steps have the recorder's numbers; in a step that ``taps.every``
            leaves out, their rows are not measured.
        precision: in steps divisible by this, also count the elements of gradients, and of weights with
            ``weights=True``, by magnitude; None: in none. A store on the device keeps the histograms of the
            last such step, 7.5 KiB for each tensor, see `read_exponents`. They are of gradients as they are
            in memory, so ``inv_scale`` does not apply; with ``stats``, gradients are read for them.
        ranks: the ranks' agreement for the same model. `skip_step` is then the same on all of them, and
            gradients that are still partial sums are added up before they are measured.

    Attributes:
        catalog: the tables of a recorded step; shapes are those of whole tensors.
        is_released: whether `release` was called.
        ring, cursor: the buffers, see `gradiometer.ops.ring`.

    Raises:
        TypeError: for a parameter that cannot be measured; the message names it.
        ValueError: without parameters, for a duplicate name, also of a tap and a parameter, for taps that
            another recorder records, for a number out of range, for a ring that cannot be allocated, or for
            ranks of another model.

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
        fingerprint: bool = False,
        ranks: Ranks | None = None,
        taps: Taps | None = None,
        precision: int | None = None,
    ) -> None:
        super().__init__()
        self.is_released = False
        if precision is not None:
            check_integer("Recorder", "precision", precision, 1)
        names, parameters = tracked_parameters(model)
        if not parameters:
            msg = "Recorder: the model has no parameters to record"
            raise ValueError(msg)
        check_names(names, "Recorder")
        if type(capacity) is not int or capacity < 1:
            msg = f"Recorder(capacity={describe(capacity)}): capacity must be an integer, at least 1"
            raise ValueError(msg)
        if not isinstance(thresholds, Thresholds):
            msg = f"Recorder: thresholds must be gm.Thresholds(...), got {thresholds!r}"
            raise TypeError(msg)
        devices = check(Named(names, parameters), "Recorder").devices
        taps_names = _names_of(taps, names)
        asked = {"grads": True, "weights": weights, "updates": updates}
        asked |= dict.fromkeys(("activations", "activation_grads"), taps is not None)
        asked |= {"grad_exponents": precision, "weight_exponents": precision and weights}
        self.catalog = Catalog.of(
            names,
            [tuple(p.shape) for p in parameters],
            [str(p.dtype).removeprefix("torch.") for p in parameters],
            [kind for kind in KINDS if asked.get(kind)],
            taps_names,
        )
        # Dynamo cannot trace the lock of a cached property
        self._places = self.catalog.index
        self._num_rows = (1 + bool(weights) + bool(updates)) * len(names)
        self.thresholds = thresholds
        # in a list of its own, since these are not parameters of this module
        self._tracked = [list(parameters)]
        home = next((device for device in devices if device.type != "cpu"), devices[0])
        self.fingerprint = bool(fingerprint)
        width = RING_WIDTH + NUM_FINGERPRINT_COLUMNS * self.fingerprint
        # where the rows of taps begin
        self._taps_at = self._num_rows + bool(updates) * len(names)
        rows = self._taps_at + 4 * len(taps_names)
        size = (capacity, rows + 1, width)
        try:
            # -1 marks an empty slot: step numbers are not negative
            ring = torch.full(size, -1.0, dtype=torch.float64, device=home)
        except (RuntimeError, TypeError) as error:
            needs = f"{size[1] * size[2] * 8} bytes for each step on {home}, and torch cannot allocate that"
            msg = f"Recorder(capacity={describe(capacity)}): the ring needs {needs}; use a smaller capacity"
            raise ValueError(msg) from error
        self.register_buffer("ring", ring, persistent=False)
        self.register_buffer("cursor", torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=home))
        # in a list, since they are not a part of this module
        self._taps = [] if taps is None else [taps]
        if taps is not None:
            _owners[taps] = weakref.ref(self)
        self._ranks = ranks
        self._verdict = None if ranks is None or ranks.size == 1 else SkipConsensus(names, ranks, home)
        self._order = StreamOrder()
        self._has_dtensors = any([is_dtensor(type(p)) for p in parameters])
        self._gated = False
        # the step that `clear_taps` was called for
        self._cleared_for = -1
        self.exponents: ExponentStores | None = None
        if precision is not None:
            self.exponents = ExponentStores(
                self.catalog.parameters, parameters, self.catalog.sparse, precision
            )
        self.configure_(step=0, every=every, skip_nonfinite=skip_nonfinite, skip_above=skip_above)
        # what was measured before belongs to no step
        self._clear_taps(0.0)
        self._gated = not skip_nonfinite and skip_above == math.inf
        self._one_device = len(devices) == 1
        keep_in_repeats(self)

    @property
    def roster(self) -> Catalog:
        """Interim name."""
        return self.catalog

    @property
    def capacity(self) -> int:
        """The number of steps that are kept."""
        return len(self.ring)

    @property
    def parameters_tracked(self) -> list[Tensor]:
        """The parameters, in the order of `names_tracked`."""
        return self._tracked[0]

    @property
    def names_tracked(self) -> tuple[str, ...]:
        """The names of the parameters; those without taps."""
        return self.catalog.names

    def configure_(
        self,
        *,
        step: int | None = None,
        every: int | None = None,
        skip_nonfinite: bool | None = None,
        skip_above: float | None = None,
    ) -> Self:
        """Change the current step's number, the cadence or the skip conditions, without recompilation.

        Raises:
            ValueError: for a number out of range; for a skip condition, if the recorder was created to skip
                nothing and so reads gradients in recorded steps only.
        """
        # check all values before the first change
        for name, value, least in (("step", step, 0), ("every", every, 1)):
            if value is not None:
                check_integer("Recorder", name, value, least)
        check_skips(skip_nonfinite, skip_above)
        if self._gated and (skip_nonfinite or (skip_above is not None and skip_above < math.inf)):
            msg = "Recorder: it was created without a skip condition, so it reads gradients only in the "
            msg += "steps that it records; create it with skip_nonfinite=True"
            raise ValueError(msg)
        given: dict[Cursor, float | None] = {
            Cursor.STEP: step,
            Cursor.EVERY: every,
            Cursor.SKIP_NONFINITE: skip_nonfinite,
            Cursor.SKIP_ABOVE: skip_above,
        }
        new = {place: float(number) for place, number in given.items() if number is not None}
        if self._verdict is not None and skip_above is not None and skip_above < math.inf:
            # from now on, the decision needs the squares of all ranks
            self._verdict.adds_up = True
        with self.in_order():
            for place, number in new.items():
                self.cursor[place].fill_(number)
            if step is not None:
                self._cleared_for = -1
                for taps in self._taps:
                    taps.configure_(step=step)
                if self.exponents is not None:
                    self.exponents.rewind(step)
        return self

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if asked, and write them into the current step's slot.

        What taps have measured since the last `advance` is written, too.

        Args:
            stats: of gradients that were measured already, named as in the model; the gradients are not read
                again. For stats merged over ranks, ``stats.local`` is recorded.
            inv_scale: as for `gradiometer.collect_grads`; it applies to gradients only, also to those of
                activations, and not to ``stats``.

        Raises:
            ValueError: for stats of other tensors, and for groups of stats merged over ranks.
            TypeError: for a gradient that cannot be measured; the message names it.
        """
        with self.in_order():
            grads = self._record(stats, inv_scale)
            for taps in self._taps:
                self._append_taps(taps, inv_scale)
            if self.exponents is not None:
                tensors = self._tensors("grads") if grads is None else grads
                if "weights" in self.catalog.kinds:
                    tensors = [*tensors, *self._tensors("weights")]
                self.exponents.record(tensors)

    def _record(
        self, stats: TensorStats | None, inv_scale: Tensor | float | None
    ) -> list[Tensor | None] | None:
        """Record the statistics; return this rank's gradients, if they were read."""
        if self._verdict is not None:
            self._verdict.begin()
        if stats is not None:
            self._append("grads", _of_this_rank(stats, TensorStats, "collect_grads"))
            if "weights" in self.catalog.kinds:
                self._append("weights", self._collect("weights", self._tensors("weights")))
            return None
        ring, parameters = self.ring, self._tracked[0]
        # the scale applies to gradients only
        plain_scale = inv_scale is None or (
            "weights" not in self.catalog.kinds and _is_scale(inv_scale, ring)
        )
        grads = self._tensors("grads")
        if plain_scale and self._one_device and not (self._verdict is not None and self._verdict.adds_up):
            nothing = ring.new_empty(0)
            tensors = [nothing if grad is None else grad for grad in grads]
            if "weights" in self.catalog.kinds:
                tensors += self._tensors("weights")  # type: ignore[arg-type] # none is missing
            # recognized: the list is like one that was measured before, so it is not checked again
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
                return grads
        self._append("grads", self._collect("grads", grads, inv_scale))
        if "weights" in self.catalog.kinds:
            self._append("weights", self._collect("weights", self._tensors("weights")))
        return grads

    def _append_taps(self, taps: Taps, inv_scale: Tensor | float | None) -> None:
        # after the gradients, which open a slot if the step is due
        names = len(taps.names)
        values, grads = taps.values[:names], taps.grads[:names]
        if inv_scale is not None:
            if not isinstance(inv_scale, Tensor):
                inv_scale = derived.number(inv_scale, grads.device)
            scale = on_device(inv_scale.detach(), grads.device).to(torch.float64).reshape(())
            grads = scaled_activations(grads, scale)
        columns, further = from_activations(torch.cat([values, grads]))
        flags = tap_flags(columns, self.thresholds)
        measured = [torch.cat([columns, further]), torch.cat([flags, torch.zeros_like(flags)])]
        size = self.ring.shape[1] - 1
        if self.fingerprint:
            measured.append(_no_fingerprints(flags, size - self._taps_at))
        self._write(measured, list(range(self._taps_at, size)), size, 0)

    def clear_taps(self, step: int) -> None:
        """Clear what the taps have measured, and set them to this step; `advance` to it leaves them then."""
        with self.in_order():
            self._clear_taps(float(step))
        self._cleared_for = step

    def _clear_taps(self, step: float | Tensor) -> None:
        for taps in self._taps:
            taps.advance()
            # one step number for both
            set_step(taps.cursor, step)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        cursor = state_dict.get(f"{prefix}cursor")
        if isinstance(cursor, Tensor) and cursor.shape == self.cursor.shape and not cursor.is_meta:
            check_cursor(cursor)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        with torch.no_grad(), self.in_order():
            self._clear_taps(self.cursor[Cursor.STEP])
            if self.exponents is not None:
                self.exponents.rewind(self.cursor[Cursor.STEP])

    def record_updates(self, stats: PairStats) -> None:
        """Write measured updates into the current step's slot; inside or outside of a compiled step.

        Args:
            stats: from `gradiometer.collect_updates`, named as in the model. For stats merged over ranks,
                ``stats.local`` is recorded.

        Raises:
            KeyError: if the recorder was created without ``updates=True``.
            TypeError: for anything but `PairStats`.
            ValueError: for stats of other tensors, and for groups of stats merged over ranks.

        >>> import torch, gradiometer as gm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> recorder, snapshot = gm.Recorder(model, updates=True), gm.Snapshot(model)
        >>> with torch.no_grad():
        ...     _ = model.weight.mul_(1.25)
        >>> recorder.record_updates(gm.collect_updates(model, snapshot))
        >>> round(recorder.read()[0].total("update_ratio", "updates"), 4)
        0.25
        """
        with self.in_order():
            self._append_updates(_of_this_rank(stats, PairStats, "collect_updates"))

    def _append_updates(self, stats: PairStats) -> None:
        columns, further = from_pairs(stats.columns)
        flags = compute_flags(columns, self.thresholds)
        places = self._rows("updates", stats.names)
        rows = [*places, *[place + len(self.catalog.names) for place in places]]
        measured = [torch.cat([columns, further]), torch.cat([flags, torch.zeros_like(flags)])]
        if self.fingerprint:
            # those of the weights determine them
            measured.append(_no_fingerprints(flags, len(rows)))
        self._write(measured, rows, self._taps_at, 0)

    @property
    def skip_step(self) -> Tensor:
        """Whether to skip the current step, 0-d bool on the device, decided by `record`.

        With ``ranks`` it is the same on all of them: a NaN or Inf on any rank counts, and ``skip_above`` is
        compared with the norm of all ranks' gradients. The first read after each `record` takes one
        collective of two numbers, which the step waits for; every rank has to read it then.
        """
        if self._verdict is None or self._gated or self.is_released:
            return self.cursor[Cursor.SKIP] > 0
        return self._verdict.give(self.ring, self.cursor)

    def advance(self, to: int | None = None) -> None:
        """Advance to the next step, inside or outside of a compiled function.

        Args:
            to: the number of that step. None: the device adds 1 to its own number, as a compiled or captured
                step needs it.
        """
        if self._verdict is not None:
            self._verdict.begin()
        with self.in_order():
            if to is None:
                self.cursor[Cursor.STEP : Cursor.STEP + 1].add_(1)
            step = self.cursor[Cursor.STEP] if to is None else float(to)
            if to is None or to != self._cleared_for:
                self._clear_taps(step)
            if self.exponents is not None:
                self.exponents.advance(step)
            if to is not None:
                # last: if an exception interrupts this, the ring is still in the step before
                set_step(self.cursor, step)

    def repeated(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, and the buffers that steps write."""
        return self._tracked[0], list(self.buffers())

    def step_if_known(self) -> int | None:
        """Return the number of the current step; None if only a device other than the CPU has it."""
        return int(ops.numbers(self.cursor)[Cursor.STEP]) if self.cursor.device.type == "cpu" else None

    def shrink(self) -> None:
        """Free the histograms and all slots but one, which `skip_step` needs, and forget the taps."""
        self._taps.clear()
        self.exponents = None
        self.ring = self.ring[:1].clone()

    def release(self) -> None:
        """Free the ring and the histograms, and forget parameters and taps; nothing is recorded any more."""
        self.is_released = True
        self._tracked[0].clear()
        self._taps.clear()
        self.exponents = None
        self.ring = self.ring.new_empty((0, *self.ring.shape[1:]))
        self.cursor[Cursor.SKIP].fill_(0.0)

    def in_order(self) -> AbstractContextManager[None]:
        """Return a context for a use of the buffers: the current stream waits for uses on other streams.

        All methods use it. Uses in compiled functions and captured graphs are not seen; see `StreamOrder`.
        """
        return self._order.on(self.ring.device)

    def read(self) -> list[StepRecord]:
        """Return the records in the ring, oldest first. Waits for the device."""
        with self.in_order():
            (ring,) = fetch([self.ring])
        now = time.time()
        written = sorted(
            (int(step), i) for i, step in enumerate(ring[:, 0, HEADER_STEP].tolist()) if step >= 0
        )
        return [self.as_record(step, now, {}, ring[i]) for step, i in written]

    def read_exponents(self, step: int) -> Mapping[str, Table]:
        """Return the tables of exponents of a step, if no later step has overwritten them, by kind.

        Waits for the device.

        >>> import torch, gradiometer as gm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> recorder = gm.Recorder(model, precision=100)
        >>> model(torch.tensor([[1e-6, 4.0]])).sum().backward()
        >>> recorder.record()
        >>> recorder.read_exponents(0)["grad_exponents"].stats().n_flushed("float8_e5m2")
        tensor([1])
        """
        if self.exponents is None:
            return {}
        with self.in_order():
            copies = self.exponents.copy()
        return self.exponents.tables_of([copy.result() for copy in copies], step)

    def as_record(
        self, step: int, when: float, scalars: Mapping[str, float], slot: Tensor | None
    ) -> StepRecord:
        """Return the record of a slot that was copied to the host; ``slot=None`` for a step without one."""
        catalog = self.catalog
        if slot is None:
            return StepRecord(step, when, scalars, catalog, thresholds=self.thresholds)
        n, width = len(catalog.names), slot.shape[1]
        skipped = bool(slot[0, HEADER_SKIPPED] > 0)
        rows = slot[1:]
        tables = {}
        for i, kind in enumerate(catalog.dense):
            if kind.rows == "tap":
                continue
            own = rows[i * n : (i + 1) * n]
            values, bits = own[:, :NUM_COLUMNS], None
            flags = own[:, NUM_COLUMNS].to(torch.int32)
            if kind.name == "updates":
                more = rows[self._num_rows : self._taps_at]
                values = pairs_from(values, more[:, 1 : 1 + NUM_UPDATE_COLUMNS])
            elif width > RING_WIDTH:
                bits = own[:, RING_WIDTH:].clone().view(torch.int64)
            tables[kind.name] = Table(
                kind, catalog.parameters, values, flags, thresholds=self.thresholds, fingerprints=bits
            )
        if self._taps:
            m = len(catalog.taps)
            rows = rows[self._taps_at :].view(2, 2, m, width)
            for i, name in enumerate(("activations", "activation_grads")):
                first, second = rows[0, i], rows[1, i]
                values = activations_from(first[:, :NUM_COLUMNS], second[:, :NUM_TAP_COLUMNS])
                kind = catalog.kinds[name]
                tables[name] = Table(kind, catalog.taps, values, thresholds=self.thresholds)
        # `record` always measures gradients: a table without any tells that no parameter has one
        tables = {name: table for name, table in tables.items() if name == "grads" or table.measured.any()}
        return StepRecord(step, when, scalars, catalog, tables, skipped, self.thresholds)

    def _tensors(self, kind: str) -> list[Tensor | None]:
        """Return this rank's part of the gradients or weights, in the order of the catalog."""
        parameters = self._tracked[0]
        tensors = [p.grad if kind == "grads" else p for p in parameters]
        if not self._has_dtensors:
            return tensors
        found = present(self.catalog.names, tensors)
        if kind == "grads":
            found = settled(found, Named(self.catalog.names, parameters), self._ranks, "Recorder")
        shards = iter(local_shards(found, "Recorder").tensors)
        return [None if tensor is None else next(shards) for tensor in tensors]

    def _collect(
        self, kind: str, tensors: list[Tensor | None], inv_scale: Tensor | float | None = None
    ) -> TensorStats:
        found = [(name, x) for name, x in zip(self.catalog.names, tensors, strict=True) if x is not None]
        named = Named(tuple([label(kind, name) for name, _ in found]), [x for _, x in found])
        options: dict[str, Any] = {"home": self.ring.device, "fingerprint": self.fingerprint}
        stats = measure(named, "Recorder", self.thresholds, inv_scale, **options)
        return replace(stats, names=tuple([name for name, _ in found]))

    def _append(self, kind: str, stats: TensorStats) -> None:
        """Write statistics into the rows of their names; the other rows of the step do not change."""
        measured = [stats.columns, stats.flags]
        if self.fingerprint:
            bits = stats.fingerprints
            if bits is None:
                msg = (
                    "Recorder: it records fingerprints, but these stats have none; pass fingerprint=True to "
                )
                raise ValueError(msg + "collect_grads")
            measured.append(bits)
        # only gradients decide about skipping
        grads = len(self.catalog.names) if kind == "grads" else 0
        self._write(measured, self._rows(kind, stats.names), self._num_rows, grads)

    def _rows(self, kind: str, names: tuple[str, ...]) -> list[int]:
        """Return the rows of these tensors."""
        first = list(self.catalog.kinds).index(kind) * len(self.catalog.names)
        rows = []
        for name in names:
            if name not in self._places:
                msg = (
                    f"Recorder: {name!r} is not among the parameters it was created with; pass stats of those"
                )
                raise ValueError(msg)
            rows.append(first + self._places[name])
        return rows

    def _write(self, measured: list[Tensor], rows: list[int], size: int, grads: int) -> None:
        """Write columns, flags and fingerprints into these of the first ``size`` rows."""
        measured = [on_device(x, self.ring.device) for x in measured]
        if rows != list(range(size)):
            measured = [derived.spread(x, rows, size) for x in measured]
        columns, flags, *more = measured
        if grads and self._verdict is not None:
            self._verdict.hear(columns[:grads])
        ops.append_(columns, flags, grads, self.ring, self.cursor, more[0] if more else None)


def _nobody() -> None:
    return None


def _names_of(taps: Taps | None, parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of taps; a ValueError if a parameter has one of them."""
    if taps is None:
        return ()
    if not isinstance(taps, Taps):
        msg = f"Recorder(taps=...): expected gm.Taps(model, ...), got {describe(taps)}"
        raise TypeError(msg)
    owner = _owners.get(taps, _nobody)()
    if owner is not None and any([own is taps for own in owner._taps]):  # noqa: SLF001 of this class
        msg = (
            "Recorder(taps=...): another Recorder or Monitor records these Taps, and clears them after each "
        )
        raise ValueError(msg + "step; close that Monitor, or make other Taps: gm.Taps(model, ...)")
    twice = {*taps.names} & {*parameters}
    if twice:
        msg = f"Recorder(taps=...): {min(twice)!r} is the name of a tap and of a parameter; rename the tap"
        raise ValueError(msg)
    return taps.names


def _no_fingerprints(like: Tensor, rows: int) -> Tensor:
    """Return ``(rows, 3) int64`` that stands for no fingerprint."""
    none = like.new_zeros((rows, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64)
    return torch.cat([none[:, :1] - 1, none[:, 1:]], dim=1)


def _of_this_rank(stats: _Stats, kind: type[_Stats], function: str) -> _Stats:
    if not isinstance(stats, kind):
        msg = f"Recorder: stats must be the {kind.__name__} that {function} returns, "
        raise TypeError(msg + f"got {type(stats).__name__}")
    if stats.origin is None:
        return stats
    if stats.local is None:
        msg = "Recorder: groups that are merged over ranks do not keep this rank's values; "
        raise ValueError(msg + f"pass the stats that {function}(..., reduce=ranks) returns")
    return stats.local


def _is_ordinary(tensor: Tensor, ring: Tensor) -> bool:
    """Return whether the op accepts the tensor as it is."""
    kind = type(tensor)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and layout(tensor) == torch.strided
        and tensor.device == ring.device
        and (torch.compiler.is_compiling() or not tensor.is_neg())
    )


def _is_scale(inv_scale: Tensor | float, ring: Tensor) -> bool:
    """Return whether the op accepts the scale as it is."""
    return (
        isinstance(inv_scale, Tensor)
        and is_one_number(inv_scale)
        and inv_scale.is_floating_point()
        and inv_scale.device == ring.device
    )
