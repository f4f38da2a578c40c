"""Faults of attention weights and of residual connections: found where they are, and not in healthy runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.rules import AttentionEntropy, AttentionMask, Residual, Severity

HEADS, WIDTH, WORDS = 2, 32, 12
OURS = {"attention_mask", "attention_sum", "attention_entropy", "logit_scale", "residual"}


class Block(nn.Module):
    """A pre-norm block of a transformer, with one fault or none."""

    def __init__(self, name, fault):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.name, self.fault, self.sharpness = name, fault, 1.0

    def attend(self, x):
        q, k, v = [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)]
        logits = q @ k.mT * self.sharpness
        if self.fault != "scale":
            logits = logits * q.shape[-1] ** -0.5
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.fault != "leak":
            logits = logits.masked_fill(~allowed, -torch.inf)
        weights = logits.softmax(-2 if self.fault == "dimension" else -1)
        if self.fault == "dropout":
            weights = functional.dropout(weights, 0.2, training=self.training)
        mask = allowed if self.fault == "masked" else None
        if self.fault == "late":
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) * allowed
        if self.fault == "sink":
            weights = functional.pad(logits, (0, 1)).softmax(-1)[..., :-1]
        if self.fault == "masked":
            weights = (logits.nan_to_num(neginf=0.0)).softmax(-1)
        scale = None if self.sharpness == 1.0 else self.sharpness * q.shape[-1] ** -0.5
        gm.tap_attention(
            q, k, f"{self.name}.attn", weights=weights, scale=scale, mask=mask, is_causal=mask is None
        )
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        if self.fault == "residual":
            return self.mlp(self.norm2(self.attend(x)))
        x = x + self.attend(x)
        return x + self.mlp(self.norm2(x)) * (0.0 if self.fault == "half" else 1.0)


class Idle(Block):
    def forward(self, x):
        return x + 0.0 * self.attend(x)


class Tiny(nn.Module):
    def __init__(self, fault=None, block=Block):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        kinds = [Block, block, Block]
        self.blocks = nn.ModuleList(
            [kind(f"blocks.{i}", fault if i == 1 else None) for i, kind in enumerate(kinds)]
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def findings_of(model, steps=40, lr=3e-3, change=None, at=20):
    """Train to predict the token before the last one; return the findings of the rules here."""
    data = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    taps = gm.Taps(
        model,
        attention={f"blocks.{i}.attn": HEADS for i in range(3)},
        residual={"blocks": r"^blocks\.\d+$"},
    )
    with gm.Monitor(model, taps=taps) as monitor:
        for step in range(steps):
            if step == at and change is not None:
                change(model)
            tokens = torch.randint(WORDS, (8, 16), generator=data)
            loss = functional.cross_entropy(model(tokens)[:, 2:].flatten(0, 1), tokens[:, :-2].flatten())
            loss.backward()
            monitor.record()
            optimizer.step()
            optimizer.zero_grad()
            monitor.advance(loss=loss)
        monitor.flush()
        found = [f for f in monitor.findings if f.rule in OURS]
    taps.remove()
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_is_quiet(seed):
    torch.manual_seed(seed)
    assert findings_of(Tiny(), steps=150) == []


@pytest.mark.parametrize(
    ("fault", "rule", "text"),
    [
        ("leak", "attention_mask", "goes to keys after the query, since step 0"),
        ("masked", "attention_mask", "goes to keys that the mask excludes, since step 0"),
        ("late", "attention_sum", "exactly 1 where it may attend to all keys, since step 0: the mask is app"),
        ("dimension", "attention_sum", "since step 0: no softmax, or over the wrong dimension?"),
    ],
)
def test_a_fault_of_weights_names_call_and_head(fault, rule, text):
    torch.manual_seed(0)
    found = findings_of(Tiny(fault), steps=10)
    problems = [f for f in found if f.severity > Severity.INFO]
    assert {f.rule for f in problems} == {rule}
    assert {f.tensor for f in problems} == {"blocks.1.attn.head0", "blocks.1.attn.head1"}
    assert all(f.message.startswith(f.tensor) and f.first_step == 0 for f in problems)
    assert text in problems[0].message


def test_dropout_before_the_tap_is_info():
    torch.manual_seed(0)
    found = findings_of(Tiny("dropout"), steps=10)
    assert {(f.rule, f.severity) for f in found} == {("attention_sum", Severity.INFO)}
    assert "dropout?" in found[0].message
    assert "weights before it" in found[0].advice


def test_an_attention_sink_is_info():
    torch.manual_seed(0)
    found = findings_of(Tiny("sink"), steps=10)
    assert {(f.rule, f.severity) for f in found} == {("attention_sum", Severity.INFO)}


def test_a_missing_division_by_sqrt_d_is_found():
    torch.manual_seed(0)
    (found,) = [f for f in findings_of(Tiny("scale"), steps=20) if f.rule == "logit_scale"]
    assert (found.tensor, found.severity) == ("blocks.1.attn.head0", Severity.WARNING)
    assert "all 2 heads of this layer are q·k times 1, 4" in found.message
    assert "the division by sqrt(d) is missing" in found.message


def test_a_missing_residual_connection_is_found():
    torch.manual_seed(0)
    (found,) = [f for f in findings_of(Tiny("residual"), steps=40) if f.severity > Severity.INFO]
    assert (found.rule, found.tensor, found.kind) == ("residual", "blocks.1.residual", "residual")
    assert "its output does not contain its input" in found.message


def test_a_block_that_adds_nothing_is_found():
    torch.manual_seed(0)
    (found,) = findings_of(Tiny(block=Idle), steps=110)
    assert (found.rule, found.tensor, found.severity) == ("residual", "blocks.1.residual", Severity.WARNING)
    assert "it adds 0 of its input's norm to its input, for 1" in found.message


def test_an_entropy_collapse_is_found():
    torch.manual_seed(0)

    @torch.no_grad()
    def sharpen(model):
        model.blocks[1].qkv.weight[: 2 * WIDTH] *= 100.0
        model.head.weight *= 4.0

    found = [
        f for f in findings_of(Tiny(), steps=60, lr=1e-4, change=sharpen) if f.rule == "attention_entropy"
    ]
    assert [f.tensor for f in found] == ["blocks.1.attn.head0"]
    assert found[0].severity == Severity.WARNING
    assert "each query attends to one key, in all 2 heads of this layer, since step 2" in found[0].message


def test_a_layer_of_equal_weights_is_info():
    torch.manual_seed(0)
    model = Tiny()
    with torch.no_grad():
        model.blocks[1].qkv.weight[: 2 * WIDTH] = 0.0
        model.blocks[1].qkv.bias[: 2 * WIDTH] = 0.0
        # another layer has left them
        model.blocks[0].qkv.weight[: 2 * WIDTH] *= 4.0
    (found,) = [f for f in findings_of(model, steps=310, lr=1e-3) if f.rule == "attention_entropy"]
    assert (found.tensor, found.severity) == ("blocks.1.attn.head0", Severity.INFO)
    assert "equal weights of all keys" in found.message


@pytest.mark.parametrize("rule", [AttentionMask, AttentionEntropy, Residual])
def test_a_history_is_restored(rule):
    one, other = rule(), rule()
    one.restart(3)
    other.load_state_dict(one.state_dict())
    assert other.state_dict().keys() == one.state_dict().keys()
