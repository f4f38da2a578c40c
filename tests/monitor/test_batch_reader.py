"""What is seen of inputs, labels and logits, and that a look changes nothing."""

from __future__ import annotations

import copy
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.monitor.batch_reader import BatchReader
from gradiometer.monitor.batch_values import batch_of, measured
from gradiometer.monitor.failures import Failures
from gradiometer.recorder import BatchLook
from support.batches import CLASSES, Tokens, looks, mean_loss, next_tokens, text, train
from support.watching import NoReads

pytestmark = pytest.mark.usefixtures("_one_thread")


def test_the_labels_of_a_language_model_are_read_from_the_gradient():
    drawn = [next_tokens() for _ in range(3)]
    for _, labels in drawn:
        labels[:, :4] = -100
    found = looks(train(Tokens(), lambda step: drawn[step], steps=3))
    assert [look.step for look in found] == [0, 1, 2]
    for look, (_, labels) in zip(found, drawn, strict=True):
        assert (look.rows, look.length, look.classes, look.is_tokens) == (16, 20, CLASSES, True)
        assert (look.positions, look.counted, look.labelled) == (320, 256, 1.0)
        assert look.after == 1.0
        assert look.same < 0.5
        counts = labels[labels >= 0].bincount()
        assert (look.label, look.label_share) == (counts.argmax(), float(counts.max()) / 256)
        assert look.residual < 1e-4
        assert look.probabilities == 0.0
    assert len({look.inputs_hash for look in found}) == len({look.labels_hash for look in found}) == 3


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") * 2.0**10,
        lambda z, y: F.cross_entropy(z.mT, y, weight=torch.linspace(0.5, 2, CLASSES)),
        lambda z, y: F.nll_loss(z.bfloat16().float().log_softmax(-1).flatten(0, 1), y.flatten()) / 4,
    ],
    ids=["smoothing", "sum", "weights", "nll"],
)
def test_variants_of_the_cross_entropy_have_the_same_labels(loss_of):
    found = looks(train(Tokens(), lambda _: next_tokens(), steps=3, loss_of=loss_of))
    assert all((look.after, look.labelled) == (1.0, 1.0) for look in found)
    first = found[0]
    assert math.log(CLASSES) * 0.8 < first.loss < math.log(CLASSES) * 1.3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_of_any_dtype_are_looked_at(dtype):
    monitor = train(Tokens().to(dtype), lambda _: next_tokens(), steps=3)
    assert monitor.failures == {}
    assert [(look.after, look.labelled) for look in looks(monitor)] == [(1.0, 1.0)] * 3
    # logits that are viewed for transposed
    wrong = train(Tokens().to(dtype), lambda _: next_tokens(), steps=3, loss_of=viewed)
    assert wrong.failures == {}
    assert all(look.untransposed == 1.0 for look in looks(wrong))


def viewed(logits, labels):
    return F.cross_entropy(logits.float().reshape(len(logits), CLASSES, -1), labels)


def test_a_loss_without_labels_has_none():
    for loss_of in (lambda z, _: z.square().mean(), lambda z, _: -(z.log_softmax(-1) / 7).mean()):
        found = looks(train(Tokens(), lambda _: next_tokens(), steps=2, loss_of=loss_of))
        assert all(look.labelled < 0.5 for look in found)


class Returning(Tokens):
    """Returns logits in another form, and has its labels as an input."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, tokens, targets=None):
        return self.form(super().forward(tokens), targets)


@pytest.mark.parametrize(
    ("form", "pick"),
    [
        (lambda z, _: {"logits": z}, lambda out: out["logits"]),
        (lambda z, _: SimpleNamespace(logits=z), lambda out: out.logits),
        (lambda z, y: (z, mean_loss(z, y)), lambda out: out[0]),
        (lambda z, _: z.flatten(0, 1), lambda out: out[None]),
    ],
    ids=["dict", "object", "tuple", "flat"],
)
def test_logits_are_found_in_what_models_return(form, pick):
    def draw(_):
        inputs, labels = next_tokens()
        return {**inputs, "targets": labels}, labels

    found = looks(train(Returning(form), draw, steps=2, loss_of=lambda out, y: mean_loss(pick(out), y)))
    assert [(look.after, look.rows, look.length) for look in found] == [(1.0, 16, 20)] * 2


def test_a_loss_of_the_model_itself_that_shifts_is_read_too():
    class Shifting(Tokens):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            logits = logits.bfloat16()
            loss = mean_loss(logits[:, :-1].contiguous(), labels[:, 1:])
            # converted for the loop alone, as Accelerate does
            return SimpleNamespace(loss=loss, logits=logits.float())

    def draw(_):
        chunk = text()
        return {"input_ids": chunk, "labels": chunk}, None

    found = looks(train(Shifting(), draw, steps=2, loss_of=lambda out, _: out.loss))
    assert [(look.after, look.counted) for look in found] == [(1.0, 320.0)] * 2


def test_first_steps_and_powers_of_two_are_looked_at_and_no_other():
    found = looks(train(Tokens(), lambda _: next_tokens(rows=2), steps=40))
    assert [look.step for look in found] == [*range(9), 16, 32]


def test_the_first_of_several_batches_of_a_step_that_reaches_a_backward_is_looked_at():
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.watch(model, optimizer) as monitor:
        # nothing of these
        model(text(rows=5))
        with torch.no_grad():
            model(text(rows=6))
        for rows in (3, 4):
            inputs, labels = next_tokens(rows=rows)
            mean_loss(model(**inputs), labels).backward()
        optimizer.step()
        monitor.flush()
        assert [look.rows for look in looks(monitor)] == [3]


class Recomputing(Tokens):
    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens):
        def rest(x):
            return self.head(self.drop(self.mix(torch.cat([x, x], 2)).tanh()))

        return checkpoint(rest, self.embed(tokens), use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    "make",
    [
        Tokens,
        lambda: Recomputing(reentrant=True),
        lambda: Recomputing(reentrant=False),
        lambda: torch.compile(Tokens(), backend="aot_eager", fullgraph=True),
    ],
    ids=["plain", "reentrant", "recomputed", "compiled"],
)
def test_training_is_the_same_to_the_bit(make):
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = make()
        monitor = train(model, lambda _: next_tokens(), watched=watched)
        results.append([*model.parameters(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))
    assert monitor.failures == {}
    assert len(looks(monitor)) == 9
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_step_around_the_model_is_one_graph_and_is_not_looked_at():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=counter, fullgraph=True)
    def loss_of(tokens, labels):
        return mean_loss(model(tokens), labels)

    with gm.watch(model, optimizer) as monitor:
        for _ in range(12):
            inputs, labels = next_tokens()
            loss_of(inputs["tokens"], labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.flush()
        assert looks(monitor) == ()
        assert monitor.failures == {}
    assert counter.frame_count == 1


def test_copies_files_traces_and_transforms_of_the_model_know_nothing_of_it():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    failures = Failures()
    reader = BatchReader({"": model}, failures)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 our own
        other(x).sum().backward()
    torch.save(model, io.BytesIO())
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    torch.func.grad(loss)(parameters, x)
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    graph = torch.fx.experimental.proxy_tensor.make_fx(model)(x)
    assert not any("bitwise" in str(node.target) for node in graph.graph.nodes)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x).detach())
    reader.attach({})
    assert (reader.end(0), failures.counts) == ((), {})


def test_a_second_backward_and_its_gradient_are_harmless():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    reader = BatchReader({"": model}, failures := Failures())
    loss = model(torch.randn(5, 4)).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(x.square().sum() for x in grads).backward()
    assert len(reader.end(0)) == 1
    assert failures.counts == {}


def test_an_error_in_a_look_is_a_failure_and_training_goes_on(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a look")

    monkeypatch.setattr("gradiometer.monitor.batch_reader.batch_of", fail)
    model = Tokens()
    before = model.head.weight.detach().clone()
    monitor = train(model, lambda _: next_tokens())
    assert set(monitor.failures) == {"batch"}
    assert not torch.equal(before, model.head.weight)


@pytest.mark.parametrize("mask", [None, torch.rand(16, 20) < 0.8])
def test_the_host_reads_nothing_and_large_logits_are_not_copied(mask):
    inputs, labels = next_tokens()
    inputs["attention_mask"] = mask
    logits = torch.randn(16, 20, 5000, requires_grad=True)
    mean_loss(logits, labels).backward()
    with torch.no_grad(), NoReads():
        batch = batch_of(inputs, logits, 0)
        values = measured(batch, logits.grad)
    assert batch.some.numel() <= 2**18
    assert values.isfinite().all() == (mask is not None)


@pytest.mark.parametrize("tokens", [True, False])
def test_nothing_depends_on_values_and_all_stays_on_the_device(tokens):
    # a meta tensor has no values
    inputs, labels = next_tokens()
    if not tokens:
        inputs = {"images": torch.rand(16, 3, 8, 8)}
    inputs = {name: x.to("meta") for name, x in inputs.items()} | {"target": labels.to("meta")}
    for given, shape in ((inputs, (16, 20, 50)), ({}, (16, 50))):
        logits = torch.randn(shape, device="meta", requires_grad=True)
        values = measured(batch_of(given, logits, None), torch.empty_like(logits))
        assert (values.device.type, values.dtype) == ("meta", torch.float64)
        assert len(values) == len(BatchLook._fields) - 5


def test_several_models_and_other_outputs_are_left_out():
    models = {"a": Tokens(), "b": Tokens()}
    reader = BatchReader(models, Failures())
    assert not reader._handles
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    monitor = train(flat, lambda _: (torch.randn(8, 4), torch.randn(8)), steps=3, loss_of=F.mse_loss)
    assert looks(monitor) == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_model_which_takes_no_hooks_is_left_out():
    reader = BatchReader({"": torch.jit.script(nn.Linear(4, 3))}, Failures())
    assert not reader._handles


def test_a_model_inside_of_the_watched_one_may_be_called():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = Tokens(), nn.CrossEntropyLoss()

        def forward(self):
            raise NotImplementedError

    wrapper = Wrapper()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with gm.watch(wrapper, optimizer) as monitor:
        inputs, labels = next_tokens()
        wrapper.criterion(wrapper.model(**inputs).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        monitor.flush()
        assert [look.after for look in looks(monitor)] == [1.0]


@pytest.mark.parametrize("inside", [True, False])
def test_a_look_under_autocast_changes_no_gradient(inside):
    def gradients(*, watched):
        torch.manual_seed(3)
        model = Tokens()
        inputs, labels = next_tokens()
        reader = BatchReader({"": model} if watched else {}, failures := Failures())
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model(**inputs), labels)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert len(reader.end(0)) == watched
        assert failures.counts == {}
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(watched=False), gradients(watched=True)))
