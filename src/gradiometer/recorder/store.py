"""The layout of a recorder's ring: a section for each table, and the tables of a slot that was copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.columns import (
    HEADER_SECTIONS,
    HEADER_SKIPPED,
    HEADER_STEP,
    NUM_FINGERPRINT_COLUMNS,
    TENSORS,
    Section,
)
from gradiometer.recorder.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.catalog import Catalog
    from gradiometer.recorder.kinds import Kind


class RingLayout:
    """Where the tables of a step are in a slot of the ring; those of sparse kinds and of states are not.

    With ``fingerprint``, kinds that can have fingerprints have them. ``sections``: by the name of the kind.
    ``header_size``, ``size``: how many numbers are before the first section, and in a slot.
    """

    def __init__(self, catalog: Catalog, *, fingerprint: bool = False) -> None:
        self._catalog, self._fingerprint = catalog, fingerprint
        self.header_size = self.size = HEADER_SECTIONS + len(catalog.in_ring)
        self.sections: dict[str, Section] = {}
        for header, kind in enumerate(catalog.in_ring, HEADER_SECTIONS):
            rows = len(catalog.rows(kind.name))
            self.sections[kind.name] = Section(header, 1, self.size, rows, self.header_size)
            self.size += rows * self.width(kind)

    def has_fingerprints(self, kind: Kind) -> bool:
        """Return whether the rows of a kind have fingerprints."""
        return self._fingerprint and kind.has_fingerprints

    def width(self, kind: Kind) -> int:
        """Return how many numbers a row of a kind has."""
        return kind.schema.width + 1 + NUM_FINGERPRINT_COLUMNS * self.has_fingerprints(kind)

    @property
    def header_only(self) -> Section:
        """A section without tables."""
        return Section(HEADER_SECTIONS, 0, self.header_size, 0, self.header_size)

    def adjacent(self, first: str, count: int) -> Section:
        """Return the section of several tables with the same width, from this one on."""
        section = self.sections[first]
        return section._replace(tables=count, rows=count * section.rows)

    def is_skipped(self, slot: Tensor) -> bool:
        """Return whether the step of a slot on the host was skipped."""
        return bool(slot[HEADER_SKIPPED] > 0)

    def tables(self, slot: Tensor, thresholds: Thresholds) -> dict[str, Table]:
        """Return the tables that were written in the step of a slot, ``(size,)`` on the host."""
        found = {}
        header = slot[: self.header_size].tolist()
        for kind in self._catalog.in_ring:
            section, size = self.sections[kind.name], kind.schema.width
            if header[section.header] != header[HEADER_STEP]:
                continue
            width = self.width(kind)
            end = section.offset + section.rows * width
            rows = slot[section.offset : end].view(section.rows, width)
            bits = rows[:, size + 1 :].contiguous().view(torch.int64) if self.has_fingerprints(kind) else None
            table = Table(
                kind,
                self._catalog.rows(kind.name),
                rows[:, :size],
                rows[:, size].to(torch.int32),
                thresholds=thresholds,
                fingerprints=bits,
            )
            # a step may have gradients, and none of them measured; taps may not be due
            if kind.schema is TENSORS or bool(table.measured.any()):
                found[kind.name] = table
        return found
