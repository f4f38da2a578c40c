"""`gm.watch`: the optimizer's step records and ends the step, in every kind of loop."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import PAIRS
from support.compiling import graphs
from support.watching import Sink

LOSS = nn.functional.mse_loss


def model_of(sizes=(4, 8, 1)):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def norm(parameters):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def train(model, optimizer, steps, monitor=None, scheduler=None):
    for step in range(steps):
        x, y = batch(step)
        loss = LOSS(model(x), y)
        loss.backward()
        if monitor is not None:
            monitor.note(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def test_a_plain_loop_is_recorded_as_by_a_monitor_and_trains_the_same():
    ours, by_hand, sink = model_of(), model_of(), Sink()
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with gm.watch(ours, optimizer, rules=(), updates=True, sinks=[sink]) as monitor:
        train(ours, optimizer, 5, monitor, scheduler)
    assert (monitor.failures, monitor.closed) == ({}, True)

    other, theirs = torch.optim.Adam(by_hand.parameters(), lr=0.1), Sink()
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5)
    options = {"updates": True, "optimizer": other, "states": 10}
    with gm.Monitor(by_hand, rules=(), **options, sinks=[theirs]) as monitor:
        for step in range(5):
            x, y = batch(step)
            loss = LOSS(by_hand(x), y)
            loss.backward()
            monitor.record()
            other.step()
            other.zero_grad()
            monitor.advance(loss=loss, lr=other.param_groups[0]["lr"])
            scheduler.step()

    assert same(ours, by_hand)
    assert sink.steps == theirs.steps == list(range(5))
    assert sink.scalars("lr") == theirs.scalars("lr") == [0.1, 0.05, 0.025, 0.0125, 0.00625]
    assert sink.scalars("loss") == theirs.scalars("loss")
    for a, b in zip(sink.records, theirs.records, strict=True):
        for record in (a, b):
            states = {"exp_avg", "exp_avg_sq"} if record.step < 2 else set()
            assert set(record.tables) == {"grads", "updates"} | states
        torch.testing.assert_close(a.columns(), b.columns(), rtol=0, atol=0)
        for name in {*PAIRS.index} - {"sumsq_g", "dot_ug", "n_nonzero_g", "n_stuck"}:
            pair = a.value(name, "updates"), b.value(name, "updates")
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
        for kind in a.tables:
            assert torch.equal(a.flags(kind), b.flags(kind))
        # before the gradients are cleared, and after it
        assert a.total("descent_cosine", "updates") > 0
        assert b.total("n_nonzero_g", "updates") == 0


def test_after_the_monitor_is_closed_the_loop_goes_on_without_it():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gm.watch(model, optimizer, rules=())
    train(model, optimizer, 2)
    monitor.close()
    train(model, optimizer, 2)

    assert (monitor.step, monitor.failures) == (2, {})


def test_a_fault_is_reported_as_in_any_with_block():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        with gm.watch(model, optimizer, rules=(), sinks=[sink]):
            train(model, optimizer, 2)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        run()

    assert [fault.reason for fault in sink.faults] == ["exception"]


def test_accumulated_gradients_are_recorded_as_they_are_before_they_are_clipped():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, rules=(), sinks=[sink]):
        for step in range(3):
            for part in range(4):
                x, y = batch(4 * step + part)
                LOSS(model(x), y).backward()
            norms.append(norm(model.parameters()))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    assert sink.totals == pytest.approx(norms, rel=1e-12)
    assert min(norms) > 1


# mixed precision


def scaled(model, optimizer, scaler, *, unscale, steps=6):
    for step in range(steps):
        x, y = batch(step)
        if step == 2:
            x = x * math.inf
        scaler.scale(LOSS(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_recorded_as_skipped(unscale, fused):
    models, sink = [nn.Linear(4, 1)], Sink()
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1, fused=fused) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    with gm.watch(models[0], optimizers[0], scaler=scalers[0], rules=(), sinks=[sink]) as monitor:
        scaled(models[0], optimizers[0], scalers[0], unscale=unscale)
    scaled(models[1], optimizers[1], scalers[1], unscale=unscale)

    assert monitor.failures == {}
    assert same(models[0], models[1])
    assert sink.steps == list(range(6))
    assert [record.skipped for record in sink.records] == [False, False, True, False, False, False]
    norms = []
    for step in (0, 1, 3, 4, 5):
        x, y = batch(step)
        LOSS(models[2](x), y).backward()
        norms.append(norm(models[2].parameters()))
        optimizers[2].step()
        optimizers[2].zero_grad()
    found = [total for total in sink.totals if math.isfinite(total)]
    assert found == pytest.approx(norms, rel=1e-4)


def test_without_the_scaler_a_fused_step_is_unscaled_all_the_same():
    model, sink = nn.Linear(4, 1), Sink()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    x, y = batch(0)
    LOSS(model(x), y).backward()
    expected = norm(model.parameters())
    optimizer.zero_grad()
    with gm.watch(model, optimizer, rules=(), sinks=[sink]):
        scaled(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0), unscale=False, steps=3)

    assert sink.totals[0] == pytest.approx(expected)
    assert sink.records[2].skipped


def test_a_scaler_that_is_disabled_changes_nothing():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with gm.watch(model, optimizer, scaler=scaler, rules=(), sinks=[sink]) as monitor:
        for step in range(4):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            if step < 2:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    assert sink.steps == [0, 1, 2, 3]
    assert monitor.skips is False


# closures and several optimizers


def test_with_a_closure_the_last_evaluation_is_recorded():
    model, sink, norms = model_of(), Sink(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x, y = batch(0)

    def closure():
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        norms.append(norm(model.parameters()))
        return loss

    last = []
    with gm.watch(model, optimizer, rules=(), sinks=[sink]) as monitor:
        for _ in range(3):
            optimizer.step(closure) if len(last) % 2 else optimizer.step(closure=closure)
            last.append(norms[-1])
    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2])
    assert sink.totals == pytest.approx(last)


def test_several_optimizers_record_their_own_part_and_the_last_ends_the_step():
    maker, judge, sink = nn.Linear(4, 4), nn.Linear(4, 1), Sink()
    first = torch.optim.SGD(judge.parameters(), lr=0.1)
    second = torch.optim.SGD(maker.parameters(), lr=0.2)
    norms = []
    models = {"maker": maker, "judge": judge}
    with gm.watch(models, [first, second], rules=(), sinks=[sink], fingerprint=True) as monitor:
        for step in range(3):
            x, y = batch(step)
            judged = LOSS(judge(maker(x).detach()), y)
            judged.backward()
            norms.append(norm(judge.parameters()))
            first.step()
            first.zero_grad()
            # this loss leaves gradients in the judge, which nobody uses
            LOSS(judge(maker(x)), -y).backward()
            norms.append(norm(maker.parameters()))
            second.step()
            first.zero_grad()
            second.zero_grad()
            monitor.note(judged=judged)

    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2])
    found = []
    for record in sink.records:
        rows = [record.report()[f"{name}.{part}"] for name in models for part in ("weight", "bias")]
        maker_norms, judge_norms = rows[:2], rows[2:]
        found += [math.hypot(*(row.norm for row in part)) for part in (judge_norms, maker_norms)]
    assert found == pytest.approx(norms)
    assert [record.fingerprints()[:, 0].tolist() for record in sink.records] == [[64, 16, 16, 4]] * 3
    assert [record.scalars["lr_1"] for record in sink.records] == [0.2] * 3
    # noted after the step ended, so it is the next step's
    assert ["judged" in record.scalars for record in sink.records] == [False, True, True]


def test_a_parameter_that_no_optimizer_has_is_recorded_too():
    model, sink = model_of(), Sink()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD([model[2].weight], lr=0.1)
    with gm.watch(model, (first, second), rules=(), sinks=[sink]):
        x, y = batch(0)
        LOSS(model(x), y).backward()
        first.step()
        second.step()

    assert len(sink.records[0].report()) == 4


# compiled code


@pytest.mark.usefixtures("_dynamo")
# Dynamo checks whether a tensor has a gradient; it hides the warning, but not from a filter that raises
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("what", ["model", "optimizer", "method", "step"])
def test_with_compiled_code_every_step_is_recorded(what):
    model, sink = model_of(), Sink()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    called = torch.compile(model, backend="aot_eager") if what == "model" else model

    def update():
        optimizer.step()

    def step(x, y):
        loss = LOSS(called(x), y)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    if what == "optimizer":
        update = torch.compile(update, backend="aot_eager")
    elif what == "method":
        update = torch.compile(optimizer.step, backend="aot_eager")
    elif what == "step":
        step = torch.compile(step, backend="aot_eager")
    with gm.watch(model, optimizer, rules=(), sinks=[sink]) as monitor:
        for i in range(3):
            step(*batch(i))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for i in range(3, 8):
                step(*batch(i))
    assert (monitor.failures, sink.steps) == ({}, list(range(8)))

    optimizer, theirs = torch.optim.Adam(plain.parameters(), lr=torch.tensor(0.1)), Sink()
    with gm.watch(plain, optimizer, rules=(), sinks=[theirs]):
        train(plain, optimizer, 8)
    assert sink.totals == pytest.approx(theirs.totals, rel=1e-3)
    if what == "model":
        assert graphs() == 1


@pytest.mark.usefixtures("_dynamo")
def test_in_a_fullgraph_step_the_error_says_what_to_use():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer, rules=()):
        train(model, optimizer, 1)

        def use():
            optimizer.step()

        compiled = torch.compile(use, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use gm\.Monitor in a fullgraph step"):
            compiled()


# errors


@pytest.mark.parametrize(
    ("optimizer", "scaler", "error", "says"),
    [
        (None, None, TypeError, r"pass the optimizer too: gm\.watch\(model, optimizer\)"),
        ("adam", None, TypeError, "expected a torch.optim.Optimizer, or several, got str"),
        ([], None, ValueError, "got no optimizer"),
        (torch.optim.SGD, 1024.0, TypeError, r"expected scaler=torch.amp.GradScaler.*got float"),
    ],
)
def test_what_is_no_optimizer_or_scaler_is_refused(optimizer, scaler, error, says):
    model = model_of()
    optimizer = optimizer(model.parameters()) if optimizer is torch.optim.SGD else optimizer
    with pytest.raises(error, match=says):
        gm.watch(model, optimizer, scaler=scaler)


def test_the_optimizer_of_another_model_is_refused():
    says = (
        r"this SGD holds none of the watched model's parameters, but 4 other tensors, the first of shape "
        r"\(8, 4\) float32: watch the model that it updates, .*the master weights by name.*or use gm.Monitor"
    )
    with pytest.raises(ValueError, match=says) as raised:
        gm.watch(model_of(), torch.optim.SGD(model_of().parameters()))
    assert "does not train" not in str(raised.value)


def test_an_optimizer_of_master_weights_is_watched_with_the_gradients_of_the_model():
    model, sink, norms = model_of().bfloat16(), Sink(), []
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    # in another order, and in two groups
    optimizer = torch.optim.AdamW([{"params": masters[1::2]}, {"params": masters[::2]}], lr=0.1)
    with gm.watch(model, optimizer, rules=(), sinks=[sink]) as monitor:
        for step in range(3):
            x, y = batch(step)
            LOSS(model(x.bfloat16()), y.bfloat16()).backward()
            norms.append(norm(model.parameters()))
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            model.zero_grad()

    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2])
    assert sink.totals == pytest.approx(norms)


@pytest.mark.parametrize(
    "held",
    [
        lambda model: [p.detach().bfloat16() for p in model.parameters()],
        lambda model: [torch.cat([p.detach().double().flatten() for p in model.parameters()])],
        lambda model: [p.detach().double() for p in [*model.parameters(), *model.parameters()]],
    ],
    ids=["narrower", "flat", "too many"],
)
def test_tensors_that_cannot_be_master_weights_are_refused(held):
    model = model_of()
    with pytest.raises(ValueError, match="holds none of the watched model's parameters"):
        gm.watch(model, torch.optim.SGD([p.requires_grad_() for p in held(model)]))


def test_a_refused_option_leaves_the_optimizer_alone():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError):
        gm.watch(model, optimizer, capcity=3)
    with pytest.raises(ValueError, match="every"):
        gm.watch(model, optimizer, every=0)

    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_error_ends_the_watching_and_not_the_training(caplog, monkeypatch):
    model = model_of()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    monitor = gm.watch(model, optimizers, rules=())

    def fail(*_, **__):
        raise RuntimeError("out\nof memory")

    monkeypatch.setattr("gradiometer.integrations.training_loop.collect_part", fail)
    for step in range(2):
        x, y = batch(step)
        LOSS(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 2)

    assert same(model, plain)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == "watch: RuntimeError: out of memory; training continues without the monitor"
    monitor.close()


def test_an_optimizer_that_is_gone_leaves_nothing_behind():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gm.watch(model, optimizer, rules=())
    train(model, optimizer, 1)
    monitor.close()
    gone = weakref.ref(monitor)
    del optimizer, monitor
    gc.collect()

    assert gone() is None


# notes


def test_notes_belong_to_the_step_and_advance_replaces_them():
    model, sink = nn.Linear(2, 1), Sink()
    with gm.Monitor(model, rules=(), sinks=[sink]) as monitor:
        monitor.note(loss=torch.tensor(1.0, requires_grad=True) * 2, a=1)
        monitor.note(a=2)
        monitor.advance(b=3)
        monitor.note(loss=4.0, lr=5.0)
        monitor.advance(loss=6.0)

    assert [dict(record.scalars) for record in sink.records] == [
        {"loss": 2.0, "a": 2.0, "b": 3.0},
        {"loss": 6.0, "lr": 5.0},
    ]


def test_a_loop_that_never_calls_the_optimizer_is_told_at_the_end(caplog):
    model = torch.nn.Linear(2, 1)
    with gm.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        for _ in range(3):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            monitor.note(loss=loss)
    assert monitor.failures == {"advance": 1}
    assert "the optimizer that gm.watch was given has to step" in caplog.text


def test_another_optimizer_that_steps_is_told_at_the_end(caplog):
    model = model_of()
    optimizer, other = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with gm.watch(model, optimizer, rules=()) as monitor:
        train(model, other, 3)
    assert monitor.failures == {"advance": 1}
    assert "the watched optimizer did not step: pass gm.watch the one that does" in caplog.text


def test_parameters_may_be_an_iterator_and_swapped_arguments_are_told():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model.parameters(), optimizer, rules=()) as monitor:
        train(model, optimizer, 2)
    assert (monitor.step, monitor.failures) == (2, {})
    with pytest.raises(TypeError, match=r"got Sequential; call gm\.watch\(model, optimizer\)"):
        gm.watch(optimizer, model)
