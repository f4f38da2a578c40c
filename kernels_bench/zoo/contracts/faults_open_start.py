"""The other open faults, of initialization and configuration."""

from __future__ import annotations

import torch
from torch import nn

from kernels_bench.zoo.contracts import parts
from kernels_bench.zoo.contracts.fault import adder
from kernels_bench.zoo.contracts.parts import attentions, of_class

FAULTS = {}
fault = adder(FAULTS)

# --- initialization ---


@fault("initialization", "repeated_weights", where="gpt2")
def thirds_of_a_fused_weight_are_equal(s):
    for attention in attentions(s):
        weight = attention.c_attn.weight.data
        weight.copy_(weight[:, :32].repeat(1, 3))


@fault("initialization", "repeated_weights", where="bert vit llama whisper")
def heads_start_equal(s):
    for attention in attentions(s):
        for names in (parts.FIRST, parts.KEY, parts.VALUE):
            weight = parts.child(attention, names).weight.data
            weight.copy_(weight[:8].repeat(len(weight) // 8, 1))


@fault("initialization", "repeated_weights", where="gpt2 vit llama")
def matrix_starts_constant(s):
    layer = parts.child(of_class(s, parts.FEED_FORWARD)[0], ("c_fc", "fc1", "up_proj"))
    nn.init.constant_(layer.weight, 0.02)


@fault("initialization", "repeated_weights order", where="bert gpt2 whisper")
def positions_start_at_0(s):
    parent = s.model.base_model
    parent = getattr(parent, "decoder", getattr(parent, "embeddings", parent))
    nn.init.zeros_(parts.child(parent, parts.POSITIONS).weight)


@fault("initialization", "initial_scales", where="llama t5 gpt2")
def norm_weights_at_0(s):
    # those of a norm that multiplies by 1 + weight
    for norm in of_class(s, parts.NORM):
        nn.init.zeros_(norm.weight)


@fault("initialization", "initial_scales", where="bert vit whisper")
def biases_drawn_like_weights(s):
    for module in of_class(s, "Linear"):
        if module.bias is not None:
            nn.init.normal_(module.bias)


@fault("initialization", "initial_spread first_loss", where="gpt2 bert llama")
def standard_deviation_of_1(s):
    for module in of_class(s, "Linear|Conv1D|Embedding"):
        nn.init.normal_(module.weight)


@fault("initialization", "initial_spread", where="gpt2 llama vit bert")
def one_block_drawn_ten_times_as_wide(s):
    for parameter in of_class(s, parts.BLOCK)[1].parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)


@fault("initialization", "first_loss initial_scales", where="vit bert")
def bias_of_one_class_is_large(s):
    parts.head(s).bias.data[3] = 10.0


@fault("initialization", "first_loss initial_spread", where="llama vit")
def logits_times_100(s):
    parts.head(s).weight.data.mul_(100)


# --- configuration ---


@fault("configuration", "configuration", where="bert vit llama t5")
def eps_of_norms_left_at_a_default(s):
    for norm in of_class(s, parts.NORM):
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 1e-5)


@fault("configuration", "configuration", where="gpt2 bert t5")
def dropout_of_one_block_is_the_kept_share(s):
    for module in of_class(s, parts.BLOCK)[1].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9


@fault("configuration", "configuration dropout", where="gpt2 bert t5")
def dropout_of_the_config_not_passed_on(s):
    for module in s.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


@fault("configuration", "configuration", where="llama t5 bert vit")
def another_activation(s):
    for module in s.model.modules():
        for name in ("act_fn", "act", "intermediate_act_fn", "activation_fn"):
            if hasattr(module, name):
                setattr(module, name, nn.Tanh())


@fault("configuration", "configuration", where="whisper")
def fixed_positions_are_trained(s):
    s.model.model.encoder.embed_positions.requires_grad_()
    parts.renew(s)


@fault("configuration", "configuration", where="gpt2 bert")
def more_positions_than_in_the_config(s):
    parent = s.model.base_model
    parent = getattr(parent, "embeddings", parent)
    table = parts.child(parent, parts.POSITIONS)
    table.weight = nn.Parameter(torch.cat([table.weight.detach()] * 2).normal_(std=0.02))
    table.num_embeddings = 48
    parts.renew(s)


@fault("configuration", "configuration buffers", where="llama")
def base_of_rotary_positions_is_another(s):
    rotary = s.model.model.rotary_emb
    rotary.inv_freq = 100.0 ** -(torch.arange(0, 8, 2) / 8)


@fault("configuration", "buffers", where="llama")
def rotary_frequencies_in_bf16(s):
    rotary = s.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


@fault("configuration", "buffers", where="llama")
def buffer_never_initialized(s):
    s.model.model.rotary_emb.inv_freq[1:3] = torch.tensor([torch.nan, 1e30])


@fault("configuration", "modes", where="bert gpt2 t5")
def part_left_in_evaluation_mode(s):
    for block in of_class(s, parts.BLOCK):
        block.eval()
