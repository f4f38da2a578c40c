"""`Monitor`: recorded steps -> host -> run record, rules -> other sinks, on background threads.

It owns the recorder, the threads and queues between recorder and sinks, the black box, the handling of
signals that end a process, and the merging of ranks. It does not measure tensors itself, and training never
waits for it.
"""

from gradiometer.monitor.failures import raise_of_handlers
from gradiometer.monitor.monitor import Monitor

__all__ = [
    "Monitor",
    "raise_of_handlers",
]
