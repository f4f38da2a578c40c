"""Code shared by all sinks, selection and keys; and the sinks without dependencies: JSON lines, functions."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest

from gradiometer import sinks
from gradiometer.recorder import KINDS
from gradiometer.rules.fault import Fault
from gradiometer.rules.finding import Severity
from gradiometer.sinks.protocol import Sink
from gradiometer.sinks.selection import News, check_key, lookup
from support.changed_records import changed, column
from support.findings import finding
from support.processes import python
from support.synthetic_run import NEGATIVES, make_catalog, make_info, make_records

CATALOG = make_catalog(6)
INFO = make_info(CATALOG)


def records(steps=10, catalog=CATALOG, **more):
    return list(make_records(catalog, steps, **more))


# selection


def test_totals_and_scalars_are_all_that_is_taken_unasked():
    (record,) = records(1)
    values = sinks.Selection().values(record)
    assert values == {
        "train/loss": record.loss,
        "train/lr": record.scalars["lr"],
        "grads/total_norm": record.total("norm"),
        "grads/n_nonfinite": 0.0,
    }


def test_tensors_are_taken_by_name_and_statistic():
    (record,) = records(1)
    names = r"^blocks\.[01]\.w"
    selection = sinks.Selection(names, statistics=("norm", "abs_max"), totals=(), scalars=None)
    rows = {name: CATALOG.parameters.index[name] for name in ("blocks.0.weight", "blocks.1.weight")}
    expected = {
        f"grads/{name}/{what}": record.value(what)[i].item()
        for name, i in rows.items()
        for what in ("norm", "abs_max")
    }
    assert selection.values(record) == expected
    assert len(sinks.Selection(tensors="").values(record)) == 4 + len(CATALOG.names)


def test_each_kind_has_the_statistics_of_its_schema():
    catalog = make_catalog(2, ("grads", "updates", "activations"))

    def put(table):
        for name, value in (("sumsq_b", 16.0), ("n_nonzero_g", 8.0), ("n_stuck", 2.0)):
            column(table, name)[...] = value

    record = changed(records(1, catalog)[0], put, "updates")
    names = ("norm", "update_ratio", "stuck_fraction", "kurtosis")
    selection = sinks.Selection(tensors="weight|logits", statistics=names, totals=names, scalars=None)
    values = selection.values(record)
    assert {key for key in values if key.startswith("grads")} == {
        "grads/total_norm",
        "grads/blocks.0.weight/norm",
    }
    assert {key for key in values if key.startswith("activations")} == {
        *("activations/total_norm", "activations/kurtosis"),
        *("activations/logits/norm", "activations/logits/kurtosis"),
    }
    assert values["updates/stuck_fraction"] == values["updates/blocks.0.weight/stuck_fraction"] == 0.25
    assert values["updates/update_ratio"] == record.total("update_ratio", "updates")
    assert lookup(record, "updates/blocks.0.weight/stuck_fraction") == 0.25
    assert lookup(record, "grads/kurtosis") is None
    check_key("updates/update_ratio")
    for key, message in (
        ("grads/update_ratio", "only updates have update_ratio"),
        ("grads/kurtosis", "only activations and activation_grads have kurtosis"),
    ):
        with pytest.raises(ValueError, match=f"'{key}' is not a key: {message}"):
            check_key(key)


def test_a_kind_that_nobody_knows_is_written_too(tmp_path):
    (record,) = records(1, make_catalog(2, ("grads", NEGATIVES)))
    write(tmp_path / "run", [record], tensors="bias").close()
    (line,) = lines_of(tmp_path / "run")
    # it has no norm
    assert {key for key in line if key.startswith("negatives")} == {
        *("negatives/numel", "negatives/negative_fraction"),
        *("negatives/blocks.0.bias/numel", "negatives/blocks.0.bias/negative_fraction"),
    }


def test_histograms_are_written_if_they_are_asked_for():
    (record,) = records(1, make_catalog(4, ("grads", "grad_exponents")))
    assert not any(key.startswith("grad_exponents") for key in sinks.Selection(tensors="").values(record))
    totals = ("numel", "bin_1")
    selection = sinks.Selection("0.bias", "max_exponent", totals, scalars=None, kinds="grad_exponents")
    assert selection.values(record) == {
        "grad_exponents/numel": record.total("numel", "grad_exponents"),
        "grad_exponents/bin_1": record.total("bin_1", "grad_exponents"),
        "grad_exponents/blocks.0.bias/max_exponent": record.value("max_exponent", "grad_exponents")[1].item(),
    }


def test_a_kind_may_be_registered_later(monkeypatch):
    with pytest.raises(ValueError, match="there is no 'negatives'; choose from grads"):
        sinks.Selection(kinds=("negatives",))
    monkeypatch.setitem(KINDS, "negatives", NEGATIVES)
    (record,) = records(1, make_catalog(2, ("grads", NEGATIVES)))
    selection = sinks.Selection(kinds="negatives", totals=("n_negative",), scalars=None)
    assert selection.values(record) == {"negatives/n_negative": record.total("n_negative", "negatives")}
    check_key("negatives/blocks.0.bias/negative_fraction")


def test_statistics_may_be_a_pattern_of_whole_names():
    schemas = [kind.schema for kind in KINDS.values() if kind.schema.storage == "columns"]
    counts = dict.fromkeys(name for one in schemas for name in one.names if name.startswith("n_"))
    assert sinks.Selection(tensors="", statistics=r"n_.*").statistics == tuple(counts)
    assert sinks.Selection(tensors="", statistics="norm").statistics == ("norm",)


def test_every_kind_has_its_own_keys_and_what_was_not_measured_has_none():
    catalog = make_catalog(4, ("grads", "weights"))
    record = records(1, catalog)[0]
    # a parameter without a gradient
    record = changed(record, lambda table: table.values[1].zero_(), "grads")
    values = sinks.Selection(tensors="", scalars=None, totals=("rms",)).values(record)
    assert {"grads/rms", "weights/rms", "weights/blocks.0.bias/norm"} <= values.keys()
    assert "grads/blocks.0.bias/norm" not in values
    record = changed(record, lambda table: table.values.zero_(), "grads")
    assert not any(key.startswith("grads") for key in sinks.Selection(tensors="").values(record))
    only = sinks.Selection(tensors="", scalars=None, kinds=("weights",)).values(record)
    assert {key.split("/")[0] for key in only} == {"weights"}


def test_a_step_that_was_not_recorded_has_scalars_alone():
    record = records(2, every=2)[1]
    assert sinks.Selection(tensors="").values(record).keys() == {"train/loss", "train/lr"}
    assert sinks.Selection(scalars="^lr$").values(record).keys() == {"train/lr"}


def test_every_takes_some_steps_and_those_that_are_not_finite():
    taken = [r.step for r in records(30, nonfinite_at=17) if sinks.Selection(every=10).takes(r)]
    assert taken == [0, 10, 17, 20]


def test_rows_are_found_anew_for_another_catalog():
    selection = sinks.Selection(tensors="b$", scalars=None, totals=())
    for names in (["a", "b"], ["b", "a", "c.b"]):
        (record,) = records(1, make_catalog(names=names))
        expected = {f"grads/{name}/norm" for name in names if name.endswith("b")}
        assert selection.values(record).keys() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": "("}, "tensors='(' is not a valid regular expression: missing )"),
        ({"tensors": 3}, "tensors=3 is not a valid regular expression"),
        ({"scalars": "["}, "scalars='[' is not a valid regular expression"),
        ({"statistics": ("nrm",)}, "statistics: there is no 'nrm'; choose from numel,"),
        ({"statistics": "nrm"}, "statistics='nrm' matches no statistic; choose from numel,"),
        ({"totals": ("norm", "max")}, "totals: there is no 'max'"),
        ({"totals": "max"}, "totals: there is no 'max'"),
        ({"kinds": ("weight",)}, "kinds: there is no 'weight'; choose from grads, weights, updates"),
        ({"every": 0}, "every=0: every must be a positive integer"),
    ],
)
def test_a_bad_selection_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        sinks.Selection(**options)
    assert "\n" not in str(raised.value)


def test_a_key_is_looked_up_or_refused():
    (record,) = records(1, make_catalog(names=["a/b", "a"]))
    names = KINDS["grads"].schema.names
    found = sinks.Selection(tensors="", statistics=names, totals=names).values(record)
    for key, value in found.items():
        check_key(key)
        assert lookup(record, key) == value
    for key in ("grads/c/norm", "weights/total_norm", "train/accuracy"):
        assert lookup(record, key) is None
    for key in ("loss", "train/", "grads/nrm", "gradients/total_norm", "grads/a/nrm"):
        with pytest.raises(ValueError, match=f"'{key}' is not a key"):
            check_key(key)


def test_a_finding_is_news_once_and_again_when_it_is_worse():
    news, seen = News(), finding(severity=Severity.WARNING)
    assert news.take([seen]) == [seen]
    assert news.take([replace(seen, last_step=9, count=4)]) == []
    worse = replace(seen, severity=Severity.ERROR)
    assert news.take([worse]) == [worse]
    assert news.take([replace(seen, first_step=500)]) != []


# JSON lines


def write(path, steps, findings=(), **options):
    sink = sinks.JSONLines(path, **options)
    sink.start(INFO)
    sink.write(steps, findings)
    return sink


def lines_of(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_a_step(tmp_path):
    path, steps = tmp_path / "new" / "run.jsonl", records(5)
    sink = write(path, steps, tensors=r"0\.w")
    # the line is there before the file is closed
    lines = lines_of(path)
    for record, line in zip(steps, lines, strict=True):
        assert line == {
            "step": record.step,
            "time": record.time,
            "skipped": False,
            **sinks.Selection(tensors=r"0\.w").values(record),
        }
    sink.close()


def test_what_is_not_finite_is_a_word_that_float_takes_back(tmp_path):
    steps = records(4, nonfinite_at=2)
    steps[3].scalars["loss"] = -math.inf
    write(tmp_path / "run", steps, tensors="").close()
    lines = lines_of(tmp_path / "run")
    assert lines[2]["train/loss"] == lines[2]["grads/total_norm"] == "NaN"
    assert lines[2]["grads/blocks.0.bias/norm"] == "Infinity"
    assert lines[3]["train/loss"] == "-Infinity"
    assert lines[2]["skipped"] is True
    assert [float(lines[i]["train/loss"]) for i in (1, 3)] == [steps[1].loss, -math.inf]


def test_findings_are_in_the_line_of_their_step(tmp_path):
    seen = finding(7, value=math.nan)
    sink = write(tmp_path / "run", records(10), [seen], every=5)
    sink.write(records(10, first=10), [replace(seen, last_step=12, count=6)])
    sink.close()
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 5, 7, 10, 15]
    (written,) = lines[2]["findings"]
    assert written == seen.to_dict() | {"value": "NaN"}
    assert sum("findings" in line for line in lines) == 1


def test_a_fault_is_a_line_of_its_own(tmp_path):
    steps = records(3, nonfinite_at=2)
    sink = write(tmp_path / "run", steps)
    sink.fault(Fault("exception", "boom", 3, "step 2, blocks.0.weight.grad", [finding()], steps))
    last = lines_of(tmp_path / "run")[-1]
    assert (last["step"], last["fault"]["reason"], last["fault"]["message"]) == (3, "exception", "boom")
    assert last["fault"]["last"][-1]["total_norm"] == "NaN"
    sink.close()


@pytest.mark.parametrize("torn", ['{"step": 99, "train/lo', "x" * 200_000])
def test_a_resumed_run_goes_on_below_and_a_torn_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "run"
    write(path, records(3)).close()
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)
    write(path, records(3, first=2)).close()
    assert [line["step"] for line in lines_of(path)] == [0, 1, 2, 2, 3, 4]
    path.write_text(torn, encoding="utf-8")
    write(path, records(1)).close()
    assert [line["step"] for line in lines_of(path)] == [0]


def test_a_full_disk_leaves_complete_lines_and_the_error_is_passed_on(tmp_path, monkeypatch):
    path = tmp_path / "run"
    sink = write(path, records(2))
    real = os.write

    def full(file, data):
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return real(file, data[:50])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write(records(2, first=2), [])
    sink.write(records(2, first=4), [])
    sink.close()
    assert [line["step"] for line in lines_of(path)] == [0, 1, 4, 5]


def test_names_of_any_characters_are_valid_json(tmp_path):
    names = ["ü/é 中", 'a"b\\c\n', "half\udc80", "<b>[0]</b>"]
    write(tmp_path / "run", records(1, make_catalog(names=names)), tensors="").close()
    (line,) = lines_of(tmp_path / "run")
    # half of a surrogate pair is not a character, and many readers reject it
    assert {f"grads/{name}/norm".replace("\udc80", r"\udc80") for name in names} <= line.keys()


def test_a_path_that_cannot_be_opened_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        sinks.JSONLines(tmp_path / "file" / "run").start(INFO)


# functions


def test_a_function_is_called_for_each_step():
    got = []
    sink = sinks.Function(got.append)
    sink.start(INFO)
    steps = records(3)
    sink.write(steps, [])
    sink.close()
    assert got == steps
    got.clear()
    sinks.Function(got.append, every=2).write(steps, [])
    assert [record.step for record in got] == [0, 2]


def test_a_function_of_two_gets_each_steps_findings():
    got = []
    early, late = finding(0), finding(2, "blocks.1.weight")
    sink = sinks.Function(lambda record, findings: got.append((record.step, findings)))
    sink.write(records(3), [early, late])
    sink.write(records(1, first=3), [])
    assert got == [(0, [early]), (1, []), (2, [late]), (3, [])]
    named = sinks.Function(lambda _, findings=(): got.append(findings))
    named.write(records(1), [early])
    assert got[-1] == [early]
    sparse = sinks.Function(lambda _, findings: got.append(findings), every=10)
    sparse.write(records(9, first=1), [early])
    sparse.write(records(1, first=10), [])
    assert got[-1] == [early]


def test_an_error_of_a_function_is_passed_on_and_costs_one_step():
    got = []

    def fragile(record):
        if record.step == 1:
            raise RuntimeError("lost")
        got.append(record.step)

    with pytest.raises(RuntimeError, match="lost"):
        sinks.Function(fragile).write(records(4), [])
    assert got == [0, 2, 3]


def test_what_cannot_be_called_so_is_refused():
    for bad in (3, lambda: None, lambda _a, _b, _c: None, lambda _, *, _key: None):
        with pytest.raises(TypeError, match="Function: "):
            sinks.Function(bad)
    with pytest.raises(ValueError, match="every=0"):
        sinks.Function(print, every=0)
    for fine in (print, lambda *_: None, lambda _, _scale=2: None, max):
        sinks.Function(fine)


# all sinks


def test_the_sinks_that_need_nothing_are_sinks(tmp_path):
    for sink in (sinks.JSONLines(tmp_path / "run"), sinks.Function(print)):
        assert isinstance(sink, Sink)
    assert "tmp" in repr(sinks.JSONLines("/tmp/run"))  # noqa: S108 not written
    assert repr(sinks.Function(print)) == "Function(print)"


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (sinks.Console, "rich", "monitor"),
        (lambda: sinks.TensorBoard("runs"), "tensorboard", "tensorboard"),
        (lambda: sinks.WeightsAndBiases("project"), "wandb", "wandb"),
        (lambda: sinks.MLflow("experiment"), "mlflow", "mlflow"),
    ],
)
def test_without_its_package_a_sink_says_what_to_install(monkeypatch, make, package, extra):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'gradiometer[{extra}]'")) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_importing_the_sinks_imports_no_package_of_theirs():
    code = (
        "import sys, gradiometer.sinks as s; from gradiometer.sinks import wandb, mlflow, tensorboard\n"
        "found = {'rich', 'tensorboard', 'wandb', 'mlflow', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'{found}' if found else 0)"
    )
    assert python("-c", code).returncode == 0
