"""The recipes of the page on trainers run unchanged, where their packages are installed.

Most of them are not in the development environment. What they rely on is tested in the other modules here,
and in ``tests/inputs/test_wrappers.py`` with imitations of wrappers.
"""

from __future__ import annotations

import codeop
import importlib
import importlib.util
import warnings

import pytest
import torch

import gradiometer as gm
from support.pages import code_of, execute, sections, text

pytest.importorskip("pyarrow")

PAGE = "docs/how-to/trainers.md"
# title -> the package, the folders of the runs, and their steps if these are fixed
RECIPES = {
    "Ray Train": ("ray", {"runs/ray": 20}),
    "Stable-Baselines3": ("stable_baselines3", {"runs/dqn": None, "runs/sac": None}),
    "timm": ("timm", {"runs/timm": 10}),
    "PyG": ("torch_geometric", {"runs/pyg": 20}),
    "Opacus": ("opacus", {"runs/opacus": 8}),
    "schedulefree": ("schedulefree", {"runs/schedulefree": 20}),
}


def test_every_recipe_is_run_here():
    assert [title for title, code in sections(PAGE).items() if code] == list(RECIPES)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_can_be_pasted_into_the_interpreter(title):
    for block in sections(PAGE)[title]:
        entered = []
        for line in [*block.splitlines(), ""]:
            entered.append(line)
            # None while a statement may go on; a line too few or too many is a SyntaxError
            if codeop.compile_command("\n".join(entered), title) is not None:
                entered.clear()
        assert entered == []


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs_and_names_the_models_parameters(title, tmp_path, monkeypatch, capsys, request):
    package, runs = RECIPES[title]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"optional: {package} is not installed")
    monkeypatch.chdir(tmp_path)
    if package == "ray":
        _start_ray(monkeypatch, tmp_path)
        request.addfinalizer(importlib.import_module(package).shutdown)
    with warnings.catch_warnings():
        # those of other packages
        warnings.simplefilter("ignore")
        scope = execute(*sections(PAGE)[title], __name__="__main__")
    for path, steps in runs.items():
        run = gm.read_run(path)
        found = run.steps["step"].to_pylist()
        assert found == list(range(steps or len(found)))
        assert len(found) > 5
        assert torch.tensor(run.steps["total_norm"].to_pylist()).isfinite().all()
        assert not [name for name in run.catalog.names if name.startswith(("module.", "_module."))]
        if package != "stable_baselines3":
            assert None not in run.steps["loss"].to_pylist()
    if "monitor" in scope:
        assert scope["monitor"].failures == {}
        assert [x for x in scope["monitor"].findings if str(x.severity) != "info"] == []
    capsys.readouterr()


def _start_ray(monkeypatch, folder):
    import ray

    # on a busy machine a worker needs longer than a minute to start
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.setenv("HOME", str(folder))
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", object_store_memory=200 * 2**20)


def test_the_table_says_what_is_not_seen_of_every_trainer():
    rows = [line.split("|")[1:-1] for line in text(PAGE).splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {4}
    assert len(rows) == 16
    assert len(code_of(text(PAGE))) == 7
