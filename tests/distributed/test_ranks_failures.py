"""No rank waits forever: if one has died, is late or calls something else, the others raise and name it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import gradiometer as gm
from gradiometer.distributed import collectives, process_groups
from gradiometer.distributed import ranks as ranks_module
from support.rank_pool import RankPool, free_port, join_over_tcp

# seconds that ranks wait in these tests
TIMEOUT = 2.0
# seconds for a busy machine; less than the time-outs that must not be waited for
SLACK = 25.0


def tensors(prefix="layer", count=3):
    found = {f"{prefix}.{i}": torch.nn.Parameter(torch.full((2, 3), float(i + 1))) for i in range(count)}
    for parameter in found.values():
        parameter.grad = torch.ones(2, 3)
    return found


def attempt(function):
    """Return the exception as (kind, message), or (None, result)."""
    try:
        return None, function()
    except Exception as error:  # noqa: BLE001 what is raised is what is tested
        return type(error).__name__, str(error)


def norm(stats):
    return stats.materialize().total_norm


def one(found):
    """Return the single outcome, which must be the same on all ranks."""
    assert found == found[:1] * len(found), found
    return found[0]


# differences in the tensors of ranks


def differing(rank, kind):
    own = tensors()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    cut = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], run_check=False)
    if kind == "shape":
        own["layer.1"] = torch.ones(2, 3 + rank)
    elif kind == "dtype":
        own["layer.1"] = torch.ones(2, 3, dtype=[torch.float32, torch.bfloat16][rank])
    elif kind == "placement":
        placement = [Shard(0), Shard(1)][rank]
        own["layer.1"] = DTensor.from_local(torch.ones(2, 2), mesh, [placement], run_check=False)
    elif kind == "whole":
        own["layer.1"] = cut if rank else torch.ones(2, 3)
    elif rank:
        # missing on the first rank
        own["layer.1"] = cut
    else:
        del own["layer.1"]
    first = attempt(lambda: gm.Ranks(own, timeout=10))
    return first, norm(gm.collect_grads(tensors(), reduce=gm.Ranks(tensors(), timeout=10)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", r"'layer.1' is \(2, 3\).* on rank 0, but \(2, 4\).* on rank 1"),
        ("dtype", r"'layer.1' is .*float32.* on rank 0, but .*bfloat16.* on rank 1"),
        ("placement", r"'layer.1' is .*S\(0\).* on rank 0, but .*S\(1\).* on rank 1"),
        ("whole", r"'layer.1' is \(2, 3\) float32.* on rank 0, but .*S\(0\).* on rank 1"),
        (
            "missing",
            r"'layer.1' is sharded into 2 parts, but the ranks hold only 1 of them \(none on rank 0\)",
        ),
    ],
)
def test_every_rank_names_the_first_difference(two_ranks, kind, said):
    (raised, text), then = one(two_ranks.run(differing, kind))
    assert raised == "RankError"
    assert re.search(said, text), text
    assert then == pytest.approx(18**0.5)


# differences in the calls of ranks


def failing(rank):
    own = tensors()
    ranks = gm.Ranks(own, timeout=10)
    scale = -1.0 if rank == 1 else 1.0
    first = attempt(lambda: gm.collect_grads(own, inv_scale=scale, reduce=ranks))
    # stats of another model
    theirs = gm.collect_grads(tensors("other") if rank == 0 else own)
    second = attempt(lambda: theirs.reduce(ranks))
    return first, second, norm(gm.collect_grads(own, reduce=ranks))


def test_where_one_rank_fails_the_others_say_why_and_the_next_call_is_right(two_ranks):
    (first, second, norm0), (own, others, norm1) = two_ranks.run(failing)
    assert own[0] == "ValueError"
    assert first == ("RankError", f"reduce: rank 1 failed: {own[1]}")
    assert "inv_scale must be a positive" in own[1]
    assert second[0] == "ValueError"
    assert second[1].startswith("reduce: 'other.0' is not among the tensors that gm.Ranks was created with")
    assert others == ("RankError", f"reduce: rank 0 failed: {second[1]}")
    assert norm0 == norm1 == pytest.approx(18**0.5)


def not_the_same(rank, kind):
    own = tensors()
    ranks = gm.Ranks(own, timeout=10)
    other = gm.Ranks(tensors("other"), timeout=10)
    # rank 1 collects gradients
    calls = {
        "function": partial(gm.grad_norm, own, reduce=ranks),
        "what": partial(gm.collect_weights, own, reduce=ranks),
        "model": partial(gm.collect_grads, tensors("other"), reduce=other),
    }
    first = attempt(partial(gm.collect_grads, own, reduce=ranks) if rank else calls[kind])
    return first, norm(gm.collect_grads(own, reduce=ranks))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("function", "rank 1 called collect_grads, but rank 0 called grad_norm"),
        ("what", "rank 1 called collect_grads, but rank 0 called collect_weights"),
        ("model", "rank 1 and rank 0 called .* with gm.Ranks of different models"),
    ],
)
def test_ranks_that_do_not_call_the_same_are_told_at_once(two_ranks, kind, said):
    (raised, text), then = one(two_ranks.run(not_the_same, kind))
    assert raised == "RankError"
    assert re.search(said, text), text
    assert then == pytest.approx(18**0.5)


CLIP = partial(gm.collect_and_clip_, max_norm=1.0)
# a call, and the arguments of each rank
ARGUMENTS = {
    "max_norm": (gm.collect_and_clip_, {"max_norm": 1.0}, {"max_norm": math.inf}),
    "norm_type": (partial(gm.clip_grad_norm_, max_norm=1.0), {}, {"norm_type": "inf"}),
    "vanishing": (gm.collect_grads, {}, {"thresholds": gm.Thresholds(vanishing=0.5)}),
    "dead": (gm.collect_weights, {}, {"thresholds": gm.Thresholds(dead=0.5)}),
    "inv_scale": (gm.collect_grads, {"inv_scale": torch.tensor([0.5])}, {}),
    "inv_scale, as NaN": (CLIP, {"inv_scale": torch.tensor(math.nan)}, {"inv_scale": 0.5}),
    "max_norm, as a tensor": (gm.collect_and_clip_, {"max_norm": torch.tensor(1.0)}, {"max_norm": 2.0}),
    "skip_nonfinite": (gm.collect_grads, {"skip_nonfinite": True}, {}),
}


def not_the_same_arguments(rank, kind):
    own = tensors()
    ranks = gm.Ranks(own, timeout=10)
    function, *arguments = ARGUMENTS[kind]
    gradients = {name: x.grad.clone() for name, x in own.items()}
    found = attempt(lambda: function(own, reduce=ranks, **arguments[rank]))
    assert all(torch.equal(x.grad, gradients[name]) for name, x in own.items())
    # arguments of other types, but the same values
    limit = 1.0 if rank else torch.tensor(1.0, dtype=torch.float16)
    scale = torch.tensor([1.0]) if rank else None
    return found, gm.collect_and_clip_(own, limit, inv_scale=scale, reduce=ranks).total_norm.item()


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_differs_is_named_on_every_rank(two_ranks, kind):
    (raised, text), then = one(two_ranks.run(not_the_same_arguments, kind))
    assert raised == "RankError"
    given = rf"with {kind.partition(',')[0]}=\S+"
    assert re.search(rf"rank 1 called \w+ {given}, but rank 0 {given}; every rank", text), text
    assert then == pytest.approx(18**0.5)


def not_the_same_when_compiled(rank, kind):
    own = tensors()
    ranks = gm.Ranks(own, timeout=10)
    function, *arguments = ARGUMENTS[kind]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(**arguments):
        return function(own, reduce=ranks, **arguments)

    found = attempt(lambda: step(**arguments[rank]).materialize())
    return found, step(**arguments[0]).materialize().total_norm


@pytest.mark.parametrize("kind", ["max_norm", "inv_scale", "dead", "skip_nonfinite"])
def test_an_argument_that_differs_between_compiled_functions_is_named(two_ranks, kind):
    first, then = one(two_ranks.run(not_the_same_when_compiled, kind))
    assert first == ("RankError", f"reduce: {kind} differs between ranks; pass the same value on all ranks")
    assert then > 0


def cut_afterwards(_):
    whole = tensors()
    ranks = gm.Ranks(whole, timeout=10)
    mesh = init_device_mesh("cpu", (2,))
    cut = dict(whole)
    cut["layer.1"] = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], run_check=False)
    found = attempt(lambda: gm.collect_weights(cut, reduce=ranks))
    copies = dict(whole)
    copies["layer.1"] = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()], run_check=False)
    return found, attempt(lambda: gm.collect_weights(copies, reduce=ranks))


def test_what_was_sharded_after_the_ranks_agreed_is_refused(two_ranks):
    """Otherwise each rank's shard would count as a copy of the whole."""
    (first, second), (also, _) = two_ranks.run(cut_afterwards)
    assert first == also
    assert first[0] == "ValueError"
    assert "collect_weights: 'layer.1' is (2, 3) float32" in first[1]
    assert first[1].endswith("when gm.Ranks was created; create gm.Ranks again on all ranks")
    assert second[0] == "ValueError"


def without_a_backend(_):
    group = dist.new_group(backend="cuda:gloo")
    # a rank that destroys the group early would break connections that another one is still making
    dist.barrier()
    found = attempt(lambda: collectives.all_reduce(torch.ones(2), "sum", group, 10))
    dist.destroy_process_group(group)
    gone = attempt(lambda: collectives.all_reduce(torch.ones(2), "sum", group, 10))
    return found, gone


def test_a_group_that_cannot_do_it_is_no_rank_that_does_not_answer(two_ranks):
    found, gone = one(two_ranks.run(without_a_backend))
    assert found[0] == gone[0] == "RankError"
    assert found[1].startswith("the process group has no backend for cpu")
    assert gone[1].startswith("this process group was destroyed")


# ranks that are late, hang or have died: each of these tests has its own processes


@pytest.fixture
def pool():
    pools = []

    def make(size, *, over_tcp=False):
        pools.append(RankPool(size, timeout=60))
        if over_tcp:
            pools[-1].run(over, size, free_port())
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def over(rank, size, port):
    dist.destroy_process_group()
    join_over_tcp(rank, size, port)


def timed(function):
    begin = time.monotonic()
    return (*attempt(function), time.monotonic() - begin)


def late_to_agree(rank):
    if rank == 1:
        time.sleep(1.5 * TIMEOUT)
    first = timed(lambda: gm.Ranks(tensors(), timeout=TIMEOUT))
    return first, norm(gm.collect_grads(tensors(), reduce=gm.Ranks(tensors(), timeout=10)))


def late_to_reduce(rank):
    ranks = gm.Ranks(tensors(), timeout=TIMEOUT)
    if rank == 1:
        time.sleep(1.5 * TIMEOUT)
    found = timed(lambda: gm.collect_grads(tensors(), reduce=ranks))
    collectives.rendezvous(dist.group.WORLD, 30, "go on")
    return found, [norm(gm.collect_grads(tensors(), reduce=ranks)) for _ in range(3)]


def test_a_rank_that_is_late_is_named_and_spoils_nothing(pool):
    three = pool(3)
    found = three.run(late_to_agree)
    for (raised, text, seconds), then in found:
        assert (raised, then) == ("RankError", pytest.approx(18**0.5))
        assert text.startswith("gm.Ranks: rank 1 of 3 did not arrive within 2 s")
        assert seconds < TIMEOUT + SLACK
    found = three.run(late_to_reduce)
    for rank, ((raised, text, seconds), then) in enumerate(found):
        assert then == [pytest.approx(18**0.5)] * 3
        assert seconds < TIMEOUT + SLACK
        if rank == 1:
            assert raised is None
        else:
            assert (raised, text) == ("RankError", "rank 1 did not reach this reduction within 2 s")


def die_before(rank, victim):
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: gm.Ranks(tensors(), timeout=TIMEOUT))


def die_between(rank, victim):
    ranks = gm.Ranks(tensors(), timeout=30)
    gm.collect_grads(tensors(), reduce=ranks)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    first = timed(lambda: gm.collect_grads(tensors(), reduce=ranks))
    return (*first, timed(dist.destroy_process_group)[2])


def die_within(rank, victim):
    own = tensors(count=200)
    ranks = gm.Ranks(own, timeout=30)
    if rank == victim and os.fork() == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)

    def reduce():
        while True:
            gm.collect_grads(own, reduce=ranks)

    return (*timed(reduce), 0.0)


def die_before_the_monitor(rank, victim):
    process_groups._LATER = 0.0
    ranks = gm.Ranks(tensors(), timeout=60)
    ranks.timeout = 2 * TIMEOUT
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return (*timed(lambda: gm.Monitor(tensors(), ranks=ranks)), 0.0)


def test_a_rank_that_dies_during_set_up_is_named(pool):
    for rank, (failed, (raised, text, *_)) in enumerate(pool(3).outcomes(die_before_the_monitor, 1)):
        if rank != 1:
            assert (failed, raised) == (False, "RankError"), text
            said = "Monitor: rank 1 of 3 did not arrive within 4 s; every rank must make"
            assert text.startswith(said), text


@pytest.mark.parametrize(
    ("over_tcp", "victim", "function"),
    [
        (False, 3, die_before),
        pytest.param(False, 3, die_between, marks=pytest.mark.deep),
        pytest.param(False, 0, die_within, marks=pytest.mark.deep),
        pytest.param(True, 0, die_before, marks=pytest.mark.deep),
        (True, 0, die_between),
        (True, 3, die_within),
    ],
)
def test_survivors_of_a_killed_rank_name_it(pool, over_tcp, victim, function):
    found = pool(4, over_tcp=over_tcp).outcomes(function, victim)
    assert found.pop(victim) == (True, "the process has gone")
    for failed, (raised, text, *seconds) in found:
        assert (failed, raised) == (False, "RankError"), text
        assert max(seconds) < SLACK
        if over_tcp and victim == 0:
            # without the store, no rank can find out which one has died
            assert "the store of the process group" in text
            assert "rank 0 by default" in text, text
        else:
            assert re.match(rf"(gm.Ranks: )?rank {victim} (of 4 did not arrive|does not respond)", text), text


def stop_within(rank, victim):
    ranks = gm.Ranks(tensors(), timeout=TIMEOUT)
    gm.collect_grads(tensors(), reduce=ranks)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    found = timed(lambda: gm.collect_grads(tensors(), reduce=ranks))
    return (*found, timed(dist.destroy_process_group)[2])


@pytest.mark.parametrize(
    "over_tcp",
    [
        pytest.param(False, id="a file holds the store", marks=pytest.mark.deep),
        pytest.param(True, id="rank 0 holds the store"),
    ],
)
def test_a_rank_that_hangs_is_named_within_the_time_out(pool, over_tcp):
    three = pool(3, over_tcp=over_tcp)
    # the rank that hangs returns nothing
    found = three.outcomes(stop_within, 0, timeout=8.0)
    for failed, (raised, text, seconds, until_destroyed) in found[1:]:
        assert (failed, raised) == (False, "RankError"), text
        assert seconds < TIMEOUT + SLACK
        assert until_destroyed < TIMEOUT + SLACK
        assert "rank 0" in text


def give_up_in_two_ways(rank):
    """Gloo fails on rank 0 while rank 2 reaches its timeout; rank 1 is late."""
    group = dist.new_group(timeout=timedelta(seconds=2.5))
    called, collectives._is_called = collectives._is_called, lambda *_: False
    try:
        if rank == 1:
            time.sleep(4.0)
            return None
        timeout = 30.0 if rank == 0 else 2.0
        return attempt(lambda: collectives.all_reduce(torch.ones(1), "sum", group, timeout))
    finally:
        collectives._is_called = called


def one_is_further(rank):
    """Rank 2 already waits in the next reduction; rank 1, which rank 0 waits for, is late."""
    group = dist.new_group()
    if rank == 1:
        time.sleep(5.0)
    if rank == 2:
        collectives._count(group, "collectives")
    return attempt(lambda: collectives.all_reduce(torch.ones(1), "sum", group, 1.5 if rank == 0 else 30.0))[1]


def one_is_busy(rank):
    group = dist.new_group()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(5.0)
    return attempt(lambda: collectives.all_reduce(torch.ones(1), "sum", group, 20.0))


def test_a_rank_that_lives_is_not_accused(pool):
    three = pool(3)
    first, _, third = three.run(give_up_in_two_ways)
    timed_out = "Timed out waiting 2500ms for recv operation to complete"
    assert first == ("RankError", f"rank 1 does not respond: {timed_out}")
    assert third == ("RankError", "rank 1 did not reach this reduction within 2 s")
    first, second, third = three.run(one_is_further)
    assert first == "rank 1 did not reach this reduction within 1.5 s"
    assert second.tolist() == third.tolist() == [3.0]
    (_, first), _, (_, third) = three.outcomes(one_is_busy)
    assert re.match("at least one of ranks 1, 2 is gone or hangs: [^/]*$", first[1]), first
    assert re.match("rank 1 does not respond: [^/]*$", third[1]), third


def new_on_one(rank):
    ranks_module._TIMEOUT = TIMEOUT
    own = tensors()
    first = gm.grad_norm(own, reduce=True)
    if rank == 1:
        own |= tensors("other")
    return first, attempt(lambda: gm.grad_norm(own, reduce=True))


def test_tensors_that_are_new_on_one_rank_alone(pool):
    """The other ranks keep their implicit agreement, and wait in another collective."""
    (first, waits), (also, (raised, text)) = pool(2).run(new_on_one)
    assert first == also == pytest.approx(18**0.5)
    assert waits == ("RankError", "rank 1 did not reach this reduction within 2 s")
    assert raised == "RankError"
    assert text.startswith("gm.Ranks: rank 0 of 2 did not arrive within 2 s")
    assert text.endswith("create gm.Ranks(model) again on all ranks, and pass it as reduce=")


LEAVE = """
import sys, threading, time, torch, gradiometer as gm, torch.distributed as dist
from gradiometer.distributed import collectives, process_groups
from gradiometer.distributed import ranks as ranks_module
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
model = torch.nn.Linear(2, 1)
ranks = gm.Ranks(model, timeout=2)
side = process_groups.side_group([0, 1], 600)
if rank == 1:
    sys.stdin.read()
waiting = threading.Thread(target=collectives.all_reduce, args=(torch.ones(1), "sum", side, 600), daemon=True)
waiting.start()
time.sleep(0.2)
process_groups.close(side)
del side
try:
    gm.collect_weights(model, reduce=ranks)
except gm.RankError as error:
    print(error, flush=True)
"""


def test_after_an_error_a_process_ends_by_itself(tmp_path):
    """A rank still hangs; one thread keeps waiting for it in a closed side group."""
    store = str(tmp_path / "store")
    environment = os.environ | {"PYTHONPATH": str(Path(gm.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    start = partial(subprocess.Popen, text=True, env=environment, **pipes)
    processes = [start([sys.executable, "-c", LEAVE, str(rank), store]) for rank in range(2)]
    try:
        said = processes[0].stdout.readline()
        begin = time.monotonic()
        assert said == "rank 1 did not reach this reduction within 2 s\n"
        assert processes[0].wait(60) == 0
        assert time.monotonic() - begin < TIMEOUT + SLACK
    finally:
        for process in processes:
            process.kill()
            process.communicate()
