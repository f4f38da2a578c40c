"""Hypothesis strategies: tensors of every dtype, size, layout and kind of value, as short recipes.

A recipe is a few words and a seed, so that a large tensor costs Hypothesis no entropy, and a failing
example prints the call that makes it again: `Recipe(...).tensor()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from hypothesis import strategies as st

from conftest import INTERPRETED, KERNELS
from gradiometer.ops import eager_plan, streaming

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
ALL_DTYPES = FLOATS + COMPLEX + FP8

VALUES = ("normal", "constant", "moderate", "wide", "tiny", "zeros", "some zeros", "nonfinite")
LAYOUTS = (
    "contiguous",
    "transposed",
    "channels_last",
    "stepped",
    "sliced",
    "expanded",
    "overlapping",
    "misaligned",
    "lazy sign",
)


def _borders():
    borders = {*eager_plan.WIDTHS, streaming.piece_length()}
    if find_spec("triton") is not None:
        from gradiometer.kernels import tuning

        borders |= {tuning.CHUNK}
        borders |= {size for way in tuning.MOMENTS.values() for size in (way.tile, way.tile * way.unroll)}
    return borders


# sizes at which an implementation changes its method, and one more and one less
_NEAR_BORDERS = sorted({border + step for border in _borders() for step in (-1, 0, 1)})
SMALL = [n for n in _NEAR_BORDERS if n <= 2**10 + 1]
MEDIUM = [n for n in _NEAR_BORDERS if 2**10 + 1 < n <= 2**15 + 1]
# the interpreter takes about a second for each of these
LARGE = [n for n in _NEAR_BORDERS if n > 2**15 + 1 and not KERNELS]


def numels(largest=math.inf):
    """Mostly small sizes, some at the borders, few of the large ones."""
    choices = [st.integers(0, 40), st.sampled_from(SMALL), st.integers(0, 2**11)] * 3
    choices += [st.sampled_from(part) for part in (MEDIUM, MEDIUM, LARGE) if part and part[0] <= largest]
    return st.one_of(choices).filter(lambda n: n <= largest)


@st.composite
def shapes(draw, largest=math.inf):
    """Up to four dimensions in any order; their product is one of `numels`."""
    rest = draw(numels(largest))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        divisor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 5, 7, 13, 17, 64) if rest % d == 0]))
        dims.append(divisor)
        rest //= divisor
    if rest == 1 and draw(st.booleans()):
        return tuple(dims)
    dims.insert(draw(st.integers(0, len(dims))), rest)
    return tuple(dims)


@dataclass(frozen=True)
class Recipe:
    """The description of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"
    values: str = "normal"
    specials: int = 0
    seed: int = 0

    def tensor(self):
        """Make the tensor; the same bits each time."""
        shape, dims, numel = self.shape, len(self.shape), math.prod(self.shape)
        if self.layout == "transposed":
            return self._memory(numel).view(shape[::-1]).permute(tuple(reversed(range(dims))))
        if self.layout == "channels_last" and dims > 2:
            return self._memory(numel).view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        if self.layout == "stepped" and dims > 0:
            return self._memory(3 * numel).view(*shape[:-1], 3 * shape[-1])[..., ::3]
        if self.layout == "sliced" and dims > 0:
            outer = (shape[0] + 2, *shape[1:-1], shape[-1] + 2) if dims > 1 else (shape[0] + 2,)
            inner = self._memory(math.prod(outer)).view(outer)[..., 1:-1]
            return inner[1:-1] if dims > 1 else inner
        if self.layout == "expanded" and dims > 0:
            return self._memory(math.prod(shape[1:])).view(1, *shape[1:]).expand(shape)
        if self.layout == "overlapping" and numel > 0:
            return self._memory(sum(shape) - dims + 1).as_strided(shape, (1,) * dims)
        if self.layout == "misaligned":
            first = 1 + 2 * (self.seed % 4)
            return self._memory(first + numel)[first:].view(shape)
        if self.layout == "lazy sign" and self.dtype.is_complex:
            return self._memory(numel).view(shape).conj()
        if self.layout == "lazy sign" and self.dtype in {torch.float32, torch.float64, torch.float16}:
            return torch.view_as_complex(self._memory(2 * numel).view(*shape, 2)).conj().imag
        return self._memory(numel).view(shape)

    def _memory(self, n):
        if self.dtype.is_complex:
            real = {torch.complex32: torch.float16, torch.complex64: torch.float32}
            values = _fill(self, real.get(self.dtype, torch.float64), 2 * n)
            # its own memory: Dynamo takes no complex view of real memory as an input
            return torch.view_as_complex(values.view(n, 2)).clone()
        return _fill(self, self.dtype, n)


def _fill(recipe, dtype, n):
    g = torch.Generator().manual_seed(recipe.seed)
    x = _numbers(recipe, dtype, n, g)
    if recipe.specials and n:
        where = torch.randint(0, n, (recipe.specials,), generator=g)
        x[where] = _nonfinite(recipe.specials, g)
    if INTERPRETED and dtype in {torch.bfloat16, torch.float8_e8m0fnu}:
        # the interpreter flushes subnormal bf16 to 0; fp8 without a 0 is read as bf16 and has one such number
        least = 2.0**-126
        x[(x.abs() < least) & ((x != 0) | (dtype != torch.bfloat16))] = least
    return x.to(dtype) if dtype == torch.float64 else x.float().to(dtype)


def _numbers(recipe, dtype, n, g):
    normal = torch.randn(n, generator=g, dtype=torch.float64)
    info = torch.finfo(dtype)
    if recipe.values == "constant":
        return torch.full((n,), (0.1, 1.0, -3.0, 200.0, -1e-3)[recipe.seed % 5], dtype=torch.float64)
    if recipe.values == "moderate":
        # from 1/8 to 8, and zeros: every format can represent these times 64 and divided by 64
        powers = 6 * torch.rand(n, generator=g, dtype=torch.float64) - 3
        return torch.exp2(powers).copysign(normal) * (normal.abs() > 0.1)
    if recipe.values == "wide":
        # the whole range of normal numbers; in fp64, those whose squares are normal too
        low, high = math.log2(info.tiny), math.log2(info.max) - 0.01
        low, high = max(low, -498.0), min(high, 498.0)
        powers = low + (high - low) * torch.rand(n, generator=g, dtype=torch.float64)
        return torch.exp2(powers).copysign(normal)
    if recipe.values == "tiny":
        # subnormal numbers; in fp64, the smallest ones whose squares are normal
        low = max(info.tiny * info.eps, 2.0**-498)
        steps = torch.randint(1, max(2, int(1 / info.eps)), (n,), generator=g)
        return steps.double() * low * normal.sign()
    if recipe.values == "zeros":
        return torch.zeros(n, dtype=torch.float64).copysign(normal)
    if recipe.values == "some zeros":
        return torch.where(normal.abs() < 1, 0.0 * normal, normal)
    if recipe.values == "nonfinite":
        return _nonfinite(n, g)
    return normal


def _nonfinite(n, g):
    kinds = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], dtype=torch.float64)
    first, second, mixed = torch.randint(0, 4, (3,), generator=g).tolist()
    if mixed == 0:
        return kinds[torch.randint(0, 4, (n,), generator=g)]
    # often all elements have the same kind of value, or nearly all
    return torch.cat([kinds[first].expand(n - n // 8), kinds[second].expand(n // 8)])


@st.composite
def recipes(draw, dtypes=ALL_DTYPES, values=VALUES, layouts=LAYOUTS, specials=True, largest=math.inf):
    """Recipes of one tensor. ``specials``: whether some of the values may be NaN and Inf."""
    return Recipe(
        # the dtypes that models are trained in are drawn more often
        dtype=draw(st.sampled_from([d for d in FLOATS if d in dtypes] * 3 + list(dtypes))),
        shape=draw(shapes(largest)),
        layout=draw(st.sampled_from(layouts)),
        values=draw(st.sampled_from(values)),
        specials=draw(st.sampled_from((0, 0, 1, 2, 9))) if specials else 0,
        seed=draw(st.integers(0, 2**16)),
    )


def lists(**options):
    """Lists of a few mixed recipes, or of many small ones, which implementations batch."""
    small = {**options, "largest": 64}
    return st.one_of(
        st.lists(recipes(**options), min_size=1, max_size=4),
        st.lists(recipes(**small), min_size=1, max_size=40),
    )
