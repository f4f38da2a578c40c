"""The headlines that fit on one screen, as lines or as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradiometer.rules.finding import Severity
from gradiometer.stats import TextTable
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.rules.headlines import Headline

# warnings and errors, and others
_WARNINGS, _OTHERS = 5, 3
_HEADER: Final = ("severity", "step", "finding", "advice")


def first_of(found: Sequence[Headline]) -> tuple[list[Headline], list[str]]:
    """Return the first warnings and errors and the first others, and a line that counts those left out."""
    bad = [one for one in found if one.severity >= Severity.WARNING]
    shown = bad[:_WARNINGS] + list(found[len(bad) :][:_OTHERS])
    left = len(found) - len(shown)
    return shown, [f"and {left} more {'cause' if left == 1 else 'causes'}"] if left else []


def table_of(found: Sequence[Headline]) -> TextTable:
    """Return the first headlines as a table; without any it has no rows."""
    shown, more = first_of(found)
    rows = [
        [*map(printable, (str(one.severity), str(one.first_step), one.message, one.advice))] for one in shown
    ]
    return TextTable("", _HEADER if rows else (), rows, notes=more)
