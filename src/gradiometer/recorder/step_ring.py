"""The ring of a recorder: the last steps on the device, and the number of the current step."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, HEADER_STEP, TENSORS, Cursor
from gradiometer.inputs import describe
from gradiometer.recorder.kinds import GRADS
from gradiometer.recorder.settings import check_cursor, check_integer, check_skips, set_step
from gradiometer.recorder.step_record import StepRecord
from gradiometer.recorder.store import RingLayout
from gradiometer.stats import Float64Module, fetch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from typing import Self

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.catalog import Catalog
    from gradiometer.recorder.exponent_stores import ExponentStores
    from gradiometer.recorder.optimizer_states import OptimizerStates
    from gradiometer.recorder.skip_consensus import SkipConsensus
    from gradiometer.recorder.table import Table
    from gradiometer.stats import Taps


class StepRing(Float64Module):
    """The buffers that recorded steps are written to, and what moves them from step to step.

    They are on the device ``home``. Creating them raises ValueError if it lacks memory for ``capacity``
    steps. The parameters are in the order of the catalog.
    """

    ring: Tensor
    cursor: Tensor

    def __init__(
        self,
        catalog: Catalog,
        thresholds: Thresholds,
        capacity: int,
        home: torch.device,
        parameters: list[Tensor],
        *,
        fingerprint: bool,
    ) -> None:
        super().__init__()
        self.catalog, self.thresholds, self.fingerprint = catalog, thresholds, fingerprint
        self.layout = RingLayout(catalog, fingerprint=fingerprint)
        self.is_released = False
        try:
            # -1 marks an empty slot: step numbers are not negative
            ring = torch.full((capacity, self.layout.size), -1.0, dtype=torch.float64, device=home)
        except (RuntimeError, TypeError) as error:
            needs = f"{self.layout.size * 8} bytes for each step on {home}, and torch cannot allocate that"
            msg = f"Recorder(capacity={describe(capacity)}): the ring needs {needs}; use a smaller capacity"
            raise ValueError(msg) from error
        self.register_buffer("ring", ring, persistent=False)
        self.register_buffer("cursor", torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=home))
        # in lists of their own, since parameters and taps are not parts of this module
        self._tracked = [parameters]
        self._taps: list[Taps] = []
        self.exponents: ExponentStores | None = None
        self.states: OptimizerStates | None = None
        self._consensus: SkipConsensus | None = None
        self._order = ops.StreamOrder()
        self._gated = False
        # the step that `clear_taps` was called for
        self._cleared_for = -1

    @property
    def capacity(self) -> int:
        """The number of steps that are kept."""
        return len(self.ring)

    @property
    def parameters_tracked(self) -> list[Tensor]:
        """The parameters, in the order of the catalog."""
        return self._tracked[0]

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
        if self._consensus is not None and skip_above is not None and skip_above < math.inf:
            # from now on, the decision needs the squares of all ranks
            self._consensus.adds_up = True
        if self.states is not None:
            self.states.record_every = every or self.states.record_every
            if step is not None:
                self.states.restart()
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

    def clear_taps(self, step: int) -> None:
        """Clear what the taps have measured, and set them to this step; `advance` to it leaves them then."""
        with self.in_order():
            self._clear_taps(float(step))
        self._cleared_for = step

    def _clear_taps(self, step: float | Tensor) -> None:
        for taps in self._taps:
            with taps.in_order():
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

    def advance(self, to: int | None = None) -> None:
        """Advance to the next step, inside or outside of a compiled function.

        Args:
            to: the number of that step. None: the device adds 1 to its own number, as a compiled or captured
                step needs it.
        """
        if self._consensus is not None:
            self._consensus.begin()
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
        self.exponents = self.states = None
        self.ring = self.ring[:1].clone()

    def release(self) -> None:
        """Free the ring and the histograms, and forget parameters and taps; nothing is recorded any more."""
        self.is_released = True
        self._tracked[0].clear()
        self._taps.clear()
        self.exponents = self.states = None
        self.ring = self.ring.new_empty((0, self.ring.shape[1]))
        self.cursor[Cursor.SKIP].fill_(0.0)

    def in_order(self) -> AbstractContextManager[None]:
        """Return a context for a use of the buffers: the current stream waits for uses on other streams.

        All methods use it. Uses in compiled functions and captured graphs are not seen; see `StreamOrder`.
        """
        return self._order.on(self.ring.device)

    @torch.no_grad()
    def total_norm(self) -> Tensor:
        """Return the total norm of the gradients in the newest slot, 0-d float64, without a wait.

        It is of this rank's gradients: of DTensors, of the local shards. Before the first record, and after
        `release`, it is NaN.
        """
        if self.is_released:
            return self.cursor.new_full((), math.nan)
        section = self.layout.sections[GRADS.name]
        with self.in_order():
            count = self.cursor[Cursor.COUNT : Cursor.COUNT + 1]
            slot = self.ring.index_select(0, (count - 1).remainder(self.capacity).long())[0]
            width = self.layout.width(GRADS)
            rows = slot[section.offset : section.offset + section.rows * width].view(section.rows, width)
            norm = TENSORS.value(TENSORS.merge_rows(rows[:, : TENSORS.width]), "norm")
            return torch.where(count[0] > 0, norm, math.nan)

    def read(self) -> list[StepRecord]:
        """Return the records in the ring, oldest first. Waits for the device."""
        with self.in_order():
            (ring,) = fetch([self.ring])
        now = time.time()
        written = sorted((int(step), i) for i, step in enumerate(ring[:, HEADER_STEP].tolist()) if step >= 0)
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
        if slot is None:
            return StepRecord(step, when, scalars, self.catalog, thresholds=self.thresholds)
        tables, skipped = self.layout.tables(slot, self.thresholds), self.layout.is_skipped(slot)
        return StepRecord(step, when, scalars, self.catalog, tables, skipped, self.thresholds)
