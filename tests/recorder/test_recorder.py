"""The recorder: the ring holds the same bits as a collection of that step.

These tests run on the eager path and on interpreted kernels.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import gradiometer as gm
from conftest import KERNELS
from gradiometer.columns import TENSORS, Cursor
from gradiometer.ops import reference
from gradiometer.recorder.recorder import Recorder
from gradiometer.recorder.updates import Updates
from support.compiling import Kept, graphs, needs_compiler, no_recompile
from support.fake_device import DEVICES, Model, device_of, watch
from support.recording import new_gradients, packed, step_of, written
from support.watching import NoReads

pytestmark = pytest.mark.usefixtures("_dynamo")

NAN, INF = math.nan, math.inf


def model_of(parameters: int = 5) -> nn.Module:
    model = nn.Module()
    for i in range(parameters):
        model.register_parameter(f"w{i}", nn.Parameter(torch.randn(i + 1, 3)))
    return model


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


# the ring


@given(
    capacity=st.integers(1, 5),
    every=st.integers(1, 4),
    steps=st.integers(0, 12),
    bad=st.sets(st.integers(0, 12), max_size=3),
)
def test_the_last_steps_are_there_and_exact(capacity, every, steps, bad):
    torch.manual_seed(0)
    model = model_of()
    recorder = Recorder(model, capacity=capacity, every=every)
    expected = {}
    for step in range(steps):
        new_gradients(model)
        if step in bad:
            model.w2.grad[0, 0] = NAN if step % 2 else -INF
        recorder.record()
        assert bool(recorder.skip_step) == (step in bad)
        if step % every == 0 or step in bad:
            expected[step] = (packed(gm.collect_grads(model)), step in bad)
        recorder.advance()

    records = recorder.read()
    assert [record.step for record in records] == list(expected)[-capacity:]
    for record in records:
        values, skipped = expected[record.step]
        assert torch.equal(written(record), values)
        assert record.skipped == skipped
    assert recorder.cursor[Cursor.COUNT] == len(expected)


def test_a_step_that_is_not_recorded_leaves_no_trace():
    model = model_of()
    recorder = Recorder(model, capacity=3, every=2)
    for _ in range(9):
        recorder.advance()
    assert recorder.read() == []
    recorder.advance()
    new_gradients(model)
    recorder.record()
    assert [record.step for record in recorder.read()] == [10]


def test_the_address_of_the_ring_never_changes():
    model = model_of()
    recorder = Recorder(model, capacity=2)
    before = recorder.ring.data_ptr(), recorder.cursor.data_ptr()
    for every in (1, 2, 3):
        new_gradients(model)
        recorder.configure_(every=every, step=every, skip_above=3.0)
        recorder.record()
        recorder.advance()
    recorder.load_state_dict(recorder.state_dict())
    assert (recorder.ring.data_ptr(), recorder.cursor.data_ptr()) == before


def test_rows_hold_every_kind_of_every_parameter():
    model = model_of()
    recorder = Recorder(model, weights=True, updates=True)
    new_gradients(model)
    recorder.record()
    snapshot = gm.Snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    pairs = gm.collect_updates(model, snapshot)
    recorder.record()
    recorder.record_updates(pairs)
    (record,) = recorder.read()
    for name in (
        "update_ratio",
        "descent_cosine",
        "unchanged_fraction",
        "stuck_fraction",
        "sumsq_b",
        "n_stuck",
    ):
        assert torch.equal(record.value(name, "updates"), getattr(pairs, name))
        assert record.total(name, "updates") == pairs.total_value(name)
    assert tuple(record.tables) == ("grads", "weights", "updates")
    for kind, stats in {
        "grads": gm.collect_grads(model),
        "weights": gm.collect_weights(model),
        "updates": pairs,
    }.items():
        assert torch.equal(record.columns(kind), stats.columns)
        if kind != "updates":
            assert torch.equal(record.flags(kind), stats.flags)
        assert record.measured(kind).all()
        assert record.report(kind).names == stats.names
    assert record.total("norm", "weights") == gm.collect_weights(model).materialize().total_norm


def test_what_has_no_gradient_is_not_measured():
    model = model_of()
    recorder = Recorder(model)
    new_gradients(model)
    recorder.record()
    recorder.advance()
    model.w1.grad = model.w4.grad = None
    recorder.record()
    before, after = recorder.read()
    assert before.measured().tolist() == [True] * 5
    assert after.measured().tolist() == [True, False, True, True, False]
    assert after.report().names == ("w0", "w2", "w3")
    # nothing is left of an earlier step in the slots of a ring of two
    assert not written(after)[1].any()


def test_a_slot_that_is_used_again_holds_nothing_old():
    model = model_of()
    recorder = Recorder(model, capacity=1)
    new_gradients(model)
    recorder.record()
    recorder.advance()
    model.zero_grad()
    recorder.record()
    (record,) = recorder.read()
    assert record.step == 1
    assert not written(record).any()


def test_a_second_record_in_a_step_writes_over_what_it_measures():
    generator, critic = model_of(2), model_of(3)
    recorder = Recorder({"g": generator, "d": critic})
    assert recorder.catalog.names == ("g.w0", "g.w1", "d.w0", "d.w1", "d.w2")
    new_gradients(critic)
    recorder.record()
    critics = packed(gm.collect_grads(critic))
    critic.zero_grad()
    new_gradients(generator)
    recorder.record()
    (record,) = recorder.read()
    assert torch.equal(written(record), torch.cat([packed(gm.collect_grads(generator)), critics]))
    # gradients accumulated since then: record a third time
    for p in generator.parameters():
        p.grad *= 2
    recorder.record()
    (record,) = recorder.read()
    assert torch.equal(written(record)[:2], packed(gm.collect_grads(generator)))


def test_a_skipped_part_of_a_step_stays_known():
    model = model_of()
    recorder = Recorder(model)
    new_gradients(model, scale=NAN)
    recorder.record()
    assert recorder.skip_step
    new_gradients(model)
    recorder.record()
    assert not recorder.skip_step
    assert [record.skipped for record in recorder.read()] == [True]


@pytest.mark.parametrize("kind", ["weights", "updates"])
def test_gradients_alone_decide(kind):
    model = model_of()
    recorder = Recorder(model, weights=True, updates=True)
    new_gradients(model)
    snapshot = gm.Snapshot(model)
    if kind == "weights":
        with torch.no_grad():
            model.w0.fill_(NAN)
    recorder.record()
    if kind == "updates":
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(NAN)
        recorder.record_updates(gm.collect_updates(model, snapshot))
        assert recorder.read()[-1].total("n_nan", "updates") > 0
    assert not recorder.skip_step
    new_gradients(model, scale=INF)
    recorder.record(inv_scale=1.0)  # the weights are recorded separately, after the gradients
    assert recorder.skip_step


def test_what_is_skipped_can_be_chosen_and_changed():
    model = model_of()
    recorder = Recorder(model, skip_nonfinite=False, skip_above=1e3, every=100)
    recorder.advance()
    for scale, skip in ((1.0, False), (1e6, True), (NAN, False)):
        new_gradients(model, scale=scale)
        recorder.record()
        assert bool(recorder.skip_step) == skip
        recorder.advance()
    # non-finite and skipped steps are recorded whatever the cadence
    assert [record.step for record in recorder.read()] == [2, 3]
    recorder.configure_(skip_nonfinite=True, skip_above=INF)
    recorder.record()
    assert recorder.skip_step


@pytest.mark.skipif(KERNELS, reason="kernels check the gate themselves, see below")
def test_without_a_decision_only_recorded_steps_are_read(monkeypatch):
    model = model_of()
    recorder = Recorder(model, every=3, skip_nonfinite=False)
    read = []
    true = reference.tensor_stats

    def noted(*args, **options):
        read.append(1)
        return true(*args, **options)

    monkeypatch.setattr(reference, "tensor_stats", noted)
    for _ in range(7):
        new_gradients(model)
        recorder.record()
        recorder.advance()
    assert len(read) == 3
    assert [record.step for record in recorder.read()] == [0, 3, 6]
    with pytest.raises(ValueError, match="created without a skip condition"):
        recorder.configure_(skip_nonfinite=True)


def test_a_gated_recorder_is_exact():
    model = model_of()
    recorder = Recorder(model, every=3, skip_nonfinite=False)
    expected = []
    for step in range(7):
        new_gradients(model)
        if step == 4:
            model.w0.grad.fill_(NAN)
        recorder.record()
        expected.append(packed(gm.collect_grads(model)))
        recorder.advance()
    records = recorder.read()
    assert [record.step for record in records] == [0, 3, 6]
    assert all(torch.equal(written(record), expected[record.step]) for record in records)


def test_what_a_shut_gate_leaves_in_memory_is_written_nowhere():
    model = model_of()
    recorder = Recorder(model, every=2, skip_nonfinite=False)
    recorder.advance()
    new_gradients(model, scale=NAN)
    # without the gate: the step is not due, but it is not finite
    recorder.record(gm.collect_grads(model))
    (before,) = recorder.read()
    recorder.record()
    (after,) = recorder.read()
    assert torch.equal(written(before).nan_to_num(7.0), written(after).nan_to_num(7.0))


def test_a_scale_on_the_device_is_gated_too():
    model = model_of()
    recorder = Recorder(model, every=2, skip_nonfinite=False)
    for _ in range(3):
        new_gradients(model)
        recorder.record(inv_scale=torch.tensor(0.5))
        expected = packed(gm.collect_grads(model, inv_scale=0.5))
        recorder.advance()
    assert [record.step for record in recorder.read()] == [0, 2]
    assert torch.equal(written(recorder.read()[-1]), expected)


# measurements


def test_statistics_that_exist_are_not_measured_again(monkeypatch):
    model = model_of()
    recorder = Recorder(model)
    new_gradients(model, scale=100.0)
    stats = gm.collect_and_clip_(model, 1.0)
    monkeypatch.setattr("gradiometer.ops.record_", lambda *_, **__: pytest.fail("read again"))
    recorder.record(stats)
    (record,) = recorder.read()
    assert torch.equal(written(record), packed(stats))
    assert record.total() > 100


def test_statistics_of_some_parameters_go_to_their_rows():
    model = model_of()
    recorder = Recorder(model)
    new_gradients(model)
    stats = gm.collect({name: model.get_parameter(name).grad for name in ("w3", "w4", "w1")})
    recorder.record(stats)
    (record,) = recorder.read()
    assert record.measured().tolist() == [False, True, False, True, True]
    for row, name in enumerate(stats.names):
        assert torch.equal(record.columns()[int(name[1])], stats.columns[row])
    with pytest.raises(ValueError, match="'other' is not among the parameters"):
        recorder.record(gm.collect({"other": torch.ones(2)}))


def test_scaled_gradients_are_recorded_unscaled_and_weights_as_they_are():
    model = model_of()
    recorder = Recorder(model, weights=True)
    new_gradients(model)
    recorder.record(inv_scale=torch.tensor(0.5))
    (record,) = recorder.read()
    assert torch.equal(record.columns(), gm.collect_grads(model, inv_scale=0.5).columns)
    assert torch.equal(record.columns("weights"), gm.collect_weights(model).columns)


def test_sparse_and_complex_gradients_are_measured():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 3, sparse=True)
    model.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    recorder = Recorder(model)
    (model.embedding(torch.tensor([1, 1, 4])).sum() + model.wave.abs().sum()).backward()
    recorder.record()
    (record,) = recorder.read()
    assert torch.equal(written(record), packed(gm.collect_grads(model)))


def test_casts_of_its_owner_leave_it_in_float64():
    model = model_of()
    model.recorder = Recorder(model, capacity=2)
    model.half()
    assert model.recorder.ring.dtype == model.recorder.cursor.dtype == torch.float64
    assert len(list(model.parameters())) == 5
    new_gradients(model)
    model.recorder.record()
    assert model.recorder.read()[0].measured().all()


def test_a_checkpoint_goes_on_where_it_was():
    model = model_of()
    recorder = Recorder(model, every=2)
    for _ in range(5):
        recorder.advance()
    state = copy.deepcopy(recorder.state_dict())
    assert "ring" not in state
    other = Recorder(model)
    other.load_state_dict(state)
    new_gradients(model)
    other.record()
    other.advance()
    other.record()
    assert [record.step for record in other.read()] == [6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 2.5}, "capacity=2.5"),
        # refused by the allocator, by the count of bytes, and by the conversion to int64
        ({"capacity": 10**15}, "capacity=1000000000000000): the ring needs 384 bytes for each step on"),
        ({"capacity": 10**18}, "use a smaller capacity"),
        ({"capacity": 10**30}, "use a smaller capacity"),
        ({"capacity": 10**5000}, "capacity=an integer beyond the range of float64"),
        ({"capacity": True}, "capacity=True"),
        ({"every": 0}, "every=0"),
        ({"every": 2**53 + 1}, "every must be an integer, at least 1 and at most 2**53"),
        ({"skip_above": 10**400}, "skip_above must be a non-negative number"),
        ({"skip_above": -1.0}, "skip_above=-1.0"),
        ({"skip_above": NAN}, "skip_above=nan"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Recorder(model_of(), **arguments)


def test_models_that_cannot_be_recorded_are_refused():
    with pytest.raises(ValueError, match="no parameters"):
        Recorder(nn.ReLU())
    with pytest.raises(TypeError, match=r"thresholds must be gm.Thresholds"):
        Recorder(nn.Linear(2, 2), thresholds=3.0)
    with pytest.raises(TypeError, match=r"'weight' .*meta device"):
        Recorder(nn.Linear(2, 2, device="meta"))
    half = nn.Parameter(torch.ones(2, dtype=torch.complex32))
    half.grad = torch._neg_view(half.detach().conj())
    with pytest.raises(TypeError, match=r"Recorder: 'w\.grad' is a lazily negated view"):
        Recorder({"w": half}).record()
    with pytest.raises(ValueError, match="two tensors have the name 'w'"):
        Recorder([("w", nn.Parameter(torch.ones(1))), ("w", nn.Parameter(torch.ones(1)))])
    with pytest.raises(TypeError, match="stats must be the TensorStats that collect_grads returns, got int"):
        Recorder(nn.Linear(2, 2)).record(5)


# inside a compiled step


@pytest.mark.parametrize(
    ("backend", "weights"),
    [
        ("aot_eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.once),
        pytest.param("inductor", True, marks=[needs_compiler, pytest.mark.once]),
        pytest.param("inductor", False, marks=[needs_compiler, pytest.mark.deep]),
    ],
)
def test_a_compiled_step_records_what_it_collects(backend, weights):
    model = small_model()
    recorder = Recorder(model, capacity=3, weights=weights)
    step = torch.compile(step_of(recorder, model), fullgraph=True, backend=backend)
    expected = {}
    with no_recompile():
        for i in range(10):
            if i == 6:
                recorder.configure_(every=2)
            before = [p.detach().clone() for p in model.parameters()]
            _, stats = step(torch.full((5, 4), NAN) if i == 7 else torch.randn(5, 4))
            if i < 6 or i in (6, 7, 8):
                expected[i] = packed(stats)
            same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            assert same == (i == 7), "the update of the bad step, and of no other, is skipped"
    assert graphs() == 1
    records = recorder.read()
    assert [(record.step, record.skipped) for record in records] == [(6, False), (7, True), (8, False)]
    assert all(torch.equal(written(record), expected[record.step]) for record in records)
    if weights:
        assert records[-1].measured("weights").all()


def test_the_graph_calls_the_op_once():
    model = small_model()
    recorder = Recorder(model, weights=True)
    kept = Kept()
    torch.compile(step_of(recorder, model), fullgraph=True, backend=kept.backend)(torch.randn(5, 4))
    (graph,) = kept.graphs
    calls = [str(node) for node in graph.graph.nodes if "auto_functionalized" in str(node.target)]
    assert len(calls) == 1


@needs_compiler
def test_the_ring_is_not_copied():
    model = small_model()
    # a size that nothing else has
    recorder = Recorder(model, capacity=577)
    step = torch.compile(step_of(recorder, model), fullgraph=True)
    _, (code,) = run_and_get_code(step, torch.randn(5, 4))
    assert code.count("gradiometer.record_.default(") == 1
    # the size occurs only where arguments are checked or fakes are made
    assert [
        x for x in code.splitlines() if "577" in x and not re.search("assert_size_stride|rand_strided", x)
    ] == []


@pytest.mark.once
@pytest.mark.parametrize("frozen", [0, 2])
def test_freezing_compiles_again_once(frozen):
    model = small_model()
    recorder = Recorder(model)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        recorder.record()
        for p in model.parameters():
            p.grad = None
        recorder.advance()

    for i in range(6):
        if i == 3:
            model[frozen].requires_grad_(False)
        step(torch.randn(5, 4))
    assert graphs() == 2
    measured = [record.measured().tolist() for record in recorder.read()]
    assert measured[:3] == [[True] * 4] * 3
    assert measured[3:] == [[i // 2 != frozen // 2 for i in range(4)]] * 3


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated):
    recorder = Recorder(model_of())
    columns, flags = torch.rand(5, TENSORS.width, dtype=torch.float64), torch.zeros(5, dtype=torch.int32)
    grads = [torch.randn(3), torch.randn(4, 2), torch.empty(0), torch.tensor(NAN), torch.randn(2)]
    record_, append_ = torch.ops.gradiometer.record_.default, torch.ops.gradiometer.append_.default
    ring = recorder.ring, recorder.cursor, list(recorder.layout.sections["grads"])
    torch.library.opcheck(record_, (grads, 1e-7, 100.0, 1.0, None, 5, gated, *ring, False))
    torch.library.opcheck(record_, (grads, 1e-7, 100.0, 1.0, torch.tensor(0.5), 3, gated, *ring, False))
    torch.library.opcheck(append_, (columns, flags, 5, *ring))


def test_columns_of_any_strides_are_written_as_what_they_are():
    model = model_of()
    recorder = Recorder(model)
    stats = gm.collect_weights(model)
    columns, flags = torch.stack([stats.columns] * 2, dim=-1), torch.stack([stats.flags] * 2, dim=-1)
    strided = replace(stats, columns=columns[..., 0], flags=flags[..., 0])
    assert not strided.columns.is_contiguous()
    assert not strided.flags.is_contiguous()
    recorder.record(strided)
    (record,) = recorder.read()
    assert torch.equal(record.columns(), stats.columns)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [False, True])
def test_nothing_waits(device, weights):
    with device_of(device) as d:
        model = Model(d)
        recorder = Recorder(model, weights=weights, updates=True, precision=2)
        updates = Updates(recorder)
        with watch() as seen:
            recorder.record()
            updates.measure(0)
            updates.keep_for(1, every=1)
            skip = recorder.skip_step
            recorder.configure_(every=3)
            recorder.advance()
            recorder.record(gm.collect_grads(model), inv_scale=None)
            recorder.configure_(step=6)
        assert seen.to_host == []
        assert seen.to_device == []
        assert skip.shape == ()
        assert skip.dtype == torch.bool


def test_what_a_record_keeps_is_not_mistaken_for_a_statistic():
    recorder = gm.Recorder(torch.nn.Linear(2, 1))
    recorder.record()
    (record,) = recorder.read()
    record.flags(), record.measured(), record.total("norm"), record.tables["grads"].merged
    for name in ("flags", "measured", "total", "merged", "total norm"):
        with pytest.raises(KeyError):
            record.value(name)


def test_the_total_norm_is_that_of_the_newest_slot_and_is_not_read_by_the_host():
    model = nn.Linear(3, 2)
    recorder = Recorder(model, weights=True, fingerprint=True, capacity=2, every=2)
    assert recorder.total_norm().isnan()
    for step in range(5):
        model.weight.grad = torch.full((2, 3), float(step))
        model.bias.grad = None if step == 2 else torch.full((2,), math.nan if step == 4 else 1.0)
        with NoReads():
            recorder.record()
            norm = recorder.total_norm()
        expected = {0: math.sqrt(2), 2: math.sqrt(6) * 2, 4: math.nan}[step - step % 2]
        assert norm.item() == pytest.approx(expected, rel=1e-15, nan_ok=True)
        recorder.advance()
    recorder.release()
    assert recorder.total_norm().isnan()
