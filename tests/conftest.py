"""What every test shares: Hypothesis profiles, the `gpu` marker, and where the kernels run."""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from support import interpreter
from support.rank_pool import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

# pytest listens to each logger that passes nothing on, and where anybody listens torch writes a trace of each
# compilation: a thousand lines of a test that fails
logging.getLogger("torch.__trace").propagate = True

# Inductor compiles a kernel or two in a test: its pool of processes takes seconds to start, in each of ours
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# the whole path (pack, pointer table, kernels, op) runs on CPU tensors under the interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRETED:
    interpreter.find_builtins_once()

_relaxed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# an example takes the interpreter a hundred times as long
settings.register_profile("ci", derandomize=True, max_examples=5 if INTERPRETED else 60, **_relaxed)
settings.register_profile("deep", max_examples=2000, **_relaxed)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _unwritten_is_nan() -> Iterator[None]:
    """Fill what kernels are given to write, so that a partial or a column that they leave out shows."""
    if not INTERPRETED:
        yield
        return
    from gradiometer.ops import library

    run_kernels, empty = library._run_kernels, torch.empty

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(math.nan if made.is_floating_point() else -(2**31))

    def run(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", filled)
            return run_kernels(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_run_kernels", run)
        yield


@pytest.fixture
def _dynamo() -> Iterator[None]:
    """Backward in the graph, and nothing left of what others compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # off by default: without it `loss.backward()` is a graph break
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def _eager_backend(_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a page shows does not depend on the backend, and this one compiles in a second
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """A step of short parallel loops waits for cores that others use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Give wandb, offline, with its files in the test's folder."""
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield module
    if module.run:
        module.run.finish()
    module.teardown()


# of each file its own: what one leaves behind, as ranks that have met more often than others, is no other's
@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two processes that are the ranks of a job; for tests that leave them alive."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Four of them."""
    pool = RankPool(4)
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if INTERPRETED and PROFILE != "deep":
        # they ask nothing of the kernels that others do not ask: what a compiler makes of an op is the same
        # whatever runs below it
        once = [item for item in items if "once" in item.keywords]
        config.hook.pytest_deselected(items=once)
        items[:] = [item for item in items if "once" not in item.keywords]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # modules and thousands of tests live to the end: the collector, often woken by a trace, may pass them by
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of compiled steps, where its test has run."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    properties = [pair for report in calls for pair in report.user_properties]
    rows = [(*row[:2], str(row[2])) for name, row in properties if name == "compiled step"]
    if rows:
        terminalreporter.section("compiled steps: one graph, eager's bits, weights unchanged")
        for name, backend, note in rows:
            terminalreporter.write_line(f"{name:<45} {backend:<16} {note:>10}")
