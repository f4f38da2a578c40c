"""Writing the run record: what is lost, and what is not, when one of its files cannot be written."""

from __future__ import annotations

import math

import pytest

from gradiometer.rules.finding import Finding, Severity
from gradiometer.runs import writer
from gradiometer.runs.reader import read_run
from gradiometer.runs.writer import RunRecord
from support.synthetic_run import make_info, make_records, make_roster

pytest.importorskip("pyarrow")
ROSTER = make_roster(3)


def opened(path, **options):
    sink = RunRecord(path, **({"segment_seconds": math.inf, "fsync": False} | options))
    sink.start(make_info(ROSTER))
    return sink


def finding(**fields):
    values = {"rule": "odd", "severity": Severity.INFO, "first_step": 1, "last_step": 1, "kind": None}
    values |= {"tensor": None, "value": 1.0, "threshold": 1.0, "message": "", "advice": ""}
    return Finding(**values | fields)


def steps_of(path):
    return read_run(path).steps["step"].to_pylist()


@pytest.fixture
def full(monkeypatch):
    """Writes of the files whose names begin with one of these words fail, as on a full disk."""
    names, real = set(), writer.prepare

    def prepare(run, path, data, *, sync):
        if path.name.startswith(tuple(names)):
            raise OSError(28, "No space left on device", str(path))
        return real(run, path, data, sync=sync)

    monkeypatch.setattr(writer, "prepare", prepare)
    return names


@pytest.mark.parametrize("name", ["findings", "run"])
@pytest.mark.parametrize("seconds", [math.inf, 0])
def test_a_json_file_that_cannot_be_written_holds_up_no_step(tmp_path, full, name, seconds):
    records = list(make_records(ROSTER, 25))
    sink = opened(tmp_path, segment_steps=10, segment_seconds=seconds)
    full.add(name)
    errors = 0
    for record in records:
        try:
            sink.write([record], [finding(first_step=record.step)])
        except OSError as error:
            assert error.filename == str(tmp_path / f"{name}.json")  # noqa: PT017 most calls pause
            errors += 1
    assert errors >= 1
    assert len(steps_of(tmp_path)) == (25 if seconds == 0 else 20)
    # full segments are closed
    assert len(sink._pending) == 5
    assert len(list((tmp_path / "steps").iterdir())) == (3 if seconds == 0 else 2)
    # the other JSON file is up to date
    assert len(read_run(tmp_path).findings) == (0 if name == "findings" else len(steps_of(tmp_path)))
    full.clear()
    sink.close()
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(25))
    assert (len(run.findings), run.info["closed"], sink.lost) == (25, True, 0)


def test_a_segment_that_cannot_be_written_holds_up_no_finding(tmp_path, full):
    sink = opened(tmp_path, segment_steps=10)
    full.add("steps")
    with pytest.raises(OSError, match="No space left"):
        sink.write(list(make_records(ROSTER, 12)), [finding()])
    assert read_run(tmp_path).findings == [finding()]
    full.clear()
    sink.close()
    assert steps_of(tmp_path) == list(range(12))


@pytest.mark.parametrize("odd", [None, finding(value={1}), finding(tensor=b"w"), finding(message=object())])
def test_a_finding_that_cannot_be_written_holds_up_neither_steps_nor_the_others(tmp_path, odd):
    sink = opened(tmp_path, segment_steps=10)
    for record in make_records(ROSTER, 25):
        with pytest.raises(TypeError):
            sink.write([record], [odd, finding()])
    assert len(steps_of(tmp_path)) == 20
    sink.close()
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(25))
    assert run.findings == [finding()]
    assert (run.info["closed"], sink.lost) == (True, 0)
