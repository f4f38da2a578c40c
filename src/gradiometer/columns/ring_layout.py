"""The layout of the ring of recorded steps: a slot's header, and the ring's cursor."""

from __future__ import annotations

import enum
from typing import Final

from gradiometer.columns.tensors import NUM_COLUMNS

# numbers in a row without a fingerprint: raw columns, then flags. The three integers of a fingerprint follow,
# as float64 with the same bits
RING_WIDTH: Final = NUM_COLUMNS + 1

# indices in a slot's header: the step, and whether to skip it
HEADER_STEP: Final = 0
HEADER_SKIPPED: Final = 1


class Cursor(enum.IntEnum):
    """Indices in the cursor, ``(6,) float64``; integers are exact up to 2**53."""

    STEP = 0  # the current step
    COUNT = 1  # slots written so far; slot i is at i % capacity
    EVERY = 2  # a step divisible by this is recorded
    SKIP_NONFINITE = 3  # 1: skip a step with a non-finite gradient
    SKIP_ABOVE = 4  # skip a step whose total gradient norm is above this
    SKIP = 5  # 1: skip the current step


CURSOR_SIZE: Final = len(Cursor)
