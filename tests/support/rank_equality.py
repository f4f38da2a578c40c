"""Checks that the results of ranks equal those of one process."""

from __future__ import annotations

import pytest

from gradiometer.columns import TENSORS
from support.oracle import assert_same_counts, assert_within_bounds, exact

# gradients of the same weights and data in float64, with sums in another order
SLACK = 1e-13
MERGED = ("names", "columns", "flags", "total_norm", "ranks", "origin")


def seen(stats):
    """Return the results of a rank as plain values."""
    report = stats.materialize()
    return {
        "names": report.names,
        "columns": dict(zip(stats.names, stats.columns.tolist(), strict=True)),
        "flags": [int(report[name].flags) for name in report.names],
        "total_norm": report.total_norm,
        "ranks": report.ranks,
        "origin": dict(zip(stats.names, stats.origin.int().tolist(), strict=True)),
    }


def assert_equal(found, tensors, slack=0.0, slacks=None):
    """``found``: each rank's results; ``tensors``: all of the model's, by name; ``slacks``: for some."""
    for one in found:
        assert one["names"] == tuple(tensors)
        # the same bits on every rank, NaN included
        assert [repr(one[what]) for what in MERGED] == [repr(found[0][what]) for what in MERGED]
    for name, tensor in tensors.items():
        measured = dict(zip(TENSORS.index, found[0]["columns"][name], strict=True))
        expected = exact(tensor)
        more = (slacks or {}).get(name, slack)
        assert measured["abs_max"] == pytest.approx(expected.abs_max, rel=more, abs=0.0)
        assert_same_counts({**measured, "abs_max": expected.abs_max}, expected)
        assert_within_bounds(measured, expected, more)


def expected_of(model):
    return {name: p.grad for name, p in model.named_parameters()}
