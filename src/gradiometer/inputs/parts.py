"""The part of a whole tensor that a rank holds, as boxes of indices."""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A box of a whole tensor: where it begins in the local one, its shape, where it begins in the whole."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    origin: tuple[int, ...]


class Part(NamedTuple):
    """The shape of the whole tensor, and the boxes of it that a local tensor consists of."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
