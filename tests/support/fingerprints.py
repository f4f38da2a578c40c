"""The definition of a fingerprint, word by word in Python integers, and tensors of random bits."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from gradiometer.columns.fingerprint import MULTIPLIER, WORD_BYTES, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

MODULUS, HALF = 2**64, 2**32


def mixed(word: int) -> int:
    """Return w for a word x: the lower half changes by the upper half, shifted by one bit."""
    low, high = word % HALF, word // HALF
    return (low ^ high >> 1) + high * HALF


def unmixed(w: int) -> int:
    """Return the word x for a w."""
    low, high = w % HALF, w // HALF
    return (low ^ high >> 1) + high * HALF


def of_words(words: Iterable[int], n_bytes: int) -> Fingerprint:
    word_sum = weighted_sum = 0
    weight = 1
    for word in words:
        w = mixed(word)
        word_sum += w
        weighted_sum += weight * w
        weight = (1 + MULTIPLIER * weight) % MODULUS
    return Fingerprint(n_bytes, word_sum % MODULUS, weighted_sum % MODULUS)


def of_bytes(data: bytes) -> Fingerprint:
    padded = data + bytes(-len(data) % WORD_BYTES)
    return of_words(struct.unpack(f"<{len(padded) // WORD_BYTES}Q", padded), len(data))


def bytes_of(tensor: Tensor) -> bytes:
    """Return a tensor's elements in row-major order, with lazy conjugation and negation carried out."""
    x = tensor.detach().resolve_conj().resolve_neg().contiguous()
    x = torch.view_as_real(x) if x.is_complex() else x
    # a contiguous tensor of one element may have any stride
    return bytes(x.as_strided((x.numel(),), (1,)).view(torch.uint8).tolist())


def of_tensor(tensor: Tensor) -> Fingerprint:
    return of_bytes(bytes_of(tensor))


def rows_of(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Return the expected ``TensorStats.fingerprints``."""
    return [of_tensor(tensor).row for tensor in tensors]


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return a tensor of random bits, among them NaNs with payloads, infinities and subnormal numbers."""
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8)
    if dtype.is_complex:
        real = {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(dtype, torch.float64)
        return torch.view_as_complex(data.view(real).view(-1, 2)).clone().view(shape)
    return data.view(dtype).view(shape)
