"""docs/how-to/fingerprints.md runs unchanged, and the demo finds the bit that it flips."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import gradiometer as gm
from support.pages import ROOT, blocks, execute, text
from support.processes import python

PAGE = "docs/how-to/fingerprints.md"
pytest.importorskip("pyarrow")


@pytest.fixture
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    state = random.getstate()
    yield
    random.setstate(state)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_in_a_folder")
def test_the_page_runs_and_says_what_it_prints(capsys):
    scope = execute(*blocks(PAGE))

    printed = capsys.readouterr().out
    assert "bits: identical for 20 steps\n" in printed
    assert "# bits: identical for 20 steps\n" in text(PAGE)
    assert "2 runs of the step are equal in all of" in printed
    assert printed.endswith("{}\n")
    assert scope["result"].identical
    assert json.loads(Path("checkpoint.json").read_text()) == gm.fingerprint(scope["state"])
    assert {name.partition(".")[0] for name in scope["inputs"]} == {"model", "x", "y"}
    assert torch.are_deterministic_algorithms_enabled()


def test_the_demo_names_the_step_and_the_tensor_of_the_flipped_bit():
    done = python(ROOT / "docs" / "fingerprints_demo.py")
    assert (done.returncode, done.stderr) == (0, "")
    same, parted = done.stdout.splitlines()
    assert same.endswith("bits: identical for 60 steps")
    assert parted.endswith("bits differ first at step 50: blocks.1.weight (weight), 1 tensor")
