"""Help and completion run without torch, and the package is the same in the process of a command."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("typer")

import gradiometer as gm
from support.processes import SOURCE, python


def process(*arguments, **environment):
    done = python(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done


def imported(*arguments, **environment):
    """Run a command; return its output and the modules that it imported."""
    done = process("-X", "importtime", "-m", "gradiometer", *arguments, **environment)
    return done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["show", "--help"], ["precision", "--help"], ["--version"], []]
)
def test_help_needs_no_torch(arguments):
    out, modules = imported(*arguments)

    assert ("Usage: gradiometer" in out) != (out == f"gradiometer {gm.__version__}\n")
    assert "gradiometer.cli.app" in modules
    assert not {"torch", "numpy", "rich", "pyarrow"} & modules


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("gradiometer d", ["demo", "diff", "doctor"]),
        ("gradiometer show RUN --kind ", ["grads", "weights", "updates", "weight_exponents"]),
        ("gradiometer precision RUN --kind ", ["weights"]),
        ("gradiometer show none --kind ", []),
        ("gradiometer precision x --format ", ["fp16", "bf16", "e4m3", "e5m2"]),
    ],
)
def test_completion_needs_no_torch(words, completions, tmp_path):
    kinds = [
        {"name": name, "of": of, "schema": schema}
        for name, of, schema in (
            ("grads", "grads", "tensors"),
            ("weights", "grads", "tensors"),
            ("updates", "grads", "pairs"),
            ("weight_exponents", "weights", "exponents"),
        )
    ]
    (tmp_path / "run.json").write_text(json.dumps({"catalog": {"kinds": kinds}}))
    words = words.replace("RUN", str(tmp_path))
    words = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    out, modules = imported(_GRADIOMETER_COMPLETE="complete_bash", **words)

    assert out.split() == completions
    assert "torch" not in modules


# what a command's process sees of the package

IN_A_COMMAND = """
import sys
sys.argv = [PROGRAM]
import gradiometer as gm
"""


@pytest.mark.parametrize("program", ["/usr/bin/gradiometer", "gradiometer.exe"])
def test_in_a_command_names_are_imported_when_they_are_used(program):
    code = f"""{IN_A_COMMAND.replace("PROGRAM", repr(program))}
assert "torch" not in sys.modules
assert set(gm.__all__) <= set(dir(gm)), dir(gm)
assert gm.__version__ and "torch" not in sys.modules
assert not hasattr(gm, "nothing")
namespace = {{}}
exec("from gradiometer import *", namespace)
from gradiometer import checks, columns, control, distributed, integrations, monitor, recorder, rules, runs
from gradiometer import sinks, stats, web
homes = [checks, columns, control, distributed, integrations, monitor, recorder, rules, runs, stats, web]
for name in gm.__all__:
    if name not in ("rules", "sinks", "__version__"):
        home = next(home for home in homes if name in home.__all__)
        assert namespace[name] is getattr(gm, name) is getattr(home, name), name
assert (gm.rules, gm.sinks) == (rules, sinks)
import pickle
assert pickle.loads(pickle.dumps(gm.Thresholds())) == gm.Thresholds()
assert pickle.loads(b"cgradiometer\\nThresholds\\n.") is gm.Thresholds
"""
    process("-c", code)


@pytest.mark.parametrize("argv", [["train.py"], [""], [], ["-m"]])
def test_in_other_processes_everything_is_imported_at_once(argv):
    # so that the ops are there for a saved artifact that needs them
    code = f"""
import sys
sys.argv = {argv!r}
import gradiometer
import torch
assert "Monitor" in vars(gradiometer) and "__getattr__" not in vars(gradiometer)
torch.ops.gradiometer.tensor_stats.default
"""
    process("-c", code)


def test_a_package_that_imports_it_when_it_is_run_gets_everything(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import gradiometer")
    code = "import gradiometer; print('Monitor' in vars(gradiometer))"
    (tmp_path / "mine" / "__main__.py").write_text(code)

    assert process("-m", "mine", PYTHONPATH=f"{SOURCE}{os.pathsep}{tmp_path}").stdout == "True\n"


def test_a_name_that_is_imported_in_a_trace_breaks_no_graph():
    code = f"""{IN_A_COMMAND.replace("PROGRAM", "'gradiometer'")}
import torch
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
p = torch.nn.Parameter(torch.ones(4))
p.grad = torch.ones(4)
@torch.compile(fullgraph=True, backend=backend)
def norm(x):
    return gm.collect_grads([("p", p)]).norm + x
assert "Monitor" not in vars(gm)
found = [norm(torch.tensor([float(i)])).item() for i in range(3)]
assert found == [2.0, 3.0, 4.0], found
assert len(graphs) == 1
assert not torch._dynamo.utils.counters["graph_break"]
"""
    process("-c", code)
