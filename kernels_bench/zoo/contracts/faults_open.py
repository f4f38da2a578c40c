"""Open faults of behaviour and gradients: contracts may be written with them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.contracts import parts
from kernels_bench.zoo.contracts.fault import adder
from kernels_bench.zoo.contracts.parts import attentions, change_input, change_mask, change_output, of_class

FAULTS = {}
fault = adder(FAULTS)

# --- behaviour ---


@fault("behaviour", "causal", where="gpt2 llama")
def causal_mask_missing(s):
    for attention in attentions(s):
        change_mask(attention, lambda allowed: allowed[..., -1:, :].expand_as(allowed))


@fault("behaviour", "causal", where="gpt2 llama t5 whisper")
def causal_mask_one_too_late(s):
    for attention in attentions(s, cross=False):
        if attention.is_causal:
            change_mask(attention, lambda a: a | torch.cat([a[..., 1:, :], a[..., -1:, :]], -2))


@fault("behaviour", "causal", where="gpt2 llama")
def token_shift_in_the_wrong_direction(s):
    change_output(s.model.get_input_embeddings(), lambda x: x + 0.5 * functional.pad(x[:, 1:], (0, 0, 0, 1)))


@fault("behaviour", "bidirectional", where="bert t5 whisper")
def causal_mask_in_an_encoder(s):
    for attention in parts.encoders(s):
        change_mask(attention, torch.tril)


@fault("behaviour", "padding", where="bert t5")
def padding_is_attended(s):
    for attention in parts.encoders(s):
        change_mask(attention, torch.ones_like)


@fault("behaviour", "padding", where="bert t5")
def mask_of_0_and_1_is_added(s):
    # where 0 and -inf are meant
    for attention in parts.encoders(s):
        change_mask(attention, lambda allowed: allowed.float())


@fault("behaviour", "padding", where="t5")
def padding_is_attended_by_cross_attention(s):
    for attention in set(attentions(s)) - set(attentions(s, cross=False)):
        change_mask(attention, torch.ones_like)


@fault("behaviour", "examples", where="bert vit llama")
def batch_and_time_confused(s):
    for module in of_class(s, parts.FEED_FORWARD):
        change_output(module, lambda x: x.transpose(0, 1).reshape(x.shape))


@fault("behaviour", "normalization examples", where="bert gpt2 vit")
def norm_over_the_batch(s):
    for norm in of_class(s, parts.NORM):
        norm.forward = normed(norm, (0, 1))


@fault("behaviour", "normalization causal", where="gpt2 llama")
def norm_over_all_tokens(s):
    for norm in of_class(s, parts.NORM):
        norm.forward = normed(norm, (1, 2))


def normed(norm, dims):
    """Return the forward of a norm over other dimensions."""

    def forward(x):
        x = (x - x.mean(dims, keepdim=True)) * torch.rsqrt(x.var(dims, keepdim=True, correction=0) + 1e-5)
        bias = getattr(norm, "bias", None)
        return x * norm.weight + (0 if bias is None else bias)

    return forward


@fault("behaviour", "order", where="bert vit")
def positions_are_not_added(s):
    embeddings = s.model.base_model.embeddings
    if isinstance(embeddings.position_embeddings, nn.Module):
        change_output(embeddings.position_embeddings, torch.zeros_like)
    else:
        change_output(embeddings, lambda x: x - embeddings.position_embeddings)


@fault("behaviour", "order", where="t5")
def relative_positions_are_all_the_same(s):
    # the bucket of every distance is 0
    for attention in parts.encoders(s):
        attention._relative_position_bucket = lambda distance, **_: torch.zeros_like(distance)


@fault("behaviour", "repeatable", where="gpt2 bert vit whisper")
def dropout_without_the_mode(s):
    # the default of functional.dropout is training=True
    for module in attentions(s):
        change_output(module, lambda x: functional.dropout(x, 0.1))


@fault("behaviour", "repeatable", where="gpt2 llama")
def noise_of_embeddings_in_evaluation(s):
    # that of NEFTune
    change_output(s.model.get_input_embeddings(), lambda x: x + 0.01 * torch.randn_like(x))


@fault("behaviour", "repeatable", where="llama vit t5")
def state_kept_between_calls(s):
    kept = {}

    def change(x):
        before = kept.get("mean", 0.0)
        kept["mean"] = x.detach().mean((0, 1))
        return x + 0.5 * before

    change_output(of_class(s, parts.BLOCK)[0], change)


@fault("behaviour", "dropout", where="gpt2 vit whisper")
def dropout_of_the_residual_stream(s):
    for block in of_class(s, parts.BLOCK):
        change_output(block, lambda x, block=block: functional.dropout(x, 0.1, training=block.training))


@fault("behaviour", "cache", where="gpt2 llama")
def positions_start_again_after_the_cache(s):
    def hook(_, args, kwargs):
        tokens = args[0] if args else kwargs["input_ids"]
        return args, {**kwargs, "position_ids": torch.arange(tokens.shape[1])[None]}

    s.model.base_model.register_forward_pre_hook(hook, with_kwargs=True)


@fault("behaviour", "cache", where="gpt2 llama whisper")
def newest_key_in_the_cache_is_not_attended(s):
    # a mask that is one too short, only where there is a cache of earlier calls
    for attention in attentions(s, cross=False):
        if attention.is_causal:
            change_mask(attention, lambda a: a.roll(-1, -1) if a.shape[-1] > a.shape[-2] else a)


@fault("behaviour", "attention causal", where="gpt2 llama")
def mask_after_the_softmax(s):
    for attention in attentions(s):
        parts.attend(attention, lambda scores, allowed: scores.clamp(min=-100).softmax(-1) * allowed)


@fault("behaviour", "attention causal", where="bert vit whisper")
def softmax_over_the_queries(s):
    for attention in attentions(s):
        parts.attend(attention, lambda scores, allowed: fill(scores, allowed).softmax(-2))


def fill(scores, allowed):
    """Return the scores with a large negative number where nothing is allowed."""
    return scores.masked_fill(~allowed, -1e4)


@fault("behaviour", "attention repeatable", where="gpt2 vit llama")
def attention_drops_in_evaluation(s):
    for attention in attentions(s):
        parts.attend(attention, lambda scores, allowed: fill(scores, allowed).softmax(-1), dropout=0.2)


@fault("behaviour", "attention", where="bert vit llama gpt2")
def scale_left_out(s):
    for attention in attentions(s):
        attention.scaling = 1.0


@fault("behaviour", "attention causal", where="llama gpt2 vit t5 whisper")
def heads_merged_without_transposing(s):
    # by a view of (batch, heads, tokens, size); there are 4 heads everywhere
    for attention in attentions(s):
        out = parts.child(attention, parts.OUT)
        change_input(out, lambda x: x.unflatten(2, (4, -1)).transpose(1, 2).reshape(x.shape))


# --- gradients ---


@fault("gradients", "parameter_gradients input_gradients", where="gpt2 bert vit llama")
def stream_detached_between_blocks(s):
    change_input(of_class(s, parts.BLOCK)[1], torch.Tensor.detach)


@fault("gradients", "parameter_gradients input_gradients", where="t5 whisper")
def source_is_ignored(s):
    for attention in set(attentions(s)) - set(attentions(s, cross=False)):
        change_output(attention, torch.zeros_like)


@fault("gradients", "parameter_gradients", where="llama bert t5")
def keys_and_values_under_no_grad(s):
    for attention in attentions(s):
        for names in (parts.KEY, parts.VALUE):
            change_output(parts.child(attention, names), torch.Tensor.detach)


@fault("gradients", "parameter_gradients", where="llama vit gpt2")
def branch_is_never_called(s):
    for block in of_class(s, parts.BLOCK):
        block.adapter = nn.Linear(32, 32)
    parts.renew(s)


@fault("gradients", "input_gradients", where="vit whisper")
def half_of_the_inputs_lost(s):
    # the lower half of the pictures, or the last half of the speech
    def change(x):
        kept = torch.arange(x.shape[2]) < x.shape[2] // 2
        return x * kept.view(-1, *[1] * (x.dim() - 3))

    change_output(of_class(s, "Conv[12]d")[-1], change)


@fault("gradients", "input_gradients", where="vit whisper")
def inputs_rounded_to_integers(s):
    stem = of_class(s, "Conv[12]d")[0]
    change_input(stem, lambda x: (255 * x).round() / 255)


@fault("gradients", "tied_weights", where="bert gpt2 t5 whisper")
def output_copied_instead_of_tied(s):
    layer = parts.head(s)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    parts.renew(s)


@fault("gradients", "tied_weights", where="bert vit whisper")
def one_block_in_all_places(s):
    parent, name = parts.layers(s)
    setattr(parent, name, nn.ModuleList([getattr(parent, name)[0]] * 2))
    parts.renew(s)


@fault("gradients", "registered", where="bert vit gpt2")
def blocks_in_a_list(s):
    parent, name = parts.layers(s)
    blocks = list(getattr(parent, name))
    delattr(parent, name)
    setattr(parent, name, blocks)
    parts.renew(s)


@fault("gradients", "registered parameter_gradients", where="llama vit")
def head_of_another_model(s):
    weight = copy.deepcopy(parts.head(s).weight)
    parts.head(s).forward = lambda x: functional.linear(x, weight)


@fault("gradients", "optimizer", where="vit bert gpt2")
def layer_replaced_after_the_optimizer(s):
    (layer, *_) = of_class(s, "ViTMLP|BertIntermediate|GPT2MLP")
    for name, parameter in list(layer.named_parameters()):
        *path, last = name.split(".")
        setattr(layer.get_submodule(".".join(path)), last, nn.Parameter(parameter.detach().clone()))


@fault("gradients", "optimizer", where="llama t5")
def norms_in_no_group(s):
    s.optimizer = torch.optim.AdamW([p for p in s.model.parameters() if p.dim() > 1], 1e-3)


@fault("gradients", "optimizer", where="vit llama whisper")
def optimizer_of_another_model(s):
    # the model is copied after its optimizer is made
    s.model = copy.deepcopy(s.model)


@fault("gradients", "weight_decay", where="bert gpt2 vit llama")
def norms_and_biases_decay(s):
    s.optimizer = torch.optim.AdamW(s.model.parameters(), 1e-3, weight_decay=0.1)
