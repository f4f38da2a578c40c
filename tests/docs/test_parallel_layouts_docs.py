"""docs/how-to/parallel-layouts.md runs unchanged, and the demo tells the fault from other layouts."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import gradiometer as gm
from support.pages import ROOT, blocks, code_of, execute, load, text
from support.processes import python

PAGE = "docs/how-to/parallel-layouts.md"
pytest.importorskip("pyarrow")
STEP = 3


def without_numbers(line):
    return re.sub(r"\d[\d.e-]* apart|, [\d.e-]+ in step|explains .*", "", line)


def test_the_page_runs_and_says_what_it_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = execute(*blocks(PAGE))
    assert capsys.readouterr().out.startswith("the same up to rounding in 20 compared steps, as in float32: ")
    assert "# the same up to rounding in 20 compared steps, …" in text(PAGE)
    assert scope["result"].distances.departure is None


def test_the_demo_names_the_tensor_before_the_fault_and_no_other_layout():
    done = python(ROOT / "docs" / "parallel_layouts_demo.py", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    (shown,) = code_of(text(PAGE), "text")
    lines = [done.stdout.splitlines(), shown.splitlines()]
    assert len(lines[0]) == 4
    assert [without_numbers(line) for line in lines[0]] == [without_numbers(line) for line in lines[1]]


def norms_not_added_up(model):
    """Keep this rank's summand of the gradients of normalization layers, as without an all-reduce."""
    for name, parameter in model.named_parameters():
        if "norm" in name and isinstance(parameter, DTensor):
            own = parameter.grad.to_local()
            parameter.grad = DTensor.from_local(own, parameter.device_mesh, [Replicate()], run_check=False)


def twice(model):
    """Add up over the ranks what should be averaged."""
    for parameter in model.parameters():
        parameter.grad.mul_(2)


def train(rank, folder, layout="one process", fault=None):
    """Record SGD; ``fault``: changes the gradients from a step on."""
    demo = load("parallel_layouts_demo.py")
    torch.manual_seed(0)
    model = demo.Model() if layout == "one process" else demo.laid_out(demo.Model(), layout)
    data = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.Monitor(model, run_dir=folder, weights=True, projections=32, rules=()) as monitor:
        for step in range(STEP + 3):
            words = torch.randint(0, demo.WORDS, (demo.BATCH, demo.LENGTH), generator=data)
            target = words.roll(1, dims=1)
            x = (words, target) if layout != "DDP" else (words.chunk(2)[rank], target.chunk(2)[rank])
            optimizer.zero_grad()
            loss = model(*x)
            loss.backward()
            if fault is not None and step >= STEP:
                fault(model)
            monitor.record()
            optimizer.step()
            monitor.advance(loss=loss.detach())


@pytest.mark.parametrize(
    ("layout", "fault", "names", "cosine"),
    [
        ("tensor parallelism", norms_not_added_up, r"norm\.", 0.0),
        ("DDP", twice, "", 1 - 1e-9),
        ("tensor parallelism", None, None, None),
    ],
)
def test_a_fault_from_a_step_on_is_named(two_ranks, tmp_path, layout, fault, names, cosine):
    train(0, tmp_path / "one")
    two_ranks.run(train, str(tmp_path / "two"), layout, fault)
    result = gm.compare_runs(tmp_path / "one", tmp_path / "two")
    found = result.distances.departure
    if fault is None:
        assert found is None
        return
    assert found.step == STEP
    beyond = [one for one in result.distances.worst(most=None) if one.distance > one.limit]
    model = load("parallel_layouts_demo.py").Model()
    expected = {f"{name}.grad" for name, _ in model.named_parameters() if re.search(names, name)}
    assert {one.name for one in beyond} == expected
    # the last of the model is the first in the backward pass
    assert found.name == ("norm.bias.grad" if names else "head.bias.grad")
    assert all(one.cosine >= cosine for one in beyond)
