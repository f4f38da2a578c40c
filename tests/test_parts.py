"""`make test`, `make check` and `make test-matrix` run every part, and a failure never looks like a pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import matrix
import parts
from parts import Part

ROOT = Path(__file__).parent.parent
PAIRS = (("1.0.0", "0.5.0"), ("2.0.0", "0.6.0"))
REASON = "The user requested (constraint) torch<=1.5"

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

MAKEFILE = """
run-good:
	@echo "=== 3 passed, 2 skipped in 0.10s ==="
run-bad:
	@echo "=== 1 failed, 1 error, 4 passed in 0.20s (0:00:00) ==="; exit 1
run-broken:
	@echo "make: no such tool"; exit 2
run-empty:
	@echo "=== 7 deselected in 0.01s ==="
lint:
	@echo "all is well"
"""


def make_all(folder, capfd, *names):
    (folder / "Makefile").write_text(MAKEFILE)
    code = parts.main(names, folder)
    rows = [line.split(maxsplit=5) for line in capfd.readouterr().out.splitlines()[-len(names) :]]
    return code, {name: (counts, result) for name, *counts, _, result in rows}


@needs_make
def test_parts_after_one_that_fails_are_made_too(tmp_path, capfd):
    code, found = make_all(tmp_path, capfd, "lint", "bad", "broken", "good")
    assert code == 1
    assert found == {
        "lint": (["-", "-", "-"], "ok"),
        "bad": (["4", "2", "0"], "FAILED"),
        "broken": (["-", "-", "-"], "FAILED"),
        "good": (["3", "0", "2"], "ok"),
    }


@needs_make
def test_parts_that_pass_are_a_pass(tmp_path, capfd):
    code, found = make_all(tmp_path, capfd, "good", "lint")
    assert (code, [result for _, result in found.values()]) == (0, ["ok", "ok"])


@needs_make
def test_a_part_without_a_test_fails(tmp_path, capfd):
    code, found = make_all(tmp_path, capfd, "empty", "good")
    assert (code, found["empty"][1]) == (1, "FAILED no test ran")


@pytest.mark.parametrize("profile", ["ci", "deep"])
def test_it_is_said_beforehand_how_long_it_takes(tmp_path, capfd, monkeypatch, profile):
    monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.setitem(parts.MINUTES, "good", 7)
    parts.main(["good", "lint"], tmp_path)
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("good, lint: ")
    assert ("about 8 minutes" in first) == (profile == "ci")
    assert ("hours" in first) == (profile == "deep")


def make_target(target, folder, *variables):
    """Run a target of the real Makefile with fake tests and linters, which only report that they ran."""
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL"}
    }
    python = folder / "python"
    # fails for `python -m ruff`
    python.write_text(f'#!/bin/sh\ntest "$2" = ruff && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    suite = folder / "suite"
    # fails on interpreted kernels
    suite.write_text('#!/bin/sh\necho "flags: $*, $HYPOTHESIS_PROFILE"\necho "=== 1 passed in 0.01s ==="\n')
    suite.write_text(f'{suite.read_text()}test -z "$TRITON_INTERPRET"\n')
    suite.chmod(0o755)
    environment.pop("TRITON_INTERPRET", None)
    environment.pop("HYPOTHESIS_PROFILE", None)
    command = [
        "make",
        "-C",
        ROOT,
        target,
        "DEV=",
        f"PY={python}",
        f"PYTEST={suite} $(PYTEST_FLAGS)",
        *variables,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    return done.returncode, lines


@needs_make
@pytest.mark.parametrize(("target", "count"), [("test", 4), ("check", 5)])
def test_the_makefile_makes_all_parts(tmp_path, target, count):
    code, lines = make_target(target, tmp_path)
    assert code != 0
    assert "minutes on two cores" in lines[0]
    rows = [line.split() for line in lines[-count:]]
    failed = {"plain": "ok", "interpreted": "FAILED", "executed": "ok", "ranks": "ok"}
    assert {row[0]: row[-1] for row in rows} == ({"lint": "FAILED"} if target == "check" else {}) | failed


@needs_make
def test_the_deep_profile_reaches_every_part(tmp_path):
    code, lines = make_target("test-deep", tmp_path, "PYTEST_FLAGS=-k some")
    assert code != 0
    said = [line for line in lines if line.startswith("flags: ")]
    # kernels are executed for four GPUs
    assert len(said) == 7
    assert all(line.startswith("flags: -k some --timeout=0 ") for line in said)
    assert all(line.endswith(", deep") for line in said)


# pairs of torch and triton


def results(capfd):
    """Return the rows of the table and the text below it."""
    rows, _, below = capfd.readouterr().out.rpartition("torch  ")[2].partition("\n\n")
    return [row.split(maxsplit=7) for row in rows.splitlines()[1:]], below.strip()


def matrix_of(monkeypatch, tmp_path, refused, *, ok=True):
    """Run the matrix on two pairs; pip rejects those in ``refused``."""

    def install(env, pair, *, reuse):
        assert not reuse
        if pair in refused:
            raise matrix.RefusedError(REASON)
        return env / "python"

    monkeypatch.setattr(matrix, "PAIRS", PAIRS)
    monkeypatch.setattr(matrix, "install", install)
    monkeypatch.setattr(matrix, "matches", lambda *_: True)
    monkeypatch.setattr(matrix, "versions", lambda _: None)
    monkeypatch.setattr(matrix, "make", lambda name, *_: Part(name, ok, 1.0, {"passed": 5, "failed": not ok}))
    return matrix.main(["--env-dir", str(tmp_path)])


def test_a_refused_pair_is_told_by_name_and_the_others_run(monkeypatch, tmp_path, capfd):
    assert matrix_of(monkeypatch, tmp_path, PAIRS[1:]) == 0
    rows, below = results(capfd)
    assert [row[:3] for row in rows] == [[*PAIRS[0], part] for part in matrix.PARTS] + [[*PAIRS[1], "all"]]
    assert [row[-1] for row in rows] == ["ok", "ok", "ok", f"REFUSED by pip: {REASON}"]
    assert rows[-1][3:6] == ["-", "-", "-"]
    assert below.endswith("refused by this machine's package settings: torch 2.0.0 with triton 0.6.0")


def test_where_all_pairs_are_refused_it_fails(monkeypatch, tmp_path, capfd):
    assert matrix_of(monkeypatch, tmp_path, PAIRS) == 1
    rows, below = results(capfd)
    assert len(rows) == 2
    assert all(pair[0] in below for pair in PAIRS)


def test_a_refused_pair_hides_no_failure(monkeypatch, tmp_path):
    assert matrix_of(monkeypatch, tmp_path, PAIRS[1:], ok=False) == 1


def test_without_a_refusal_nothing_is_said_of_one(monkeypatch, tmp_path, capfd):
    assert matrix_of(monkeypatch, tmp_path, ()) == 0
    rows, below = results(capfd)
    assert (len(rows), below) == (6, "")


def wheel(folder, name, version):
    """Write an empty package."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("limit", "refused"), [("torch<=1.5", True), pytest.param("numpy<=1.5", False, marks=pytest.mark.deep)]
)
def test_what_pip_says_of_a_constraint_is_the_reason(tmp_path, monkeypatch, limit, refused):
    pytest.importorskip("pip")
    for version in ("1.0.0", "2.0.0"):
        wheel(tmp_path, "torch", version)
    (tmp_path / "constraints.txt").write_text(limit)
    # independent of this machine's settings, and no network
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--target",
        tmp_path / "env",
    ]
    wanted = "torch==2.0.0" if refused else "torch==3.0.0"
    error = matrix.RefusedError if refused else subprocess.CalledProcessError
    with pytest.raises(error) as raised:
        matrix._pip([*pip, wanted])
    # a missing version is not a setting of this machine
    assert (str(raised.value) == REASON) == refused
    matrix._pip([*pip, "torch==1.0.0"])
    assert (tmp_path / "env" / "torch-1.0.0.dist-info").is_dir()
