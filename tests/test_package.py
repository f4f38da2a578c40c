"""The package as a whole: the cost and requirements of its import, its public names, and its examples."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

import gradiometer as gm

# kernels need triton, these three their frameworks; the demo is a program
LEFT_OUT = ["gradiometer.kernels", "gradiometer.demo"]
FRAMEWORKS = {"huggingface": "transformers", "lightning": "pytorch_lightning", "torchtitan": "torchtitan"}
for module, package in FRAMEWORKS.items():
    if importlib.util.find_spec(package) is None:
        LEFT_OUT.append(f"gradiometer.integrations.{module}")
MODULES = [
    "gradiometer",
    *sorted(
        name
        for _, name, _ in pkgutil.walk_packages(gm.__path__, "gradiometer.")
        if not name.startswith(tuple(LEFT_OUT))
    ),
]


def in_fresh_process(code: str) -> str:
    """Run code in an interpreter that has imported nothing, and return its output."""
    source = str(Path(gm.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COLLECT = """
import math, torch, gradiometer as gm
model = torch.nn.Linear(3, 2)
model(torch.ones(1, 3)).sum().backward()
report = gm.collect_grads(model).materialize()
assert report.names == ("weight", "bias")
assert report["weight"].norm == math.sqrt(6), report["weight"]
assert report.total_norm == math.sqrt(8)
assert "2 tensors" in str(report)
tensors = {"x": torch.full((5003,), 2.0), "y": torch.tensor([float("nan")]), "z": torch.ones(4).half()}
large = gm.collect(tensors)
assert large.sum.tolist() == [10006.0, 0.0, 4.0]
assert large.found_inf.item() == 1.0
print("collected")
"""

# three ways in which triton can be missing
BLOCKERS = {
    "not found": """
import importlib.machinery
class WithoutTriton(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTriton
""",
    "None in sys.modules": "sys.modules['triton'] = None",
    "a hook that raises": """
import importlib.abc
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("triton is blocked", name=name)
sys.meta_path.insert(0, Blocked())
""",
}


# without triton and other packages


@pytest.mark.parametrize(
    "blocker",
    [
        pytest.param(code, id=name, marks=() if name == "not found" else (pytest.mark.deep,))
        for name, code in BLOCKERS.items()
    ],
)
def test_without_triton_the_cpu_is_measured_all_the_same(blocker: str) -> None:
    code = f"""{blocker}
try:
    import triton
except ImportError:
    pass
else:
    raise SystemExit("triton is not blocked")
{COLLECT}"""
    assert in_fresh_process(code) == "collected\n"


def test_without_triton_asking_for_interpreted_kernels_still_measures() -> None:
    code = f"import os; os.environ['TRITON_INTERPRET'] = '1'; sys.modules['triton'] = None\n{COLLECT}"
    assert in_fresh_process(code) == "collected\n"


def test_collection_and_reports_need_no_numpy_and_no_pandas() -> None:
    without = "sys.modules['numpy'] = sys.modules['pandas'] = None"
    assert in_fresh_process(f"{without}\n{COLLECT}") == "collected\n"


# the cost of an import


def test_an_import_brings_only_the_package_itself() -> None:
    code = """
import json, torch
before = set(sys.modules)
import gradiometer
print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))
"""
    new, cuda_initialized = json.loads(in_fresh_process(code))
    assert "gradiometer.stats" in new
    others = {name for name in new if name.split(".")[0] != "gradiometer"}
    # not triton, pandas, numpy, nor a part of torch that torch itself does not import, such as
    # torch._dynamo or torch.distributed
    assert {name for name in others if name.split(".")[0] not in sys.stdlib_module_names} == set()
    assert not {name for name in new if name.startswith(("gradiometer.kernels", "gradiometer.demo"))}
    assert cuda_initialized is False


def test_a_first_collection_on_the_cpu_loads_no_compiler_and_starts_no_cuda() -> None:
    code = f"""
import torch
before = set(sys.modules)
{COLLECT}
heavy = ("triton", "pandas", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed")
for name in sorted(set(sys.modules) - before):
    if name.startswith(heavy):
        print(name)
print(torch.cuda.is_initialized())
"""
    assert in_fresh_process(code) == "collected\nFalse\n"


# public names


def test_all_is_sorted_complete_and_importable() -> None:
    # constants come first, as the linter sorts them
    assert gm.__all__ == sorted(gm.__all__, key=lambda name: (not name.isupper(), name))
    assert len(set(gm.__all__)) == len(gm.__all__)
    namespace: dict[str, object] = {}
    exec("from gradiometer import *", namespace)  # noqa: S102 that is what is tested
    assert set(gm.__all__) <= set(namespace)
    assert all(namespace[name] is getattr(gm, name) for name in gm.__all__)
    public = {
        name
        for name, value in vars(gm).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(gm.__all__) - {"__version__", "rules", "sinks"}


def test_the_public_functions_are_there() -> None:
    contract = {
        "Flag",
        "Report",
        "TensorStats",
        "Thresholds",
        "collect",
        "collect_grads",
        "collect_weights",
        "grad_norm",
        "total_norm",
    }
    assert contract <= set(gm.__all__)


def test_every_public_name_is_documented() -> None:
    for name in gm.__all__:
        value = getattr(gm, name)
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_says_it_exports_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    # a package says what it exports; a module within it need not
    exported = module.__all__ if hasattr(module, "__path__") else getattr(module, "__all__", [])
    assert [entry for entry in exported if not hasattr(module, entry)] == []
    assert len(set(exported)) == len(exported)


def test_the_package_unpickles_nothing() -> None:
    # the functions that unpickle, and the collectives that pickle objects
    words = r"\b(?:pickle\w*|torch\.load|torch\.save|marshal|shelve|\w+_object(?:_list)?)\("
    words += r"|^ *(?:import|from) +(?:pickle|cloudpickle|dill|joblib|marshal|shelve)\b"
    found = [
        f"{path.name}: {line}"
        for path in sorted(Path(gm.__file__).parent.rglob("*.py"))
        for line in re.findall(words, path.read_text("utf-8"), re.MULTILINE)
    ]
    assert found == [
        # a checkpoint on the command line
        "fingerprint.py: torch.load(",
        # the state in a checkpoint of Hugging Face, beside the Trainer's own
        "huggingface.py: torch.save(",
        "huggingface.py: torch.load(",
        # the step that a monitor has kept
        "kept_step.py: torch.load(",
        "kept_step.py: torch.save(",
    ]
    for path in ("integrations/huggingface.py", "cli/fingerprint.py", "runs/kept_step.py"):
        source = (Path(gm.__file__).parent / path).read_text("utf-8")
        (arguments,) = re.findall(r"torch\.load\((.*)\)", source)
        assert 'map_location="cpu", weights_only=True' in arguments


def test_the_package_is_typed() -> None:
    assert (resources.files("gradiometer") / "py.typed").is_file()


def test_the_version_is_a_string_of_numbers() -> None:
    assert isinstance(gm.__version__, str)
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", gm.__version__)


# examples


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    # the package attribute `collect` is the function, so import modules by their full name
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_public_functions_and_classes_have_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in [name for name in gm.__all__ if inspect.isfunction(getattr(gm, name))]:
        assert any(test.examples for test in finder.find(getattr(gm, name), name)), name
    for kind in (gm.TensorStats, gm.Report, gm.Thresholds, gm.Pending, gm.EMA, gm.Recorder, gm.Monitor):
        assert any(test.examples for test in finder.find(kind, kind.__name__)), kind
