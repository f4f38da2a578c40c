"""The columns of projections: sums of a tensor's elements with random signs, which tell distances.

Projection j of a tensor is ``p_j = sum of s_j(i) x_i`` over its finite elements, where i is the index of an
element in row-major order of the whole tensor and each sign is +1 or -1. For independent signs, the mean of
``p_j**2`` over k projections estimates the squared norm of the tensor with a relative standard deviation of
at most ``sqrt(2 / k)``, and the mean of ``p_j q_j`` the inner product of two tensors (Alon, Matias and
Szegedy, "The space complexity of approximating the frequency moments", 1999: the signs of any four elements
must be independent). Projections are linear: those of a difference are the differences of projections. They
merge by sum, over chunks and over shards of any dimension.

The sign of projection j is bit ``j % 32`` of a 32-bit hash of the index; 1 stands for -1. It is a
counter-based hash. For i = hi * 2**32 + lo, and two 32-bit keys that `sign_keys` derives from the seed, the
name of the tensor and ``j // 32``:

    x = lo ^ key_0;   x ^= x >> 17;   x *= 0xED5AD4BB;   x += key_1 + hi * 0x9E3779B9
                      x ^= x >> 11;   x *= 0xAC4C1B51
                      x ^= x >> 15;   x *= 0x31848BAB
                      x ^= x >> 14

modulo 2**32, with logical shifts. Shifts and factors are those of triple32 (Wellons, "Hash function
prospector"), whose avalanche is close to that of a random function. Since the name is hashed, too, signs of
different tensors are independent, and rows may be added up.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from gradiometer.columns.roots import sqrt
from gradiometer.columns.schema import Column, Derived, Schema
from gradiometer.columns.tensors import TENSORS, count_of

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns.schema import Row

# x ^= x >> shift, then x *= factor, for each of these
SIGN_MIX: Final = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 1))
HIGH_FACTOR: Final = 0x9E3779B9
"""The factor on the upper half of an index."""
WORD_BITS: Final = 32
"""Projections whose signs come from one hash."""
DEFAULT_PROJECTIONS: Final = 16
# columns before the projections
FIRST_PROJECTION: Final = 3


def _estimated_norm(row: Row) -> Tensor:
    found = row.columns[..., FIRST_PROJECTION:]
    return sqrt((found * found).mean(dim=-1))


def _finite_norm(row: Row) -> Tensor:
    return sqrt(row("sumsq"))


def _schema(count: int) -> Schema:
    return Schema(
        "projections",
        (
            TENSORS.columns[TENSORS.index["numel"]],
            TENSORS.columns[TENSORS.index["sumsq"]],
            count_of("n_nonfinite", "NaN and infinite elements", "NaN, ±Inf", "rare"),
            *[
                Column(f"p{j}", "sum", "s", "sum of ±x over finite elements", signed=True)
                for j in range(count)
            ],
        ),
        (
            Derived("finite_norm", _finite_norm, "L2 norm of the finite elements", "finite norm"),
            Derived(
                "estimated_norm",
                _estimated_norm,
                "root mean square of the projections, an estimate of finite_norm",
                "estimated norm",
            ),
        ),
        shown=("numel", "finite_norm", "estimated_norm", "n_nonfinite"),
        drawn=(),
    )


PROJECTIONS: Final = {count: _schema(count) for count in (8, 16, 32, 64, 128, 256)}
"""The schemas by number of projections."""


@lru_cache(maxsize=1 << 14)
def sign_keys(name: str, seed: int, word: int) -> tuple[int, int]:
    """Return the keys of the signs of projections ``32 * word`` to ``32 * word + 31``, below 2**32.

    >>> sign_keys("blocks.3.w", 0, 0) != sign_keys("blocks.4.w", 0, 0)
    True
    """
    text = f"{seed}\0{word}\0{name}".encode("utf-8", "surrogatepass")
    digest = blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def sign_hash(index: int, keys: tuple[int, int]) -> int:
    """Return the 32-bit hash of an index, whose bits are signs; as the kernels and the reference do.

    >>> keys = sign_keys("w", 0, 0)
    >>> [1 - 2 * (sign_hash(0, keys) >> j & 1) for j in range(4)]  # of element 0 in 4 projections
    [-1, -1, 1, -1]
    """
    mask = (1 << WORD_BITS) - 1
    x = (index & mask) ^ keys[0]
    for place, (shift, factor) in enumerate(SIGN_MIX):
        x = ((x ^ (x >> shift)) * factor) & mask
        if place == 0:
            x = (x + keys[1] + (index >> WORD_BITS) * HIGH_FACTOR) & mask
    return x
