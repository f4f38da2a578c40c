"""`Monitor(run_dir=True)`: a new folder with a name of its own, the same on all ranks; and names of sinks."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

from gradiometer.monitor import run_names
from gradiometer.monitor.monitor import Monitor
from gradiometer.runs import RunError, read_run


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(model, monitor):
    model(torch.ones(1, 2)).sum().backward()
    monitor.record()
    monitor.advance(loss=1.0)


def test_a_run_gets_a_name_which_is_logged(caplog):
    model = nn.Linear(2, 1)
    with caplog.at_level(logging.INFO, "gradiometer"), Monitor(model, run_dir=True, rules=()) as monitor:
        train(model, monitor)

    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z]+-[a-z]+", monitor.run_dir.name)
    assert monitor.run_dir.parent == Path("runs")
    assert len(read_run(monitor.run_dir).steps) == 1
    assert caplog.text.count(f"this run is recorded in {monitor.run_dir}") == 1


def test_a_name_is_never_taken_twice(monkeypatch):
    monkeypatch.setattr(run_names, "_FIRST", "calm warm")
    monkeypatch.setattr(run_names, "_SECOND", "river")
    monkeypatch.setattr(run_names, "_TRIES", 1000)
    taken = {Monitor(nn.Linear(2, 1), run_dir=True).run_dir.name[11:] for _ in range(2)}

    assert taken == {"calm-river", "warm-river"}
    with pytest.raises(RunError, match=r"no free name was found for a run in .*: pass the path of a folder"):
        Monitor(nn.Linear(2, 1), run_dir=True)


def test_a_folder_that_cannot_be_created_is_one_error():
    Path("runs").write_text("a file")

    with pytest.raises(RunError, match=r"cannot be created \(.*\): pass the path of a folder"):
        Monitor(nn.Linear(2, 1), run_dir=True)


def test_the_folder_is_an_attribute_in_any_case(tmp_path):
    assert Monitor(nn.Linear(2, 1)).run_dir is None
    assert Monitor(nn.Linear(2, 1), run_dir=str(tmp_path / "run")).run_dir == tmp_path / "run"


# the names of sinks


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (
            "tensorboard",
            r"the string 'tensorboard', not a sink; pass an object: sinks=\[gm.sinks.TensorBoard\(",
        ),
        (["console"], r"the string 'console'.*sinks=\[gm.sinks.Console\("),
        (["wandb"], r"gm.sinks.WeightsAndBiases\("),
        ("JSON_Lines", r"gm.sinks.JSONLines\("),
        (["nothing"], r"pass an object of gm.sinks: Console, .*TensorBoard.*; or a function of a step"),
    ],
)
def test_the_name_of_a_sink_is_refused_with_what_to_pass(sinks, says):
    with pytest.raises(TypeError, match=rf"Monitor\(sinks=...\): got {says}" if "string" in says else says):
        Monitor(nn.Linear(2, 1), sinks=sinks)


# several ranks


def job(rank, folder, asks, ranks):
    os.chdir(folder)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    try:
        with Monitor(model, run_dir=asks[rank], rules=(), ranks=ranks) as monitor:
            train(model, monitor)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        os.chdir("/")
    return str(monitor.run_dir)


def test_all_ranks_have_the_name_of_the_first(two_ranks, tmp_path):
    first, second = two_ranks.run(job, str(tmp_path), (True, True), True)

    assert first == second
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").iterdir()] == [first]
    assert len(read_run(tmp_path / first).steps) == 1


def test_only_the_first_rank_may_ask_for_a_name(two_ranks, tmp_path):
    first, second = two_ranks.run(job, str(tmp_path), (True, None), True)
    assert (first[:5], second) == ("runs/", "None")

    failed = two_ranks.run(job, str(tmp_path), (None, True), True)
    assert all("on rank 1: rank 0 has another run_dir; pass True there too" in text for text in failed)


def test_a_first_rank_that_cannot_create_it_fails_all(two_ranks, tmp_path):
    (tmp_path / "runs").write_text("a file")

    failed = two_ranks.run(job, str(tmp_path), (True, True), True)
    assert all("cannot be created" in text for text in failed)


def test_separate_ranks_need_a_path(two_ranks, tmp_path):
    failed = two_ranks.run(job, str(tmp_path), (True, True), False)
    assert all("ranks that are not merged cannot agree on a name" in text for text in failed)
