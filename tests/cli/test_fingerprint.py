"""`gradiometer fingerprint`: files of torch.save and safetensors, and their comparison with stored texts."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

import gradiometer as gm
from gradiometer.cli import Exit

needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="needs safetensors"
)


@pytest.fixture
def call(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return functools.partial(call, "fingerprint")


@pytest.fixture
def state():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).bfloat16()
    return model.state_dict() | {"mask": torch.tensor([True, False, True])}


def test_the_table_has_a_row_for_each_tensor_and_value(call, state):
    torch.save({"model": state, "lr": 0.1}, "x.pt")
    code, out, err = call("x.pt")

    assert (code, err) == (Exit.OK, "")
    header, *rows = [line.split() for line in out.splitlines()]
    assert header == ["name", "dtype", "shape", "digits"]
    assert [row[0] for row in rows] == [*(f"model.{name}" for name in state), "lr"]
    assert [" ".join(row[1:]) for row in rows[:-1]] == list(gm.fingerprint(state).values())
    assert rows[-1] == ["lr", "0.1"]


@pytest.mark.parametrize("archive", [True, False], ids=["an archive", "of torch before 1.6"])
def test_a_file_of_torch_gives_the_same_as_the_function(call, state, archive):
    torch.save(state, "x.pt", _use_new_zipfile_serialization=archive)
    code, out, err = call("x.pt", "--json")

    assert (code, err) == (Exit.OK, "")
    assert json.loads(out) == gm.fingerprint(state)


@needs_safetensors
def test_a_safetensors_file_gives_the_same_as_the_function(call, state):
    from safetensors.torch import save_file

    save_file(state, "x.safetensors")
    code, out, err = call("x.safetensors", "--json")

    assert (code, err) == (Exit.OK, "")
    assert json.loads(out) == gm.fingerprint(state)


def test_one_tensor_and_a_list_of_tensors_have_positions_as_names(call):
    for content in (torch.ones(2), [torch.ones(2)]):
        torch.save(content, "x.pt")
        assert json.loads(call("x.pt", "--json")[1]) == gm.fingerprint([torch.ones(2)])


# --check


def test_what_is_as_stored(call, state, tmp_path):
    torch.save(state, "x.pt")
    (tmp_path / "saved.json").write_text(call("x.pt", "--json")[1])

    assert call("x.pt", "--check", "saved.json") == (Exit.OK, "x.pt: 8 entries as in saved.json\n", "")
    code, out, _ = call("x.pt", "--check", "saved.json", "--json")
    assert code == Exit.OK
    assert json.loads(out) == {"same": True, "compared": 8, "differing": [], "missing": [], "added": []}


def test_what_is_not_as_stored(call, state, tmp_path):
    (tmp_path / "saved.json").write_text(json.dumps(gm.fingerprint(state)))
    before = gm.fingerprint(state)["0.bias"]
    state["0.bias"].view(torch.int16)[4] ^= 1
    state["new"] = state.pop("mask")
    torch.save(state, "x.pt")
    code, out, err = call("x.pt", "--check", "saved.json")

    assert (code, err) == (Exit.FOUND, "")
    first, _, *rows = [line.rstrip() for line in out.splitlines()]
    assert first == "x.pt is not as in saved.json: 1 differs, 1 missing, 1 added"
    assert [row.split()[:2] for row in rows] == [["differs", "0.bias"], ["missing", "mask"], ["added", "new"]]
    assert before in rows[0]
    assert gm.fingerprint(state)["0.bias"] in rows[0]
    code, out, _ = call("x.pt", "--check", "saved.json", "--json")
    assert code == Exit.FOUND
    assert json.loads(out) == {
        "same": False,
        "compared": 7,
        "differing": ["0.bias"],
        "missing": ["mask"],
        "added": ["new"],
    }


# errors


def write_code(path):
    torch.save({"w": torch.ones(1), "config": argparse.Namespace(lr=0.1)}, path)


def write_script(path):
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path)


def write_cut(path):
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.filterwarnings("ignore:.torch\\.jit\\.:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_code, "x.pt cannot be read with weights_only=True: .*argparse.Namespace"),
        (write_script, "weights_only=True: .*TorchScript"),
        (write_cut, "x.pt cannot be read"),
        (lambda path: path.write_bytes(b""), "x.pt cannot be read"),
        (lambda path: path.write_text("hello"), "x.pt cannot be read"),
        (lambda path: torch.save(torch.eye(2).to_sparse_csr(), path), "cannot be read: '0' has layout"),
        (lambda path: path.mkdir(), "directory"),
        (lambda _: None, "No such file"),
    ],
    ids=["code", "TorchScript", "cut", "empty", "text", "a tensor that is refused", "folder", "missing"],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(refused, tmp_path, write, said):
    write(tmp_path / "x.pt")
    assert re.search(said, refused("x.pt"))


def test_a_damaged_file_is_read_or_an_error_that_names_it(call, state, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    codes = set()
    for place in range(0, len(whole), len(whole) // 100):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        code, _, err = call("x.pt")
        assert code == Exit.OK or (code == Exit.UNREADABLE and "x.pt" in err and len(err.splitlines()) == 1)
        codes.add(code)
    assert codes == {Exit.OK, Exit.UNREADABLE}


@needs_safetensors
@pytest.mark.parametrize("content", [None, b"", b"hello, this is text"], ids=["missing", "empty", "text"])
def test_a_safetensors_file_that_cannot_be_read(refused, tmp_path, content):
    if content is not None:
        (tmp_path / "x.safetensors").write_bytes(content)
    assert "x.safetensors" in refused("x.safetensors")


def test_without_the_package_it_says_what_to_install(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install 'gradiometer[safetensors]'" in refused("x.safetensors", code=Exit.MISSING)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "does not map names to fingerprints; write it with"),
        ('{"w": 1}', "does not map names"),
        ("[" * 10**5, ""),
        ('{"w": ' * 60 + "1" + "}" * 60, ""),
        ('{"w": 1' + "0" * 5000 + "}", ""),
        ("\x00", ""),
    ],
    ids=["cut", "list", "number", "deep", "deep for us", "long", "null"],
)
def test_stored_fingerprints_that_are_none_or_hostile_are_refused(refused, tmp_path, saved, said):
    torch.save({"w": torch.ones(1)}, "x.pt")
    (tmp_path / "saved.json").write_text(saved)
    assert refused("x.pt", "--check", "saved.json").startswith(f"gradiometer: saved.json {said}")


# files from others


def test_an_expanded_tensor_of_a_small_file_is_read_without_a_copy(call):
    x = torch.tensor([1.5, -2.0]).expand(2**40, 2)
    torch.save({"w": x}, "x.pt")
    code, out, err = call("x.pt", "--json")
    assert (code, err) == (Exit.OK, "")
    assert json.loads(out) == gm.fingerprint({"w": x})


def test_what_would_take_too_much_memory_or_time_is_refused(refused):
    sparse = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1), (2**40,), is_coalesced=True)
    windows = torch.zeros(2**21).as_strided((2**20, 2**20), (1, 1))
    for x, said in ((sparse, "'w' is sparse and would take 4194304 MiB"), (windows, "too many to read")):
        torch.save({"w": x}, "x.pt")
        assert re.fullmatch(f"gradiometer: x.pt cannot be read: .*{said}.*\n", refused("x.pt"))


def test_what_contains_itself_is_refused(refused):
    circle, around = [torch.ones(1)], {}
    circle.append(circle)
    around["a"] = around
    for content in (circle, {"a": circle}, around):
        torch.save(content, "x.pt")
        assert refused("x.pt").startswith("gradiometer: x.pt cannot be read")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "saved.json"])
def test_a_pipe_a_device_or_a_folder_is_refused(refused, name, tmp_path):
    torch.save({"w": torch.ones(1)}, "good.pt")
    arguments = ["good.pt", "--check", name] if name == "saved.json" else [name]
    for make in (os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero"), os.mkdir):
        make(name)
        assert name in refused(*arguments)
        (os.rmdir if (tmp_path / name).is_dir() else os.unlink)(name)
