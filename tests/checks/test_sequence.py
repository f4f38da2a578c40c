"""Contracts of sequences: causal, bidirectional, padding, examples."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.small_models import Transformer, text


def result(model, batch, contract, **options):
    return gm.check_model(model, batch, only=[contract], **options)[contract]


def made(**rest):
    torch.manual_seed(1)
    return Transformer(**rest)


# causal


def test_causal_models_hold_and_others_do_not():
    assert result(made(causal=True), text(), "causal").status == "holds"
    found = result(made(causal=False), text(), "causal")
    assert found.status == "broken"
    assert found.evidence[0].value > found.evidence[0].threshold


def test_the_token_that_leaks_is_named():
    class Late(nn.Module):
        """Sees the input three positions ahead."""

        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(x + torch.cat([x[:, 3:], torch.zeros_like(x[:, :3])], 1))

    found = result(Late(), text(), "causal")
    assert found.text.startswith("token 3 changes the output of token 0 by")


def test_whether_a_model_is_causal():
    encoder = made()
    assert "not known to be causal" in result(encoder, {"tokens": text()["tokens"]}, "causal").text
    assert result(encoder, text(shifted=False), "causal").text == "the model is not causal"
    assert result(encoder, {"tokens": text()["tokens"]}, "causal", causal=True).status == "broken"


def test_shifted_labels_with_ignored_ones_are_those_of_a_causal_model():
    batch = text(padded=True)
    batch["labels"][:, ::3] = -100
    assert result(made(causal=False), batch, "causal").status == "broken"


def test_vectors_as_inputs():
    class Running(nn.Module):
        def __init__(self, *, reverse):
            super().__init__()
            self.rnn, self.reverse = nn.GRU(4, 4, batch_first=True), reverse

        def forward(self, x):
            return self.rnn(x.flip(1) if self.reverse else x)[0]

    x = torch.randn(2, 6, 4)
    assert result(Running(reverse=False), x, "causal", causal=True).status == "holds"
    assert result(Running(reverse=True), x, "causal", causal=True).status == "broken"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (torch.zeros(3, 8, dtype=torch.long), "all tokens in tokens are equal"),
        (torch.arange(3).view(3, 1), "no dimension that is the length"),
    ],
)
def test_causal_does_not_apply(batch, reason):
    found = result(made(causal=True), batch, "causal", causal=True)
    assert found.status == "does not apply"
    assert reason in found.text


# bidirectional


def test_encoders_see_both_sides():
    batch = text(padded=True, shifted=False)
    assert result(made(), batch, "bidirectional").status == "holds"
    found = result(made(causal=True), batch, "bidirectional")
    assert found.text == "the last token changes no output of earlier tokens"
    assert result(made(causal=True), text(), "bidirectional").status == "does not apply"


def test_a_decoder_sees_its_encoder():
    class Both(nn.Module):
        def __init__(self, *, sees):
            super().__init__()
            self.embedding, self.sees = nn.Embedding(13, 8), sees
            self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, source, tokens):
            memory, x = self.embedding(source), self.embedding(tokens)
            return x + self.cross(x, memory, memory)[0] if self.sees else x

    batch = text(length=6) | {"source": text(length=9)["tokens"]}
    batch = {"source": batch["source"], "tokens": batch["tokens"], "labels": batch["labels"]}
    assert result(Both(sees=True), batch, "bidirectional").status == "holds"
    assert "source" in result(Both(sees=False), batch, "bidirectional").text


# padding


def test_masked_tokens_change_nothing():
    batch = text(padded=True, shifted=False)
    assert result(made(), batch, "padding").status == "holds"
    found = result(made(masks=False), batch, "padding")
    assert found.status == "broken"
    assert "masked tokens of tokens change other outputs" in found.text


def test_a_mask_that_is_not_used_behind_a_causal_one():
    # in a causal model, padding at the end cannot change earlier outputs
    batch = text(padded=True)
    assert result(made(causal=True), batch, "padding").status == "holds"
    found = result(made(causal=True, masks=False), batch, "padding")
    assert found.text.startswith("the first 2 tokens, masked,")


def test_a_mask_of_ones_is_replaced():
    batch = text(shifted=False) | {"attention_mask": torch.ones(3, 8, dtype=torch.long)}
    assert result(made(), batch, "padding").status == "holds"
    assert result(made(masks=False), batch, "padding").status == "broken"


def test_a_mean_over_padded_tokens_is_told_by_more_of_them():
    class Mean(nn.Module):
        def __init__(self, *, masked):
            super().__init__()
            self.embedding, self.head, self.masked = nn.Embedding(13, 8), nn.Linear(8, 5), masked

        def forward(self, tokens, attention_mask):
            x = self.embedding(tokens) * attention_mask[..., None]
            return self.head(x.sum(1) / (attention_mask.sum(1, keepdim=True) if self.masked else x.shape[1]))

    batch = {name: x for name, x in text(padded=True).items() if name != "labels"}
    assert result(Mean(masked=True), batch, "padding").status == "holds"
    assert "2 more masked tokens" in result(Mean(masked=False), batch, "padding").text


def test_masks_that_are_true_where_a_token_is_left_out():
    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(13, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, tokens, key_padding_mask):
            x = self.embedding(tokens)
            return self.attention(x, x, x, key_padding_mask=key_padding_mask)[0]

    batch = text(padded=True)
    batch = {"tokens": batch["tokens"], "key_padding_mask": batch["attention_mask"] == 0}
    assert result(Torch(), batch, "padding").status == "holds"


def test_without_a_mask_it_does_not_apply():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(13, 8)

        def forward(self, tokens):
            return self.embedding(tokens)

    assert "no mask" in result(Plain(), text(), "padding").text


# examples


def test_examples_do_not_change_each_other():
    class Centered(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind, self.norm = nn.Linear(4, 4), kind, nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.linear(x)
            if self.kind == "batch norm":
                return self.norm(x)
            if self.kind == "in training" and not self.training:
                return x
            return x - x.mean(0)

    x = torch.randn(5, 4)
    assert result(nn.Linear(4, 4), x, "examples").status == "holds"
    assert result(Centered("batch norm"), x, "examples").status == "holds"
    assert result(Centered("always"), x, "examples").text.startswith("in evaluation mode")
    assert result(Centered("in training"), x, "examples").text.startswith("in training mode")
    assert result(nn.Linear(4, 4), x[:1], "examples").status == "does not apply"


def test_nodes_of_a_graph_are_no_examples():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x, edges):
            if edges.shape[0] == 2:
                return self.linear(x).index_add(0, edges[1], self.linear(x)[edges[0]])
            return edges @ self.linear(x)

    x = torch.randn(7, 5)
    for edges in (torch.randn(7, 7), torch.tensor([[0, 1, 2], [3, 4, 5]])):
        found = result(Graph(), (x, edges), "examples")
        assert found.status == "does not apply"


def test_attention_over_the_batch_is_told_behind_a_causal_mask():
    class Swapped(Transformer):
        def forward(self, tokens):
            return super().forward(tokens.mT).transpose(0, 1)

    found = result(Swapped(causal=True), text(), "examples")
    assert "change the output of example 2" in found.text


def test_a_causal_mask_in_cross_attention_is_told():
    class Both(nn.Module):
        def __init__(self, *, causal):
            super().__init__()
            self.embedding, self.causal = nn.Embedding(13, 8), causal
            self.encoder = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
            self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, source, tokens):
            memory, x = self.encoder(self.embedding(source))[0], self.embedding(tokens)
            mask = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool).tril().logical_not()
            return x + self.cross(x, memory, memory, attn_mask=mask if self.causal else None)[0]

    batch = {"source": text(length=9)["tokens"], **text(length=6)}
    assert result(Both(causal=False), batch, "bidirectional").status == "holds"
    found = result(Both(causal=True), batch, "bidirectional")
    assert found.text == "cross: the last output of the encoder does not change the first position"


def test_a_model_that_is_causal_only_with_padding():
    class Sometimes(Transformer):
        """Masks later positions where a mask of padding is made."""

        def forward(self, tokens, attention_mask=None):
            is_padded = attention_mask is not None and not bool(attention_mask.all())
            for block in self.blocks:
                block.attention.causal = is_padded
            return super().forward(tokens, attention_mask)

    torch.manual_seed(1)
    assert result(Sometimes(), text(padded=True), "causal", causal=True).status == "broken"
    assert result(made(causal=True), text(padded=True), "causal").status == "holds"
