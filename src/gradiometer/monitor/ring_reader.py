"""Copy the new slots of a recorder's ring buffer to the host, and assign them to their steps."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import HEADER_STEP, Cursor
from gradiometer.stats import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import ModelState, Recorder, StepRecord, Table

# due steps without a recorded one before a warning
_FORGOTTEN = 20


class _Taken(NamedTuple):
    """A step as the host knows it: its scalars, and the places of scalars that are on a device, by name.

    ``exponents``, ``states``: the copies of its histograms, and of the statistics of states of optimizers, on
    their way; None in a step that is not due.
    """

    step: int
    time: float
    scalars: dict[str, float]
    away: dict[str, int]
    model: ModelState | None
    exponents: list[Pending[list[Tensor]]] | None = None
    states: Pending[dict[str, Table]] | None = None


class _Transfer(NamedTuple):
    """A pending copy of the cursor, of the slots from number ``first`` on, and of scalars.

    ``step``: the current step, which the cursor has to have, too.
    """

    pending: Pending[list[Tensor]]
    first: int
    advances: int
    step: int
    taken: list[_Taken]
    names: tuple[str, ...]

    def ready(self) -> bool:
        """Return whether all copies have arrived."""
        others = [copy for taken in self.taken for copy in taken.exponents or ()]
        states = [taken.states.ready() for taken in self.taken if taken.states is not None]
        return self.pending.ready() and all([*[copy.ready() for copy in others], *states])


class RingReader:
    """Copies new slots of a ring to the host, with the steps' scalars, and makes records of them.

    A step writes at most one slot, so the slots written since the cursor was last read are no more than the
    steps since then. A copy of that many slots includes all of them; the cursor that is copied along tells
    which ones are new. Only `bring` waits for the device.

    The host owns the number of the step. If the copied cursor has another one, something else has changed it,
    and nobody knows which slot belongs to which step: these slots are refused.

    ``deliver``: called with the records that have arrived, in the order of their steps; a monitor passes a
    method of its `Pipeline`. ``failures``: counts failures, such as scalars that are not numbers, or a lost
    device.

    Attributes:
        step: the number of the current step.
        last: the newest record that has arrived.
        skips: whether updates are skipped where `Recorder.skip_step` is true.
        lost: steps whose tensors were given up, refused, or overwritten before they were read. It stays 0 if
            a read starts whenever `is_full` is true, and nothing else changes the ring or its cursor.
    """

    def __init__(
        self, recorder: Recorder, deliver: Callable[[list[StepRecord]], None], failures: Failures
    ) -> None:
        self.step = 0
        self.last: StepRecord | None = None
        self.lost = 0
        self.skips = False
        self._recorder = recorder
        self._deliver = deliver
        self._failures = failures
        # half of the ring: the other half may be written before the copy runs
        self._room = max(1, recorder.capacity // 2)
        self._advances = 0
        # steps before this were given up and delivered; they must not be delivered again with tensors
        self._floor = 0
        # slots that were read, and the steps that had ended when that cursor was copied
        self._count = self._mark = 0
        self._taken: list[_Taken] = []
        self._away: dict[str, Tensor] = {}
        self._transfers: deque[_Transfer] = deque()
        # steps whose slots may have the tensors of another step
        self._refused: set[int] = set()

    def take(self, scalars: Mapping[str, Any], model: ModelState | None = None) -> None:
        """End the step. Scalars are numbers, or tensors of one element on any device."""
        states, model = self._measure_states(model)
        taken = _Taken(self.step, time.time(), {}, {}, model, self._copy_exponents(), states)
        for name, value in scalars.items():
            try:
                if isinstance(value, Tensor) and value.device.type not in {"cpu", "meta"}:
                    taken.away[name] = self._keep(name, value.detach())
                else:
                    taken.scalars[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except Exception as error:  # noqa: BLE001 an invalid scalar must not stop training
                self._failures.add(f"scalar {name!r}", error)
        # all at once: after an exception in between, nobody would know whether this step has ended
        self._taken, self._advances, self.step = [*self._taken, taken], self._advances + 1, self.step + 1

    def refuse(self, *steps: int) -> None:
        """Leave the tensors of steps out: their slots may have those of other steps."""
        new = {step for step in steps if step <= self.step} - self._refused
        if not new:
            return
        self._refused |= new
        self.lost += len(new)
        text = "the device was at another step than the host, so the tensors of such steps are left out: "
        text += "an exception has interrupted advance(), or something else has changed the recorder's cursor"
        self._failures.add("step", text, len(new))

    def _copy_exponents(self) -> list[Pending[list[Tensor]]] | None:
        """Start to copy the histograms of the step that ends, if it is due, before a later one is due."""
        stores = self._recorder.exponents
        if stores is None or self.step % stores.every:
            return None
        try:
            with self._recorder.in_order():
                return stores.copy()
        except Exception as error:  # noqa: BLE001 a lost device must not stop training
            self._failures.add("precision", error)
            return None

    def _measure_states(
        self, model: ModelState | None
    ) -> tuple[Pending[dict[str, Table]] | None, ModelState | None]:
        """Start to measure the states of optimizers, if the step is due; add their counters to the model."""
        recorder, states = self._recorder, self._recorder.states
        if states is None or not states.is_due(self.step):
            return None, model
        rows, parameters = recorder.catalog.parameters, recorder.parameters_tracked
        try:
            with recorder.in_order():
                found = states.start(rows, parameters, recorder.thresholds, recorder.ring.device)
        except Exception as error:  # noqa: BLE001 a lost device must not stop training
            self._failures.add("states", error)
            return None, model
        if model is not None and model.optimizers is not None:
            known = replace(model.optimizers, updates=found.updates, dtypes=found.dtypes)
            model = replace(model, optimizers=known)
        return found.tables, model

    def _keep(self, name: str, value: Tensor) -> int:
        place = len(self._taken)
        with self._recorder.in_order():
            # copy, because the next replay of a CUDA graph overwrites the loss
            if name not in self._away:
                self._away[name] = torch.empty(self._room, dtype=torch.float64, device=value.device)
            self._away[name][place].copy_(value.reshape(()), non_blocking=True)
        return place

    @property
    def is_full(self) -> bool:
        """Whether a read must start before the next step, so that no slot is overwritten unread."""
        return len(self._taken) >= self._room

    @property
    def under_way(self) -> int:
        """The number of copies that were started and have not arrived."""
        return len(self._transfers)

    def start(self, *, in_step: bool = False) -> None:
        """Start to copy new slots. ``in_step``: the current step may have been recorded already."""
        try:
            self._start(in_step=in_step)
        except Exception as error:  # noqa: BLE001 a lost device must not stop training
            self._surrender(error)

    def poll(self, *, cut: bool = False) -> None:
        """Deliver what has arrived, without waiting. ``cut``: include a recorded step that has not ended."""
        try:
            while self._transfers and self._transfers[0].ready():
                self._hand_over(self._decode(self._transfers[0], cut=cut))
        except Exception as error:  # noqa: BLE001 as above
            self._surrender(error)

    def bring(self, deadline: float = math.inf, *, cut: bool = False) -> bool:
        """Copy all new slots and wait until they arrive or ``time.monotonic()`` passes the deadline."""
        self.start(in_step=True)
        self.poll(cut=cut)
        while self._transfers and time.monotonic() < deadline:
            time.sleep(0.0005)
            self.poll(cut=cut)
        return not self._transfers

    def give_up(self) -> None:
        """Stop waiting for a device that does not respond."""
        self._surrender("the device does not respond: the last steps have no tensors")

    def rewind(self, step: int) -> None:
        """Continue at another step; all recorded steps must have been delivered."""
        # a new step may have the same number as an old one in the ring, so clear the numbers
        with self._recorder.in_order():
            self._recorder.ring[:, HEADER_STEP].fill_(-1)
        self._recorder.configure_(step=step)
        self.step, self._floor, self._refused = step, 0, set()

    def _start(self, *, in_step: bool) -> None:
        recorder = self._recorder
        slots = _slots(recorder.ring, self._count, self._advances - self._mark + in_step)
        tensors = [recorder.cursor, *slots, *self._away.values()]
        with recorder.in_order():
            # keep the sources alive until the copy has arrived
            pending = Pending(tensors, partial(_host_of, tensors))
        transfer = _Transfer(pending, self._count, self._advances, self.step, self._taken, tuple(self._away))
        # all at once: after an exception in between, steps would be delivered twice, or never
        self._transfers, self._taken, self._away = deque([*self._transfers, transfer]), [], {}

    def _hand_over(self, records: list[StepRecord]) -> None:
        if not records:
            return
        self.last = records[-1]
        try:
            self._deliver(records)
        except BaseException:
            # such as Ctrl-C: sinks may have missed these steps, and must not get them twice
            self.lost += len(records)
            raise

    def _surrender(self, error: Exception | str) -> None:
        """Give up copies that have not arrived; deliver their steps with the scalars that the host knows."""
        self._failures.add("ring reader", error)
        given_up = [taken for transfer in self._transfers for taken in transfer.taken] + self._taken
        self._transfers, self._taken, self._away = deque(), [], {}
        self._floor = self.step
        self.lost += len(given_up)
        self._hand_over([self._recorder.as_record(x.step, x.time, x.scalars, None) for x in given_up])

    def _decode(self, transfer: _Transfer, *, cut: bool) -> list[StepRecord]:
        host = transfer.pending.result()
        capacity = self._recorder.capacity
        split = len(host) - len(transfer.names)
        cursor, *blocks = host[:split]
        columns = {name: x.tolist() for name, x in zip(transfer.names, host[split:], strict=True)}
        block = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        # a full copy of the ring begins with slot 0
        origin = 0 if len(block) == capacity else transfer.first
        count, current = int(cursor[Cursor.COUNT]), int(cursor[Cursor.STEP])
        first = max(transfer.first, self._count)
        if (
            not count
            and transfer.advances >= _FORGOTTEN * cursor[Cursor.EVERY]
            and "record" not in self._failures.counts
        ):
            text = f"none of the first {transfer.advances} steps was recorded: call record() in every step, "
            self._failures.add("record", text + "after backward()")
        lost = max(0, count - capacity - first)
        new = range(max(first, count - capacity), count)
        if current != transfer.step or (len(block) < capacity and count - origin > len(block)):
            self.refuse(
                *range(transfer.step - len(transfer.taken), transfer.step + (current != transfer.step))
            )
            new = range(0)
        slots: dict[int, Tensor] = {}
        for i in new:
            slot = block[(i - origin) % capacity]
            step = int(slot[HEADER_STEP])
            if step == current and not cut:
                count = i  # not ended; a later read delivers it
            elif step in slots:
                self.refuse(step)
                del slots[step]
            elif step >= self._floor and step not in self._refused:
                # clone, so that keeping one record does not keep the whole copy alive
                slots[step] = slot.clone()

        models = {taken.step: taken.model for taken in transfer.taken}
        known: dict[int, tuple[float, dict[str, float]]] = {
            x.step: (x.time, x.scalars | {name: columns[name][at] for name, at in x.away.items()})
            for x in transfer.taken
        }
        # a step that did not end has no scalars
        missing: tuple[float, dict[str, float]] = (time.time(), {})
        steps = sorted({*known, *slots})
        records = [self._recorder.as_record(x, *known.get(x, missing), slots.get(x)) for x in steps]
        others = {x.step: self._others(x) for x in transfer.taken if x.exponents or x.states}
        records = [
            replace(
                record,
                skipped=record.skipped and self.skips,
                model=models.get(record.step),
                tables={**record.tables, **others.get(record.step, {})},
            )
            for record in records
        ]
        refused = {step for step in self._refused if step >= transfer.step}
        # all at once: after an exception in between, slots would be read twice, or never
        self._transfers, self._count, self._mark, self.lost, self._refused = (
            deque([*self._transfers][1:]),
            count,
            transfer.advances,
            self.lost + lost,
            refused,
        )
        return records

    def _others(self, taken: _Taken) -> Mapping[str, Table]:
        """Return the tables of a step that are not in the ring."""
        states = {} if taken.states is None else taken.states.result()
        stores = self._recorder.exponents
        if stores is None or taken.exponents is None or taken.step in self._refused:
            return states
        return {**stores.tables_of([copy.result() for copy in taken.exponents], taken.step), **states}


def _slots(ring: Tensor, first: int, new: int) -> list[Tensor]:
    """Return ``new`` slots, from number ``first`` on, as views; the whole ring if all may be new."""
    capacity = len(ring)
    if new >= capacity:
        return [ring]
    start = first % capacity
    stop = start + new
    return [ring[start:stop]] if stop <= capacity else [ring[start:], ring[: stop - capacity]]


def _host_of(_: list[Tensor], host: list[Tensor]) -> list[Tensor]:
    return host
