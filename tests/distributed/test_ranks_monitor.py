"""The monitor of several ranks: one run record of the job, no blocking of steps, and how it ends."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import gradiometer as gm
from gradiometer import distributed
from gradiometer.monitor import rank_merger, setup
from gradiometer.monitor.monitor import Monitor
from gradiometer.rules import ChangedGradients, LoopOrder
from gradiometer.runs.kept_step import load_kept_step
from gradiometer.runs.reader import read_run
from support.rank_pool import RankPool, torchrun

SIZES = (8, 6, 4)


def network():
    torch.manual_seed(1)
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def batch(step):
    return torch.randn(8, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model, step, rank, size):
    """Return the loss of this rank's part of a batch; the mean over the ranks is the loss of the batch."""
    return model(batch(step).chunk(size)[rank]).square().mean()


def train(model, monitor, rank, size, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, size)
        loss.backward()
        monitor.record()
        optimizer.step()
        monitor.advance(loss=loss, lr=0.1 / 3)


def wrapped(kind, model):
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def idle(monitor, steps):
    for _ in range(steps):
        monitor.record()
        monitor.advance(loss=1.0)


def job(rank, kind, steps, run_dir):
    model = wrapped(kind, network())
    options = {"weights": True, "rules": (), "ranks": True, "fingerprint": True}
    with Monitor(model, run_dir=run_dir, **options) as monitor:
        train(model, monitor, rank, dist.get_world_size(), steps)
    return monitor.failures, monitor.dropped, monitor.last.step


def assert_same(run_dir, other, steps):
    a, b = read_run(run_dir), read_run(other)
    assert a.catalog == b.catalog
    assert a.steps["step"].to_pylist() == b.steps["step"].to_pylist() == list(range(steps))
    for step in range(steps):
        mine, theirs = a.record(step), b.record(step)
        assert mine.recorded == theirs.recorded
        assert mine.scalars == pytest.approx(theirs.scalars, rel=1e-13, nan_ok=True)
        if mine.recorded:
            assert [*mine.tables] == [*theirs.tables]
            for kind in theirs.tables:
                # rounding differs
                torch.testing.assert_close(mine.columns(kind), theirs.columns(kind), rtol=1e-13, atol=0)
                assert torch.equal(mine.flags(kind), theirs.flags(kind))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_run_record_as_of_a_single_process(two_ranks, tmp_path, kind):
    found = two_ranks.run(job, kind, 30, str(tmp_path / "job"))
    assert found == [({}, 0, 29)] * 2
    alone = network()
    with Monitor(alone, run_dir=tmp_path / "alone", weights=True, rules=()) as monitor:
        train(alone, monitor, 0, 1, 30)
    assert_same(tmp_path / "job", tmp_path / "alone", 30)
    last = read_run(tmp_path / "job").record(29)
    assert (last.fingerprints("weights")[:, 0] >= 0).all()
    assert {path.name for path in (tmp_path / "job").iterdir()} == {".lock", "run.json", "steps", "tensors"}


def updated(rank, kind, run_dir):
    model = wrapped(kind, network())
    with Monitor(model, run_dir=run_dir, rules=(), updates=True, every=2) as monitor:
        train(model, monitor, rank, dist.get_world_size(), 6)
    return monitor.failures, monitor.dropped


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_updates_are_merged_as_of_a_single_process(two_ranks, tmp_path, kind):
    assert two_ranks.run(updated, kind, str(tmp_path / "job")) == [({}, 0)] * 2
    alone = network()
    with Monitor(alone, run_dir=tmp_path / "alone", rules=(), updates=True, every=2) as monitor:
        train(alone, monitor, 0, 1, 6)
    a, b = read_run(tmp_path / "job"), read_run(tmp_path / "alone")
    assert [record.step for record in a.records() if record.recorded] == [0, 2, 4]
    for step in (0, 2, 4):
        mine, theirs = a.record(step), b.record(step)
        for name in ("numel", "n_unchanged", "n_nonzero_g", "n_stuck"):
            assert torch.equal(mine.value(name, "updates"), theirs.value(name, "updates"))
        # the weights are below 1 and are rounded to 2**-54 in each of 6 steps: an update above 1e-5 has a
        # relative error below 1e-10
        assert theirs.value("rms", "updates").min() > 1e-5
        for name in ("norm", "sumsq_b", "sumsq_g", "dot_ug", "update_ratio", "descent_cosine"):
            values = [record.value(name, "updates") for record in (mine, theirs)]
            torch.testing.assert_close(*values, rtol=1e-10, atol=0)
            total = pytest.approx(theirs.total(name, "updates"), rel=1e-10)
            assert mine.total(name, "updates") == total
    ratios = [run.steps["update_ratio"].to_pylist()[::2] for run in (a, b)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-10)


def nonfinite_updates(rank, run_dir):
    model, give = sharded(rank)
    with Monitor(model, run_dir=run_dir, rules=[gm.rules.NonFinite()], updates=True) as monitor:
        for step in range(2):
            give("weight", 1.0)
            monitor.record()
            if step:
                with torch.no_grad():
                    part = model.weight.to_local()
                    part[0, : 2 + rank] = (math.inf, -math.inf)[rank]
                    part[1, 0] = (1.0, math.nan)[rank]
            monitor.record_updates()
            monitor.advance(loss=1.0)
    return monitor.failures, [finding.message for finding in monitor.findings]


def test_the_kinds_of_nonfinite_elements_are_those_of_all_ranks(two_ranks, tmp_path):
    found = two_ranks.run(nonfinite_updates, str(tmp_path / "job"))
    assert [failures for failures, _ in found] == [{}, {}]
    assert found[0][1] == ["weight.update, rank 0 (dp_shard 0 of 2), 1 NaN and 5 Inf of 12"]
    record = read_run(tmp_path / "job").record(1)
    counts = [record.value(name, "updates").tolist() for name in ("n_nan", "n_posinf", "n_neginf")]
    assert counts == [[1, 0], [2, 0], [3, 0]]


# many steps


def sharded(rank):
    """Return a layer with sharded parameters, and a function that gives it gradients as fast as possible."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
    model = nn.Linear(3, 2 * size, dtype=torch.float64)

    def cut(tensor):
        return DTensor.from_local(tensor.contiguous(), mesh, [Shard(0)], run_check=False)

    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(cut(p.detach().chunk(size)[rank])))

    def give(name, number):
        p = getattr(model, name)
        p.grad = None if number is None else cut(torch.full_like(p.to_local(), number))

    return model, give


@contextmanager
def counted():
    """Count the exchanges between ranks: pairs of SUM and MAX for steps, and single MAX all-reduces."""
    counts = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce_pair", "all_reduce"):
            real = getattr(distributed, name)

            def count(*args, name=name, real=real):
                counts[name] += 1
                return real(*args)

            patch.setattr(distributed, name, count)
        yield counts


def many(rank, run_dir, steps, pause=0.0, slow=-1, every=1):
    """Run steps whose values encode rank and step; return how ranks met."""
    model, give = sharded(rank)
    with counted() as counts, Monitor(model, run_dir=run_dir, rules=(), every=every) as monitor:
        for step in range(steps):
            give("weight", step + rank / 4)
            give("bias", None if (step + rank) % 3 else 1.0)
            monitor.record()
            monitor.advance(loss=float(step + rank), **{"of this rank" if rank else "of the first": 2.0})
            if step % 256 == 255:
                dist.barrier()
            if pause:
                time.sleep(pause)
            if rank == 1 and step == slow:
                time.sleep(1.0)
    return monitor.failures, monitor.dropped, counts["all_reduce_pair"], counts["all_reduce"]


def assert_many(run_dir, steps, size, every=1):
    run = read_run(run_dir)
    assert run.steps["step"].to_pylist() == list(range(steps))
    assert run.steps["recorded"].to_pylist() == [step % every == 0 for step in range(steps)]
    _, found = run.matrices(["numel", "sumsq", "abs_max"])
    found = {name: matrix.nan_to_num() for name, matrix in found.items()}
    for i, step in enumerate(range(0, steps, every)):
        ranks = [rank for rank in range(size) if not (step + rank) % 3]
        weights = 6 * sum((step + rank / 4) ** 2 for rank in range(size))
        assert found["numel"][i].tolist() == [6 * size, 2 * len(ranks)]
        assert found["sumsq"][i].tolist() == pytest.approx([weights, 2 * len(ranks)], rel=1e-13)
        assert found["abs_max"][i].tolist() == [step + (size - 1) / 4, float(bool(ranks))]
    scalars = run.steps["scalars"].to_pylist()
    assert all(dict(given) == {"of the first": 2.0, "of this rank": 2.0} for given in scalars)
    assert run.steps["loss"].to_pylist() == [step + (size - 1) / 2 for step in range(steps)]


def test_fast_loops_lose_nothing_and_meet_seldom(two_ranks, tmp_path):
    steps = 1500
    found = two_ranks.run(many, str(tmp_path), steps)
    for failures, dropped, windows, _ in found:
        assert failures == {}
        assert dropped == 0
        # few, because advance() has not waited for any
        assert windows < steps / 10
    assert_many(tmp_path, steps, 2)


def test_steps_off_the_cadence_travel_without_tensors(four_ranks, tmp_path):
    found = four_ranks.run(many, str(tmp_path), 400, 0.0, -1, 10)
    assert [failures for failures, *_ in found] == [{}] * 4
    assert_many(tmp_path, 400, 4, every=10)


def met(rank, run_dir, steps, pause, slow):
    """Run a slow loop whose ranks announce themselves sooner than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_merger, "_BEAT", 0.4)
        return many(rank, run_dir, steps, pause, slow)


def test_slow_loops_meet_once_a_step_and_a_slow_rank_is_waited_for(two_ranks, tmp_path):
    found = two_ranks.run(met, str(tmp_path), 8, 0.25, 4)
    for failures, dropped, windows, beats in found:
        assert (failures, dropped) == ({}, 0)
        # one per step, and up to three that find nothing: at first, at the end, and before the late step
        assert 8 <= windows <= 11
        assert beats >= 1
    assert_many(tmp_path, 8, 2)


# non-finite values


def spoiled(rank, run_dir, bad_rank, bad_step, every, weights):
    """Give one rank a NaN in one step, and return this rank's knowledge of it."""
    model, give = sharded(rank)
    with Monitor(model, run_dir=run_dir, every=every, weights=weights) as monitor:
        for step in range(24):
            give("weight", 1.0)
            give("bias", 1.0)
            if step == bad_step and rank == bad_rank:
                model.bias.grad.to_local()[0] = math.nan
            monitor.record()
            monitor.advance(loss=1.0)
        assert monitor.flush(20)
        state = monitor.state_dict()
    # nothing updates the weights, which is found too
    return (
        [finding.message for finding in monitor.findings if finding.rule == "nonfinite"],
        monitor.last.step,
        [finding for finding in state["findings"] if finding["rule"] == "nonfinite"],
        monitor.failures,
    )


@pytest.mark.parametrize("every", [1, 10])
def test_rank_and_shard_of_a_nan_are_named(four_ranks, tmp_path, every):
    found = four_ranks.run(spoiled, str(tmp_path), 2, 13, every, True)
    numel = 8 if every == 1 else 2
    said = f"bias.grad, rank 2 (dp_shard 2 of 4), 1 NaN of {numel}"
    assert [messages for messages, *_ in found] == [[said], [], [], []]
    assert found[0][2][0]["message"] == said
    assert [(last, failures) for _, last, _, failures in found] == [(23, {})] * 4
    run = read_run(tmp_path)
    assert [found.message for found in run.findings if found.rule == "nonfinite"] == [said]
    expected = list(range(24)) if every == 1 else [0, 10, 13, 20]
    assert [x["step"] for x in run.steps.to_pylist() if x["recorded"]] == expected
    record = run.record(13)
    # if only one rank recorded a step, its shards are not presented as whole tensors
    assert record.columns()[:, 0].tolist() == ([24.0, 8.0] if every == 1 else [0.0, 2.0])
    assert record.value("n_nan").tolist() == [0.0, 1.0]


def bad_batch(rank, kind, run_dir):
    model = wrapped(kind, network())
    with Monitor(model, run_dir=run_dir, ranks=True) as monitor:
        for step in range(6):
            model.zero_grad()
            loss = loss_of(model, step, rank, 2)
            # from one rank's batch: every rank gets it through reduced gradients
            loss = loss * math.nan if (rank, step) == (1, 3) else loss
            loss.backward()
            monitor.record()
            monitor.advance(loss=loss)
    return [finding.message for finding in monitor.findings]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_of_a_loss_that_is_not_finite_its_rank_is_named_and_no_other(two_ranks, tmp_path, kind):
    messages, others = two_ranks.run(bad_batch, kind, str(tmp_path))
    assert others == []
    (message,) = [message for message in messages if "NaN" in message]
    assert message.startswith("the loss is nan on rank 1; then ")
    assert "rank 0" not in message
    blackbox = read_run(tmp_path).blackbox
    assert blackbox["reason"] == "non-finite loss"
    assert blackbox["message"] == "loss nan on rank 1"


def raises(rank, run_dir, sleeps):
    model, give = sharded(rank)
    try:
        with Monitor(model, run_dir=run_dir) as monitor:
            for step in range(1000):
                give("weight", 1.0)
                give("bias", 1.0)
                if rank == 1 and step == 20:
                    model.bias.grad.to_local()[1] = math.inf
                monitor.record()
                if rank == 1 and step == 20:
                    raise ZeroDivisionError("by nothing")  # noqa: TRY301 as a training does
                monitor.advance(loss=1.0)
                time.sleep(0.01)
                if rank != 1 and step == 19:
                    # as if in a collective that the other rank never joins
                    for _ in range(600):
                        time.sleep(0.1)
                        if sleeps and (Path(run_dir) / "blackbox.json").exists():
                            return monitor.failures
    except ZeroDivisionError as error:
        return str(error)
    return None


def test_an_exception_on_one_rank_is_in_the_first_ones_black_box_before_training_ends(two_ranks, tmp_path):
    failures, text = two_ranks.run(raises, str(tmp_path), True)
    assert text == "by nothing"
    assert failures == {}
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(21))
    assert run.blackbox["reason"] == "other rank"
    assert run.blackbox["message"] == "rank 1: exception, ZeroDivisionError: by nothing"
    assert run.blackbox["first_nonfinite"] == "step 20, bias.grad, rank 1 (dp_shard 1 of 2), 1 Inf of 2"
    own = json.loads((tmp_path / "blackbox.rank-00001.json").read_text())
    assert (own["rank"], own["reason"], own["step"]) == (1, "exception", 20)
    assert own["first_nonfinite"] == "step 20, bias.grad, 1 Inf of 2"


def terminated(rank, run_dir):
    model, give = sharded(rank)
    give("weight", math.nan if rank else 1.0)
    began = math.nan
    try:
        with Monitor(model, run_dir=run_dir) as monitor:
            for step in range(40):
                monitor.record()
                monitor.advance(loss=1.0)
                if step == 30:
                    dist.barrier()
                    began = time.monotonic()
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as error:
        return error.code, time.monotonic() - began, monitor.failures
    return None


def test_sigterm_on_all_ranks(four_ranks, tmp_path):
    for code, seconds, failures in four_ranks.run(terminated, str(tmp_path)):
        assert code == 143
        # waiting for a rank would end only after 45 s
        assert seconds < 30
        assert failures == {}
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(31))
    assert all(run.steps["recorded"].to_pylist())
    assert run.blackbox["reason"] == "SIGTERM"
    assert run.blackbox["message"] == ""
    assert run.blackbox["first_nonfinite"] == "step 0, weight.grad, rank 1 (dp_shard 1 of 4), 18 NaN of 24"
    for kind in ("json", "pt"):
        expected = {f"blackbox.rank-{rank:05d}.{kind}" for rank in (1, 2, 3)} | {f"blackbox.{kind}"}
        assert {path.name for path in tmp_path.glob(f"blackbox*.{kind}")} == expected
    # the step that the black box names, of each rank
    assert {load_kept_step(path).step for path in tmp_path.glob("blackbox*.pt")} == {0}


# ranks that died, or were never there


def loses(rank, run_dir, victim, how):
    size = dist.get_world_size()
    model, give = sharded(rank)
    ranks = gm.Ranks(model, timeout=3.0)
    processes = [None] * size
    dist.all_gather_object(processes, os.getpid())
    began = time.monotonic()
    with Monitor(model, run_dir=run_dir, ranks=ranks) as monitor:
        for step in range(100):
            give("weight", 1.0)
            monitor.record()
            monitor.advance(loss=1.0)
            time.sleep(0.02)
            if step == 50:
                monitor.flush(10)
                dist.barrier()
                if rank == victim:
                    os.kill(os.getpid(), how)
        ended = time.monotonic()
    seconds = time.monotonic() - ended
    if rank == 0:
        with suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGKILL)
    return monitor.failures, ended - began, seconds


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_named_and_training_goes_on(tmp_path, how):
    with closing(RankPool(3)) as pool:
        outcomes = pool.outcomes(loses, str(tmp_path), 1, how)
    assert [failed for failed, _ in outcomes] == [False, True, False]
    for _, (failures, _, seconds) in (outcomes[0], outcomes[2]):
        assert failures.keys() == {"ranks"}
        assert seconds < 30
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(100))
    recorded = run.steps["recorded"].to_pylist()
    assert all(recorded[:51])
    assert not any(recorded[60:])
    assert run.blackbox["reason"] == "other rank"
    assert "rank 1 " in run.blackbox["message"]
    # the bias gets no gradient here
    assert [found.rule for found in run.findings] == ["no_gradient_flow"]


def breaks(rank, run_dir):
    model, give = sharded(rank)
    give("weight", 1.0)
    if rank == 1:

        def fails(*_):
            raise MemoryError("none left")

    with Monitor(model, run_dir=run_dir) as monitor:
        for step in range(30):
            monitor.record()
            monitor.advance(loss=1.0)
            time.sleep(0.02)
            if rank == 1 and step == 10:
                monitor._pipeline.merger._window.pack = fails
        began = time.monotonic()
    return monitor.failures, monitor._pipeline.merger.news, time.monotonic() - began


def test_a_rank_whose_merging_fails_holds_nobody_up(two_ranks, tmp_path):
    (first, second) = two_ranks.run(breaks, str(tmp_path))
    assert second[1] == "MemoryError: none left"
    assert first[0].keys() == second[0].keys() == {"ranks"}
    assert max(first[2], second[2]) < 30
    run = read_run(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(30))
    assert not run.steps["recorded"].to_pylist()[-1]


def unlike(rank, what):
    model = nn.Linear(2, 2)
    setup.TIMEOUT = 2.0
    dist.barrier()
    began = time.monotonic()
    try:
        if what == "absent" and rank:
            # longer than the timeout, which counts as an error here too; then the ranks meet again
            time.sleep(4.0)
        if what == "settings":
            Monitor(model, every=1 + rank, ranks=gm.Ranks(model, timeout=30.0))
        elif what == "argument":
            Monitor(model, capacity=rank, ranks=gm.Ranks(model, timeout=30.0))
        else:
            Monitor(model)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        setup.TIMEOUT = 60.0
    return None


def test_a_monitor_that_is_not_made_on_every_rank(two_ranks):
    (name, text, seconds), (late, _, _) = two_ranks.run(unlike, "absent")
    assert name == late == "RankError"
    assert "rank 1 of 2 did not arrive within 2 s" in text
    assert text.endswith("Create the Monitor on every rank, or pass ranks=False")
    assert seconds < 30


def test_monitors_that_are_made_in_other_ways_are_refused_on_every_rank(two_ranks):
    found = two_ranks.run(unlike, "settings")
    text = "Monitor(every=2) on rank 1, but 1 on rank 0: pass the same value on all ranks"
    assert [answer[:2] for answer in found] == [("RankError", text)] * 2
    found = two_ranks.run(unlike, "argument")
    text = "Recorder(capacity=0): capacity must be an integer, at least 1"
    assert found[0][:2] == ("ValueError", text)
    assert found[1][:2] == ("RankError", f"Monitor: rank 0 could not create its Monitor: ValueError: {text}")


def apart(rank, run_dir):
    model = nn.Linear(2, 1)
    with Monitor(model, run_dir=run_dir, ranks=False, rules=()) as monitor:
        for step in range(5 + rank):
            model.weight.grad = torch.full((1, 2), float(step + rank))
            monitor.record()
            monitor.advance(loss=float(rank))
    return monitor.last.step, monitor._pipeline.merger


def test_ranks_apart_have_a_folder_each(two_ranks, tmp_path):
    assert two_ranks.run(apart, str(tmp_path)) == [(4, None), (5, None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000", "rank-00001"]
    run = read_run(tmp_path / "rank-00001")
    assert run.steps["loss"].to_pylist() == [1.0] * 6
    assert run.record(5).value("abs_max").tolist() == [6.0, 0.0]


def resumes(rank, run_dir):
    model, give = sharded(rank)
    give("weight", 1.0)
    states = []
    with Monitor(model, run_dir=run_dir) as monitor:
        for part in range(2):
            idle(monitor, 10)
            began = time.monotonic()
            if part == 0 or rank == 0:
                states.append(monitor.state_dict())
            seconds = time.monotonic() - began
            dist.barrier()
    told = [states[0]]
    dist.broadcast_object_list(told, 0)
    with Monitor(model, run_dir=run_dir) as monitor:
        monitor.load_state_dict(told[0])
        idle(monitor, 10)
    return monitor.failures, monitor.step, seconds


def test_a_job_is_resumed_from_the_first_ranks_state(two_ranks, tmp_path):
    found = two_ranks.run(resumes, str(tmp_path))
    assert [(failures, step) for failures, step, _ in found] == [({}, 20)] * 2
    # if only the first rank has a state, no rank waits long
    assert found[0][2] < 30
    run = read_run(tmp_path)
    assert run.steps["attempt"].to_pylist() == [1] * 10 + [2] * 10
    assert all(run.steps["recorded"].to_pylist())


def forgets(rank, run_dir):
    """Let a monitor be garbage-collected on the thread that merges."""
    model, give = sharded(rank)
    give("weight", 1.0)
    monitor = Monitor(model, run_dir=run_dir, rules=())
    merged, pipeline = monitor._pipeline.merger, monitor._pipeline
    idle(monitor, 10)
    circle = [monitor]
    circle.append(circle)
    wait, has_gone = merged._await_turn, threading.Event()

    def collects():
        if has_gone.is_set():
            has_gone.clear()
            gc.collect()
        wait()

    merged._await_turn = collects
    gc.disable()
    try:
        del monitor, circle
        began = time.monotonic()
        has_gone.set()
        while not pipeline.is_ended and time.monotonic() - began < 30:
            time.sleep(0.01)
    finally:
        gc.enable()
    return pipeline.is_ended, merged._failures.counts


def test_a_forgotten_monitor_that_is_collected_on_its_own_thread_ends_in_order(two_ranks, tmp_path):
    for is_ended, failures in two_ranks.run(forgets, str(tmp_path)):
        assert is_ended
        assert failures == {}
    assert read_run(tmp_path).steps["recorded"].to_pylist() == [True] * 10


_SCRIPT = """
import atexit, sys, time, torch, torch.distributed as dist, gradiometer as gm
end = [0.0]
atexit.register(lambda: print("seconds", round(time.monotonic() - end[0], 1)))
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
monitors = [gm.Monitor(model, run_dir=f"{sys.argv[2]}/{i}", rules=()) for i in range(4)]
for step in range(20):
    model(torch.ones(1, 2)).sum().backward()
    for monitor in monitors:
        monitor.record()
        monitor.advance(loss=1.0)
if sys.argv[1] == "destroyed":
    for monitor in monitors:
        monitor.flush(20)
    dist.destroy_process_group()
    for monitor in monitors:
        monitor.close()
    print("failures", [monitor.failures for monitor in monitors])
end[0] = time.monotonic()
"""


@pytest.mark.parametrize("how", ["unclosed", pytest.param("destroyed", marks=pytest.mark.deep)])
def test_scripts_that_end_without_closing_first(tmp_path, how):
    script = tmp_path / "script.py"
    # other addresses, and so another order of sets, on each rank
    other = "import os\njunk = [object() for _ in range(int(os.environ['RANK']) * 997)]\n"
    script.write_text(other + _SCRIPT)
    done = torchrun(script, how, str(tmp_path))
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds")]
    assert len(seconds) == 2
    assert max(seconds) < 30
    for place in range(4):
        run = read_run(tmp_path / str(place))
        assert run.steps["recorded"].to_pylist() == [True] * 20
        # destroying the group first is not an error
        assert (run.blackbox is None) == (how == "destroyed")
    assert done.stderr.count("the process group was destroyed before") == (8 if how == "destroyed" else 0)
    assert "other rank" not in done.stderr


def out_of_step(rank, run_dir):
    model, give = sharded(rank)
    give("weight", 1.0)
    with Monitor(model, run_dir=run_dir, ranks=True) as monitor:
        monitor.step = 7 * rank
        idle(monitor, 5)
        monitor.flush(10)
    return monitor.failures, monitor._pipeline.merger.news


def test_ranks_out_of_step_are_told_apart(two_ranks, tmp_path):
    for failures, news in two_ranks.run(out_of_step, str(tmp_path)):
        assert failures.keys() == {"ranks"}
        assert news.startswith("rank 1 is in step 7, but rank 0 is in step 0: call advance() once per step")
    assert not any(read_run(tmp_path).steps["recorded"].to_pylist())


# gm.watch


def train_watched(model, rank, size, run_dir, limit=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"weights": True, "rules": [ChangedGradients(), LoopOrder()], "states": 4}
    with gm.watch(model, optimizer, run_dir=run_dir, **options) as monitor:
        for step in range(10):
            loss = loss_of(model, step, rank, size)
            loss.backward()
            monitor.note(loss=loss)
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.failures, monitor.dropped, monitor.findings


def watched_job(rank, kind, run_dir, limit=None):
    return train_watched(wrapped(kind, network()), rank, dist.get_world_size(), run_dir, limit)


@pytest.mark.parametrize("limit", [None, 0.01])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_watched_loop_of_two_ranks_is_as_of_a_single_process(two_ranks, tmp_path, kind, limit):
    assert two_ranks.run(watched_job, kind, str(tmp_path / "job"), limit) == [({}, 0, [])] * 2
    train_watched(network(), 0, 1, tmp_path / "alone", limit)
    assert_same(tmp_path / "job", tmp_path / "alone", 10)
    measured = [step for step in range(10) if read_run(tmp_path / "job").record(step).has("momentum_buffer")]
    assert measured == [0, 1, 4, 8]
    if limit is not None:
        for step in range(10):
            record = read_run(tmp_path / "job").record(step)
            factor = limit / (record.total() + 1e-6)
            assert factor < 1
            assert record.scalars["clip_factor"] == pytest.approx(factor)
            assert record.scalars["clip_max_norm"] == limit


def collectives_of_a_clip(rank, is_watched):
    model = wrapped("fsdp", network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, rank, 2).backward()
    watch = gm.watch(model, optimizer, rules=(), ranks=False) if is_watched else nullcontext()
    with watch, CommDebugMode() as mode:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return sum(mode.get_comm_counts().values()), norm.full_tensor(), grads


def test_a_clip_of_sharded_gradients_has_the_same_collectives_and_bits(two_ranks):
    (bare, norm, grads), (watched, norm_watched, grads_watched) = [
        two_ranks.run(collectives_of_a_clip, is_watched)[0] for is_watched in (False, True)
    ]
    assert bare == watched > 0
    assert torch.equal(norm, norm_watched)
    assert all(map(torch.equal, grads, grads_watched))
