"""The plain formula for every statistic of a pair of tensors, exact and independent of the package.

The difference of two elements is rounded once to fp64, as the definition says; the sum of exact products is
rounded once.
"""

from __future__ import annotations

import math
import sys

import torch

from support.gradients import bits
from support.oracle import numbers

COUNTS = ("numel", "n_unchanged", "n_nonzero_g", "n_stuck", "n_nan", "n_posinf", "n_neginf")
# the relative errors of a product of fp64 numbers and of the h partial sums that it passes through are 2**-53
# each: 1e-13 of the sum of magnitudes allows 900 levels
SUM_BOUND = 1e-13


def exact_pair(a, b, g=None):
    """Return the columns by name, and the sums of magnitudes that their bounds are relative to."""
    same = _same(a, b)
    a, b = numbers(a), numbers(b)
    g = None if g is None or not g.numel() else numbers(g)
    finite = _is_finite(a) & _is_finite(b)
    kinds = [kind_of(*pair) for pair in zip(a[~finite].tolist(), b[~finite].tolist(), strict=True)]
    zeros = torch.zeros(len(a), dtype=torch.float64)
    nonzero = torch.zeros(len(a), dtype=torch.bool) if g is None else g != 0
    kept = zeros if g is None else torch.where(finite & _is_finite(g), g, 0.0)
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    u = a - b
    products = {
        "sumsq_a": (a, a),
        "sumsq_b": (b, b),
        "dot_ab": (a, b),
        "sumsq_u": (u, u),
        "sum_u": (u, zeros + 1.0),
        "sumsq_g": (kept, kept),
        "dot_ug": (u, kept),
    }
    values = {
        "numel": len(a),
        "n_unchanged": int(same.sum()),
        "n_nonzero_g": int(nonzero.sum()),
        "n_stuck": int((same & nonzero).sum()),
        **{f"n_{kind}": kinds.count(kind) for kind in ("nan", "posinf", "neginf")},
        "abs_max_u": u.abs().max().item() if len(u) else 0.0,
    }
    values |= {name: exact_dot(x, y) for name, (x, y) in products.items()}
    # only used as the scales of bounds
    magnitudes = {name: (x * y).abs().sum().item() for name, (x, y) in products.items()}
    return values, magnitudes


def kind_of(a, b):
    """Return as what a pair of numbers counts of which one is not finite: a is the later one."""
    if math.isnan(a) or math.isnan(b):
        return "nan"
    # the infinity that it is now, or the way from the one that it was
    return "posinf" if (a if math.isinf(a) else -b) > 0 else "neginf"


def lost_by_a_product(*tensors):
    """Return what a product may lose by underflow: more in kernels for GPUs with few fp64 units."""
    # not imported, since that needs Triton; loaded if there are kernels
    tuning = sys.modules.get("gradiometer.kernels.tuning")
    wide = {torch.float64, torch.complex128} & {x.dtype for x in tensors}
    return 2.0**-148 if tuning and not wide and tuning.has_few_fp64_units(tensors[0].device) else 2.0**-1074


def assert_pair(measured, a, b, g=None, slack=0.0):
    """Check one row, a mapping from names. ``slack``: a relative error on top of the bound."""
    values, magnitudes = exact_pair(a, b, g)
    lost = {"dot_ab": lost_by_a_product(a, b), "dot_ug": lost_by_a_product(a, b, b if g is None else g)}
    assert set(measured) == set(values)
    for name, value in values.items():
        if name in magnitudes:
            bound = (SUM_BOUND + slack) * magnitudes[name] + values["numel"] * lost.get(name, 2.0**-1074)
            assert abs(measured[name] - value) <= bound, (name, measured[name], value, bound)
        else:
            assert measured[name] == value, (name, measured[name], value)


def exact_dot(x, y):
    """Return the sum of the products of fp64 numbers below 2**900, rounded once unless a product underflows.

    Each product is split into two numbers: T. J. Dekker, "A floating-point technique for extending the
    available precision", Numerische Mathematik 18 (1971).
    """
    product = x * y
    (x1, x2), (y1, y2) = _halves(x), _halves(y)
    error = ((x1 * y1 - product) + x1 * y2 + x2 * y1) + x2 * y2
    return math.fsum([*product.tolist(), *error[error != 0].tolist()])


def _halves(x):
    # 26 bits each, whose products are exact
    high = x * (2.0**27 + 1)
    high = high - (high - x)
    return high, x - high


def _is_finite(x):
    return x.abs() < math.inf


def _same(a, b):
    if a.dtype == b.dtype:
        return (bits(a) == bits(b)).flatten()
    a, b = numbers(a), numbers(b)
    return (a == b) & (a.signbit() == b.signbit())
