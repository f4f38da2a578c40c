"""Runs that were made to harm their reader: one `RunError` that names the file, and little memory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from contextlib import suppress

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

import torch

from gradiometer.cli import Exit
from gradiometer.cli import app as cli
from gradiometer.monitor import Monitor
from gradiometer.recorder import KINDS
from gradiometer.rules import Fault, Finding, Severity
from gradiometer.runs import RunError, parquet, read_run, segments
from gradiometer.runs.directory import prepare
from gradiometer.stats import Taps
from gradiometer.web.page import contents, document
from support.synthetic_run import edit_info, make_catalog, seal, write_run

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


SEGMENT = "0001-0000000000.parquet"


@pytest.fixture
def path(tmp_path):
    return write_run(tmp_path / "run", 2, 4)


def rewrite(table, change):
    def damage(path):
        file = path / table / f"{table}-{SEGMENT}"
        pq.write_table(change(pq.read_table(file)), file, store_schema=True)
        seal(path)

    return damage


def padded(path):
    """Put bytes that no row refers to before the footer."""
    file = path / "tensors" / f"tensors-{SEGMENT}"
    data = file.read_bytes()
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    file.write_bytes(data[:-footer] + os.urandom(3 << 20) + data[-footer:])
    seal(path)


def long_footer(path):
    file = path / "tensors" / f"tensors-{SEGMENT}"
    data = file.read_bytes()
    file.write_bytes(data[:4] + b"\0" * (3 << 20) + (2 << 20).to_bytes(4, "little") + data[-4:])
    seal(path)


def replaced(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


def put(name, content):
    return lambda path: (path / name).write_bytes(content)


def by_hand(name, **content):
    """Replace the content of a JSON file as one may by hand: its digest is null then."""
    return put(name, json.dumps(content | {"digest": None}).encode())


def info(**changes):
    return lambda path: edit_info(path, **changes)


def catalog(names, **changes):
    rows = {"names": names, "shapes": [[1]] * len(names), "dtypes": ["float32"] * len(names)}
    return make_catalog(1).to_dict() | rows | changes


def schema(**changes):
    """Change the schema of tensors in run.json."""
    content = make_catalog(2).to_dict()
    content["schemas"][0] |= changes
    content["kinds"][0] |= {"schema": changes.get("name", "tensors")}
    return info(catalog=content)


def columns(**changes):
    """Change the second column of the schema of tensors."""
    content = make_catalog(2).to_dict()["schemas"][0]["columns"]
    return schema(columns=[content[0], content[1] | changes, *content[2:]])


def values(table, **changes):
    """Replace the values of columns in all rows."""

    def change(path):
        (file,) = (path / table).glob("*.parquet")
        rows = pq.read_table(file)
        found = {name: rows[name].to_pylist() for name in rows.column_names}
        for name, value in changes.items():
            found[name] = value(found[name]) if callable(value) else [value] * len(rows)
        pq.write_table(pa.table(found, schema=rows.schema), file)
        seal(path)

    return change


NUMBERS_OF_FINDING = dict.fromkeys(("attempt", "first_step", "last_step", "value", "threshold"), 0)
FINDING = NUMBERS_OF_FINDING | {"rule": "x", "kind": None, "tensor": None, "severity": "info"}
FINDING |= {"message": "", "advice": ""}

# what is hostile, damaged or changed by hand -> how to make it so, and the expected message
HOSTILE = {
    "no folder": (shutil.rmtree, "run is not a run: there is no such folder; pass the run_dir"),
    "a file": (
        lambda path: (shutil.rmtree(path), path.write_text("")),
        "run is not a run: it is a file, not a folder",
    ),
    "no info": (lambda path: (path / "run.json").unlink(), "run is not a run: there is no run.json in it"),
    "torn info": (put("run.json", b'{"format": "gra'), r"run.json cannot be read \(Unterminated"),
    "not text": (put("run.json", b"\xff"), r"run.json cannot be read \('utf-8'"),
    "no dict": (put("run.json", b"[]"), "run.json does not have the format gradiometer-run: pass"),
    "other": (info(format="other"), "run.json does not have the format gradiometer-run"),
    "newer": (info(version=2), "run of version 2, but .* reads only up to 1: pip install -U"),
    "version": (info(version="2"), r"has unexpected content \(version: '2'\)"),
    "no version": (info(version=None), r"unexpected content \(version: None\)"),
    "no catalog": (info(catalog=None), r"run.json has unexpected content \(KeyError\('catalog'\)\)"),
    "thresholds": (info(thresholds={"dead": -1}), "run.json has unexpected content"),
    "no numbers": (info(thresholds=3), "run.json has unexpected content"),
    "attempts": (info(attempts=[{}]), r"unexpected content \(attempts: \[\{\}\]\)"),
    "no attempts": (info(attempts=3), r"unexpected content \(attempts: 3\)"),
    "created": (info(created="x"), r"unexpected content \(created: 'x'\)"),
    "no digest": (put("findings.json", b"{}"), r"findings.json cannot be read \(its digest is missing"),
    "no digests": (put("findings.json", b"[3]"), r"findings.json cannot be read \(its digest is missing"),
    "no findings": (by_hand("findings.json"), r"findings.json has unexpected content \(\{\}\)"),
    **{
        f"finding {finding}": (
            by_hand("findings.json", findings=[finding]),
            "findings.json has unexpected content",
        )
        for finding in ({}, 3, *[FINDING | x for x in ({"severity": "?"}, {"value": "x"}, {"last_step": []})])
    },
    "long integer": (
        put("findings.json", b'[{"attempt": ' + b"9" * 400 + b"}]"),
        r"findings.json cannot be read \(the integer 999999999999... is too long",
    ),
    "black box": (put("blackbox.json", b"{"), "blackbox.json cannot be read .*: fix or delete it"),
    "no black box": (put("blackbox.json", b"[1]"), r"blackbox.json cannot be read \(its digest is missing"),
    "no attempt": (
        by_hand("blackbox.json", attempt="x"),
        r"blackbox.json has unexpected content \(attempt: 'x'\)",
    ),
    "deep": (put("blackbox.json", b"[" * 100_000), "blackbox.json cannot be read"),
    "less deep": (
        put("blackbox.json", b'{"a":' * 200 + b"1" + b"}" * 200),
        r"blackbox.json cannot be read \(it is nested more than",
    ),
    "names": (info(catalog=catalog(["w", "w"])), r"run.json has unexpected content .*catalog: names"),
    "no kinds": (info(catalog=catalog(["w"], kinds=[])), r"unexpected content .*catalog: kinds"),
    "other kinds": (info(catalog=catalog(["w"], kinds=["weights"])), r"unexpected content .*catalog: "),
    "no lists": (info(catalog=catalog(["w"], dtypes="f")), r"unexpected content .*catalog: lists"),
    **{
        f"schema {name!r}": (
            schema(name=name),
            r"unexpected content .*catalog: schema .*: a name has letters",
        )
        for name in ("../other", "steps", "", "a/b", "x" * 100)
    },
    "columns without end": (columns(number=10**12), "catalog: number of columns"),
    "column": (columns(name="step"), "catalog: schema 'tensors': no column may have the name step"),
    "style": (columns(style="odd"), "catalog: column"),
    "dtype": (schema(dtype="float16"), "catalog: KeyError"),
    "storage": (schema(storage="odd"), "catalog: schema"),
    "no columns": (schema(columns=[]), "catalog: "),
    "other columns": (columns(name="other"), "catalog: kind grads is another one"),
    "a kind of steps": (
        info(catalog=catalog(["w"], kinds=[make_catalog(1).to_dict()["kinds"][0] | {"name": "total"}])),
        "catalog: kind 'total': the table of steps has a column total_norm",
    ),
    "attempt": (info(attempts=[{"attempt": 2**31 - 1}]), r"unexpected content \(attempts: "),
    "no names": (info(catalog=catalog([[], 3])), r"run.json has unexpected content"),
    "many tensors": (
        info(catalog=catalog([f"w{i}" for i in range(90_000)])),
        "360000 values of its steps and tensors would take 2 MiB, too many for",
    ),
    "files": (info(files=[1]), r"run.json has unexpected content \(files: \[1\]\)"),
    "lost": (info(attempts=[{"attempt": 1, "lost": "x"}]), r"unexpected content \(attempts: "),
    "nulls": (
        rewrite("tensors", lambda t: replaced(t, "sumsq", pa.nulls(len(t), pa.float64()))),
        "tensors-0001-0000000000.parquet cannot be read .column sumsq has nulls",
    ),
    "null steps": (
        rewrite("steps", lambda t: replaced(t, "step", pa.nulls(len(t), pa.int64()))),
        "steps-0001-0000000000.parquet cannot be read .column step has nulls",
    ),
    "type": (
        rewrite("tensors", lambda t: replaced(t, "name", t["name"].cast(pa.string()))),
        "tensors-.* cannot be read .column name has the type string, not dictionary",
    ),
    "type of a step": (
        rewrite("tensors", lambda t: t.set_column(0, "step", pa.array([[0]] * len(t)))),
        r"tensors-.* cannot be read \(column step has the type list<.*>, not int64",
    ),
    "type of a time": (
        rewrite("steps", lambda t: replaced(t, "time", pa.array([[0.0]] * len(t)))),
        "steps-.* cannot be read",
    ),
    "no steps": (put(f"steps/steps-{SEGMENT}", b"PAR1"), "steps-.* cannot be read .*to read the other steps"),
    "no tensors": (lambda path: (path / f"tensors/tensors-{SEGMENT}").unlink(), "tensors-.* cannot be read"),
    "missing": (
        rewrite("tensors", lambda t: t.drop_columns(["norm"])),
        "tensors-.* cannot be read .it has no column norm",
    ),
    "twice": (
        rewrite("steps", lambda t: t.append_column("loss", t["loss"])),
        "steps-.* cannot be read .it has 2 columns loss",
    ),
    "padded": (padded, "tensors-.* cannot be read .its 8 rows take 0 MiB, too few for 31.* bytes on disk"),
    "footer": (long_footer, "tensors-.* cannot be read .it has a footer of 2097160 bytes"),
    **{
        f"steps {i}": (
            values("steps", step=change),
            "steps-.* cannot be read .its steps do not ascend from 0 on",
        )
        for i, change in enumerate(
            [lambda x: x[::-1], 1, lambda x: [i - 2**62 for i in x], lambda _: [0, -(2**63), 2**63 - 1, 3]]
        )
    },
    "null scalars": (
        values("steps", scalars=[("x", None)]),
        "steps-.* cannot be read .column scalars has nulls",
    ),
    "bomb": (
        rewrite("tensors", lambda t: t.take(pa.repeat(0, 50_000))),
        "tensors-.* cannot be read .its 50000 rows would take .* MiB, too many for",
    ),
}


EXPONENTS = {
    "far column": {"positions": [2**31 - 1], "values": [1]},
    "column": {"positions": [960], "values": [1]},
    "negative column": {"positions": [-(2**31)], "values": [1]},
    "order of columns": {"positions": [6, 5], "values": [1, 1]},
    "a column twice": {"positions": [5, 5], "values": [1, 1]},
    "too many values": {"positions": list(range(2000)), "values": [1] * 2000},
    "fewer values": {"positions": [5, 6], "values": [1]},
    "null": {"positions": [5, 6], "values": [1, None]},
    "null column": {"positions": [5, None], "values": [1, 1]},
    "negative": {"positions": [5, 6], "values": [3, -1]},
    "large": {"positions": [5], "values": [2**53 + 1]},
    "sums": {"positions": [5, 6, 7, 8], "values": [2**63 - 1] * 4},
    "order": {"step": lambda steps: steps[::-1]},
}


KINDS_WITH_EXPONENTS = ("grads", "weights", "grad_exponents", "weight_exponents")


def with_exponents(path):
    found = Finding("dead", Severity.WARNING, 1, 2, "grads", "blocks.0.weight", 1.0, 1.0, "m", "a")
    more = {"findings": [found], "fault": Fault("exception", "boom", 5, None, [], [])}
    return write_run(path, 3, 6, kinds=KINDS_WITH_EXPONENTS, precision=2, **more)


@pytest.mark.parametrize("change", EXPONENTS.values(), ids=EXPONENTS.keys())
def test_hostile_histograms_are_named_by_every_reader(change, tmp_path):
    path = with_exponents(tmp_path / "run")
    contents([read_run(path)])
    values("exponents", **change)(path)
    readers = [
        lambda run: run.exponents(),
        lambda run: list(run.precisions("weights")),
        lambda run: run.precision(),
        lambda run: contents([run]),
    ]
    said = r"exponents-0001-0000000000.parquet cannot be read \(it(s steps do not ascend| has values outside)"
    before = pa.total_allocated_bytes()
    for reader in readers:
        with pytest.raises(RunError, match=said):
            reader(read_run(path))
    assert pa.total_allocated_bytes() - before < 1 << 24


TENSORS = {
    **{
        f"{name} {x}": ("grads", {name: x}, name)
        for name in ("numel", "n_nan", "n_posinf")
        for x in (-1, 2**62)
    },
    "more than numel": ("grads", {"n_neginf": 64 * 64 + 1}, "n_neginf"),
    "stuck": ("updates", {"n_stuck": 64 * 64 + 1}, "n_stuck"),
    "negative update": ("updates", {"n_nonzero_g": -1}, "n_nonzero_g"),
    "large update": ("updates", {"n_nonzero_g": 2**62}, "n_nonzero_g"),
    "calls": ("activations", {"n_calls": -1}, "n_calls"),
    "channels": ("activations", {"n_channels": 2**53 + 1}, "n_channels"),
    **{f"{x} {name}": ("grads", {name: x}, name) for name in ("sumsq", "abs_max") for x in (-1.0, -math.inf)},
    "norm": ("grads", {"norm": -3.0}, "norm"),
    "squares of weights": ("updates", {"sumsq_b": -1.0}, "sumsq_b"),
    "fourth powers": ("activations", {"sum4": -1.0}, "sum4"),
}


@pytest.mark.parametrize(("kind", "changes", "name"), TENSORS.values(), ids=TENSORS.keys())
def test_a_number_that_no_tensor_has_is_refused_by_every_reader(kind, changes, name, tmp_path, capsys):
    path = with_all_kinds(tmp_path / "run")
    table = KINDS[kind].schema.name
    (file,) = (path / table).glob("*.parquet")
    kinds = pq.read_table(file)["kind"].to_pylist()
    # in one row
    place = kinds.index(kind)
    put = {
        column: lambda found, value=value: [*found[:place], value, *found[place + 1 :]]
        for column, value in changes.items()
    }
    values(table, **put)(path)
    said = f"{table}-0001-0000000000.parquet cannot be read .column {name} has"
    readers = [
        lambda run: run.table(table),
        lambda run: run.table(table, columns=list({"numel", "norm", name})),
    ]
    # records do without the norm
    readers += [lambda run: list(run.records())] * (name != "norm")
    for reader in readers:
        with pytest.raises(RunError, match=said):
            reader(read_run(path))
    cli.main(["verify", str(path)])
    assert f"column {name} has" in capsys.readouterr().out
    code = cli.main(["report", str(path), "-o", str(tmp_path / "page.html")])
    is_shown = name in {"numel", "abs_max", "norm"} or kind == "updates"
    assert code == Exit.UNREADABLE if is_shown else code in {Exit.OK, Exit.UNREADABLE}
    assert code == Exit.OK or f"column {name} has" in capsys.readouterr().err


def with_all_kinds(path):
    """Record activations and updates; the factor on the gradients is Inf and NaN in two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {
        "weights": True,
        "updates": True,
        "taps": Taps(model, {"all": torch.nn.Linear}),
        "rules": (),
        "ranks": False,
    }
    with Monitor(model, run_dir=path, **options) as monitor:
        for scale in (1.0, math.inf, math.nan, 1.0):
            optimizer.zero_grad()
            (model(torch.ones(2, 64)).sum() * 0.0).backward()
            monitor.record(inv_scale=torch.tensor(scale))
            optimizer.step()  # by 0
            monitor.advance(loss=1.0)
    return path


def test_numbers_that_are_not_finite_in_a_run_are_read(tmp_path):
    path = with_all_kinds(tmp_path / "run")
    run = read_run(path)
    table = run.tensors(kind="grads")
    assert table["abs_max"].to_pylist()[2:6] == pytest.approx([math.nan] * 4, nan_ok=True)
    assert len(list(run.records())) == 4
    assert document(*contents([run]))


@pytest.mark.parametrize("name", ["abs_max", "sumsq", "norm"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_magnitude_that_is_not_finite_is_shown(tmp_path, name, value):
    path = write_run(tmp_path / "run", 2, 4)
    values("tensors", **{name: value})(path)
    assert document(*contents([read_run(path)]))


# values that the format does not have: a RunError, or a value that every reader can show
ODD = [None, -1, 2**62, "\ud800\x1b[31m", [[]]]
if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
    ODD += [True, 1e300, {"a": None}, {}, "NaN", -1.5]
PLACES = [
    ("run.json", (), "version created model device versions every ranks"),
    ("run.json", (), "catalog thresholds attempts closed files"),
    ("run.json", ("catalog",), "names shapes dtypes taps kinds schemas"),
    *[("run.json", ("catalog", key), "0") for key in ("names", "shapes", "dtypes", "kinds", "schemas")],
    ("run.json", ("catalog", "kinds", 0), "name schema rows order option"),
    ("run.json", ("catalog", "schemas", 0), "name columns dtype flags storage"),
    ("run.json", ("catalog", "schemas", 0, "columns", 1), "name merge style unit signed number"),
    ("run.json", ("attempts",), "0"),
    ("run.json", ("attempts", 0), "attempt first_step started ended lost wrote"),
    ("run.json", ("thresholds",), "max_abs_exploding"),
    ("findings.json", (), "findings"),
    ("findings.json", ("findings",), "0"),
    ("findings.json", ("findings", 0), "attempt rule severity first_step last_step kind"),
    ("findings.json", ("findings", 0), "tensor value count worst_step message"),
    ("blackbox.json", (), "reason message step first_nonfinite attempt last"),
]
JSON = [(name, (*place, 0 if key == "0" else key)) for name, place, keys in PLACES for key in keys.split()]


def change_json(path, place, value):
    content = json.loads(path.read_text()) | {"digest": None}
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    path.write_text(json.dumps(content))


def show_everything(path, capsys):
    """Read and show a run in every way; a RunError is as good an answer."""
    with suppress(RunError):
        run = read_run(path)
        steps, records = run.steps, list(run.records())
        run.tensors()
        assert len(steps) == len(records)
        assert len(run.matrix("norm")[0]) <= len(steps)
        document(*contents([run]))
    for command in (["show"], ["watch", "--once"]):
        code = cli.main([command[0], str(path), *command[1:]])
        out, err = capsys.readouterr()
        assert code in {Exit.OK, Exit.FOUND, Exit.UNREADABLE}, err
        assert "\x1b[31m" not in out + err


@pytest.mark.parametrize(
    ("name", "place"), JSON, ids=lambda x: ".".join(map(str, x)) if type(x) is tuple else x
)
def test_odd_values_in_json_are_refused_or_shown(name, place, tmp_path, capsys):
    base = with_exponents(tmp_path / "base")
    for value in ODD:
        path = tmp_path / "run"
        shutil.copytree(base, path)
        change_json(path / name, place, value)
        show_everything(path, capsys)
        with suppress(RunError):
            write_run(path, 3, 2, kinds=KINDS_WITH_EXPONENTS, first=6)
        shutil.rmtree(path)


NUMBERS = {
    **{f"time {x}": ("steps", {"time": x}) for x in (math.nan, math.inf, -1e300)},
    **{f"loss {x}": ("steps", {"loss": x}) for x in (math.nan, -math.inf, 1e300)},
    "norm": ("steps", {"total_norm": math.nan}),
    "counts of a step": ("steps", {"n_nan": 2**63 - 1, "n_inf": 2**63 - 1, "numel": -1}),
    "nulls of a step": ("steps", {"n_nan": None, "numel": None, "total_norm": None}),
    "names of scalars": ("steps", {"scalars": [("\x1b[31m", 1.0), ("", math.nan), ("", 2.0)]}),
    "attempt": ("steps", {"attempt": -5}),
    "kinds of a step": ("steps", {"kinds": ["other", "grads", "grads", None]}),
    "no kinds of a step": ("steps", {"kinds": []}),
    "elements": ("tensors", {"numel": 2**63 - 1, "n_zero": -(2**63), "n_nan": 2**63 - 1}),
    "sums": ("tensors", {"sumsq": -1e300, "abs_max": -math.inf, "norm": math.nan}),
    "flags": ("tensors", {"flags": 2**31 - 1}),
    "negative flags": ("tensors", {"flags": -1}),
    "other names": ("tensors", {"name": "other"}),
    "other kinds": ("tensors", {"kind": "other"}),
    "other steps": ("tensors", {"step": -(2**63)}),
    "one step": ("tensors", {"step": 2}),
}


@pytest.mark.parametrize(("table", "changes"), NUMBERS.values(), ids=NUMBERS.keys())
def test_odd_numbers_in_tables_are_refused_or_shown(table, changes, tmp_path, capsys):
    path = with_exponents(tmp_path / "run")
    values(table, **changes)(path)
    show_everything(path, capsys)
    other = with_exponents(tmp_path / "other")
    assert cli.main(["diff", str(path), str(other)]) in {Exit.OK, Exit.FOUND, Exit.UNREADABLE}


def read_everything(path):
    run = read_run(path)
    assert run.findings == []
    assert run.blackbox is None
    run.steps  # noqa: B018
    run.matrix("norm")
    run.tensors()


@pytest.mark.parametrize(("damage", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_named_in_one_line(path, damage, said, monkeypatch):
    monkeypatch.setattr(parquet, "_LARGEST", 1 << 20)
    monkeypatch.setattr(segments, "_LARGEST", 1 << 20)
    damage(path)
    before = pa.total_allocated_bytes()
    with pytest.raises(RunError, match=said) as caught:
        read_everything(path)
    assert not re.search("[\n\x1b]", str(caught.value))
    assert caught.value.__cause__ is None
    assert pa.total_allocated_bytes() - before < 1 << 27


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_links_are_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / f".run.json.{os.getpid()}.tmp").symlink_to(other)
    prepare(run, run / "run.json", b"{}", sync=False)()
    assert (run / "run.json").read_text() == "{}"
    assert not (run / "run.json").is_symlink()
    (run / "run.json").unlink()
    (run / ".lock").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        write_run(run, 2, 4)
    assert other.read_text() == "kept"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["run.json", "findings.json", "blackbox.json", "steps", "tensors"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_read(path, name):
    file = path / name
    if file.is_dir():
        (file,) = file.glob("*.parquet")
    said = rf"{re.escape(str(file))} cannot be read \(it is not a regular file\)"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        make(file)
        with pytest.raises(RunError, match=said):
            read_everything(path)
