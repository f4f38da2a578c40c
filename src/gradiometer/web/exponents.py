"""The data of the page's picture of exponents: shares of elements by binade, tensor and measured step.

A cell is a byte: 0 none, 1 to 255 the logarithm of a share of the tensor's elements. A tensor's column has a
cell for zeros, one for each binade in ascending order, and one for NaN and infinities.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import EXPONENTS, FORMATS, LOWEST_BINADE, of_binades
from gradiometer.extras import require
from gradiometer.web.matrices import deflated

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder import Kind
    from gradiometer.runs import Run

MOST_COLUMNS: Final = 250
LEAST_COLUMNS: Final = 16
MOST_CELLS: Final = 3_000_000  # over all kinds, a byte each before compression
DECADES: Final = 4
"""A share of 10**-DECADES or less has the smallest code."""
_LARGEST: Final = 255


def exponents_of(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values for the page, and the cells by their id; empty without histograms."""
    steps = run.precision_steps
    kinds = [kind for kind in run.catalog.kinds.values() if steps and kind.schema is EXPONENTS]
    values: dict[str, Any] = {}
    cells: dict[str, str] = {}
    for kind in kinds:
        found = _picture(run, kind, steps, MOST_CELLS // len(kinds))
        if found is not None:
            name = f"exponents-{kind.name}"
            entry = {"kind": kind.name, "of": kind.of, "noun": kind.noun, "id": name}
            values.setdefault("pictures", []).append(entry | found[0])
            cells[name] = found[1]
    if values:
        values["limits"] = [
            # of the smallest subnormal number and of the largest number
            {"name": form.short, "low": (form.tiny >> 52) - 1022, "high": math.log2(form.peak)}
            for form in FORMATS.values()
        ]
        values["decades"] = DECADES
    return values, cells


def _picture(run: Run, kind: Kind, steps: list[int], most: int) -> tuple[dict[str, Any], str] | None:
    """Return the values of a kind, and its cells: of each tensor in turn, and at the end of all together."""
    ends = _binades(run, kind)
    if ends is None:
        return None
    low, high = ends
    rows, index = high - low + 3, run.catalog.rows(kind.name).index
    # of too many tensors, only the total is drawn
    tensors = len(index) + 1 if (len(index) + 1) * rows * LEAST_COLUMNS <= most else 1
    binned = max(1, math.ceil(len(steps) / min(MOST_COLUMNS, most // (tensors * rows))))
    counts = torch.zeros((tensors, math.ceil(len(steps) / binned), rows), dtype=torch.float64, device="cpu")
    place = {step: i // binned for i, step in enumerate(steps)}
    for step, stats in run.precisions(kind.of):
        columns = stats.columns
        inner = of_binades(columns)[:, low : high + 1]
        found = torch.cat([columns[:, :1], inner, columns[:, -2:].sum(dim=1, keepdim=True)], dim=1).double()
        if tensors > 1:
            kept = [i for i, name in enumerate(stats.names) if name in index]
            counts[[index[stats.names[i]] for i in kept], place[step]] += found[kept]
        counts[-1, place[step]] += found.sum(dim=0)
    values = {
        "first": steps[::binned],
        "last": [*steps[binned - 1 :: binned], *steps[-1:]][: counts.shape[1]],
        "low": low + LOWEST_BINADE - 1,
        "rows": rows,
        "each": tensors > 1,
        "binned": binned,
    }
    return values, _encode(counts)


def _binades(run: Run, kind: Kind) -> tuple[int, int] | None:
    """Return the indices of the lowest and highest binade with elements; None without any histogram."""
    table = run.exponents(kind.of, columns=["positions"])
    if not len(table):
        return None
    compute = require("pyarrow.compute", "monitor", "A run record")
    known = compute.list_flatten(table["positions"]).unique().to_pylist()
    positions = torch.tensor(known, dtype=torch.int64, device="cpu")
    inner = positions[(positions > 0) & (positions < EXPONENTS.width - 2)]
    if not len(inner):
        # nothing but zeros: one binade, which stays empty
        return 1 - LOWEST_BINADE, 1 - LOWEST_BINADE
    found = torch.zeros((1, EXPONENTS.width), dtype=torch.int64, device="cpu")
    found[0, inner] = 1
    present = of_binades(found)[0].nonzero().view(-1)
    return int(present[0]), int(present[-1])


def _encode(counts: Tensor) -> str:
    """Return deflated codes of shares in base64."""
    shares = counts / counts.sum(dim=2, keepdim=True).clamp(min=1.0)
    scaled = 1 + (_LARGEST - 1) * (1 + shares.clamp(min=10.0**-DECADES).log10() / DECADES)
    return deflated(torch.where(counts > 0, scaled.round(), 0).to(torch.uint8))
