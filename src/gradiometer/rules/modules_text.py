"""Many tensors in a message, by the modules that own them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def modules_text(names: Sequence[str], places: Sequence[int], most: int = 3) -> str:
    """Return a text that names a group of tensors by the largest modules that lie in it.

    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [0, 1, 2])
    'a (3 tensors)'
    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [0, 1, 3])
    'a.0, b (3 tensors)'
    >>> modules_text(["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"], [2])
    'a.1.weight'
    """
    if len(places) == 1:
        return names[places[0]]
    if len(places) == len(names):
        return f"all {len(names):,} tensors"
    inside = {names[place] for place in places}
    outside = set()
    for name in names:
        if name not in inside:
            outside.update(_prefixes(name))
    found = dict.fromkeys(
        next((prefix for prefix in _prefixes(name) if prefix not in outside), name)
        for name in (names[place] for place in places)
    )
    text = ", ".join(list(found)[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
    return f"{text} ({len(places):,} tensors)"


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
