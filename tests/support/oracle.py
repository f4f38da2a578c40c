"""The plain formula for every statistic of one tensor, exact and independent of the package.

Sums are those of `math.fsum`, rounded once: the square of an fp32, bf16, fp16 or fp8 value is itself a
double, and fp64 values are squared and added as integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

# The documented bounds, for up to 2**24 elements. Squares have one sign, so adding them through partial sums
# of h levels has a relative error of at most h * u, u = 2**-53: a norm within 1e-13 allows 1800 levels. A sum
# may cancel; its error is relative to the sum of magnitudes, and 1e-13 of that allows 900 levels.
NORM_BOUND = 1e-13
SUM_BOUND = 1e-13
U = 2.0**-53


@dataclass(frozen=True)
class Exact:
    """Statistics of one tensor; sums and derived values are of its finite elements."""

    numel: int
    sumsq: float
    sum: float
    n_zero: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    abs_max: float
    abs_sum: float

    @property
    def n_inf(self):
        return self.n_posinf + self.n_neginf

    @property
    def n_nonfinite(self):
        return self.n_nan + self.n_inf

    @property
    def n_finite(self):
        return self.numel - self.n_nonfinite

    @property
    def finite_norm(self):
        return math.sqrt(self.sumsq)

    @property
    def norm(self):
        if self.n_nan:
            return math.nan
        return math.inf if self.n_inf else self.finite_norm

    @property
    def rms(self):
        return math.sqrt(self.sumsq / self.n_finite) if self.n_finite else 0.0

    @property
    def mean(self):
        return self.sum / self.n_finite if self.n_finite else 0.0

    @property
    def zero_fraction(self):
        return self.n_zero / self.numel if self.numel else 0.0


COUNTS = ("numel", "n_zero", "n_nan", "n_posinf", "n_neginf")


def numbers(tensor):
    """Return all real numbers of a tensor as flat fp64, including implicit zeros and repeated elements."""
    x = tensor.detach()
    x = x.to_dense() if x.is_sparse else x
    x = x.resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.to(torch.float64).flatten()


def exact(*tensors):
    """Return the statistics of one tensor, or of several as if they had been concatenated."""
    x = torch.cat([numbers(tensor) for tensor in tensors])
    finite = x[x.abs() < math.inf]
    wide = any(tensor.dtype in {torch.float64, torch.complex128} for tensor in tensors)
    return Exact(
        numel=len(x),
        sumsq=_sum_of_integer_squares(finite) if wide else math.fsum((finite * finite).tolist()),
        sum=math.fsum(finite.tolist()),
        n_zero=int((x == 0).sum()),
        n_nan=int(x.isnan().sum()),
        n_posinf=int((x == math.inf).sum()),
        n_neginf=int((x == -math.inf).sum()),
        abs_max=finite.abs().max().item() if len(finite) else 0.0,
        # only used as the scale of a bound
        abs_sum=finite.abs().sum().item(),
    )


def std(tensor):
    """Return the population standard deviation of the finite elements, computed from deviations."""
    x = numbers(tensor)
    finite = x[x.abs() < math.inf]
    if not len(finite):
        return 0.0
    around = finite - math.fsum(finite.tolist()) / len(finite)
    return math.sqrt(math.fsum((around * around).tolist()) / len(finite))


def _sum_of_integer_squares(x):
    mantissas, exponents = torch.frexp(x)
    order = exponents.argsort()
    integers = (mantissas * 2.0**53).to(torch.int64)[order]
    powers, counts = exponents.unique(return_counts=True)
    total = Fraction(0)
    for power, group in zip(powers.tolist(), integers.split(counts.tolist()), strict=True):
        total += sum(m * m for m in group.tolist()) * Fraction(2) ** (2 * (power - 53))
    return float(total)


def assert_same_counts(measured, expected):
    """Check the counts and the largest magnitude, which must be exact."""
    for name in (*COUNTS, "abs_max"):
        assert measured[name] == getattr(expected, name), name


def assert_within_bounds(measured, expected, slack=0.0):
    """Check norm and sum. ``slack``: a relative error on top of the bounds, not due to the measurement."""
    norm_error = abs(math.sqrt(measured["sumsq"]) - expected.finite_norm)
    assert norm_error <= (NORM_BOUND + slack) * expected.finite_norm
    assert abs(measured["sum"] - expected.sum) <= (SUM_BOUND + slack) * expected.abs_sum
