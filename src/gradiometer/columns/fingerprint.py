"""Fingerprints: two integer sums over the bits of a tensor, which merge exactly.

Take the bytes of a tensor's elements, in row-major order, as little-endian 64-bit words x_0, x_1 ...; the
last word is padded with zeros. Let w = x ^ (x >> 33). The fingerprint is the number of bytes and

    word_sum = sum w_i mod 2**64,    weighted_sum = sum (1 + m + ... + m**i) w_i mod 2**64,

a sum and a polynomial hash. Integer sums depend neither on the order of additions nor on the device. If a
second part begins n words after the first, the sums of both are

    word_sum_1 + word_sum_2,    weighted_sum_1 + (1 + m + ... + m**(n - 1)) word_sum_2 + m**n weighted_sum_2.

Any change of one or two elements of at most 32 bits changes the fingerprint, in a tensor of at most 32 GiB:
`docs/explanation/fingerprints.md` has the proof.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

# m is 1 modulo 4: for i > j, the difference of the weights of two words, m**(j + 1) + ... + m**i, is then
# divisible by the same powers of two as i - j. As the multiplier of a congruential generator it passes the
# spectral test in 2 to 8 dimensions (normalized figures of merit above 0.7). m**-256 mod 2**64 is below
# 2**32, which saves the kernels a multiplication.
MULTIPLIER: Final = 0xB5FDA49F156191B5
# Makes the lower half of w depend on both halves of x. With 32, one pattern in both would cancel, such as the
# sign bits of two fp32 numbers; with more than 33, changes of more bits would not reach the lower half.
MIX_SHIFT: Final = 33
WORD_BYTES: Final = 8
# words of a tensor, at most 2**POSITION_BITS
POSITION_BITS: Final = 37
_MODULUS: Final = 2**64

# of ``TensorStats.fingerprints``, ``(T, 3) int64``; the sums are unsigned integers, modulo 2**64
FINGERPRINT_COLUMNS: Final = ("n_bytes", "word_sum", "weighted_sum")
NUM_FINGERPRINT_COLUMNS: Final = len(FINGERPRINT_COLUMNS)


class Fingerprint(NamedTuple):
    """The fingerprint of one tensor's bits: its number of bytes, and two sums below 2**64.

    Tensors of one dtype and shape with different fingerprints differ; with equal fingerprints they are equal,
    except with a probability of 2**-128 for a random change. The string has 32 hexadecimal digits.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"w": torch.ones(2)}, fingerprint=True)
    >>> str(stats.materialize()["w"].fingerprint)
    '3f800000204000003f80000020400000'
    """

    n_bytes: int
    word_sum: int
    weighted_sum: int

    def __str__(self) -> str:
        return f"{self.word_sum:016x}{self.weighted_sum:016x}"

    @classmethod
    def of_row(cls, row: list[int]) -> Self | None:
        """Return the fingerprint in a row of ``TensorStats.fingerprints``; None if the row has none."""
        n_bytes, *sums = row
        return None if n_bytes < 0 else cls(n_bytes, *[x % _MODULUS for x in sums])

    @property
    def row(self) -> list[int]:
        """The row for ``TensorStats.fingerprints``."""
        return [self.n_bytes, signed(self.word_sum), signed(self.weighted_sum)]

    def then(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of this tensor's bytes followed by those of another.

        Raises:
            ValueError: if this tensor does not end with a whole word, so that the other's words would change.
        """
        if self.n_bytes % WORD_BYTES:
            msg = f"the first part has {self.n_bytes} bytes, which is not a multiple of {WORD_BYTES}, so the "
            raise ValueError(msg + "fingerprints cannot be merged; take the fingerprint of the whole tensor")
        words = self.n_bytes // WORD_BYTES
        return Fingerprint(
            self.n_bytes + other.n_bytes,
            (self.word_sum + other.word_sum) % _MODULUS,
            (self.weighted_sum + geometric(words) * other.word_sum + power(words) * other.weighted_sum)
            % _MODULUS,
        )


def mix(word: int) -> int:
    """Return w for a word x; a bijection."""
    return word ^ (word >> MIX_SHIFT)


@lru_cache(maxsize=1024)
def power(words: int) -> int:
    """Return m**words mod 2**64."""
    return pow(MULTIPLIER, words, _MODULUS)


@lru_cache(maxsize=1024)
def geometric(words: int) -> int:
    """Return 1 + m + ... + m**(words - 1) mod 2**64."""
    return (pow(MULTIPLIER, words, _MODULUS * (MULTIPLIER - 1)) - 1) // (MULTIPLIER - 1)


def signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    return value - _MODULUS if value >= _MODULUS // 2 else value


# constants of a graph, since Dynamo warns of cached functions
_POWERS_OF_TWO: Final = tuple(
    [(signed(geometric(2**bit)), signed(power(2**bit))) for bit in range(POSITION_BITS)]
)


def merge_fingerprints(a: Tensor, b: Tensor) -> Tensor:
    """Merge fingerprints as if tensors were concatenated. ``(..., 3), (..., 3) -> (..., 3) int64``.

    A row gets -1 bytes, which stands for no fingerprint, if one of the two has none, or if the first has a
    number of bytes that is not a multiple of 8.
    """
    (n_bytes, word_sum, weighted_sum), others = a.unbind(-1), b.unbind(-1)
    words = n_bytes // WORD_BYTES
    scale, total = torch.ones_like(n_bytes), torch.zeros_like(n_bytes)
    for bit, (added, factor) in enumerate(_POWERS_OF_TWO):
        is_set = (words >> bit) & 1 != 0
        total = torch.where(is_set, total + scale * added, total)
        scale = torch.where(is_set, scale * factor, scale)
    weighted = weighted_sum + total * others[1] + scale * others[2]
    merged = torch.stack([n_bytes + others[0], word_sum + others[1], weighted], dim=-1)
    none = merged.new_zeros(merged.shape)
    none[..., 0] = -1
    mergeable = (n_bytes >= 0) & (n_bytes % WORD_BYTES == 0) & (others[0] >= 0)
    return torch.where(mergeable.unsqueeze(-1), merged, none)
