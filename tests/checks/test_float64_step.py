"""A training step in float64: exact, also where the model casts, and without a trace."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.checks import lifting
from gradiometer.checks.float64_step import Float64Error, float64_step
from gradiometer.checks.random_replay import ReplayError, recording, replaying
from gradiometer.checks.recompute import without_checkpoints

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SEQUENCE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
TOKENS = torch.tensor([[1, 4, 1, 5], [9, 2, 6, 5]])


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def loss_of(output):
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def exact(model, x=X):
    """Return the gradients of a copy of the model in float64."""
    model = copy.deepcopy(model).double()
    model.zero_grad()
    loss_of(model(x.double() if x.is_floating_point() else x)).backward()
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(run, expected, tolerance=1e-12):
    assert run.grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert run.grads[name].dtype == torch.float64
        error = (run.grads[name] - grad).norm().item()
        assert error <= tolerance * grad.norm().item() + 1e-15, name


class Casting(nn.Module):
    """A norm in float32, a mask of the smallest number, and a gate in half precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        y = x.to(torch.float32)
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        scores = (y @ y.transpose(-1, -2)).half()
        mask = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        weights = functional.softmax(scores + mask, dim=-1, dtype=torch.float32).type_as(x)
        return self.weight * (weights.float() @ y.float()) + torch.arange(8) / 7 + torch.ones(8) * 0.1

    def exact(self, x, weight):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        scores = y @ y.transpose(-1, -2)
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=x.dtype).triu(1)
        grid = torch.arange(8, dtype=torch.float64) / 7 + 0.1
        return weight * (functional.softmax(scores + mask, dim=-1) @ y) + grid


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        return y + functional.scaled_dot_product_attention(q, k, v)


MODELS = {
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 3)), X),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.RReLU(), nn.Linear(6, 3)), X),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.GroupNorm(2, 4), nn.Dropout1d(), nn.Flatten()),
        SEQUENCE,
    ),
    "lstm": (lambda: nn.LSTM(8, 6, 2, dropout=0.3, batch_first=True), SEQUENCE),
    "gru": (lambda: nn.GRU(8, 6, 2, dropout=0.3, bidirectional=True), SEQUENCE),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "tied": (Tied, TOKENS),
    "sparse": (lambda: nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, 3)), TOKENS),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), X),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), X),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_gradients_of_its_copy_in_float64(name, dtype):
    make, x = MODELS[name]
    if name == "spectral norm" and dtype != torch.float32:
        pytest.skip("torch has no norm of this kind in bfloat16")
    model = make().to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    state = copy.deepcopy(model.state_dict())

    def step(x):
        loss_of(model(x)).backward()

    with recording() as draws:
        step(x)
    model.zero_grad()
    model.load_state_dict(state)
    run = float64_step(step, (x,), {}, model, draws)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == dtype for p in model.parameters())
    assert not run.notes
    with replaying(draws):
        assert_equal(run, exact(model, x))


def test_numbers_that_only_float64_has():
    model = mlp()

    def step(x):
        output = model(x)
        least = torch.finfo(output.dtype).min
        for y in (
            torch.tensor(least),
            torch.tensor([least], dtype=torch.float32),
            torch.full((1,), least),
            torch.full((1,), least, dtype=torch.bfloat16),
        ):
            output = torch.max(output, y)
        loss_of(output).backward()
        return torch.tensor([1, 2]), torch.tensor(0.1), torch.tensor([[0.1, 1.0]]).sum()

    run = float64_step(step, (X,), {}, model)
    assert_equal(run, exact(model))
    assert list(run.outputs) == ["output.1", "output.2"]
    assert run.outputs["output.1"].item() == 0.1
    assert torch.get_default_dtype() == torch.float32


def test_a_complex_model():
    model = nn.Linear(8, 3, dtype=torch.complex64)
    x = X.to(torch.complex64)
    run = float64_step(lambda x: model(x).abs().square().mean().backward(), (x,), {}, model)
    weight, bias = [p.detach().to(torch.complex128).requires_grad_() for p in model.parameters()]
    functional.linear(x.to(torch.complex128), weight, bias).abs().square().mean().backward()
    torch.testing.assert_close(run.grads["weight"], weight.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(run.grads["bias"], bias.grad, rtol=1e-13, atol=1e-15)


def test_gradients_are_in_the_order_of_the_backward_pass():
    model = mlp()
    run = float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model)
    assert list(run.grads) == ["2.bias", "2.weight", "0.bias", "0.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_casts_inside_of_the_model_do_nothing(dtype):
    model = Casting().to(dtype)
    x = SEQUENCE.to(dtype)

    def step(x):
        output = model(x)
        loss = loss_of(output)
        loss.backward()
        return {"loss": loss.float(), "item": loss.item(), "parts": [output.half(), output.argmax()]}

    run = float64_step(step, (x,), {}, model)
    expected = model.exact(x.double(), model.weight.double())
    torch.testing.assert_close(run.outputs["output.parts.0"], expected, rtol=1e-14, atol=1e-14)
    assert run.outputs["output.loss"].item() == run.outputs["output.item"].item()
    assert list(run.outputs) == ["output.loss", "output.item", "output.parts.0"]
    wide = model.weight.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model.exact(x.double(), wide)), [wide])
    assert_equal(run, {"weight": grad})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_a_scaler_and_a_scheduler(dtype):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    def state():
        return str([x.state_dict() for x in (model, optimizer, scheduler, scaler)])

    for _ in range(2):
        before = state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = float64_step(step, (X,), {}, model)
        assert state() == before
        assert not run.notes
        assert_equal(run, exact(model))
        assert "step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched")
        # also of an optimizer that has a state
        step(X)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_keep_their_activations(use_reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.rest = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
            self.calls = []

        def run(self, x):
            self.calls.append(x.dtype)
            return self.rest(x)

        def forward(self, x):
            return checkpoint(self.run, self.first(x), use_reentrant=use_reentrant)

    model = Model()

    def step(x):
        loss_of(model(x)).backward()
        return len(model.calls)

    with recording() as draws, without_checkpoints():
        step(SEQUENCE)
    model.zero_grad()
    model.calls.clear()
    run = float64_step(step, (SEQUENCE,), {}, model, draws)
    with replaying(draws), without_checkpoints():
        assert_equal(run, exact(model, SEQUENCE))


def test_accumulation_adds_to_the_gradients_there_are():
    model = mlp()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.frozen.grad = torch.ones(2)
    owned = [p.grad for p in model.parameters()]

    def step(x):
        for part in x.chunk(2):
            (loss_of(model[2](model[1](model[0](part)))) / 2).backward()

    run = float64_step(step, (X,), {}, model)
    expected = {name: grad + 1 for name, grad in exact(mlp()).items()}
    assert_equal(run, expected | {"frozen": torch.ones(2).double()})
    assert all(
        p.grad is grad and bool((grad == 1).all()) for p, grad in zip(model.parameters(), owned, strict=True)
    )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_is_called_twice(set_to_none):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    def step(x):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model(x)).backward()
            optimizer.step()

    run = float64_step(step, (X,), {}, model)
    assert_equal(run, exact(model))
    assert "several times" in run.notes[0]
    assert not optimizer.state
    assert "step" not in vars(optimizer)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


def test_a_closure_is_called():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        return optimizer.step(closure)

    run = float64_step(step, (X,), {}, model)
    assert_equal(run, exact(model))
    torch.testing.assert_close(run.outputs["output"], loss_of(copy.deepcopy(model).double()(X.double())))


def test_an_update_in_the_backward_pass():
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    seen = []

    def update(p):
        optimizers[p].step()
        seen.append(p.grad is not None)
        optimizers[p].zero_grad()
        seen.append(p.grad is not None)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    before = copy.deepcopy(model.state_dict())
    run = float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model)
    expected = mlp()
    expected.load_state_dict(before)
    assert_equal(run, exact(expected))
    assert seen == [True, False] * 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_parameters_from_a_list_and_an_update_by_hand():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    a, b, c, d = list(model.parameters())

    def step(x):
        for p in (a, b, c, d):
            p.grad = None
        loss_of(functional.linear(functional.gelu(functional.linear(x, a, b)), c, d)).backward()
        with torch.no_grad():
            for p in (a, b, c, d):
                p.sub_(p.grad, alpha=0.0)
            torch._foreach_mul_([a, b], 1.0)
            c.grad.mul_(2)

    run = float64_step(step, (X,), {}, model)
    expected = exact(model)
    expected["2.weight"] = 2 * expected["2.weight"]
    assert_equal(run, expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_the_step_computes_without_backward():
    model = mlp()
    parameters = dict(model.named_parameters())

    def listed(x):
        grads = torch.autograd.grad(loss_of(model(x)), list(parameters.values()))
        for p, grad in zip(parameters.values(), grads, strict=True):
            p.grad = grad

    def functional_call(x):
        own = dict(model.named_parameters())
        grads = torch.func.grad(lambda own: loss_of(torch.func.functional_call(model, own, (x,))))(own)
        for name, p in own.items():
            p.grad = grads[name]

    assert_equal(float64_step(listed, (X,), {}, model), exact(model))
    assert_equal(float64_step(functional_call, (X,), {}, model), exact(model))


def test_hooks_of_parameters_change_gradients():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 3)
    run = float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model)
    expected = exact(mlp())
    expected["0.weight"] = 3 * expected["0.weight"]
    assert_equal(run, expected)


def test_everything_that_the_step_writes_is_as_before():
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    running, count, wide = torch.zeros(3), torch.zeros((), dtype=torch.long), torch.zeros(3).double()
    view = running[1:]
    batch = {"x": X.clone(), "rest": [torch.ones(3, requires_grad=True)]}

    def step(batch):
        output = model(batch["x"]) * batch["rest"][0]
        running.mul_(0.9).add_(output.detach().mean(0))
        view[0] = 7
        count.add_(1)
        wide.add_(running)
        model[0].last = output
        model[0].scale = 3.0
        loss_of(output).backward()
        batch["x"].zero_()
        return running, wide, batch["rest"][0].grad

    state = copy.deepcopy(model.state_dict())
    run = float64_step(step, (batch,), {}, model)
    assert run.outputs["output.0"][1] == 7
    assert torch.equal(run.outputs["output.0"], run.outputs["output.1"])
    assert run.outputs["output.2"].dtype == torch.float64
    assert not running.any()
    assert not wide.any()
    assert count == 0
    assert torch.equal(batch["x"], X)
    assert batch["rest"][0].grad is None
    assert not hasattr(model[0], "last")
    assert not hasattr(model[0], "scale")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_tensors_in_objects_that_are_not_containers():
    class Batch:
        def __init__(self):
            self.x = X.bfloat16()
            self.mask = torch.zeros(4, 4).bfloat16()

    model = Attention().bfloat16()

    def step(batch):
        q, k, v = model.qkv(batch.x).chunk(3, -1)
        loss_of(functional.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask)).backward()

    run = float64_step(step, (Batch(),), {}, model)
    wide = copy.deepcopy(model).double()
    q, k, v = wide.qkv(X.bfloat16().double()).chunk(3, -1)
    loss_of(functional.scaled_dot_product_attention(q, k, v)).backward()
    assert_equal(run, {name: p.grad for name, p in wide.named_parameters()})


@pytest.mark.parametrize("small", [0, lifting._SMALL])
def test_a_batch_of_a_data_set_in_memory(monkeypatch, small):
    monkeypatch.setattr(lifting, "_SMALL", small)
    model = mlp()
    data = torch.cat([X, X + 1, X + 2, X + 3, X + 4])
    places = torch.arange(4)
    shapes = []
    cast = lifting.Lifting.wide

    def wide(self, x, *, written=False):
        shapes.append(tuple(x.shape))
        return cast(self, x, written=written)

    monkeypatch.setattr(lifting.Lifting, "wide", wide)

    def step(x):
        for batch in (
            x,
            data[:4],
            data[places],
            data.index_select(0, places),
            data[data[:, 0] < data[3, 0] + 9][:4],
        ):
            (loss_of(model(batch)) / 5).backward()

    assert_equal(float64_step(step, (data[:4],), {}, model), exact(model))
    # only its parts are cast if it is large
    assert ((20, 8) in shapes) == (small > 0)

    def writing(x):
        data[places] = 0.0
        data[:2] = 2.0
        loss_of(model(data[:4] + x.sum() * 0)).backward()

    before = data.clone()
    expected = torch.zeros(4, 8)
    expected[:2] = 2
    assert_equal(float64_step(writing, (data[:1],), {}, model), exact(model, expected))
    assert torch.equal(data, before)


class Named(nn.Parameter):
    """A parameter with attributes."""


def test_parameters_keep_their_class_and_attributes():
    model = mlp()
    model[0].weight = Named(model[0].weight.detach())
    model[0].weight.tag = "a"
    seen = []

    original = model[0].weight

    def step(x):
        seen.append((type(model[0].weight), model[0].weight.tag, model[0].weight.dtype))
        model[0].weight.examples = x
        seen.append(original.examples.dtype)
        loss_of(model(x)).backward()

    assert_equal(float64_step(step, (X,), {}, model), exact(mlp()))
    assert seen == [(Named, "a", torch.float64), torch.float64]
    assert vars(original) == {"tag": "a"}


def test_another_thread_is_left_alone():
    model = mlp()
    seen = []

    def other():
        x = X.clone().requires_grad_()
        AnyProduct.apply(x, torch.ones(3, 8)).sum().backward()
        seen.append((AnyProduct.apply(x, torch.ones(3, 8)).dtype, x.grad.dtype, torch.ones(2).mul_(2).dtype))

    def step(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        loss_of(model(x)).backward()

    assert_equal(float64_step(step, (X,), {}, model), exact(model))
    assert seen == [(torch.float32,) * 3]


def test_a_monitor_and_taps_see_nothing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taps = gm.Taps(model, {"linear": nn.Linear})
    steps = []

    def step(x):
        loss = loss_of(model(x))
        loss.backward()
        monitor.record()
        optimizer.step()
        optimizer.zero_grad()
        monitor.advance(loss=loss)

    with gm.Monitor(model, taps=taps, rules=(), sinks=[lambda record: steps.append(record.loss)]) as monitor:
        step(X)
        before = {name: value.clone() for name, value in taps.state_dict().items()}
        assert before
        run = float64_step(step, (X,), {}, model)
        assert all(torch.equal(value, before[name]) for name, value in taps.state_dict().items())
        expected = exact(model)
        step(X)
    assert len(steps) == 2
    assert not run.notes
    assert_equal(run, expected)


def test_a_data_parallel_model_trains_on(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = mlp()
        parallel = nn.parallel.DistributedDataParallel(model)

        def step(x):
            loss_of(parallel(x)).backward()

        for _ in range(2):
            assert_equal(float64_step(step, (X,), {}, parallel), exact(model))
            step(X)
            # its reducer saw all of these
            assert all(p.grad is not None for p in model.parameters())
            parallel.zero_grad()
    finally:
        torch.distributed.destroy_process_group()


def test_an_update_that_was_compiled_before():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    update = torch.compile(optimizer.step, backend="eager")
    before = copy.deepcopy(model.state_dict())

    def step(x):
        loss_of(model(x)).backward()
        update()
        optimizer.zero_grad()

    assert_equal(float64_step(step, (X,), {}, model), exact(model))
    assert not optimizer.state
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_attention_where_no_allowed_kernel_has_float64():
    model = Attention()

    def step(x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = model.qkv(x).chunk(3, -1)
            loss_of(functional.scaled_dot_product_attention(q, k, v)).backward()

    with pytest.raises(RuntimeError):
        step(SEQUENCE)
    assert float64_step(step, (SEQUENCE,), {}, model).grads.keys() == {"qkv.weight", "qkv.bias"}


def test_compiled_code_runs_eagerly():
    model = mlp()
    compiled = torch.compile(model, backend="eager")

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        return loss_of(model(x))

    assert_equal(float64_step(lambda x: loss_of(compiled(x)).backward(), (X,), {}, compiled), exact(model))
    assert_equal(float64_step(lambda x: step(x).backward(), (X,), {}, model), exact(model))


# without float64


@pytest.fixture
def narrow_operators():
    with torch.library._scoped_library("gradiometer_narrow", "DEF") as library:
        library.define("square(Tensor x) -> Tensor")
        library.define("rounded_square(Tensor x) -> Tensor")
        library.define("double_(Tensor(a!) x) -> Tensor(a!)")

        def square(x):
            if x.dtype != torch.bfloat16:
                raise NotImplementedError(f"no kernel for {x.dtype}")
            return x * x

        def double(x):
            assert x.dtype == torch.float32
            return x.mul_(2)

        library.impl("square", square, "CPU")
        library.impl("rounded_square", lambda x: x.float().square().to(x.dtype), "CPU")
        library.impl("double_", double, "CPU")
        yield torch.ops.gradiometer_narrow


def test_operators_without_float64_are_named(narrow_operators):
    x = X.clone()
    model = mlp()
    calls = {
        "square": (narrow_operators.square, torch.bfloat16, lambda y: y.bfloat16() ** 2),
        "rounded_square": (
            narrow_operators.rounded_square,
            torch.float32,
            lambda y: y.float() ** 2,
        ),
        "double_": (narrow_operators.double_, torch.float32, lambda y: y.float() * 2),
    }
    for name, (call, dtype, expected) in calls.items():

        def step(x, call=call):
            with torch.no_grad():
                y = torch.sin(x)
                result = call(y)
            loss_of(model(x)).backward()
            return result, y

        run = float64_step(step, (x,), {}, model)
        assert run.narrow == {f"gradiometer_narrow::{name}": dtype}
        assert run.notes == (f"gradiometer_narrow::{name} ran in {dtype}: it has no float64",)
        wide = torch.sin(X.double())
        assert torch.equal(run.outputs["output.0"], expected(wide).double())
        assert_equal(run, exact(model))
        if name == "double_":
            assert torch.equal(run.outputs["output.1"], run.outputs["output.0"])


def test_an_operator_that_fails_in_each_dtype_raises_its_first_error():
    model = mlp()

    def step(x):
        torch.linalg.cholesky(-torch.eye(3))
        loss_of(model(x)).backward()

    with pytest.raises(Float64Error, match=r"LinAlgError: linalg\.cholesky"):
        float64_step(step, (X,), {}, model)


class Product(torch.autograd.Function):
    """A product that is only there in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        assert x.dtype == weight.dtype == torch.float32
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        assert grad.dtype == x.dtype == weight.dtype == torch.float32
        return grad @ weight, grad.T @ x


class AnyProduct(Product):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


@pytest.mark.parametrize("function", [Product, AnyProduct])
def test_custom_functions(function):
    model = mlp()
    weight = model[0].weight
    for get in (lambda: weight, lambda: model[0].weight):

        def step(x, get=get):
            hidden = functional.gelu(function.apply(x, get()) + model[0].bias)
            loss_of(model[2](hidden)).backward()

        run = float64_step(step, (X,), {}, model)
        if function is Product:
            assert run.narrow == {f"{__name__}.Product": torch.float32}
            assert_equal(run, exact(model), 1e-5)
            # the rest is exact up to what the function has rounded
            with pytest.raises(AssertionError):
                assert_equal(run, exact(model))
        else:
            assert not run.narrow
            assert_equal(run, exact(model))
        assert all(p.grad is None for p in model.parameters())


def test_functions_that_quantize_have_float64():
    class Quantize(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return (x * 8).round() / 8

        @staticmethod
        def backward(_ctx, grad):
            return grad

    class Rounded(Quantize):
        @staticmethod
        def forward(_ctx, x):
            return torch.from_numpy(x.detach().numpy().astype("float32").astype("float64"))

    model = mlp()
    for function, narrow in ((Quantize, []), (Rounded, [torch.float32])):

        def step(x, function=function):
            loss_of(function.apply(model(x))).backward()

        run = float64_step(step, (X,), {}, model)
        assert list(run.narrow.values()) == narrow
        assert next(iter(run.narrow), "Rounded").endswith("Rounded")


def test_casts_to_eight_bits_stay():
    model = mlp()

    def step(x):
        loss_of(model(x)).backward()
        return x.to(torch.float8_e4m3fn).float()

    run = float64_step(step, (X,), {}, model)
    assert torch.equal(run.outputs["output"], X.to(torch.float8_e4m3fn).double())


def test_groups_of_a_matrix_product():
    grouped = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    weight = nn.Parameter(torch.randn(3, 16, 8).bfloat16())
    model = nn.ParameterList([weight])
    x = torch.randn(20, 16).bfloat16()
    ends = torch.tensor([4, 4, 20], dtype=torch.int32)

    def step(x):
        loss_of(grouped(x, weight, offs=ends)).backward()

    run = float64_step(step, (x,), {}, model)
    wide = weight.detach().double().requires_grad_()
    loss_of(torch.cat([x.double()[:4] @ wide[0], x.double()[4:] @ wide[2]])).backward()
    assert not run.notes
    assert_equal(run, {"0": wide.grad})


# errors


def test_errors_of_the_step_and_of_its_random_numbers():
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout())
    state = copy.deepcopy(model.state_dict())

    def fails(x):
        loss_of(model(x)).backward()
        raise KeyError("u")

    with pytest.raises(Float64Error, match="in float64 the step raises KeyError: 'u'"):
        float64_step(fails, (X,), {}, model)
    with recording() as draws:
        model(X)
        model(X)
    with pytest.raises(ReplayError, match="1 of 2 recorded draws are left"):
        float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model, draws)
    with recording() as draws:
        torch.rand(3)
    with pytest.raises(ReplayError, match="bernoulli_"):
        float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model, draws)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_a_device_without_float64(monkeypatch):
    model = mlp()
    weights = list(model.parameters())

    def copy_of(_self, x):
        if len(x) == 3:
            raise TypeError("this device has no float64")
        return x.double()

    monkeypatch.setattr(lifting.Lifting, "copy", copy_of)
    with pytest.raises(Float64Error, match="TypeError: this device has no float64"):
        float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model)
    assert all(p is q for p, q in zip(model.parameters(), weights, strict=True))


def test_without_draws_random_numbers_are_those_of_the_generator():
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout())
    before = torch.get_rng_state()
    run = float64_step(lambda x: loss_of(model(x)).backward(), (X,), {}, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert run.grads.keys() == {"0.weight", "0.bias"}


def test_the_optimizer_may_have_drawn_the_rest():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: torch.rand(3))

    def step(x):
        loss_of(model(x)).backward()
        optimizer.step()

    with recording() as draws:
        step(X)
    model.zero_grad()
    assert len(draws.drawn) == 1
    assert_equal(float64_step(step, (X,), {}, model, draws), exact(model))


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
@pytest.mark.parametrize("autocast", [False, True])
def test_models_of_transformers(name, autocast):
    pytest.importorskip("transformers")
    from kernels_bench.zoo.contracts import subjects

    subject = subjects.start(name)
    model = subject.model
    x = subject.batch

    def step(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        return loss

    keys = {module: list(vars(module)) for module in model.modules()}
    state = copy.deepcopy(model.state_dict())
    with recording() as draws, torch.no_grad():
        model(**x)
    run = float64_step(step, (x,), {}, model, draws)
    assert not run.notes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert {module: list(vars(module)) for module in model.modules()} == keys
    # casts of the model to float32 round in the copy
    wide = copy.deepcopy(model).double()
    with replaying(draws):
        wide(**x).loss.backward()
    expected = {key: p.grad for key, p in wide.named_parameters() if p.grad is not None}
    assert run.grads.keys() == expected.keys()
    norm = sum(grad.norm() for grad in expected.values())
    for key, grad in expected.items():
        assert (run.grads[key] - grad).norm() < 1e-5 * grad.norm() + 1e-9 * norm, key
