"""Contracts of initialization, and of the first loss."""

import math

import pytest
import torch
from torch import nn

from gradiometer.checks import check_model
from gradiometer.checks.first_loss import cross_entropies

WORDS, WIDTH, HEADS = 24, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, batch):
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def gpt(seed=0, **rest):
    torch.manual_seed(seed)
    return GPT(**rest)


def words(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, WORDS, (2, 4, 12), generator=generator))


def check(model, only="initialization", batch=None, loss=loss_of, **rest):
    return check_model(model, words() if batch is None else batch, loss=loss, only=[only], **rest)


def told(model, contract, **rest):
    """Return the texts of a contract's evidence that it is broken, joined."""
    report = check(model, contract, **rest)
    assert len(report.results) == 1
    result = report.results[0]
    return " | ".join(each.text for each in result.evidence) if result.is_failure else ""


@pytest.mark.parametrize("seed", range(2))
def test_a_new_model_holds_all(seed):
    report = check(gpt(seed))
    assert bool(report), str(report)
    assert {str(each.status) for each in report.results} == {"holds"}


def test_a_model_is_as_before():
    model = gpt()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    check(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# repeats


def rows(model):
    model.blocks[1].mlp[0].weight[5] = model.blocks[1].mlp[0].weight[2]


def columns(model):
    model.blocks[1].mlp[0].weight[:, 5] = model.blocks[1].mlp[0].weight[:, 2]


def zero_row(model):
    model.blocks[1].mlp[0].weight[5] = 0


def constant(model):
    model.blocks[1].mlp[0].weight.fill_(0.1)


def heads(model):
    weight = model.blocks[0].attention.qkv.weight
    weight[8:16] = weight[:8]


def heads_out(model):
    weight = model.blocks[0].attention.proj.weight
    weight[:, 24:] = weight[:, :8]


def thirds(model):
    weight = model.blocks[0].attention.qkv.weight
    weight[WIDTH : 2 * WIDTH] = weight[:WIDTH]


def zero_third(model):
    model.blocks[0].attention.qkv.weight[2 * WIDTH :] = 0


def positions(model):
    model.positions.weight[:] = model.positions.weight[0]


def tokens(model):
    model.tokens.weight[3] = model.tokens.weight[9]


def no_tokens(model):
    model.tokens.weight.zero_()


def one_of(model):
    model.blocks[2].mlp[2].weight.zero_()


def copied_matrix(model):
    model.blocks[1].mlp[2].weight.copy_(model.blocks[0].mlp[2].weight)


REPEATS = [
    (rows, "blocks.1.mlp.0.weight: row 5 equals row 2"),
    (columns, "blocks.1.mlp.0.weight: column 5 equals column 2"),
    (zero_row, "blocks.1.mlp.0.weight: row 5 is 0"),
    (constant, "blocks.1.mlp.0.weight: all 2,048 weights are equal, 0.1"),
    (heads, "blocks.0.attention.qkv.weight: head 1 has the rows of head 0"),
    (heads_out, "blocks.0.attention.proj.weight: head 3 has the columns of head 0"),
    (thirds, "the second third of its rows equals the first"),
    (zero_third, "the third third of its rows is 0"),
    (positions, "positions.weight: position 1 equals position 0, and 11 of 12"),
    (tokens, "tokens.weight: vector 9 equals vector 3"),
    (no_tokens, "tokens.weight: all vectors are 0"),
    (one_of, "blocks.2.mlp.2.weight: all weights are 0, and those of other layers are not"),
    (copied_matrix, "blocks.1.mlp.2.weight equals blocks.0.mlp.2.weight"),
]


@pytest.mark.parametrize(("plant", "text"), REPEATS, ids=[plant.__name__ for plant, _ in REPEATS])
def test_repeats_are_told(plant, text):
    model = gpt()
    with torch.no_grad():
        plant(model)
    assert text in told(model, "repeated_weights")


def test_equal_queries_and_keys_are_told():
    class Separate(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.query(x) * self.key(x) * self.value(x)

    model = Separate()
    batch = torch.randn(3, 8)
    assert told(model, "repeated_weights", batch=batch, loss=None) == ""
    model.key.weight.data.copy_(model.query.weight)
    assert "key.weight equals query.weight" in told(model, "repeated_weights", batch=batch, loss=None)


def test_what_is_meant_is_at_most_noted():
    model = gpt()
    model.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp[2].weight.zero_()
    report = check(model, "repeated_weights")
    assert bool(report), str(report)
    model.pos_embed = nn.Parameter(torch.zeros(1, 12, WIDTH))
    report = check(model, "repeated_weights")
    assert bool(report)
    assert report["repeated_weights"].text == "pos_embed: all positions start at 0"
    model.positions.weight.data.zero_()
    assert "positions.weight: all positions start at 0" in told(model, "repeated_weights")
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    report = check(encoder, "repeated_weights", batch=torch.randn(2, 3, 8), loss=None)
    assert bool(report)
    assert "layers.1 starts as a copy of layers.0: 4 equal matrices" in report["repeated_weights"].text


@pytest.mark.parametrize("init", [nn.init.eye_, lambda x: nn.init.sparse_(x, 0.9)])
def test_sparse_weights_may_have_zero_rows(init):
    model = nn.Linear(16, 40)
    torch.manual_seed(0)
    init(model.weight)
    assert told(model, "repeated_weights", batch=torch.randn(3, 16), loss=None) == ""


def test_few_rounded_numbers_are_equal_by_chance():
    torch.manual_seed(0)
    model = nn.Linear(2, 2000).bfloat16()
    assert len(model.weight.unique(dim=0)) < 2000
    batch = torch.randn(3, 2, dtype=torch.bfloat16)
    assert told(model, "repeated_weights", batch=batch, loss=None) == ""


def test_without_matrices_nothing_applies():
    model = nn.LayerNorm(4)
    report = check(model, batch=torch.randn(3, 4), loss=None)
    assert str(report["repeated_weights"].status) == "does not apply"
    assert str(report["initial_spread"].status) == "does not apply"
    assert str(report["initial_scales"].status) == "holds"


# scales


def norm_zero(model):
    model.norm.weight.zero_()


def norms_zero(model):
    for block in model.blocks:
        block.norm2.weight.zero_()


def norm_noise(model):
    model.blocks[0].norm1.weight.normal_(0, 0.02)


def norm_large(model):
    model.norm.weight.fill_(3)


def norm_bias(model):
    model.norm.bias.normal_(0, 0.2)


def bias_large(model):
    for block in model.blocks:
        block.attention.proj.bias.normal_(0, 3)


def bias_of_one(model):
    model.blocks[2].mlp[2].bias.uniform_(-0.1, 0.1)


SCALES = [
    (norm_zero, "norm.weight starts with 0: the norm layer returns rms 0"),
    (norms_zero, "blocks.0.norm2.weight starts with 0"),
    (norm_noise, "blocks.0.norm1.weight starts with rms 0.02"),
    (norm_large, "norm.weight starts with 3: the norm layer returns rms 3 instead of 1"),
    (norm_bias, "norm.bias, the bias of a norm layer, starts with rms 0.2"),
    (bias_large, "blocks.0.attention.proj.bias starts with rms"),
    (bias_of_one, "blocks.2.mlp.2.bias starts with mean"),
]


@pytest.mark.parametrize(("plant", "text"), SCALES, ids=[plant.__name__ for plant, _ in SCALES])
def test_scales_are_told(plant, text):
    torch.manual_seed(1)
    model = gpt()
    with torch.no_grad():
        plant(model)
    assert text in told(model, "initial_scales")


class OnePlus(nn.Module):
    """Multiplies by 1 + weight."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


def test_a_norm_layer_is_judged_by_what_it_returns():
    model = gpt()
    model.norm = OnePlus(WIDTH)
    assert told(model, "initial_scales") == ""
    model.norm.weight.data.fill_(1)
    assert "norm.weight starts with 1: the norm layer returns rms 2" in told(model, "initial_scales")


class LayerScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x):
        return x * self.gamma


def test_scales_that_are_meant_are_left_out():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8), LayerScale(8)
    )
    nn.init.normal_(model[1].weight, 1.0, 0.02)
    assert told(model, "initial_scales", batch=torch.randn(4, 3, 8, 8), loss=None) == ""
    # a prior of classes
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    nn.init.constant_(model[2].bias, -4.6)
    assert told(model, "initial_scales", batch=torch.randn(4, 8), loss=None) == ""
    # forget gates
    lstm = nn.LSTM(8, 8, batch_first=True)
    lstm.bias_ih_l0.data.zero_()[8:16] = 1
    assert told(lstm, "initial_scales", batch=torch.randn(2, 3, 8), loss=None) == ""


def test_a_branch_may_start_at_0():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            return x + self.norm(self.conv(x))

    model = nn.Sequential(Residual(), Residual())
    assert told(model, "initial_scales", batch=torch.randn(2, 4, 5, 5), loss=None) == ""


# spreads


def ten_times(model):
    model.blocks[1].mlp[0].weight.mul_(10)


def three_times(model):
    model.blocks[1].mlp[0].weight.mul_(3)


def next_to_0(model):
    model.blocks[1].attention.proj.weight.mul_(1e-3)


def all_next_to_0(model):
    for block in model.blocks:
        for module in (block.attention.qkv, block.attention.proj, block.mlp[0], block.mlp[2]):
            module.weight.mul_(1e-3)


def all_one(model):
    for block in model.blocks:
        block.mlp[0].weight.normal_()


def embedding_large(model):
    model.tokens.weight.mul_(20)


def one_sided(model):
    for block in model.blocks:
        block.mlp[0].weight.uniform_(0, 0.3)


def signs(model):
    for block in model.blocks:
        block.mlp[0].weight.sign_().mul_(0.2)


def clipped(model):
    for block in model.blocks:
        block.mlp[0].weight.clamp_(-0.1, 0.1)


def fan_out(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 1 / math.sqrt(module.out_features))


def positions_large(model):
    model.positions.weight.mul_(100)
    model.tokens.weight.mul_(0.02)


def positions_small(model):
    model.positions.weight.mul_(1e-3)


SPREADS = [
    (ten_times, "blocks.1.mlp.0.weight: weights start with rms 1."),
    (three_times, "blocks.1.mlp.0.weight: weights start with rms 0.5"),
    (next_to_0, "blocks.1.attention.proj.weight: weights start with rms 0.000"),
    (all_next_to_0, "it is next to 0"),
    (all_one, "sqrt(fan); usual are 0.02 to 1.5"),
    (embedding_large, "tokens.weight: weights start with rms 2"),
    (one_sided, "blocks.0.mlp.0.weight: weights start with mean 0.1"),
    (signs, "blocks.0.mlp.0.weight: all elements are 0.2 or -0.2"),
    (clipped, "% of the elements are 0.1 or -0.1"),
    (fan_out, "/ sqrt(fan-out); others with"),
    (positions_large, "times as large as tokens.weight, to which it is added"),
    (positions_small, "positions.weight is 0.0"),
]


@pytest.mark.parametrize(("plant", "text"), SPREADS, ids=[plant.__name__ for plant, _ in SPREADS])
def test_spreads_are_told(plant, text):
    torch.manual_seed(1)
    model = gpt()
    with torch.no_grad():
        plant(model)
    assert text in told(model, "initial_spread")


def by_depth(model, layer):
    for module in (model.blocks[layer].attention.proj, model.blocks[layer].mlp[2]):
        module.weight.div_(math.sqrt(2 * (layer + 1)))


def test_usual_initializations_hold():
    schemes = [
        lambda x: nn.init.normal_(x, std=0.02),
        lambda x: nn.init.trunc_normal_(x, std=0.02),
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    ]
    for scheme in schemes:
        model = gpt(layers=6)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    scheme(module.weight)
            for layer in range(6):
                by_depth(model, layer)
        assert told(model, "initial_spread") == ""


def test_contracts_of_new_models_do_not_apply_to_pretrained_ones():
    model = gpt()
    with torch.no_grad():
        fan_out(model)
        norm_zero(model)
        rows(model)
    report = check(model, pretrained=True)
    for name in ("initial_scales", "initial_spread", "first_loss"):
        assert str(report[name].status) == "does not apply"
        assert "pretrained" in report[name].text
    assert report["repeated_weights"].is_failure


def test_a_trained_model_is_recognized():
    model, batch = gpt(layers=1), words()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5 * math.log(WORDS)
    report = check(model)
    assert bool(report), str(report)
    assert "pretrained" in report["initial_scales"].text


# first loss


def test_a_loss_that_is_too_high():
    model = gpt()
    model.head.weight.data.mul_(10)
    text = told(model, "first_loss")
    assert "uniform predictions give ln(24) = 3.18: the logits are too large" in text


def test_the_answer_is_in_the_input():
    def leak(model, batch):
        tokens, _ = batch
        logits = model(tokens) + 6 * nn.functional.one_hot(tokens, WORDS)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    text = told(gpt(), "first_loss", loss=leak)
    assert "the input contains the labels" in text


def test_a_margin_on_the_labels_is_meant():
    def margin(model, batch):
        tokens, labels = batch
        logits = model(tokens) - 12 * nn.functional.one_hot(labels, WORDS)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert told(gpt(), "first_loss", loss=margin) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x * math.nan, "the first loss is NaN"),
        (lambda x: x + math.inf, "the first loss is infinite"),
        (lambda x: x.detach(), "the loss has no graph"),
        (lambda x: x * 0, "the first loss is exactly 0"),
    ],
)
def test_losses_that_train_nothing(change, text):
    assert text in told(gpt(), "first_loss", loss=lambda model, batch: change(loss_of(model, batch)))


def test_other_losses_do_not_apply():
    model, batch = nn.Linear(4, 2), (torch.randn(3, 4), torch.randn(3, 2))
    report = check(
        model, "first_loss", batch, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    )
    assert str(report["first_loss"].status) == "does not apply"
    report = check(nn.Linear(4, 2), "first_loss", torch.randn(3, 4), None)
    assert str(report["first_loss"].status) == "does not apply"
    model.requires_grad_(requires_grad=False)
    report = check(model, "first_loss", batch, lambda model, batch: model(batch[0]).sum())
    assert "no parameter requires a gradient" in report["first_loss"].text


def test_cross_entropies_of_a_graph():
    logits = torch.zeros(2, 3, 4, 4, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4, 4))
    labels[0] = 255
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=255)
    (found,) = cross_entropies(loss)
    assert (found.classes, found.counted, found.summed) == (3, 16, False)
    assert found.loss == pytest.approx(math.log(3))
    two = loss + nn.functional.cross_entropy(logits[:, :2, 0, 0], torch.tensor([0, -100]), reduction="sum")
    assert sorted((x.classes, x.counted, x.summed) for x in cross_entropies(two)) == [
        (2, 1, True),
        (3, 16, False),
    ]
    assert cross_entropies(logits.sum()) == []


def test_a_loss_that_is_written_out_is_compared_with_the_logits():
    def written(model, batch):
        logp = model(batch[0]).log_softmax(-1)
        return -(logp * nn.functional.one_hot(batch[1], WORDS)).sum(-1).mean()

    model = gpt()
    model.head.weight.data.mul_(10)
    assert "ln(24)" in told(model, "first_loss", loss=written)


def test_bfloat16_and_frozen_models():
    model = gpt(layers=2).bfloat16()
    assert bool(check(model))
    model.requires_grad_(requires_grad=False)
    report = check(model)
    assert bool(report), str(report)


def test_hugging_face_models_from_a_config():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(4, 40, (3, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    report = check_model(model, batch, only=["initialization"])
    assert bool(report), str(report)
    assert {str(each.status) for each in report.results} == {"holds"}
    weight = model.transformer.h[0].attn.c_attn.weight.data
    weight[:, 32:64] = weight[:, :32]
    report = check_model(model, batch, only=["initialization"])
    assert "the second third of its columns equals the first" in report["repeated_weights"].text
    first, second = model.transformer.h
    second.load_state_dict(first.state_dict())
    report = check_model(model, batch, only=["repeated_weights"])
    assert "transformer.h.1 starts as a copy of transformer.h.0" in str(report["repeated_weights"].evidence)
    assert all(str(each.severity) == "warning" for each in report["repeated_weights"].evidence)
    model.config.name_or_path = "some/model"
    report = check_model(model, batch, only=["initialization"])
    assert "pretrained" in report["first_loss"].text


@pytest.mark.parametrize("function", [torch.softmax, torch.relu])
def test_a_loss_of_bounded_logits_is_told(function):
    model, x, y = nn.Linear(4, 5), torch.randn(8, 4), torch.randint(0, 5, (8,))

    def loss(model, batch):
        logits = model(batch[0])
        return nn.functional.cross_entropy(
            function(logits, -1) if function is torch.softmax else function(logits), y
        )

    found = check_model(model, (x, y), loss=loss, only=["first_loss"])["first_loss"]
    assert found.is_failure
    assert function.__name__.removeprefix("re") in found.text.lower()


def test_a_model_that_is_mostly_frozen_is_pretrained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 5))
    nn.init.normal_(model[1].bias)
    x = torch.randn(8, 8)
    assert check_model(model, x, only=["initial_scales"])["initial_scales"].is_failure
    model[0].requires_grad_(requires_grad=False)
    model[1].requires_grad_(requires_grad=False)
    found = check_model(model, x, only=["initial_scales"])["initial_scales"]
    assert found.status == "does not apply"
