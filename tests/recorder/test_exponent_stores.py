"""Histograms that are recorded inside a step: those of the step, in the steps that are due, and no others.

These tests run on the eager path and on interpreted kernels.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, EXPONENTS, Cursor
from gradiometer.ops import exponents
from gradiometer.recorder.recorder import Recorder
from support import strategies
from support.compiling import Kept, graphs, needs_compiler, no_recompile
from support.recording import new_gradients, step_of

pytestmark = pytest.mark.usefixtures("_dynamo")


def small_model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def named_grads(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def agree(found, tensors):
    """Compare the histograms of a step with a collection of these tensors."""
    expected = gm.collect_exponents(tensors)
    assert found.names == expected.names
    assert torch.equal(found.columns, expected.columns)


# the op


def cursor_at(step, every):
    cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64)
    cursor[Cursor.STEP], cursor[Cursor.EVERY] = step, every
    return cursor


def new_store(rows):
    return torch.full((rows + 1, EXPONENTS.width + 1), -1)


def test_a_due_step_has_the_histograms_of_each_dtype_and_its_number():
    tensors = [torch.randn(n, 3).to(dtype) for n, dtype in enumerate(strategies.ALL_DTYPES, 2)]
    store = new_store(len(tensors))
    ops.record_exponents_(tensors, store, cursor_at(6, 3))
    assert torch.equal(store[:-1, :-1], torch.ops.gradiometer.exponent_stats(tensors))
    assert store[:, -1].tolist() == [6] * (len(tensors) + 1)


@pytest.mark.parametrize(
    ("step", "every", "is_due"), [(0, 1, True), (3, 2, False), (4, 2, True), (2**40, 2**20, True)]
)
def test_a_step_that_is_not_due_changes_nothing(step, every, is_due):
    store = new_store(1)
    for call in (ops.record_exponents_, torch.ops.gradiometer.record_exponents_):
        call([torch.ones(5)], store, cursor_at(step, every))
    assert store[0, -1] == (step if is_due else -1)
    assert (store[0, :-1].sum() == 5) == is_due


def test_a_second_call_in_a_step_overwrites_what_it_measures():
    first, second, nothing = torch.randn(40), torch.randn(7) * 100, torch.empty(0)
    store, cursor = new_store(3), cursor_at(0, 1)
    ops.record_exponents_([first, first, nothing], store, cursor)
    ops.record_exponents_([second, nothing, nothing], store, cursor)
    assert torch.equal(store[:2, :-1], torch.ops.gradiometer.exponent_stats([second, first]))
    assert store[:, -1].tolist() == [0, 0, -1, 0]
    # nothing at all is measured, but the step is known
    before = store.clone()
    ops.record_exponents_([nothing] * 3, store, cursor_at(1, 1))
    assert torch.equal(store[:3], before[:3])
    assert store[3, -1] == 1


def test_opcheck_passes():
    tensors = [torch.randn(5, 7).t(), torch.randn(9).bfloat16(), torch.empty(0), torch.randn(3).cdouble()]
    for step in (3, 4):
        torch.library.opcheck(
            torch.ops.gradiometer.record_exponents_.default, (tensors, new_store(4), cursor_at(step, 2))
        )


# the recorder


def test_the_last_due_step_is_kept_whatever_is_recorded():
    model = small_model()
    recorder = Recorder(model, weights=True, precision=3, every=2)
    for step in range(8):
        new_gradients(model)
        recorder.record()
        if step % 3 == 0:
            due = {n: g.clone() for n, g in named_grads(model).items()}
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.7)
        recorder.advance()
    found = recorder.read_exponents(6)
    agree(found["grad_exponents"].stats(), due)
    agree(found["weight_exponents"].stats(), weights)
    assert recorder.read_exponents(3) == {}
    assert recorder.read_exponents(7) == {}
    assert [record.step for record in recorder.read()] == [0, 2, 4, 6]
    assert tuple(found) == ("grad_exponents", "weight_exponents")


def test_a_recorder_without_precision_has_no_store():
    recorder = Recorder(small_model())
    recorder.record()
    assert recorder.exponents is None
    assert recorder.read_exponents(0) == {}
    assert list(recorder.state_dict()) == ["cursor"]
    assert list(Recorder(small_model(), precision=1).state_dict()) == ["cursor"]


@pytest.mark.parametrize("precision", [0, -3, 2.0, True, "10", 2**53 + 1])
def test_numbers_out_of_range_are_refused(precision):
    with pytest.raises(ValueError, match=r"Recorder\(precision=.*precision must be an integer, at least 1"):
        Recorder(small_model(), precision=precision)


def test_what_has_no_gradient_has_no_histogram():
    model = small_model()
    model[0].requires_grad_(False)
    recorder = Recorder(model, precision=1, weights=True)
    recorder.record()
    assert recorder.read_exponents(0)["grad_exponents"].stats().names == ()
    assert len(recorder.read_exponents(0)["weight_exponents"].stats().names) == 4
    recorder.advance()
    model(torch.ones(2, 4)).sum().backward()
    recorder.record()
    agree(recorder.read_exponents(1)["grad_exponents"].stats(), named_grads(model))
    recorder.advance()
    # the histogram of an earlier step is not taken for one of this step
    model.zero_grad()
    recorder.record()
    assert recorder.read_exponents(2)["grad_exponents"].stats().names == ()


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    recorder = Recorder(model, precision=1)
    model(torch.ones(1, 3)).sum().backward()
    recorder.record()
    assert recorder.read_exponents(0)["grad_exponents"].stats().names == ("0.weight", "0.bias", "1.bias")


def test_sparse_complex_and_narrow_tensors():
    table = nn.Embedding(7, 3, sparse=True)
    whole = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
    narrow = nn.Parameter(torch.randn(5).to(torch.float8_e5m2), requires_grad=False)
    recorder = Recorder({"t": table.weight, "w": whole, "n": narrow}, precision=1, weights=True)
    (table(torch.tensor([1, 1, 5])).sum() + whole.abs().sum()).backward()
    assert table.weight.grad.is_sparse
    recorder.record()
    found = recorder.read_exponents(0)
    agree(found["grad_exponents"].stats(), {"t": table.weight.grad, "w": whole.grad})
    assert found["grad_exponents"].stats().n_zero.tolist() == [15, 0]
    assert found["weight_exponents"].stats().numel.tolist() == [21, 8, 5]


def test_gradients_are_as_they_are_in_memory():
    model = small_model()
    recorder = Recorder(model, precision=1)
    new_gradients(model, scale=2.0**16)
    recorder.record(inv_scale=2.0**-16)
    agree(recorder.read_exponents(0)["grad_exponents"].stats(), named_grads(model))
    # statistics that exist are not measured again, but histograms are
    stats = gm.collect_grads(model)
    recorder.advance()
    new_gradients(model)
    recorder.record(stats)
    agree(recorder.read_exponents(1)["grad_exponents"].stats(), named_grads(model))


def test_a_refused_gradient_is_named():
    half = nn.Parameter(torch.ones(2, dtype=torch.complex32))
    half.grad = torch._neg_view(half.detach().conj())
    recorder = Recorder({"w": half}, precision=1)
    with pytest.raises(TypeError, match=r"Recorder: 'w\.grad' is a lazily negated view"):
        recorder.record()
    assert recorder.read_exponents(0) == {}


def test_a_step_may_be_set_back_and_comes_with_a_checkpoint():
    model = small_model()
    recorder = Recorder(model, precision=2)
    new_gradients(model)
    for _ in range(5):
        recorder.record()
        recorder.advance()
    assert recorder.read_exponents(4) != {}
    state = copy.deepcopy(recorder.state_dict())
    recorder.configure_(step=3)
    # what the abandoned steps have left is not taken for a step that is still to come
    assert recorder.read_exponents(4) == {}
    recorder.record()
    recorder.advance()
    recorder.record()
    agree(recorder.read_exponents(4)["grad_exponents"].stats(), named_grads(model))
    other = Recorder(model, precision=3)
    other.load_state_dict(state)
    for _ in range(2):
        other.record()
        other.advance()
    assert other.read_exponents(5) == {}
    agree(other.read_exponents(6)["grad_exponents"].stats(), named_grads(model))


@needs_compiler
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_complex_parameters_in_a_compiled_step():
    wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    recorder = Recorder(nn.ParameterDict({"wave": wave}), precision=1)

    @torch.compile(fullgraph=True)
    def step():
        wave.abs().square().sum().backward()
        recorder.record()

    step()
    stats = gm.collect_exponents({"wave": wave.grad})
    recorder.advance()
    assert torch.equal(recorder.read_exponents(0)["grad_exponents"].stats().columns, stats.columns)


def test_casts_of_its_owner_leave_the_stores_in_int64():
    recorder = Recorder(small_model(), precision=1)
    owner = nn.ModuleList([recorder]).half()
    assert owner[0].exponents.store_0.dtype == torch.int64
    assert owner[0].exponents.cursor_0.dtype == torch.float64


def test_a_step_that_is_not_due_reads_no_gradient(monkeypatch):
    model = small_model()
    recorder = Recorder(model, precision=4, skip_nonfinite=False, every=4)
    new_gradients(model)
    if ops.uses_kernels(torch.device("cpu")):
        pytest.skip("the kernels decide, not the host")
    calls = []
    measure = exponents.exponent_reference.exponent_stats
    monkeypatch.setattr(
        exponents.exponent_reference, "exponent_stats", lambda *args: calls.append(1) or measure(*args)
    )
    for _ in range(9):
        recorder.record()
        recorder.advance()
    assert len(calls) == 3


# inside a compiled step


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.once])]
)
@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.once)])
def test_a_compiled_step_records_its_own_gradients(backend, weights):
    model = small_model()
    recorder = Recorder(model, precision=3, weights=weights, every=2)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        recorder.record()
        stats = gm.collect_exponents({name: p.grad for name, p in model.named_parameters()})
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        return stats

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    seen = []
    with no_recompile():
        for i in range(8):
            expected = compiled(torch.randn(5, 4))
            found = recorder.read_exponents(i)
            recorder.advance()
            if found:
                seen.append(i)
                assert torch.equal(found["grad_exponents"].stats().columns, expected.columns)
                assert found["grad_exponents"].stats().names == expected.names
                assert (len(found) == 2) == weights
    assert seen == [0, 3, 6]
    assert graphs() == 1
    # the statistics are those of a recorder without histograms
    assert [record.step for record in recorder.read()] == [0, 2, 4, 6]


def test_a_compiled_advance_moves_all_cursors():
    model = small_model()
    recorder = Recorder(model, precision=4)
    step = torch.compile(step_of(recorder, model), fullgraph=True, backend="aot_eager")
    with no_recompile():
        for _ in range(5):
            step(torch.randn(5, 4))
    assert graphs() == 1
    assert recorder.read_exponents(4)["grad_exponents"].stats().names == tuple(
        n for n, _ in model.named_parameters()
    )
    assert recorder.exponents.cursor_0[Cursor.STEP] == recorder.cursor[Cursor.STEP] == 5


@pytest.mark.parametrize("precision", [None, 2])
def test_the_graph_has_one_more_call_only_with_precision(precision):
    model = small_model()
    recorder = Recorder(model, precision=precision)
    kept = Kept()
    torch.compile(step_of(recorder, model), fullgraph=True, backend=kept.backend)(torch.randn(5, 4))
    (graph,) = kept.graphs
    calls = [node for node in graph.graph.nodes if "record_exponents_" in str(node.args)]
    assert len(calls) == (precision is not None)


def test_a_nan_is_counted():
    model = small_model()
    recorder = Recorder(model, precision=1)
    new_gradients(model)
    model[0].weight.grad[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    recorder.record()
    stats = recorder.read_exponents(0)["grad_exponents"].stats()
    assert (int(stats.n_nan[0]), int(stats.n_inf[0])) == (1, 2)
