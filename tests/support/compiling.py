"""Shared by tests of compiled functions: backends, counts of graphs and recompilations, a small model."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


_COMPILERS = (os.environ.get("CXX"), "g++", "clang++")
needs_compiler = pytest.mark.skipif(
    not any(name and shutil.which(name) for name in _COMPILERS),
    reason="Inductor needs a C++ compiler for CPU code, but none was found",
)
inductor = pytest.param("inductor", marks=needs_compiler)
every_backend = pytest.mark.parametrize("backend", ["aot_eager", inductor])
# Inductor takes seconds per graph: this is for steps that give it nothing new to generate
inductor_if_deep = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.deep])]
)


def no_recompile() -> AbstractContextManager[None]:
    return torch._dynamo.config.patch(error_on_recompile=True)


def graphs() -> int:
    """Return the number of graphs that this test compiled; fail if there was a graph break."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


class Kept:
    """The `aot_eager` backend, which also keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        for node in graph.graph.nodes:
            # Dynamo may put a transfer of a number to the host into the graph, which would still wait
            assert torch.Tag.data_dependent_output not in getattr(node.target, "tags", ()), node
        return graph.forward

    def op_calls(self) -> int:
        """Return the number of measurements: calls of the op, and plain operators that stand for it."""
        # one of which is a cumulative sum
        ops = {torch.ops.gradiometer.tensor_stats.default, torch.ops.aten.cumsum.default}
        return sum(node.target in ops for graph in self.graphs for node in graph.graph.nodes)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 3)
