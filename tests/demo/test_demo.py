"""The demo names the injected faults, measures the figures it prints, and fails if a check fails."""

import gc
import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import gradiometer as gm
from gradiometer.demo import app as demo
from gradiometer.demo import training
from gradiometer.demo.progress import progress
from gradiometer.runs.reader import read_run

FAULTY = "blocks.1.up.weight"


@pytest.fixture(autouse=True)
def _fresh_process():
    # the demo expects a process of its own: it sets the number of threads, and its graphs stay cached
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # so that monitors that other tests leaked are not collected in a step whose operators are counted
    gc.collect()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch):
    # a model this small diverges only with a larger jump of the learning rate
    sizes = {"LAYERS": 2, "WIDTH": 48, "HEADS": 2, "CONTEXT": 32, "BATCH": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(training, name, value)
    for name, value in {"LR_JUMP": 10**5, "MAX_ROUNDS": 5}.items():
        monkeypatch.setattr(demo, name, value)


@pytest.fixture
def _graphs_run_as_they_are(monkeypatch):
    # the first test checks the real backend; here the graphs only have to exist
    monkeypatch.setattr(demo, "Backend", lambda _: training.Backend("eager"))


@pytest.fixture
def run(capsys, tmp_path):
    def main(*arguments):
        folder = tmp_path / "run"
        fixed = ["--device", "cpu", "--backend", "aot_eager", "--steps", "12", "--run-dir", str(folder)]
        status = demo.main([*fixed, *arguments])
        return status, capsys.readouterr().out, folder

    return main


def checks(output):
    lines = output.partition("What was checked\n")[2].partition("\n\n")[0].splitlines()
    return {line[10:34].strip(): (line[:8].strip(), line[36:]) for line in lines}


@pytest.mark.usefixtures("small")
def test_the_demo_names_both_faults_with_their_steps_and_leaves_a_page(run):
    pytest.importorskip("pyarrow")
    status, output, folder = run()

    assert status == 0, output
    assert re.search(rf"step 12: {re.escape(FAULTY)}\.grad, 1 Inf of 9,216", output)
    found = checks(output)
    assert {status for status, _ in found.values()} == {"ok"}
    assert found["every step is recorded"][1] == "12 of 12"
    assert found["no false alarm"][1] == "0 findings in 12 healthy steps"
    assert found["the Inf is found"][1] == f"step 12: {FAULTY}"
    assert found["training continues"][1] == "10 of the next 10 steps are finite"
    assert found["graph breaks"][1] == "0 in the 2 compiled steps"
    assert re.fullmatch(r"0 in \d\d calls after the first", found["recompiles"][1])
    assert re.match(r"0 among [1-9]\d\d operators", found["host syncs in the step"][1])
    assert found["lost by the monitor"][1] == "0 steps, 0 failures"
    assert len(output.splitlines()) <= 60
    # it says what trains, and how long it takes, before it compiles anything
    before, _, after = output.partition("compiling the step with the monitor, usually half a minute ... ")
    assert re.search(r"Model: CharacterTransformer, 2 layers .*, [\d,]+ parameters in 21 tensors\.\n", before)
    assert "Data: 1,048,576 characters of the source code of Python's standard library" in before
    assert "about 2 minutes" in before.splitlines()[0]
    assert re.match(r"\d+ s\n", after)
    # a finding is told once, and nothing is rewritten where there is no terminal
    assert output.count("1 Inf of 9,216") == 1
    assert "\r" not in output
    # except for the path of the page, which may be long
    lines = [line for line in output.splitlines() if str(folder) not in line]
    assert [line for line in lines if len(line) > 100] == []

    jump = int(re.search(r"at step (\d+) the learning rate jumps", output)[1])
    exploded = re.fullmatch(r"step (\d+), \d+ after the jump: \w+", found["the explosion is found"][1])
    assert jump <= int(exploded[1]) <= jump + demo.MAX_STEPS_AFTER_JUMP
    record = read_run(folder).record(12)
    assert record.report().inf == [FAULTY]
    assert record.skipped
    assert str(folder / "report.html") in output
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert FAULTY in page
    assert "CharacterTransformer" in page


def test_a_terminal_counts_the_seconds_of_what_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress("compiling"):
        written = ""
        while not re.fullmatch(r"compiling \.\.\. (\rcompiling \.\.\. \d+ s)+", written):
            written += capsys.readouterr().out
    assert re.fullmatch(r"\rcompiling \.\.\. \d+ s\n", capsys.readouterr().out)


@pytest.mark.usefixtures("small", "_graphs_run_as_they_are")
def test_without_its_packages_the_demo_says_what_to_install_and_goes_on(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    status, output, folder = run()
    assert status == 0
    assert "no page: pyarrow not installed\n  (pip install 'gradiometer[monitor]')" in output
    assert "the run is on disk" not in checks(output)
    assert not folder.exists()


@pytest.mark.usefixtures("small")
def test_weights_and_batches_are_those_of_the_seed():
    def start(seed):
        made = training.Training(torch.device("cpu"), seed)
        return [*made.state(), *made._batch(), *made._batch()]

    first, second, other = start(1), start(1), start(2)

    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(first[-1], other[-1])
    assert not torch.equal(first[-1], first[-3])


@pytest.mark.usefixtures("small", "_graphs_run_as_they_are")
def test_an_update_that_is_not_skipped_is_reported_and_fails(run, monkeypatch):
    # without the guard the Inf reaches the weights, and every later gradient is NaN
    monkeypatch.setattr(gm.Monitor, "skip_step", property(lambda _: torch.zeros((), dtype=torch.bool)))

    status, output, _ = run()

    assert status == 1
    found = checks(output)
    assert found["the Inf is found"][0] == "ok"
    assert found["its update is skipped"] == ("FAILED", "weights and moments are CHANGED")
    assert found["training continues"] == ("FAILED", "0 of the next 10 steps are finite")


@pytest.mark.deep
@pytest.mark.usefixtures("small", "_graphs_run_as_they_are")
def test_a_quiet_learning_rate_is_no_explosion_and_fails(run, monkeypatch):
    monkeypatch.setattr(demo, "LR_JUMP", 1)
    monkeypatch.setattr(demo, "MAX_STEPS_AFTER_JUMP", 5)

    status, output, _ = run()

    assert status == 1
    assert checks(output)["the explosion is found"] == ("FAILED", "nothing in 5 steps")


@pytest.mark.usefixtures("small")
def test_a_host_sync_and_a_recompile_in_the_step_are_counted():
    backend = training.Backend("aot_eager")
    made = training.Training(torch.device("cpu"), 0)
    compiling = torch.compile(fullgraph=True, backend=backend, dynamic=False)
    compiled = compiling(lambda x: x * 2 + len(x.nonzero()))
    lengths = iter((2, 3, 3))
    found = demo._Checks()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(torch.ones(next(lengths)))
        compiled(torch.ones(next(lengths)))
        demo._check_syncs(made, backend, lambda: compiled(torch.ones(next(lengths))), found)

    assert backend.graphs == 2
    assert not found.passed
    assert re.search(r"FAILED +host syncs in the step +1 among \d+ operators", str(found))


def test_the_text_is_the_same_at_every_read_and_is_python_source():
    text = training.corpus(200_000)

    assert torch.equal(text, training.corpus(200_000))
    assert torch.equal(text, training.corpus(300_000)[:200_000])
    assert text.dtype == torch.uint8
    assert text.max() < training.VOCABULARY
    assert len(text.unique()) > 80
    source = bytes(text.tolist())
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")).read_bytes()
    assert source.startswith(first[:200])
    assert source.count(b"    def ") > 300


def test_a_python_without_its_sources_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})

    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        training.corpus()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps must be at least 10, got 3"),
        (["--device", "mps"], "--device mps is not available here"),
        (["--device", "nonsense"], "--device nonsense is not available here"),
    ],
    ids=["steps", "mps", "nonsense"],
)
def test_a_wrong_option_is_refused_with_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(arguments)

    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_without_a_compiler_that_works_the_demo_says_so_and_takes_aot_eager(capsys, monkeypatch):
    monkeypatch.setattr(demo, "_inductor_problem", lambda device: f"no compiler for {device}")

    device, backend, _ = demo._parse(["--device", "cpu"])

    assert (device.type, backend) == ("cpu", "aot_eager")
    assert "the backend is aot_eager:\n  no compiler for cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        demo._parse(["--device", "cpu", "--backend", "inductor"])
    assert "no compiler for cpu" in capsys.readouterr().err
