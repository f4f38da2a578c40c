"""Projections: numbers and names that can't be used are refused, and results can be pickled."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm


@pytest.mark.parametrize("count", [8, 16, 256])
def test_projections_can_be_pickled(count):
    stats = gm.collect_projections({"w": torch.ones(3)}, projections=count)
    loaded = pickle.loads(pickle.dumps(stats))  # noqa: S301
    assert type(loaded) is type(stats)
    assert torch.equal(loaded.columns, stats.columns)


def test_a_recorder_with_projections_can_be_pickled():
    recorder = pickle.loads(pickle.dumps(gm.Recorder(nn.Linear(2, 1), projections=8)))  # noqa: S301
    assert isinstance(recorder, gm.Recorder)


@pytest.mark.parametrize("count", [8.0, np.int64(8), [8], True, "8", None])
def test_a_number_of_projections_is_an_integer(count):
    with pytest.raises(ValueError, match="projections must be one of 8, 16"):
        gm.collect_projections({"w": torch.ones(3)}, projections=count)
    if count is not None:
        with pytest.raises(ValueError, match="projections must be one of 8, 16"):
            gm.Recorder(nn.Linear(2, 1), projections=count)


def test_a_name_that_is_not_valid_unicode_is_refused():
    model = nn.Module()
    model.register_parameter("\ud800", nn.Parameter(torch.ones(3)))
    for call in (gm.collect_projections, gm.Recorder):
        with pytest.raises(ValueError, match=r"'\\ud800' is not valid Unicode"):
            call({"\ud800": torch.ones(2)} if call is gm.collect_projections else model, projections=8)
