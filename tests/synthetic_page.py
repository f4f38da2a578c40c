"""A large run in memory, and what a page says of a cell: for tests of the report page."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pyarrow as pa
import torch

from gradiometer.run import Run
from gradiometer.schema import DEFAULT_THRESHOLDS
from synthetic_run import make_info, make_roster


class Dense(Run):
    """A run of noise, every tensor measured at every step: what it would be, read from disk."""

    def __init__(self, path, tensors, steps, kinds=("grads",)):
        info = make_info(make_roster(tensors, kinds))
        self.path, self.roster, self.thresholds = Path(path), info.roster, DEFAULT_THRESHOLDS
        self.info = {"model": info.model, "device": info.device, "closed": True, "versions": {}}
        random = torch.Generator().manual_seed(0)
        # 20 decades, as noisy as can be: what compresses worst
        self._noise = 10 ** (20 * torch.rand(2**20, generator=random, dtype=torch.float64) - 10)
        self._steps = pa.table(
            {
                "step": pa.array(range(steps), pa.int64()),
                "recorded": [True] * steps,
                "skipped": [False] * steps,
                "loss": torch.rand(steps, generator=random).tolist(),
                "total_norm": torch.rand(steps, generator=random).tolist(),
            }
        )

    def tensors(self, *, columns, first, last, **_):
        n, count = len(self.roster.names), last - first + 1
        step = torch.arange(first, last + 1).repeat_interleave(n)
        names = pa.array(torch.arange(n, dtype=torch.int32).repeat(count).numpy())
        found = {
            "step": pa.array(step.numpy()),
            "name": pa.DictionaryArray.from_arrays(names, list(self.roster.names)),
        }
        noise = self._noise.repeat(-(-n * count // len(self._noise)))[: n * count]
        for column in columns[2:]:
            if column in {"numel", "flags"}:
                numbers = torch.full_like(step, 4096 if column == "numel" else 0)
            else:
                numbers = noise % 1 * 4096 if column == "n_zero" else noise
            found[column] = pa.array(numbers.numpy())
        return pa.table(found)

    @property
    def findings(self):
        return []

    @property
    def blackbox(self):
        return None


def read_cells(page, statistic, kind="grads"):
    """Return a matrix as the page shows it, ``(N, columns) float64``: NaN, inf, and -1 for not measured."""
    entry = page.values["matrices"][kind][statistic]
    raw = zlib.decompress(base64.b64decode(page.matrices[entry["id"]]))
    planes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int64).view(2, -1)
    codes = (planes[0] * 256 + planes[1]).view(len(page.values["names"]), -1)
    at = entry["low"] + (codes.double() - 2) / 65531 * (entry["high"] - entry["low"])
    values = at if entry["linear"] else 10.0**at
    for code, meaning in ((0, -1.0), (1, 0.0), (65534, torch.inf), (65535, torch.nan)):
        values = torch.where(codes == code, meaning, values)
    return values
