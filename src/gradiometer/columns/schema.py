"""The description of what is measured of one tensor: columns, how they merge, and what is derived from them.

Everything that stores, merges, writes or shows measurements reads a `Schema`. Its instances are in the other
modules of this package. Flags and thresholds are here, too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

Scaling = Literal["1", "s", "|s|", "s*s", "s*s*s*s"]
Style = Literal["count", "rare", "number", "finite", "fraction", "cosine"]

_MOST: Final = 1 << 16  # columns of a schema that is loaded
_POWERS: Final[Mapping[str, int]] = {"1": 0, "s": 1, "|s|": 1, "s*s": 2, "s*s*s*s": 4}


@dataclass(frozen=True)
class Column:
    """One raw value of a row: its name, how two of them merge, and its meaning.

    The identity of both merges is 0: it adds nothing to a sum, and no magnitude is below it.

    Attributes:
        name: the name, unique in its schema.
        merge: ``"sum"`` or ``"max"``.
        scaling: the factor on the value when the tensor is multiplied by s.
        meaning: one line.
        heading: of a table's column; the name if empty.
        style: how tables write it, see `Derived`. A ``"count"`` or ``"rare"`` is an integer.
        unit: of a count: ``"elements"``, at most ``numel``, or another one.
        signed: whether it may be negative.
    """

    name: str
    merge: Literal["sum", "max"]
    scaling: Scaling
    meaning: str
    heading: str = ""
    style: Style = "number"
    unit: str = ""
    signed: bool = False

    @property
    def is_count(self) -> bool:
        """Whether the values are integers."""
        return self.style in {"count", "rare"}


class Row(NamedTuple):
    """The columns of one row, or of several, for functions that compute a value from them.

    Called with a name, it returns that column or derived value.
    """

    schema: Schema
    columns: Tensor

    def __call__(self, name: str) -> Tensor:
        """Return a value by name, ``(...)``."""
        return self.schema.value(self.columns, name)


@dataclass(frozen=True)
class Derived:
    """One value that is computed from a row's columns.

    Attributes:
        name: the name, not that of a column.
        function: returns the value of a `Row`, ``(...)``, on the device of its columns.
        meaning: one line.
        heading: of a table's column; the name if empty.
        style: how tables write it: ``"count"``; ``"rare"``, a count that is usually 0; ``"number"``;
            ``"finite"``, a number about the finite elements, if there are any; ``"fraction"``, from 0 to 1;
            ``"cosine"``, from -1 to 1, of which 1 is the best.
        per: the count that a share is of, if it may be 0 in a row that was measured: the share is not known.
    """

    name: str
    function: Callable[[Row], Tensor]
    meaning: str
    heading: str = ""
    style: Style = "number"
    per: str = ""

    @property
    def is_count(self) -> bool:
        """Whether the values are integers."""
        return self.style in {"count", "rare"}


class Flag(enum.IntFlag):
    """Anomalies of one tensor, as bits of ``TensorStats.flags``.

    ``NAN`` and ``INF``: it holds at least one. ``VANISHING``: its L2 norm is finite and below the threshold.
    ``EXPLODING``: its L2 norm is above the threshold or not finite. ``DEAD``: its share of zeros is at or
    above the threshold. A tensor with no elements has no flag.
    """

    NAN = 1
    INF = 2
    VANISHING = 4
    EXPLODING = 8
    DEAD = 16


DEFAULT_VANISHING_THRESHOLD: Final = 1e-7
"""An L2 norm strictly below it is flagged ``VANISHING``."""
DEFAULT_EXPLODING_THRESHOLD: Final = 100.0
"""An L2 norm strictly above it, or not finite, is flagged ``EXPLODING``."""
DEFAULT_DEAD_THRESHOLD: Final = 1.0
"""A share of zeros at or above it is flagged ``DEAD``."""


@dataclass(frozen=True)
class Thresholds:
    """The limits at which a tensor is flagged.

    Args:
        vanishing: an L2 norm strictly below it is ``VANISHING``; 0 switches the flag off.
        exploding: an L2 norm strictly above it is ``EXPLODING``; with ``math.inf``, only
            that of a tensor with NaN or Inf is.
        dead: a share of zeros at or above it is ``DEAD``; above 1 switches the flag off.

    Raises:
        ValueError: if a threshold is not a number, is NaN or is negative, or if ``dead`` is 0.

    >>> Thresholds(exploding=10.0)
    Thresholds(vanishing=1e-07, exploding=10.0, dead=1.0)
    """

    vanishing: float = DEFAULT_VANISHING_THRESHOLD
    exploding: float = DEFAULT_EXPLODING_THRESHOLD
    dead: float = DEFAULT_DEAD_THRESHOLD

    def __post_init__(self) -> None:
        for name in ("vanishing", "exploding", "dead"):
            value = getattr(self, name)
            # rejects NaN too; Dynamo does not trace math.isnan of a number that changes
            if not isinstance(value, (int, float)) or not value >= 0:
                msg = f"Thresholds({name}={value!r}): {name} must be a non-negative number"
                raise ValueError(msg)
        if self.dead == 0:
            msg = "Thresholds(dead=0): it would flag every tensor; pass a share of zeros above 0 (1.0: all)"
            raise ValueError(msg)


DEFAULT_THRESHOLDS: Final = Thresholds()


@dataclass(frozen=True, eq=False)
class Schema:
    """What is measured of one row of a table.

    Columns that merge by sum come first, so that a merge is two slices. The first column of a schema with
    ``storage="columns"`` is ``numel``: a row in which it is 0 was not measured.

    Attributes:
        name: such as ``"tensors"``.
        columns: the C raw columns.
        derived: the values that are computed from them.
        dtype: of the columns.
        flags: the flags that are computed from them.
        storage: ``"columns"``, or ``"sparse"`` for many columns of which most are 0.
        shown: names of columns and derived values, those of a printed table.
        drawn: names of those that the page of a run draws; None: all raw columns but the first.
        index: the index of each column, by name.
        num_sums: the number of columns that merge by sum.

    Raises:
        ValueError: if names occur twice, or the columns are not in the order above.

    >>> columns = Column("numel", "sum", "1", "elements"), Column("n_negative", "sum", "1", "x < 0")
    >>> schema = Schema("signs", columns)
    >>> schema.merge_rows(torch.tensor([[3.0, 1.0], [2.0, 2.0]]))
    tensor([5., 3.])
    """

    name: str
    columns: tuple[Column, ...]
    derived: tuple[Derived, ...] = ()
    dtype: torch.dtype = torch.float64
    flags: Flag = Flag(0)  # noqa: RUF009 an IntFlag is immutable
    storage: Literal["columns", "sparse"] = "columns"
    shown: tuple[str, ...] = ()
    drawn: tuple[str, ...] | None = None
    index: Mapping[str, int] = field(init=False, repr=False)
    num_sums: int = field(init=False, repr=False)
    _functions: Mapping[str, Callable[[Row], Tensor]] = field(init=False, repr=False)
    _powers: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # attributes, since Dynamo cannot trace the lock of a cached property
        object.__setattr__(self, "index", {column.name: i for i, column in enumerate(self.columns)})
        object.__setattr__(self, "num_sums", sum(column.merge == "sum" for column in self.columns))
        object.__setattr__(self, "_functions", {value.name: value.function for value in self.derived})
        object.__setattr__(self, "_powers", tuple([_POWERS[column.scaling] for column in self.columns]))
        problem = ""
        if len({*self.index, *self._functions}) != len(self.columns) + len(self.derived):
            problem = "a name occurs twice"
        elif [column.merge for column in self.columns] != sorted([x.merge for x in self.columns])[::-1]:
            problem = "columns that merge by sum come first"
        elif self.storage == "columns" and self.columns[0].name != "numel":
            problem = "the first column is numel, the number of elements, which is 0 in a row without values"
        if problem:
            msg = f"Schema({self.name!r}): {problem}"
            raise ValueError(msg)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns and derived values."""
        return (*self.index, *self._functions)

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the values that stats and rows have as attributes.

        They are all names but those of sparse columns that are not shown, which are too many.
        """
        if self.storage == "columns":
            return self.names
        return (*self.shown, *[name for name in self._functions if name not in self.shown])

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.index or name in self._functions

    def __getitem__(self, name: str) -> Column | Derived:
        """Return a column or derived value by name; raise KeyError if there is none."""
        if name in self.index:
            return self.columns[self.index[name]]
        return next(value for value in self.derived if value.name == self._known(name))

    def stores_the_same(self, other: Schema) -> bool:
        """Return whether the raw columns have the same names, merges and types, whatever their headings."""
        mine, others = [
            (
                *(schema.name, schema.dtype, schema.storage, bool(schema.flags)),
                *[(x.name, x.merge, x.is_count, x.unit, x.signed) for x in schema.columns],
            )
            for schema in (self, other)
        ]
        return mine == others

    def _known(self, name: str) -> str:
        if name not in self._functions:
            msg = f"there is no {name!r} of {self.name}; choose from {', '.join(self.names)}"
            raise KeyError(msg)
        return name

    def value(self, columns: Tensor, name: str) -> Tensor:
        """Return a raw column or derived value by name. ``(..., C) -> (...)``.

        Raises:
            KeyError: for an unknown name.
        """
        if name in self.index:
            return columns.select(-1, self.index[name])
        return self._functions[self._known(name)](Row(self, columns))

    def by_merge(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns that merge by sum, and those that merge by maximum, as views."""
        summed, largest = columns.split([self.num_sums, columns.shape[-1] - self.num_sums], dim=-1)
        return summed, largest

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """Merge two matrices of raw columns, element by element. ``(..., C), (..., C) -> (..., C)``."""
        (a_sums, a_tops), (b_sums, b_tops) = self.by_merge(a), self.by_merge(b)
        return torch.cat([a_sums + b_sums, torch.maximum(a_tops, b_tops)], dim=-1)

    def merge_rows(self, columns: Tensor) -> Tensor:
        """Merge all rows into one. ``(T, ..., C) -> (..., C)``; zeros, the identity, for T = 0."""
        if columns.shape[0] == 0:
            return columns.new_zeros(columns.shape[1:])
        summed, largest = self.by_merge(columns)
        if largest.shape[-1] == 0:
            return summed.sum(dim=0)
        return torch.cat([summed.sum(dim=0), largest.amax(dim=0)], dim=-1)

    def scaled(self, columns: Tensor, scale: Tensor) -> Tensor:
        """Return the columns of ``scale * x``, for finite scale. ``scale``: 0-d, of the columns' dtype.

        With a negative scale, +Inf and -Inf are not exchanged.
        """
        one = torch.ones_like(scale)
        size = scale.abs()
        for power in range(1, max(self._powers) + 1):
            # one power at a time: a square alone may leave the range of float64
            factors = [
                one if n < power else size if column.scaling == "|s|" else scale
                for n, column in zip(self._powers, self.columns, strict=True)
            ]
            columns = columns * torch.stack(factors)
        return columns

    def flags_of(self, columns: Tensor, thresholds: Thresholds, *, skip_nonfinite: bool = False) -> Tensor:
        """Return the flags of each row. ``(..., C) -> (...) int32``, bits of `Flag`.

        It makes the same comparisons as the finalize kernel, for rows that come from a merge. With
        ``skip_nonfinite``, a tensor that is not finite is not flagged as exploding.
        """
        flags = torch.zeros(columns.shape[:-1], dtype=torch.int32, device=columns.device)
        if not self.flags:
            return flags
        n_nan, n_inf = self.value(columns, "n_nan"), self.value(columns, "n_inf")
        finite = n_nan + n_inf == 0
        found = [(Flag.NAN, n_nan > 0), (Flag.INF, n_inf > 0)]
        if self.flags & (Flag.VANISHING | Flag.EXPLODING):
            norm = self.value(columns, "finite_norm")
            # not (norm <= limit), so that a NaN norm is exploding
            exploding = (norm <= thresholds.exploding).logical_not()
            exploding = finite & exploding if skip_nonfinite else finite.logical_not() | exploding
            found += [(Flag.VANISHING, finite & (norm < thresholds.vanishing)), (Flag.EXPLODING, exploding)]
        if self.flags & Flag.DEAD:
            found.append((Flag.DEAD, self.value(columns, "zero_fraction") >= thresholds.dead))
        for flag, where in found:
            flags = torch.add(flags, where, alpha=int(flag))
        return flags * (self.value(columns, "numel") > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without the functions, from which `from_dict` returns the raw columns.

        Columns whose names count up and that are otherwise the same, such as bins, are one entry with the
        first name and their ``number``.
        """
        entries: list[dict[str, Any]] = []
        for column in self.columns:
            entry = {key: x for key, x in vars(column).items() if x not in {"", False} or key == "name"}
            last = entries[-1] if entries else {}
            if column.name == _counted(last.get("name", ""), last.get("number", 1)) and (
                {**last, "name": "", "number": 1} == {**entry, "name": "", "number": 1}
            ):
                last["number"] = last.get("number", 1) + 1
            else:
                entries.append(entry)
        return {
            "name": self.name,
            "columns": entries,
            "dtype": str(self.dtype).removeprefix("torch."),
            "flags": int(self.flags),
            "storage": self.storage,
        }

    @classmethod
    def from_dict(cls, values: Any) -> Schema:
        """Return a schema without derived values from what `to_dict` returns.

        Raises:
            ValueError, TypeError, KeyError: for anything else.
        """
        numbers = [entry.get("number", 1) for entry in values["columns"]]
        if not all([type(number) is int and number > 0 for number in numbers]) or sum(numbers) > _MOST:
            msg = "number of columns"
            raise ValueError(msg)
        columns = tuple(
            [
                Column(**{**entry, "name": _counted(entry["name"], i)})
                for entry in [dict(x) for x in values["columns"]]
                for i in range(entry.pop("number", 1))
            ]
        )
        choices = {
            "merge": ("sum", "max"),
            "scaling": _POWERS,
            "style": get_args(Style),
            "signed": (True, False),
        }
        for column in columns:
            texts = [column.name, column.meaning, column.heading, column.unit]
            known = all([getattr(column, name) in allowed for name, allowed in choices.items()])
            if not known or not all([isinstance(text, str) for text in texts]):
                msg = f"column {column.name!r:.40}"
                raise ValueError(msg)
        dtypes = {"float64": torch.float64, "int64": torch.int64}
        name, storage = values["name"], values["storage"]
        if not isinstance(name, str) or storage not in {"columns", "sparse"} or not columns:
            msg = f"schema {name!r:.40}"
            raise ValueError(msg)
        flags = Flag(int(values["flags"]) & int(~Flag(0)))
        return cls(name, columns, (), dtypes[values["dtype"]], flags, storage)


def _counted(name: str, number: int) -> str:
    """Return the name that is ``number`` after a name that ends in digits; others are not counted."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.removesuffix(digits) + str(int(digits) + number) if digits and number else name
