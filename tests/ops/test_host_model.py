"""The host path on a model of a device: every launch reads the tables that its call was made with."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
import warnings
from contextlib import ExitStack

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.ops import clipping, dispatch, launch_plans, packing, uploads
from gradiometer.ops.launch_plans import chunk_map_of

pytest.importorskip("triton", reason="the kernels' path")

from support.host_model import ModelError, Pool, installed

# tensors of each list, by their number of elements; the first two have tables of the same size
SIZES = ((5,), (7,), (5, 7, 11))
PLACES = 3
# fewer than there are lists
LISTS_KEPT = 2
STREAMS = (1, 2)
LIMITS = (DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead)


class Training:
    """Lists of tensors that move in memory, and calls with them."""

    def __init__(self, model, places=PLACES):
        self.model = model
        self.memory = [[torch.ones(places, n) for n in sizes] for sizes in SIZES]
        self.places = [[0] * len(sizes) for sizes in SIZES]

    def tensors(self, which):
        pairs = zip(self.memory[which], self.places[which], strict=True)
        return [memory[place] for memory, place in pairs]

    def move(self, which, place):
        """Move a list's first tensor."""
        self.places[which][0] = place

    def call(self, stream, which, how="op"):
        tensors = self.tensors(which)
        sizes, dtypes = SIZES[which], (torch.float32,) * len(tensors)
        from gradiometer.kernels import tuning

        static = chunk_map_of(sizes, dtypes, tuning.CHUNK, tuning.MAX_CHUNKS).table.tolist()
        with self.model.on(stream), self.model.expecting([x.data_ptr() for x in tensors], static):
            if how == "op":
                torch.ops.gradiometer.tensor_stats(tensors, *LIMITS)
            elif how == "scale" and (plan := dispatch.writable(tensors)) is not None:
                clipping.scale_(tensors, torch.ones((), dtype=torch.float64), plan)
            else:
                ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)


streams = st.sampled_from(STREAMS)
lists = st.integers(0, len(SIZES) - 1)
places = st.integers(0, PLACES - 1)
hows = st.sampled_from(["op", "direct", "scale"])


class Machine(RuleBasedStateMachine):
    """Training code of any order, on two streams."""

    def __init__(self):
        super().__init__()
        self.exits = ExitStack()
        self.model = self.exits.enter_context(installed(LISTS_KEPT))
        self.training = Training(self.model)
        # the pools live as long as the process, as those of Inductor's graph trees do
        self.pools = [Pool(), Pool()]
        self.graphs = []

    @rule(stream=streams, which=lists, how=hows, place=places)
    def call(self, stream, which, how, place):
        self.training.move(which, place)
        self.training.call(stream, which, how)

    @rule(stream=streams, which=lists, how=hows)
    def interrupted_call(self, stream, which, how):
        """Another thread runs in the middle of the next call."""
        self.model.interruption = lambda: self.training.call(stream, which, how)

    @rule()
    def interrupted_clear(self):
        self.model.interruption = launch_plans.clear

    @precondition(lambda self: not self.model.captures)
    @rule(stream=streams, which=lists, pool=st.integers(0, 1))
    def warm_up(self, stream, which, pool):
        with self.model.on(stream), self.model.warm_up(self.pools[pool]):
            self.training.call(stream, which, "op")

    @rule(stream=streams, which=st.integers(0, 1))
    def capture(self, stream, which):
        """Begin a capture; threads may capture on their streams at the same time, in pools of their own."""
        busy = [graph.pool for graph in self.model.captures.values()]
        if stream not in self.model.captures and self.pools[which] not in busy:
            self.graphs.append(self.model.capture(stream, self.pools[which]))

    @precondition(lambda self: self.model.captures)
    @rule(data=st.data())
    def end_capture(self, data):
        self.model.end_capture(data.draw(st.sampled_from(sorted(self.model.captures))))

    @precondition(lambda self: self.graphs and len(self.model.captures) < len(STREAMS))
    @rule(data=st.data())
    def replay(self, data):
        free = [stream for stream in STREAMS if stream not in self.model.captures]
        busy = [graph.pool for graph in self.model.captures.values()]
        graph = data.draw(st.sampled_from(self.graphs))
        if graph.pool not in busy:
            self.model.replay(graph, data.draw(st.sampled_from(free)))

    @rule(stream=streams)
    def others_use_free_memory(self, stream):
        self.model.use_free_memory(stream)

    @precondition(lambda self: any(self.model.queues.values()))
    @rule(data=st.data(), count=st.integers(1, 8))
    def run_device(self, data, count):
        busy = [stream for stream, queue in self.model.queues.items() if queue]
        self.model.run(data.draw(st.sampled_from(busy)), count)

    @rule()
    def clear(self):
        launch_plans.clear()

    def teardown(self):
        try:
            # not after a failure
            if sys.exc_info()[0] is None:
                self.finish()
        finally:
            self.exits.close()

    def finish(self):
        """Replay every graph after all other memory has been used."""
        self.model.interruption = None
        for stream in list(self.model.captures):
            self.model.end_capture(stream)
        self.model.synchronize()
        for stream in STREAMS:
            self.model.use_free_memory(stream)
        for graph in self.graphs:
            self.model.replay(graph, STREAMS[0])
        self.model.synchronize()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=30)


# explicit orders of calls


@pytest.fixture
def model():
    with installed(LISTS_KEPT) as model:
        yield model


@pytest.fixture
def training(model):
    return Training(model)


def evict(training):
    for which in (1, 2):
        training.call(2, which)


@pytest.mark.parametrize("how", ["op", "direct"])
@pytest.mark.parametrize("let_go", ["moved", "cleared", "evicted", "moved on another stream"])
def test_no_pinned_memory_is_released_into_a_capture(model, training, how, let_go):
    training.call(1, 0, how)
    training.call(1, 0, how)
    graph = model.capture(1)
    if let_go == "cleared":
        launch_plans.clear()
    elif let_go == "evicted":
        evict(training)
    else:
        training.move(0, 1)
    training.call(2 if let_go == "moved on another stream" else 1, 0, how)
    model.end_capture(1)
    model.use_free_memory(2)
    training.call(2, 2)
    model.replay(graph, 1)
    model.synchronize()


def record(model, training, which):
    graph = model.capture(1)
    training.call(1, which)
    model.end_capture(1)
    return graph


def test_recordings_with_the_same_addresses_share_pinned_memory(model, training):
    graphs = []
    for i in range(50):
        training.move(2, i % PLACES)
        graphs.append(record(model, training, 2))
        training.move(1, i % 2)
        graphs.append(record(model, training, 1))
    assert len(uploads._captured) == PLACES + 2
    for graph in graphs:
        model.replay(graph, 2)
    model.synchronize()


def test_gradients_that_move_before_every_recording_are_reported_once(model):
    most = packing.CAPTURES_EXPECTED
    training = Training(model, most + 20)
    graphs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in range(most + 20):
            training.move(2, place)
            # the second recording adds nothing
            graphs += [record(model, training, 2), record(model, training, 2)]
            assert len(caught) == (place >= most - 1)
    assert f"3 tensors were recorded in CUDA graphs at {most} sets of addresses" in str(caught[0].message)
    assert len(uploads._captured) == most + 20
    for graph in graphs:
        model.replay(graph, 1)
    model.synchronize()


# the model notices what a change of the package would break

MUTANTS = {
    "tables that eager calls keep are used in a capture": (
        packing,
        "packed_at",
        "uploads.is_capturing(device)",
        "False",
    ),
    "captured memory is released": (uploads, "copy_lasting", "    _captured.append(lasting)", "    pass"),
    "captured memory is released later": (
        launch_plans,
        "clear",
        "    _plans.clear()",
        "    _plans.clear()\n    from gradiometer.ops import uploads\n    uploads._captured.clear()",
    ),
    "captured memory is written again": (
        uploads,
        "copy_lasting",
        "if torch.equal(lasting, host):",
        "if lasting.shape == host.shape:\n            lasting.copy_(host)",
    ),
    "a table is used on a stream that it was not copied on": (
        packing,
        "_keep",
        "kept.stream != stream",
        "False",
    ),
    "addresses are not compared": (packing, "_keep", "kept.addresses == addresses", "True"),
    "tables are kept in a warm-up": (uploads, "may_warm_up", "return True", "return False"),
    "pinned memory is released later": (
        uploads,
        "copy",
        "return _upload(_pinned(host, device), device)",
        "copy.host = _pinned(host, device)\n    return _upload(copy.host, device)",
    ),
    "pinned memory is not pinned": (uploads, "copy", "_pinned(host, device)", "host"),
    "one pinned buffer is written for each copy": (
        uploads,
        "copy",
        "return _upload(_pinned(host, device), device)",
        """_captured[:1] = [x for x in _captured if x.shape == host.shape][:1] or [_pinned(host, device)]
    return _upload(_captured[0].copy_(host), device)""",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_notices(mutant, monkeypatch):
    module, name, old, new = MUTANTS[mutant]
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, "update the test"
    # names in annotations are not imported at run time
    code = compile(source.replace(old, new), mutant, "exec", flags=__future__.annotations.compiler_flag)
    made = {}
    exec(code, vars(module), made)  # noqa: S102 our own source
    monkeypatch.setattr(module, name, made[name])
    # the first failure is enough
    search = settings(
        TestMachine.settings, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(ModelError):
        run_state_machine_as_test(Machine, settings=search)
