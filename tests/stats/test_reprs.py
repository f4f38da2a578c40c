"""A repr names only methods that exist."""

import dataclasses
import re

import pytest
import torch

import gradiometer as gm
from gradiometer.distributed import UNKNOWN

W = {"a": torch.ones(3), "b": torch.tensor([0.5, -2.0])}


def variants(stats):
    """Return stats as they are, of this rank's shards, of all ranks, and without rows."""
    local = dataclasses.replace(stats, sharding=UNKNOWN)
    reduced = dataclasses.replace(stats, origin=torch.full((len(stats.names),), -1.0, dtype=torch.float64))
    assert local.is_local
    assert reduced.is_reduced
    return [stats, local, reduced, stats.group({})]


def activations():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    taps = gm.Taps(model, {"all": "."})
    empty = taps.stats()
    model(torch.ones(1, 2))
    return [empty, taps.stats()]


def recorded():
    records = []
    model = torch.nn.Linear(2, 1)
    monitor = gm.Monitor(model, sinks=[records.append])
    with monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.record()
        monitor.advance()
        monitor.flush()
    return monitor, records


def run_of(folder):
    pytest.importorskip("pyarrow")
    model = torch.nn.Linear(2, 1)
    with gm.Monitor(model, run_dir=folder) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.record()
        monitor.advance()
    return gm.read_run(folder)


def reports(stats):
    # sharded stats that were measured in a compiled step have no placements, but can be read
    return [each.materialize() for each in variants(stats)]


EXAMPLES = {
    "TensorStats": lambda _: variants(gm.collect(W)),
    "PairStats": lambda _: variants(gm.compare(W, W)),
    "ExponentStats": lambda _: variants(gm.collect_exponents(W)),
    "ProjectionStats": lambda _: variants(gm.collect_projections(W)),
    "ActivationStats": lambda _: activations(),
    "Report": lambda _: reports(gm.collect(W)),
    "PairReport": lambda _: reports(gm.compare(W, W)),
    "PrecisionReport": lambda _: reports(gm.collect_exponents(W)),
    "ActivationReport": lambda _: [stats.materialize() for stats in activations()],
    "ModuleReports": lambda _: [report.by_module(1) for report in reports(gm.collect(W))],
    "Pending": lambda _: [gm.collect(W).materialize_async()],
    "FiniteReport": lambda _: [gm.check_finite(torch.nn.Linear(2, 1))],
    "ModelReport": lambda _: [gm.check_model(torch.nn.Linear(2, 1), torch.ones(3, 2), only=["examples"])],
    "GradientReport": lambda _: [gm.GradientReport((), "eager")],
    "Monitor": lambda _: [recorded()[0]],
    "StepRecord": lambda _: recorded()[1],
    "Ranks": lambda _: [gm.Ranks(torch.nn.Linear(2, 1))],
    "Run": lambda folder: [run_of(folder)],
}


def has_own_repr(kind):
    """Return whether a class writes its repr itself, unlike dataclasses and modules of torch."""
    module = getattr(kind.__repr__, "__module__", "")
    return module.startswith("gradiometer") and not hasattr(kind.__repr__, "__wrapped__")


def test_there_is_an_example_of_each_public_class():
    public = {name: getattr(gm, name) for name in gm.__all__}
    own = [name for name, kind in public.items() if isinstance(kind, type) and has_own_repr(kind)]
    assert sorted(EXAMPLES) == sorted(own)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repr_names_methods_that_exist(name, tmp_path):
    for example in EXAMPLES[name](tmp_path):
        assert type(example).__name__ == name
        for owner, method in re.findall(r"(?:(\w+)\.)?(\w+)\(", repr(example)):
            assert callable(getattr(getattr(gm, owner) if owner else example, method, None)), repr(example)
