"""Compiled graphs on disk: found again by a process like the one that compiled them, and by no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import gradiometer as gm
from conftest import KERNELS
from gradiometer.ops import measure_lines
from gradiometer.ops.library import REVISION, digest
from support.compiling import Kept, needs_compiler

pytestmark = pytest.mark.skipif(KERNELS, reason="each process chooses whether kernels measure its tensors")

PACKAGE = Path(gm.__file__).parent
# prints how tensors were measured, whether the graph was found on disk, and a column
STEP = """
import json, torch, gradiometer as gm
from torch._dynamo.utils import counters
from gradiometer.ops import dispatch, tensors

calls = []
for module, name in ((tensors, "measure_now"), (dispatch, "launching_on")):
    def call(*args, _name=name, _function=getattr(module, name), **options):
        calls.append(_name)
        return _function(*args, **options)
    setattr(module, name, call)
step = torch.compile(lambda x: gm.collect([x]).n_zero, fullgraph=True)
found = step(torch.tensor([0.0, 2.0, 0.0])).item()
cache = counters["aot_autograd"]
print(json.dumps([calls, [cache["autograd_cache_hit"], cache["autograd_cache_miss"]], found]))
"""
PLAIN, BY_KERNELS = [], ["measure_now", "launching_on"]
HIT, MISS = [1, 0], [0, 1]


@pytest.fixture
def run(tmp_path):
    def run(*, interpret=False, package=PACKAGE):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            # a pool of compilers, a test of the processor and precompiled headers take longer than one graph
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "TRITON_INTERPRET": str(int(interpret)),
            "PYTHONPATH": str(package.parent),
        }
        command = [sys.executable, "-W", "ignore", "-c", STEP]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@needs_compiler
@pytest.mark.parametrize(
    "order",
    [
        pytest.param((False, True, False), id="plain first"),
        pytest.param((True, False), id="kernels first", marks=pytest.mark.deep),
    ],
)
def test_a_process_that_uses_kernels_finds_no_graph_of_one_that_does_not(run, order):
    pytest.importorskip("triton")
    for with_kernels, cache in zip(order, (MISS, MISS, HIT), strict=False):
        assert run(interpret=with_kernels) == [BY_KERNELS if with_kernels else PLAIN, cache, 2.0]


@needs_compiler
def test_a_graph_of_other_source_is_not_found(run, tmp_path):
    package = tmp_path / "src" / "gradiometer"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(package=package) == [PLAIN, MISS, 2.0]
    changed = package / "ops" / "in_graph.py"
    text = changed.read_text(encoding="utf-8")
    assert text.count("numel - n_nonzero") == 1
    changed.write_text(text.replace("numel - n_nonzero", "numel + n_nonzero"), encoding="utf-8")
    assert run(package=package) == [PLAIN, MISS, 4.0]


# the revision


def test_the_digest_is_that_of_what_the_graphs_contain(tmp_path):
    package = tmp_path / "gradiometer"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert digest(package) == digest(PACKAGE) == REVISION
    found = {REVISION}
    for name in ("columns/rows.py", "columns/schema.py", "ops/row_sums.py", "ops/tap_partials.py"):
        with (package / name).open("a", encoding="utf-8") as file:
            file.write("\n")
        found.add(digest(package))
    (package / "ops" / "eager_plan.py").rename(package / "ops" / "planned.py")
    found.add(digest(package))
    assert len(found) == 6
    assert {len(one) for one in found} == {16}
    # what neither adds operators to a graph nor tells the shape of a result
    with (package / "sinks" / "console.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert digest(package) in found


def test_a_package_in_a_zip_file_and_one_without_source_have_digests(tmp_path):
    archive = tmp_path / "gradiometer.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in PACKAGE.rglob("*.py"):
            file.write(path, path.relative_to(PACKAGE.parent))
    # a compiled file instead of a module, without folders of compiled files
    bare = tmp_path / "gradiometer"
    for name in ("columns", "ops"):
        (bare / name).mkdir(parents=True)
        (bare / name / "schema.pyc").write_bytes(name.encode())
    without_source = digest(bare)
    (bare / "ops" / "schema.pyc").write_bytes(b"other")
    frozen = digest(tmp_path / "frozen"), digest(zipfile.Path(archive, "frozen/"))
    assert digest(zipfile.Path(archive, "gradiometer/")) == REVISION
    assert len({without_source, digest(bare), frozen[0], REVISION}) == 4
    # the version alone
    assert frozen[0] == frozen[1]
    code = "from gradiometer.ops.library import REVISION; print(REVISION)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(archive)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{REVISION}\n", done.stderr


def ops():
    """Return the ops whose result a compiler cannot know from the graph, by name."""
    prefix = "gradiometer::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    found = {}
    for name in names:
        op = getattr(torch.ops.gradiometer, name.removeprefix(prefix)).default
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if op._schema.returns or is_composite:
            found[name.removeprefix(prefix)] = op
    return found


def test_the_revision_is_an_argument_of_every_op_that_has_a_result_or_is_composite():
    found = ops()
    assert {"tensor_stats", "tensor_stats_in_graph", "pair_stats", "tap", "sqrt"} <= set(found)
    # the result has the shape of the argument, whatever the source is
    del found["sqrt"]
    for name, op in found.items():
        assert "revision" in [argument.name for argument in op._schema.arguments], name


TAPPED = nn.Sequential(nn.Linear(3, 3))
gm.Taps(TAPPED, {"linear": nn.Linear})
CALLS = {
    "tap": TAPPED,
    "tensor_stats": lambda x: gm.collect([x.double()]).columns,
    "tensor_stats_in_graph": lambda x: gm.collect([x]).columns,
    "tensor_stats_fingerprints": lambda x: gm.collect([x], fingerprint=True).columns,
    "pair_stats": lambda x: gm.compare([x], [2.0 * x]).columns,
    "exponent_stats": lambda x: gm.collect_exponents([x]).columns,
    "line_stats": lambda x: measure_lines([x]),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_revision_is_part_of_the_graph(name):
    kept = Kept()

    def backend(graph, inputs):
        # before and after composite ops are replaced
        kept.graphs.append(graph)
        return kept.backend(graph, inputs)

    torch._dynamo.reset()
    torch.compile(CALLS[name], fullgraph=True, backend=backend)(torch.ones(3))
    op = getattr(torch.ops.gradiometer, name)
    nodes = [node for graph in kept.graphs for node in graph.graph.nodes if node.target in (op, op.default)]
    assert nodes
    assert all(node.args[-1] == REVISION for node in nodes)
