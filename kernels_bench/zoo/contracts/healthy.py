"""Healthy models of transformers: each is a function that returns a `Subject`."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from kernels_bench.zoo.contracts import subjects
from kernels_bench.zoo.contracts.subjects import IGNORED, MASK, PAD, WIDTH, WORDS, padded, subject, words

MODELS = dict(subjects.ARCHITECTURES)
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": PAD,
}
WIDE = SIZES | {"intermediate_size": 64, "max_position_embeddings": 24}


def healthy(make):
    """Add a model to the table, under the function's name."""
    MODELS[make.__name__.replace("_", "-")] = make
    return make


def build(auto, kind, **config):
    """Return a model from a config."""
    return auto.from_config(transformers.AutoConfig.for_model(kind, **config))


# --- texts ---


def text_batch():
    """Return texts of different lengths, of which the next token is predicted."""
    tokens, mask = padded(words())
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, IGNORED),
    }


def hidden_batch():
    """Return texts of different lengths, of which hidden tokens are predicted."""
    tokens, mask = padded(words())
    hidden = (torch.rand(tokens.shape) < 0.3) & mask.bool()
    hidden[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(hidden, MASK),
        "attention_mask": mask,
        "labels": tokens.masked_fill(~hidden, IGNORED),
    }


FEW = WIDE | {"num_key_value_heads": 2}
MAMBA = {"state_size": 4, "num_hidden_layers": 2, "vocab_size": WORDS, "hidden_size": WIDTH}
CAUSAL = {
    "mistral": FEW | {"sliding_window": 5},
    "qwen2": FEW,
    "qwen3": FEW | {"head_dim": 8},
    "gemma": FEW | {"head_dim": 8},
    "gemma2": FEW | {"head_dim": 8, "sliding_window": 5},
    "gemma3_text": FEW | {"head_dim": 8, "sliding_window": 5},
    "phi": WIDE,
    "opt": SIZES | {"ffn_dim": 64, "max_position_embeddings": 24, "word_embed_proj_dim": WIDTH},
    "bloom": SIZES,
    "gpt_neo": SIZES | {"max_position_embeddings": 24, "num_layers": 2, "num_heads": 4, "window_size": 5}
    | {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": WIDE,
    "gptj": SIZES | {"n_positions": 24, "rotary_dim": 4},
    "falcon": SIZES | {"alibi": False},
    "mixtral": FEW | {"num_local_experts": 4},
    "qwen3_moe": FEW | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "head_dim": 8},
    "mamba": MAMBA,
    "rwkv": {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2,
             "attention_hidden_size": WIDTH, "context_length": 24},
    "olmo2": FEW,
    "stablelm": FEW,
    "gpt_bigcode": SIZES | {"n_positions": 24},
    "codegen": SIZES | {"n_positions": 24, "rotary_dim": 4},
    "starcoder2": FEW,
    "cohere": FEW,
    "granite": FEW,
}  # fmt: skip
MASKED = {
    "roberta": WIDE | {"max_position_embeddings": 40},
    "distilbert": {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
                   "max_position_embeddings": 24},
    "albert": WIDE | {"embedding_size": 16},
    "electra": WIDE | {"embedding_size": 16},
    "deberta-v2": WIDE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "modernbert": WIDE | {"local_attention": 6, "cls_token_id": 2, "sep_token_id": 3},
    "fnet": WIDE | {"tpu_short_seq_length": 12},
}  # fmt: skip


def language(auto, kind, config, batch):
    """Return a function that returns a subject of a language model."""

    def make():
        model = build(auto, kind, **config)
        arguments = batch()
        if kind in ("rwkv", "fnet"):
            # it has no mask
            arguments.pop("attention_mask")
        return subject(model, arguments)

    return make


for name, config in CAUSAL.items():
    MODELS[name] = language(transformers.AutoModelForCausalLM, name, config, text_batch)
for name, config in MASKED.items():
    MODELS[name] = language(transformers.AutoModelForMaskedLM, name, config, hidden_batch)


@healthy
def falcon_alibi():
    config = SIZES | {"alibi": True, "new_decoder_architecture": False, "multi_query": True}
    return subject(build(transformers.AutoModelForCausalLM, "falcon", **config), text_batch())


@healthy
def bert_classifier():
    model = build(transformers.AutoModelForSequenceClassification, "bert", **WIDE, num_labels=3)
    tokens, mask = padded(words())
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, 3, (3,))}
    return subject(model, batch)


@healthy
def gpt2_without_padding():
    made = subjects.ARCHITECTURES["gpt2"]()
    tokens = words()
    return subject(made.model, {"input_ids": tokens, "labels": tokens})


@healthy
def bart():
    config = {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2}
    config |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64}
    config |= {"decoder_ffn_dim": 64, "max_position_embeddings": 24, "pad_token_id": PAD, "bos_token_id": 2}
    config |= {"eos_token_id": 3, "decoder_start_token_id": 3, "forced_eos_token_id": None}
    tokens, mask = padded(words())
    labels = words(length=10)
    labels[1, 7:] = IGNORED
    model = build(transformers.AutoModelForSeq2SeqLM, "bart", **config)
    return subject(model, {"input_ids": tokens, "attention_mask": mask, "labels": labels})


# --- speech and pictures ---


@healthy
def wav2vec2():
    config = {k: v for k, v in WIDE.items() if k != "max_position_embeddings"}
    config |= {
        "conv_dim": [16, 16],
        "conv_stride": [4, 2],
        "conv_kernel": [8, 3],
        "num_conv_pos_embeddings": 8,
    }
    config |= {"num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2, "mask_time_prob": 0.0}
    config |= {"layerdrop": 0.0, "ctc_loss_reduction": "mean"}
    model = build(transformers.AutoModelForCTC, "wav2vec2", **config)
    return subject(model, {"input_values": torch.randn(3, 400), "labels": words(length=6)})


def picture_batch(side=32, classes=5, rows=4):
    """Return pictures and their classes."""
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, classes, (rows,))}


VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CLASSIFIERS = {
    "beit": VISION | {"image_size": 32, "patch_size": 8},
    "dinov2": VISION | {"image_size": 32, "patch_size": 8},
    "swin": {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
             "window_size": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.25},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
}  # fmt: skip


def classifier(kind, config):
    """Return a function that returns a subject of a classifier of pictures."""

    def make():
        model = build(transformers.AutoModelForImageClassification, kind, num_labels=5, **config)
        return subject(model, picture_batch())

    return make


for name, config in CLASSIFIERS.items():
    MODELS[name] = classifier(name, config)


@healthy
def deit():
    # of an AutoModel there would be two
    config = transformers.DeiTConfig(**VISION, image_size=32, patch_size=8, num_labels=5)
    return subject(transformers.DeiTForImageClassification(config), picture_batch())


@healthy
def segformer():
    config = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
    config |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    config |= {"decoder_hidden_size": 32, "num_labels": 4}
    model = build(transformers.AutoModelForSemanticSegmentation, "segformer", **config)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 4, (2, 32, 32))}
    return subject(model, batch)


@healthy
def clip():
    tower = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config=tower | {"vocab_size": WORDS, "max_position_embeddings": 24, "projection_dim": 16}
        | {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": PAD},
        vision_config=tower | {"image_size": 16, "patch_size": 4, "projection_dim": 16},
        projection_dim=16,
    )  # fmt: skip
    tokens, mask = padded(words())
    tokens[torch.arange(3), torch.tensor([11, 8, 6])] = 3
    batch = {"input_ids": tokens, "attention_mask": mask, "pixel_values": torch.randn(3, 3, 16, 16)}
    model = transformers.CLIPModel(config)
    return subject(model, batch, loss=lambda model, batch: model(**batch, return_loss=True).loss)


# --- trained in other ways ---


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, which starts at 0."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@healthy
def llama_lora():
    model = changed(subjects.ARCHITECTURES["llama"]().model).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return subject(model, text_batch())


def changed(model):
    """Return a model whose weights are not those of the start, and whose config has a path, as from a hub."""
    model.config._name_or_path = "pretrained"
    with torch.no_grad():
        for parameter in model.parameters():
            # rows of different sizes, and means that are not 0
            scale = torch.rand(len(parameter), *[1] * (parameter.dim() - 1)) + 0.5
            parameter.mul_(scale).add_(0.02 * torch.randn_like(parameter))
    return model


@healthy
def gpt2_pretrained():
    return subject(changed(subjects.ARCHITECTURES["gpt2"]().model), text_batch())


@healthy
def vit_frozen_backbone():
    made = subjects.ARCHITECTURES["vit"]()
    changed(made.model.vit).requires_grad_(requires_grad=False)
    return subject(made.model, made.batch)


@healthy
def bert_frozen_embeddings():
    made = subjects.ARCHITECTURES["bert"]()
    changed(made.model).bert.embeddings.requires_grad_(requires_grad=False)
    return subject(made.model, made.batch)


@healthy
def llama_bf16():
    made = subjects.ARCHITECTURES["llama"]()
    return subject(made.model.bfloat16(), made.batch)


@healthy
def llama_eager():
    made = subjects.ARCHITECTURES["llama"]()
    made.model.set_attn_implementation("eager")
    return made


@healthy
def gpt2_recomputed():
    made = subjects.ARCHITECTURES["gpt2"]()
    made.model.activation_checkpointing_enable()
    return made


@healthy
def t5_without_dropout():
    made = subjects.ARCHITECTURES["t5"]()
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    made.model.config.dropout_rate = 0.0
    return made
