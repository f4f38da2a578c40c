"""``torch.set_default_device`` changes nothing: every factory call of the package names its device.

The device is ``meta``, which has no values: what lands there by mistake cannot be read.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import gradiometer as gm
from conftest import INTERPRETED
from gradiometer import ops
from support.default_device import PACKAGE, DefaultDevice

HERE = Path(__file__).parent
NAMES = {function.__name__ for function in _device_constructors()}
CORE = (
    "stats/test_collect.py",
    "stats/test_report.py",
    "control/test_check_finite.py",
    "rules/test_rules.py",
    "runs/test_diff.py",
    "monitor/test_monitor.py",
)


@pytest.fixture
def _on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def unnamed(source):
    """Return the factory calls in Python code that do not name their device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in NAMES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_factory_call_names_its_device():
    found = {str(path): unnamed(path.read_text(encoding="utf-8")) for path in Path(PACKAGE).rglob("*.py")}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert {"zeros", "full", "tensor", "arange", "empty"} <= NAMES
    assert unnamed("torch.zeros(3); torch.zeros(3, device='cpu'); x.zeros(3)") == ["torch.zeros(3)"]


@pytest.mark.skipif(INTERPRETED, reason="the plain run does the same")
def test_the_core_of_the_suite_passes():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "not compile", *CORE],
        cwd=HERE,
        env=environment | {"DEFAULT_DEVICE": "meta"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_a_missing_device_would_be_noticed():
    code = compile("torch.zeros(1).device.type", f"{PACKAGE}/anything.py", "eval")
    with DefaultDevice("meta"):
        assert eval(code, {"torch": torch}) == "meta"  # noqa: S307
        assert torch.zeros(1).device.type == "cpu"


@pytest.mark.usefixtures("_on_meta")
def test_a_known_list_still_skips_the_dispatcher():
    tensors = [torch.ones(3, device="cpu"), torch.ones(2, 2, device="cpu")]
    assert torch.ones(1).device.type == "meta"
    gm.collect(tensors)
    with torch.no_grad():
        assert ops.recognize(tensors) is not None
        # such a mode is active while Inductor warms up or records a CUDA graph
        with torch.device("cpu"):
            assert ops.recognize(tensors) is None


@pytest.mark.usefixtures("_on_meta")
def test_without_tensors_the_result_is_on_the_cpu():
    model = torch.nn.Module()
    for stats in (gm.collect([]), gm.collect_grads(model), gm.collect_weights(model)):
        assert stats.columns.device.type == "cpu"
        assert stats.materialize().total_norm == 0
    assert gm.total_norm([]).item() == 0


def test_a_monitor_and_its_record_are_the_same(tmp_path):
    pytest.importorskip("pyarrow")
    from gradiometer.web import write_page

    tables = []
    for device in (None, "meta"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        x = torch.randn(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.set_default_device(device)
        try:
            with gm.Monitor(model, run_dir=tmp_path / str(device), weights=True, updates=True) as monitor:
                for _ in range(5):
                    loss = model(x).square().mean()
                    loss.backward()
                    monitor.record()
                    gm.clip_grad_norm_(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.advance(loss=loss)
                assert monitor.failures == {}
        finally:
            torch.set_default_device(None)
        run = gm.read_run(tmp_path / str(device))
        tables.append((run.steps.drop_columns(["time"]), run.tensors()))
        write_page(run)
    assert tables[0] == tables[1]
