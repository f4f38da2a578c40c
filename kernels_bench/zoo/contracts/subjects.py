"""Small models of six architectures of transformers, from a config, each with a batch and an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

ARCHITECTURES = {}
WORDS, WIDTH, HEADS, LAYERS = 40, 32, 4, 2
PAD, MASK, FIRST, IGNORED = 0, 1, 4, -100


@dataclass
class Subject:
    """What `gradiometer.check_model` is called with.

    Attributes:
        model: the model, in training mode.
        batch: its arguments, with labels.
        optimizer: an optimizer that holds what is trainable.
        options: other arguments of ``check_model``.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    optimizer: Optimizer
    options: dict[str, Any] = field(default_factory=dict)


def architecture(make):
    """Add an architecture to the table, under the function's name."""
    ARCHITECTURES[make.__name__] = make
    return make


def start(name, seed=0):
    """Return a new subject of an architecture; ``seed`` decides its weights and batch."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name]()


def grouped(model, decay=0.01):
    """Return two groups of parameters: matrices, which decay, and vectors, which do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def subject(model, batch, **options):
    """Return a subject in training mode, with AdamW."""
    model.train()
    return Subject(model, batch, torch.optim.AdamW(grouped(model), 1e-3), options)


def words(rows=3, length=12):
    """Return random tokens, ``(rows, length)``."""
    return torch.randint(FIRST, WORDS, (rows, length))


def padded(tokens, lengths=(12, 9, 7)):
    """Return tokens and an attention mask; those from a row's length on are padding."""
    mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    return tokens.masked_fill(~mask, PAD), mask.long()


@architecture
def bert():
    """A masked language model: an encoder with learned positions, and an output tied to the embedding."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    tokens, mask = padded(words())
    hidden = (torch.rand(tokens.shape) < 0.3) & mask.bool()
    hidden[:, 0] = True
    batch = {
        "input_ids": tokens.masked_fill(hidden, MASK),
        "attention_mask": mask,
        "labels": tokens.masked_fill(~hidden, IGNORED),
    }
    return subject(transformers.BertForMaskedLM(config), batch)


@architecture
def gpt2():
    """A causal language model with learned positions, a fused QKV and an output tied to the embedding."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=24,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=2,
        eos_token_id=3,
    )
    tokens, mask = padded(words())
    labels = tokens.masked_fill(mask == 0, IGNORED)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return subject(transformers.GPT2LMHeadModel(config), batch)


@architecture
def llama():
    """A causal language model with rotary positions, RMSNorm, a gated MLP and grouped queries."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=24,
    )
    tokens, mask = padded(words())
    labels = tokens.masked_fill(mask == 0, IGNORED)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return subject(transformers.LlamaForCausalLM(config), batch)


@architecture
def t5():
    """An encoder and a decoder with relative positions, whose three embeddings are tied."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
    )
    tokens, mask = padded(words())
    labels = words(length=10)
    labels[1, 7:] = IGNORED
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return subject(transformers.T5ForConditionalGeneration(config), batch)


@architecture
def vit():
    """A classifier of pictures, with learned positions and a class token."""
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=3,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        num_labels=5,
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}
    return subject(transformers.ViTForImageClassification(config), batch)


@architecture
def whisper():
    """Speech to text: convolutions and fixed positions before the encoder, learned ones in the decoder."""
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=24,
        dropout=0.1,
        decoder_start_token_id=2,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=PAD,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    labels = words(length=10)
    labels[1, 7:] = IGNORED
    batch = {"input_features": torch.randn(3, 8, 32), "labels": labels}
    return subject(transformers.WhisperForConditionalGeneration(config), batch)
