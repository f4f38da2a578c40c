"""locate_nonfinite: each planted fault is named exactly, and healthy models have none."""

from __future__ import annotations

import functools
import math
import random
import warnings
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.control import Located
from support.planted_faults import FAULTS, stack

INF = math.inf


def located(step, model=None):
    """Return what is found in a block; an exception of an operation has to propagate."""
    with suppress(IndexError), gm.locate_nonfinite(nn.Linear(1, 1) if model is None else model) as found:
        step()
    return found


# planted faults


def check(found, fault):
    names = (found.operation, found.module, found.direction, found.forward_operation)
    assert names == (fault.operation, fault.module, fault.direction, fault.forward_operation), str(found)
    assert (found.file, found.line) == fault.line[:2], str(found)
    assert fault.reason in found.reason
    assert (found.then is None) == (fault.then is None), str(found)
    assert fault.then is None or fault.then in found.then, str(found)
    # one of the inputs says why: they are finite unless there is a mask, and outputs are not
    assert found
    assert found.inputs
    assert found.error is not None or any([x.counts for x in found.outputs])
    assert fault.line[2] in str(found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_in_a_block(fault):
    model, step = fault.make()
    check(located(step, model), fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_by_running_the_step(fault):
    _, step = fault.make()
    # never compiled, since it is run eagerly
    check(gm.locate_nonfinite(torch.compile(step, fullgraph=True)), fault)


def test_ranges_of_inputs_and_outputs():
    _, step = stack(lambda x: (x * torch.tensor([0.0, 1.0, 1.0, 1.0])).abs().log())
    found = gm.locate_nonfinite(step)
    (read,), (written,) = found.inputs, found.outputs
    assert (read.name, read.shape, read.dtype, read.counts) == ("self", (3, 4), torch.float32, "")
    assert read.min == 0 < read.max
    assert (written.name, written.n_neginf, written.n_posinf, written.n_nan) == ("output", 3, 0, 0)
    assert written.max == pytest.approx(math.log(read.max))
    assert "output: float32 [3, 4], from " in str(found)
    assert "3 -Inf" in str(found)


def test_parameters_are_named_among_the_inputs():
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1e30)
    found = located(lambda: model(torch.full((1, 4), 1e30)).sum().backward(), model)
    assert found.operation == "aten.addmm"
    assert [x.tensor for x in found.inputs] == ["bias", "input input of the model", "weight"]


# not finite from the start


def test_an_input_that_is_not_finite_is_named():
    model, _ = stack(torch.tanh)
    found = located(lambda: model(torch.tensor([[math.nan] * 4])).sum().backward(), model)
    assert found
    assert found.operation is None
    assert found.reason == "input x of the model is not finite already: 4 NaN"
    assert "first read in the forward, in layers.0.linear, at " in str(found)


def test_a_parameter_that_is_not_finite_is_named():
    model, step = stack(torch.tanh)
    with torch.no_grad():
        model.layers[2].linear.weight[0, 0] = INF
    found = located(step, model)
    assert found.operation is None
    assert found.reason == "parameter layers.2.linear.weight is not finite already: 1 Inf"
    # even if the step does not use it
    assert located(lambda: None, model).reason == found.reason


def test_a_gradient_that_is_not_finite_is_named():
    model, step = stack(torch.tanh)
    step()
    with torch.no_grad():
        model.layers[0].linear.bias.grad[1] = INF
    found = located(step, model)
    assert found.reason == "gradient layers.0.linear.bias.grad is not finite already: 1 Inf"


def test_a_tensor_of_no_module_that_is_not_finite_is_named():
    weight = torch.tensor([1.0, math.nan])
    _, step = stack(lambda x: x[:, :2] * weight)
    found = gm.locate_nonfinite(step)
    assert found.operation is None
    assert found.reason == "a tensor that aten.mul reads as other is not finite already: 1 NaN"


# healthy


class Attention(nn.Module):
    def __init__(self, mask, dtype=torch.float32):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.mask = mask
        self.dtype = dtype
        self.register_buffer("causal", torch.full((5, 5), -INF).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).to(self.dtype).chunk(3, -1)
        scores = self.mask(q @ k.mT / 8**0.5, self)
        return (F.dropout(scores.softmax(-1), 0.1) @ v).float()


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
MASKS = {
    "masked_fill": lambda s, _: s.masked_fill(~CAUSAL, -INF),
    "in place": lambda s, _: s.clone().masked_fill_(~CAUSAL, -INF),
    "a full of -inf": lambda s, _: s + torch.full((5, 5), -INF, dtype=s.dtype).triu(1),
    "a buffer": lambda s, m: s + m.causal.to(s.dtype),
    "where": lambda s, _: torch.where(CAUSAL, s, -INF),
    "where with a tensor": lambda s, _: torch.where(CAUSAL, s, torch.tensor(-INF, dtype=s.dtype)),
    "an index": lambda s, _: s.index_put(
        (torch.arange(2)[:, None], *[i[None] for i in torch.where(~CAUSAL)]),
        torch.tensor(-INF, dtype=s.dtype),
    ),
    "a logarithm": lambda s, _: s + CAUSAL.to(s.dtype).log(),
    "as Hugging Face does": lambda s, _: s + (1 - CAUSAL.to(s.dtype)) * torch.finfo(s.dtype).min,
    "two masks": lambda s, _: s + ((1 - CAUSAL.to(s.dtype)) * torch.finfo(s.dtype).min) * 2,
    "written into memory that is not initialized": lambda s, _: (
        s + torch.empty(5, 5, dtype=s.dtype).fill_(-INF).triu_(1)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_no_fault(mask, dtype):
    torch.manual_seed(0)
    model = Attention(MASKS[mask], dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 5, 8)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert not located(step, model)
    assert not gm.locate_nonfinite(step)


def test_a_transformer_with_all_its_masks_is_healthy():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
    mask = ~CAUSAL
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    x = torch.randn(3, 5, 8)

    def step():
        masks = {"tgt_mask": mask, "src_key_padding_mask": padding, "tgt_key_padding_mask": padding}
        model(x, x, **masks, memory_key_padding_mask=padding).square().mean().backward()

    assert not located(step, model)


def without_gradient(compute):
    @torch.no_grad()
    def metric(x):
        return torch.where(x > 0, compute(x), 0.0) + x

    return metric


HEALTHY = {
    "scaled_dot_product_attention with a masked row": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    )[0],
    "a norm of zeros": lambda x: (x * 0).norm(dim=-1, keepdim=True) + x,
    "a deviation of zeros": lambda x: (x * 0).std(-1, keepdim=True) + x,
    "nan_to_num": lambda x: x + (x.detach() * 0).log().nan_to_num(0, 0, 0),
    "log in a metric": lambda x: x + without_gradient(torch.log)(x.detach()),
    "the largest so far": lambda x: torch.maximum(x, x.new_tensor(-INF)),
    "a limit of inf": lambda x: x.clamp(-INF, INF),
    "the norm of order inf": lambda x: x / x.norm(INF),
    "top 2": lambda x: torch.where(x >= x.topk(2).values[:, -1:], x, -INF).softmax(-1),
    "logsumexp over a mask": lambda x: x.masked_fill(x < 0, -INF).logsumexp(-1).clamp(-10.0)[:, None] + x,
    "max pooling with padding": lambda x: F.max_pool1d(x[None], 3, 1, 1)[0],
    "memory that is not initialized": lambda x: torch.empty_like(x).copy_(x),
    "no elements": lambda x: torch.cat([x, x[:0].log()]),
    "complex numbers": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "an overflow that saturates": lambda x: torch.sigmoid((x * 1e30) * 1e30),
    "a checkpoint": lambda x: checkpoint(
        lambda y: F.dropout(y, 0.5).masked_fill(y < 0, -INF).exp(), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layer_has_no_fault(name):
    model, step = stack(HEALTHY[name])
    assert not located(step, model), name


def test_a_healthy_step_of_other_layers():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(10, 4, sparse=True),
            "gru": nn.GRU(4, 4, batch_first=True),
            "conv": nn.Conv1d(4, 4, 3),
            "norm": nn.BatchNorm1d(4),
        }
    )
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x, _ = model["gru"](model["emb"](torch.arange(10).view(2, 5)))
        with torch.autocast("cpu", torch.bfloat16):
            x = model["norm"](model["conv"](x.mT))
        scaler.scale(x.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    found = located(step, model)
    assert not found
    assert (found.operation, found.inputs, found.error) == (None, (), None)
    assert str(found) == "all gradients, parameters and results are finite"


# what matters


def test_without_a_backward_the_output_of_the_model_counts():
    model, _ = stack(torch.log)
    found = located(lambda: model(torch.ones(3, 4)), model)
    assert (found.operation, found.module) == ("aten.log", "layers.1")


def test_with_a_backward_an_output_that_is_not_used_does_not_count():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            # such as attention weights of padding
            return y, {"weights": y.masked_fill(y < INF, -INF).softmax(-1)}

    model = Two()
    assert not located(lambda: model(torch.ones(1, 4))[0].sum().backward(), model)
    assert located(lambda: model(torch.ones(1, 4)), model).operation == "aten._softmax"


def test_a_graph_from_before_the_block():
    x = torch.zeros(1, requires_grad=True)
    y = x.sqrt()
    found = located(y.backward)
    # the forward was not seen
    assert (found.operation, found.direction, found.forward_operation) == ("aten.div", "backward", "Sqrt")


def test_without_a_backward_a_result_counts_while_it_is_in_use():
    kept = []
    model = nn.Linear(2, 2)
    x = torch.zeros(2)
    assert located(lambda: kept.append(x.log()), model).operation == "aten.log"
    assert not located(x.log, model)


def test_a_loss_that_a_check_refuses_counts():
    model, _ = stack(torch.tanh)

    def step():
        loss = (model(torch.ones(3, 4)).mean() * 0).log()
        if not torch.isfinite(loss):
            message = "the loss is not finite"
            raise FloatingPointError(message)
        loss.backward()

    with pytest.raises(FloatingPointError), gm.locate_nonfinite(model) as found:
        step()
    assert found.operation == "aten.log"
    assert gm.locate_nonfinite(step).operation == "aten.log"


def test_the_first_of_two_faults_is_named():
    model, step = stack(lambda x: torch.log(x * 0) / (x * 0))
    assert located(step, model).operation == "aten.log"


def test_a_buffer_that_a_forward_spoils_is_named():
    model = nn.BatchNorm1d(2)
    model.register_buffer("range", torch.tensor([INF, -INF]))

    def step(scale):
        with torch.no_grad():
            model.running_mean.div_(scale)
        model(torch.randn(4, 2)).sum().backward()

    assert not located(lambda: step(1.0), model)
    found = located(lambda: step(0.0), model)
    assert (found.operation, found.direction) == ("aten.div_", None)
    assert found.inputs[0].tensor == "running_mean"


def test_an_operation_that_raises_because_of_a_nan_is_not_the_cause():
    model, _ = stack(torch.tanh)

    def step():
        p = (model(torch.ones(3, 4)) * 0).log().softmax(-1)
        torch.multinomial(p, 1)

    with pytest.raises(RuntimeError), gm.locate_nonfinite(model) as found:
        step()
    assert (found.operation, found.then) == ("aten.log", "then aten.multinomial raised an error")


def test_a_factorization_that_fails_is_named():
    with pytest.raises(RuntimeError), gm.locate_nonfinite(nn.Linear(1, 1)) as found:
        torch.linalg.cholesky(-torch.eye(2))
    assert found.operation == "aten.linalg_cholesky_ex"
    assert (found.inputs[0].min, found.inputs[0].max) == (-1, 0)
    with pytest.raises(RuntimeError), gm.locate_nonfinite(nn.Linear(1, 1)) as found:
        torch.linalg.cholesky(torch.zeros(2, 2).log())
    assert (found.operation, found.then) == ("aten.log", "then aten.linalg_cholesky_ex raised an error")


def test_an_exception_that_is_caught_is_no_fault():
    model, step = stack(torch.tanh)

    def careful():
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([-1]), torch.ones(2, 2))
        step()

    assert not located(careful, model)


def test_an_exception_without_a_fault_propagates():
    def step():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gm.locate_nonfinite(step)


# kinds of operations


def test_lists_of_tensors_are_followed_one_by_one():
    a, b = torch.ones(2), torch.zeros(2)
    c = [None]

    def step():
        x = torch._foreach_log([a, b])
        c[0] = torch._foreach_add(x, 1.0)[1]

    found = located(step)
    assert (found.operation, [x.name for x in found.inputs]) == ("aten._foreach_log", ["self[1]"])


def test_operations_in_place_show_what_was_there_before():
    model, step = stack(lambda x: x.abs().mul_(1e38).mul_(1e38))
    found = located(step, model)
    assert found.operation == "aten.mul_"
    assert found.inputs[0].counts == ""
    assert found.inputs[0].max < 1e39


def test_views_and_their_base_share_a_fault():
    def compute(x):
        y = x.clone()
        y[0] /= 0
        return y

    model, step = stack(compute)
    assert located(step, model).operation == "aten.div_"


def test_sparse_gradients():
    model = nn.Embedding(10, 4, sparse=True)

    def step():
        (model(torch.tensor([1, 2])) * 0).sqrt().sum().backward()

    found = located(step, model)
    assert (found.forward_operation, found.direction) == ("aten.sqrt", "backward")


def test_the_backward_of_a_backward():
    model, _ = stack(torch.tanh)
    x = torch.zeros(3, 4, requires_grad=True)

    def step():
        y = x**1.5
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (model(x) + grad).sum().backward()

    found = located(step, model)
    assert (found.operation, found.direction) == ("aten.pow", "backward")
    assert found.forward_operation == "aten.pow"
    assert found.code == "y = x**1.5"


def test_functional_gradients():
    model = nn.Linear(4, 1)
    kept = []

    def step():
        parameters = dict(model.named_parameters())

        def loss(p):
            return (torch.func.functional_call(model, p, (torch.ones(1, 4),)) * 0).sqrt().sum()

        kept.append(torch.func.grad(loss)(parameters))

    found = located(step, model)
    assert (found.operation, found.direction) == ("aten.div", "backward")


def test_a_higher_order_operation():
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 1, 4, 8)
    model, step = stack(torch.tanh)

    def with_flex():
        with warnings.catch_warnings():
            # torch asks to compile it
            warnings.simplefilter("ignore")
            y = flex_attention(x, x, x, score_mod=lambda s, _b, _h, q, k: torch.where(q >= k, s, -INF))
        assert y.isfinite().all()
        step()

    assert not located(with_flex, model)


# the step form restores what the step has changed


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.other = torch.zeros(2)

    def step(self, x):
        self.optimizer.zero_grad()
        self.other[0].add_(1)
        noise = random.random() + np.random.rand()  # noqa: NPY002, S311 the global ones
        loss = self.model(x + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def state(self):
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        grads = [p.grad for p in self.model.parameters()]
        return gm.fingerprint({**parts, "other": self.other, "random": torch.get_rng_state()}), grads


@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_is_changed(steps):
    trainer, x = Trainer(), torch.randn(8, 4)
    for _ in range(steps):
        trainer.step(x)
    before, grads = trainer.state()
    values = [None if g is None else g.clone() for g in grads]
    numbers = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 the global one
    assert not gm.locate_nonfinite(trainer.step, x)
    after, now = trainer.state()
    assert after == before
    assert all(a is b for a, b in zip(grads, now, strict=True))
    assert all(a is None or torch.equal(a, b) for a, b in zip(values, now, strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers  # noqa: NPY002
    assert bool(trainer.optimizer.state) == bool(steps)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_nothing_is_changed_after_a_fault(make):
    torch.manual_seed(0)
    # the backward makes views of the weights after the fault was found
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer, x = make(model.parameters(), lr=0.1), torch.randn(4, 8)

    def step():
        model(x).relu().log().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = gm.fingerprint(model)
    for _ in range(2):
        found = gm.locate_nonfinite(step)
        assert found.operation == "aten.log"
        assert gm.fingerprint(model) == before


class Scaled(Trainer):
    """With more state: a GradScaler, which refuses two steps without an update, and several schedulers."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        parts = [torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5) for _ in range(2)]
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, parts, [2])

    def step(self, x):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(x).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


@pytest.mark.parametrize("kind", [Trainer, Scaled])
def test_training_goes_on_as_without(kind):
    x, states = torch.randn(8, 4), []
    for looks in (False, True):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 the global one
        trainer = kind()
        for i in range(5):
            if looks and i != 2:
                assert not gm.locate_nonfinite(trainer.step, x)
            trainer.step(x)
        scaler = trainer.scaler.state_dict() if kind is Scaled else None
        states.append((trainer.state()[0], scaler, trainer.optimizer.param_groups[0]["lr"]))
    assert states[0] == states[1]


def test_a_result_of_a_step_counts():
    found = gm.locate_nonfinite(lambda x: (x / x).to(torch.float8_e4m3fn), torch.zeros(2))
    assert found.operation == "aten.div"
    assert found.outputs[0].n_nan == 2


def test_a_step_that_raises_is_undone():
    trainer = Trainer()
    before, _ = trainer.state()

    def step():
        trainer.step(torch.randn(8, 4))
        F.embedding(torch.tensor([-1]), torch.ones(2, 2))

    assert gm.locate_nonfinite(step).operation == "aten.embedding"
    assert trainer.state()[0] == before


def test_a_compiled_step_is_not_compiled_again():
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=backend)

    def loss(x):
        return compiled(x).sum()

    step = torch.compile(loss, backend=backend)
    x = torch.ones(1, 4)
    step(x)
    compiled(x)
    count = len(calls)
    assert count
    assert not gm.locate_nonfinite(step, x)
    bad = x * math.nan
    with gm.locate_nonfinite(compiled) as found:
        compiled(bad)
    # names are those of the model
    assert (found.module, found.reason) == ("", "input input of the model is not finite already: 4 NaN")
    assert len(calls) == count
    step(x)
    compiled(x)
    assert len(calls) == count


def test_names_of_several_models_begin_with_the_variable():
    first, second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(second[1].weight)
    nn.init.zeros_(second[1].bias)
    models = SimpleNamespace(one=first, two=second)
    x = torch.ones(1, 2)

    def step():
        (models.two(models.one(x)).sum() / 0).backward()

    assert gm.locate_nonfinite(step).module is None
    nn.init.constant_(second[1].weight, INF)
    found = gm.locate_nonfinite(functools.partial(lambda m: m.two(m.one(x)).sum().backward(), models))
    assert found.reason == "parameter two.1.weight is not finite already: 4 Inf"


def test_a_module_with_arguments_is_run():
    model = nn.Linear(2, 2)
    assert "input input of the model" in gm.locate_nonfinite(model, torch.full((1, 2), math.nan)).reason
    assert not gm.locate_nonfinite(model, torch.ones(1, 2))


# the block


def test_a_block_leaves_nothing_behind():
    model, step = stack(torch.tanh)
    step()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    threads = []
    # a device's backward runs on this thread, where its operations are seen
    assert not located(lambda: threads.append(torch.autograd.is_multithreading_enabled()) or step(), model)
    assert threads == [False]
    # looking changes no bit
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert not any([m._forward_pre_hooks or m._forward_hooks for m in model.modules()])
    assert not any([p._post_accumulate_grad_hooks for p in model.parameters()])
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.autograd.is_multithreading_enabled()


def test_a_block_is_entered_once():
    block = gm.locate_nonfinite(nn.Linear(2, 2))
    with block as found:
        pass
    assert found == Located()
    with pytest.raises(RuntimeError, match="entered already"), block:
        pass


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(TypeError, match="expected a module, or a function that makes a step, got int"):
        gm.locate_nonfinite(3)


def test_inside_a_compiled_function_it_is_refused():
    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        with gm.locate_nonfinite(nn.Linear(2, 2)):
            return x + 1

    with pytest.raises(Exception, match="locate_nonfinite"):
        step(torch.ones(1))
