"""Whether the loads in flight cover the latency of the memory: a queueing model of one multiprocessor.

A warp loops: it issues its loads, waits for them and computes. The memory, the issue slots, the fp64 units
and the converters are queues that all warps share; the latency and the dependences in a warp are delays.
Mean-value analysis gives the rate of this closed network exactly for exponential service times: M. Reiser and
S. Lavenberg, "Mean-value analysis of closed multichain queuing networks", Journal of the ACM 27 (1980).

The four constants are fitted to times measured on an H100 (docs/explanation/benchmarks.md), and assumed for
other NVIDIA GPUs. The model has no caches, no waves of blocks, and no code outside the main loop.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels_bench.machine_code.roofline import REACHABLE, Gpu

# seconds until a load returns, without the queue at the memory
LATENCY = 600e-9
# clocks of a warp for each of its instructions, and in addition for each fp64 instruction or conversion
ISSUE, FP64 = 2, 14
# iterations in flight of a loop that reads two ahead: warps meet at barriers, so fewer than two
AHEAD = 1.5


class Limits(NamedTuple):
    """What the blocks on a multiprocessor share: CUDA C++ Programming Guide, "Technical Specifications".

    It has 65,536 registers, and a block takes 1 KiB more of shared memory than it uses.
    """

    threads: int
    blocks: int
    shared: int


LIMITS = {
    "sm_80": Limits(2048, 32, 164 * 1024),
    "sm_89": Limits(1536, 24, 100 * 1024),
    "sm_90": Limits(2048, 32, 228 * 1024),
    "sm_100": Limits(2048, 32, 228 * 1024),
    "sm_103": Limits(2048, 32, 228 * 1024),
    "sm_120": Limits(1536, 24, 100 * 1024),
}


class Flight(NamedTuple):
    """What is in flight on a multiprocessor, and the share of the reachable bandwidth that follows."""

    blocks: int
    # bytes
    loads: int
    share: float


def blocks_of(target: str, registers: int, threads: int, shared: int) -> int:
    """Return how many blocks run on a multiprocessor together."""
    limits = LIMITS[target]
    # registers are allocated by eight
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    return min(by_registers, limits.threads // threads, limits.blocks, limits.shared // (shared + 1024))


def rate(warps: int, services: list[float], delay: float) -> float:
    """Return the iterations a second of so many warps, by mean-value analysis."""
    queues = [0.0] * len(services)
    found = 0.0
    for number in range(1, warps + 1):
        times = [service * (1 + queue) for service, queue in zip(services, queues, strict=True)]
        found = number / (delay + sum(times))
        queues = [found * time for time in times]
    return found


def flight(gpu: Gpu, row: dict) -> Flight | None:
    """Return what the model says of a row of the report; None on AMD GPUs, for which it is not fitted."""
    if gpu.target not in LIMITS:
        return None
    blocks = blocks_of(gpu.target, row["registers"], row["threads"], row["shared"])
    size = 32 * sum(int(width) * number for width, number in row["loads"].items())
    # of a warp, an iteration
    slots, fp64, conversions = (row["elements"] * row[name] for name in ("slots", "fp64", "conversions"))
    memory = size * gpu.processors / (REACHABLE * gpu.bandwidth)
    clocks = (32 * slots / gpu.lanes, 32 * fp64 / gpu.fp64, 32 * conversions / gpu.conversions)
    services = [memory, *(number / gpu.clock for number in clocks)]
    delay = LATENCY + (ISSUE * slots + FP64 * (fp64 + conversions)) / gpu.clock
    warps = int(blocks * row["threads"] // 32 * (AHEAD if row["reads_ahead"] else 1))
    return Flight(blocks, warps * size, rate(warps, services, delay) * memory)
