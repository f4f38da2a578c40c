"""The selection of steps and values that a sink writes, and their keys.

==========================  =============================================================
key                         value
==========================  =============================================================
``grads/total_norm``        the norm of all gradients together
``grads/n_nonfinite``       any other statistic of all gradients
``grads/<name>/norm``       a statistic of one tensor
``<kind>/...``              likewise of each other kind, such as ``updates/update_ratio``
``train/loss``              a scalar that was passed to ``advance``, by its name
==========================  =============================================================
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypedDict

from gradiometer.recorder import KINDS
from gradiometer.rules import Severity
from gradiometer.runs import encodable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gradiometer.columns import Schema
    from gradiometer.recorder import Catalog, Kind, StepRecord
    from gradiometer.rules import Finding

_TOTAL_NORM: Final = "total_norm"

Pattern = str | re.Pattern[str] | None


class Options(TypedDict, total=False):
    """The arguments of `Selection`, which most sinks accept too."""

    tensors: Pattern
    statistics: str | Sequence[str]
    totals: Sequence[str]
    scalars: Pattern
    kinds: Sequence[str] | None
    every: int


class Selection:
    """Selects the steps and values that a sink writes: totals, and single tensors on request.

    Args:
        tensors: a regular expression, searched in the names of parameters and taps; each one that matches
            gets its own values. ``""`` selects all, None selects none.
        statistics: the statistics of each selected tensor: names, or a regular expression for full names. A
            kind without any of the default gets those that its page draws.
        totals: the statistics of all tensors together, likewise.
        scalars: a regular expression, searched in the names passed to ``advance``; None selects none.
        kinds: such as ``"grads"``; kinds that were not recorded are left out. None: all but histograms of
            exponents.
        every: select steps divisible by this, and steps with a NaN or Inf in a gradient.

    Raises:
        ValueError: for a bad regular expression, or an unknown statistic or kind.

    >>> Selection(tensors=r"mlp", statistics=("norm", "rms"), every=10)
    Selection(tensors='mlp', statistics=('norm', 'rms'), every=10)
    """

    def __init__(
        self,
        tensors: Pattern = None,
        statistics: str | Sequence[str] = ("norm",),
        totals: Sequence[str] = ("norm", "n_nonfinite"),
        scalars: Pattern = "",
        kinds: Sequence[str] | None = None,
        every: int = 1,
    ) -> None:
        self.tensors = _compiled("tensors", tensors)
        self.scalars = _compiled("scalars", scalars)
        self.kinds = None if kinds is None else _known("kinds", kinds, tuple(KINDS), KINDS)
        schemas = [kind.schema for kind in KINDS.values()]
        self.statistics = _statistics("statistics", statistics, schemas)
        self.totals = _names("totals", totals, schemas)
        self._is_default = statistics == ("norm",), totals == ("norm", "n_nonfinite")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: every must be a positive integer")
        self.every = every
        self._catalog: Catalog | None = None
        self._rows: dict[str, list[int]] = {}

    def __repr__(self) -> str:
        tensors = self.tensors and self.tensors.pattern
        return f"Selection(tensors={tensors!r}, statistics={self.statistics!r}, every={self.every})"

    def _selects(self, kind: Kind) -> bool:
        return kind.schema.storage == "columns" if self.kinds is None else kind.name in self.kinds

    def takes(self, record: StepRecord) -> bool:
        """Return whether this step is selected."""
        return record.step % self.every == 0 or record.total("n_nonfinite") > 0

    def values(self, record: StepRecord) -> dict[str, float]:
        """Return the selected values of one step by key, only of measured tensors; they may be non-finite."""
        scalars = record.scalars.items()
        values = {f"train/{encodable(name)}": x for name, x in scalars if _found(self.scalars, name)}
        for name, table in record.tables.items():
            kind, measured = table.kind, table.measured.tolist()
            if not self._selects(kind) or not any(measured):
                continue
            statistics, totals = [
                _of_schema(kind.schema, names, is_default=is_default)
                for names, is_default in zip((self.statistics, self.totals), self._is_default, strict=True)
            ]
            values |= {total_key(name, statistic): table.total(statistic) for statistic in totals}
            rows = [i for i in self._selected(record.catalog, kind) if measured[i]]
            # one tolist() per statistic; an item() per value would dominate the cost
            for statistic in statistics if rows else ():
                column = table.value(statistic).tolist()
                for i in rows:
                    values[f"{name}/{encodable(table.rows.names[i])}/{statistic}"] = column[i]
        return values

    def _selected(self, catalog: Catalog, kind: Kind) -> list[int]:
        if catalog is not self._catalog:
            self._catalog, self._rows = catalog, {}
        if kind.rows not in self._rows:
            names = catalog.names_of(kind.name)
            self._rows[kind.rows] = [i for i, name in enumerate(names) if _found(self.tensors, name)]
        return self._rows[kind.rows]


def total_key(kind: str, statistic: str) -> str:
    """Return the key of a statistic of all tensors: ``grads/total_norm``, ``grads/n_nan``."""
    return f"{kind}/{_TOTAL_NORM if statistic == 'norm' else statistic}"


def check_key(key: str) -> None:
    """Raise a ValueError for an invalid key."""
    group, _, rest = key.partition("/")
    if group == "train" and rest:
        return
    statistic = _statistic_of(rest)[1]
    having = [kind.name for kind in KINDS.values() if statistic in kind.schema]
    if group in having:
        return
    if group in KINDS and having:
        raise ValueError(f"{key!r} is not a key: only {' and '.join(having)} have {statistic}")
    schemas = [KINDS[group].schema] if group in KINDS else [kind.schema for kind in KINDS.values()]
    raise ValueError(
        f"{key!r} is not a key: use 'train/loss', 'grads/total_norm', 'grads/<statistic>' or"
        f" 'grads/<name>/<statistic>', where the kind is one of {', '.join(KINDS)}, and the statistic one of"
        f" {', '.join(_offered(schemas))}"
    )


def _statistic_of(rest: str) -> tuple[str, str]:
    """Return the name of the tensor, which may be empty, and the statistic of a key without its kind."""
    name, _, statistic = rest.rpartition("/")
    return name, "norm" if statistic == _TOTAL_NORM else statistic


def check_severity(name: str, value: object) -> None:
    """Raise a TypeError for an argument that is not a severity."""
    if not isinstance(value, Severity):
        names = ", ".join(f"gm.Severity.{x.name}" for x in Severity)
        raise TypeError(f"{name}={value!r:.40} is not a severity; pass one of {names}")


def lookup(record: StepRecord, key: str) -> float | None:
    """Return the value of a key in one step; None if the step does not have it."""
    group, _, rest = key.partition("/")
    if group == "train":
        return record.scalars.get(rest)
    name, statistic = _statistic_of(rest)
    table = record.tables.get(group)
    if table is None or statistic not in table.kind.schema:
        return None
    if not name:
        return table.total(statistic) if bool(table.measured.any()) else None
    row = table.rows.index.get(name)
    return None if row is None or not table.measured[row] else float(table.value(statistic)[row])


class News:
    """Keeps only new or escalated findings."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Severity] = {}

    def take(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that are new or have become more severe."""
        new = []
        for finding in findings:
            key = (*finding.key, finding.first_step)
            if key not in self._known or finding.severity > self._known[key]:
                self._known[key] = finding.severity
                new.append(finding)
        return new


def _found(pattern: re.Pattern[str] | None, name: str) -> bool:
    return pattern is not None and pattern.search(name) is not None


def _compiled(argument: str, pattern: Pattern) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{argument}={pattern!r} is not a valid regular expression: {error}") from None


def _of_schema(schema: Schema, names: Sequence[str], *, is_default: bool) -> Sequence[str]:
    """Return those of these statistics that a schema has; of the default, not none."""
    found = [name for name in names if name in schema]
    if found or not is_default:
        return found
    return schema.shown or schema.names if schema.drawn is None else schema.drawn


def _offered(schemas: Iterable[Schema]) -> tuple[str, ...]:
    """Return the statistics of some schemas, without the many bins of a histogram."""
    names = [x.names if x.storage == "columns" else x.shown for x in schemas]
    return tuple(dict.fromkeys([name for own in names for name in own]))


def _statistics(argument: str, asked: str | Sequence[str], schemas: Sequence[Schema]) -> tuple[str, ...]:
    if not isinstance(asked, str):
        return _names(argument, asked, schemas)
    pattern, offered = _compiled(argument, asked), _offered(schemas)
    found = tuple(name for name in offered if pattern and pattern.fullmatch(name))
    if not found:
        raise ValueError(f"{argument}={asked!r} matches no statistic; choose from {', '.join(offered)}")
    return found


def _names(argument: str, asked: Sequence[str], schemas: Sequence[Schema]) -> tuple[str, ...]:
    return _known(argument, asked, _offered(schemas), {name for schema in schemas for name in schema.names})


def _known(
    argument: str, asked: Sequence[str], offered: Sequence[str], known: Collection[str]
) -> tuple[str, ...]:
    # a string is a sequence of characters, so treat it as one name
    names = [asked] if isinstance(asked, str) else asked
    for name in names:
        if name not in known:
            raise ValueError(f"{argument}: there is no {name!r}; choose from {', '.join(offered)}")
    return tuple(names)
