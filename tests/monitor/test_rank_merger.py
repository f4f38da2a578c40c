"""The merger of ranks: every step once and in order, and how ranks close, fail, fall behind or differ."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest

from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.monitor import rank_merger
from gradiometer.monitor.failures import Failures
from gradiometer.monitor.merge_state import MergeState, Phase, StepQueue, WindowSchedule
from gradiometer.monitor.merge_window import MergeWindow
from gradiometer.monitor.rank_merger import RankMerger
from support.rank_threads import Agreed, Side, catalog_of, step_of


class Job:
    """The mergers of a job whose ranks are threads, and what the first rank gets of them."""

    def __init__(self, monkeypatch, size, limit=10_000, timeout=5.0):
        self.size, self.side, self.here = size, Side(size), threading.local()
        self.delivered, self.reports, self.polls = [], [], []
        for name in ("all_reduce_pair", "all_reduce", "share", "close", "is_active"):
            call = partial(lambda name, *args: getattr(self.side.of(self.here.rank), name)(*args), name)
            monkeypatch.setattr(rank_merger.distributed, name, call)
        self.mergers = []
        for rank in range(size):
            ranks = Agreed(rank, size, timeout)
            window = MergeWindow(ranks, catalog_of(size), DEFAULT_THRESHOLDS)
            one = RankMerger(ranks, window, limit, Failures(), None)
            one._run = partial(self._run_as, rank, one._run)
            self.mergers.append(one)

    def _run_as(self, rank, run):
        self.here.rank = rank
        run()

    def start(self, rank):
        one = self.mergers[rank]
        one.start(self.delivered.extend, self.reports.append, lambda: self.polls.append(rank))
        return one

    def start_all(self):
        return [self.start(rank) for rank in range(self.size)]

    def steps(self, rank, first, last):
        return [step_of(rank, self.size, number, 1, {}) for number in range(first, last)]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(rank_merger, "_BEAT", 0.05)
    monkeypatch.setattr(rank_merger, "_INTERVAL", 0.0)
    return Job(monkeypatch, 2)


@pytest.mark.parametrize("seed", range(8))
def test_every_step_is_merged_once_and_in_order_whenever_it_comes(monkeypatch, seed):
    choose = random.Random(seed)  # noqa: S311 the same every time
    size, steps = choose.choice([2, 3, 4]), choose.choice([1, 40, 300])
    monkeypatch.setattr(rank_merger, "_BEAT", 0.05)
    monkeypatch.setattr(rank_merger, "_INTERVAL", choose.choice([0.0, 0.02]))
    every = choose.choice([1, 7])
    bad = {choose.randrange(steps): choose.randrange(size) for _ in range(3)}
    job, threads = Job(monkeypatch, size), []
    mergers, delivered = job.mergers, job.delivered
    # how many more steps one rank takes than the others
    longer, more = choose.choice([0, size - 1]), choose.choice([3, 100])
    all_there = threading.Barrier(size, timeout=60)

    def feed(rank, choose):
        one = job.start(rank)
        done, end = 0, steps + more * (rank == longer)
        while done < end:
            part = min(choose.choice([1, 3, 90]), end - done)
            one.put([step_of(rank, size, number, every, bad) for number in range(done, done + part)])
            done += part
            if choose.random() < 0.1:
                time.sleep(choose.choice([0.001, 0.1]))
        all_there.wait()
        one.finish(None, 5.0)
        assert one.join(60)

    for rank in range(size):
        threads.append(threading.Thread(target=feed, args=(rank, random.Random(choose.random()))))  # noqa: S311
        threads[-1].start()
    for thread in threads:
        thread.join(90)
    assert [one._failures.counts for one in mergers] == [{}] * size
    # steps of a single rank arrive too: all of the first rank's; of another rank only the last window
    kept = more if longer == 0 else min(more, 64)
    late = list(range(steps + more - kept, steps + more))
    assert [record.step for record in delivered] == [*range(steps), *late]
    for record in delivered[:steps]:
        number = record.step
        assert record.recorded == (number % every == 0 or number in bad)
        expected = sum(number + rank for rank in range(size)) / size
        last = {"last": 1.0} if number % 2 else {}
        assert record.scalars == {"loss": pytest.approx(expected), "same": 0.1 * number} | last
        if number in bad:
            assert record.where("w") == f"rank {bad[number]}, dp {bad[number]} of {size}"
            assert record.where("b") is None
        elif record.recorded:
            assert record.value("numel").tolist() == [2 * size, 3]
            assert record.value("sumsq").tolist() == [sum(2 * (number + r) for r in range(size)), 3 * number]
    for record in delivered[-min(more, 64) :]:
        # and only the whole tensors
        there = longer == 0 and record.step % every == 0
        assert record.recorded == there
        assert record.value("numel").nan_to_num().tolist() == ([0, 3] if there else [0, 0])
    assert not any(record.recorded for record in delivered[steps:-64])
    if longer:
        # steps that the first rank still had to add are not delivered twice
        mine = [step_of(0, size, steps + number, 1, {}) for number in range(more + 2)]
        mergers[0].put(mine[:2])
        mergers[0].put(mine[2:])
        assert [record.step for record in delivered[steps + kept :]] == [steps + more, steps + more + 1]


def test_a_rank_closes_after_its_steps_and_later_ones_of_others_have_no_tensors(job):
    first, second = job.start_all()
    first.put(job.steps(0, 0, 3))
    second.put(job.steps(1, 0, 3))
    assert first.wait(10)
    assert first._state.phase is second._state.phase is Phase.MERGING
    second.finish(None, 60.0)
    assert second.join(10)
    assert first.join(10)
    assert first._state.phase is second._state.phase is Phase.ENDED
    # the rank that goes on is asked for its steps
    assert set(job.polls) == {0}
    first.put(job.steps(0, 3, 5))
    assert [(record.step, record.recorded) for record in job.delivered] == [(i, i < 3) for i in range(5)]
    assert first.wait(0)
    assert (first.lost, first.news, job.reports) == (2, None, [])
    assert first._failures.counts == {"ranks": 1}
    assert first._state.reason == "another rank has closed its Monitor; later steps have no tensors"


def test_a_fault_of_a_rank_is_reported_on_the_first(job):
    first, second = job.start_all()
    second.finish("exception, ValueError: no", 60.0)
    assert first.join(10)
    assert second.join(10)
    assert first.news == "rank 1: exception, ValueError: no"
    assert job.reports == [first.news]
    assert (second.news, second._state.fault_to_share) == (None, None)


def test_the_first_rank_reports_no_other_fault_if_it_has_its_own(job):
    first, second = job.start_all()
    for one, text in ((first, "one"), (second, "other")):
        one.finish(text, 60.0)
    assert first.join(10)
    assert job.reports == []
    assert second.join(10)


def test_merging_ends_if_a_rank_falls_too_far_behind(monkeypatch):
    monkeypatch.setattr(rank_merger, "_BEAT", 0.05)
    job = Job(monkeypatch, 2, limit=8)
    first, second = job.start_all()
    first.put(job.steps(0, 0, 9))
    assert first.join(10)
    assert second.join(10)
    text = "rank 1 is 9 steps behind: call advance() on every rank; later steps have no tensors"
    assert first._state.reason == second._state.reason == text
    # the oldest step has lost its tensors to the limit; the others are merged alone
    assert [record.step for record in job.delivered] == list(range(9))
    assert first._failures.counts == {"queue for other ranks": 1, "ranks": 1}
    # the other rank has these steps, too, later
    second.put(job.steps(1, 0, 9))
    assert second._queue.num_added == 0


def test_ranks_in_different_steps_do_not_merge(job):
    first, second = job.start_all()
    first.put(job.steps(0, 0, 1))
    second.put(job.steps(1, 7, 8))
    assert first.join(10)
    assert second.join(10)
    text = "rank 1 is in step 7, but rank 0 is in step 0: call advance() once per step on every rank"
    assert first.news.startswith(text)
    assert job.reports == [first.news]
    assert [(record.step, record.recorded) for record in job.delivered] == [(0, False)]


def test_a_merger_that_fails_ends_and_delivers_its_steps(job):
    def fails(*_):
        job.side.barrier.abort()
        raise MemoryError

    job.mergers[0]._window.pack = fails
    first, second = job.start_all()
    first.put(job.steps(0, 0, 2))
    assert first.join(10)
    assert second.join(10)
    assert first.news == "MemoryError: "
    assert second.news.startswith("BrokenBarrierError")
    assert first.wait(0)
    assert [record.recorded for record in job.delivered] == [False, False]
    # a fault after the end changes nothing
    first.finish("exception", 60.0)
    assert first._state.phase is Phase.ENDED


def test_a_rank_that_does_not_end_its_step_is_reported_once(monkeypatch):
    monkeypatch.setattr(rank_merger, "_BEAT", 0.02)
    monkeypatch.setattr(rank_merger, "_INTERVAL", 0.0)
    job = Job(monkeypatch, 2, timeout=0.1)
    first, second = job.start_all()
    first.put(job.steps(0, 0, 1))
    until = time.monotonic() + 10
    while not first._failures.counts and time.monotonic() < until:
        time.sleep(0.01)
    assert not first.wait(0.2)
    assert first._failures.counts == {"slow rank": 1}
    second.put(job.steps(1, 0, 1))
    assert first.wait(10)
    assert [record.recorded for record in job.delivered] == [True]
    for one in (first, second):
        one.finish(None, 60.0)
        assert one.join(10)


# states, queue and schedule alone


@pytest.mark.parametrize(("fault", "most"), [(None, 60.0), ("exception", 2.0)])
def test_a_closing_rank_has_a_deadline_which_a_fault_shortens(fault, most):
    state, now = MergeState(), time.monotonic()
    state.close(fault, 60.0)
    assert state.phase is Phase.CLOSING
    assert most <= state.deadline - now < most + 1
    assert state.fault_to_share == fault
    state.is_fault_shared = True
    assert (state.fault, state.fault_to_share) == (fault, None)


def test_a_queue_strips_the_oldest_steps_and_leaves_out_those_merged_before():
    steps = [step_of(0, 2, number, 1, {}) for number in range(6)]
    queue = StepQueue(limit=2)
    assert queue.add(steps[:4])
    assert queue.strip() == queue.lost == 2
    assert [step.recorded for step in queue.first(9)] == [False, False, True, True]
    queue.remove(5)
    assert (len(queue), queue.num_added, queue.num_done) == (0, 4, 4)
    assert not queue.add(steps[4:5])
    assert queue.add(steps[5:])
    assert [step.step for step in queue.remove_all()] == [5]
    assert (queue.lost, queue.num_added, queue.num_done) == (3, 5, 5)


def test_fast_loops_send_steps_at_once_and_slow_ones_first_ask():
    schedule = WindowSchedule(most=10)
    assert schedule.observe(1)
    schedule.choose(0, [], is_closing=False)
    assert schedule.recorded == (True,)
    # no step within a beat
    assert not schedule.observe(0)
    schedule.choose(0, [], is_closing=False)
    assert schedule.recorded == ()
    # the step came within the next one
    for recorded in ((), (True,)):
        assert not schedule.observe(1)
        schedule.choose(1, [True], is_closing=False)
        assert schedule.observe(1)
        schedule.choose(0, [], is_closing=False)
        assert schedule.recorded == recorded
    schedule.choose(0, [], is_closing=True)
    assert schedule.recorded == ()


@pytest.mark.parametrize(
    ("most", "recorded", "expected"),
    [
        (2, [True, False, True, False, True], (True, False, True, False)),
        (10, [False] * 100, (False,) * 64),
        (1, [True, True], (True,)),
    ],
)
def test_a_window_has_a_limited_number_of_steps(most, recorded, expected):
    schedule = WindowSchedule(most)
    schedule.choose(len(recorded), recorded, is_closing=False)
    assert schedule.recorded == expected
    assert schedule.choose_last(100) == min(most, 64)
