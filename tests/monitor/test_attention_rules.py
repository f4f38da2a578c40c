"""Attention logits that grow, and routers that collapse: found where they do, and not in healthy runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.rules import CollapsingRouter, GrowingLogits, Severity


class Tiny(nn.Module):
    """One layer of attention and one of experts, each token to one expert."""

    def __init__(self, d=16, experts=4):
        super().__init__()
        self.embed, self.qkv, self.router = nn.Embedding(20, d), nn.Linear(d, 3 * d), nn.Linear(d, experts)
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(experts)])
        self.head = nn.Linear(d, 20)
        self.balance = torch.zeros(())

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        gm.tap_attention(q, k, "attn")
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        probs = self.router(x).softmax(-1)
        weight, selected = probs.max(-1)
        gm.tap_router(probs, "moe", selected=selected)
        chosen = functional.one_hot(selected, len(self.experts))
        self.balance = (chosen.float().mean((0, 1)) * probs.mean((0, 1))).sum() * len(self.experts)
        out = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head(x + weight[..., None] * (out * chosen[..., None, :]).sum(-1))


NAMES = ["attn.max_logit_bound", "moe.expert_load", "moe.router_entropy"]


def findings_of(model, change=lambda _: None, steps=60, balance=0.1, rules=None):
    """Train on the next token of a fixed pattern; return the findings of the two rules."""
    data = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    taps = gm.Taps(model, names=NAMES)
    with gm.Monitor(model, taps=taps, rules=rules) as monitor:
        for step in range(steps):
            if step == 20:
                change(model)
            tokens = torch.randint(20, (8, 12), generator=data)
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 7 + 3) % 20)
            (loss + balance * model.balance).backward()
            monitor.record()
            optimizer.step()
            optimizer.zero_grad()
            monitor.advance(loss=loss)
        monitor.flush()
        found = [f for f in monitor.findings if f.rule in {"growing_logits", "collapsing_router"}]
    taps.remove()
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_is_quiet(seed):
    torch.manual_seed(seed)
    assert findings_of(Tiny()) == []


@torch.no_grad()
def grow(model):
    model.qkv.weight[:32] *= 100.0


@torch.no_grad()
def collapse(model):
    model.router.bias[2] = 100.0


def test_growing_logits_are_found():
    torch.manual_seed(0)
    model = Tiny()
    with torch.no_grad():
        model.qkv.bias.zero_()
    found = [f for f in findings_of(model, grow) if f.severity > Severity.INFO]
    assert [(f.rule, f.tensor) for f in found] == [("growing_logits", "attn.max_logit_bound")]
    assert 20 <= found[0].first_step <= 31
    assert "attention logits may reach" in found[0].message
    assert "QK-norm" in found[0].advice


def test_a_collapsed_router_is_found():
    torch.manual_seed(0)
    # without the loss that balances it
    (found,) = findings_of(Tiny(), collapse, balance=0.0)
    assert (found.rule, found.tensor, found.kind) == ("collapsing_router", "moe.expert_load", "activations")
    assert "100.0% of the tokens go to one expert, 75% of the experts get none" in found.message
    assert "since step 20" in found.message


def test_a_certain_but_balanced_router_is_quiet():
    torch.manual_seed(0)
    model = Tiny()

    @torch.no_grad()
    def decide(model):
        model.router.weight *= 1000.0

    assert [f for f in findings_of(model, decide, steps=45) if f.rule == "collapsing_router"] == []


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="limit must be above 0, factor at least 1"):
        GrowingLogits(0.0)
    with pytest.raises(ValueError, match="limit must be at least 0 and below 1"):
        CollapsingRouter(1.0)
