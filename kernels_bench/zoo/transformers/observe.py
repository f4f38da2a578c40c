"""What the models of this family show of themselves: the only calls of gradiometer in their code."""

from __future__ import annotations

from torch import nn

import gradiometer as gm
from kernels_bench.zoo.transformers.attention import Attention


def observe_attention(name, q, k, weights, *, mask, is_causal):
    """Have an attention measured.

    Args:
        name: the module's name.
        q: queries, ``(batch, heads, queries, d)``.
        k: keys, ``(batch, heads or fewer, keys, d)``.
        weights: the probabilities after the softmax and before dropout, ``(batch, heads, queries, keys)``.
        mask: what the author means to be attended, True, broadcastable to the weights; None for everything.
        is_causal: whether the author means it to be causal, which the mask contains.
    """
    gm.tap_attention(q, k, name, weights=weights, mask=mask, is_causal=is_causal)


def taps_of(model):
    """Return the taps of a model: its ReLUs, attentions, which get their names here, and blocks."""
    attention = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.name, module.observe = name, observe_attention
            attention[name] = module.heads
    patterns = {"relu": nn.ReLU} if any(isinstance(module, nn.ReLU) for module in model.modules()) else None
    names = [f"{name}.max_logit_bound" for name in attention]
    residual = {"blocks": r"^(blocks|encoder|decoder)\.\d+$"}
    return gm.Taps(model, patterns, names=names, attention=attention, residual=residual)
