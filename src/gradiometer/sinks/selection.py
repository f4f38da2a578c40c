"""The selection of steps and values that a sink writes, and their keys.

==========================  =============================================================
key                         value
==========================  =============================================================
``grads/total_norm``        the norm of all gradients together
``grads/n_nonfinite``       any other statistic of all gradients
``grads/<name>/norm``       a statistic of one tensor; also ``weights/...``, ``updates/...``
``updates/update_ratio``    also ``descent_cosine``, ``unchanged_fraction``, ``stuck_fraction``
``activations/kurtosis``    also ``outlier_ratio``, ``zero_channel_fraction``; ``activation_grads/...``
``train/loss``              a scalar that was passed to ``advance``, by its name
==========================  =============================================================
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from gradiometer.columns import COLUMN_NAMES, DERIVED, TAP_STATISTICS, UPDATE_STATISTICS
from gradiometer.recorder import KINDS, TAP_KINDS
from gradiometer.rules import Severity
from gradiometer.runs import encodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradiometer.recorder import Kind, Roster, StepRecord
    from gradiometer.rules import Finding

__all__ = ["STATISTICS", "News", "Options", "Selection", "check_key", "check_severity", "lookup"]

# those of `UPDATE_STATISTICS` and `TAP_STATISTICS` are left out for other kinds
STATISTICS: Final = (*COLUMN_NAMES, *DERIVED, *UPDATE_STATISTICS, *TAP_STATISTICS)
_TOTAL_NORM: Final = "total_norm"

Pattern = str | re.Pattern[str] | None
_Name = TypeVar("_Name", bound=str)


class Options(TypedDict, total=False):
    """The arguments of `Selection`, which most sinks accept too."""

    tensors: Pattern
    statistics: str | Sequence[str]
    totals: Sequence[str]
    scalars: Pattern
    kinds: Sequence[Kind]
    every: int


class Selection:
    """Selects the steps and values that a sink writes: totals, and single tensors on request.

    Args:
        tensors: a regular expression, searched in the parameters' names; each parameter that matches gets
            its own values. ``""`` selects all, None selects none.
        statistics: the statistics of each selected tensor: names, or a regular expression for full names.
        totals: the statistics of all tensors together.
        scalars: a regular expression, searched in the names passed to ``advance``; None selects none.
        kinds: ``"grads"``, ``"weights"``, ``"updates"``, ``"activations"``, ``"activation_grads"``; kinds
            that were not recorded are left out.
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
        kinds: Sequence[Kind] = KINDS,
        every: int = 1,
    ) -> None:
        self.tensors = _compiled("tensors", tensors)
        self.statistics = _statistics(statistics)
        self.totals = _known("totals", totals, STATISTICS)
        self.scalars = _compiled("scalars", scalars)
        self.kinds = _known("kinds", kinds, KINDS)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: every must be a positive integer")
        self.every = every
        self._roster: Roster | None = None
        self._rows: list[int] = []

    def __repr__(self) -> str:
        """Return the main arguments."""
        tensors = self.tensors and self.tensors.pattern
        return f"Selection(tensors={tensors!r}, statistics={self.statistics!r}, every={self.every})"

    def takes(self, record: StepRecord) -> bool:
        """Return whether this step is selected."""
        return record.step % self.every == 0 or (record.recorded and record.total("n_nonfinite") > 0)

    def values(self, record: StepRecord) -> dict[str, float]:
        """Return the selected values of one step by key, only of measured tensors; they may be non-finite."""
        values = {
            f"train/{encodable(name)}": x for name, x in record.scalars.items() if _found(self.scalars, name)
        }
        if not record.recorded:
            return values
        for kind in (kind for kind in record.roster.kinds if kind in self.kinds):
            measured = record.measured(kind).tolist()
            if not any(measured):
                continue
            values |= {
                total_key(kind, name): record.total(name, kind) for name in self.totals if _has(kind, name)
            }
            rows = [i for i in self._selected(record.roster) if measured[i]]
            # one tolist() per statistic; an item() per value would dominate the cost
            for statistic in [name for name in self.statistics if _has(kind, name)] if rows else ():
                column = record.value(statistic, kind).tolist()
                for i in rows:
                    values[f"{kind}/{encodable(record.roster.names[i])}/{statistic}"] = column[i]
        return values

    def _selected(self, roster: Roster) -> list[int]:
        if roster is not self._roster:
            self._roster = roster
            self._rows = [i for i, name in enumerate(roster.names) if _found(self.tensors, name)]
        return self._rows


def total_key(kind: str, statistic: str) -> str:
    """Return the key of a statistic of all tensors: ``grads/total_norm``, ``grads/n_nan``."""
    return f"{kind}/{_TOTAL_NORM if statistic == 'norm' else statistic}"


def check_key(key: str) -> None:
    """Raise a ValueError for an invalid key."""
    group, _, rest = key.partition("/")
    _, _, statistic = rest.rpartition("/")
    if group == "train" and rest:
        return
    known = statistic == _TOTAL_NORM or (statistic in STATISTICS and _has(group, statistic))
    if group not in KINDS or not known:
        raise ValueError(
            f"{key!r} is not a key: use 'train/loss', 'grads/total_norm', 'grads/<statistic>' or"
            f" 'grads/<name>/<statistic>', where the statistic is one of {', '.join(STATISTICS)};"
            f" only updates have {', '.join(UPDATE_STATISTICS)}, and only activations"
            f" {', '.join(TAP_STATISTICS)}"
        )


def _has(kind: str, statistic: str) -> bool:
    """Return whether a kind of tensors has a statistic."""
    if statistic in TAP_STATISTICS:
        return kind in TAP_KINDS
    return kind == "updates" or statistic not in UPDATE_STATISTICS


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
    kind: Kind | None = next((kind for kind in record.roster.kinds if kind == group), None)
    if kind is None or not record.recorded:
        return None
    name, _, statistic = rest.rpartition("/")
    statistic = "norm" if statistic == _TOTAL_NORM else statistic
    if not name:
        return record.total(statistic, kind) if bool(record.measured(kind).any()) else None
    row = record.roster.index.get(name)
    if row is None or not record.measured(kind)[row]:
        return None
    return float(record.value(statistic, kind)[row])


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


def _compiled(what: str, pattern: Pattern) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{what}={pattern!r} is not a valid regular expression: {error}") from None


def _statistics(asked: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(asked, str):
        return _known("statistics", asked, STATISTICS)
    pattern = _compiled("statistics", asked)
    found = tuple(name for name in STATISTICS if pattern and pattern.fullmatch(name))
    if not found:
        raise ValueError(f"statistics={asked!r} matches no statistic; choose from {', '.join(STATISTICS)}")
    return found


def _known(what: str, asked: Sequence[_Name], known: Sequence[str]) -> tuple[_Name, ...]:
    # a string is a sequence of characters, so treat it as one name
    names: Sequence[_Name] = [asked] if isinstance(asked, str) else asked  # type: ignore[list-item]
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; choose from {', '.join(known)}")
    return tuple(names)
