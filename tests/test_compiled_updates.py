"""Snapshots and updates in compiled steps: one graph, compiled once, and the bits of eager calls."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

import gradiometer as gm
from support.compiling import Kept, graphs, inductor_if_deep, needs_compiler, no_recompile
from support.gradients import bit_patterns

pytestmark = pytest.mark.usefixtures("_dynamo", "_one_thread")

STEPS = 4


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def wide():
    """Return a model of which half is in a sample of 1/2."""
    return nn.Sequential(nn.Linear(4, 4096), nn.GELU(), nn.Linear(4096, 3))


def frozen():
    model = small()
    model[0].requires_grad_(False)
    return model


def clear(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = None


def update(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]


def snapshot_first(model, snapshot, collect):
    def step(x, y):
        clear(model)
        snapshot.update_(model)
        mse_loss(model(x), y).backward()
        update(model)
        return collect(), grads_of(model)

    return step


def snapshot_last(model, snapshot, collect):
    def step(x, y):
        mse_loss(model(x), y).backward()
        update(model)
        told, grads = collect(), grads_of(model)
        snapshot.update_(model)
        clear(model)
        return told, grads

    return step


def snapshot_outside(model, snapshot, collect):
    """The compiled function is called by a step that keeps the weights itself."""

    def step(x, y):
        clear(model)
        mse_loss(model(x), y).backward()
        update(model)
        return collect(), grads_of(model)

    compiled = None

    def outer(x, y):
        nonlocal compiled
        compiled = compiled or outer.compile(step)
        snapshot.update_(model)
        return compiled(x, y)

    return outer


def backward_outside(model, snapshot, collect):
    def inside():
        snapshot.update_(model)
        update(model)
        return collect(), grads_of(model)

    compiled = None

    def outer(x, y):
        nonlocal compiled
        compiled = compiled or outer.compile(inside)
        model.zero_grad(set_to_none=False)
        mse_loss(model(x), y).backward()
        return compiled()

    return outer


def groups_of(collect):
    return lambda: (collect().by_module(), collect().group({"all": "."}), collect().update_ratio)


# name -> step, model, the sample, what is told
STEPS_OF = {
    "snapshot first": (snapshot_first, small, 1, lambda collect: collect),
    "snapshot last": (snapshot_last, small, 1, lambda collect: collect),
    "snapshot outside": (snapshot_outside, small, 1, lambda collect: collect),
    "backward outside": (backward_outside, small, 1, lambda collect: collect),
    "a sample, first": (snapshot_first, wide, 1 / 2, lambda collect: collect),
    "a sample, last": (snapshot_last, wide, 1 / 2, lambda collect: collect),
    "nested": (snapshot_first, small, 1, lambda collect: lambda: {"a": [collect()], "b": (collect(),)}),
    "groups": (snapshot_last, small, 1, groups_of),
    "merged": (snapshot_first, small, 1, lambda collect: lambda: collect().merge(collect())),
    "frozen parameters": (snapshot_first, frozen, 1, lambda collect: collect),
    "bfloat16": (snapshot_last, lambda: small().bfloat16(), 1, lambda collect: collect),
}


def bits(told):
    leaves = pytree.tree_leaves(told, is_leaf=lambda x: isinstance(x, gm.PairStats))
    return [
        (x.names, bit_patterns([x.columns])) if isinstance(x, gm.PairStats) else bit_patterns([x])
        for x in leaves
        if x is not None
    ]


# Inductor takes seconds per graph
WITH_INDUCTOR = {"snapshot first", "a sample, last"}
CASES = [
    *[(which, "aot_eager", False) for which in STEPS_OF],
    *[(which, "aot_eager", True) for which in sorted(WITH_INDUCTOR)],
    *[
        pytest.param(
            which,
            "inductor",
            False,
            marks=[needs_compiler, *([] if which in WITH_INDUCTOR else [pytest.mark.deep])],
        )
        for which in STEPS_OF
    ],
]


@pytest.mark.parametrize(("which", "backend", "reduce"), CASES)
def test_a_compiled_step_tells_what_eager_calls_do(which, backend, reduce):
    body, build, sample, tell = STEPS_OF[which]
    torch.manual_seed(0)
    model = build()
    ranks = gm.Ranks(model) if reduce else False
    snapshot = gm.Snapshot(model, sample=sample)
    step = body(model, snapshot, tell(lambda: gm.collect_updates(model, snapshot, reduce=ranks)))

    compiled = functools.partial(torch.compile, fullgraph=True, backend=backend)
    if which in {"snapshot outside", "backward outside"}:
        step.compile = compiled
    else:
        step = compiled(step)
    dtype = next(model.parameters()).dtype
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(i)
        x, y = (torch.randn(5, n, generator=generator).to(dtype) for n in (4, 3))
        before = copy.deepcopy(model)
        with no_recompile() if i >= 2 else contextlib.nullcontext():
            told, grads = step(x, y)
        assert graphs() == 1
        # the same in eager mode, from the weights before and after the step
        old, new = gm.Snapshot(before, sample=sample), copy.deepcopy(model)
        for p, grad in zip([p for p in new.parameters() if p.requires_grad], grads, strict=True):
            p.grad = grad
        twins = gm.Ranks(new) if reduce else False
        expected = tell(functools.partial(gm.collect_updates, new, old, reduce=twins))()
        assert bits(told) == bits(expected)
        # and the buffers hold the weights, those before or after the step
        kept = gm.Snapshot(
            model if which.endswith("last") or body is snapshot_last else before, sample=sample
        )
        assert bit_patterns(snapshot.buffers()) == bit_patterns(kept.buffers())
    stats = pytree.tree_leaves(told, is_leaf=lambda x: isinstance(x, gm.PairStats))[0]
    assert stats.materialize().total.norm_u > 0


@inductor_if_deep
def test_two_lists_are_compared_in_a_graph(backend):
    model = small()

    @torch.compile(fullgraph=True, backend=backend)
    def step(x):
        first, second = (
            torch.autograd.grad(model(part).square().mean(), list(model.parameters())) for part in x
        )
        return gm.compare(first, second), first, second

    for i in range(STEPS):
        with no_recompile() if i >= 2 else contextlib.nullcontext():
            stats, first, second = step(torch.randn(2, 5, 4))
        assert bits(stats) == bits(gm.compare(first, second))
    assert graphs() == 1


def test_a_result_that_is_kept_agrees_with_other_statistics():
    model = small()
    snapshot, notes = gm.Snapshot(model), []

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        clear(model)
        model(x).square().mean().backward()
        update(model)
        notes.append(gm.collect_updates(model, snapshot))
        snapshot.update_(model)
        return gm.collect_grads(model), gm.collect_weights(model)

    for i in range(STEPS):
        with no_recompile() if i >= 2 else contextlib.nullcontext():
            grads, weights = step(torch.randn(5, 4))
        updates = notes.pop()
        assert updates.norm_g.tolist() == grads.norm.tolist()
        assert updates.norm_a.tolist() == weights.norm.tolist()
        assert str(updates.materialize()).startswith("4 pairs, ")


def test_the_snapshot_of_another_model_is_an_error_while_compiling():
    snapshot = gm.Snapshot(nn.Linear(4, 3))
    model = nn.Linear(5, 3)
    step = torch.compile(lambda: gm.collect_updates(model, snapshot), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"'weight' is \(3, 5\) on cpu, but was \(3, 4\)"):
        step()


def test_a_call_and_an_update_are_few_nodes_of_a_graph():
    model, kept = small(), Kept()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    snapshot = gm.Snapshot(model)

    @torch.compile(fullgraph=True, backend=kept.backend)
    def step():
        stats = gm.collect_updates(model, snapshot)
        snapshot.update_(model)
        return stats

    step()
    (graph,) = kept.graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("gradiometer.pair_stats" in call for call in calls) == 1
    # two ops, and for each buffer its result and the copy that aot_eager makes
    assert len(calls) <= 2 + 3 * len(snapshot.names), calls
