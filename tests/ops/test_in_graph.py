"""Statistics in a graph: plain operators for a few small tensors, an opaque op for others, the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import INTERPRETED, in_graph
from gradiometer.ops.eager_plan import SMALL
from gradiometer.ops.library import REVISION
from support.compiling import Kept, every_backend, needs_compiler, no_recompile

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the kernels measure CPU tensors")

LIMITS = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)
PLAIN, OPAQUE = "aten.cumsum.default", "gradiometer.tensor_stats.default"
# numbers of elements at which the rows of small tensors have other widths, or sums other orders
SIZES = (1, 2, 16, 17, 63, 64, 65, 255, 1000, 1024, 1025, 2049)


def mixed(seed: int, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Return tensors of several magnitudes, with zeros and, for odd seeds, values that are not finite."""
    torch.manual_seed(seed)
    tensors = []
    for index, size in enumerate(sizes):
        x = torch.randn(size) * 10.0 ** (index % 6 - 4)
        x[torch.randint(0, size, (size // 3,))] = 0.0
        if seed % 2 and index % 2:
            x[torch.randint(0, size, (3,))] = torch.tensor([math.nan, math.inf, -math.inf])
        tensors.append(x)
    return tensors


def assert_same(graph: gm.TensorStats, eager: gm.TensorStats) -> None:
    assert torch.equal(graph.columns.view(torch.int64), eager.columns.view(torch.int64))
    assert torch.equal(graph.flags, eager.flags)
    assert graph.columns.is_contiguous()


def route_of(*tensors: Tensor, dynamic: bool = False) -> set[str]:
    """Return which of the two routes a graph takes."""
    torch._dynamo.reset()
    kept = Kept()
    step = torch.compile(lambda *xs: gm.collect(xs), fullgraph=True, backend=kept.backend, dynamic=dynamic)
    assert_same(step(*tensors), gm.collect(tensors))
    targets = {str(node.target) for graph in kept.graphs for node in graph.graph.nodes}
    return targets & {PLAIN, OPAQUE}


@every_backend
@pytest.mark.parametrize("size", [None, 64, 1024])
def test_a_graph_gives_the_bits_of_eager_mode(backend, size):
    sizes = SIZES if size is None else (size, size // 2 + 1, size, 3)
    step = torch.compile(lambda *xs: gm.collect(xs), fullgraph=True, backend=backend)
    assert_same(step(*mixed(0, sizes)), gm.collect(mixed(0, sizes)))
    # with values that are not finite and without
    for seed in (3, 6, 9):
        with no_recompile():
            assert_same(step(*mixed(seed, sizes)), gm.collect(mixed(seed, sizes)))


@every_backend
def test_with_thresholds_a_scale_and_odd_strides(backend):
    limits = gm.Thresholds(vanishing=1e-3, exploding=2.0, dead=0.3)

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: Tensor, scale: Tensor) -> gm.TensorStats:
        return gm.collect([x.mT, x[::2], x[0, :1].expand(9), -x], thresholds=limits, inv_scale=scale)

    x, scale = torch.randn(33, 20), torch.tensor(0.3)
    expected = gm.collect(
        [x.mT, x[::2], x[0, :1].expand(9), -x], thresholds=limits, inv_scale=torch.tensor(0.3)
    )
    assert_same(step(x, scale), expected)


@needs_compiler
def test_the_norms_of_a_graph_are_those_of_exact_sums():
    tensors = [torch.full((SMALL,), 0.1), torch.full((4097,), 1e20), torch.full((777,), 1e-30)]
    stats = torch.compile(lambda *xs: gm.collect(xs), fullgraph=True)(*tensors)
    for x, norm in zip(tensors, stats.norm.tolist(), strict=True):
        wanted = math.sqrt(math.fsum([v * v for v in x.double().tolist()]))
        assert norm == pytest.approx(wanted, rel=1e-13, abs=0)


def test_only_a_few_small_tensors_are_measured_by_plain_operators():
    most = in_graph._MOST_TENSORS
    assert route_of(*[torch.ones(3)] * 2, torch.ones(70)) == {PLAIN}
    assert route_of(*torch.ones(most, 5).unbind()) == {PLAIN}
    assert route_of(*torch.ones(most + 1, 5).unbind()) == {OPAQUE}
    assert route_of(torch.ones(SMALL)) == {PLAIN}
    assert route_of(torch.ones(SMALL + 1)) == {OPAQUE}
    assert route_of(*torch.ones(5, SMALL).unbind()) == {OPAQUE}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert route_of(torch.ones(3), torch.ones(3, dtype=dtype)) == {OPAQUE}
    assert route_of(torch.ones(3, dtype=torch.complex64)) == {OPAQUE}
    assert route_of(torch.ones(3), torch.ones(0)) == {OPAQUE}
    assert route_of(torch.ones(7, 3), dynamic=True) == {OPAQUE}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_opaque_op(strict):
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gm.collect([x]).columns

    x = torch.randn(70)
    program = torch.export.export(Module(), (x,), strict=strict)
    targets = [str(node.target) for node in program.run_decompositions().graph.nodes]
    assert OPAQUE in targets
    assert torch.equal(program.module()(x), gm.collect([x]).columns)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(torch.erf, id="erf"),
        pytest.param(torch.sin, id="sin", marks=pytest.mark.deep),
        pytest.param(lambda x: x * 1.1, id="rounded"),
        pytest.param(lambda x: x * 60000, id="overflowing"),
    ],
)
def test_what_is_measured_is_what_is_stored(function, dtype):
    """Inductor may compute a value twice, and passes on half-precision values before it rounds them."""
    torch._dynamo.reset()
    model = nn.ParameterList([torch.randn(7, 3).to(dtype), torch.randn(11).to(dtype)])

    @torch.compile(fullgraph=True)
    def step() -> gm.TensorStats:
        with torch.no_grad():
            for p in model:
                p.copy_(function(p.abs()))
        return gm.collect_weights(model)

    assert_same(step(), gm.collect_weights(model))


def test_a_name_that_stands_twice_is_refused():
    class Twice(nn.Linear):
        def named_parameters(self, *_, **__):
            return iter([("x", self.weight), ("x", self.bias)])

    model = Twice(2, 1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    step = torch.compile(lambda: gm.collect_grads(model), fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)) as refused:
        step()
    assert "two tensors have the name 'x'" in str(refused.value)


def test_nothing_is_differentiated():
    weight = torch.ones(3, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> tuple[Tensor, gm.TensorStats]:
        y = x * weight
        return y.sum(), gm.collect([y])

    loss, stats = step(torch.ones(3))
    loss.backward()
    assert not stats.columns.requires_grad
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_step_that_skips_non_finite_gradients():
    model = nn.Linear(2, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    step = torch.compile(
        lambda: gm.collect_grads(model, skip_nonfinite=True), fullgraph=True, backend="aot_eager"
    )
    assert_same(step(), gm.collect_grads(model, skip_nonfinite=True))
    assert bool(step().skipped)


def test_opcheck():
    op = torch.ops.gradiometer.tensor_stats_in_graph.default
    for tensors in (mixed(0), mixed(1), [torch.ones(SMALL + 1)], [torch.ones(2, requires_grad=True)]):
        torch.library.opcheck(op, (tensors, *LIMITS, None, REVISION))
