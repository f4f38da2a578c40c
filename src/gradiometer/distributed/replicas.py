"""Fingerprints over ranks: those of whole tensors, and whether copies are the same, from one sum.

A fingerprint's two sums travel as four halves of 32 bits, which float64 adds up exactly. A rank adds its part
of a whole tensor, moved to the part's offset by the merge law. Beside it, each rank adds its fingerprint
times a coefficient. The coefficients of the ranks that hold the same part add up to 0, so the sum is 0 if
they hold the same bits. One rank with other bits always makes it differ from 0; several do unless their
differences cancel after multiplication by different pseudorandom numbers.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import WORD_BYTES
from gradiometer.columns.fingerprint import geometric, power, signed
from gradiometer.distributed.process_groups import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.distributed.agreement import Agreement
    from gradiometer.distributed.sharding import Sharding, ShardSpec

# columns in the sum: bytes and halves of the whole, then presence and halves of the copies
_EACH: Final = 5
NUM_SUMMED: Final = 2 * _EACH

# sums of integers below 2**53 are exact in float64: 33 bits for a half and its sign, and the ranks' number
_EXACT_BITS: Final = 53 - 33
# bytes of a tensor whose parts cannot be merged; it outweighs those of all other parts
_NOT_MERGEABLE: Final = -(2.0**52)


class _Known(NamedTuple):
    """What is known of this rank's L tensors and of all T rows, on one device."""

    totals: Tensor  # (L,) int64, of the powers below that of the offset
    powers: Tensor  # (L,) int64, of the offset
    n_bytes: Tensor  # (L,) int64, of this rank's part; -1 if it cannot be merged
    coefficients: Tensor  # (L, 1) float64
    total: Tensor  # (T,) float64, bytes of the whole; -1 if unknown

    def on(self, device: torch.device) -> _Known:
        return _Known(*[x.to(device) for x in self])


class Replicas:
    """What a rank adds for the fingerprints of all rows, and what their sums mean."""

    def __init__(self, agreement: Agreement) -> None:
        plan, sharding = agreement.plan, agreement.sharding
        parts = [_part(sharding, spec) for spec in sharding.specs]
        offsets, n_bytes = [offset for offset, _ in parts], [n_bytes for _, n_bytes in parts]
        bits = max(1, _EXACT_BITS - (len(plan.members) - 1).bit_length())
        coefficients = [_coefficient(place, count, bits) for place, count in plan.copies(agreement.rank)]
        total = [float(_bytes_of(spec)) for spec in plan.specs]
        self._on_host = _Known(
            torch.tensor([signed(geometric(n)) for n in offsets], dtype=torch.int64, device="cpu"),
            torch.tensor([signed(power(n)) for n in offsets], dtype=torch.int64, device="cpu"),
            torch.tensor(n_bytes, dtype=torch.int64, device="cpu"),
            torch.tensor(coefficients, dtype=torch.float64, device="cpu").unsqueeze(1),
            torch.tensor(total, dtype=torch.float64, device="cpu"),
        )
        self._on_device = self._on_host.on(agreement.device)

    def _at(self, device: torch.device) -> _Known:
        return self._on_host if device.type == "cpu" else self._on_device

    def parts(self, indices: Sequence[int] | None, fingerprints: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank adds to the whole tensors and to the copies, each ``(L, 5) float64``.

        ``indices``: of the tensors in this rank's sharding; None: all. ``fingerprints``: ``(L, 3) int64``.
        """
        totals, powers, n_bytes, coefficients, _ = self._at(fingerprints.device)
        if indices is not None:
            index = torch.tensor(indices, dtype=torch.int64, device=powers.device)
            totals, powers, n_bytes = totals[index], powers[index], n_bytes[index]
            coefficients = coefficients[index]
        measured = fingerprints[:, 0]
        there = (measured >= 0).unsqueeze(1)
        # a gradient of another dtype than its parameter has other offsets
        known = (measured == n_bytes).unsqueeze(1)
        _, word_sum, weighted_sum = fingerprints.unbind(dim=1)
        moved = torch.stack([word_sum, totals * word_sum + powers * weighted_sum], dim=1)
        size = torch.where(known, measured.unsqueeze(1), _NOT_MERGEABLE)
        whole = torch.cat([size.to(torch.float64), _halves(moved)], dim=1)
        own = torch.cat([torch.ones_like(coefficients), _halves(fingerprints[:, 1:])], dim=1)
        return torch.where(there, whole, 0.0), torch.where(there, own * coefficients, 0.0)

    def merged(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return fingerprints and whether copies differ, from the sums over ranks of what `parts` returns."""
        whole, copies = sums[..., :_EACH], sums[..., _EACH:]
        halves = whole[..., 1:].to(torch.int64)
        bits = halves[..., 0::2] + (halves[..., 1::2] << 32)
        # some part is missing, or is no piece of whole words
        complete = (whole[..., 0] == self._at(sums.device).total).unsqueeze(-1)
        n_bytes = torch.where(complete, whole[..., :1], -1.0).to(torch.int64)
        found = torch.cat([n_bytes, torch.where(complete, bits, 0)], dim=-1)
        # with a copy that was not measured, nothing is known
        return found, (copies[..., 1:] != 0).any(dim=-1) & (copies[..., 0] == 0)


def minority(ranks: Agreement, name: str, texts: Sequence[str | None]) -> tuple[int, ...]:
    """Return the global ranks whose copy of a tensor differs from that of most ranks with the same part.

    ``texts``: describes the copy of each rank, in the order of the group; None: it has none.
    """
    pattern = ranks.plan.patterns[ranks.plan.rows[name]]
    odd: set[int] = set()
    for rank in range(ranks.size):
        holders = ranks.plan.holders(rank, pattern)
        held = {other: texts[other] for other in holders if texts[other] is not None}
        if held and rank == min(held):
            # of versions that are equally common, the one of the lowest rank
            (most, _), *_ = Counter(held.values()).most_common()
            odd.update([other for other, text in held.items() if text != most])
    return tuple([ranks.global_ranks[rank] for rank in sorted(odd)])


def divergence_text(ranks: Agreement, name: str, texts: Sequence[str | None]) -> str:
    """Return a text that names the ranks of `minority`, such as ``rank 5 differs from 7 others``."""
    odd = minority(ranks, name, texts)
    if not odd:
        return "copies differ between ranks"
    pattern = ranks.plan.patterns[ranks.plan.rows[name]]
    holders = ranks.plan.holders(ranks.global_ranks.index(odd[0]), pattern)
    others = len([rank for rank in holders if ranks.global_ranks[rank] not in odd])
    verb = "rank {} differs" if len(odd) == 1 else "ranks {} differ"
    return f"{verb.format(listed(odd))} from {others} other{'s' * (others != 1)}"


def _halves(sums: Tensor) -> Tensor:
    """Return the lower and upper half of each 64-bit integer. ``(L, 2) int64 -> (L, 4) float64``."""
    halves = torch.stack([sums & 0xFFFFFFFF, (sums >> 32) & 0xFFFFFFFF], dim=2)
    return halves.flatten(1).to(torch.float64)


@lru_cache(maxsize=1024)
def _coefficient(place: int, count: int, bits: int) -> float:
    """Return the coefficient of one of ``count`` copies; they add up to 0."""
    if place > 0:
        return float(_number(place, bits))
    return float(-sum([_number(other, bits) for other in range(1, count)]))


def _number(place: int, bits: int) -> int:
    # multiplicative hashing, at least 1: Knuth, "The Art of Computer Programming", volume 3, section 6.4
    return 1 + (place * 2654435761 % 2**32 >> 32 - bits) % (2**bits - 1) if bits > 1 else 1


def _bytes_of(spec: ShardSpec) -> int:
    """Return the bytes of the whole tensor; -1 if they are unknown."""
    if spec.shape is None or not spec.dtype:
        return -1
    return int(torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize)


def _part(sharding: Sharding, spec: ShardSpec) -> tuple[int, int]:
    """Return the offset in words, and the bytes, of this rank's part of a tensor.

    They are 0 and -1 unless the part is a contiguous piece that begins with a whole word.
    """
    n_bytes, sharded = _bytes_of(spec), spec.sharded
    if spec.shape is None or not sharded:
        return 0, n_bytes
    mesh = sharding.meshes[spec.mesh]
    if len(sharded) > 1 or spec.placements[sharded[0]] != "S(0)" or mesh.coordinate is None:
        return 0, -1
    parts, place = mesh.shape[sharded[0]], mesh.coordinate[sharded[0]]
    # as torch.chunk: the last parts may be shorter, or empty
    each = -(-spec.shape[0] // parts)
    row = n_bytes // max(1, spec.shape[0])
    if each * row % WORD_BYTES:
        return 0, -1
    first, last = min(place * each, spec.shape[0]), min((place + 1) * each, spec.shape[0])
    return first * row // WORD_BYTES, (last - first) * row
