"""TableReport: statistics of named rows on the host, in plain Python, shown as their schema says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache
from itertools import compress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from gradiometer.columns import DEFAULT_THRESHOLDS, Fingerprint, Flag
from gradiometer.stats import plot, text_table
from gradiometer.stats.text_table import TextTable
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from torch import Tensor

    from gradiometer.columns import Schema, Thresholds

Row = TypeVar("Row")

# fields of rows that are not values of the schema
_OTHERS: Final = ("name", "flags", "fingerprint")

_CLASSES: dict[Schema, type[TableReport[Any]]] = {}

# a report has few distinct flags, and creating or decomposing an IntFlag takes microseconds
_flag = lru_cache(maxsize=64)(Flag)


@lru_cache(maxsize=64)
def flag_names(bits: int) -> tuple[str, ...]:
    """Return the names of the flags in a mask."""
    return tuple([str(flag.name) for flag in Flag(bits)])


def report_of(schema: Schema, names: tuple[str, ...], columns: Tensor, **options: Any) -> TableReport[Any]:
    """Return the report of columns on the host: that of their schema, such as `Report`, or a `TableReport`.

    ``options`` are those of `TableReport`.
    """
    return _CLASSES.get(schema, TableReport)(names, columns, schema=schema, **options)


class TableReport(Mapping[str, Row]):
    """Statistics of named rows at one moment, on the host: a mapping from names to rows of plain values.

    The columns, their headings and how they are written are those of the schema. Rows have an attribute for
    each of the schema's columns and derived values. ``print(report)`` shows a table; so do notebooks.

    Attributes:
        schema: the schema of the columns.
        names: the names of the rows.
        thresholds: limits of the flags.
        is_reduced: whether these are statistics of all ranks.
        is_local: whether tensors are sharded over ranks, and these are statistics of this rank's shards only.
        ranks: for statistics of all ranks: name -> the first rank with a NaN or Inf in its part of the row.
    """

    schema: Schema
    # the class of the rows; its fields name the values that they have
    _row_class: ClassVar[type[Any] | None] = None
    # one row, in texts
    _noun: ClassVar[str] = "row"
    _nothing: ClassVar[str] = "nothing measured: no rows"
    _local: ClassVar[str] = "this rank's shards only"
    _shows_total: ClassVar[bool] = True

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        *,
        schema: Schema | None = None,
        flags: Tensor | None = None,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        fingerprints: Tensor | None = None,
        ranks: Mapping[str, int] | None = None,
        is_local: bool = False,
    ) -> None:
        """Create a report of columns on the host.

        ``columns`` are ``(T, C)``, ``flags`` ``(T,) int32`` and ``fingerprints`` ``(T, 3) int64``. Without
        flags the report shows none, but `Report` computes them. ``ranks`` are None if the statistics are not
        those of all ranks.
        """
        if schema is not None and schema is not getattr(type(self), "schema", None):
            self.schema = schema
        self.names = names
        self.thresholds = thresholds
        self.is_reduced = ranks is not None
        self.is_local = is_local
        self.ranks = dict(ranks or {})
        self._columns = columns
        self._flags = flags
        self._fingerprints = fingerprints

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "schema" in vars(cls):
            _CLASSES[cls.schema] = cls

    # rows. They are created on demand: the Python values of a thousand rows take milliseconds.

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        found = self._make_rows(self.names, self._columns, self._flags, self._fingerprints)
        return dict(zip(self.names, found, strict=True))

    @cached_property
    def total(self) -> Row:
        """All rows together, named ``"total"``."""
        merged = self._merged.unsqueeze(0)
        flags = None if self._flags is None else self._flags_of(merged)
        (row,) = self._make_rows(("total",), merged, flags, None)
        return row

    @cached_property
    def _merged(self) -> Tensor:
        return self.schema.merge_rows(self._columns)

    def _flags_of(self, columns: Tensor) -> Tensor:
        return self.schema.flags_of(columns, self.thresholds)

    @property
    def _values(self) -> tuple[str, ...]:
        """The names of the rows' values, in order."""
        if self._row_class is None:
            return self.schema.attributes
        return tuple([field.name for field in fields(self._row_class) if field.name not in _OTHERS])

    def _lists(self, columns: Tensor) -> list[list[Any]]:
        """Return the values of all rows, value by value; one call per element would take most of the time."""
        values = [(self.schema[name].is_count, self.schema.value(columns, name)) for name in self._values]
        # counts that are estimated from a sample are rounded
        return [
            (x.round().long() if is_count and x.is_floating_point() else x).tolist() for is_count, x in values
        ]

    def _make_rows(
        self, names: Sequence[str], columns: Tensor, flags: Tensor | None, fingerprints: Tensor | None
    ) -> Iterator[Row]:
        lists: list[Any] = [names, *self._lists(columns)]
        keys = ["name", *self._values]
        has = _OTHERS if self._row_class is None else self._row_class.__dataclass_fields__
        if flags is not None and "flags" in has:
            keys.append("flags")
            lists.append(map(_flag, flags.tolist()))
        if fingerprints is not None and "fingerprint" in has:
            keys.append("fingerprint")
            lists.append(map(Fingerprint.of_row, fingerprints.tolist()))
        if self._row_class is not None:
            return map(self._row_class, *lists)
        made: Any = (SimpleNamespace(**dict(zip(keys, row, strict=True))) for row in zip(*lists, strict=True))
        return made  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> Row:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no {self._noun} {name!r} in this report; see report.names") from None

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self) -> list[Row]:
        """Return the rows, in order."""
        return list(self._by_name.values())

    @property
    def measured(self) -> bool:
        """Whether there is any row."""
        return len(self.names) > 0

    def flagged(self, flag: Flag) -> list[str]:
        """Return the names of rows with any of the given flags, in order; none if the report has no flags."""
        if not isinstance(flag, Flag):
            raise TypeError(f"flagged: flag must be a gm.Flag, such as gm.Flag.NAN, got {flag!r}")
        # as an int: an IntFlag would create an object for each result
        mask = int(flag)
        return list(compress(self.names, [bits & mask for bits in self._bits]))

    @cached_property
    def _bits(self) -> list[int]:
        return [0] * len(self.names) if self._flags is None else self._flags.tolist()

    # exports

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values: of all rows together, and a dict per row. Norms may be NaN or inf."""
        merged = self._merged.unsqueeze(0)
        flags = None if self._flags is None else self._flags_of(merged)
        return {
            "is_reduced": self.is_reduced,
            "is_local": self.is_local,
            "ranks": dict(self.ranks),
            "total": self._dicts(("total",), merged, flags, None)["total"],
            f"{self._noun}s": self._own_dicts(),
        }

    def _own_dicts(self) -> dict[str, dict[str, Any]]:
        return self._dicts(self.names, self._columns, self._flags, self._fingerprints)

    def _dicts(
        self, names: Sequence[str], columns: Tensor, flags: Tensor | None, fingerprints: Tensor | None
    ) -> dict[str, dict[str, Any]]:
        """Return the values of rows, by name; the values of one are those of the row without its name."""
        keys, lists = [*self._values], self._lists(columns)
        if flags is not None:
            keys.append("flags")
            # new lists, since callers may change them
            lists.append([[*flag_names(bits)] for bits in flags.tolist()])
        if fingerprints is not None:
            keys.append("fingerprint")
            found = map(Fingerprint.of_row, fingerprints.tolist())
            lists.append([None if bits is None else str(bits) for bits in found])
        rows = zip(*lists, strict=True)
        return {name: dict(zip(keys, row, strict=True)) for name, row in zip(names, rows, strict=True)}

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per name, indexed by name.

        Statistics of all ranks have one more column, ``rank``, as in ``ranks``; -1 if the row is finite.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` installs it.
        """
        values, columns = self._flat()
        if self.is_reduced:
            columns.append("rank")
            values = {name: row | {"rank": self.ranks.get(name, -1)} for name, row in values.items()}
        return frame(values, "name", columns)

    def _flat(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Return plain values of each row by name, and the names of the values."""
        more = ["flags"] * (self._flags is not None) + ["fingerprint"] * (self._fingerprints is not None)
        return self._own_dicts(), [*self._values, *more]

    # the printed table

    def to_string(self, max_rows: int | None = 20) -> str:
        """Return the table that ``print`` shows, with ``max_rows`` rows at most; None: all."""
        return text_table.text(self.table(max_rows)) if self.names else self._nothing

    def __str__(self) -> str:
        return self.to_string()

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return text_table.html(self.table(20) if self.names else TextTable(self._nothing))

    def plot(self, value: str | None = None, *, ax: Axes | None = None, max_rows: int | None = 40) -> Axes:
        """Draw a value of each row with matplotlib, in the order of the printed table.

        Values that are not negative are drawn on a logarithmic axis, with 0, NaN and infinity at its ends;
        shares are not. Flags have colors.

        Args:
            value: an attribute of the rows, such as ``"norm"``, or the name of a format for a
                `PrecisionReport`; by default the first value of the table.
            ax: the axes to draw on; by default those of a new figure.
            max_rows: the number of rows; None for all.

        Raises:
            ImportError: without matplotlib; ``pip install 'gradiometer[plot]'`` installs it.
            ValueError: for a value that the rows do not have.

        >>> import torch, gradiometer as gm
        >>> report = gm.collect({"w": torch.tensor([3.0, 4.0])}).materialize()
        >>> report.plot("rms").figure.savefig("rms.png")                   # doctest: +SKIP
        """
        axes = self._drawable()
        if value is None:
            value = next(iter(axes))
        if value not in axes:
            raise ValueError(f"plot: value must be one of {', '.join(map(repr, axes))}, got {value!r}")
        label, is_log = axes[value]
        ordered: list[Any] = self.ordered()
        rows = ordered if max_rows is None else ordered[:max_rows]
        bits, left = dict(zip(self.names, self._bits, strict=True)), len(ordered) - len(rows)
        return plot.plot_rows(
            [printable(row.name) for row in rows],
            [self._drawn(row, value) for row in rows],
            [bits[row.name] for row in rows],
            title=self._headline() + (f", {left} more are not drawn" if left else ""),
            label=label,
            is_log=is_log,
            ax=ax,
        )

    def _drawable(self) -> dict[str, tuple[str, bool]]:
        return plot.drawable(self.schema, (*self._shown_values, *self._values))

    def _drawn(self, row: Row, name: str) -> float:
        return float(getattr(row, name)) * (100 if self.schema[name].style == "fraction" else 1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    def _headline(self) -> str:
        if not self.names:
            return self._nothing.partition(" (")[0]
        facts = [self._subject()]
        if "numel" in self.schema:
            numel = round(self.schema.value(self._merged, "numel").item())
            facts.append(f"{text_table.count(numel)} elements")
        return ", ".join([*facts, *self._facts()])

    def _subject(self) -> str:
        where = " of all ranks" if self.is_reduced else f", {self._local}" if self.is_local else ""
        return f"{len(self)} {self._noun}{'s' * (len(self) != 1)}{where}"

    def _facts(self) -> list[str]:
        """Return what else the headline says."""
        return []

    def ordered(self) -> list[Row]:
        """Return the rows in the order of the printed table."""
        return self.rows()

    def table(self, max_rows: int | None = 20) -> TextTable:
        """Return the printed table as text cells, with ``max_rows`` rows at most; None: all."""
        if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 0):
            raise ValueError(f"max_rows must be a non-negative integer, or None for all, got {max_rows!r}")
        ordered: list[Any] = self.ordered()
        shown = ordered if max_rows is None else ordered[:max_rows]
        rest = ordered[len(shown) :]
        header, cells = ["name", *self._header()], [[printable(row.name), *self._cells(row)] for row in shown]
        total: Any = self.total if self._shows_total else None
        last = [] if total is None else ["total", *self._cells(total)]
        if self.ranks:
            header.append("rank")
            for row, line in zip(shown, cells, strict=True):
                line.append(str(self.ranks.get(row.name, "-")))
            last += [text_table.named_ranks(self.ranks)] * bool(last)
        if self._flags is not None:
            bits = dict(zip(self.names, self._bits, strict=True))
            header.append("flags")
            for row, line in zip(shown, cells, strict=True):
                line.append(" ".join(flag_names(bits[row.name])))
            # no flags of the merged row, which would compare a whole model with one row's thresholds
            flagged = sum(map(bool, self._bits))
            last += [f"{flagged} flagged" if flagged else ""] * bool(last)
        more = self._rest(rest) if rest else ""
        return TextTable(self._headline(), header, cells, more, last)

    def _header(self) -> list[str]:
        return [self.schema[name].heading or name.replace("_", " ") for name in self._shown_values]

    @property
    def _shown_values(self) -> tuple[str, ...]:
        return self.schema.shown or self._values

    def _cells(self, row: Row) -> list[str]:
        return [self._cell(row, name) for name in self._shown_values]

    def _cell(self, row: Row, name: str) -> str:
        """Return a value of a row, as the schema's style says."""
        value, style = getattr(row, name), self.schema[name].style
        if style == "rare":
            return text_table.count(value) if value else "-"
        if style == "count":
            return text_table.count(value)
        if style == "fraction":
            return text_table.percent(value)
        if style == "cosine":
            return "-" if math.isnan(value) else f"{value:.3f}"
        return text_table.of_finite(row, value) if style == "finite" else text_table.number(value)

    def _rest(self, rows: Sequence[Row]) -> str:
        """Return a line about rows that the table leaves out."""
        return f"… {len(rows)} more"


def frame(rows: Mapping[str, Mapping[str, Any]], index: str, names: list[str]) -> pd.DataFrame:
    """Return rows by label as a pandas DataFrame; its ImportError says how to install pandas."""
    try:
        import pandas as pd  # optional, and slow to import
    except ImportError as error:
        raise ImportError("to_frame needs pandas: pip install 'gradiometer[frame]'") from error
    labels = pd.Index(list(rows), name=index, dtype="object")
    return pd.DataFrame(list(rows.values()), index=labels, columns=names)
