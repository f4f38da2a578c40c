"""`Monitor`: recorded steps -> host -> rules -> sinks, on background threads.

It owns the recorder, the threads and queues between it and the sinks, the black box, SIGTERM, and the merge
of ranks. Nothing here measures a tensor, and training never waits for it.
"""

from gradiometer.monitor.monitor import Monitor

__all__ = [
    "Monitor",
]
