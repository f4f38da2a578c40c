"""A large run in memory, and the values of a page's cells: for tests of the report page."""

from __future__ import annotations

import base64
import functools
import zlib
from pathlib import Path

import pyarrow as pa
import torch

from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.runs.reader import Run
from gradiometer.web import write_page
from support.synthetic_run import make_catalog, make_info


class Dense(Run):
    """A run of noise with every tensor measured at every step, as if it had been read from disk."""

    def __init__(self, path, tensors, steps, kinds=("grads",)):
        info = make_info(make_catalog(tensors, kinds))
        self.path, self.catalog, self.thresholds = Path(path), info.catalog, DEFAULT_THRESHOLDS
        self.info = {"model": info.model, "device": info.device, "closed": True, "versions": {}}
        random = torch.Generator().manual_seed(0)
        # 20 decades of independent noise: the worst case for compression
        self._noise = 10 ** (20 * torch.rand(2**20, generator=random, dtype=torch.float64) - 10)
        self._steps = pa.table(
            {
                "step": pa.array(range(steps), pa.int64()),
                "recorded": [True] * steps,
                "skipped": [False] * steps,
                "loss": torch.rand(steps, generator=random).tolist(),
                "lr": [1e-3] * steps,
                "scalars": pa.array([[]] * steps, pa.map_(pa.string(), pa.float64())),
                "total_norm": torch.rand(steps, generator=random).tolist(),
                "update_ratio": pa.nulls(steps, pa.float64()),
                "stuck_fraction": pa.nulls(steps, pa.float64()),
            }
        )

    def matrices(self, statistics, kind, *, first, last):
        size = last - first + 1, len(self.catalog.names_of(kind))
        # continues from one read to the next: noise repeated every few columns would compress
        place = torch.arange(first * size[1], (last + 1) * size[1]) % len(self._noise)
        noise = self._noise[place].view(size)
        found = {"numel": torch.full_like(noise, 4096.0), "flags": torch.zeros_like(noise)}
        found |= dict.fromkeys(("zero_fraction", "unchanged_fraction", "stuck_fraction"), noise % 1)
        found |= {"descent_cosine": noise % 2 - 1}
        return list(range(first, last + 1)), {name: found.get(name, noise) for name in statistics}

    precision_steps = ()

    @property
    def findings(self):
        return []

    @property
    def blackbox(self):
        return None


@functools.cache
def dense_page(folder):
    """The page of 1000 tensors and 5000 steps, written once for all tests that share a folder."""
    return write_page(Dense(folder, 1000, 5000), folder / "dense.html")


def read_cells(page, statistic, kind="grads"):
    """Return a matrix as the page shows it, ``(N, columns) float64``: NaN, inf, and -1 for not measured."""
    entry = page.values["matrices"][kind][statistic]
    raw = zlib.decompress(base64.b64decode(page.matrices[entry["id"]]))
    planes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int64).view(2, -1)
    codes = (planes[0] * 256 + planes[1]).view(len(page.values["summary"][kind]["numel"]), -1)
    at = entry["low"] + (codes.double() - 2) / 65531 * (entry["high"] - entry["low"])
    values = at if entry["linear"] else 10.0**at
    for code, meaning in ((0, -1.0), (1, 0.0), (65534, torch.inf), (65535, torch.nan)):
        values = torch.where(codes == code, meaning, values)
    return values
