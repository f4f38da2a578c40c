"""TensorStats: the raw columns of named tensors on the device, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.columns import (
    DEFAULT_THRESHOLDS,
    NUM_FINGERPRINT_COLUMNS,
    TENSORS,
    Flag,
    Thresholds,
    merge_fingerprints,
)
from gradiometer.stats.device_values import TensorValues
from gradiometer.stats.health_values import HealthValues, OfAll
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradiometer.distributed import Ranks, Sharding
    from gradiometer.stats.projection_stats import ProjectionStats

# what other columns do not have
_ANEW: Final[dict[str, Any]] = {"fingerprints": None, "diverged": None, "projections": None}


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TensorStats(TensorValues, HealthValues[Tensor, Tensor], NamedStats[Report]):
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
        projections: if they were asked for: `gradiometer.ProjectionStats` of the same tensors, for distances
            and cosines. Merged rows and groups have none.
        local: after `reduce`: the statistics of this process before it. None before `reduce`, and for
            groups made after it.

    Every raw column and derived value is a property too, ``(T,) float64``; the page "Columns and flags" of
    the reference lists them:

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"w": torch.tensor([3.0, -4.0]), "b": torch.tensor([float("nan")])})
    >>> stats.norm
    tensor([5., nan], dtype=torch.float64)
    >>> stats.n_nan
    tensor([0., 1.], dtype=torch.float64)
    >>> stats.found_inf
    tensor(1.)
    """

    schema = TENSORS
    _noun = "tensor"

    # keyword-only for `dataclass`, which would not allow them after fields with defaults
    flags: Tensor = field(kw_only=True)
    thresholds: Thresholds = field(kw_only=True)
    skip_nonfinite: bool = False
    fingerprints: Tensor | None = None
    diverged: Tensor | None = None
    projections: ProjectionStats | None = None

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        flags: Tensor | None = None,
        # torch 2.11 traces the defaults of a method only if they are literals, and passes a field that has a
        # default by keyword, also if it was passed by position
        thresholds: Thresholds | None = None,
        *,
        skip_nonfinite: bool = False,
        sharding: Sharding | None = None,
        origin: Tensor | None = None,
        local: TensorStats | None = None,
        fingerprints: Tensor | None = None,
        diverged: Tensor | None = None,
        projections: ProjectionStats | None = None,
    ) -> None:
        super().__init__(names, columns, sharding, origin, local)
        thresholds = thresholds or DEFAULT_THRESHOLDS
        if flags is None:
            flags = TENSORS.flags_of(columns, thresholds, skip_nonfinite=skip_nonfinite)
        self._set(flags=flags, thresholds=thresholds, skip_nonfinite=skip_nonfinite)
        self._set(fingerprints=fingerprints, diverged=diverged, projections=projections)

    total_zero_fraction = OfAll[Tensor]()
    """Share of all elements equal to 0; 0-d float64."""

    total_n_nan = OfAll[Tensor]()
    """NaN elements of all tensors; 0-d float64."""

    total_n_inf = OfAll[Tensor]()
    """Infinite elements of all tensors; 0-d float64."""

    @property
    def found_inf(self) -> Tensor:
        """1.0 if any element is NaN or infinite, else 0.0; 0-d float32.

        GradScaler and fused optimizers accept it as ``found_inf``.
        """
        # true for NaN too: the columns are NaN if the ranks' reductions did not match
        found = self.total_value("n_nonfinite") != 0
        if self.origin is not None:
            # a replica that is not counted may have a NaN or Inf, too
            found = found | (self.origin >= 0).any()
        return found.to(torch.float32)

    @property
    def skipped(self) -> Tensor:
        """Whether this step is skipped: ``skip_nonfinite`` is set and an element is not finite; 0-d bool."""
        found = self.found_inf > 0
        return found if self.skip_nonfinite else torch.zeros_like(found)

    def _computed(self, function: Callable[..., Tensor], *options: Any) -> Tensor:
        return function(self.columns, self.flags, *options)

    def _num_measured(self) -> Tensor | None:
        return None if self.origin is None else (self.origin > -2).sum(dtype=torch.float64)

    def reduced_by(self, ranks: Ranks, caller: str, **arguments: Any) -> TensorStats:
        """Do the work of `reduce`; the calling function and its arguments are the same on all ranks."""
        limits = self.thresholds
        arguments |= {"vanishing": limits.vanishing, "exploding": limits.exploding, "dead": limits.dead}
        arguments["skip_nonfinite"] = self.skip_nonfinite
        columns, origin, bits, diverged = ranks.reduce(
            self.names, self.columns, self.fingerprints, schema=TENSORS, caller=caller, arguments=arguments
        )
        merged = self._with(columns, names=ranks.names, sharding=None, origin=origin, local=self)
        # replicas disagree; only the presence of a non-finite value is known
        odd = (origin >= 0) & (merged.n_nonfinite == 0)
        flags = torch.where(odd, merged.flags | Flag.NAN, merged.flags)
        return replace(merged, flags=flags, fingerprints=bits, diverged=diverged)

    def merge(self, other: TensorStats) -> TensorStats:
        """Merge with stats of the same names, as if tensors of the same name were concatenated.

        Thresholds and ``skip_nonfinite`` are taken from these stats. With two devices the result is on the
        first that is not the CPU. Fingerprints are merged too; a tensor whose first part has a number of
        bytes that is not a multiple of 8 has none afterwards.

        Raises:
            ValueError: if the names differ, or if only one of the two is reduced.
            TypeError: if ``other`` is not TensorStats.
        """
        merged = super().merge(other)
        if self.fingerprints is None or other.fingerprints is None:
            return merged
        home = merged.columns.device
        parts = [x.to(home, non_blocking=True) for x in (self.fingerprints, other.fingerprints)]
        return replace(merged, fingerprints=merge_fingerprints(*parts))

    def _with(self, columns: Tensor, **changes: Any) -> TensorStats:
        flags = TENSORS.flags_of(columns, self.thresholds, skip_nonfinite=self.skip_nonfinite)
        return super()._with(columns, **_ANEW | {"flags": flags} | changes)

    def _more_to_pack(self) -> list[Tensor]:
        found = [self.flags.to(torch.float64).unsqueeze(1)]
        if self.fingerprints is not None:
            # the bits of their integers
            found.append(self.fingerprints.view(torch.float64))
        if self.diverged is not None:
            found.append(self.diverged.to(torch.float64).unsqueeze(1))
        return found

    def _report(
        self, names: tuple[str, ...], columns: Tensor, more: Tensor, ranks: Mapping[str, int] | None
    ) -> Report:
        bits, diverged = None, None
        if self.fingerprints is not None:
            end = 1 + NUM_FINGERPRINT_COLUMNS
            # a copy, since torch.save refuses two dtypes in one storage
            bits = more[:, 1:end].clone().view(torch.int64)
            diverged = None if self.diverged is None else more[:, end].tolist()
        return Report(
            names,
            columns,
            flags=more[:, 0].to(torch.int32),
            thresholds=self.thresholds,
            skip_nonfinite=self.skip_nonfinite,
            fingerprints=bits,
            diverged=[name for name, differs in zip(names, diverged or (), strict=False) if differs],
            ranks=ranks,
            is_local=self.is_local,
        )
