"""Shared by all tests: Hypothesis profiles, the `gpu` marker, and where the kernels run."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import tempfile
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from support import gpu, interpreter
from support.default_device import DefaultDevice
from support.rank_pool import RANKS, RankPool
from support.unwritten import unwritten_is_nan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

# pytest attaches handlers to every logger that does not propagate, and torch writes a trace of each
# compilation to a logger with handlers: a thousand lines for a failing test
logging.getLogger("torch.__trace").propagate = True

# it replaces distutils, and warns or fails if a package that a test imports brought distutils first
with suppress(ImportError):
    importlib.import_module("setuptools")

# a test compiles a kernel or two with Inductor: its process pool takes seconds to start in each worker
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor's cache knows nothing of ATEN_CPU_CAPABILITY and returns code for other vectors: a cache for each
CAPABILITY = torch.backends.cpu.get_cpu_capability()
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/gradiometer-tests-{os.getuid()}-{CAPABILITY}"
)

# under the interpreter the whole path (pack, pointer table, kernels, op) runs on CPU tensors
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRETED:
    interpreter.find_builtins_once()
    interpreter.round_fma_once()
# Kernels as they are on a GPU such as sm_90. If they are not interpreted, they are compiled for it and run on
# CPU tensors, see `support/ptx.py`
GPU_TARGET = os.environ.get("GPU_TARGET", "")
KERNELS = INTERPRETED or bool(GPU_TARGET)

_relaxed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# an example takes a hundred times as long on kernels
settings.register_profile("ci", derandomize=True, max_examples=5 if KERNELS else 40, **_relaxed)
settings.register_profile("deep", max_examples=2000, **_relaxed)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread_for_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small models train in one thread: on busy cores, several threads wait for each other."""
    if "rules" not in request.path.parts:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile kernels independently of the user's cache and configuration; workers share the new cache."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRITON_")]:
            if name != "TRITON_INTERPRET":
                patch.delenv(name)
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _executed_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if not GPU_TARGET:
        yield
    elif INTERPRETED:
        from kernels_bench.machine_code.compile import launching_for

        with launching_for(GPU_TARGET):
            yield
    else:
        from support import ptx

        request.getfixturevalue("triton_cache")
        with ptx.executed_kernels(GPU_TARGET):
            yield


@pytest.fixture(autouse=True)
def _unwritten_is_nan() -> Iterator[None]:
    with unwritten_is_nan() if KERNELS else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    yield
    logging.getLogger("gradiometer").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    """Make the package's factory functions use another device by default, see `test_default_device.py`."""
    device = os.environ.get("DEFAULT_DEVICE")
    with DefaultDevice(device) if device else nullcontext():
        yield


@pytest.fixture
def _dynamo() -> Iterator[None]:
    """Trace backward into the graph, and start without other tests' compilations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # off by default: `loss.backward()` would be a graph break
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()
    # in torch 2.12 to 2.14, a step that begins by clearing its gradients breaks others, see forget_none
    torch._dynamo.variables.constant.CONSTANT_VARIABLE_NONE.source = None


@pytest.fixture
def _eager_backend(_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # the pages' results do not depend on the backend, and this one compiles in a second
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def number_of_threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets torch's number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def _one_thread(number_of_threads: Callable[[int], None]) -> None:
    """Limit torch to one thread: short parallel loops would wait for cores that other processes use."""
    number_of_threads(1)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Return wandb in offline mode, with its files in the test's folder."""
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield module
    if module.run:
        module.run.finish()
    module.teardown()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command, and returns its exit code, stdout and stderr."""
    from gradiometer.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Return a function that runs a command that must fail, and returns its error, which is one line."""
    from gradiometer.cli import Exit

    def refused(*arguments: object, code: int = Exit.UNREADABLE) -> str:
        found, out, err = call(*arguments)
        assert (found, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith("gradiometer: ")
        return err

    return refused


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set: writes of a run's files whose names contain one of its words fail, as on a full disk."""
    from support.synthetic_run import fail_writes

    return fail_writes(monkeypatch)


# a pool per file, so that its leftovers (such as ranks that have met more often) do not affect other files
def _ranks(size: int) -> Callable[[], Iterator[RankPool]]:
    def ranks() -> Iterator[RankPool]:
        """Processes that are the ranks of a job; for tests that do not kill them."""
        pool = RankPool(size)
        yield pool
        pool.close()

    return ranks


one_rank, two_ranks, three_ranks, four_ranks = (
    pytest.fixture(scope="module", name=name)(_ranks(size)) for size, name in enumerate(RANKS, 1)
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PROFILE != "deep":
        left_out = ("deep", "once") if KERNELS else ("deep",)
        deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        # not by keywords, which include the names of folders
        if item.get_closest_marker("gpu") and not (gpu.REHEARSED and item.path.parent.name == "gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # collect once and freeze: modules and thousands of test objects live to the end, and every later
    # collection would traverse them, often while a graph is being traced
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of compiled steps if its test has run."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    properties = [pair for report in calls for pair in report.user_properties]
    rows = [(*row[:2], str(row[2])) for name, row in properties if name == "compiled step"]
    if rows:
        terminalreporter.section("compiled steps: one graph, eager's bits, weights unchanged")
        for name, backend, note in rows:
            terminalreporter.write_line(f"{name:<45} {backend:<16} {note:>10}")
