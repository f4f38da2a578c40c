"""Square roots are those of `math.sqrt`, bit for bit: in eager, in a graph, and in the kernels."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import gradiometer as gm
from conftest import INTERPRETED, KERNELS
from gradiometer import Flag, Thresholds
from gradiometer.columns import TENSORS, roots, sqrt
from support.compiling import inductor, needs_compiler

pytestmark = pytest.mark.usefixtures("_dynamo")

FEW = 20 if KERNELS else 300


def to_float(bits):
    return bits.view(torch.float64)


@cache
def values():
    """Return a million random doubles of every magnitude, and all special values, ``(N,)``."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=generator, dtype=torch.int64)
    largest, infinity = 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000
    powers = torch.tensor([math.ldexp(1.0, k) for k in range(-1074, 1024)], dtype=torch.float64)
    neighbours = torch.cat([powers.view(torch.int64) + step for step in (-1, 0, 1)])
    return torch.cat(
        [
            # uniform bits have a uniform logarithm
            to_float(draw(infinity, (10**6,))),
            to_float(neighbours.clamp(max=largest)),
            to_float(draw(1, 2**52, (10_000,))),  # subnormal
            to_float(largest - draw(2**40, (10_000,))),  # near overflow
            to_float(torch.arange(largest - 100, infinity + 1)),
            torch.tensor([0.0, math.inf, math.nan], dtype=torch.float64),
        ]
    )


@cache
def expected():
    return torch.tensor(list(map(math.sqrt, values().tolist())), dtype=torch.float64)


def assert_same(found, wanted):
    assert (found.dtype, found.shape) == (torch.float64, wanted.shape)
    wrong = (found != wanted) & ~(found.isnan() & wanted.isnan())
    assert wrong.sum().item() == 0, (found[wrong][:3].tolist(), wanted[wrong][:3].tolist())


class Root(torch.nn.Module):
    def forward(self, x):
        return sqrt(x)


def exported(strict):
    return lambda x: torch.export.export(Root(), (x,), strict=strict).module()(x)


PATHS = {
    "eager": sqrt,
    "vmap": torch.vmap(sqrt),
    "inductor": torch.compile(sqrt, fullgraph=True),
    "aot_eager, vmap": torch.compile(torch.vmap(sqrt), fullgraph=True, backend="aot_eager"),
    "aot_eager": torch.compile(sqrt, fullgraph=True, backend="aot_eager"),
    "dynamo": torch.compile(sqrt, fullgraph=True, backend="eager"),
    "exported": exported(strict=True),
    "exported without Dynamo": exported(strict=False),
}


every_path = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=needs_compiler) if path == "inductor" else path for path in PATHS]
)


@pytest.mark.once
@every_path
def test_a_million_roots_are_correctly_rounded(path):
    assert_same(PATHS[path](values()), expected())


@pytest.mark.once
@every_path
def test_strided_and_empty_tensors_have_roots_too(path):
    x = torch.tensor([[4.0, -1.0], [2.0, -1.0], [3.0, -1.0]], dtype=torch.float64)[:, 0]
    root = PATHS[path](x)
    assert root.tolist() == [2.0, math.sqrt(2.0), math.sqrt(3.0)]
    # collectives need contiguous tensors; under vmap the function sees one element at a time
    assert root.is_contiguous() or "vmap" in path
    assert PATHS[path](x[:0]).shape == (0,)


def test_a_number_has_a_root():
    x = torch.tensor(2.0, dtype=torch.float64)
    for root in (sqrt(x), torch.compile(sqrt, backend="aot_eager")(x)):
        assert (root.item(), root.shape) == (math.sqrt(2.0), ())


@pytest.mark.once
@needs_compiler
def test_inductor_takes_the_root_for_one_of_its_own():
    with torch._inductor.utils.fresh_inductor_cache():
        root, (code,) = run_and_get_code(PATHS["inductor"], values()[:2000])
    assert_same(root, expected()[:2000])
    assert "sqrt" in code
    assert "gradiometer.sqrt" not in code
    assert "complex" not in code


@pytest.mark.once
@needs_compiler
def test_where_inductor_learns_nothing_it_calls_the_op(monkeypatch):
    from torch._inductor.lowering import lowerings

    monkeypatch.setattr(roots, "_teach_inductor", lambda: None)
    monkeypatch.delitem(lowerings, torch.ops.gradiometer.sqrt.default, raising=False)
    with torch._inductor.utils.fresh_inductor_cache():
        root, (code,) = run_and_get_code(PATHS["inductor"], values()[:2000])
    # Inductor added it in this test
    lowerings.pop(torch.ops.gradiometer.sqrt.default, None)
    assert_same(root, expected()[:2000])
    assert "gradiometer.sqrt" in code


def test_a_root_is_one_node_of_a_graph():
    counter = CompileCounterWithBackend("eager")
    torch.compile(sqrt, fullgraph=True, backend=counter)(values()[:5])
    (graph,) = counter.graphs
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [
        torch.ops.gradiometer.sqrt
    ]


def test_the_op_is_one_that_torch_approves_of():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for x in (values()[:6].view(2, 3).T, values()[0], values()[:0]):
        results = torch.library.opcheck(torch.ops.gradiometer.sqrt.default, (x,), test_utils=checks)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_without_values_have_roots_of_the_same_form(device):
    with FakeTensorMode():
        root = sqrt(torch.empty(3, 2, dtype=torch.float64, device=device))
    assert (root.shape, root.dtype, root.device.type) == ((3, 2), torch.float64, device)
    assert sqrt(torch.empty(3, dtype=torch.float64, device="meta")).shape == (3,)


def test_a_build_without_vector_math_takes_the_plain_root(monkeypatch):
    monkeypatch.setattr(roots, "_VECTOR_MATH", False)
    calls = []
    monkeypatch.setattr(torch.Tensor, "to", lambda *args: calls.append(args))
    assert sqrt(torch.tensor([4.0], dtype=torch.float64)).tolist() == [2.0]
    assert calls == []


# values that users see


def stats_of(sumsq):
    """Return statistics of tensors with these sums of squares."""
    columns = torch.zeros(len(sumsq), TENSORS.width, dtype=torch.float64)
    columns[:, TENSORS.index["numel"]] = 1.0
    columns[:, TENSORS.index["sumsq"]] = sumsq
    flags = torch.zeros(len(sumsq), dtype=torch.int32)
    names = tuple(map(str, range(len(sumsq))))
    return gm.TensorStats(names, columns, flags, Thresholds())


def norms(stats):
    return stats.norm, stats.finite_norm, stats.rms, stats.total_norm


def test_a_million_norms_are_roots_of_their_squares():
    stats = stats_of(values())
    for found in (stats.norm, stats.finite_norm, stats.rms):
        assert_same(found, expected())


def test_norms_of_a_report_are_roots_of_their_squares():
    sumsq = values()[::100]
    found = torch.tensor([row.norm for row in stats_of(sumsq).materialize().rows()], dtype=torch.float64)
    assert_same(found, expected()[::100])


# from columns that did not come from a kernel
@pytest.mark.once
@pytest.mark.parametrize("compiler", [None, inductor, "aot_eager"])
def test_total_norms_are_roots_of_all_squares(compiler):
    function = norms if compiler is None else torch.compile(norms, fullgraph=True, backend=compiler)
    for i in range(FEW):
        # all squares but one are 0, so nothing is rounded before the root
        stats = stats_of(torch.cat([values()[i : i + 1], torch.zeros(3, dtype=torch.float64)]))
        for found in function(stats)[:3]:
            assert found[0] == expected()[i]
        assert function(stats)[3] == expected()[i]
    assert stats.materialize().total_norm == expected()[i]


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(None),
        pytest.param("inductor", marks=[needs_compiler, pytest.mark.once]),
        pytest.param("aot_eager", marks=pytest.mark.once),
    ],
)
def test_norms_of_tensors_are_roots_of_their_squares(compiler):
    def measure(tensors):
        stats = gm.collect(tensors)
        return stats.sumsq, *norms(stats), stats.total[TENSORS.index["sumsq"]], gm.total_norm(tensors)

    function = measure if compiler is None else torch.compile(measure, fullgraph=True, backend=compiler)
    for _ in range(3):
        # longer lists take Dynamo long
        tensors = [torch.randn(3, dtype=torch.float64) for _ in range(8)]
        sumsq, norm, finite_norm, _, total_norm, total, alone = function(tensors)
        wanted = torch.tensor([math.sqrt(x) for x in sumsq.tolist()], dtype=torch.float64)
        assert_same(norm, wanted)
        assert_same(finite_norm, wanted)
        assert total_norm == alone == math.sqrt(total)


def test_clipping_returns_the_root():
    for _ in range(FEW):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        parameter.grad = torch.randn(3, dtype=torch.float64)
        wanted = math.sqrt(gm.collect([parameter.grad]).sumsq)
        assert float(gm.grad_norm([parameter])) == wanted
        assert gm.clip_grad_norm_([parameter], 1e9).item() == wanted


@pytest.mark.parametrize("grouped", [False, True])
def test_a_norm_at_its_threshold_has_no_flag_and_its_neighbours_have(grouped):
    # on some machines the vector math library returns another root of 2
    for n in range(1, FEW):
        x, norm = torch.ones(n), math.sqrt(n)
        above, below = (math.nextafter(norm, to) for to in (math.inf, 0.0))
        for vanishing, exploding, flag in ((norm, norm, 0), (above, above, 1), (below, below, 2)):
            stats = gm.collect({"x": x}, thresholds=Thresholds(vanishing, exploding))
            flags = stats.group({"x": "x"}).flags if grouped else stats.flags
            assert flags.item() == (0, Flag.VANISHING, Flag.EXPLODING)[flag]


@pytest.mark.once
@pytest.mark.parametrize("compiler", [inductor, "aot_eager"])
def test_a_graph_compares_the_same_root_with_a_threshold(compiler):
    for square in (2.0, 3.0):
        limit = Thresholds(math.sqrt(square), math.sqrt(square))
        flags = torch.compile(TENSORS.flags_of, fullgraph=True, backend=compiler)
        assert flags(stats_of(torch.tensor([square], dtype=torch.float64)).columns, limit).tolist() == [0]


if INTERPRETED:
    import triton
    import triton.language as tl

    @triton.jit
    def _root_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):  # noqa: N803 a constant of a kernel
        offs = tl.arange(0, TILE)
        mask = offs < n
        tl.store(out_ptr + offs, tl.sqrt(tl.load(x_ptr + offs, mask=mask, other=0.0)), mask=mask)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's root; test_machine_code.py tests the others")
def test_a_million_roots_of_the_interpreter_are_correctly_rounded():
    found = torch.empty_like(values())
    _root_kernel[(1,)](values(), found, len(found), TILE=2**20)
    assert_same(found, expected())
