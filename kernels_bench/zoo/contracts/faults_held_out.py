"""The held-out faults of models. They are older than the contracts that they examine; do not change them."""

from __future__ import annotations

import copy
import math
from types import MethodType

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from kernels_bench.zoo.contracts.fault import adder
from kernels_bench.zoo.contracts.subjects import HEADS, WIDTH, WORDS, grouped

FAULTS = {}
fault = adder(FAULTS)

PER_HEAD = WIDTH // HEADS
PROJECTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))


def replace(module, forward):
    """Replace the forward of one module by ``forward(module, ...)``."""
    module.forward = MethodType(forward, module)


def use(s):
    """Give a subject a new optimizer of what is trainable now."""
    s.optimizer = torch.optim.AdamW(grouped(s.model), 1e-3)


def of_type(module, types):
    """Return a module's descendants of a type."""
    return [m for m in module.modules() if isinstance(m, types)]


def blocks(model):
    """Return the blocks of a model, the encoder's before the decoder's."""
    return of_type(model, GradientCheckpointingLayer)


def norms(model):
    """Return the norm layers of a model."""
    return [m for m in model.modules() if "Norm" in type(m).__name__]


def embeddings(model):
    """Return the embeddings of tokens."""
    return [m for m in of_type(model, nn.Embedding) if m.num_embeddings == WORDS]


def positions(model):
    """Return the table of learned positions of gpt2, bert or vit, or of whisper's decoder."""
    names = (
        "wpe.weight",
        "position_embeddings.weight",
        "position_embeddings",
        "decoder.embed_positions.weight",
    )
    return next(p for name, p in model.named_parameters() if name.endswith(names))


def encoder(model):
    """Return the encoder of t5 or whisper, or the encoder that vit is."""
    return model.vit if hasattr(model, "vit") else model.get_encoder()


def attentions(model):
    """Return the attention modules whose queries, keys and values have layers of their own."""
    return [m for m in model.modules() if any(hasattr(m, names[0]) for names in PROJECTIONS)]


def projections(attention):
    """Return the layers of queries, keys and values."""
    names = next(names for names in PROJECTIONS if hasattr(attention, names[0]))
    return [getattr(attention, name) for name in names]


def attend_by(model, attend):
    """Let bert or gpt2 compute ``attend(module, q, k, v, allowed)`` in plain torch."""

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, cache=None, **_):
        # newer versions of transformers call it cache
        cache = past_key_values if cache is None else cache
        fused = getattr(self, "c_attn", None)
        parts = fused(hidden_states).chunk(3, -1) if fused else [f(hidden_states) for f in projections(self)]
        q, k, v = (x.unflatten(-1, (HEADS, PER_HEAD)).transpose(1, 2) for x in parts)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if attention_mask is None:
            allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            allowed = allowed.tril(k.shape[2] - q.shape[2]) if self.is_causal else allowed
        else:
            allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        out = attend(self, q, k, v, allowed).transpose(1, 2).flatten(2)
        return (self.resid_dropout(self.c_proj(out)) if fused else out), None

    for module in model.modules():
        if type(module).__name__ in ("BertSelfAttention", "GPT2Attention"):
            replace(module, forward)


# --- behaviour ---


@fault("behaviour", "padding", where="gpt2 llama")
def attention_mask_not_passed_on(s):
    # only the causal mask is left, which does not hide padding at the left
    s.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
    )


@fault("behaviour", "causal", where="gpt2 llama whisper")
def causal_flag_lost(s):
    # nothing is padded, so that the kernel makes the mask
    if "attention_mask" in s.batch:
        s.batch["attention_mask"] = torch.ones_like(s.batch["attention_mask"])
    for module in s.model.modules():
        if getattr(module, "is_causal", False):
            module.is_causal = False


@fault("behaviour", "causal cache", where="gpt2 llama")
def convolution_padded_on_both_sides(s):
    # over the values of neighbors
    for block in blocks(s.model):
        layer = block.attn.c_attn if hasattr(block, "attn") else block.self_attn.v_proj
        width = layer.weight.shape[1 if hasattr(block, "attn") else 0]
        layer.convolution = nn.Conv1d(width, width, 3, padding=1, groups=width, bias=False)
        nn.init.normal_(layer.convolution.weight, std=0.2)
        layer.register_forward_hook(lambda layer, _, out: out + layer.convolution(out.mT).mT)
    use(s)


@fault("behaviour", "attention repeatable", where="bert gpt2")
def dropout_p_of_the_fused_kernel_in_evaluation(s):
    def attend(module, q, k, v, allowed):
        dropout = getattr(module, "attn_dropout", None) or module.dropout
        return functional.scaled_dot_product_attention(q, k, v, allowed, dropout_p=dropout.p)

    attend_by(s.model, attend)


@fault("behaviour", "dropout", where="gpt2 t5 whisper")
def dropout_after_the_residual_sum(s):
    def dropped(block, _, out):
        if isinstance(out, tuple):
            return functional.dropout(out[0], 0.1, block.training), *out[1:]
        return functional.dropout(out, 0.1, block.training)

    for block in blocks(s.model):
        block.register_forward_hook(dropped)


@fault("behaviour", "bidirectional configuration", where="bert")
def encoder_configured_as_a_decoder(s):
    # by the configuration of another model
    s.model.config.is_decoder = True
    for attention in attentions(s.model):
        attention.is_causal = True


@fault("behaviour", "examples", where="t5 whisper")
def encoder_states_of_another_row(s):
    # as by repeat() in place of repeat_interleave()
    def rolled(_, __, out):
        out.last_hidden_state = out.last_hidden_state.roll(1, 0)
        return out

    encoder(s.model).register_forward_hook(rolled)


@fault("behaviour", "bidirectional input_gradients", where="vit whisper")
def encoder_with_the_causal_flag(s):
    for attention in attentions(encoder(s.model)):
        attention.is_causal = True


@fault("behaviour", "attention causal padding", where="bert llama vit")
def heads_split_without_transposing(s):
    # view(batch, heads, tokens, width of a head)
    def split(_, __, out):
        rows, tokens, width = out.shape
        return out.reshape(rows, -1, tokens, PER_HEAD).transpose(1, 2).reshape(rows, tokens, width)

    for attention in attentions(s.model):
        for layer in projections(attention):
            layer.register_forward_hook(split)


@fault("behaviour", "examples", where="vit whisper")
def inputs_standardized_over_the_batch(s):
    def standardized(_, args):
        over = [dim for dim in range(args[0].dim()) if dim != 1]
        return (args[0] - args[0].mean(over, keepdim=True)) / args[0].std(over, keepdim=True)

    of_type(s.model, (nn.Conv1d, nn.Conv2d))[0].register_forward_pre_hook(standardized)


@fault("behaviour", "normalization causal padding", where="bert gpt2 vit")
def layer_norm_over_tokens_and_width(s):
    def forward(self, x):
        return functional.layer_norm(x, x.shape[1:], eps=self.eps) * self.weight + self.bias

    for norm in norms(s.model):
        replace(norm, forward)


@fault("behaviour", "repeatable", where="llama whisper")
def noise_of_neftune_in_evaluation(s):
    def noisy(_, __, out):
        return out + torch.empty_like(out).uniform_(-1, 1) * 5 / math.sqrt(out.shape[1] * out.shape[2])

    for embedding in embeddings(s.model):
        embedding.register_forward_hook(noisy)


@fault("behaviour", "padding", where="t5")
def padding_seen_by_cross_attention(s):
    for block in blocks(s.model.decoder):
        block.layer[1].register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
        )


@fault("behaviour", "cache", where="gpt2 llama t5")
def positions_from_0_with_a_cache(s):
    def from_0(_, args, kwargs):
        if "position_ids" in kwargs:
            ids = kwargs["position_ids"]
            return args, kwargs | {"position_ids": ids - ids[:, :1]}
        return (args[0] - args[0][:, :1],), kwargs

    def compute_bias(self, query_length, key_length, device=None, **_):
        return type(self).compute_bias(self, query_length, key_length, device)

    base = s.model.base_model
    if hasattr(s.model, "shared"):
        attention = s.model.decoder.block[0].layer[0].SelfAttention
        attention.compute_bias = MethodType(compute_bias, attention)
    else:
        embed = base.wpe if hasattr(base, "wpe") else base.rotary_emb
        embed.register_forward_pre_hook(from_0, with_kwargs=True)


@fault("behaviour", "normalization examples causal", where="llama t5")
def rms_of_the_whole_batch(s):
    # mean() without a dimension
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean() + self.variance_epsilon)

    for norm in norms(s.model):
        replace(norm, forward)


@fault("behaviour", "attention", where="gpt2 vit")
def scale_of_the_whole_width(s):
    for module in s.model.modules():
        if hasattr(module, "scaling"):
            module.scaling = WIDTH**-0.5


@fault("behaviour", "attention causal padding", where="bert gpt2")
def scores_multiplied_by_the_mask(s):
    # exp(0) is not 0
    def attend(module, q, k, v, allowed):
        weights = (q @ k.mT * module.scaling * allowed).softmax(-1)
        return functional.dropout(weights, 0.1, module.training) @ v

    attend_by(s.model, attend)


# --- gradients ---


@fault("gradients", "registered", where="bert vit")
def adapter_in_a_closure(s):
    adapter = nn.Linear(WIDTH, WIDTH)
    blocks(s.model)[-1].register_forward_hook(lambda _, __, out: out + adapter(out))


@fault("gradients", "registered parameter_gradients", where="gpt2 llama")
def closure_of_the_model_before_a_copy(s):
    # the copy computes its logits with the old head
    head = s.model.lm_head
    usual = head.forward
    head.forward = lambda x: usual(x) / 0.8
    s.model = copy.deepcopy(s.model)
    use(s)


@fault("gradients", "input_gradients parameter_gradients", where="llama t5 whisper")
def embedding_detached(s):
    for embedding in embeddings(s.model):
        embedding.register_forward_hook(lambda _, __, out: out.detach())


@fault("gradients", "parameter_gradients input_gradients", where="t5 vit whisper")
def encoder_under_no_grad(s):
    def forward(self, *args, **kwargs):
        with torch.no_grad():
            return type(self).forward(self, *args, **kwargs)

    replace(encoder(s.model), forward)


@fault("gradients", "parameter_gradients tied_weights", where="bert gpt2 llama")
def forward_bound_late_in_a_loop(s):
    # each block uses the feed-forward layers of the last one
    layers = [getattr(block, "mlp", None) or block.intermediate for block in blocks(s.model)]
    for layer in layers:
        layer.forward = layers[-1].forward


@fault("gradients", "optimizer", where="t5 whisper")
def frozen_after_the_optimizer(s):
    for block in blocks(encoder(s.model)):
        block.requires_grad_(requires_grad=False)


@fault("gradients", "optimizer", where="gpt2 llama t5 vit")
def groups_by_the_class_of_modules(s):
    # those of other classes and parameters without a layer are in no group
    decay = [m.weight for m in of_type(s.model, nn.Linear)]
    rest = [m.bias for m in of_type(s.model, nn.Linear) if m.bias is not None]
    for module in of_type(s.model, (nn.Embedding, nn.LayerNorm)):
        rest += [p for p in module.parameters() if all(p is not other for other in decay)]
    groups = [
        {"params": list(dict.fromkeys(decay)), "weight_decay": 0.01},
        {"params": list(dict.fromkeys(rest)), "weight_decay": 0.0},
    ]
    s.optimizer = torch.optim.AdamW(groups, 1e-3)


@fault("gradients", "tied_weights", where="gpt2 t5 whisper")
def head_untied_by_a_wrapper(s):
    # each parameter is replaced by another, as when it is sharded
    head = s.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    use(s)


@fault("gradients", "tied_weights", where="bert vit")
def layers_multiplied_in_a_list(s):
    layers = s.model.vit.layers if hasattr(s.model, "vit") else s.model.bert.encoder.layer
    layers[1] = layers[0]
    use(s)


@fault("gradients", "weight_decay", where="gpt2 vit whisper")
def norms_by_the_names_of_bert(s):
    names = ("bias", "LayerNorm.weight")
    parameters = [(name, p) for name, p in s.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in parameters if not name.endswith(names)], "weight_decay": 0.01},
        {"params": [p for name, p in parameters if name.endswith(names)], "weight_decay": 0.0},
    ]
    s.optimizer = torch.optim.AdamW(groups, 1e-3)


@fault("gradients", "optimizer", where="llama vit")
def optimizer_of_the_model_before_a_copy(s):
    s.model = copy.deepcopy(s.model)


# --- initialization ---


@fault("initialization", "first_loss", where="t5")
def decoder_outputs_not_scaled(s):
    # before a head that is tied to an embedding with a standard deviation of 1
    s.model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * WIDTH**0.5,))


@fault("initialization", "first_loss initial_spread", where="bert llama vit")
def head_drawn_with_std_1(s):
    head = s.model.classifier if hasattr(s.model, "vit") else s.model.get_output_embeddings()
    nn.init.normal_(head.weight)


@fault("initialization", "initial_spread", where="bert vit whisper")
def last_block_at_the_default_of_torch(s):
    # it was added after the others were initialized
    for layer in of_type(blocks(s.model)[-1], nn.Linear):
        nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))


@fault("initialization", "initial_scales", where="bert llama t5")
def norm_weights_drawn_as_matrices(s):
    for norm in norms(s.model):
        nn.init.normal_(norm.weight, std=0.02)


@fault("initialization", "repeated_weights", where="llama t5 whisper")
def one_head_tiled(s):
    for attention in attentions(s.model):
        for layer in projections(attention):
            layer.weight.data = layer.weight.detach()[:PER_HEAD].repeat(len(layer.weight) // PER_HEAD, 1)


@fault("initialization", "repeated_weights order", where="bert gpt2 vit")
def one_vector_for_every_position(s):
    table = positions(s.model)
    table.data[:] = table.data[..., :1, :].clone()


@fault("initialization", "initial_scales", where="gpt2 vit whisper")
def ones_for_every_vector(s):
    # also for biases
    for p in s.model.parameters():
        if p.dim() < 2:
            nn.init.ones_(p)


@fault("initialization", "repeated_weights", where="bert gpt2 vit")
def query_key_and_value_from_one_draw(s):
    for attention in attentions(s.model):
        query, *others = projections(attention)
        for layer in others:
            layer.weight.data = query.weight.detach().clone()
    for block in blocks(s.model):
        if hasattr(block, "attn"):
            weight = block.attn.c_attn.weight
            weight.data = weight.detach()[:, :WIDTH].repeat(1, 3)


@fault("initialization", "repeated_weights", where="gpt2 llama")
def rows_of_added_tokens_at_0(s):
    for weight in (s.model.get_input_embeddings().weight, s.model.get_output_embeddings().weight):
        weight.data[-8:] = 0


@fault("initialization", "order repeated_weights", where="whisper")
def sinusoids_left_at_0(s):
    nn.init.zeros_(s.model.model.encoder.embed_positions.weight)


# --- configuration ---


@fault("configuration", "dropout configuration", where="bert t5 whisper")
def dropout_turned_off_by_a_test(s):
    for module in s.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


@fault("configuration", "configuration", where="bert llama t5 vit")
def eps_of_keras(s):
    for norm in norms(s.model):
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 1e-3)


@fault("configuration", "modes", where="bert gpt2 t5")
def first_block_left_in_evaluation_mode(s):
    blocks(s.model)[0].eval()


@fault("configuration", "configuration attention", where="bert gpt2 vit")
def half_as_many_heads(s):
    for module in s.model.modules():
        if hasattr(module, "scaling"):
            size = "head_dim" if hasattr(module, "head_dim") else "attention_head_size"
            setattr(module, size, 2 * PER_HEAD)
            setattr(
                module, "num_heads" if hasattr(module, "num_heads") else "num_attention_heads", HEADS // 2
            )
            module.scaling = (2 * PER_HEAD) ** -0.5


@fault("configuration", "buffers order configuration", where="bert llama")
def non_persistent_buffers_at_0(s):
    # they are in no checkpoint, and were materialized from the meta device
    for module in s.model.modules():
        for name in module._non_persistent_buffers_set:
            getattr(module, name).copy_(torch.zeros_like(getattr(module, name)))


@fault("configuration", "configuration", where="bert gpt2 whisper")
def position_table_of_another_length(s):
    table = positions(s.model)
    module = next(m for m in of_type(s.model, nn.Embedding) if m.weight is table)
    module.weight = nn.Parameter(torch.randn(2 * len(table), WIDTH) * 0.02)
    module.num_embeddings *= 2
    use(s)


@fault("configuration", "configuration", where="bert vit whisper")
def relu_for_gelu(s):
    for module in list(s.model.modules()):
        for name, child in list(module.named_children()):
            if "GELU" in type(child).__name__:
                setattr(module, name, nn.ReLU())


@fault("configuration", "buffers", where="llama")
def rotary_frequencies_in_bfloat16(s):
    rotary = s.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


@fault("configuration", "configuration buffers", where="llama")
def rotary_frequencies_of_the_whole_width(s):
    # in place of a head's
    rotary = s.model.model.rotary_emb
    exponents = torch.arange(0, PER_HEAD, 2) / WIDTH
    rotary.inv_freq = 1 / s.model.config.rope_parameters["rope_theta"] ** exponents


@fault("configuration", "configuration", where="whisper")
def sinusoids_are_trained(s):
    s.model.model.encoder.embed_positions.requires_grad_()
    use(s)


@fault("configuration", "buffers", where="vit whisper")
def statistics_of_one_example(s):
    # the unbiased standard deviation over one example is nan
    first = of_type(s.model, (nn.Conv1d, nn.Conv2d))[0]
    first.register_buffer("std", torch.full((first.in_channels,), torch.nan))

    def standardized(layer, args):
        return args[0] / layer.std.view(1, -1, *[1] * (args[0].dim() - 2))

    first.register_forward_pre_hook(standardized)


@fault("configuration", "modes repeatable", where="bert gpt2 whisper")
def train_overridden(s):
    # eval() does not reach the last block
    block = blocks(s.model)[-1]
    block.train = MethodType(lambda self, mode=True: self, block)  # noqa: ARG005
