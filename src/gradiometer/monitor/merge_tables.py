"""The tables of one rank as sections of two vectors, and those of the job from the reduced vectors.

One vector is summed over the ranks, the other one maximized. Each table has a few sections in both, whatever
its kind.
"""

from __future__ import annotations

import math
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import torch

from gradiometer.columns import PROJECTIONS
from gradiometer.distributed import NUM_SUMMED
from gradiometer.recorder import Catalog, Rows, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.recorder import Kind, StepRecord


class Sections(NamedTuple):
    """The sections of both vectors by name, as views."""

    sums: Mapping[str, Tensor]
    tops: Mapping[str, Tensor]


class Layout(NamedTuple):
    """The shapes of the sections of both vectors, by name."""

    sums: dict[str, tuple[int, ...]]
    tops: dict[str, tuple[int, ...]]

    def zeros(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return both vectors, of zeros."""
        sums, tops = [torch.zeros(sum(_sizes(each)), dtype=dtype, device="cpu") for each in self]
        return sums, tops

    def split(self, sums: Tensor, tops: Tensor) -> Sections:
        """Return the sections of both vectors."""
        first, second = [
            {
                name: part.view(shape)
                for (name, shape), part in zip(each.items(), vector.split(_sizes(each)), strict=True)
            }
            for each, vector in zip(self, (sums, tops), strict=True)
        ]
        return Sections(first, second)


class TableMerger:
    """Merges the tables of a step of all ranks.

    Copies of a parameter's row count once; rows of taps add up. In a table that only some ranks measured, the
    rows that are complete or non-finite are kept. A table that has none of them is left out. Of projections,
    only rows of complete tensors are kept.

    Args:
        ranks, local, thresholds, fingerprint: as for `MergeWindow`.

    Attributes:
        catalog: the catalog of merged steps, with the parameters of all ranks.
        width: the number of values that the dense tables of a step add to both vectors.
    """

    def __init__(self, ranks: Ranks, local: Catalog, thresholds: Thresholds, *, fingerprint: bool) -> None:
        self._ranks, self._local, self._thresholds = ranks, local, thresholds
        self._fingerprint = fingerprint
        specs = ranks.plan.specs
        known = dict(zip(local.names, local.parameters.shapes, strict=True))
        # the full size is unknown for plain tensors that are parts of a larger one
        shapes = [
            known.get(name, ()) if spec.shape is None else spec.shape
            for name, spec in zip(ranks.names, specs, strict=True)
        ]
        parameters = Rows(ranks.names, tuple(shapes), tuple([spec.dtype for spec in specs]))
        self.catalog = Catalog(parameters, local.kinds, local.taps)
        # elements of the complete tensors; NaN if unknown
        numel = {
            "parameter": [math.nan if spec.numel is None else float(spec.numel) for spec in specs],
            "tap": [math.nan] * len(local.taps),
        }
        self._numel = {
            space: torch.tensor(sizes, dtype=torch.float64, device="cpu") for space, sizes in numel.items()
        }
        self.width = sum([sum(_sizes(shapes)) for shapes in self.layout(self.catalog.dense, 1)])

    def _has_fingerprints(self, kind: Kind) -> bool:
        return self._fingerprint and kind.has_fingerprints

    def layout(self, kinds: Sequence[Kind], size: int) -> Layout:
        """Return the sections of tables of these kinds, for a number of steps."""
        sums: dict[str, tuple[int, ...]] = {}
        tops: dict[str, tuple[int, ...]] = {}
        for kind in kinds:
            rows, num_sums = len(self.catalog.rows(kind.name)), kind.schema.num_sums
            # the number of ranks that measured it
            sums[f"ranks {kind.name}"] = (size,)
            sums[f"columns {kind.name}"] = (rows, size, num_sums)
            if self._has_fingerprints(kind):
                sums[f"fingerprints {kind.name}"] = (size, rows, NUM_SUMMED)
            tops[f"columns {kind.name}"] = (rows, size, kind.schema.width - num_sums)
            # the first rank with a NaN or Inf, as size - rank; 0 if there is none
            tops[f"origin {kind.name}"] = (rows, size)
        return Layout(sums, tops)

    def pack(self, kinds: Sequence[Kind], steps: Sequence[StepRecord], sections: Sections) -> None:
        """Write what this rank adds into sections of zeros."""
        for kind in kinds:
            names, schema = self._local.names_of(kind.name), kind.schema
            added, largest = [each[f"columns {kind.name}"] for each in sections]
            absent = added.new_zeros((len(names), schema.width))
            values = [absent] * added.shape[1]
            for i, step in enumerate(steps):
                table = step.tables.get(kind.name)
                if table is None:
                    continue
                values[i] = table.values
                sections.sums[f"ranks {kind.name}"][i] = 1
                if table.fingerprints is not None and self._has_fingerprints(kind):
                    bits, none = table.fingerprints, table.fingerprints.new_tensor([-1, 0, 0])
                    bits = torch.where(table.measured.unsqueeze(1), bits, none)
                    sections.sums[f"fingerprints {kind.name}"][i] = self._ranks.bits_of(names, bits)
            columns = torch.stack(values, dim=1) if values else absent.unsqueeze(1)[:, :0]
            if kind.rows == "parameter":
                # copies count once
                shape = columns.shape[1:]
                columns = self._ranks.to_rows(names, columns.flatten(1)).unflatten(1, shape)
            for section, part in zip((added, largest), schema.by_merge(columns), strict=True):
                section.copy_(part)
            bad = _is_nonfinite(kind, columns)
            sections.tops[f"origin {kind.name}"].masked_fill_(bad, self._ranks.size - self._ranks.rank)

    def unpack(self, kinds: Sequence[Kind], sections: Sections, size: int) -> list[dict[str, Table]]:
        """Return the tables of each step by kind, from the sections of the reduced vectors."""
        found: list[dict[str, Table]] = [{} for _ in range(size)]
        for kind in kinds:
            ranks = sections.sums[f"ranks {kind.name}"]
            columns = torch.cat([each[f"columns {kind.name}"].transpose(0, 1) for each in sections], dim=-1)
            is_complete = kind.schema.value(columns, "numel") == self._numel[kind.rows]
            of_all = ranks == self._ranks.size
            # a part of a tensor must not look like the complete one
            kept = of_all.unsqueeze(1) | is_complete | _is_nonfinite(kind, columns)
            if kind.schema in PROJECTIONS.values():
                # they tell distances between whole tensors
                kept = is_complete
            if not kept.all():
                columns = torch.where(kept.unsqueeze(2), columns, 0)
            columns = columns.to(kind.schema.dtype)
            flags = kind.flags_of(columns, self._thresholds)
            code = sections.tops[f"origin {kind.name}"].t()
            origin = torch.where(code > 0, self._ranks.size - code, -1).to(torch.int64)
            bits = None
            if self._has_fingerprints(kind):
                bits, _ = self._ranks.merged_bits(sections.sums[f"fingerprints {kind.name}"])
            has_rows = (kind.schema.value(columns, "numel") > 0).any(dim=1)
            for i in (of_all | has_rows).nonzero().flatten().tolist():
                # clones, so that keeping one record does not keep the whole window alive
                found[i][kind.name] = Table(
                    kind,
                    self.catalog.rows(kind.name),
                    columns[i].clone(),
                    flags[i].clone(),
                    thresholds=self._thresholds,
                    fingerprints=None if bits is None else bits[i].clone(),
                    origin=origin[i].clone(),
                )
        return found

    def diverged(self, kind: str, sections: Sections) -> dict[int, list[str]]:
        """Return by step which tensors have copies that differ; none if fingerprints were not recorded."""
        bits = sections.sums.get(f"fingerprints {kind}")
        if bits is None:
            return {}
        _, differs = self._ranks.merged_bits(bits)
        names = self.catalog.names_of(kind)
        return {
            i: list(compress(names, differs[i].tolist()))
            for i in differs.any(dim=1).nonzero().flatten().tolist()
        }


def _is_nonfinite(kind: Kind, columns: Tensor) -> Tensor:
    if "n_nonfinite" not in kind.schema:
        return torch.zeros(columns.shape[:-1], dtype=torch.bool, device="cpu")
    return kind.schema.value(columns, "n_nonfinite") > 0


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes.values()]
