"""Chunks, tiles, threads and registers of the kernels that read tensors or partials: the table to tune.

Launchers read it at every call. `CHUNK`, `MAX_CHUNKS` and the tiles also determine the order of additions,
and so the last bits of a norm.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import torch

from gradiometer import fp64_rates

# elements per program of kernels that read lists, if a tensor has at most MAX_CHUNKS such chunks
CHUNK: Final = 2**15
# one program of the finalize kernel adds up a tensor's chunks: beyond this number, chunks get longer
MAX_CHUNKS: Final = 2**12


class Moments(NamedTuple):
    """How a kernel that measures reads a chunk."""

    # elements that all threads read with one 16-byte load each
    tile: int
    # loads in flight: more hide more latency, but cost registers and so occupancy
    unroll: int
    threads: int
    # upper bound. Without one, ptxas saves registers by issuing loads one after the other
    registers: int


MOMENTS: Final = {
    torch.float64: Moments(tile=512, unroll=4, threads=256, registers=64),
    torch.float32: Moments(tile=512, unroll=4, threads=128, registers=72),
    torch.bfloat16: Moments(tile=1024, unroll=4, threads=128, registers=80),
    torch.float16: Moments(tile=1024, unroll=4, threads=128, registers=96),
}

# the activation kernel, which also sums fourth powers
ACTIVATIONS: Final = {
    torch.float64: Moments(tile=512, unroll=4, threads=256, registers=96),
    torch.float32: Moments(tile=512, unroll=4, threads=128, registers=96),
    torch.bfloat16: Moments(tile=1024, unroll=4, threads=128, registers=128),
    torch.float16: Moments(tile=1024, unroll=4, threads=128, registers=160),
}
# programs of the activation kernel at most: about as many as a large GPU runs at once
MAX_PROGRAMS: Final = 2**9
# those whose partials the last program reads at once
MERGED_PROGRAMS: Final = 2**8

# additional, for the sums of a fingerprint
FINGERPRINT_REGISTERS: Final = 8

# of kernels with compensated sums: three blocks of 128 threads share the registers of a multiprocessor. A
# thread has the terms of several elements at once, and their arithmetic hides the latency of loads
COMPENSATED_REGISTERS: Final = 168


class Tiles(NamedTuple):
    """How a kernel reads its chunks, or the partials of a tensor's chunks, ``tile`` at a time."""

    tile: int
    threads: int
    registers: int


# also for the kernels that merge fingerprints, decide how to clip, write into a ring or clear histograms
FINALIZE: Final = Tiles(tile=512, threads=128, registers=128)

# the pairs kernel, by the bytes of the widest element and whether there is a gradient
PAIRS: Final = {
    (8, False): Moments(tile=256, unroll=2, threads=128, registers=96),
    (8, True): Moments(tile=256, unroll=2, threads=128, registers=128),
    (4, False): Moments(tile=512, unroll=2, threads=128, registers=128),
    (4, True): Moments(tile=512, unroll=2, threads=128, registers=168),
    (2, False): Moments(tile=1024, unroll=2, threads=128, registers=96),
    (2, True): Moments(tile=1024, unroll=2, threads=128, registers=128),
}

FINALIZE_PAIRS: Final = Tiles(tile=128, threads=128, registers=128)


# the exponents kernel; all threads read a tile of fp64 or fp32 elements with two loads each
EXPONENTS: Final = {
    torch.float64: Moments(tile=512, unroll=1, threads=128, registers=128),
    torch.float32: Moments(tile=1024, unroll=1, threads=128, registers=128),
    torch.bfloat16: Moments(tile=1024, unroll=1, threads=128, registers=128),
    torch.float16: Moments(tile=1024, unroll=1, threads=128, registers=128),
}


# elements that all threads of the projections kernel read at a time where there are gaps, those threads, the
# registers for up to 16 and up to 32 projections, and additional ones where there are gaps
PROJECTION_TILE: Final = 512
PROJECTION_THREADS: Final = 128
PROJECTION_REGISTERS: Final = {16: 96, 32: 128}
PROJECTION_GAP_REGISTERS: Final = 32
# loads of 16 bytes in flight, by the bytes of an element
PROJECTION_UNROLL: Final = {8: 2, 4: 2, 2: 1}


# all threads read a tile with four 16-byte loads each; loads cannot move across a tile's stores
SCALE: Final = {
    torch.float64: Tiles(tile=1024, threads=128, registers=64),
    torch.float32: Tiles(tile=2048, threads=128, registers=64),
    torch.bfloat16: Tiles(tile=4096, threads=128, registers=96),
    torch.float16: Tiles(tile=4096, threads=128, registers=64),
}


def has_few_fp64_units(device: torch.device) -> bool:
    """Return whether fp64 arithmetic, rather than memory, would limit the main loop on this device."""
    return (
        device.type == "cuda" and not torch.version.hip and fp64_rates.has_few_fp64_units(_capability(device))
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def stages(device: torch.device) -> int:
    """Return how many iterations of a loop are in flight where it pays to read ahead into shared memory.

    Few registers then have many loads in flight. Measured on NVIDIA GPUs only; AMD's compiler would read
    ahead into registers.
    """
    return 1 if torch.version.hip or device.type == "xpu" else 3


def options(threads: int, registers: int, device: torch.device) -> dict[str, Any]:
    """Return Triton's options for a launch."""
    # set explicitly, as the default may change: multiplications and additions must not be fused
    shared = {"enable_fp_fusion": False}
    if torch.version.hip:
        # a warp is 64 threads; the compiler takes no register bound
        return shared | {"num_warps": threads // 64}
    if device.type == "xpu":
        return shared | {"num_warps": threads // 32}
    return shared | {"num_warps": threads // 32, "maxnreg": registers}
