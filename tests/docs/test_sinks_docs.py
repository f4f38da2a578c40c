"""docs/how-to/sinks.md: every code block runs unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradiometer.columns import TENSORS
from gradiometer.recorder import KINDS
from support.pages import code_of, execute, text

PAGE = text("docs/how-to/sinks.md")
SECTIONS = re.findall(r"^#+ (.+?)\n(.*?)(?=^#+ |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
BLOCKS = {heading: code_of(body) for heading, body in SECTIONS}


@pytest.fixture
def scope(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return execute(BLOCKS["Sinks: where the steps of a run go"][0])


def run(scope, heading):
    for block in BLOCKS[heading]:
        exec(block, scope)  # noqa: S102
    if "monitor" in scope:
        assert scope["monitor"].failures == {}


def test_the_console_prints(scope, capsys):
    pytest.importorskip("rich")
    run(scope, "Console")
    assert re.search(r"^step +19 +loss .* ok$", capsys.readouterr().err, flags=re.MULTILINE)


def test_json_lines_are_read(scope):
    run(scope, "JSON lines")
    assert [line["step"] for line in scope["lines"]] == list(range(20))
    assert "grads/2.weight/rms" in scope["lines"][0]
    assert all(norm > 0 for norm in scope["norms"])


def test_tensorboard_has_the_scalars(scope):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(scope, "TensorBoard")
    found = EventAccumulator("runs/mine")
    found.Reload()
    assert len(found.Scalars("grads/2.weight/norm")) == 20


def test_wandb_has_a_run(scope):
    wandb = pytest.importorskip("wandb")
    try:
        run(scope, "Weights & Biases")
        assert len(list(Path("wandb").glob("offline-run-*"))) == 3
        assert scope["own"]._run is not wandb.run is scope["joined"]._run
    finally:
        for sink in {"own", "joined"} & scope.keys():
            scope[sink]._run.finish()
        wandb.teardown()


def test_mlflow_has_the_metrics(scope, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    # not None: after another test has set one, that would be MLflow's default, not the environment's
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    run(scope, "MLflow")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("my-experiment").experiment_id])
    assert len(client.get_metric_history(found.info.run_id, "grads/total_norm")) == 20


def test_functions_are_called(scope):
    run(scope, "A function")
    assert len(scope["norms"]) == 20


def test_ones_own_sink_writes(scope):
    run(scope, "Your own")
    rows = [line.split(",") for line in Path("run.csv").read_text(encoding="utf-8").splitlines()]
    assert [int(row[0]) for row in rows] == list(range(0, 20, 2))
    # step, loss, lr, norm and rms
    assert {len(row) for row in rows} == {5}
    assert json.loads(rows[-1][3]) > 0


def test_the_page_lists_the_statistics_of_kinds():
    listed = re.search(r"Statistics are (.*?)\. A bad", PAGE, flags=re.DOTALL)[1]
    names = re.findall(r"`(\w+)`", listed)
    schemas = [kind.schema for kind in KINDS.values()]
    assert names[: len(TENSORS.names)] == list(TENSORS.names)
    assert {name for schema in schemas for name in schema.drawn or ()} <= {*names}
    assert {*names} <= {name for schema in schemas for name in schema.names}
