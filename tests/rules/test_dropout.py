"""Dropout layers that drop nearly everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import HighDropout, Severity


def train(*probabilities, mode=True):
    torch.manual_seed(0)
    parts = [x for p in probabilities for x in (nn.Linear(8, 8), nn.Dropout(p))]
    model = nn.Sequential(*parts, nn.Linear(8, 1)).train(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.watch(model, optimizer, rules=[HighDropout()]) as monitor:
        for _ in range(10):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert monitor.failures == {}
    return monitor.findings


def test_a_share_that_was_meant_to_be_kept_is_found():
    (found,) = train(0.1, 0.9, 0.95)
    assert (found.rule, found.tensor, found.severity) == ("high_dropout", "5", Severity.WARNING)
    assert found.first_step == 0
    assert found.message == ("5 drops 95% of its input in training; 2 Dropout layers drop 80% or more")


@pytest.mark.parametrize(("p", "severities"), [(0.8, [Severity.INFO]), (0.7, []), (0.1, [])])
def test_less_is_info_or_nothing(p, severities):
    assert [found.severity for found in train(p)] == severities


def test_in_evaluation_mode_nothing_is_dropped():
    assert train(0.9, mode=False) == []
