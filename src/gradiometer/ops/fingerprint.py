"""Fingerprints in eager PyTorch, in the reads that `gradiometer.ops.reference` makes."""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.columns.fingerprint import MIX_SHIFT, WORD_BYTES, Fingerprint, geometric, mix, power, signed

if TYPE_CHECKING:
    from collections.abc import Sequence

# words at a time: they, their weights and a buffer stay in the cache of a core
STRETCH: Final = 2**17
# devices on which torch multiplies vectors and matrices of int64; CUDA and XPU refuse
_MULTIPLIES_INTEGERS: Final = frozenset({"cpu"})


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 33, 2**31 - 1, and the weights 1, 1 + m, 1 + m + m**2 ..., ``(STRETCH,) int64``."""
    # normal tensors, whatever mode the first caller is in; operators take Python numbers 1 us more slowly
    with torch.inference_mode(mode=False):
        numbers = (MIX_SHIFT, 2 ** (64 - MIX_SHIFT) - 1)
        shift, mask = [torch.full((), x, dtype=torch.int64, device=device) for x in numbers]
        weights = torch.ones(1, dtype=torch.int64, device=device)
        while len(weights) < STRETCH:
            n = len(weights)
            weights = torch.cat([weights, signed(geometric(n)) + signed(power(n)) * weights])
        return shift, mask, weights


def _mix(words: Tensor, out: Tensor) -> Tensor:
    """Return ``x ^ (x >> 33)`` of unsigned words."""
    shift, mask, _ = _constants(words.device)
    # int64 shifts in copies of the sign
    return torch.bitwise_right_shift(words, shift, out=out).bitwise_and_(mask).bitwise_xor_(words)


def fingerprint(x: Tensor, buffer: Tensor) -> Fingerprint:
    """Return the fingerprint of a contiguous tensor; ``buffer``: any number of int64, is overwritten."""
    # the stride of a single element may be any
    flat = x if x.dim() == 1 and x.stride(0) == 1 else x.as_strided((x.numel(),), (1,))
    numel, each = flat.numel(), WORD_BYTES // flat.itemsize
    rest = numel % each
    result = Fingerprint(0, 0, 0)
    if numel > rest:
        words = _in_words(flat[: numel - rest] if rest else flat)
        most = min(len(buffer), STRETCH)
        parts = words.split(most) if len(words) > most else (words,)
        found = [Fingerprint(part.nbytes, *_sums(part, buffer)) for part in parts]
        result = found[0] if len(found) == 1 else reduce(Fingerprint.then, found)
    if rest:
        last = flat[numel - rest :].view(torch.uint8)
        word = mix(int.from_bytes(bytes(last.tolist()), "little"))
        result = result.then(Fingerprint(len(last), word, word))
    return result


def _sums(words: Tensor, buffer: Tensor) -> tuple[int, int]:
    """Return the word sum and the weighted sum of at most STRETCH words."""
    count = words.numel()
    mixed = _mix(words, buffer if buffer.numel() == count else buffer[:count])
    word_sum = int(mixed.sum())
    return word_sum % 2**64, int(_weighted_sum(mixed)) % 2**64


def _weighted_sum(mixed: Tensor) -> Tensor:
    """Return the weighted sums of words, ``(..., n) -> (...)``; may overwrite the words."""
    *_, weights = _constants(mixed.device)
    weights = weights[: mixed.shape[-1]]
    if mixed.device.type in _MULTIPLIES_INTEGERS:
        return torch.dot(mixed, weights) if mixed.dim() == 1 else torch.mv(mixed, weights)
    return mixed.mul_(weights).sum(dim=-1)


def fingerprints(batch: Sequence[Tensor]) -> list[Fingerprint]:
    """Return the fingerprints of contiguous tensors of one dtype, each with STRETCH words at most."""
    each = WORD_BYTES // batch[0].itemsize
    padding = batch[0].new_zeros(each)
    parts: list[Tensor] = []
    for x in batch:
        parts.append(x if x.dim() == 1 else x.reshape(-1))
        missing = -len(parts[-1]) % each
        if missing:
            parts.append(padding[:missing])
    words = torch.cat(parts).view(torch.int64)
    counts = [-(-x.numel() // each) for x in batch]
    if counts.count(counts[0]) == len(counts):
        return of_rows(words.view(len(batch), -1), [x.nbytes for x in batch])
    buffer = words.new_empty(max(counts))
    return [
        Fingerprint(x.nbytes, *_sums(part, buffer))
        for x, part in zip(batch, words.split(counts), strict=True)
    ]


def of_rows(words: Tensor, sizes: Sequence[int]) -> list[Fingerprint]:
    """Return the fingerprint of each row of words, ``(R, n) int64``, contiguous and padded with zeros.

    ``sizes``: the number of bytes of each row that are not padding.
    """
    mixed = _mix(words, torch.empty_like(words))
    sums = torch.stack([mixed.sum(dim=1), _weighted_sum(mixed)]).tolist()
    return [Fingerprint(size, a % 2**64, b % 2**64) for size, a, b in zip(sizes, *sums, strict=True)]


def _in_words(flat: Tensor) -> Tensor:
    """Return a contiguous tensor of whole words as int64, without a copy if it begins with a word."""
    if flat.storage_offset() * flat.itemsize % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)
