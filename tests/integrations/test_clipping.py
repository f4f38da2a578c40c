"""Clipping under `gm.watch`: gradients are recorded as they are before it, however it is called."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

# bound before any watch
from torch.nn.utils import clip_grad_norm_ as early_clip
from torch.nn.utils import clip_grads_with_norm_ as early_clip_with_norm
from torch.nn.utils import get_total_norm as early_norm

import gradiometer as gm
from support.compiling import graphs
from support.watching import Sink

LOSS = nn.functional.mse_loss
LIMIT = 0.1
NAMES = ("_get_total_norm", "_clip_grads_with_norm_")
TORCH = [getattr(clip_grad, name) for name in NAMES] + [
    nn.utils.get_total_norm,
    nn.utils.clip_grads_with_norm_,
]


def patched():
    now = [getattr(clip_grad, name) for name in NAMES]
    return [*now, nn.utils.get_total_norm, nn.utils.clip_grads_with_norm_] != TORCH


@pytest.fixture(autouse=True)
def _restored():
    assert not patched()
    yield
    assert not patched()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def norm(parameters):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def train(model, optimizer, clip, steps=4):
    """Train, clipping with ``clip(model)``; return the norms before it."""
    norms = []
    for step in range(steps):
        x, y = batch(step)
        LOSS(model(x), y).backward()
        norms.append(norm(model.parameters()))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def by_hand(model):
    grads = [p.grad for p in model.parameters()]
    total = nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, (LIMIT / (total + 1e-6)).clamp(max=1.0))


def public(model):
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, total)


SEEN = {
    "early": lambda model: early_clip(model.parameters(), LIMIT),
    "module": lambda model: nn.utils.clip_grad_norm_(list(model.parameters()), LIMIT),
    "positional": lambda model: clip_grad.clip_grad_norm_(model.parameters(), LIMIT, 2.0, False, True),
    "public": public,
    "gm": lambda model: gm.clip_grad_norm_(model.parameters(), LIMIT),
    "gm with a norm": lambda model: gm.clip_grads_with_norm_(
        model, LIMIT, gm.total_norm([p.grad for p in model.parameters()])
    ),
    "gm, one read": lambda model: gm.collect_and_clip_(model, LIMIT),
    "twice": lambda model: [early_clip(model.parameters(), LIMIT) for _ in range(2)],
    "norm after it": lambda model: [
        early_clip(model.parameters(), LIMIT),
        nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ],
}


@pytest.mark.parametrize("clip", SEEN.values(), ids=SEEN)
def test_the_norms_are_those_before_the_clip_and_the_training_is_the_same(clip):
    model, sink = model_of(), Sink()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], updates=True) as monitor:
        norms = train(model, optimizer, clip)
    train(twin, torch.optim.Adam(twin.parameters(), lr=0.1), clip)

    assert (monitor.failures, monitor.findings) == ({}, [])
    assert min(norms) > LIMIT
    assert sink.totals == pytest.approx(norms, rel=1e-6)
    assert sink.scalars("clip_max_norm") == [LIMIT] * 4
    assert sink.scalars("clip_factor") == pytest.approx([LIMIT / (x + 1e-6) for x in norms], rel=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradients_that_are_scaled_by_hand_are_recorded_when_their_norm_is_computed():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink]) as monitor:
        norms = train(model, optimizer, by_hand)
    assert sink.totals == pytest.approx(norms, rel=1e-6)
    assert "clip_factor" not in sink.records[0].scalars
    assert monitor.findings == []


def test_a_norm_after_each_micro_batch_does_not_hide_the_later_ones():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()):
        for step in range(3):
            for part in range(2):
                x, y = batch(2 * step + part)
                LOSS(model(x), y).backward()
                nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norms.append(norm(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    assert sink.totals == pytest.approx(norms)


def test_a_norm_after_the_step_records_nothing():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step)
            LOSS(model(x), y).backward()
            norms.append(norm(model.parameters()))
            early_clip(model.parameters(), LIMIT)
            optimizer.step()
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2])
    assert sink.totals == pytest.approx(norms)


def test_a_clip_of_a_part_is_recorded_before_it_and_the_rest_before_the_step():
    model, sink, expected = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=(), weights=True) as monitor:
        for step in range(3):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            expected.append(norm(model.parameters()))
            early_clip(model[0].parameters(), LIMIT)
            early_clip([model[2].weight], 2 * LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    assert sink.totals == pytest.approx(expected)
    assert [len(record.report()) for record in sink.records] == [4] * 3
    assert sink.scalars("clip_max_norm") == [LIMIT] * 3
    assert sink.scalars("clip_max_norm_1") == [2 * LIMIT] * 3


def test_another_order_has_a_factor_but_no_limit_of_the_norm():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()):
        norms = train(model, optimizer, lambda m: early_clip(m.parameters(), 0.01, math.inf), 1)
    assert sink.totals == pytest.approx(norms)
    assert "clip_max_norm" not in sink.records[0].scalars
    assert 0 < sink.records[0].scalars["clip_factor"] < 1


def test_an_adaptive_clip_of_each_tensor_has_neither():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = gm.PerTensorClip(model, warmup_steps=1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()):
        norms = train(model, optimizer, lambda m: gm.collect_and_clip_(m, clip))
    assert sink.totals == pytest.approx(norms)
    assert "clip_factor" not in sink.records[0].scalars


@pytest.mark.parametrize("first", ["unscale", "clip"])
def test_with_a_scaler_they_are_unscaled_whether_it_has_unscaled_them_or_not(first):
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with gm.watch(model, optimizer, scaler=scaler, sinks=[sink]) as monitor:
        for step in range(5):
            x, y = batch(step)
            scaler.scale(LOSS(model(x), y)).backward()
            norms.append(norm(model.parameters()) / 8)
            if first == "unscale":
                scaler.unscale_(optimizer)
            early_clip(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert sink.totals == pytest.approx(norms)
    assert [finding.rule for finding in monitor.findings] == ["loop_order"] * (first == "clip")


def test_a_clip_of_a_step_that_never_happens_does_not_hide_the_next_one():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()):
        for step in range(6):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            if step % 2:
                norms.append(norm(model.parameters()))
                optimizer.step()
            else:
                early_clip(model.parameters(), LIMIT)
            optimizer.zero_grad(set_to_none=step % 4 == 0)
    assert sink.totals == pytest.approx(norms)


def test_a_clip_inside_a_closure_is_seen():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = batch(0)

    def closure():
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        norms.append(norm(model.parameters()))
        early_clip(model.parameters(), LIMIT)
        return loss

    last = []
    with gm.watch(model, optimizer, rules=(), sinks=[sink]) as monitor:
        for _ in range(3):
            optimizer.step(closure)
            last.append(norms[-1])
    assert monitor.failures == {}
    assert sink.totals == pytest.approx(last)


def test_several_optimizers_whose_gradients_are_clipped_apart():
    maker, judge, sink, norms = nn.Linear(4, 4), nn.Linear(4, 1), Sink(), []
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (judge, maker)]
    with gm.watch({"maker": maker, "judge": judge}, optimizers, rules=(), sinks=[sink]) as monitor:
        for step in range(3):
            x, y = batch(step)
            LOSS(judge(maker(x)), y).backward()
            norms.append(norm([*judge.parameters(), *maker.parameters()]))
            early_clip(judge.parameters(), LIMIT)
            early_clip(maker.parameters(), LIMIT)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert monitor.failures == {}
    assert sink.totals == pytest.approx(norms)
    assert "clip_factor_1" in sink.records[0].scalars


# what is not seen


@pytest.mark.parametrize(
    ("clip", "steps"),
    [
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01), 3),
        (
            lambda model: early_clip_with_norm(model.parameters(), LIMIT, early_norm([model[0].weight.grad])),
            3,
        ),
        (lambda model: [p.grad.mul_(0.5) for p in model.parameters()], 3),
        (lambda model: [setattr(p, "grad", p.grad / 2) for p in model.parameters()], 3),
        (lambda model: gm.clip_grad_value_(model, 0.01), 3),
    ],
    ids=["by value", "early binding", "by hand", "replaced", "gm by value"],
)
def test_what_is_not_seen_is_told_once_and_the_gradients_used_are_recorded(clip, steps):
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used = []
    optimizer.register_step_pre_hook(lambda *_: used.append(norm(model.parameters())))
    with gm.watch(model, optimizer, sinks=[sink]) as monitor:
        train(model, optimizer, clip, steps)
    assert sink.totals == pytest.approx(used)
    (found,) = monitor.findings
    assert (found.rule, found.severity) == ("changed_gradients", gm.rules.Severity.INFO)
    assert found.message.startswith("something changed the gradients between backward() and step()")


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("where", ["start", "end"])
def test_loops_that_change_nothing_are_told_nothing(set_to_none, where):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer) as monitor:
        for step in range(6):
            if where == "start":
                optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(2):
                x, y = batch(2 * step + part)
                LOSS(model(x), y).backward()
            optimizer.step()
            if where == "end":
                optimizer.zero_grad(set_to_none=set_to_none)
    assert monitor.findings == []


def test_a_checkpointed_model_is_told_nothing():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer) as monitor:
        for step in range(5):
            x, y = batch(step)
            x.requires_grad_()
            LOSS(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=step % 2 == 0), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.findings == []


# the functions of torch


def test_watches_inside_each_other_share_the_patch():
    outer, inner, sinks = model_of(), model_of(), [Sink(), Sink()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (outer, inner)]
    with gm.watch(outer, optimizers[0], sinks=sinks[:1], rules=()):
        with gm.watch(inner, optimizers[1], sinks=sinks[1:], rules=()):
            assert patched()
            norms = train(inner, optimizers[1], SEEN["early"], 2)
        assert patched()
        norms += train(outer, optimizers[0], SEEN["early"], 2)
    assert not patched()
    assert sinks[1].totals + sinks[0].totals == pytest.approx(norms)


def test_a_patch_over_ours_is_kept_and_goes_on_to_work(monkeypatch):
    model, calls = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, rules=()):
        ours = clip_grad._get_total_norm
        monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *a: calls.append(1) or ours(*a))
        train(model, optimizer, SEEN["early"], 1)
    theirs = clip_grad._get_total_norm
    assert theirs is not TORCH[0]
    train(model, optimizer, SEEN["early"], 1)
    assert len(calls) == 2
    monkeypatch.undo()
    # what we have put there is called by nobody else now
    clip_grad._get_total_norm = TORCH[0]


def test_an_error_of_the_clip_is_torchs_own_and_leaves_the_watch_as_it_is():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink], rules=()) as monitor:
        model[0].weight.grad = torch.full_like(model[0].weight, math.nan)
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            early_clip(model.parameters(), LIMIT, error_if_nonfinite=True)
        with pytest.raises((ValueError, TypeError)):
            early_clip(model.parameters(), "a")
        optimizer.zero_grad()
        norms = train(model, optimizer, SEEN["early"], 2)
    assert monitor.failures == {}
    assert sink.totals == pytest.approx(norms)


def test_clips_of_something_else_are_left_alone():
    model, other, sink = model_of(), model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(_):
        LOSS(other(batch(0)[0]), batch(0)[1]).backward()
        early_clip(other.parameters(), LIMIT)
        early_clip([], LIMIT)
        nn.utils.get_total_norm([torch.ones(3)])

    with gm.watch(model, optimizer, sinks=[sink], rules=()):
        norms = train(model, optimizer, clip, 2)
    assert sink.totals == pytest.approx(norms)
    assert "clip_factor" not in sink.records[0].scalars


def test_a_forgotten_watch_restores_the_functions_of_torch():
    def forget():
        model = model_of()
        gm.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), rules=())
        assert patched()

    forget()
    gc.collect()
    assert not patched()


def test_a_closed_watch_leaves_no_hook_and_frees_the_model():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, rules=()):
        copied, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301 our own
        assert not any(p._post_accumulate_grad_hooks for m in (copied, again) for p in m.parameters())
        train(model, optimizer, SEEN["early"], 1)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


# compiled code


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_clip_is_one_graph_and_compiled_once_for_a_watch():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def clip():
        return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    with gm.watch(model, optimizer) as monitor:
        train(model, optimizer, lambda _: clip(), 1)
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(model, optimizer, lambda _: clip(), 4)
    assert graphs() == 1
    # nothing is seen of it but the change
    assert [finding.rule for finding in monitor.findings] == ["changed_gradients"]


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_traced_backward_pass_is_unknown_and_its_clip_is_seen():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def forward_backward(x, y):
        loss = LOSS(model(x), y)
        loss.backward()
        return loss.detach()

    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        gm.watch(model, optimizer, sinks=[sink]) as monitor,
    ):
        for step in range(5):
            forward_backward(*batch(step))
            norms.append(norm(model.parameters()))
            early_clip(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert sink.totals == pytest.approx(norms)
    assert monitor.findings == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_is_frozen_while_watched_hides_no_later_clip(set_to_none):
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(model):
        model[0].weight.requires_grad_(requires_grad=False)
        early_clip(model.parameters(), LIMIT)

    norms = []
    with gm.watch(model, optimizer, sinks=[sink]) as monitor:
        for step in range(6):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            norms.append(norm(model.parameters()))
            clip(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert sink.totals == pytest.approx(norms)
    assert not monitor.findings


def changes(records):
    return [record.step for record in records if record.model.changed_gradients]


def test_a_frozen_layer_whose_gradient_is_set_to_zero_is_no_change():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink]):
        for step in range(4):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            model[0].weight.requires_grad_(requires_grad=False)
    assert sink.steps == [0, 1, 2, 3]
    assert not changes(sink.records)


def test_a_backward_pass_that_raises_does_not_make_later_ones_a_change():
    model, sink, failing = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(parameter):
        del parameter
        if failing:
            raise ArithmeticError(failing.pop())

    with gm.watch(model, optimizer, sinks=[sink]):
        model[0].weight.register_post_accumulate_grad_hook(fail)
        for step in range(4):
            x, y = batch(step)
            if step == 1:
                failing.append("in the backward pass")
                with pytest.raises(ArithmeticError):
                    LOSS(model(x), y).backward()
            else:
                LOSS(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert sink.steps == [0, 1, 2]
    assert not changes(sink.records)


@pytest.mark.parametrize("is_first", [True, False])
def test_optimizers_that_step_in_the_backward_pass_are_no_change(is_first):
    model, sink = model_of(), Sink()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register():
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)

    if is_first:
        register()
    # the first layer steps last
    with gm.watch(model, [*optimizers.values()][::-1], sinks=[sink]):
        if not is_first:
            register()
        for number in range(4):
            x, y = batch(number)
            LOSS(model(x), y).backward()
    assert len(sink.steps) >= 3
    assert not changes(sink.records)


def test_the_factor_of_a_discarded_clip_is_replaced():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink]):
        for step in range(2):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            total = early_clip(model.parameters(), LIMIT)
            if step:
                optimizer.step()
            optimizer.zero_grad()
    assert sink.scalars("clip_factor") == pytest.approx([LIMIT / float(total)], rel=1e-4)
    assert "clip_factor_1" not in sink.records[0].scalars


@pytest.mark.parametrize("enabled", [True, False])
def test_one_write_into_the_gradients_is_a_change_with_a_scaler_too(enabled):
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    with gm.watch(model, optimizer, scaler=scaler, sinks=[sink]):
        for step in range(4):
            x, y = batch(step)
            scaler.scale(LOSS(model(x), y)).backward()
            if step % 2:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert changes(sink.records) == [1, 3]


def test_a_limit_that_is_another_kind_of_number_is_recorded():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, sinks=[sink]):
        train(model, optimizer, lambda model: early_clip(model.parameters(), Fraction(1, 8)), steps=1)
    assert sink.scalars("clip_max_norm") == [0.125]


def test_the_order_of_a_norm_in_another_thread_is_not_that_of_this_clip():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(model):
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        other = threading.Thread(target=nn.utils.get_total_norm, args=([torch.ones(2)], math.inf))
        other.start()
        other.join()
        nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, total)

    with gm.watch(model, optimizer, sinks=[sink]):
        train(model, optimizer, clip, steps=1)
    assert sink.scalars("clip_max_norm") == [LIMIT]
