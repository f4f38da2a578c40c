import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from gradiometer.checks import check_model

torch.set_num_threads(1)
VALUES = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
WIDTH = 8


def result(model, batch=VALUES, name="parameter_gradients", **options):
    torch.manual_seed(0)
    return check_model(model, batch, only=[name], **options)[name]


class Blocks(nn.Module):
    """Residual layers, each with a norm and a linear branch."""

    def __init__(self, count=3):
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.start(x)
        for i in range(len(self.layers)):
            x = x + self.branch(i, x)
        return self.head(self.norm(x))

    def branch(self, i, x):
        return self.layers[i](self.norms[i](x))


class Detached(Blocks):
    def branch(self, i, x):
        return super().branch(i, x).detach() if i == 1 else super().branch(i, x)


class Skipped(Blocks):
    def branch(self, i, x):
        return 0 * x if i == 1 else super().branch(i, x)


class NotCalled(Blocks):
    def branch(self, i, x):
        return torch.zeros_like(x) if i == 2 else super().branch(i, x)


class NoNorm(Blocks):
    def forward(self, x):
        for i in range(len(self.layers)):
            x = x + self.branch(i, x)
        return self.head(self.start(x))


class Rounded(Blocks):
    def forward(self, x):
        # what comes before it is used otherwise, too
        return super().forward(x) + super().forward(self.start(x).round())


class NoGraph(Blocks):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Reentrant(Blocks):
    def branch(self, i, x):
        part = super().branch
        return checkpoint.checkpoint(lambda y: part(i, y), x, use_reentrant=True)


class FrozenReentrant(Reentrant):
    def __init__(self):
        super().__init__()
        self.start.requires_grad_(False)


class Factors(nn.Module):
    """An update of low rank to a frozen layer; ``first`` and ``second`` tell which factor starts at 0."""

    def __init__(self, *, first, second):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        for factor, is_zero in ((self.a, first), (self.b, second)):
            if is_zero:
                nn.init.zeros_(factor.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Modulated(nn.Module):
    """Branches with shift, scale and gate that start at 0, and a last layer that does too, as in DiT."""

    def __init__(self):
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.parts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("shift", "scale", "gate", "body")})
            for _ in range(2)
        )
        zeros = [part[name] for part in self.parts for name in ("shift", "scale", "gate")]
        for layer in [*zeros, self.head]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        time, x = x.sin(), self.start(x)
        for part in self.parts:
            inner = functional.layer_norm(x, (WIDTH,)) * (1 + part["scale"](time)) + part["shift"](time)
            x = x + part["gate"](time) * part["body"](inner)
        return self.head(x)


class Experts(nn.Module):
    def __init__(self, count=12, *, detached=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.detached = detached

    def forward(self, x):
        share, chosen = self.router(x).softmax(1).max(1)
        rows = [self.experts[i](y) for i, y in zip(chosen.tolist(), x, strict=True)]
        y = torch.stack(rows)
        return x + share[:, None] * (y.detach() if self.detached else y)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head, self.second = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.body(x))


HEALTHY = {
    "blocks": Blocks,
    "reentrant": Reentrant,
    "rounded": Rounded,
    "modulated": Modulated,
    "experts": Experts,
    "second factor 0": lambda: Factors(first=False, second=True),
    "first factor 0": lambda: Factors(first=True, second=False),
    "bfloat16": lambda: Blocks().to(torch.bfloat16),
    "float16": lambda: Blocks().to(torch.float16),
    "norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.9)),
}
BROKEN = {
    "detached": (Detached, "2 parameters of layers.1: no gradient, though the loss depends on them"),
    "skipped": (Skipped, "2 parameters of layers.1: no gradient, and the loss does not depend on them"),
    "not called": (NotCalled, "2 parameters of norms.2: no gradient, and the loss does not depend on them"),
    "no norm": (NoNorm, "2 parameters of norm: no gradient, and the loss does not depend on them"),
    "no graph": (NoGraph, "all 18 trainable parameters: no gradient, though the loss depends on them"),
    "frozen": (FrozenReentrant, "6 parameters of norms: no gradient, though the loss depends on them"),
    "zeros": (
        lambda: Factors(first=True, second=True),
        "a.weight, b.weight start at 0, and the gradients are 0 too",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_it_holds_for_healthy_models(name):
    torch.manual_seed(0)
    assert str(result(HEALTHY[name]().train()).status) == "holds"


@pytest.mark.parametrize("name", BROKEN)
def test_it_names_what_gets_no_gradient(name):
    torch.manual_seed(0)
    model, text = BROKEN[name]
    found = result(model())
    assert found.is_failure
    assert any(text in each.text for each in found.evidence)


class Attention(nn.Module):
    """Layers of attention with a fused QKV."""

    def __init__(self, detach=""):
        super().__init__()
        self.table, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.detach = detach

    def forward(self, tokens):
        x = self.table(tokens)
        for part in self.parts:
            parts = part(x).chunk(3, -1)
            q, k, v = (y.detach() if name in self.detach else y for name, y in zip("qkv", parts, strict=True))
            x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x)


TOKENS = torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(0))


def test_a_third_of_a_fused_matrix_that_gets_no_gradient():
    assert str(result(Attention(), TOKENS).status) == "holds"
    found = result(Attention(detach="k"), TOKENS)
    assert found.is_failure
    assert found.text == "outputs 8 to 15 of parts.0.weight: no gradient"


def test_attention_to_one_token_has_no_gradient():
    assert str(result(Attention(), TOKENS[:, :1]).status) == "holds"
    model = Attention()
    model.parts = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
    short = result(model, TOKENS[:, :1], forward=_separate)
    assert "too short" in short.text
    assert str(result(model, TOKENS, forward=_separate).status) == "holds"


def _separate(model, tokens):
    x = model.table(tokens)
    for part in model.parts:
        q, k, v = (layer(x) for layer in part)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return model.head(x)


def test_all_experts_of_a_layer_that_get_no_gradient_are_reported():
    found = result(Experts(detached=True))
    assert found.is_failure
    assert "experts: no gradient, though the loss depends on them" in found.text


def test_a_small_head_that_the_loss_does_not_use_is_only_noted():
    found = result(Headed())
    assert not found.is_failure
    assert found.evidence[0].name == "second.weight"


class Pooling(nn.Module):
    """Mixes the pixels of a picture by their mean over neighbors, as PoolFormer does."""

    def __init__(self):
        super().__init__()
        self.start, self.norm, self.pool = nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.AvgPool2d(3, 1, 1)
        self.pool.count_include_pad = False

    def forward(self, x):
        x = self.start(x)
        y = self.norm(x)
        return (x + self.pool(y) - y).mean((2, 3)).sin()


def test_layers_that_mix_positions_of_which_there_is_one_are_only_noted():
    generator = torch.Generator().manual_seed(0)
    assert str(result(Pooling(), torch.randn(4, 3, 5, 5, generator=generator)).status) == "holds"
    found = result(Pooling(), torch.randn(4, 3, 1, 1, generator=generator))
    assert found.evidence
    assert not found.is_failure


def test_an_optimizer_that_does_not_hold_what_is_unused_means_it():
    model = NoNorm()
    held = [p for name, p in model.named_parameters() if not name.startswith("norm.")]
    assert not result(model, optimizer=torch.optim.SGD(held, 0.1)).is_failure


def test_the_loss_of_the_caller_counts():
    model = Headed()
    found = result(
        model, (VALUES, VALUES[:, :2]), loss=lambda model, batch: (model.second(batch[0]) - batch[1]).sum()
    )
    assert found.is_failure
    assert found.text.startswith(("4 parameters of body", "2 parameters of head"))


def test_frozen_models_have_no_gradients():
    found = result(nn.Linear(WIDTH, 2).requires_grad_(False))
    assert (str(found.status), found.text) == ("does not apply", "no parameter is trainable")


def test_nothing_changes():
    model = Modulated()
    model.start.weight.grad = torch.ones(WIDTH, WIDTH)
    fired = []
    model.head.weight.register_post_accumulate_grad_hook(fired.append)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    random = torch.get_rng_state()
    check_model(model, VALUES, only=["gradients"])
    assert torch.equal(torch.get_rng_state(), random)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(model.start.weight.grad, torch.ones(WIDTH, WIDTH))
    assert model.head.weight.grad is None
    assert not fired
    assert checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"
