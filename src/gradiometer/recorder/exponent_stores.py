"""Stores of histograms on the devices, written in the steps that are due, as each device decides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, EXPONENTS, Cursor
from gradiometer.inputs import Named, present
from gradiometer.recorder.settings import set_step
from gradiometer.recorder.table import Table
from gradiometer.stats import Float64Module, Pending, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.recorder.catalog import Rows
    from gradiometer.recorder.kinds import Kind


class ExponentStores(Float64Module):
    """Histograms of the last step that was due: a store and a cursor for each device.

    A store is ``(rows + 1, C + 1) int64``: a histogram for each tensor on its device, and the step in which
    it was measured; the last row has only the step. Each cursor is a `gradiometer.columns.Cursor` on the same
    device, so that no device waits for another.

    There are rows for N parameters and K kinds; the tensors of each kind are on the devices of the
    parameters. Steps divisible by ``every`` are due.
    """

    def __init__(self, rows: Rows, parameters: Sequence[Tensor], kinds: tuple[Kind, ...], every: int) -> None:
        super().__init__()
        self.every = every
        self._parameter_rows, self._kinds = rows, kinds
        self._labels = tuple([kind.label(name) for kind in kinds for name in rows.names])
        devices = [p.device for p in parameters] * len(kinds)
        self._rows = [[i for i, x in enumerate(devices) if x == device] for device in dict.fromkeys(devices)]
        for place, (device, own) in enumerate(zip(dict.fromkeys(devices), self._rows, strict=True)):
            store = torch.full((len(own) + 1, EXPONENTS.width + 1), -1, dtype=torch.int64, device=device)
            cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=device)
            cursor[Cursor.EVERY].fill_(float(every))
            self.register_buffer(f"store_{place}", store, persistent=False)
            self.register_buffer(f"cursor_{place}", cursor, persistent=False)

    def _each(self) -> list[tuple[list[int], Tensor, Tensor]]:
        """Return rows, store and cursor of each device."""
        return [
            (rows, getattr(self, f"store_{i}"), getattr(self, f"cursor_{i}"))
            for i, rows in enumerate(self._rows)
        ]

    def record(self, tensors: Sequence[Tensor | None]) -> None:
        """Measure the ``K * N`` tensors of all kinds, on the devices on which the step is due.

        Raises:
            TypeError: for a tensor that cannot be measured; the message names it.
        """
        for rows, store, cursor in self._each():
            # on the CPU the step may be known not to be due
            if torch.compiler.is_compiling() or ops.may_measure(cursor):
                ops.record_exponents_(self._plain(rows, tensors, store), store, cursor)

    def _plain(self, rows: list[int], tensors: Sequence[Tensor | None], store: Tensor) -> list[Tensor]:
        """Return tensors for the op; an empty one stands for a tensor that is not there."""
        nothing = store.new_empty(0, dtype=torch.float64)
        own = [tensors[row] for row in rows]
        given = [nothing if x is None else x for x in own]
        # recognized: the list is like one that was measured before, so it is not checked again
        if ops.recognize(given) is not None:
            return given
        found = present(tuple([self._labels[row] for row in rows]), own)
        left = iter(plain(Named(found.names, found.tensors), "Recorder"))
        return [nothing if x is None else next(left) for x in own]

    def advance(self, step: float | Tensor) -> None:
        """Advance to this step."""
        for _, _, cursor in self._each():
            set_step(cursor, step)

    def rewind(self, step: float | Tensor) -> None:
        """Continue at another step; a store then holds no step that is still to come."""
        self.advance(step)
        for _, store, _ in self._each():
            store[:, -1].fill_(-1)

    def copy(self) -> list[Pending[list[Tensor]]]:
        """Start to copy the stores to the host, each on the current stream of its device, and return."""
        return [Pending([store], list) for _, store, _ in self._each()]

    def tables_of(self, copies: Sequence[Sequence[Tensor]], step: int) -> dict[str, Table]:
        """Return the tables of a step from copies that have arrived; none if it was not measured."""
        if not any([store[-1, -1].item() == step for (store,) in copies]):
            return {}
        size = len(self._parameter_rows)

        def counts(first: int) -> Tensor:
            found = torch.zeros((size, EXPONENTS.width), dtype=torch.int64, device="cpu")
            for rows, (store,) in zip(self._rows, copies, strict=True):
                places = torch.tensor(rows, device="cpu") - first
                own = (places >= 0) & (places < size)
                found[places[own]] = torch.where(store[:-1, -1:] == step, store[:-1, :-1], 0)[own]
            return found

        # computed later, and not on the thread that trains
        return {
            kind.name: Table(kind, self._parameter_rows, partial(counts, i * size))
            for i, kind in enumerate(self._kinds)
        }
