"""How fast NVIDIA GPUs compute in fp64: what kernels choose by, and what tools report."""

from typing import Final

FP64_RATES: Final = {
    (7, 0): (32, 64, "NVIDIA Tesla V100 white paper"),
    (7, 5): (2, 64, "NVIDIA Turing architecture white paper"),
    (8, 0): (32, 64, "NVIDIA A100 architecture white paper"),
    (8, 6): (2, 128, "NVIDIA Ampere GA102 architecture white paper"),
    (8, 7): (2, 128, "NVIDIA CUDA C++ Programming Guide, compute capability 8.x"),
    (8, 9): (2, 128, "NVIDIA Ada architecture white paper"),
    (9, 0): (64, 128, "NVIDIA H100 architecture white paper"),
    (10, 0): (64, 128, "inferred from the B200 data sheet"),
    (10, 3): (2, 128, "inferred from the B300 data sheet"),
    (12, 0): (2, 128, "NVIDIA RTX Blackwell architecture white paper"),
    (12, 1): (2, 128, "inferred from compute capability 12.0"),
}
"""By compute capability: fp64 and fp32 operations per clock and multiprocessor, and the source.

An operation is an addition, a multiplication or a fused multiply-add.
"""


def has_few_fp64_units(capability: tuple[int, int]) -> bool:
    """Return whether fp64 arithmetic, rather than memory, would limit kernels that add in fp64.

    >>> has_few_fp64_units((9, 0)), has_few_fp64_units((8, 9))
    (False, True)
    """
    fp64, fp32, _ = FP64_RATES.get(capability, (1, 1, ""))
    return 16 * fp64 < fp32
