"""Chunk, tile and warps of the kernels: the one table to tune."""

from typing import Final

__all__ = ["CHUNK", "FINALIZE_TILE", "FINALIZE_WARPS", "MOMENTS_WARPS", "TILE"]

# elements of one program of the moments kernel; a multiple of every tile
CHUNK: Final = 2**15
# elements of one iteration, by size of the element in bytes; more costs registers, and with them occupancy
TILE: Final = {8: 1024, 4: 1024, 2: 1024}
MOMENTS_WARPS: Final = 4
# chunks of one tensor that the finalize kernel reads at a time
FINALIZE_TILE: Final = 512
FINALIZE_WARPS: Final = 4
