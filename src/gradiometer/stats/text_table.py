"""Tables with a row per name as text and HTML, and the format of their names, counts and numbers."""

from __future__ import annotations

import math
import re
import unicodedata
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST_NAME: Final = 44
_UNITS: Final = ((10**3, "k"), (10**6, "M"), (10**9, "B"))
# of HTML; lines that are seen on a light and on a dark ground
_NUMBER: Final = re.compile(r"-|nan|-?inf|[-<]?[\d.,]+(e-?\d+)?[kMB]?|")
_TABLE: Final = "display:block;overflow-x:auto;border-collapse:collapse;font-variant-numeric:tabular-nums"
_CELL: Final = "padding:2px 8px;border-bottom:1px solid #8886"
# maximum number of ranks in one cell
_RANKS: Final = 3


class TextTable(NamedTuple):
    """A table as text: a headline, a header, a row for each name, a line about other rows, and a last row."""

    headline: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    more: str = ""
    total: Sequence[str] = ()
    notes: Sequence[str] = ()


def text(table: TextTable) -> str:
    """Return a table as aligned lines."""
    last = [table.total] if table.total else []
    lines, rule = aligned([table.header, *with_short_names(table.rows), *last])
    body = lines[1 : len(table.rows) + 1]
    more = [table.more] if table.more else []
    end = [rule, lines[-1]] if last else []
    return "\n".join([table.headline, rule, lines[0], rule, *body, *more, *end, *table.notes])


def html(table: TextTable) -> str:
    """Return a table in HTML, for a notebook: without scripts, and in the notebook's own colors."""
    body = [*table.rows, *([table.total] if table.total else [])]
    # columns of numbers are aligned right
    right = [bool(body) and all([_is_number(row[i]) for row in body]) for i in range(len(table.header))]

    def line(cells: Sequence[str], kind: str, name: str = "") -> str:
        made = []
        for i, cell in enumerate(cells):
            title = f' title="{escape(name)}"' if i == 0 and name not in {"", cell} else ""
            side = "right;white-space:nowrap" if right[i] else "left"
            made.append(f'<{kind} style="{_CELL};text-align:{side}"{title}>{escape(cell)}</{kind}>')
        return f"<tr>{''.join(made)}</tr>"

    parts = [f"<p>{escape(table.headline)}</p>"] * bool(table.headline)
    if table.header:
        parts += [f'<table style="{_TABLE}">', f"<thead>{line(table.header, 'th')}</thead>", "<tbody>"]
        for row, short in zip(table.rows, with_short_names(table.rows), strict=True):
            parts.append(line(short, "td", row[0]))
        if table.more:
            span = f'colspan="{len(table.header)}" style="{_CELL}"'
            parts.append(f"<tr><td {span}>{escape(table.more)}</td></tr>")
        parts.append("</tbody>")
        if table.total:
            parts.append(f"<tfoot>{line(table.total, 'th')}</tfoot>")
        parts.append("</table>")
    return "\n".join([*parts, *[f"<p>{escape(note)}</p>" for note in table.notes]])


def preformatted(text: str) -> str:
    """Return lines of text in HTML, for a notebook."""
    return f"<pre>{escape(text)}</pre>"


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell.strip()) is not None


def with_short_names(cells: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the rows with their first cells shortened."""
    short = short_names([row[0] for row in cells])
    return [(name, *row[1:]) for name, row in zip(short, cells, strict=True)]


def named_ranks(ranks: Mapping[str, int]) -> str:
    """Return the first few ranks of a mapping from names to ranks, as text."""
    found = sorted(set(ranks.values()))
    more = "…" if len(found) > _RANKS else ""
    return ", ".join(map(str, found[:_RANKS])) + more or "-"


def aligned(cells: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return the rows as aligned lines, and a horizontal rule of the same width."""
    widths = [max(_width(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [_line(row, widths) for row in cells], "─" * (sum(widths) + 2 * (len(widths) - 1))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, last = cells[0] + " " * (widths[0] - _width(cells[0])), cells[-1]
    middle = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([first, *middle, last]).rstrip()


def short_names(names: list[str]) -> list[str]:
    """Shorten long names, but keep them distinct."""
    first, last = (min(names), max(names)) if names else ("", "")
    # a prefix that the first and last in sorted order share is common to all
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    common = first[: first.rfind(".", 0, same) + 1]
    for shortened in (
        [_cut(name) for name in names],
        [_cut("…" + name.removeprefix(common)) for name in names],
    ):
        if len(set(shortened)) == len(names):
            return shortened
    return names


def _cut(name: str) -> str:
    # keep more of the end of a name, which tells more than its beginning
    if len(name) <= _LONGEST_NAME:
        return name
    head = _LONGEST_NAME // 3
    return f"{name[:head]}…{name[head + 1 - _LONGEST_NAME :]}"


def _width(text: str) -> int:
    # in terminal columns: wide characters take two, combining characters none
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def number(x: float, digits: int = 3) -> str:
    """Return a number with this many significant digits and without trailing zeros.

    With three digits it is in full from 0.01 to 9,990, and otherwise as ``1.2e-4``; with more digits, larger
    ones are in full, too. The report page has the same format.

    >>> [number(x) for x in (0.0, 1.5, 0.012345, 1234.5, 0.00012, 1e20)]
    ['0', '1.5', '0.0123', '1,230', '1.2e-4', '1e20']
    """
    if x == 0 or not math.isfinite(x):
        return f"{abs(x) if x == 0 else x:g}"
    mantissa, power = f"{x:.{digits - 1}e}".split("e")
    exponent = int(power)
    if -2 <= exponent < max(4, digits):
        text = f"{float(f'{mantissa}e{power}'):,.{max(digits - 1 - exponent, 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{exponent}"


def of_finite(row: Any, x: float) -> str:
    """Return a value of a row's finite elements, or ``-`` where there is none."""
    return "-" if row.n_nan + row.n_inf == row.numel > 0 else number(x)


def amount(n: int, *, exact: int = 10**4, gap: str = " ") -> str:
    """Return a count as ``12``, ``1,207`` or ``4.2 M``; below ``exact`` it is written in full."""
    if n < exact:
        return f"{n:,}"
    # the first unit in which it rounds to less than 1000
    size, unit = next((pair for pair in _UNITS if n / pair[0] < 999.95), _UNITS[-1])
    return f"{n / size:.1f}{gap}{unit}"


def count(n: int) -> str:
    """Return a count for a table cell: ``98,304``, ``4.2M``."""
    return amount(n, exact=10**5, gap="")


def percent(fraction: float) -> str:
    """Return a share in percent."""
    if fraction in (0.0, 1.0):
        return f"{100 * fraction:.0f}"
    # only an exact 0 or 100 is shown as such
    return "<0.1" if fraction < 0.001 else f"{min(100 * fraction, 99.9):.1f}"
