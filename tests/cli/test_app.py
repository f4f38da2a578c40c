"""The command line: the output of each command, as a table and as JSON, and exit codes."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import webbrowser

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("typer")

from rich.console import Console

import gradiometer as gm
from gradiometer import demo, web
from gradiometer.cli import Exit, commands, doctor, show, tables
from gradiometer.cli import app as cli
from gradiometer.runs.reader import read_run
from support.findings import finding
from support.processes import PATH, python
from support.synthetic_run import NEGATIVES, write_run

CULPRIT = finding(15, message="3 NaN", advice="skip it")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a"
    return write_run(path, steps=20, nonfinite_at=15, findings=[CULPRIT], kinds=("grads", "weights"))


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("GRADIOMETER_DEBUG", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call_json(call):
    def call_json(*arguments, code=0):
        found, out, err = call(*arguments, "--json")
        assert (found, err) == (code, "")
        return json.loads(out, parse_constant=pytest.fail)

    return call_json


# show


def test_show_prints_the_report_of_the_last_step_with_its_scalars(call, run):
    code, out, err = call("show", run)

    assert (code, err) == (Exit.OK, "")
    record = read_run(run).record(19)
    assert out.startswith("step 19 ")
    assert f"loss {record.loss:.5g}" in out
    assert record.report().to_string() in out
    # without a step, the findings of the whole run
    assert "step 15: 3 NaN" in out


def test_show_of_a_step_has_what_was_found_in_it(call, run):
    _, out, _ = call("show", run, "--step", 15, "--top", 3, "--name", "0|1")

    assert "error  step 15: 3 NaN" in out
    assert "skip it" in out
    assert "3 NaN" not in call("show", run, "--step", 18)[1]
    assert "its update was skipped" in out
    assert "4 of 20 tensors match --name" in out
    assert re.search(r"blocks.0.weight .* 3 .* NAN EXPLODING", out)


def test_show_as_json(call_json, run):
    found = call_json("show", run, "--step", 15, "--top", 3, "--kind", "grads")

    assert set(found) == {
        *("run", "step", "time", "recorded", "skipped", "scalars", "kind", "report", "findings", "nearest"),
        *("attempt", "attempts"),
    }
    assert (found["step"], found["skipped"], found["scalars"]["loss"]) == (15, True, "NaN")
    assert found["findings"] == [CULPRIT.to_dict()]
    assert len(found["report"]["tensors"]) == 3
    assert found["report"]["total_norm"] == "NaN"
    assert found["report"]["tensors"]["blocks.0.weight"]["n_nan"] == 3


def test_show_of_weights_is_another_table(call_json, run):
    grads, weights = (call_json("show", run, "--kind", kind)["report"] for kind in ("grads", "weights"))

    assert grads["measured"]
    assert weights["total_norm"] == read_run(run).record(19).total("norm", "weights")
    assert weights["total_norm"] != grads["total_norm"]


def in_console(shown, width):
    """Return the lines of a step in a terminal."""
    console = Console(width=width, force_terminal=True, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(tables.shown(shown, 20, console))
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()


@pytest.fixture(scope="module")
def run_of_kinds(tmp_path_factory):
    kinds = ("grads", "updates", "activations", "grad_exponents", NEGATIVES)
    return write_run(tmp_path_factory.mktemp("runs") / "kinds", tensors=6, steps=3, kinds=kinds)


@pytest.mark.parametrize(
    ("kind", "headings"),
    [
        ("updates", "update ratio rms abs max cos(u,-g) unchanged % stuck % NaN ±Inf"),
        ("activations", "rms abs max outlier kurtosis zero % dead channels calls NaN ±Inf"),
        ("grad_exponents", "fp16 bf16 e4m3 e5m2"),
        # its derived value is not known, nor are its headings for a table
        ("negatives", "elements negative sum negative abs max negative"),
    ],
)
@pytest.mark.parametrize("width", [None, 70])
def test_show_of_any_kind_is_its_own_table(call, call_json, run_of_kinds, kind, headings, width):
    _, out, _ = call("show", run_of_kinds, "--kind", kind)
    record = read_run(run_of_kinds).record(2)
    assert record.report(kind).to_string() in out
    assert headings.split() == [x for x in out.split("\n")[4].split() if x in headings.split()]
    found = call_json("show", run_of_kinds, "--kind", kind, "--top", 2)
    (rows,) = [x for x in found["report"].values() if isinstance(x, dict) and {*x} & {*record.names(kind)}]
    assert len(rows) == 2
    if width is None:
        return
    lines = in_console(show.look(read_run(run_of_kinds), kind=kind), width)
    assert max(map(len, lines)) <= width
    names = {line.split()[0] for line in lines if line}
    assert {*record.report(kind).names} <= names


def test_show_of_histograms_is_of_a_step_that_has_some(call, tmp_path):
    path = write_run(tmp_path / "run", 4, 9, kinds=("grads", "grad_exponents"), precision=3)

    assert call("show", path)[1].startswith("step 8 ")
    _, out, _ = call("show", path, "--kind", "grad_exponents")
    assert out.startswith("step 6 ")
    assert read_run(path).record(6).report("grad_exponents").to_string() in out
    assert (
        "the nearest steps that have tensors: 3 and 6"
        in call("show", path, "--kind", "grad_exponents", "--step", 4)[1]
    )


def test_a_step_without_tensors_says_where_there_are_some(call, tmp_path):
    path = write_run(tmp_path / "run", steps=20, every=7)

    assert call("show", path)[1].startswith("step 14 ")
    assert "the nearest steps that have tensors: 14" in call("show", path, "--step", 19)[1]
    assert "7 and 14" in call("show", path, "--step", -10)[1]


@pytest.mark.parametrize("width", [80, 60, 132])
def test_in_a_terminal_a_table_is_no_wider_than_it(run, width):
    lines = in_console(show.look(read_run(run), 15), width)

    rows = [line for line in lines if line.startswith("blocks.")]
    assert max(map(len, lines)) <= width
    assert len(rows) == 20
    assert "NAN" in rows[0]
    assert any("rms" in line for line in lines) == (width == 132)


# diff


def test_diff_of_equal_and_of_different_runs(call, call_json, run, tmp_path):
    code, out, _ = call("diff", run, run)
    assert code == Exit.OK
    assert "Everything that both runs recorded is equal. Compared exactly" in out

    other = write_run(tmp_path / "b", steps=20, seed=1, kinds=("grads", "weights"))
    code, out, err = call("diff", run, other, "--top", 2, "--ignore", "loss|weights")
    assert (code, err) == (Exit.FOUND, "")
    assert "The runs first differ at step 0." in out
    assert re.search(r"^1 +blocks\.0\.weight +norm ", out, re.MULTILINE)
    assert "38 more differ in this step" in out

    found = call_json("diff", run, other, code=1)
    assert (found["same"], found["step"]) == (False, 0)
    assert found["first"][0]["name"] == "blocks.0.weight"
    assert [d["name"] for d in found["scalars"]] == ["loss", "skipped"]
    assert {"a", "b", "rtol", "common", "compared", "tensors", "missing", "total_norm"} < set(found)


def test_diff_tells_of_runs_with_nothing_in_common(call, run, tmp_path):
    later = write_run(tmp_path / "later", steps=5, first=100)
    other = write_run(tmp_path / "other", steps=20, names=["a", "b"])

    for there, what in (
        (later, f"no step in common: {run} has 20 steps from 0 to 19, and {later} 5 steps from 100"),
        (other, f"{other} b.grad, a.grad"),
    ):
        code, out, err = call("diff", run, there)
        assert (code, out) == (Exit.UNREADABLE, "")
        assert what in err


def test_diff_compares_bits_if_both_runs_have_fingerprints(call, call_json, tmp_path):
    a = write_run(tmp_path / "a", tensors=4, steps=1200, fingerprint=True, every=2)
    b = write_run(tmp_path / "b", tensors=4, steps=1000, fingerprint=True, every=2, seed=1)
    shorter = write_run(tmp_path / "shorter", tensors=4, steps=256, fingerprint=True, every=2)
    without = write_run(tmp_path / "without", tensors=4, steps=256, every=2)

    code, out, err = call("diff", a, a)
    assert (code, err) == (Exit.OK, "")
    said = "Bits: identical for 600 steps; 600 were not recorded. Compared by fingerprint: 4 tensors."
    assert out.endswith(f"\n{said}\n")
    code, out, _ = call("diff", a, b)
    assert code == Exit.FOUND
    assert "Bits differ first at step 0: blocks.1.bias.grad (gradient), 4 tensors." in out
    assert "Statistics or scalars first differ at step 0." in out
    assert "only the 1,000 common steps are compared: A has 200 more" in out
    code, out, _ = call("diff", a, without)
    assert "only the 256 common steps are compared: A has 944 more" in out
    said = "Only statistics were compared, not bits: B has no fingerprints. Monitor(fingerprint=True) records"
    assert said in out
    assert "not bits: a relative tolerance leaves fingerprints out" in call("diff", a, a, "--rtol", 1e-3)[1]
    assert "only the 256 common steps" in call("diff", shorter, shorter.parent / "a")[1]

    found = call_json("diff", a, b, code=1)
    assert (found["same"], found["identical"]) == (False, False)
    assert found["bits"] == {"step": 0, "name": "blocks.1.bias.grad", "kind": "grads", "tensors": 4}
    found = call_json("diff", a, a)
    assert (found["same"], found["identical"]) == (True, True)
    assert found["verdict"] == "bits: identical for 600 steps; 600 were not recorded"


# report, watch, doctor, demo


def test_report_writes_the_page_and_prints_where(call, call_json, run, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address) or True))
    monkeypatch.setattr(web, "write_page", write_small_page)
    page = tmp_path / "page.html"

    assert call("report", run) == (0, f"{run / 'report.html'}\n", "")
    assert call("report", run, "-o", page, "--open")[1] == f"{page}\n"
    assert opened == [page.as_uri()]
    found = call_json("report", run, "-o", page)
    assert found == {"page": str(page), "bytes": 4, "opened": False}


def write_small_page(run, path):
    path = run.path / "report.html" if path is None else path
    path.write_text("page")
    return path


def test_two_runs_are_one_page(call, call_json, run, tmp_path):
    other = write_run(tmp_path / "b", steps=20)

    page, both = tmp_path / "page.html", run / "comparison.html"
    assert call("report", run, "-o", page)[0] == 0
    assert page.read_text().startswith("<!")
    assert call("report", run, other) == (0, f"{both}\n", "")
    assert "<title>a and b \u2013 gradiometer</title>" in both.read_text(encoding="utf-8")
    assert call_json("report", run, other, "-o", page)["page"] == str(page)


def test_watch_once(call, call_json, run):
    code, out, _ = call("watch", run, "--once")

    assert code == Exit.OK
    assert "closed" in out
    assert call_json("watch", run, "--once")["step"] == 19
    # the run is closed, so watch ends without --once
    assert call("watch", run)[1].startswith("step 19  ")


def test_doctor(call, call_json, monkeypatch, tmp_path):
    found = doctor.Doctor(
        versions={"torch": "2.13.0", "triton": None},
        devices=[doctor.Device("cpu", "a CPU", "eager PyTorch", "in hardware", None, None, True, 1.5)],
        triton="triton is not installed",
        compiler=None,
        trace_autograd_ops=True,
        interpreted=False,
        packages={"wandb": {"version": None, "extra": "wandb", "use": "the sink"}},
        run_dir=str(tmp_path),
        free=2**31,
        problems=[],
    )
    monkeypatch.setattr(doctor, "examine", lambda _: found)

    code, out, _ = call("doctor", tmp_path)
    assert code == Exit.OK
    assert "pip install 'gradiometer[wandb]'" in out
    assert f"2.0 GiB free at {tmp_path}" in out
    assert "no problem found" in out
    assert call_json("doctor")["healthy"] is True

    found.problems.append(doctor.Problem("no compiler", "install one"))
    code, out, _ = call("doctor")
    assert code == Exit.FOUND
    assert "no compiler\n      install one" in out
    assert call_json("doctor", code=1)["problems"] == [{"what": "no compiler", "fix": "install one"}]


@pytest.mark.parametrize(("code", "passed"), [(0, True), (1, False)])
def test_demo_is_given_its_options_and_its_code_is_ours(call, monkeypatch, code, passed):
    given = []

    def main(arguments, prog):
        assert prog == "gradiometer demo"
        given.append(list(arguments))
        sys.stdout.write("the demo\n")
        return code

    monkeypatch.setattr(demo, "main", main)

    assert call("demo", "--steps", "12", "--device", "cpu") == (code, "the demo\n", "")
    found, out, err = call("demo", "--json", "--steps", 20)
    assert (found, json.loads(out), err) == (code, {"passed": passed}, "the demo\n")
    assert given == [["--steps", "12", "--device", "cpu"], ["--steps", "20"]]


def test_the_demo_has_its_own_help_and_its_own_complaints(capsys):
    for arguments, code, says in ((["--help"], 0, "--backend"), (["--steps", "3"], 2, "at least 10")):
        with pytest.raises(SystemExit) as end:
            cli.main(["demo", *arguments])
        assert end.value.code == code
        said = "".join(capsys.readouterr())
        assert says in said
        assert said.startswith("usage: gradiometer demo ")


# errors and exit codes


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("show {run} --step 20", Exit.UNREADABLE, "no step 20; it has 20, from 0 to 19"),
        ("show {run} --step -21", Exit.UNREADABLE, "no step -21"),
        ("show {run} --kind updates", Exit.UNREADABLE, "has no 'updates'; choose from grads, weights"),
        ("show {run} --kind nix", Exit.UNREADABLE, "has no 'nix'; choose from grads, weights"),
        ("show {run} --name nix", Exit.UNREADABLE, "no tensor of step 19 has a name that matches 'nix'"),
        ("show {run} --name (", Exit.USAGE, "--name '(' is not a valid regular expression"),
        ("show {none}", Exit.UNREADABLE, "there is no such folder"),
        ("watch {none}", Exit.UNREADABLE, "there is no such folder"),
        ("report {none}", Exit.UNREADABLE, "there is no such folder"),
        ("report {run} {none}", Exit.UNREADABLE, "there is no such folder"),
        ("report {run} -o {none}/page", Exit.UNREADABLE, "there is no folder {none}; create it first"),
        ("shw", Exit.USAGE, "No such command 'shw'"),
        ("show", Exit.USAGE, "Missing argument 'RUN'; see gradiometer show --help"),
        ("show x --nix", Exit.USAGE, "No such option: --nix"),
        ("diff x y --rtol -1", Exit.USAGE, "--rtol"),
        ("diff {run} {run} --rtol inf", Exit.USAGE, "--rtol"),
        ("diff {run} {run} --rtol nan", Exit.USAGE, "--rtol"),
    ],
)
def test_what_cannot_be_done_is_one_line(refused, run, tmp_path, words, code, says):
    places = {"run": run, "none": tmp_path / "none"}

    assert says.format(**places) in refused(*words.format(**places).split(), code=code)


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), Exit.INTERRUPTED, ""),
        (PermissionError(13, "Permission denied", "x.html"), Exit.UNREADABLE, "Permission denied"),
        (
            ModuleNotFoundError("needs pyarrow: pip install 'gradiometer[monitor]'"),
            Exit.MISSING,
            "gradiometer[monitor]",
        ),
        (RuntimeError("two\nlines"), Exit.FAILED, "RuntimeError: two lines (gradiometer --debug"),
        (ImportError("cannot import name 'x'"), Exit.FAILED, "ImportError: cannot import name"),
    ],
    ids=["ctrl-c", "permission", "package", "bug", "import"],
)
def test_what_goes_wrong_in_a_command_has_a_code(call, run, monkeypatch, raised, code, says):
    def fail(*_):
        raise raised

    monkeypatch.setattr(web, "write_page", fail)

    found, out, err = call("report", run)

    assert (found, out) == (code, "")
    assert says in err
    assert err.count("\n") == (1 if says else 0)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_with_debug_an_error_is_raised(run, monkeypatch, how):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(web, "write_page", fail)
    monkeypatch.setenv("GRADIOMETER_DEBUG", "1" if how == "variable" else "0")

    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["report", str(run), *(["--debug"] if how == "option" else [])])


def test_without_typer_one_line_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from gradiometer.cli import main; sys.exit(main())"
    done = python("-c", code)

    assert (done.returncode, done.stdout) == (Exit.MISSING, "")
    says = "The command line needs typer, which is not installed: pip install 'gradiometer[monitor]'"
    assert done.stderr == f"gradiometer: {says}\n"


@pytest.mark.parametrize("package", ["rich.console", "pyarrow"])
def test_without_another_package_one_line_says_so(refused, run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)

    assert "pip install 'gradiometer[monitor]'" in refused("show", run, code=Exit.MISSING)


@pytest.mark.parametrize(
    ("command", "reader"),
    [
        ("show {big} --top 0 --json", "head -c 20"),  # more than a pipe holds
        pytest.param("diff {run} {run}", "true", marks=pytest.mark.deep),
        pytest.param("--help", "true", marks=pytest.mark.deep),
        ("--version", "true"),
    ],
)
def test_a_reader_that_leaves_is_no_error(run, tmp_path, command, reader):
    big = write_run(tmp_path / "big", steps=2, tensors=400) if "big" in command else None
    # the reader exits first, so that the command writes to a pipe without a reader
    script = f"({reader}); exec 0<&-; sleep 0.1"
    command = f"{sys.executable} -m gradiometer {command.format(run=run, big=big)}"
    done = subprocess.run(
        ["bash", "-c", f"{command} | ({script}); echo ${{PIPESTATUS[0]}}"],  # noqa: S607 whichever bash
        env=os.environ | PATH,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stdout.endswith(f"{Exit.PIPE.value}\n")
    assert done.stderr == ""


def test_without_a_stdout_one_line_says_so(capsys, run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    code = cli.main(["show", str(run)])
    monkeypatch.undo()

    assert code == Exit.UNREADABLE
    said = "stdout is closed, so nothing can be printed: redirect it to a file or a terminal"
    assert capsys.readouterr().err == f"gradiometer: {said}\n"


def test_help_version_and_no_command(call):
    assert call("--version") == (0, f"gradiometer {gm.__version__}\n", "")
    code, out, _ = call()
    assert code == 0
    for command in ("demo", "report", "serve", "watch", "show", "diff", "fingerprint", "doctor"):
        assert command in out
    assert call("--help")[1] == out
    for command in ("report", "serve", "watch", "show", "diff", "doctor"):
        assert "--json" in call(command, "--help")[1]


def test_python_m_is_the_same(run):
    done = python("-m", "gradiometer", "show", run, "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 19


def in_terminal(*arguments, end_with):
    """Run a command in a terminal, send it a signal once it shows a frame; return exit code and output."""
    master, slave = pty.openpty()
    size = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-m", "gradiometer", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | PATH | size,
    )
    os.close(slave)
    shown, sent, deadline = b"", False, time.monotonic() + 200
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            try:
                part = os.read(master, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
        if not sent and b"worst first" in shown:
            child.send_signal(end_with)
            # a busy machine may have needed most of the time before the signal: extend the deadline
            sent, deadline = True, time.monotonic() + 200
    try:
        code = child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        pytest.fail(f"{'still running after the signal' if sent else 'no frame'}: {shown.decode()!r}")
    finally:
        os.close(master)
    return code, shown.decode()


def test_ctrl_c_ends_a_watch_quietly(tmp_path):
    path = write_run(tmp_path / "run", steps=20, close=False)

    code, shown = in_terminal("watch", path, end_with=signal.SIGINT)

    assert code == Exit.INTERRUPTED
    assert "being written" in shown
    assert "Traceback" not in shown
    assert "Aborted" not in shown


@pytest.fixture
def _sigint():
    # a shell that starts pytest in the background ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize(
    ("module", "name", "command"),
    [
        (cli, "_app", "watch"),
        (commands, "read_run", "watch"),
        (commands, "_console", "watch"),
        # while the arguments are read
        (commands, "_version", "--version"),
    ],
)
def test_ctrl_c_is_quiet_wherever_it_comes(call, run, monkeypatch, module, name, command):
    def interrupt(_=None):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, name, interrupt)

    code, out, err = call(command, run)
    # typer ends the line
    assert (code, out, err.strip()) == (Exit.INTERRUPTED, "", "")


def test_colours_are_for_terminals_and_can_be_switched_off(call, run, monkeypatch):
    plain = call("show", run, "--step", 15)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = call("show", run, "--step", 15)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    switched_off = call("show", run, "--step", 15)[1]

    assert "\x1b[" not in plain
    assert "\x1b[31m" in coloured
    assert "\x1b[31m" not in switched_off


def test_numbers_are_short_and_tell_zero_from_small():
    numbers = [tables.number(x) for x in (0.0, -0.0, 1e-9, 0.1234567, 1234567.0, math.nan, -math.inf, None)]
    assert numbers == ["0", "0", "1e-9", "0.123", "1.23e6", "nan", "-inf", "-"]
