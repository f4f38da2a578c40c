"""The operations of all statistics of named rows: values, groups, merges, ranks, and copies to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import torch
from torch import Tensor

from gradiometer.columns import Schema, first_rank, merge_groups
from gradiometer.distributed import (
    UNKNOWN,
    Sharding,
    differing_calls,
    given_ranks,
    implicit_ranks_for,
    is_active,
    plain_sharding,
)
from gradiometer.inputs import named_parameters
from gradiometer.stats import grouping, stats_pytree
from gradiometer.stats.device_values import DeviceValue
from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph
from gradiometer.stats.table_report import TableReport, report_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.stats.grouping import GroupRule

R = TypeVar("R", bound=TableReport[Any])

# in `origin`, see `distributed.reduction.Reduced`
_NOT_MEASURED: Final = -2
_DIFFERENT_CALLS: Final = -3

_CLASSES: dict[Schema, type[NamedStats[Any]]] = {}


def stats_of(schema: Schema, names: tuple[str, ...], columns: Tensor) -> NamedStats[Any]:
    """Return the stats of a schema: `TensorStats`, `PairStats`, …, or else ones with the same operations.

    ``columns``: ``(T, C)`` of the schema's dtype.
    """
    kind = _CLASSES.get(schema)
    if kind is None:
        made = type(f"{schema.name.title()}Stats", (NamedStats,), {"schema": schema})
        kind = _CLASSES[schema] = dataclass(frozen=True, eq=False, repr=False, init=False)(made)
    return kind(names, columns)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class NamedStats(Generic[R]):
    """The base of the statistics of T named rows; ``R`` is the class of their reports.

    A subclass sets ``schema``. It then has a property for each column and derived value, and is a pytree.
    """

    schema: ClassVar[Schema]
    # one row, in texts
    _noun: ClassVar[str] = "row"

    names: tuple[str, ...]
    columns: Tensor
    sharding: Sharding | None = None
    origin: Tensor | None = None
    local: Self | None = None

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        sharding: Sharding | None = None,
        origin: Tensor | None = None,
        local: Self | None = None,
    ) -> None:
        self._set(names=names, columns=columns, sharding=sharding, origin=origin, local=local)

    def _set(self, **fields: Any) -> None:
        # Defaults stay on the class. In a graph of torch 2.12 to 2.14, an attribute that is None may come out
        # as a gradient: Dynamo shares one None, and takes it for the new value of some ``p.grad``.
        for name, value in fields.items():
            if value is not None:
                object.__setattr__(self, name, value)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        stats_pytree.register(cls)
        if "schema" in vars(cls):
            _CLASSES[cls.schema] = cls
        for name in cls.schema.attributes:
            if not hasattr(cls, name):
                setattr(cls, name, DeviceValue(cls.schema, name))

    def __repr__(self) -> str:
        """Return a one-line summary. Never waits for the device."""
        found = f"{len(self.names)} {self._noun}{'s' * (len(self.names) != 1)}"
        if self.is_reduced:
            found += " of all ranks"
        elif self.is_local:
            found += ", this rank's shards only (reduce() merges them)"
        return f"<{type(self).__name__}: {found}, on {self.columns.device}; materialize() reads them>"

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
        pairs = grouping.pairs_of(rules)
        rows = {group: grouping.members(self.names, group, rule, named) for group, rule in pairs}
        grouped = self._grouped(rows)
        # a group exists even if none of its rows was measured
        if grouped.origin is None:
            return grouped
        return replace(grouped, origin=torch.where(grouped.origin == _NOT_MEASURED, -1.0, grouped.origin))

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
        Other schemas, such as that of exponents, take a third, ``(T, 960)`` int64.
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

    def reduced_by(self, ranks: Ranks, caller: str, **arguments: Any) -> Self:
        """Do the work of `reduce`; the calling function and its arguments are the same on all ranks."""
        columns, origin, *_ = ranks.reduce(
            self.names, self.columns, schema=self.schema, caller=caller, arguments=arguments
        )
        return self._with(columns, names=ranks.names, sharding=None, origin=origin, local=self)

    def merge(self, other: Self) -> Self:
        """Merge with stats of the same names, as if rows of the same name were measured together.

        With two devices the result is on the first that is not the CPU.

        Raises:
            ValueError: if the names differ, or if only one of the two is reduced.
            TypeError: if ``other`` is not of the same class.
        """
        if type(other) is not type(self):
            raise TypeError(f"merge: expected {type(self).__name__}, got {type(other).__name__}")
        if self.names != other.names:
            difference = _difference(self.names, other.names)
            raise ValueError(f"merge: the two stats must have the same names in the same order; {difference}")
        if (self.origin is None) != (other.origin is None):
            msg = "merge: one of the two is of this rank only, and the other of all ranks; reduce both first"
            raise ValueError(msg)
        # copying to the CPU would wait for the device
        home = (other if self.columns.device.type == "cpu" else self).columns.device
        own, others = [x.columns.to(home, non_blocking=True) for x in (self, other)]
        origin, local = self.origin, None
        if origin is not None and other.origin is not None:
            both = [x.to(home, non_blocking=True) for x in (origin, other.origin)]
            origin = first_rank(torch.stack(both))
        if self.local is not None and other.local is not None:
            local = self.local.merge(other.local)
        return self._with(self.schema.merge(own, others), origin=origin, local=local)

    @property
    def total(self) -> Tensor:
        """All rows merged into one, ``(C,)``."""
        return self.schema.merge_rows(self.columns)

    def total_value(self, name: str) -> Tensor:
        """Return a raw column or derived value of all rows together, 0-d.

        Raises:
            KeyError: for an unknown name.

        >>> import torch, gradiometer as gm
        >>> gm.compare([torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)]).total_value("norm_u")
        tensor(1.4142, dtype=torch.float64)
        """
        return self.schema.value(self.total, name)

    # copies to the host

    def materialize(self) -> R:
        """Copy everything to the host in one transfer and return it as a report. Waits for the device.

        Raises:
            RuntimeError: inside a compiled function, or while a CUDA graph is captured; return the
                stats and materialize them outside.
            RankError: if the ranks made different calls, and that was not an error there.
        """
        outside_of_a_graph("materialize")
        return self.unpacked(*fetch([self.packed()]))

    def materialize_async(self) -> Pending[R]:
        """Start the copy that `materialize` makes, and return at once.

        ``pending.ready()`` never waits; ``pending.result()`` returns the report and waits if it must.

        Raises:
            RuntimeError: inside a compiled function, as for `materialize`.
        """
        outside_of_a_graph("materialize_async")
        return Pending([self.packed()], lambda copies: self.unpacked(*copies))

    def packed(self) -> Tensor:
        """Return all tensors that the report needs as one matrix of the columns' dtype, for one transfer.

        Columns come first and, after `reduce`, origins last.
        """
        parts = [self.columns, *self._more_to_pack()]
        if self.origin is not None:
            parts.append(self.origin.to(self.columns.dtype).unsqueeze(1))
        return torch.cat(parts, dim=1) if len(parts) > 1 else self.columns

    def unpacked(self, packed: Tensor) -> R:
        """Return the report of a `packed` matrix that was copied to the host."""
        names, ranks = self.names, None
        if self.origin is not None:
            origin = packed[:, -1]
            if bool(((origin <= _DIFFERENT_CALLS) | packed[:, 0].isnan()).any()):
                raise differing_calls(int(origin[0]))
            # a row that no rank has measured is left out, as with one rank
            keep = origin > _NOT_MEASURED
            names, packed = tuple(compress(names, keep.tolist())), packed[keep]
            first = zip(names, packed[:, -1].tolist(), strict=True)
            ranks = {name: int(rank) for name, rank in first if rank >= 0}
        width = self.schema.width
        return self._report(names, packed[:, :width], packed[:, width:], ranks)

    # for subclasses

    def _more_to_pack(self) -> list[Tensor]:
        """Return matrices that the report needs beside the columns, of their dtype."""
        return []

    def _report(
        self, names: tuple[str, ...], columns: Tensor, more: Tensor, ranks: Mapping[str, int] | None
    ) -> R:
        """Return the report of columns on the host; ``more`` begins with the result of `_more_to_pack`."""
        del more
        return report_of(self.schema, names, columns, ranks=ranks, is_local=self.is_local)  # type: ignore[return-value]

    def _with(self, columns: Tensor, **changes: Any) -> Self:
        """Return stats with other columns, and what depends on them anew."""
        return replace(self, columns=columns, **changes)

    def _grouped(self, indices: Mapping[str, Sequence[int]]) -> Self:
        groups = list(indices.values())
        columns = merge_groups(self.columns, groups, self.schema.merge_rows)
        origin = self.origin
        if origin is not None:
            origin = merge_groups(origin, groups, first_rank)
        # the sharding is still that of the tensors: groups of shards count as shards
        return self._with(columns, names=tuple(indices), origin=origin, local=None)

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


def _difference(a: tuple[str, ...], b: tuple[str, ...]) -> str:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"row {i} is {left!r} in one and {right!r} in the other"
    return f"one has {len(a)} rows and the other {len(b)}"
