"""Rows of embeddings and codebooks that are never used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import TENSORS
from gradiometer.recorder import Catalog, Kind
from gradiometer.rules import Severity, UnusedRows
from support.recording import record_of

MOMENTS = Kind("exp_avg_sq", TENSORS, "parameter", ".exp_avg_sq")


def train(name, used, steps=150, fed=64):
    """Train a model with 40 rows, of which the batches have ``used``."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(40, 8), "head": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.Monitor(model, rules=[UnusedRows()]) as monitor:
        for _ in range(steps):
            loss = model["head"](model[name](torch.randint(used, (fed,)))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.record()
            optimizer.step()
            monitor.advance(loss=loss)
    return monitor.findings


@pytest.mark.parametrize(("name", "severity"), [("codebook", Severity.WARNING), ("embedding", Severity.INFO)])
def test_rows_that_no_batch_uses_are_found(name, severity):
    (found,) = train(name, 4)
    assert (found.tensor, found.severity, found.value) == (f"{name}.weight", severity, 0.9)
    assert "90% of the elements have had no gradient in any step from " in found.message


@pytest.mark.parametrize(
    ("name", "used", "fed"), [("codebook", 40, 12), ("codebook", 30, 400), ("body", 4, 64)]
)
def test_rows_that_are_used_now_and_then_are_quiet(name, used, fed):
    assert train(name, used, fed=fed) == []


def moments(zeros):
    parameters = Catalog.of(("codebook.weight",), ((40, 8),), ("float32",))
    catalog = Catalog(parameters.parameters, {**parameters.kinds, "exp_avg_sq": MOMENTS})
    rule, found = UnusedRows(), []
    for i, count in enumerate(zeros):
        columns = torch.zeros(1, TENSORS.width, dtype=torch.float64)
        columns[0, TENSORS.index["numel"]], columns[0, TENSORS.index["n_zero"]] = 320.0, count
        found += rule.check(record_of(10 * i, catalog, {"exp_avg_sq": columns}))
    return found


def test_second_moments_tell_which_elements_have_never_had_a_gradient():
    found = moments([max(200, 320 - 10 * i) for i in range(40)])
    assert {one.severity for one in found} == {Severity.WARNING}
    assert "62% of the elements" in found[0].message
    # the share still falls
    assert moments([320 - 3 * i for i in range(40)]) == []
