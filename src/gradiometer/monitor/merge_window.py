"""Windows: several steps of all ranks, packed into one vector for a SUM and one for a MAX all-reduce.

Each step contributes its scalars and marks and, if it was recorded, a row for each tensor.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.columns import (
    NUM_COLUMNS,
    NUM_SUM_COLUMNS,
    NUM_TAP_COLUMNS,
    NUM_UPDATE_COLUMNS,
    derived,
    tap_flags,
)
from gradiometer.distributed import NUM_SUMMED
from gradiometer.recorder import TAP_KINDS, Roster, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.distributed import Ranks

__all__ = ["MergeWindow"]

# scalars that are merged by name, at most; further ones keep the first rank's value
_SCALARS: Final = 256
# bytes of tensors' rows in one window, at most
_BYTES: Final = 1 << 24

# marks of a step, in addition to its scalars, that are summed and that are maximized
_SUMMED: Final = 1  # the number of ranks that recorded it
_MAXIMIZED: Final = 4  # whether it was skipped, a rank with a non-finite loss, the step's number, minus that


class MergeWindow:
    """Packs this rank's part of a window, and unpacks the reduced window into the job's steps.

    Scalars are averaged over reporting ranks; identical values are kept bit-exact, and NaN and infinities
    stay. A step that only some ranks recorded keeps the tensors that are complete or non-finite. A step
    counts as skipped if any rank skipped it.

    Args:
        ranks: the agreement of the ranks.
        local: the roster of this rank, with the same tensors.
        thresholds: the thresholds of the flags.
        fingerprint: whether the steps have fingerprints.

    Attributes:
        roster: the roster of merged steps: all tensors of all ranks.
        scalars: the names with a place in a window, the same on all ranks.
        most: the maximum number of recorded steps in a window.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> recorder, ranks = gm.Recorder(model), gm.Ranks(model)  # of a job of one
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> recorder.record()
    >>> steps = recorder.read()
    >>> window = MergeWindow(ranks, recorder.roster, recorder.thresholds)
    >>> window.unpack(*window.pack(steps, [True]), [True], steps)[0].total("norm")
    5.0990195135927845
    """

    def __init__(
        self, ranks: Ranks, local: Roster, thresholds: Thresholds, *, fingerprint: bool = False
    ) -> None:
        # all but taps, which are the same on all ranks
        taps = [name for name, is_tap in zip(local.names, local.is_tap, strict=True) if is_tap]
        local = local.of_parameters
        self._ranks, self._local, self._thresholds = ranks, local, thresholds
        # numbers of a row for its fingerprint
        self._bits = NUM_SUMMED if fingerprint else 0
        # further numbers of a parameter's update
        self._further = NUM_UPDATE_COLUMNS if "updates" in local.kinds else 0
        specs = ranks.plan.specs
        parts = dict(zip(local.names, local.shapes, strict=True))
        # the full size is unknown for plain tensors that are parts of a larger one
        shapes = [
            parts.get(n, ()) if h.shape is None else h.shape for n, h in zip(ranks.names, specs, strict=True)
        ]
        self._own = Roster(ranks.names, tuple(shapes), tuple([h.dtype for h in specs]), local.kinds)
        self.roster = self._own.with_taps(tuple(taps)) if taps else self._own
        self._num_taps = len(taps)
        whole = [math.nan if h.numel is None else float(h.numel) for h in specs]
        self._whole = torch.tensor(whole, dtype=torch.float64, device="cpu")
        self.scalars: list[str] = []
        width = (NUM_COLUMNS + self._bits) * len(local.kinds) + self._further
        width_taps = len(TAP_KINDS) * (NUM_COLUMNS + NUM_TAP_COLUMNS)
        self.most = max(1, _BYTES // (8 * max(1, width * len(ranks.names) + width_taps * len(taps))))

    def unplaced(self, steps: Iterable[StepRecord]) -> list[str]:
        """Return names of scalars that have no place yet but can get one."""
        names = dict.fromkeys([name for step in steps for name in step.scalars])
        return [name for name in names if name not in self.scalars][: _SCALARS - len(self.scalars)]

    def place(self, names: Iterable[str]) -> None:
        """Give the names a place; all ranks must pass the same names in the same order."""
        new = [name for name in dict.fromkeys(names) if name not in self.scalars]
        self.scalars += new[: _SCALARS - len(self.scalars)]

    def pack(self, steps: Sequence[StepRecord], carried: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Return the vector to sum and the vector to maximize, both float64.

        Args:
            steps: this rank's steps; fewer than ``carried`` if it has no more.
            carried: for each step, whether the window includes its rows of tensors.
        """
        local, names = self._local, self._local.names
        rows = torch.zeros(
            (len(names), sum(carried), len(local.kinds), NUM_COLUMNS), dtype=torch.float64, device="cpu"
        )
        for place, step in enumerate(_carried(steps, carried)):
            if step is not None and step.values is not None:
                values: Tensor = step.of_parameters.values  # type: ignore[assignment]
                rows[:, place] = values[:, :, :NUM_COLUMNS].transpose(0, 1)
        rows = self._ranks.to_rows(names, rows.flatten(1)).unflatten(1, rows.shape[1:])
        sums, tops = derived.by_merge(rows)
        bad = derived.value(rows, "n_nonfinite") > 0
        code = torch.where(bad, float(self._ranks.size - self._ranks.rank), 0.0).unsqueeze(-1)
        summed, maximized = self._marks(steps, len(carried))
        tap_sums, tap_tops = self._packed_taps(steps, carried)
        return (
            torch.cat(
                [
                    sums.flatten(),
                    self._packed_bits(steps, carried),
                    self._packed_further(steps, carried),
                    tap_sums.flatten(),
                    summed.flatten(),
                ]
            ),
            torch.cat([tops.flatten(), code.flatten(), tap_tops.flatten(), maximized.flatten()]),
        )

    def _packed_taps(self, steps: Sequence[StepRecord], carried: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Return what this rank adds to the rows of taps; empty without.

        ``(S, 2, M, sums + 4)`` and ``(S, 2, M, maxima + 1) float64``; the last number is a rank's code.
        """
        size = sum(carried), len(TAP_KINDS), self._num_taps
        rows = torch.zeros((*size, NUM_COLUMNS), dtype=torch.float64, device="cpu")
        more = torch.zeros((*size, NUM_TAP_COLUMNS), dtype=torch.float64, device="cpu")
        for place, step in enumerate(_carried(steps, carried) if self._num_taps else ()):
            if step is not None and step.values is not None and step.tap_sums is not None:
                rows[place] = step.values[-len(TAP_KINDS) :, -self._num_taps :, :NUM_COLUMNS]
                more[place] = step.tap_sums[:, -self._num_taps :]
        sums, tops = derived.by_merge(rows)
        bad = derived.value(rows, "n_nonfinite") > 0
        code = torch.where(bad, float(self._ranks.size - self._ranks.rank), 0.0).unsqueeze(-1)
        return torch.cat([sums, more], dim=-1), torch.cat([tops, code], dim=-1)

    def _taps_of(self, sums: Tensor, tops: Tensor, carried: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of taps, their further columns, and the first non-finite rank of each or -1.

        ``(S, 2, M, ...) float64``, ``(S, 2, M, 4) float64`` and ``(S, 2, M) int64``.
        """
        size = sum(carried), len(TAP_KINDS), self._num_taps
        found = []
        # they lie before the marks
        marks = (_SUMMED + 2 * len(self.scalars), _MAXIMIZED + 2 * len(self.scalars))
        widths = (NUM_SUM_COLUMNS + NUM_TAP_COLUMNS, NUM_COLUMNS - NUM_SUM_COLUMNS + 1)
        for vector, mark, width in zip((sums, tops), marks, widths, strict=True):
            end = len(vector) - len(carried) * mark
            found.append(vector[end - math.prod(size) * width : end].view(*size, width))
        code = found[1][..., -1]
        columns = torch.cat([found[0][..., :NUM_SUM_COLUMNS], found[1][..., :-1]], dim=-1)
        parts = [columns, tap_flags(columns, self._thresholds).to(torch.float64).unsqueeze(-1)]
        if self._bits:
            none = torch.tensor([-1, 0, 0], dtype=torch.int64, device="cpu").view(torch.float64)
            parts.append(none.expand(*size, -1))
        origins = torch.where(code > 0, self._ranks.size - code, -1.0).to(torch.int64)
        return torch.cat(parts, dim=-1), found[0][..., NUM_SUM_COLUMNS:], origins

    def _packed_bits(self, steps: Sequence[StepRecord], carried: Sequence[bool]) -> Tensor:
        """Return what this rank adds to the fingerprints, flat ``(T, S, K, 10) float64``; empty without."""
        names, kinds = self._local.names, self._local.kinds
        size = (len(self._own.names), sum(carried), len(kinds), self._bits)
        rows = torch.zeros(size, dtype=torch.float64, device="cpu")
        for place, step in enumerate(_carried(steps, carried) if self._bits else ()):
            for index, kind in enumerate(kinds):
                bits = None if step is None else step.of_parameters.fingerprints(kind)
                if step is not None and bits is not None:
                    none = bits.new_tensor([-1, 0, 0])
                    bits = torch.where(step.of_parameters.measured(kind).unsqueeze(1), bits, none)
                    rows[:, place, index] = self._ranks.bits_of(names, bits)
        return rows.flatten()

    def _packed_further(self, steps: Sequence[StepRecord], carried: Sequence[bool]) -> Tensor:
        """Return what this rank adds to the further columns, flat ``(T, S, 5) float64``; empty without."""
        size = len(self._local.names), sum(carried), self._further
        rows = torch.zeros(size, dtype=torch.float64, device="cpu")
        for place, step in enumerate(_carried(steps, carried) if self._further else ()):
            if step is not None and step.further is not None:
                rows[:, place] = step.of_parameters.further  # type: ignore[assignment]
        rows = self._ranks.to_rows(self._local.names, rows.flatten(1))
        return rows.flatten()

    def _further_of(self, sums: Tensor, size: int) -> Tensor:
        """Return the sums of the further columns, ``(S, T, 5) float64``."""
        kinds, names = len(self._own.kinds), len(self._own.names)
        start = names * size * kinds * (NUM_SUM_COLUMNS + self._bits)
        rows = sums[start : start + names * size * self._further].view(names, size, self._further)
        return rows.transpose(0, 1)

    def _bits_of(self, sums: Tensor, size: int) -> Tensor:
        """Return the sums for fingerprints, ``(S, K, T, 10) float64``."""
        kinds, names = len(self._own.kinds), len(self._own.names)
        cells = names * size * kinds
        start = cells * NUM_SUM_COLUMNS
        rows = sums[start : start + cells * self._bits].view(names, size, kinds, self._bits)
        return rows.permute(1, 2, 0, 3)

    def diverged(self, sums: Tensor, carried: Sequence[bool]) -> dict[int, list[str]]:
        """Return the steps, by their place in the window, in which copies of these weights differ.

        Copies of gradients may differ, for example before they are averaged. All ranks get the same result.
        """
        if not self._bits or "weights" not in self.roster.kinds or not any(carried):
            return {}
        weights = self._bits_of(sums, sum(carried))[:, self._own.place("weights")]
        _, differ = self._ranks.merged_bits(weights)
        places = [i for i, travels in enumerate(carried) if travels]
        return {
            places[step]: [self._own.names[row] for row in differ[step].nonzero().flatten().tolist()]
            for step in differ.any(dim=1).nonzero().flatten().tolist()
        }

    def _marks(self, steps: Sequence[StepRecord], size: int) -> tuple[Tensor, Tensor]:
        width = len(self.scalars)
        summed = [[0.0] * (_SUMMED + 2 * width) for _ in range(size)]
        maximized = [[-math.inf] * (_MAXIMIZED + 2 * width) for _ in range(size)]
        for step, adds, tops in zip(steps, summed, maximized, strict=False):
            adds[0] = float(step.recorded)
            finite = step.loss is None or math.isfinite(step.loss)
            code = 0.0 if finite else float(self._ranks.size - self._ranks.rank)
            tops[:_MAXIMIZED] = float(step.skipped), code, float(step.step), -float(step.step)
            for i, name in enumerate(self.scalars):
                value = step.scalars.get(name)
                if value is not None:
                    adds[_SUMMED + i], adds[_SUMMED + width + i] = value, 1.0
                    if math.isfinite(value):
                        tops[_MAXIMIZED + i], tops[_MAXIMIZED + width + i] = value, -value
        marks = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in (summed, maximized)]
        return marks[0], marks[1]

    def differ(self, tops: Tensor, size: int) -> bool:
        """Return whether ranks have different steps at the same place of a reduced window."""
        numbers = self._maximized(tops, size)[:, 2:_MAXIMIZED]
        return bool((numbers[:, 0] != -numbers[:, 1]).any())

    def numbers_of(self, tops: Tensor, size: int) -> list[int]:
        """Return the numbers of the steps of a reduced window."""
        return [int(number) for number in self._maximized(tops, size)[:, 2].tolist()]

    def unpack(
        self, sums: Tensor, tops: Tensor, carried: Sequence[bool], mine: Sequence[StepRecord]
    ) -> list[StepRecord]:
        """Return the steps of the job.

        Args:
            sums: the first vector of `pack`, summed over the ranks.
            tops: the second vector of `pack`, maximized over the ranks.
            carried: as passed to `pack`.
            mine: this rank's steps, which give the time, and scalars that have no place.
        """
        values, origins = self._tensors(sums, tops, sum(carried))
        taps = self._taps_of(sums, tops, carried) if self._num_taps else None
        further = self._further_of(sums, sum(carried)) if self._further else None
        width = _SUMMED + 2 * len(self.scalars)
        summed = sums[len(sums) - len(carried) * width :].view(len(carried), width).tolist()
        maximized = self._maximized(tops, len(carried)).tolist()
        places = iter(range(sum(carried)))
        merged = []
        for i, travels in enumerate(carried):
            own = mine[i] if i < len(mine) else None
            adds, most = summed[i], maximized[i]
            when = time.time() if own is None else own.time
            scalars = self._scalars(own, adds[_SUMMED:], most[_MAXIMIZED:])
            record = StepRecord(int(most[2]), when, scalars, self._own, None, most[0] > 0, self._thresholds)
            if own is not None:
                record = replace(record, model=own.model)
            if most[1] > 0:
                record = replace(record, loss_rank=int(self._ranks.size - most[1]))
            place = next(places) if travels else -1
            if travels and adds[0]:
                found = values[place] if adds[0] == self._ranks.size else self._whole_or_bad(values[place])
                if derived.value(found, "numel").any() or adds[0] == self._ranks.size:
                    # clone, so that keeping one record does not keep the whole window alive
                    origin = origins[place].clone()
                    record = replace(record, values=found.clone(), origin=origin, ranks=self._ranks)
                    if further is not None:
                        # as for the rows of updates, whose further columns are left out with them
                        kept = derived.value(record.columns("updates"), "numel") > 0
                        known = torch.where(kept.unsqueeze(1), further[place], 0.0)
                        record = replace(record, further=known)
            if taps is not None and record.values is None:
                record = replace(record, roster=self.roster)
            elif taps is not None:
                rows, more, origin = (x[place].clone() for x in taps)
                if adds[0] != self._ranks.size:
                    # of a step that only some ranks recorded, as for other tensors whose size is not known
                    bad = (derived.value(rows, "n_nonfinite") > 0).unsqueeze(-1)
                    rows, more = torch.where(bad, rows, 0.0), torch.where(bad, more, 0.0)
                record = record.with_taps(self.roster, rows, more, origin)
            merged.append(record)
        return merged

    def _tensors(self, sums: Tensor, tops: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return ``StepRecord.values`` of all steps, and the first non-finite rank of each row, or -1."""
        kinds, names = len(self._own.kinds), len(self._own.names)
        cells, maxima = names * size * kinds, NUM_COLUMNS - NUM_SUM_COLUMNS
        columns = torch.cat(
            [
                sums[: cells * NUM_SUM_COLUMNS].view(names, size, kinds, NUM_SUM_COLUMNS),
                tops[: cells * maxima].view(names, size, kinds, maxima),
            ],
            dim=-1,
        ).permute(1, 2, 0, 3)
        code = tops[cells * maxima :][:cells].view(names, size, kinds).permute(1, 2, 0)
        parts = [columns, derived.compute_flags(columns, self._thresholds).to(torch.float64).unsqueeze(-1)]
        if self._bits:
            found, _ = self._ranks.merged_bits(self._bits_of(sums, size))
            parts.append(found.contiguous().view(torch.float64))
        origins = torch.where(code > 0, self._ranks.size - code, -1.0).to(torch.int64)
        return torch.cat(parts, dim=-1), origins

    def _whole_or_bad(self, values: Tensor) -> Tensor:
        """Zero the rows of incomplete, finite tensors in a step that only some ranks recorded."""
        part = derived.value(values, "numel") != self._whole
        absent = part & (derived.value(values, "n_nonfinite") == 0)
        return torch.where(absent.unsqueeze(-1), 0.0, values)

    def alone(self, step: StepRecord) -> StepRecord:
        """Return a step of this rank as a step of the job, without its tensors."""
        return StepRecord(
            step.step, step.time, step.scalars, self.roster, None, step.skipped, self._thresholds
        )

    def _scalars(self, own: StepRecord | None, adds: list[float], tops: list[float]) -> dict[str, float]:
        given = {} if own is None else dict(own.scalars)
        width = len(self.scalars)
        for i, name in enumerate(self.scalars):
            total, count = adds[i], adds[width + i]
            if count:
                same = math.isfinite(total) and tops[i] == -tops[width + i]
                given[name] = tops[i] if same else total / count
        return given

    def _maximized(self, tops: Tensor, size: int) -> Tensor:
        width = _MAXIMIZED + 2 * len(self.scalars)
        return tops[len(tops) - size * width :].view(size, width)


def _carried(steps: Sequence[StepRecord], carried: Sequence[bool]) -> list[StepRecord | None]:
    """Return the steps whose rows the window includes; None for steps that this rank does not have."""
    return [steps[i] if i < len(steps) else None for i, travels in enumerate(carried) if travels]
