"""MLflow: values read back from its file store."""

from __future__ import annotations

import math

import pytest

from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs.json_files import encodable
from gradiometer.sinks import MLflow, Selection
from gradiometer.sinks.mlflow import legal
from gradiometer.sinks.protocol import Sink
from support.synthetic_run import make_catalog, make_info, make_records

CATALOG = make_catalog(4)
INFO = make_info(CATALOG)
SEEN = Finding("dead", Severity.WARNING, 3, 5, "grads", "a.w", 1.0, 1.0, "a.w.grad is zero", "do this")


@pytest.fixture
def mlflow(monkeypatch, tmp_path):
    # a file store needs only mlflow-skinny
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    module = pytest.importorskip("mlflow")
    module.set_tracking_uri((tmp_path / "store").as_uri())
    yield module
    while module.active_run():
        module.end_run()


def only_run(mlflow, experiment="ours"):
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def points(client, run, name):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def test_without_a_run_it_makes_one_and_ends_it(mlflow):
    sink = MLflow("ours", tensors=r"0\.w", every=2)
    assert isinstance(sink, Sink)
    assert only_run(mlflow)[1].info.status == "RUNNING"
    steps = list(make_records(CATALOG, 6))
    sink.start(INFO)
    sink.write(steps, [SEEN])
    sink.close()
    client, run = only_run(mlflow)
    assert run.info.status == "FINISHED"
    assert run.data.tags["gradiometer.findings"] == str(SEEN)
    selection = Selection(tensors=r"0\.w")
    assert run.data.metrics.keys() == selection.values(steps[0]).keys()
    for name in run.data.metrics:
        assert points(client, run, name) == [(s.step, selection.values(s)[name]) for s in steps[::2]]
    times = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.timestamp for point in times] == [int(1e3 * s.time) for s in steps[::2]]
    # a second run in the same experiment
    MLflow("ours").close()


def test_an_active_run_is_used_and_left_open(mlflow):
    mlflow.set_experiment("theirs")
    with mlflow.start_run() as run:
        sink = MLflow()
        sink.write(list(make_records(CATALOG, 2)), [])
        sink.close()
        assert mlflow.MlflowClient().get_run(run.info.run_id).info.status == "RUNNING"
    client, found = only_run(mlflow, "theirs")
    assert found.info.run_id == run.info.run_id
    assert [step for step, _ in points(client, found, "grads/total_norm")] == [0, 1]


def test_requests_are_few(mlflow, monkeypatch):
    sent = []
    real = mlflow.MlflowClient.log_batch

    def log_batch(self, run_id, metrics):
        sent.append(len(metrics))
        return real(self, run_id, metrics=metrics)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    sink = MLflow("ours", seconds=1e9)
    for record in make_records(CATALOG, 600):
        sink.write([record], [])
    # four values per step; a request holds a thousand
    assert sent == [1000, 1000]
    sink.close()
    assert sent == [1000, 1000, 400]
    sent.clear()
    sink = MLflow("ours", seconds=0)
    sink.write(list(make_records(CATALOG, 3)), [])
    assert sent == [12]


def test_what_is_not_finite_arrives(mlflow):
    sink = MLflow("ours", tensors="")
    sink.write(list(make_records(CATALOG, 1, nonfinite_at=0)), [])
    sink.close()
    metrics = only_run(mlflow)[1].data.metrics
    assert math.isnan(metrics["train/loss"])
    assert math.isnan(metrics["grads/total_norm"])
    assert metrics["grads/blocks.0.bias/norm"] == math.inf


NAMES = (
    *("a[0]", "a<0>", "ü/中", "x" * 300, "x" * 299 + "y"),
    *("a:b//c", "../up", "/root", "a/./b", "half\udc80"),
)


def test_names_become_legal_and_stay_apart(mlflow):
    keys = [f"grads/{name}/norm" for name in NAMES] + [f"train/{name}" for name in NAMES] + list(NAMES)
    assert len({legal(key) for key in keys}) == len(keys)
    assert legal("grads/blocks.0.w/norm") == "grads/blocks.0.w/norm"
    catalog = make_catalog(names=NAMES)
    sink = MLflow("ours", tensors="")
    sink.write(list(make_records(catalog, 1)), [])
    sink.close()
    norms = {legal(encodable(f"grads/{name}/norm")) for name in NAMES}
    assert norms <= only_run(mlflow)[1].data.metrics.keys()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("exception", "FAILED"),
        ("SIGTERM", "KILLED"),
        ("SIGHUP", "KILLED"),
        ("interrupt", "KILLED"),
        ("non-finite loss", "FINISHED"),
    ],
)
def test_a_fault_sends_all_and_is_a_tag_and_a_status(mlflow, reason, status):
    sink = MLflow("ours", seconds=1e9)
    sink.write(list(make_records(CATALOG, 2)), [SEEN])
    assert not only_run(mlflow)[1].data.metrics
    sink.fault(Fault(reason, "boom", 6, "step 5, a.w.grad", [SEEN], []))
    _, run = only_run(mlflow)
    assert run.data.metrics
    said = f"{reason} in step 6: boom; first non-finite: step 5, a.w.grad"
    assert run.data.tags["gradiometer.fault"] == said
    sink.close()
    assert only_run(mlflow)[1].info.status == status


def test_without_a_run_or_an_experiment_it_says_what_to_do(mlflow):
    del mlflow
    with pytest.raises(ValueError, match=r"no active run; call mlflow.start_run first, or pass experiment="):
        MLflow()


def test_an_error_of_the_server_comes_out_of_write_and_nothing_piles_up(mlflow, monkeypatch):
    sink = MLflow("ours", seconds=0)

    def log_batch(*_, **__):
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
        for record in make_records(CATALOG, 5):
            with pytest.raises(ConnectionError, match="no route"):
                sink.write([record], [])
    sink.write(list(make_records(CATALOG, 1, first=5)), [])
    sink.close()
    client, run = only_run(mlflow)
    assert [step for step, _ in points(client, run, "train/loss")] == [5]
