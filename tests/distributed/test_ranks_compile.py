"""Collection and reduction over ranks inside compiled functions: one graph, compiled once, equal to eager."""

from __future__ import annotations

import functools
import math
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

import gradiometer as gm
from gradiometer.distributed.collectives import all_reduce_pair
from gradiometer.recorder.recorder import Recorder
from support.compiling import Kept, needs_compiler
from support.pages import sections
from support.rank_models import KINDS, alone, backward, batch, held, loss_of, mesh_of, over_tensors, whole
from support.rank_pool import pool_of

DOUBLE = torch.float64
STEPS = 4
# a bound below the norm
LIMIT = 0.5

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
backward_of_dtensors = pytest.mark.skipif(
    TORCH < (2, 12), reason="PyTorch 2.11 cannot trace the backward of DTensors into a graph"
)
parameters_of_fsdp = pytest.mark.skipif(
    TORCH == (2, 14), reason="PyTorch 2.14 cannot read a parameter of FSDP2 and its gradient in one graph"
)


def compiled_collect(model, ranks):
    return torch.compile(lambda: gm.collect_grads(model, reduce=ranks), fullgraph=True, backend="aot_eager")


@contextmanager
def one_graph(backend="aot_eager", graphs=1):
    """Yield `torch.compile`; afterwards check: no graph break, and this many graphs, each compiled once."""
    torch._dynamo.reset()
    counters.clear()
    config = {"trace_autograd_ops": True, "error_on_recompile": True}
    with torch._dynamo.config.patch(config):
        yield functools.partial(torch.compile, fullgraph=True, backend=backend)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


def collectives(kept):
    """Return the collectives of a captured graph; check that each one is waited for."""
    (graph,) = kept.graphs
    names = [str(node.target).removeprefix("_c10d_functional.") for node in graph.graph.nodes]
    found = [name for name in names if name.startswith("all_")]
    assert names.count("wait_tensor.default") == len(found)
    return found


def step_again(model, rank, size, kind):
    """Make new gradients: each step's are 1.5 times those of the step before."""
    model.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    if kind == "TP":
        backward(model)
    elif kind == "FSDP2 x TP":
        backward(model, mesh_of((size // 2, 2), ("dp_shard", "tp")).get_local_rank("dp_shard"), size // 2)
    else:
        backward(model, rank, size)


def norms_alone(steps):
    """Return the norms of the same steps in one process."""
    model, norms = alone(DOUBLE), []
    for _ in range(steps):
        norms.append(gm.grad_norm(model))
        step_again(model, 0, 1, "alone")
    return norms


def assert_same(found, expected):
    assert found.names == expected.names
    for one, other in ((found, expected), (found.local, expected.local)):
        assert torch.equal(one.columns, other.columns)
        assert torch.equal(one.flags, other.flags)
    assert torch.equal(found.origin, expected.origin)


def spoil(model, name="layers.0.up.weight"):
    """Put a NaN into this rank's part of a gradient."""
    grad = getattr(model, "module", model).get_parameter(name).grad
    with torch.no_grad():
        held(grad).view(-1)[0] = math.nan


# calls after the backward


def after_backward(rank, size, kind, backend):
    model = KINDS[kind][0](rank, size, DOUBLE)
    ranks = gm.Ranks(model)
    recorder = Recorder(model, ranks=ranks, skip_above=1e6)
    kept = Kept()
    with one_graph(kept.backend if backend == "kept" else backend) as compiled:

        @compiled
        def collect(limit):
            if backend == "inductor":
                # compiling the clip is slow, one kernel per gradient, and the other cases cover it
                stats = gm.collect_grads(model, reduce=ranks)
            else:
                stats = gm.collect_and_clip_(model, limit, reduce=ranks)
            recorder.record(stats)
            skip = recorder.skip_step
            recorder.advance()
            return stats, skip

        norms, skips = [], []
        for i in range(STEPS):
            # only the first rank's copy counts
            if i == 2 and (rank == 1 or kind == "DDP"):
                spoil(model)
            expected = gm.collect_grads(model, reduce=ranks)
            stats, skip = collect(torch.tensor(LIMIT))
            assert_same(stats, expected)
            if i != 2 and backend == "kept":
                assert gm.grad_norm(model, reduce=ranks) == pytest.approx(LIMIT, rel=1e-5)
            norms.append(stats.materialize().total_norm)
            skips.append(bool(skip))
            step_again(model, rank, size, kind)
    assert [(record.step, record.skipped) for record in recorder.read()] == list(enumerate(skips))
    origin = dict(stats.materialize().ranks)
    return norms, skips, origin, collectives(kept) if backend == "kept" else None


WAYS = [("DDP", 2), ("FSDP2", 2), ("TP", 2), ("FSDP2 x TP", 4)]


def check_after_backward(pool, kind, backend):
    expected = norms_alone(STEPS)
    for norms, skips, origin, calls in pool.run(after_backward, pool.size, kind, backend):
        assert math.isnan(norms[2])
        assert norms[:2] + norms[3:] == pytest.approx(expected[:2] + expected[3:], rel=1e-12)
        assert skips == [False, False, True, False]
        assert origin == {}
        # SUM and MAX, one of the recorder, and one per partial gradient
        assert backend != "kept" or calls == ["all_reduce.default"] * (3 + KINDS[kind][2])


# a graph takes seconds on each rank
@pytest.mark.parametrize(
    ("kind", "size"),
    [pytest.param(*way, marks=() if way[0] == "TP" else (pytest.mark.deep,)) for way in WAYS],
)
def test_after_a_backward_outside_all_is_one_graph(request, kind, size):
    check_after_backward(pool_of(request, size), kind, "kept")


@needs_compiler
@pytest.mark.deep
def test_inductor_compiles_the_same(two_ranks):
    check_after_backward(two_ranks, "TP", "inductor")


def records_alone(rank, size, kind):
    """The recorder measures the local shards with its own op, and reduces two numbers over the ranks."""
    model = KINDS[kind][0](rank, size, DOUBLE)
    ranks = gm.Ranks(model)
    recorder = Recorder(model, weights=True, ranks=ranks)
    kept = Kept()
    with one_graph(kept.backend) as compiled:

        @compiled
        def record():
            recorder.record()
            again = [recorder.skip_step for _ in range(3)]
            recorder.advance()
            return again

        for i in range(3):
            if i == 1 and rank == 0:
                spoil(model)
            local = gm.collect_grads(model, reduce=ranks).local
            weights = gm.collect_weights(model)
            assert [bool(skip) for skip in record()] == [i == 1] * 3
            (*_, found) = recorder.read()
            assert torch.equal(found.columns().nan_to_num(7.0), local.columns.nan_to_num(7.0))
            assert torch.equal(found.columns("weights"), weights.columns)
            assert found.skipped == (i == 1)
            step_again(model, rank, size, kind)
    ops = [str(node.args[0]) for node in kept.graphs[0].graph.nodes if "functionalized" in str(node.target)]
    return collectives(kept), ops


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("FSDP2", 2, marks=parameters_of_fsdp),
        pytest.param("TP", 2, marks=pytest.mark.deep),
        pytest.param("FSDP2 x TP", 4, marks=[pytest.mark.deep, parameters_of_fsdp]),
    ],
)
def test_a_recorder_in_a_graph_asks_the_ranks_once(request, kind, size):
    for calls, ops in pool_of(request, size).run(records_alone, size, kind):
        assert calls == ["all_reduce.default"] * (1 + KINDS[kind][2])
        assert ops == ["gradiometer.record_.default", "gradiometer.append_.default"]


# the whole step in one graph


def tensor_parallel_step(_rank, size, backend, dtype):
    """Return the losses and norms of some steps, one of which all ranks skip."""
    model = whole(dtype)
    if size > 1:
        model = over_tensors(model, mesh_of((size,), ("tp",)))
    ranks = gm.Ranks(model, group=None)
    recorder = Recorder(model, ranks=ranks)
    kept = Kept()
    with one_graph(kept.backend if backend == "kept" else backend) as compiled:

        @compiled
        def step(x, target, scale):
            loss = loss_of(model(x), target) * scale
            loss.backward()
            stats = gm.collect_grads(model, reduce=ranks)
            recorder.record(stats)
            skip = recorder.skip_step
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(torch.where(skip, 0.0, 0.1 * p.grad))
                    p.grad = None
            recorder.advance()
            return loss.detach(), stats, skip

        found = []
        for i in range(STEPS):
            scale = torch.tensor(math.nan if i == 2 else 1.0)
            loss, stats, skip = step(*batch(), scale)
            found.append((float(loss), stats.materialize().total_norm, bool(skip)))
    calls = collectives(kept).count("all_reduce.default") if size == 1 and backend == "kept" else None
    return found, calls


@pytest.mark.deep  # the page compiles such a step, too
@backward_of_dtensors
def test_a_tensor_parallel_step_with_its_backward_is_one_graph(two_ranks):
    expected, calls = tensor_parallel_step(0, 1, "kept", DOUBLE)
    assert calls == 0
    for found, _ in two_ranks.run(tensor_parallel_step, 2, "kept", DOUBLE):
        for (loss, norm, skip), (alone_loss, alone_norm, alone_skip) in zip(found, expected, strict=True):
            assert loss == pytest.approx(alone_loss, rel=1e-12, nan_ok=True)
            assert norm == pytest.approx(alone_norm, rel=1e-12, nan_ok=True)
            assert skip == alone_skip


def data_parallel_step(rank, size, dtype):
    """Average gradients by hand in the step: replicas of one model, each with its share of the batch."""
    model = whole(dtype)
    ranks = gm.Ranks(model) if size > 1 else None
    kept = Kept()
    with one_graph(kept.backend) as compiled:

        @compiled
        def step(x, target):
            loss = loss_of(model(x), target)
            loss.backward()
            for p in model.parameters():
                if size > 1:
                    p.grad = functional.all_reduce(p.grad, "sum", dist.group.WORLD) / size
            stats = gm.collect_grads(model, reduce=ranks or False)
            coefficient = gm.clip_coefficient(stats, LIMIT)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * coefficient * p.grad)
                    p.grad = None
            return stats

        shares = [part.chunk(size)[rank] for part in batch()]
        norms = [step(*shares).materialize().total_norm for _ in range(STEPS)]
    # the collectives besides the averaging: two
    return norms, len(collectives(kept)) - (len(list(model.parameters())) if size > 1 else 0)


def test_data_parallelism_by_hand_is_one_graph(two_ranks):
    expected, none = data_parallel_step(0, 1, DOUBLE)
    assert none == 0
    for norms, more in two_ranks.run(data_parallel_step, 2, DOUBLE):
        assert norms == pytest.approx(expected, rel=1e-12)
        assert more == 2


# graph breaks of PyTorch itself, and that collection adds none


def blockwise(rank, size):
    """Compile block by block, as users of FSDP do, and collect after the backward."""
    model = whole(DOUBLE)
    mesh = mesh_of((size,), ("dp_shard",))
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ranks = gm.Ranks(model)
    torch._dynamo.reset()
    counters.clear()
    backward(model, rank, size)
    before = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    collect = compiled_collect(model, ranks)
    norms = []
    for _ in range(3):
        norms.append(collect().materialize().total_norm)
        step_again(model, rank, size, "FSDP2")
    return before, (dict(counters["graph_break"]), counters["stats"]["unique_graphs"]), norms


@pytest.mark.deep
def test_collection_adds_no_break_to_a_model_compiled_block_by_block(two_ranks):
    expected = norms_alone(3)
    for (breaks, graphs), after, norms in two_ranks.run(blockwise, 2):
        assert graphs > 0
        assert after == (breaks, graphs + 1)
        assert norms == pytest.approx(expected, rel=1e-12)


def whole_model(rank, size):
    """Break at FSDP's hooks, which PyTorch cannot trace, with and without a collection in the function."""
    model = KINDS["FSDP2"][0](rank, size, DOUBLE)
    ranks = gm.Ranks(model)
    shares = [part.chunk(size)[rank] for part in batch()]
    found = []
    for collects in (False, True):
        torch._dynamo.reset()
        counters.clear()

        @torch.compile(backend="eager")
        def step(x, target):
            loss = loss_of(model(x), target)
            loss.backward()
            return gm.collect_grads(model, reduce=ranks) if collects else loss  # noqa: B023

        model.zero_grad()
        stats = step(*shares)
        found.append(sum(counters["graph_break"].values()))
    model.zero_grad()
    backward(model, rank, size)
    assert_same(stats, gm.collect_grads(model, reduce=ranks))
    return found


@pytest.mark.skipif(
    TORCH < (2, 12), reason="PyTorch 2.11 does not run the backward of a step that breaks at FSDP's hooks"
)
def test_collection_adds_no_break_where_pytorch_breaks(two_ranks):
    for without, with_collection in two_ranks.run(whole_model, 2):
        assert without > 0
        assert with_collection == without


def asked_for_in_vain(rank, size):
    model = KINDS["FSDP2"][0](rank, size, DOUBLE)
    recorder = Recorder(model)
    ranks = gm.Ranks(model)
    messages = []
    for function in (
        lambda: gm.collect_grads(model, reduce=True),
        lambda: gm.collect_weights(model, reduce=True),
        lambda: gm.collect_grads(model).reduce(),
        lambda: gm.Ranks(model),
        lambda: recorder.record(gm.collect_grads(model, reduce=ranks).by_module(1)),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as error:
            torch.compile(function, fullgraph=True, backend="eager")()
        messages.append(str(error.value))
    return messages


def test_what_takes_an_agreement_says_so_in_a_graph(two_ranks):
    for grads, weights, late, anew, groups in two_ranks.run(asked_for_in_vain, 2):
        for what, message in (("collect_grads", grads), ("collect_weights", weights), ("reduce", late)):
            assert f"{what}: reduce=True sets up communication between ranks, which a compiled" in message
        assert "gm.Ranks: it sets up communication between ranks, which a compiled function" in anew
        assert "groups that are merged over ranks do not keep" in groups


def disagree(rank):
    """Reduce different tensors on each rank, equal in number, so that the collectives fit."""
    models = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in ("a", "b")]
    both = [gm.Ranks(model) for model in models]
    for model in models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    model, ranks = models[rank], both[rank]
    collect = compiled_collect(model, ranks)
    stats = collect()
    assert stats.columns.isnan().all()
    with pytest.raises(gm.RankError, match="the ranks made different calls"):
        stats.materialize()
    return bool(stats.found_inf)


def test_ranks_that_reduce_something_else_get_nan(two_ranks):
    two_ranks.run(disagree)


def one_of_them_compiled(rank, size):
    model = KINDS["FSDP2"][0](rank, size, DOUBLE)
    ranks = gm.Ranks(model)
    expected = gm.collect_grads(model, reduce=ranks)

    def collect():
        return gm.collect_grads(model, reduce=ranks)

    if rank == 1:
        torch._dynamo.reset()
        collect = compiled_collect(model, ranks)
    for _ in range(3):
        assert_same(collect(), expected)


def test_one_rank_may_compile_what_another_does_not(two_ranks):
    two_ranks.run(one_of_them_compiled, 2)


def without_a_gradient(rank):
    """One rank lacks a tensor's gradient, and has another graph with the same collectives."""
    model = whole(DOUBLE)
    backward(model)
    if rank == 0:
        model.embed.weight.grad = None
    ranks = gm.Ranks(model, shards={".": None})
    kept = Kept()
    with one_graph(kept.backend) as compiled:
        stats = compiled(lambda: gm.collect_grads(model, reduce=ranks))()
    return dict(zip(stats.names, stats.norm.tolist(), strict=True)), collectives(kept)


def test_a_rank_without_a_gradient_waits_for_nobody(two_ranks):
    expected = dict(alone(DOUBLE).named_parameters())
    for norms, calls in two_ranks.run(without_a_gradient):
        assert calls == ["all_reduce.default"] * 2
        for name, norm in norms.items():
            copies = 1 if name == "embed.weight" else 2
            assert norm == pytest.approx(float(expected[name].grad.norm()) * math.sqrt(copies), rel=1e-12)


# steps that PyTorch itself cannot trace, as the page says


def traced_by_pytorch(rank, size, kind):
    model = KINDS[kind][0](rank, size, DOUBLE)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(model, fullgraph=True, backend="eager")(batch()[0])
    return str(error.value)


def test_pytorch_traces_neither_the_hooks_of_fsdp_nor_ddp(two_ranks):
    assert "disable" in two_ranks.run(traced_by_pytorch, 2, "FSDP2")[0]
    assert "Logger" in two_ranks.run(traced_by_pytorch, 2, "DDP")[0]


def page(rank, size, kind, code):
    """Run the page's code with our model, on each rank's share of the batch."""
    model = KINDS[kind][0](rank, size, DOUBLE)
    model.zero_grad()
    place, places = (0, 1) if kind == "TP" else (rank, size)
    x, y = (part.chunk(places)[place] for part in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = {"model": model, "loss_fn": loss_of, "lr": 0.1, "torch": torch, "gm": gm, "x": x, "y": y}
    scope["optimizer"] = optimizer
    true = torch.compile
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile = functools.partial(true, backend="aot_eager")
        try:
            exec(code, scope)  # noqa: S102 the page's own code
            if kind == "TP":
                found = [scope["step"](x, y)[1] for _ in range(3)]
                recorded = [(each.step, each.skipped) for each in scope["recorder"].read()]
                assert recorded == [(step, False) for step in range(3)]
            else:
                found = [scope["stats"]]
        finally:
            torch.compile = true
    return [stats.materialize().total_norm for stats in found]


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        pytest.param("TP", -2, marks=backward_of_dtensors),
        ("FSDP2", -1),
        pytest.param("DDP", -1, marks=pytest.mark.deep),
    ],
)
def test_the_page_runs(two_ranks, kind, block):
    code = sections("docs/how-to/compile.md")["Several ranks"][block]
    model = alone(DOUBLE)
    expected = [gm.grad_norm(model)]
    if kind == "TP":
        for _ in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            backward(model)
            expected.append(gm.grad_norm(model))
    for norms in two_ranks.run(page, 2, kind, code):
        assert norms == pytest.approx(expected, rel=1e-12)


def clip_to_other_limits(_):
    model = nn.Linear(4, 3)
    ranks = gm.Ranks(model, timeout=60)
    found = []
    # one more graph, in which the number is an input
    with one_graph(graphs=2) as compiled, torch._dynamo.config.patch(error_on_recompile=False):

        @compiled
        def step(limit):
            return gm.collect_and_clip_(model, limit, reduce=ranks)

        for limit in (1.0, 2.0, 3.0, 4.0):
            for p in model.parameters():
                p.grad = torch.full_like(p, 10.0)
            step(limit)
            found.append(gm.grad_norm(model))
    return found


def test_a_limit_that_changes_recompiles_once(two_ranks):
    for found in two_ranks.run(clip_to_other_limits):
        assert found == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=1e-5)


def reduce_while_another_thread_compiles(rank):
    found = []

    def reduce():
        parts = [(torch.full((2,), rank + 1.0), "sum"), (torch.full((2,), rank + 1.0), "max")]
        found.extend(all_reduce_pair(parts, dist.group.WORLD, 60.0))

    def backend(graph, _):
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return [(type(x).__name__, x.tolist()) for x in found]


def test_a_thread_reduces_with_its_timeout_while_another_one_compiles(two_ranks):
    # functional collectives have no timeout, and torch reports those whose results nobody waits for
    for found in two_ranks.run(reduce_while_another_thread_compiles):
        assert found == [("Tensor", [3.0, 3.0]), ("Tensor", [2.0, 2.0])]
