"""The layout of the ring of recorded steps: a slot's header and sections, and the ring's cursor."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

# Indices in a slot's header: the step, and whether to skip it. Then follows, for each section, the step in
# which it was written last.
HEADER_STEP: Final = 0
HEADER_SKIPPED: Final = 1
HEADER_SECTIONS: Final = 2


class Section(NamedTuple):
    """Where the rows of a table are in a slot, or those of adjacent tables of one schema; for the ops.

    A row has the raw columns of its schema, then the flags and, with fingerprints, their three integers as
    float64 with the same bits.
    """

    header: int  # the index in the header; adjacent tables have the next ones
    tables: int  # number of tables, each with the same number of rows
    offset: int  # of the first row
    rows: int  # number of rows of all these tables
    header_size: int  # of the slot


class Cursor(enum.IntEnum):
    """Indices in the cursor, ``(7,) float64``; integers are exact up to 2**53."""

    STEP = 0  # the current step
    COUNT = 1  # slots written so far; slot i is at i % capacity
    EVERY = 2  # a step divisible by this is recorded
    SKIP_NONFINITE = 3  # 1: skip a step with a non-finite gradient
    SKIP_ABOVE = 4  # skip a step whose total gradient norm is above this
    SKIP = 5  # 1: skip the current step
    PROJECT_EVERY = 6  # a step divisible by this and EVERY is projected; 0: none is


CURSOR_SIZE: Final = len(Cursor)
