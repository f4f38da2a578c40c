"""What the statistics of tensors and of pairs share: names, groups, and the ranks that they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from gradiometer.columns import derived
from gradiometer.distributed import (
    UNKNOWN,
    Sharding,
    given_ranks,
    implicit_ranks_for,
    is_active,
    plain_sharding,
)
from gradiometer.inputs import named_parameters
from gradiometer.stats import grouping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.stats.grouping import GroupRule

__all__ = ["NamedStats"]


class NamedStats:
    """The base of `TensorStats`, `PairStats` and `ExponentStats`, frozen dataclasses with these fields."""

    names: tuple[str, ...]
    columns: Tensor
    sharding: Sharding | None
    origin: Tensor | None
    local: Self | None
    # what a row is
    _ROW = "tensor"

    def __repr__(self) -> str:
        """Return a one-line summary. Never waits for the device."""
        rows = f"{len(self.names)} {self._ROW}{'s' * (len(self.names) != 1)}"
        if self.is_reduced:
            rows += " of all ranks"
        elif self.is_local:
            rows += ", this rank's shards only (reduce() merges them)"
        return f"<{type(self).__name__}: {rows}, on {self.columns.device}; materialize() reads them>"

    def packed(self) -> Tensor:
        """Return all tensors that the report needs as one matrix, for a single transfer."""
        raise NotImplementedError

    def unpacked(self, packed: Tensor) -> Any:
        """Return the report of a `packed` matrix that was copied to the host."""
        raise NotImplementedError

    @property
    def measured(self) -> bool:
        """Whether there is any row."""
        return len(self.names) > 0

    @property
    def is_reduced(self) -> bool:
        """Whether these are statistics of all ranks."""
        return self.origin is not None

    @property
    def is_local(self) -> bool:
        """Whether tensors are sharded over ranks, and these are statistics of this rank's shards only."""
        return self.origin is None and self.sharding is not None and self.sharding.is_sharded

    def group(
        self,
        rules: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]],
        *,
        model: Parameters | None = None,
    ) -> Self:
        r"""Merge rows into groups, without a second read of the tensors.

        Args:
            rules: group name -> rule for the rows that belong to it: a regular expression searched
                in the row's name, a predicate of the name, a collection of names, or one or more
                modules of the model. A row may belong to several groups or to none. A group
                without rows has numel 0 and norm 0.
            model: the model whose parameters or gradients these are; needed if a rule is a module.

        Returns:
            stats with a row per group; flags are those of the merged rows. Groups have no fingerprints.

        Raises:
            ValueError: for a group name that is a duplicate or not a string; for a module that has
                parameters, but none of the model's; for a model whose names match no row; for a string
                that is not a regular expression.
            TypeError: for any other rule; for a module without ``model``.

        >>> import torch, gradiometer as gm
        >>> stats = gm.collect({"encoder.w": torch.ones(9), "head.w": torch.ones(4), "head.b": torch.ones(5)})
        >>> stats.group({"encoder": r"^encoder\.", "head": ["head.w", "head.b"]}).norm
        tensor([3., 3.], dtype=torch.float64)
        """
        named = None if model is None else named_parameters(model, "group")
        grouped = self._grouped(
            {
                group: grouping.members(self.names, group, rule, named)
                for group, rule in grouping.pairs_of(rules)
            }
        )
        # a group exists even if none of its rows was measured
        if grouped.origin is None:
            return grouped
        return replace(grouped, origin=grouped.origin.clamp(min=-1.0))  # type: ignore[type-var]

    def by_module(self, depth: int | None = None) -> Self:
        """Merge rows by module; the result has a row per module in the order of the model.

        Args:
            depth: number of levels down from the root; None for the modules that own the tensors.
                Tensors that the root itself owns are in ``""``.

        >>> import torch, gradiometer as gm
        >>> gm.collect({"mlp.0.w": torch.ones(9), "mlp.1.w": torch.ones(16)}).by_module(1).norm
        tensor([5.], dtype=torch.float64)
        """
        return self._grouped(grouping.by_module(self.names, depth))

    def reduce(self, ranks: Ranks | None = None) -> Self:
        """Merge with the statistics of the other ranks; every rank gets those of the whole model.

        It takes two collectives, ``(T, 7)`` and ``(T + 8, 2)`` float64, for any model; nothing is gathered.
        Histograms of exponents take a third, ``(T, 960)`` int64.
        All ranks have to call it, including ranks without gradients. Rows are those of all ranks' models, in
        the same order on every rank. A row that no rank has measured has numel 0 and is left out of reports.

        Args:
            ranks: the ranks' agreement, `gradiometer.Ranks`. Without it the ranks agree on their first call
                with this model. Required in a compiled step.

        Returns:
            stats with ``origin`` and ``local``; these stats themselves if they are already reduced, or
            with one rank and no ``ranks``. The result is on the same device or, with ``ranks``, on their
            device, the first of their model that is not the CPU.

        Raises:
            RankError: if the ranks disagree, or one does not respond.
            RuntimeError: in a compiled function without ``ranks``.
            ValueError: for groups of this rank's shards, since groups have to be made after `reduce`; for
                shards from a compiled function without ``ranks``; for a name that the ranks have not agreed
                on.

        >>> import torch, gradiometer as gm
        >>> gm.collect([torch.tensor([3.0, 4.0])]).reduce().total_norm  # with one rank
        tensor(5., dtype=torch.float64)
        """
        if self.origin is not None:
            return self
        ranks = given_ranks(True if ranks is None else ranks, "reduce")
        if ranks is None:
            if not is_active():
                return self
            ranks = implicit_ranks_for(self._agreeable(), self.columns.device)
        return self.reduced_by(ranks, "reduce")

    def reduced_by(self, ranks: Ranks, what: str, **arguments: Any) -> Self:
        """Do the work of `reduce`; the calling function and its arguments are the same on all ranks."""
        raise NotImplementedError

    def merge(self, other: Self) -> Self:
        """Merge with stats of the same names, as if tensors of the same name were concatenated."""
        raise NotImplementedError

    def _grouped(self, indices: Mapping[str, Sequence[int]]) -> Self:
        raise NotImplementedError

    def _agreeable(self) -> Sharding:
        """Return the sharding of these rows for the ranks to agree on."""
        sharding = self.sharding
        if sharding == UNKNOWN:
            msg = "reduce: these shards were measured in a compiled function, which does not keep their "
            raise ValueError(msg + "placements; pass ranks = gm.Ranks(model)")
        if sharding is not None and set(self.names) <= set(sharding.names):
            return sharding
        if self.is_local:
            msg = "reduce: these are groups of this rank's shards, which cannot be merged over ranks; "
            raise ValueError(msg + "reduce before you group: stats.reduce().group(...)")
        return plain_sharding(self.names)

    def _merged(self, other: Self, sums: int) -> Self:
        """Return the merged columns, origin and local stats; ``sums``: how many columns merge by sum."""
        if type(other) is not type(self):
            msg = f"merge: expected {type(self).__name__}, got {type(other).__name__}"
            raise TypeError(msg)
        if self.names != other.names:
            difference = _difference(self.names, other.names)
            msg = f"merge: the two stats must have the same names in the same order; {difference}"
            raise ValueError(msg)
        if (self.origin is None) != (other.origin is None):
            msg = "merge: one of the two is of this rank only, and the other of all ranks; reduce both first"
            raise ValueError(msg)
        # copying to the CPU would wait for the device
        home = (other if self.columns.device.type == "cpu" else self).columns.device
        own, others = [x.columns.to(home, non_blocking=True) for x in (self, other)]
        columns = derived.merge(own, others, sums)
        origin, local = self.origin, None
        if origin is not None and other.origin is not None:
            both = [x.to(home, non_blocking=True) for x in (origin, other.origin)]
            origin = derived.first_rank(torch.stack(both))
        if self.local is not None and other.local is not None:
            local = self.local.merge(other.local)
        return replace(self, columns=columns, origin=origin, local=local)  # type: ignore[type-var]


def _difference(a: tuple[str, ...], b: tuple[str, ...]) -> str:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"row {i} is {left!r} in one and {right!r} in the other"
    return f"one has {len(a)} rows and the other {len(b)}"
