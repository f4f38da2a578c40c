"""Projections of gradients and weights in the steps that are due, for the ring of a recorder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gradiometer import ops
from gradiometer.columns import Cursor, rows
from gradiometer.distributed import UnknownPartError, part_of
from gradiometer.inputs import Named, on_device, present
from gradiometer.recorder.settings import check_integer
from gradiometer.stats import check_hashed, check_projections, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.recorder.kinds import Kind

_LOG = logging.getLogger("gradiometer")

SEED: Final = 0
"""The seed of recorded projections, the same in all runs, so that they can be compared."""


class Projector:
    """Projects the tensors of N parameters, which are all or parts of whole tensors.

    Tensors of which this rank's part is not known are left out, with a warning that names the first.
    ``ranks``: those whose projections are added up.
    """

    def __init__(
        self, names: tuple[str, ...], parameters: Sequence[Tensor], count: int, ranks: Ranks | None
    ) -> None:
        check_hashed(names, "Recorder")
        self._names, self._count = names, count
        sharding = None if ranks is None else ranks.sharding
        self._boxes: list[list[int] | None] = []
        unknown = []
        for name, p in zip(names, parameters, strict=True):
            try:
                self._boxes.append(ops.encode([part_of(name, p, "Recorder", sharding)]))
            except UnknownPartError as error:
                self._boxes.append(None)
                unknown.append(str(error))
        if unknown:
            text = "%s; %d of %d tensors are not projected"
            _LOG.warning(text, unknown[0], len(unknown), len(names))

    def columns(
        self, kind: Kind, tensors: Sequence[Tensor | None], scale: Tensor | float | None, cursor: Tensor
    ) -> tuple[tuple[str, ...], Tensor]:
        """Return the names of the tensors that are projected, and their raw columns on its device."""
        pairs = zip(tensors, self._boxes, strict=True)
        tensors = [None if boxes is None else x for x, boxes in pairs]
        names, found = present(self._names, tensors)
        boxes = [each or [] for each, x in zip(self._boxes, tensors, strict=True) if x is not None]
        measured = plain(Named(tuple([kind.label(name) for name in names]), found), "Recorder")
        home = cursor.device
        columns = torch.zeros((len(names), kind.schema.width), dtype=kind.schema.dtype, device=home)
        for device in dict.fromkeys([x.device for x in measured]):
            places = [i for i, x in enumerate(measured) if x.device == device]
            own, own_names = [measured[i] for i in places], [names[i] for i in places]
            own_boxes = [number for i in places for number in boxes[i] or [-1]] if any(boxes) else []
            gate = on_device(cursor, device)
            part = ops.measure_projections(own, own_names, self._count, SEED, own_boxes, gate)
            part = on_device(part, home)
            columns = part if len(places) == len(names) else columns + rows.spread(part, places, len(names))
        if scale is not None:
            factor = scale if isinstance(scale, torch.Tensor) else rows.number(scale, home)
            columns = kind.schema.scaled(columns, on_device(factor.detach(), home).reshape(()).to(columns))
        return names, columns


class Projections(NamedTuple):
    """What a recorder projects: the number of projections, and the steps that are divisible by ``every``."""

    number: int
    every: int

    @classmethod
    def of(cls, count: int | None, every: int | None) -> Projections | None:
        """Return the settings; None without projections.

        Raises:
            ValueError: for a number out of range, or ``projections_every`` without ``projections``.
        """
        if count is None:
            if every is not None:
                msg = f"Recorder(projections_every={every!r:.40}): pass projections=16, their number, too"
                raise ValueError(msg)
            return None
        check_projections("Recorder", count, SEED)
        if every is not None:
            check_integer("Recorder", "projections_every", every, 1)
        return cls(count, every or 1)

    def set_on(self, cursor: Tensor) -> None:
        """Set the cadence."""
        cursor[Cursor.PROJECT_EVERY].fill_(float(self.every))
