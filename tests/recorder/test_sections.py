"""The ring's sections: a table is in a step's record if it was written in that step, and only then.

These tests run on the eager path, on interpreted kernels and on compiled ones.
"""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, PAIRS, TENSORS, Cursor
from gradiometer.recorder import Catalog
from gradiometer.recorder.store import RingLayout

KINDS = ("grads", "weights", "updates")
NAMES = ("a", "b", "c")


class Ring:
    """A ring of three tensors and of two slots, and what should be in it."""

    def __init__(self, *, every: int = 1, fingerprint: bool = False) -> None:
        shapes, dtypes = [(2,)] * len(NAMES), ["float32"] * len(NAMES)
        self.catalog = Catalog.of(NAMES, shapes, dtypes, KINDS)
        self.layout = RingLayout(self.catalog, fingerprint=fingerprint)
        self.steps = torch.full((2, self.layout.size), -1.0, dtype=torch.float64)
        self.cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
        self.cursor[Cursor.EVERY], self.cursor[Cursor.SKIP_ABOVE] = every, math.inf
        self.fingerprint, self.every, self.count = fingerprint, every, 0.0
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def step(self) -> int:
        return int(self.cursor[Cursor.STEP])

    def append(self, kind: str, measured: tuple[bool, ...], *, tables: int = 1, nan: bool = False) -> None:
        schema = self.catalog.kinds[kind].schema
        self.count += 1.0
        columns = torch.full((tables * len(NAMES), schema.width), self.count, dtype=torch.float64)
        columns[:, schema.index["n_nan"]] = float(nan)
        columns[:, schema.index["n_posinf"]] = columns[:, schema.index["n_neginf"]] = 0.0
        columns *= torch.tensor(measured * tables, dtype=torch.float64).unsqueeze(1)
        flags = torch.full((len(columns),), 3, dtype=torch.int32)
        bits = None
        if self.fingerprint and self.catalog.kinds[kind].has_fingerprints:
            bits = torch.full((len(columns), 3), -7, dtype=torch.int64)
        grads = len(NAMES) if kind == "grads" else 0
        section = self.layout.adjacent(kind, tables)
        ops.append_(columns, flags, grads, self.steps, self.cursor, section, bits)

        bad = kind == "grads" and nan and any(measured)
        if self.step not in self.expected and not bad and self.step % self.every:
            return
        found = self.expected.setdefault(self.step, {})
        first = KINDS.index(kind)
        for name, rows in zip(KINDS[first : first + tables], columns.split(len(NAMES)), strict=True):
            before = found.get(name, torch.zeros_like(rows))
            found[name] = torch.where(rows[:, :1] > 0, rows, before)

    def check(self) -> None:
        last = sorted(self.expected)[-2:]
        slots = {int(slot[0]): slot for slot in self.steps if slot[0] >= 0}
        assert sorted(slots) == last
        for step in last:
            tables = self.layout.tables(slots[step], None)
            expected = {
                kind: rows
                for kind, rows in self.expected[step].items()
                # updates of which none was measured are no table
                if kind != "updates" or rows.any()
            }
            assert set(tables) == set(expected)
            for kind, table in tables.items():
                assert torch.equal(table.values, expected[kind])
                assert torch.equal(
                    table.flags[table.measured], torch.full_like(table.flags, 3)[table.measured]
                )
                has_bits = self.fingerprint and kind != "updates"
                assert (table.fingerprints is not None) == has_bits
                if has_bits:
                    assert (table.fingerprints[table.measured] == -7).all()


MEASURED = st.tuples(*[st.booleans()] * len(NAMES))


@given(
    every=st.integers(1, 3),
    fingerprint=st.booleans(),
    actions=st.lists(
        st.one_of(
            st.just("advance"),
            st.tuples(st.sampled_from(["grads", "weights", "updates", "both"]), MEASURED, st.booleans()),
        ),
        max_size=12,
    ),
)
def test_a_step_has_the_tables_that_were_written_in_it(every, fingerprint, actions):
    ring = Ring(every=every, fingerprint=fingerprint)
    for action in actions:
        if action == "advance":
            ring.cursor[Cursor.STEP] += 1
            continue
        kind, measured, nan = action
        tables = 2 if kind == "both" else 1
        ring.append("grads" if kind == "both" else kind, measured, tables=tables, nan=nan)
    ring.check()


def test_only_gradients_open_a_slot_that_is_not_due():
    ring = Ring(every=2)
    ring.cursor[Cursor.STEP] = 1
    for kind in ("weights", "updates"):
        ring.append(kind, (True, True, True), nan=True)
    assert not ring.expected
    ring.append("grads", (True, False, False), nan=True)
    ring.append("updates", (True, True, False))
    assert set(ring.expected[1]) == {"grads", "updates"}
    ring.check()


def test_a_slot_that_is_used_again_has_no_table_of_an_earlier_step_of_the_same_number():
    ring = Ring()
    for kind in KINDS:
        ring.append(kind, (True, True, True))
    for step in (1, 2):
        ring.cursor[Cursor.STEP] = step
        ring.append("grads", (True, True, True))
    # back to step 0, in the slot that had it
    del ring.expected[0], ring.expected[1]
    ring.expected[-1] = {}
    ring.cursor[Cursor.STEP] = 0
    ring.append("grads", (False, True, True))
    tables = ring.layout.tables(ring.steps[1], None)
    assert set(tables) == {"grads"}
    assert tables["grads"].measured.tolist() == [False, True, True]


def test_rows_are_as_wide_as_their_schema():
    layout = RingLayout(Ring().catalog)
    sizes = [2 * len(NAMES) * (TENSORS.width + 1), len(NAMES) * (PAIRS.width + 1)]
    assert layout.size == layout.header_size + sum(sizes)
