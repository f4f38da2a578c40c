"""Runs that were made to harm their reader: one `RunError` that names the file, and little memory."""

from __future__ import annotations

import json
import os
import re

import pytest

pytest.importorskip("pyarrow")

from gradiometer.runs import segments, tables
from gradiometer.runs.directory import prepare
from gradiometer.runs.reader import RunError, read_run
from support.synthetic_run import as_without_digests, edit_info, write_run

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def path(tmp_path):
    path = write_run(tmp_path / "run", 2, 4)
    as_without_digests(path)
    return path


def rewrite(table, change):
    def damage(path):
        file = path / table / f"{table}-0001-0000000000.parquet"
        pq.write_table(change(pq.read_table(file)), file, store_schema=True)

    return damage


def padded(path):
    """Put bytes that no row refers to before the footer."""
    file = path / "tensors" / "tensors-0001-0000000000.parquet"
    data = file.read_bytes()
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    file.write_bytes(data[:-footer] + os.urandom(3 << 20) + data[-footer:])


def long_footer(path):
    file = path / "tensors" / "tensors-0001-0000000000.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:4] + b"\0" * (3 << 20) + (2 << 20).to_bytes(4, "little") + data[-4:])


def replaced(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


def write_json(name, text):
    return lambda path: (path / name).write_text(text)


def info(**changes):
    return lambda path: edit_info(path, **changes)


def roster(names):
    return {
        "names": names,
        "shapes": [[1]] * len(names),
        "dtypes": ["float32"] * len(names),
        "kinds": ["grads"],
    }


HOSTILE = {
    "deep": (write_json("blackbox.json", "[" * 100_000), "blackbox.json cannot be read"),
    "less deep": (
        write_json("blackbox.json", '{"a":' * 200 + "1" + "}" * 200),
        r"blackbox.json cannot be read \(it is nested more than",
    ),
    "long integer": (
        write_json("findings.json", '[{"attempt": ' + "9" * 400 + "}]"),
        r"findings.json cannot be read \(the integer 999999999999... is too long",
    ),
    "steps of findings": (
        write_json(
            "findings.json",
            json.dumps(
                [
                    dict.fromkeys(("attempt", "rule", "kind", "tensor", "value", "threshold"), 0)
                    | {"first_step": "x", "last_step": []}
                ]
            ),
        ),
        "findings.json has unexpected content",
    ),
    "names": (info(roster=roster(["w", "w"])), r"run.json has unexpected content .*roster: names"),
    "no names": (info(roster=roster([[], 3])), r"run.json has unexpected content"),
    "many tensors": (
        info(roster=roster([f"w{i}" for i in range(90_000)])),
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
    "bomb": (
        rewrite("tensors", lambda t: t.take(pa.repeat(0, 50_000))),
        "tensors-.* cannot be read .its 50000 rows would take .* MiB, too many for",
    ),
}


def read_everything(path):
    run = read_run(path)
    assert run.findings == []
    assert run.blackbox is None
    run.steps  # noqa: B018
    run.matrix("norm")
    run.tensors()


@pytest.mark.parametrize(("damage", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_named_in_one_line(path, damage, said, monkeypatch):
    monkeypatch.setattr(tables, "_LARGEST", 1 << 20)
    monkeypatch.setattr(segments, "_LARGEST", 1 << 20)
    damage(path)
    before = pa.total_allocated_bytes()
    with pytest.raises(RunError, match=said) as caught:
        read_everything(path)
    assert not re.search("[\n\x1b]", str(caught.value))
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
@pytest.mark.parametrize("name", ["run.json", "findings.json", "steps", "tensors"])
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
