"""TensorStats: the raw columns of named tensors on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import (
    NUM_FINGERPRINT_COLUMNS,
    NUM_SUM_COLUMNS,
    RING_WIDTH,
    Flag,
    Thresholds,
    derived,
    merge_fingerprints,
)
from gradiometer.distributed import Sharding, differing_calls
from gradiometer.stats import stats_pytree
from gradiometer.stats.device_values import DeviceValues
from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.report import Report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed import Ranks

__all__ = ["TensorStats"]


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TensorStats(NamedStats, DeviceValues):
    """Statistics of T named tensors, on their device. Only `materialize` waits for the device.

    It is a pytree, so compiled functions can take and return it. It is a snapshot: later changes of the
    tensors do not change it.

    Attributes:
        names: T names, one per row.
        columns: ``(T, C) float64``, the raw columns in the order of ``gm.COLUMNS``.
        flags: ``(T,) int32``, bits of `gradiometer.Flag`.
        thresholds: limits of the flags.
        skip_nonfinite: whether a step with a non-finite element is skipped, as by a GradScaler.
        sharding: with several ranks: the part of all the model's tensors, measured or not, that this process
            holds. `reduce` needs it to tell shards from copies. None with one rank, and after `reduce`.
        origin: ``(T,) float64``, after `reduce`: the first rank, by its index in the group, with a NaN or Inf
            in its part of the tensor; -1 if none has; -2 if no rank measured it. None before `reduce`, when
            these are statistics of this process alone.
        fingerprints: ``(T, 3) int64``, if they were asked for: number of bytes, word sum and weighted sum of
            each tensor, see `gradiometer.Fingerprint`. -1 bytes stand for no fingerprint.
        diverged: ``(T,) bool``, after `reduce` with fingerprints: whether ranks that hold copies of this
            tensor, or of a shard of it, have different bits. False where a rank has not measured its copy.
        local: after `reduce`: the statistics of this process before it. None before `reduce`, and for
            groups made after it.

    Every raw column and derived value is a property too, ``(T,) float64``:

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"w": torch.tensor([3.0, -4.0]), "b": torch.tensor([float("nan")])})
    >>> stats.norm
    tensor([5., nan], dtype=torch.float64)
    >>> stats.n_nan
    tensor([0., 1.], dtype=torch.float64)
    >>> stats.found_inf
    tensor(1.)
    """

    names: tuple[str, ...]
    columns: Tensor
    flags: Tensor
    thresholds: Thresholds
    skip_nonfinite: bool = False
    sharding: Sharding | None = None
    origin: Tensor | None = None
    local: TensorStats | None = None
    fingerprints: Tensor | None = None
    diverged: Tensor | None = None

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        flags: Tensor,
        thresholds: Thresholds,
        skip_nonfinite: bool = False,  # noqa: FBT001, FBT002 a field like the others
        sharding: Sharding | None = None,
        origin: Tensor | None = None,
        local: TensorStats | None = None,
        fingerprints: Tensor | None = None,
        diverged: Tensor | None = None,
    ) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "thresholds", thresholds)
        object.__setattr__(self, "skip_nonfinite", skip_nonfinite)
        # Defaults stay on the class. In a graph of torch 2.12 to 2.14, an attribute that is None may come out
        # as a gradient: Dynamo shares one None, and takes it for the new value of some ``p.grad``.
        given = {"sharding": sharding, "origin": origin, "local": local}
        given |= {"fingerprints": fingerprints, "diverged": diverged}
        for name, value in given.items():
            if value is not None:
                object.__setattr__(self, name, value)

    @property
    def skipped(self) -> Tensor:
        """Whether this step is skipped: ``skip_nonfinite`` is set and an element is not finite; 0-d bool."""
        found = self.found_inf > 0
        return found if self.skip_nonfinite else torch.zeros_like(found)

    # operations that return stats

    def reduced_by(self, ranks: Ranks, what: str, **arguments: Any) -> TensorStats:
        """Do the work of `reduce`; the calling function and its arguments are the same on all ranks."""
        limits = self.thresholds
        arguments |= {"vanishing": limits.vanishing, "exploding": limits.exploding, "dead": limits.dead}
        arguments["skip_nonfinite"] = self.skip_nonfinite
        columns, origin, bits, diverged = ranks.reduce(
            self.names, self.columns, self.fingerprints, caller=what, arguments=arguments
        )
        flags = derived.compute_flags(columns, self.thresholds, skip_nonfinite=self.skip_nonfinite)
        # replicas disagree; only the presence of a non-finite value is known
        odd = (origin >= 0) & (derived.value(columns, "n_nonfinite") == 0)
        flags = torch.where(odd, flags | Flag.NAN, flags)
        merged = replace(self, columns=columns, flags=flags, origin=origin)
        return replace(
            merged, names=ranks.names, sharding=None, local=self, fingerprints=bits, diverged=diverged
        )

    def merge(self, other: TensorStats) -> TensorStats:
        """Merge with stats of the same names, as if tensors of the same name were concatenated.

        Thresholds and ``skip_nonfinite`` are taken from these stats. With two devices the result is on the
        first that is not the CPU. Fingerprints are merged too; a tensor whose first part has a number of
        bytes that is not a multiple of 8 has none afterwards.

        Raises:
            ValueError: if the names differ, or if only one of the two is reduced.
            TypeError: if ``other`` is not TensorStats.
        """
        merged = self._merged(other, NUM_SUM_COLUMNS)
        flags = derived.compute_flags(merged.columns, self.thresholds, skip_nonfinite=self.skip_nonfinite)
        bits = None
        if self.fingerprints is not None and other.fingerprints is not None:
            home = merged.columns.device
            parts = [x.to(home, non_blocking=True) for x in (self.fingerprints, other.fingerprints)]
            bits = merge_fingerprints(*parts)
        return replace(merged, flags=flags, fingerprints=bits, diverged=None)

    # copies to the host

    def materialize(self) -> Report:
        """Copy everything to the host in one transfer and return it as a `Report`. Waits for the device.

        Raises:
            RuntimeError: inside a compiled function, or while a CUDA graph is captured; return the
                stats and materialize them outside.
        """
        outside_of_a_graph("materialize")
        return self.unpacked(*fetch([self.packed()]))

    def materialize_async(self) -> Pending[Report]:
        """Start the copy that `materialize` makes, and return at once.

        ``pending.ready()`` never waits; ``pending.result()`` returns the `Report` and waits if it must.

        Raises:
            RuntimeError: inside a compiled function, as for `materialize`.
        """
        outside_of_a_graph("materialize_async")
        return Pending([self.packed()], lambda copies: self.unpacked(*copies))

    def packed(self) -> Tensor:
        """Return columns, flags, fingerprints, ``diverged`` and, after `reduce`, origins as one matrix.

        A single transfer copies it. ``(T, C + 1 ... C + 6) float64``; fingerprints are three columns with the
        bits of their integers.
        """
        parts = [self.columns, self.flags.to(torch.float64).unsqueeze(1)]
        if self.fingerprints is not None:
            parts.append(self.fingerprints.view(torch.float64))
        if self.diverged is not None:
            parts.append(self.diverged.to(torch.float64).unsqueeze(1))
        if self.origin is not None:
            parts.append(self.origin.unsqueeze(1))
        return torch.cat(parts, dim=1)

    def unpacked(self, packed: Tensor) -> Report:
        """Return the `Report` of a `packed` matrix that was copied to the host."""
        names, ranks = self.names, None
        if self.origin is not None:
            if bool(packed[:, 0].isnan().any()):
                raise differing_calls(int(packed[0, -1]))
            # a tensor that no rank has measured gets no row, as with one rank
            keep = packed[:, -1] > -2
            names, packed = tuple(compress(names, keep.tolist())), packed[keep]
            ranks = {
                name: int(rank) for name, rank in zip(names, packed[:, -1].tolist(), strict=True) if rank >= 0
            }
        bits = None
        diverged: tuple[str, ...] = ()
        if self.fingerprints is not None:
            after = RING_WIDTH + NUM_FINGERPRINT_COLUMNS
            # a copy, since torch.save refuses two dtypes in one storage
            bits = packed[:, RING_WIDTH:after].clone().view(torch.int64)
            if self.diverged is not None:
                diverged = tuple(compress(names, packed[:, after].tolist()))
        kind = {"skip_nonfinite": self.skip_nonfinite, "is_local": self.is_local}
        return Report(
            names, packed, self.thresholds, ranks=ranks, fingerprints=bits, diverged=diverged, **kind
        )

    def _grouped(self, indices: Mapping[str, Sequence[int]]) -> TensorStats:
        groups = list(indices.values())
        columns = derived.merge_groups(self.columns, groups)
        flags = derived.compute_flags(columns, self.thresholds, skip_nonfinite=self.skip_nonfinite)
        origin = self.origin
        if origin is not None:
            origin = derived.merge_groups(origin, groups, derived.first_rank)
        # the sharding is still that of the tensors: groups of shards count as shards
        grouped = replace(self, columns=columns, flags=flags, origin=origin)
        return replace(grouped, names=tuple(indices), local=None, fingerprints=None, diverged=None)


stats_pytree.register(TensorStats)
