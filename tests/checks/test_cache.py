"""The contract of the KV cache, with a small model that has one, and its faults."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm


class Attention(nn.Module):
    """Causal attention with rotary positions, that appends keys and values to those of earlier calls."""

    def __init__(self, index, fault=None):
        super().__init__()
        self.qkv, self.index, self.fault = nn.Linear(8, 24), index, fault

    def forward(self, x, past, kept):
        q, k, v = self.qkv(x).chunk(3, 2)
        before = past[self.index][0].shape[1] if self.index < len(past) else 0
        first = 0 if self.fault == "positions" else before
        places = first + torch.arange(x.shape[1], dtype=x.dtype)
        q, k = rotated(q, places), rotated(k, places)
        if before and self.fault != "forgets":
            k, v = torch.cat([past[self.index][0], k], 1), torch.cat([past[self.index][1], v], 1)
        before = k.shape[1] - x.shape[1]
        mask = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        if self.fault == "chunk" and before and x.shape[1] > 1:
            mask = torch.ones_like(mask)
        mask = mask[None] & kept[:, None, -k.shape[1] :]
        if self.fault == "mask" and before:
            mask = torch.ones_like(mask)
        mask = mask | torch.eye(x.shape[1], k.shape[1], dtype=torch.bool).roll(before, 1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)


def rotated(x, places):
    angles = places[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Model(nn.Module):
    """A causal model with the interface of Hugging Face's."""

    def __init__(self, fault=None):
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.layers = nn.ModuleList(Attention(i, fault) for i in range(2))

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        x, past, new = self.embedding(input_ids), past_key_values or [], []
        length = input_ids.shape[1] + (past[0][0].shape[1] if past else 0)
        if self.fault == "raises" and past:
            raise RuntimeError("The size of tensor a must match the size of tensor b")
        if self.fault == "no chunks" and past and input_ids.shape[1] > 1:
            raise ValueError("one token at a time")
        kept = torch.ones(len(x), length) if attention_mask is None else attention_mask
        for layer in self.layers:
            y, entry = layer(x, past, kept.bool())
            x = x + y
            new.append(entry)
        x = self.head(x)
        if self.fault == "argument" and past:
            x = self.head(x, nothing=1)
        return {"logits": x, "past_key_values": new if use_cache and self.fault != "none" else None}


def tokens(length=9, rows=3):
    return torch.randint(1, 13, (rows, length), generator=torch.Generator().manual_seed(0))


def result(model, batch=None, **options):
    batch = {"input_ids": tokens()} if batch is None else batch
    return gm.check_model(model, batch, only=["cache"], **options)["cache"]


def padded(*, left=False):
    mask = torch.arange(9) < torch.tensor([9, 6, 7])[:, None]
    return {"input_ids": tokens(), "attention_mask": (mask.flip(1) if left else mask).long()}


@pytest.mark.parametrize("length", [3, 4, 9, 20])
def test_a_cache_that_changes_nothing(length):
    assert result(Model(), {"input_ids": tokens(length)}).status == "holds"
    assert result(Model(), tokens(length)).status == "holds"
    assert result(Model().to(torch.bfloat16), {"input_ids": tokens(length)}).status == "holds"


@pytest.mark.parametrize("left", [False, True])
def test_padded_tokens(left):
    assert result(Model(), padded(left=left)).status == "holds"
    found = result(Model("mask"), padded(left=left))
    assert found.is_failure


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("positions", "after 3 cached tokens, the output of token 3 differs by"),
        ("forgets", "after 3 cached tokens, the output of token 3 differs by"),
        ("chunk", "after 3 cached tokens in a chunk of 6, the output of token"),
        ("raises", "the model fails for token 3 after 3 cached ones: The size"),
    ],
)
def test_a_cache_that_is_broken(fault, text):
    found = result(Model(fault))
    assert found.is_failure
    assert found.text.startswith(text)


def test_a_model_that_takes_one_token_at_a_time():
    assert result(Model("no chunks")).status == "holds"


@pytest.mark.parametrize("fault", ["none", "argument"])
def test_another_interface(fault):
    assert result(Model(fault)).status == "does not apply"


def test_models_without_a_cache():
    assert "takes no cache" in result(nn.Linear(4, 2), torch.randn(3, 4)).text
    assert "not causal" in result(Model(), causal=False).text
    assert "fewer than three" in result(Model(), {"input_ids": tokens(2)}).text


def test_earlier_outputs_that_depend_on_later_tokens_are_another_contract():
    class Reversed(Model):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            out = super().forward(input_ids, None, past_key_values, use_cache)
            return out | {"logits": out["logits"] + out["logits"].mean(1, keepdim=True)}

    assert "even without a cache" in result(Reversed()).text


class Recurrent(nn.Module):
    """A model whose cache is a state; padded tokens would change it."""

    def __init__(self, *, forgets=False):
        super().__init__()
        torch.manual_seed(0)
        self.forgets = forgets
        self.embedding, self.cell, self.head = (
            nn.Embedding(13, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 13),
        )

    def forward(self, input_ids, attention_mask=None, state=None, use_cache=False):  # noqa: ARG002
        if state is not None and input_ids.shape[1] > 1:
            raise ValueError("one token at a time")
        y, state = self.cell(self.embedding(input_ids), None if self.forgets else state)
        return {"logits": self.head(y), "state": state}


def test_states():
    assert result(Recurrent()).status == "holds"
    assert result(Recurrent(), padded()).status == "holds"
    assert result(Recurrent(forgets=True), padded()).is_failure
    batch = {name: x[1:] for name, x in padded().items()}
    assert "each example has padded tokens" in result(Recurrent(), batch).text


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "decoder":
        settings = transformers.MistralConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=3,
        )
        model, batch = transformers.MistralForCausalLM(settings), padded()
        broken = model.model.layers[1].self_attn
    else:
        settings = transformers.T5Config(
            vocab_size=13, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        model, batch = transformers.T5ForConditionalGeneration(settings), padded() | {"labels": tokens(7)}
        broken = model.decoder.block[1].layer[0].SelfAttention
    assert result(model, batch).status == "holds"

    forward = broken.forward

    def without_cache(*args, **kwargs):
        return forward(
            *args, **{k: None if k in {"cache", "past_key_values"} else x for k, x in kwargs.items()}
        )

    broken.forward = without_cache
    assert result(model, batch).is_failure
