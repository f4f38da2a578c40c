"""Losses of block formats are those of an independent implementation that quantizes, block by block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradiometer as gm

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FORMATS = {"mxfp8_e4m3": (32, 8), "mxfp8_e5m2": (32, 15), "mxfp4": (32, 2), "nvfp4": (16, 2)}


def grid_of(name):
    """Return the format's magnitudes, in order, so that even places have even mantissas."""
    if "fp8" in name:
        dtype = torch.float8_e4m3fn if "e4m3" in name else torch.float8_e5m2
        values = torch.arange(128, dtype=torch.uint8).view(dtype).float()
        return values[values.isfinite()].tolist()
    return E2M1


def quantized(v, grid):
    """Return the nearest number of a format, ties to even, and whether v is beyond the largest one."""
    step = grid[-1] - grid[-2]
    wide = [*grid, grid[-1] + step]
    least = min(abs(v - g) for g in wide)
    near = [i for i, g in enumerate(wide) if abs(v - g) == least]
    i = near[0] if len(near) == 1 else next(i for i in near if i % 2 == 0)
    over = v > wide[-1] or i == len(grid)
    return (grid[-1] if over else wide[i]), over


def expected(rows, name):
    size, emax = FORMATS[name]
    grid = grid_of(name)
    finite = [[abs(x) if math.isfinite(x) else 0.0 for x in row] for row in rows]
    top = max((x for row in finite for x in row), default=0.0)
    flushed = saturated = 0
    for row in finite:
        for start in range(0, len(row), size):
            block = row[start : start + size]
            most = max(block)
            if most == 0:
                continue
            if name == "nvfp4":
                t = top / (6.0 * 448.0)
                scale = t * quantized(most / 6.0 / t, grid_of("mxfp8_e4m3"))[0]
            else:
                scale = 2.0 ** max(-127, min(127, math.floor(math.log2(most)) - emax))
            for x in block:
                value, over = quantized(x / scale, grid) if scale else (0.0, False)
                flushed += x != 0 and value == 0
                saturated += over
    return flushed, saturated


@pytest.mark.parametrize("name", FORMATS)
@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([0.5, 4.0, 12.0]),
    st.integers(0, 99),
)
def test_losses_are_those_of_quantizing(name, rows, width, dtype, spread, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * torch.exp2(spread * torch.randn(rows, width, generator=g))
    # ties, and numbers between the largest one and the next power of two
    x[:, ::5] = torch.tensor([1.75, 1.875, 1.8125, 2.0**-4, 7.0])[
        torch.randint(0, 5, x[:, ::5].shape, generator=g)
    ]
    x[torch.rand(x.shape, generator=g) < 0.1] = 0.0
    if seed % 3 == 0:
        x[0, 0] = math.nan
    x = x.to(dtype)
    found = gm.block_losses({"x": x}, name)
    assert found.names == ("x",)
    assert found.numel.tolist() == [x.numel()]
    assert (found.n_flushed.item(), found.n_saturated.item()) == expected(x.double().tolist(), name)


def test_large_tensors_are_read_in_pieces(monkeypatch):
    x = torch.randn(50, 40) * torch.exp2(5 * torch.randn(50, 40))
    whole = [gm.block_losses([x], name) for name in FORMATS]
    monkeypatch.setattr("gradiometer.stats.block_formats._PIECE", 100)
    for name, found in zip(FORMATS, whole, strict=True):
        assert gm.block_losses([x], name) == found
        assert found.n_flushed.item() + found.n_saturated.item() > 0


def test_empty_zero_and_complex_tensors():
    tensors = [
        torch.empty(0),
        torch.zeros(3, 5),
        torch.tensor(2.0),
        torch.tensor([[1 + 1e-20j]]),
        torch.empty(0, 4),
    ]
    for name in FORMATS:
        found = gm.block_losses(tensors, name)
        assert found.numel.tolist() == [0, 15, 1, 2, 0]
        assert found.n_flushed.tolist() == [0, 0, 0, 1, 0]
    assert gm.block_losses([], "mxfp4").numel.shape == (0,)


def test_it_compiles_whole():
    x = torch.randn(4, 70)
    step = torch.compile(
        lambda x: gm.block_losses({"x": x}, "nvfp4").n_flushed, fullgraph=True, backend="aot_eager"
    )
    assert step(x).tolist() == gm.block_losses([x], "nvfp4").n_flushed.tolist()


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="block_losses: 'mxfp6' is not one of the formats mxfp8_e4m3, "):
        gm.block_losses([torch.ones(2)], "mxfp6")
