"""Where the parts of the six architectures are, and ways to change them. Only instances are changed."""

from __future__ import annotations

import functools
import re

import torch
from torch.overrides import TorchFunctionMode

from kernels_bench.zoo.contracts import subjects

ATTENTION = r"(BertSelf|GPT2|Llama|T5|ViT|Whisper)Attention"
BLOCK = r"(BertLayer|GPT2Block|LlamaDecoderLayer|T5Block|ViTLayer|Whisper(Encoder|Decoder)Layer)"
FEED_FORWARD = r"(BertOutput|GPT2MLP|LlamaMLP|T5LayerFF|ViTMLP)"
NORM = r".*(LayerNorm|RMSNorm)"
FIRST = ("query", "q_proj", "q", "c_attn")
KEY = ("key", "k_proj", "k")
VALUE = ("value", "v_proj", "v")
OUT = ("o_proj", "out_proj", "o", "c_proj")
POSITIONS = ("position_embeddings", "wpe", "embed_positions")
HEAD = ("classifier", "lm_head", "proj_out", "decoder")


def of_class(subject, pattern):
    """Return the modules whose class has a name that matches."""
    return [module for module in subject.model.modules() if re.fullmatch(pattern, type(module).__name__)]


def attentions(subject, *, cross=True):
    """Return all attentions, or those of tokens of one sequence to each other."""
    return [
        module
        for name, module in subject.model.named_modules()
        if re.fullmatch(ATTENTION, type(module).__name__)
        and (cross or not re.search("EncDec|encoder_attn", name))
    ]


def encoders(subject):
    """Return the attentions that see both sides."""
    return [module for module in attentions(subject, cross=False) if not module.is_causal]


def child(module, names):
    """Return the first child that has one of the names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def head(subject):
    """Return the last linear layer."""
    return child(getattr(getattr(subject.model, "cls", subject.model), "predictions", subject.model), HEAD)


def layers(subject):
    """Return the module that holds the blocks, and the name of their list; of an encoder if there is one."""
    model = subject.model.base_model
    for parent in (getattr(model, "encoder", model), model):
        for name in ("layer", "layers", "block", "h"):
            if hasattr(parent, name):
                return parent, name
    raise AttributeError(type(model).__name__)


def change_output(module, change):
    """Replace a module's first output by ``change`` of it."""

    def hook(_, __, out):
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    module.register_forward_hook(hook)


def change_input(module, change):
    """Replace a module's first input by ``change`` of it."""

    def hook(_, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def allowed_of(module, x, mask, cache):
    """Return what an attention may see, bool ``(batch or 1, 1, queries, keys)``."""
    queries, past = x.shape[1], 0
    if mask is None:
        if cache is not None and module.is_causal:
            past = cache.get_seq_length(module.layer_idx)
        allowed = torch.ones(1, 1, queries, queries + past, dtype=torch.bool)
        return allowed.tril(past) if module.is_causal else allowed
    allowed = mask if mask.dtype == torch.bool else mask > -1
    return allowed.expand(-1, -1, queries, -1)


def change_mask(module, change):
    """Replace what an attention may see by ``change`` of it; a float result is added to the scores."""

    def hook(_, args, kwargs):
        kwargs = dict(kwargs)
        key = "mask" if "mask" in kwargs else "attention_mask"
        if len(args) > 1:
            args, kwargs[key] = args[:1], args[1]
        x = args[0] if args else kwargs["hidden_states"]
        mask = change(allowed_of(module, x, kwargs.get(key), kwargs.get("past_key_values")))
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        return args, kwargs | {key: mask}

    module.register_forward_pre_hook(hook, with_kwargs=True)


class _Explicit(TorchFunctionMode):
    # replaces calls of fused attention by the steps of one that is written by hand
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self.attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def attend(module, softmax, dropout=None):
    """Have an attention take ``softmax(scores, allowed)`` for its weights, and drop a share of them.

    Args:
        module: the attention.
        softmax: returns the weights.
        dropout: the share that is dropped in both modes; the usual one by default.
    """

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, *, is_causal=False, scale=None, **_):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            allowed = allowed & attn_mask
        elif attn_mask is not None:
            scores, allowed = scores + attn_mask, allowed & (attn_mask > -1e9)
        weights = softmax(scores, allowed)
        return torch.nn.functional.dropout(weights, dropout_p if dropout is None else dropout) @ v

    usual = module.forward

    @functools.wraps(usual)
    def forward(*args, **kwargs):
        # also where the config asks for another implementation
        config, asked = module.config, module.config._attn_implementation
        config._attn_implementation = "sdpa"
        try:
            with _Explicit(attend):
                return usual(*args, **kwargs)
        finally:
            config._attn_implementation = asked

    module.forward = forward


def renew(subject):
    """Make the optimizer again, of all that is trainable now."""
    subject.optimizer = torch.optim.AdamW(subjects.grouped(subject.model), 1e-3)
