"""TensorStats: the raw columns of named tensors on the device, and what is derived from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradiometer import derived
from gradiometer.report import Pending, Report
from gradiometer.schema import Thresholds

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupRule", "TensorStats"]

# which rows belong to a group: those whose name a regular expression finds, or a predicate accepts
GroupRule = str | re.Pattern[str] | Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class TensorStats:
    """Statistics of T named tensors, on their device. Nothing here waits for the device.

    A pytree: a compiled function can take it and return it. A snapshot: later changes of the
    tensors do not change it.

    Attributes:
        names: T names, one a row.
        columns: ``(T, C) float64``, the raw columns in the order of ``gm.COLUMNS``.
        flags: ``(T,) int32``, bits of `gradiometer.Flag`.
        thresholds: where the flags begin.

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

    # raw columns

    @property
    def numel(self) -> Tensor:
        """Elements, ``(T,)``."""
        return derived.value(self.columns, "numel")

    @property
    def sumsq(self) -> Tensor:
        """Sum of squares of the finite elements, ``(T,)``."""
        return derived.value(self.columns, "sumsq")

    @property
    def sum(self) -> Tensor:
        """Sum of the finite elements, ``(T,)``."""
        return derived.value(self.columns, "sum")

    @property
    def n_zero(self) -> Tensor:
        """Elements equal to 0 (-0 too), ``(T,)``."""
        return derived.value(self.columns, "n_zero")

    @property
    def n_nan(self) -> Tensor:
        """NaN elements, ``(T,)``."""
        return derived.value(self.columns, "n_nan")

    @property
    def n_posinf(self) -> Tensor:
        """+Inf elements, ``(T,)``."""
        return derived.value(self.columns, "n_posinf")

    @property
    def n_neginf(self) -> Tensor:
        """-Inf elements, ``(T,)``."""
        return derived.value(self.columns, "n_neginf")

    @property
    def abs_max(self) -> Tensor:
        """Largest finite magnitude, 0 if there is none, ``(T,)``."""
        return derived.value(self.columns, "abs_max")

    # derived values, row by row

    @property
    def n_inf(self) -> Tensor:
        """Infinite elements of either sign, ``(T,)``."""
        return derived.value(self.columns, "n_inf")

    @property
    def n_nonfinite(self) -> Tensor:
        """NaN and infinite elements, ``(T,)``."""
        return derived.value(self.columns, "n_nonfinite")

    @property
    def finite_norm(self) -> Tensor:
        """L2 norm of the finite elements, ``sqrt(sumsq)``, ``(T,)``."""
        return derived.value(self.columns, "finite_norm")

    @property
    def norm(self) -> Tensor:
        """L2 norm as torch would say it: NaN with any NaN, inf with any Inf, ``(T,)``."""
        return derived.value(self.columns, "norm")

    @property
    def rms(self) -> Tensor:
        """Root mean square of the finite elements, ``(T,)``."""
        return derived.value(self.columns, "rms")

    @property
    def mean(self) -> Tensor:
        """Mean of the finite elements, ``(T,)``."""
        return derived.value(self.columns, "mean")

    @property
    def std(self) -> Tensor:
        """Standard deviation of the finite elements (of the population, no correction), ``(T,)``.

        ``sqrt(sumsq/n - mean**2)``: it loses digits where the mean is much larger than the spread.
        """
        return derived.value(self.columns, "std")

    @property
    def zero_fraction(self) -> Tensor:
        """Share of elements equal to 0, ``(T,)``."""
        return derived.value(self.columns, "zero_fraction")

    # of all rows together

    @property
    def total(self) -> Tensor:
        """All rows merged into one, ``(C,) float64``."""
        return derived.merge_rows(self.columns)

    @property
    def total_norm(self) -> Tensor:
        """L2 norm of all tensors together, 0-d float64; 0 with none."""
        return derived.value(self.total, "norm")

    @property
    def found_inf(self) -> Tensor:
        """1.0 if any element is NaN or infinite, else 0.0; 0-d float32.

        What GradScaler and fused optimizers take as ``found_inf``.
        """
        return (derived.value(self.total, "n_nonfinite") > 0).to(torch.float32)

    @property
    def measured(self) -> bool:
        """Whether there is any tensor."""
        return len(self.names) > 0

    # towards other stats

    def group(self, rules: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]]) -> TensorStats:
        r"""Merge rows into groups, without a second read of the tensors.

        Args:
            rules: group name -> which rows belong to it: a regular expression that is searched
                in the row's name, or a predicate of the name. A row may belong to several groups
                or to none. A group without rows has numel 0 and norm 0.

        Returns:
            TensorStats with a row per group; flags are those of the merged rows.

        Raises:
            ValueError: for a group name that stands twice or is no string.
            TypeError: for a rule that is neither.

        >>> import torch, gradiometer as gm
        >>> stats = gm.collect({"host.w": torch.ones(9), "seed.w": torch.ones(4), "seed.b": torch.ones(5)})
        >>> stats.group({"host": r"^host\.", "seed": r"^seed\."}).norm
        tensor([3., 3.], dtype=torch.float64)
        """
        if isinstance(rules, str) or not isinstance(rules, Iterable):
            msg = f"group: rules must be a mapping of group name -> pattern or predicate, got {rules!r}"
            raise TypeError(msg)
        pairs = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
        names = tuple([name for name, _ in pairs])
        if len(set(names)) != len(names) or not all([isinstance(name, str) for name in names]):
            msg = f"group: each group needs a name of its own, a string; got {names}"
            raise ValueError(msg)
        merged = [derived.merge_rows(self._rows(self._members(name, rule))) for name, rule in pairs]
        columns = torch.stack(merged) if merged else self.columns.narrow(0, 0, 0)
        flags = derived.compute_flags(columns, self.thresholds)
        return TensorStats(names, columns, flags, self.thresholds)

    def merge(self, other: TensorStats) -> TensorStats:
        """Merge with stats of the same names, as if the tensors had been concatenated, name by name.

        Raises:
            ValueError: where the names differ.
        """
        if self.names != other.names:
            difference = _difference(self.names, other.names)
            msg = f"merge: the two stats must have the same names in the same order; {difference}"
            raise ValueError(msg)
        columns = derived.merge(self.columns, other.columns)
        return replace(self, columns=columns, flags=derived.compute_flags(columns, self.thresholds))

    # towards the host

    def materialize(self) -> Report:
        """Copy everything to the host in one transfer and return it as a `Report`. Waits for the device.

        Raises:
            RuntimeError: inside a compiled function; return the stats and materialize them outside.
        """
        _outside_of_a_graph("materialize")
        return Report(self.names, self._packed().cpu(), self.thresholds)

    def materialize_async(self) -> Pending:
        """Start that copy and return at once.

        ``pending.ready()`` never waits; ``pending.result()`` returns the `Report` and waits if it must.

        Raises:
            RuntimeError: inside a compiled function, as for `materialize`.
        """
        _outside_of_a_graph("materialize_async")
        return Pending(self.names, self._packed(), self.thresholds)

    def _packed(self) -> Tensor:
        # columns and flags in one matrix, so that one transfer carries both
        return torch.cat([self.columns, self.flags.to(torch.float64).unsqueeze(1)], dim=1)

    def _members(self, group: str, rule: GroupRule) -> Sequence[int]:
        if callable(rule):
            return [i for i, name in enumerate(self.names) if rule(name)]
        if isinstance(rule, re.Pattern):
            return _found(self.names, rule.pattern, rule.flags)
        if isinstance(rule, str):
            return _found(self.names, rule, 0)
        msg = f"group: the rule of {group!r} must be a regular expression or a predicate, got {rule!r}"
        raise TypeError(msg)

    def _rows(self, indices: Sequence[int]) -> Tensor:
        # runs of neighbours as slices: no index tensor has to travel to the device
        runs: list[tuple[int, int]] = []
        for i in indices:
            if runs and sum(runs[-1]) == i:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((i, 1))
        parts = [self.columns.narrow(0, start, length) for start, length in runs]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else self.columns.narrow(0, 0, 0)


def _outside_of_a_graph(what: str) -> None:
    if torch.compiler.is_compiling():
        msg = f"{what} copies to the host: return the stats from the compiled function and call it outside"
        raise RuntimeError(msg)


def _found(names: tuple[str, ...], pattern: str, flags: int) -> tuple[int, ...]:
    search = re.compile(pattern, flags).search
    return tuple(i for i, name in enumerate(names) if search(name))


# what torch.compiler.assume_constant_result does, which would import Dynamo with this package: names and
# patterns are constants of a graph, and not every Dynamo can trace the module re
_found._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001


def _difference(a: tuple[str, ...], b: tuple[str, ...]) -> str:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"row {i} is {left!r} here and {right!r} there"
    return f"there are {len(a)} here and {len(b)} there"


def _to_json(context: tuple[tuple[str, ...], Thresholds]) -> list[Any]:
    return [list(context[0]), asdict(context[1])]


def _from_json(dumped: list[Any]) -> tuple[tuple[str, ...], Thresholds]:
    return tuple(dumped[0]), Thresholds(**dumped[1])


def _flatten(stats: TensorStats) -> tuple[list[Tensor], tuple[tuple[str, ...], Thresholds]]:
    return [stats.columns, stats.flags], (stats.names, stats.thresholds)


def _unflatten(children: Iterable[Tensor], context: tuple[tuple[str, ...], Thresholds]) -> TensorStats:
    columns, flags = children
    return TensorStats(context[0], columns, flags, context[1])


pytree.register_pytree_node(
    TensorStats,
    _flatten,
    _unflatten,
    serialized_type_name="gradiometer.TensorStats",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
)
