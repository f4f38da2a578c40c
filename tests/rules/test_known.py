"""What rules know of the loop beside the tensors."""

from __future__ import annotations

import pytest

from gradiometer.recorder import Catalog, ModelState, StepOrder, StepRecord
from gradiometer.rules.known import most_skips


@pytest.mark.parametrize(
    ("first", "backoff", "most"),
    [(0.0, 0.0, 10), (2.0**16, 0.5, 10), (2.0**32, 0.5, 26), (2.0**32, 1 - 1e-6, 100)],
)
def test_a_scale_that_hardly_falls_may_not_skip_for_ever(first, backoff, most):
    state = ModelState((), order=StepOrder(backoff=backoff, first_scale=first))
    assert most_skips(StepRecord(0, 0.0, {}, Catalog.of((), (), ()), model=state)) == most
