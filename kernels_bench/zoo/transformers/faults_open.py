"""The open half of the faults, with which rules may be written."""

from __future__ import annotations

import functools

import torch
from torch import nn

from kernels_bench.zoo.models import LoRA
from kernels_bench.zoo.transformers.fault import (
    FUTURE,
    LEAK,
    OUTSIDE,
    PADDING,
    SUMS,
    adder,
    attentions,
    backward,
    blocks,
    norms,
    ordered,
    part,
    redraw,
    trained,
    use,
)

FAULTS = {}
fault = adder(FAULTS)

# --- architecture ---


@fault("architecture", r"blocks\.\d|branch|residual|\bdead\b", where="gpt vit bert")
def branch_scale_of_1e_6(t):
    for block in blocks(t):
        for layer in (block.attention.out, block.mlp.second):
            layer.register_forward_hook(lambda _, __, out: 1e-6 * out)


@fault("architecture", FUTURE, where="gpt llama")
def causal_mask_missing(t):
    for attention in attentions(t):
        attention.mask = lambda scores, _: scores


@fault("architecture", r"encoder", where="t5")
def cross_attention_to_itself(t):
    for block in t.model.decoder:
        usual = block.cross.forward
        block.cross.forward = lambda x, _, __, usual=usual: usual(x)


@fault("architecture", r"embed|initial", where="gpt-tied bert")
def embedding_std_of_1_with_a_tied_head(t):
    nn.init.normal_(t.model.embed.table.weight)


@fault("architecture", r"\bnorm\b.{0,40}(missing|unused|not used)|\bnorm\.|final norm", where="gpt llama t5")
def final_norm_missing(t):
    t.model.norm.forward = lambda x: x


@fault("architecture", r"(attention|cross)\.key\b", where="gpt vit t5")
def key_from_the_query_projection(t):
    for attention in attentions(t):

        def project(x, source, a=attention):
            return a.split(a.query(x)), a.split(a.query(source)), a.split(a.value(source))

        attention.project = project


@fault("architecture", r"lora|adapter", where="lora")
def lora_a_and_b_at_0(t):
    for module in t.model.modules():
        if isinstance(module, LoRA):
            nn.init.zeros_(module.lora_a)


@fault("architecture", rf"{FUTURE}|{PADDING}", where="gpt bert-long-padding llama")
def mask_added_as_1(t):
    for attention in attentions(t):
        attention.mask = lambda scores, mask: scores + mask.float()


@fault("architecture", r"norm[12]\b|layer ?norm|normali[sz]|dimension", where="gpt bert t5")
def norm_over_the_sequence(t):
    for module in norms(t):
        usual = module.forward

        def forward(x, module=module, usual=usual):
            if x.dim() < 3:
                return usual(x)
            centered = x - x.mean(1, keepdim=True)
            y = centered / (centered.square().mean(1, keepdim=True) + 1e-5).sqrt() * module.weight
            return y if getattr(module, "bias", None) is None else y + module.bias

        module.forward = forward


@fault("architecture", PADDING, where="bert-long-padding bert t5")
def padding_mask_inverted(t):
    for attention in attentions(t, cross=True):
        usual = attention.forward

        def forward(x, source=None, allowed=None, a=attention, usual=usual):
            if allowed is not None:
                # a row of padding only may attend to everything, as with a large negative number
                wrong = ~allowed | allowed.all(1, keepdim=True)
                a.mask = lambda scores, _: scores.masked_fill(~wrong[:, None, None], -1e9)
            return usual(x, source, allowed)

        attention.forward = forward


@fault("architecture", r"position|order of", where="gpt bert")
def position_of_the_batch_index(t):
    embed = t.model.embed
    embed.position = lambda x: x + embed.positions.weight[torch.arange(len(x)) % 20][:, None]


@fault("architecture", r"residual|skip connection|vanish", where="gpt vit llama")
def residual_overwritten(t):
    for block in blocks(t):
        block.residual = lambda x, norm, branch: branch(norm(x))


@fault("architecture", r"position|rotary|rotat", where="llama llama-bf16")
def rotary_of_queries_only(t):
    for attention in attentions(t):
        attention.position = lambda q, k, a=attention: (a.rotate(q), k)


SHARP = r"logit|scal(e|ing)|sqrt|entropy|saturat|one-hot|sharp|peaked|concentrat"


@fault("architecture", SHARP, where="vit t5 bert")
def scores_not_scaled(t):
    for attention in attentions(t):
        attention.scores = lambda q, k, a=attention: q @ a.repeated(k).mT


@fault("architecture", SUMS, where="gpt vit llama")
def softmax_over_heads(t):
    # a masked position is -inf in all heads
    for attention in attentions(t):
        attention.softmax = lambda scores: scores.clamp(min=-1e9).softmax(1)


@fault("architecture", rf"{SUMS}|entropy|uniform", where="gpt vit bert")
def softmax_twice(t):
    for attention in attentions(t):
        attention.softmax = lambda scores: scores.softmax(-1).softmax(-1)


@fault("architecture", r"(attention|cross)\.value\b", where="gpt vit bert")
def value_without_projection(t):
    for attention in attentions(t):

        def project(x, source, usual=attention.project, a=attention):
            q, k, _ = usual(x, source)
            return q, k, a.split(source)

        attention.project = project


# --- optimizer ---


@fault("optimizer", r"\beps\b|epsilon|updates?\b.{0,40}(small|low|tiny)", where="gpt vit t5", or_info=True)
def adam_eps_of_1(t):
    for group in t.optimizer.param_groups:
        group["eps"] = 1.0


@fault("optimizer", r"beta|moments?\b|exp_avg", where="gpt vit t5")
def betas_swapped(t):
    for group in t.optimizer.param_groups:
        group["betas"] = (0.999, 0.9)


@fault("optimizer", r"head|\bgroup|learning rate", where="gpt vit llama", or_info=True)
def head_group_at_rate_0(t):
    head = list(t.model.head.parameters())
    rest = [p for p in trained(t) if all(p is not other for other in head)]
    rate = t.optimizer.defaults["lr"]
    use(t, torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 0.0}], rate))


@fault("optimizer", r"moments?\b|exp_avg|optimizer'?s? state|reset|cleared", onset=10, where="gpt vit llama")
def moments_cleared_every_10_steps(t):
    # a new epoch of 10 steps clears the state
    def clear():
        if t.step and t.step % 10 == 0:
            t.optimizer.state.clear()

    t.before.append(clear)


@fault("optimizer", r"momentum|\bbeta", where="gpt-sgd vit")
def momentum_of_0_999(t):
    use(t, torch.optim.SGD(trained(t), 0.1, momentum=0.999))


@fault("optimizer", r"learning rate|updates?\b.{0,40}(large|high)", where="gpt vit t5")
def rate_of_sgd_with_adam(t):
    use(t, torch.optim.AdamW(trained(t), 0.1))


@fault("optimizer", OUTSIDE, where="gpt vit t5")
def two_optimizers_step(t):
    second = torch.optim.SGD(trained(t), 0.1)
    usual = t.update

    def update():
        usual()
        second.step()

    t.update = update


# --- loop ---


@fault("loop", r"clip", where="gpt-sgd gpt-fp16-sgd")
def clip_after_step(t):
    names = ("update", "clip_gradients", "clear", "advance_schedule")
    if t.scaler is not None:
        t.clip_gradients = lambda: nn.utils.clip_grad_norm_(t.model.parameters(), t.clip)
    ordered(t, functools.partial(backward, t), *(part(t, name) for name in names))


@fault("loop", r"clip", where="gpt-sgd gpt-fp16-sgd")
def clip_norm_of_1e_4(t):
    t.clip = 1e-4


@fault("loop", r"frozen|requires_grad|gradient", onset=50, where="gpt vit llama", or_info=True)
def frozen_by_evaluation(t):
    # an evaluation freezes the blocks, and does not undo it
    t.at(50, lambda: t.model.blocks.requires_grad_(requires_grad=False))


@fault("loop", r"learning rate|schedul|\blr\b", onset=90, where="gpt-resumed")
def resume_with_a_fresh_schedule(t):
    usual = t.load

    def load(state):
        fresh = t.scheduler.state_dict()
        rates = [group["lr"] for group in t.optimizer.param_groups]
        usual(state | {"scheduler": fresh})
        for group, lr in zip(t.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    t.load = load


@fault("loop", r"learning rate|schedul|\blr\b", where="gpt llama vit")
def schedule_never_stepped(t):
    # the warm-up begins at 0
    t.advance_schedule = lambda: None


@fault("loop", r"twice|step\(\)|same gradient", where="gpt vit llama")
def step_called_twice(t):
    usual = t.update

    def update():
        usual()
        usual()

    t.update = update


@fault("loop", r"zero_grad|no gradient|clear", where="gpt vit llama")
def zero_grad_before_step(t):
    names = ("clear", "clip_gradients", "update", "advance_schedule")
    ordered(t, functools.partial(backward, t), *(part(t, name) for name in names))


# --- precision ---


@fault("precision", r"mlp|underflow|\bdead\b|\b8.bit", where="gpt vit llama")
def activations_flushed_to_0(t):
    for block in blocks(t):
        block.mlp.second.register_forward_pre_hook(
            lambda _, args: ((args[0] * 1e-3).to(torch.float8_e4m3fn).float() * 1e3,)
        )


@fault("precision", rf"attention|softmax|{PADDING}", onset=40, where="bert-long-padding bert")
def fully_masked_row(t):
    def empty(batch):
        if t.step != 40:
            return batch
        allowed = batch["allowed"].clone()
        allowed[0] = False
        return batch | {"allowed": allowed}

    redraw(t, empty)


@fault("precision", r"underflow|loss scale|scaler|zero|\b0\b", where="gpt-fp16 gpt-fp16-sgd")
def loss_scale_too_small(t):
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-16, growth_interval=10**6)


@fault("precision", r"norm[12]\b|\.norm\b|overflow|float16|fp16|\bnorm\.", where="llama t5")
def rms_norm_squares_in_fp16(t):
    # the residual stream is large
    for module in norms(t):

        def forward(x, module=module):
            big = (4000 * x).half()
            return (big / (big * big).mean(-1, keepdim=True).sqrt()).float() * module.weight

        module.forward = forward


@fault("precision", r"scale|unscal|scaler", where="gpt-fp16-sgd")
def step_without_the_scaler(t):
    t.clip = None
    t.update = t.optimizer.step


# --- data ---


@fault("data", r"\bdata\b|batch|label|class|order|shuffl", where="vit vit-batch-norm")
def batches_sorted_by_class(t):
    draw = t.batch

    def sorted_batch():
        pool = [draw() for _ in range(12)]
        labels = torch.cat([batch["labels"] for batch in pool])
        chosen = (labels == (t.step // 5) % 10).nonzero().squeeze(1)[:24]
        return {name: torch.cat([batch[name] for batch in pool])[chosen] for name in pool[0]}

    t.batch = sorted_batch


@fault("data", r"batch|\bdata\b|every 10|period", onset=9, where="gpt vit t5")
def every_tenth_batch_corrupt(t):
    def corrupt(batch):
        if t.step % 10 != 9:
            return batch
        x = batch.get("images")
        if x is not None:
            return batch | {"images": 30 * torch.randn_like(x)}
        name = "source" if "source" in batch else "tokens"
        return batch | {name: torch.randint_like(batch[name], 3, 16), "labels": batch["labels"].flip(0)}

    redraw(t, corrupt)


@fault("data", r"inputs?\b|normali[sz]|images|patches|activation", where="vit")
def inputs_not_normalized(t):
    redraw(t, lambda batch: batch | {"images": 64 * batch["images"] + 128})


@fault("data", r"shift|label", where="gpt llama")
def labels_shifted_twice(t):
    def later(batch):
        labels = batch["labels"].roll(-1, 1)
        labels[:, -1] = -100
        return batch | {"labels": labels}

    redraw(t, later)


@fault("data", LEAK, where="bert bert-long-padding")
def masked_tokens_visible(t):
    # the labels are those of hidden tokens, but nothing is hidden
    def shown(batch):
        return batch | {"tokens": torch.where(batch["labels"] >= 0, batch["labels"], batch["tokens"])}

    redraw(t, shown)


@fault("data", PADDING, where="bert-long-padding bert t5")
def pad_id_of_another_tokenizer(t):
    # the mask is made with the id of a token that is used
    name = "source" if "t5" in type(t.model).__name__.lower() else "tokens"
    redraw(t, lambda batch: batch | {"allowed": batch[name] != 5})


@fault("data", rf"{LEAK}|same batch|repeat|memori[sz]|duplicat|\bdata\b", where="gpt vit bert")
def same_batch_every_step(t):
    batch = t.batch()
    t.batch = lambda: batch
