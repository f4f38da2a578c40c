"""Windows: several steps of all ranks, packed into one vector for a SUM and one for a MAX all-reduce.

Each step contributes its scalars and, if it was recorded, its tables. Tables of sparse schemas are packed by
themselves, as integers, in the steps in which they are due.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import compress, zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.distributed import RankError
from gradiometer.monitor.merge_tables import TableMerger
from gradiometer.recorder import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks
    from gradiometer.monitor.merge_tables import Layout, Sections
    from gradiometer.recorder import Catalog, Table

# scalars that are merged by name, at most; further ones keep the first rank's value
_SCALARS: Final = 256
# bytes of tables in one window, at most
_BYTES: Final = 1 << 24
# tensors of a step of which ranks exchange fingerprints, at most, if copies differ
_COMPARED: Final = 64


class MergeWindow:
    """Packs this rank's part of a window, and unpacks the reduced window into the job's steps.

    Scalars are averaged over reporting ranks; identical values are kept bit-exact, and NaN and infinities
    stay. A step counts as skipped if any rank skipped it. For tables, see `TableMerger`.

    Args:
        ranks, thresholds: the agreement of the ranks; the thresholds of the flags.
        local: the catalog of this rank; all ranks have the same kinds and taps.
        fingerprint: whether the steps have fingerprints.
        precision: steps divisible by this have tables of sparse schemas; None: none has.

    Attributes:
        catalog: the catalog of merged steps, with the parameters of all ranks.
        scalars: the names that have an index in a window, the same on all ranks.
        most: the maximum number of recorded steps in a window.
    """

    def __init__(
        self,
        ranks: Ranks,
        local: Catalog,
        thresholds: Thresholds,
        *,
        fingerprint: bool = False,
        precision: int | None = None,
    ) -> None:
        self._ranks, self._thresholds, self._precision = ranks, thresholds, precision
        self._tables = TableMerger(ranks, local, thresholds, fingerprint=fingerprint)
        self.catalog = self._tables.catalog
        self.scalars: list[str] = []
        self.most = max(1, _BYTES // (8 * max(1, self._tables.width)))

    def new_scalars(self, steps: Iterable[StepRecord]) -> list[str]:
        """Return names of scalars that have no index yet but can get one."""
        names = dict.fromkeys([name for step in steps for name in step.scalars])
        return [name for name in names if name not in self.scalars][: _SCALARS - len(self.scalars)]

    def add_scalars(self, names: Iterable[str]) -> None:
        """Give the names an index; all ranks must pass the same names in the same order."""
        new = [name for name in dict.fromkeys(names) if name not in self.scalars]
        self.scalars += new[: _SCALARS - len(self.scalars)]

    def pack(self, steps: Sequence[StepRecord], included: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Return the vector to sum and the vector to maximize, both float64.

        ``steps``: this rank's steps, perhaps fewer than the window has. ``included``: for each step of the
        window, whether it includes its tables.
        """
        layout = self._layout(included)
        sums, tops = layout.zeros(torch.float64)
        sections = layout.split(sums, tops)
        self._tables.pack(self.catalog.dense, list(compress(steps, included)), sections)
        self._pack_scalars(steps, sections)
        return sums, tops

    def unpack(
        self,
        sums: Tensor,
        tops: Tensor,
        included: Sequence[bool],
        mine: Sequence[StepRecord],
        sparse: Mapping[int, dict[str, Table]] | None = None,
    ) -> list[StepRecord]:
        """Return the steps of the job, from the reduced vectors of `pack`.

        ``mine``: this rank's steps, which give the time, and scalars that have no index. ``sparse``: the
        result of `merge_sparse`.
        """
        sections = self._layout(included).split(sums, tops)
        dense = iter(self._tables.unpack(self.catalog.dense, sections, sum(included)))
        scalars = self._merged_scalars(sections)
        records = []
        for i, (skipped, code, step, _) in enumerate(sections.tops["step"].tolist()):
            own = mine[i] if i < len(mine) else None
            tables = (next(dense) if included[i] else {}) | (sparse or {}).get(i, {})
            records.append(
                StepRecord(
                    int(step),
                    time.time() if own is None else own.time,
                    scalars[i] if own is None else {**own.scalars, **scalars[i]},
                    self.catalog,
                    tables,
                    skipped > 0,
                    self._thresholds,
                    ranks=self._ranks,
                    loss_rank=int(self._ranks.size - code) if code > 0 else None,
                    model=None if own is None else own.model,
                )
            )
        return records

    def numbers_of(self, sums: Tensor, tops: Tensor, included: Sequence[bool]) -> list[int] | None:
        """Return the numbers of the steps of a reduced window; None if those of the ranks differ."""
        steps = self._layout(included).split(sums, tops).tops["step"].tolist()
        is_same = all([highest == -negated for _, _, highest, negated in steps])
        return [int(number) for _, _, number, _ in steps] if is_same else None

    def diverged(self, sums: Tensor, tops: Tensor, included: Sequence[bool]) -> dict[int, list[str]]:
        """Return the steps, by their index in the window, in which copies of these weights differ.

        Copies of gradients may differ, for example before they are averaged. All ranks get the same result.
        """
        found = self._tables.diverged("weights", self._layout(included).split(sums, tops))
        indices = list(compress(range(len(included)), included))
        return {indices[i]: names for i, names in found.items()}

    def alone(self, step: StepRecord) -> StepRecord:
        """Return a step of this rank as a step of the job, without its tables."""
        return replace(step, catalog=self.catalog, tables={}, model=None)

    def merge_sparse(
        self,
        numbers: Sequence[int],
        mine: Sequence[StepRecord],
        all_reduce: Callable[[Tensor, Tensor], Sequence[Tensor]],
    ) -> dict[int, dict[str, Table]]:
        """Return the tables of sparse schemas of the steps that are due, by index. All ranks call this.

        ``numbers``: of the steps, the same on all ranks. ``mine``: this rank's records of the first of them.
        ``all_reduce``: returns the sum of its first argument over the ranks, and the maximum of its second.
        """
        kinds, found = self.catalog.sparse, {}
        layout = self._tables.layout(kinds, 1)
        for index, (number, own) in enumerate(zip_longest(numbers, mine)):
            if kinds and self._precision is not None and number % self._precision == 0:
                vectors = layout.zeros(torch.int64)
                self._tables.pack(kinds, [] if own is None else [own], layout.split(*vectors))
                (found[index],) = self._tables.unpack(kinds, layout.split(*all_reduce(*vectors)), 1)
        return found

    def _layout(self, included: Sequence[bool]) -> Layout:
        layout = self._tables.layout(self.catalog.dense, sum(included))
        size, width = len(included), len(self.scalars)
        # the values, and the number of ranks that have one
        layout.sums.update({"scalars": (size, width), "ranks": (size, width)})
        # whether it was skipped, a rank with a non-finite loss, its number, and minus that
        layout.tops.update({"step": (size, 4), "scalars": (size, width), "-scalars": (size, width)})
        return layout

    def _pack_scalars(self, steps: Sequence[StepRecord], sections: Sections) -> None:
        me, width = float(self._ranks.size - self._ranks.rank), len(self.scalars)
        given = [[step.scalars.get(name) for name in self.scalars] for step in steps]
        has_value = _matrix([[float(value is not None) for value in row] for row in given], width)
        values = _matrix([[0.0 if value is None else value for value in row] for row in given], width)
        largest, negated = [
            torch.where(has_value * x.isfinite() > 0, x, -math.inf) for x in (values, -values)
        ]
        bad_loss = [step.loss is not None and not math.isfinite(step.loss) for step in steps]
        marks = [
            [float(step.skipped), me * is_bad, float(step.step), -float(step.step)]
            for step, is_bad in zip(steps, bad_loss, strict=True)
        ]
        for name, rows in (("scalars", values), ("ranks", has_value)):
            sections.sums[name][: len(steps)] = rows
        for name, rows in (("scalars", largest), ("-scalars", negated), ("step", _matrix(marks, 4))):
            sections.tops[name].fill_(-math.inf)[: len(steps)] = rows

    def _merged_scalars(self, sections: Sections) -> list[dict[str, float]]:
        """Return the scalars of each step by name: the mean, or the value that all ranks have."""
        total, ranks = sections.sums["scalars"], sections.sums["ranks"]
        largest, smallest = sections.tops["scalars"], -sections.tops["-scalars"]
        values = torch.where(total.isfinite() & (largest == smallest), largest, total / ranks)
        return [
            {name: value for name, value, count in zip(self.scalars, *row, strict=True) if count}
            for row in zip(values.tolist(), ranks.tolist(), strict=True)
        ]


def _matrix(rows: list[list[float]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), width)


def differing_copies(
    ranks: Ranks, group: Any, found: Mapping[int, Sequence[str]], steps: Sequence[StepRecord]
) -> dict[int, dict[str, str]]:
    """Return which ranks are in the minority, by the index of the step and the name of the weight.

    All ranks call this. ``found``: the result of `MergeWindow.diverged`. ``steps``: those of this rank.
    """
    if not found:
        return {}
    own = {str(index): steps[index].bits_of("weights", names[:_COMPARED]) for index, names in found.items()}
    shared = distributed.share(own, group, ranks.timeout, "compare copies of weights")
    return {
        index: {
            name: distributed.divergence_text(ranks, name, [each[str(index)].get(name) for each in shared])
            for name in names[:_COMPARED]
        }
        | dict.fromkeys(names[_COMPARED:], "copies differ between ranks")
        for index, names in found.items()
    }


def step_difference(ranks: Ranks, group: Any, steps: Sequence[StepRecord]) -> RankError:
    """Return the error for ranks that are in different steps; all ranks call this with their own."""
    numbers = distributed.share([step.step for step in steps], group)
    rank = next((rank for rank, given in enumerate(numbers) if given != numbers[0]), 0)
    pairs = zip(numbers[rank], numbers[0], strict=True)
    there, here = next(((a, b) for a, b in pairs if a != b), (numbers[rank][0], numbers[0][0]))
    first, other = ranks.global_ranks[0], ranks.global_ranks[rank]
    return RankError(
        f"rank {other} is in step {there}, but rank {first} is in step {here}: call advance() once per "
        "step on every rank, and set the same monitor.step"
    )
