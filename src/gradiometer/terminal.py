"""Text for a terminal: names and messages without the characters that a terminal would obey."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def printable(text: str) -> str:
    r"""Return text with each character that is not printable replaced by its escape.

    These are control characters such as ESC, line ends, invisible characters and those that change the
    direction of text. Names, and messages that contain names, pass this function on their way to a terminal.

    >>> printable("layer\x1b[31m\n")
    'layer\\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    # a lone surrogate has an escape too
    return "".join([x if x.isprintable() else x.encode("unicode_escape").decode("ascii") for x in text])


def one_line(text: object) -> str:
    r"""Return a message of one or more lines as one line of `printable` text.

    >>> one_line(ValueError("two\nlines"))
    'two lines'
    """
    return printable(" ".join(str(text).split()))


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, and how many more there are.

    >>> shortened(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
