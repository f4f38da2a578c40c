"""Chunk, tile and threads of the kernels: the one table to tune."""

from typing import Final

import torch

__all__ = ["CHUNK", "FINALIZE_THREADS", "FINALIZE_TILE", "MOMENTS_THREADS", "TILE", "warps"]

# elements of one program of the moments kernel; a multiple of every tile
CHUNK: Final = 2**15
# elements of one iteration, by size of the element in bytes: 16 bytes or more a thread. More costs
# registers, and with them occupancy
TILE: Final = {8: 1024, 4: 1024, 2: 1024}
MOMENTS_THREADS: Final = 128
# chunks of one tensor that the finalize kernel reads at a time
FINALIZE_TILE: Final = 512
FINALIZE_THREADS: Final = 128


def warps(threads: int) -> int:
    """Return how many warps hold so many threads: one is 64 of them on ROCm, 32 elsewhere."""
    return threads // (64 if torch.version.hip else 32)
