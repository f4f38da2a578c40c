"""Whether a rank takes part in merging, and why it ends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum, auto

# seconds that a rank which ends with a fault waits for others to merge its last steps
_GRACE = 2.0


class Phase(Enum):
    """The phases of merging on one rank, in order."""

    MERGING = auto()  # it merges its steps with those of the others
    CLOSING = auto()  # it leaves once its steps are merged, or at a deadline
    ENDED = auto()  # later steps have no tensors


@dataclass
class MergeState:
    """The phase of merging on this rank.

    Attributes:
        phase: the phase.
        deadline: when it leaves at the latest; infinite until it is closing.
        fault: the fault with which this rank ends; None without one.
        is_fault_shared: whether the other ranks know the fault.
        reason: why merging has ended; empty until then.
    """

    phase: Phase = Phase.MERGING
    deadline: float = math.inf
    fault: str | None = None
    is_fault_shared: bool = False
    reason: str = ""

    def close(self, fault: str | None, patience: float) -> None:
        """Leave within ``patience`` seconds, or within 2 s with a fault, which is to be shared."""
        self.fault, self.is_fault_shared = fault, False
        self.deadline = time.monotonic() + (patience if fault is None else _GRACE)
        if self.phase is Phase.MERGING:
            self.phase = Phase.CLOSING

    def end(self, reason: str) -> None:
        """End the merging."""
        self.phase, self.reason = Phase.ENDED, reason

    @property
    def fault_to_share(self) -> str | None:
        """The fault that other ranks do not know yet."""
        return None if self.is_fault_shared else self.fault
