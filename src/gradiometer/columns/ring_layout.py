"""The form of the ring of recorded steps: a slot's header, and the cursor beside it."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["CURSOR_SIZE", "HEADER_SKIPPED", "HEADER_STEP", "Cursor"]

# places in a slot's header: the step, and whether it is to be skipped
HEADER_STEP: Final = 0
HEADER_SKIPPED: Final = 1


class Cursor(enum.IntEnum):
    """Places in the cursor, ``(6,) float64``; integers are exact to 2**53."""

    STEP = 0  # the current step
    COUNT = 1  # slots written so far; slot i is at i % capacity
    EVERY = 2  # steps that this divides are recorded
    SKIP_NONFINITE = 3  # 1: a step with a non-finite gradient is to be skipped
    SKIP_ABOVE = 4  # so is one whose total gradient norm is above this
    SKIP = 5  # 1: skip the current step


CURSOR_SIZE: Final = len(Cursor)
