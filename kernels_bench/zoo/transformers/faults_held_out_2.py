"""The second held-out set of faults. It is older than the rules that it examines; do not change it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.models import LoRA
from kernels_bench.zoo.transformers.fault import (
    FUTURE,
    LEAK,
    OUTSIDE,
    STAYS,
    adder,
    attentions,
    blocks,
    norms,
    redraw,
    trained,
    use,
)
from kernels_bench.zoo.transformers.kinds import grouped

FAULTS = {}
fault = adder(FAULTS)

SMALL = r"updates?\b.{0,60}(small|low|tiny|fell|fall|drop)"
LARGE = r"updates?\b.{0,60}(large|high|big|jump)"
RATE = r"learning rate|schedul|\blr\b"
# a tensor that the optimizer does not have
LEFT_OUT = (
    r"not (updated|trained|optimized|in (the|an|any) optimizer)|(in no|no|missing from the) optimizer"
    r"|never (updated|change)|(not|n't) change|parameter groups?|registered|unchanged"
)
NO_GRADIENT = (
    r"no gradients?|gradients?\b.{0,60}(zero|\b0(?![.\d])|none|missing|stop)|detach|requires_grad|frozen"
)
BROKEN = r"(gradients?|\bgrads?)\b.{0,80}(\binf|nan|non-?finite)|(\binf|nan|non-?finite).{0,80}\bgrad"


def rescheduled(t, schedule):
    """Train by another schedule from the first step on."""
    t.schedule = schedule
    t.scheduler = t.scheduled(t.optimizer)


# --- architecture ---


@fault(
    "architecture",
    r"batch (dimension|axis)|batch_first|transpos"
    r"|(across|between|over|other) (the )?(batch|example|sample|sequence)",
    where="vit gpt llama",
)
def attention_over_the_batch(t):
    # batch_first is left out
    for attention in attentions(t):

        def forward(x, source=None, allowed=None, usual=attention.forward):
            return usual(x.transpose(0, 1), source, allowed).transpose(0, 1)

        attention.forward = forward


@fault(
    "architecture",
    r"initial|all.{0,20}(zero|\b0(?![.\d]))|\bdead\b|constant|blocks\.1.{0,80}(zero|\b0(?![.\d])|no )",
    where="gpt vit llama",
)
def block_left_empty_by_the_meta_device(t):
    # materialized, and never initialized
    for p in blocks(t)[-1].parameters():
        nn.init.zeros_(p)


@fault("architecture", LEFT_OUT, where="gpt vit bert")
def blocks_in_a_plain_list(t):
    # all but the first are in no ModuleList, so that the model does not have their parameters
    first, *rest = t.model.blocks
    t.model.blocks = nn.ModuleList([first])

    def through(_, args, x):
        for block in rest:
            x = block(x, *args[1:])
        return x

    first.register_forward_hook(through)
    use(t, torch.optim.AdamW(grouped(t.model), t.optimizer.defaults["lr"]))


@fault(
    "architecture",
    r"\bshared|sharing|same (module|layer|block|weight|parameter)|\btied|twice",
    where="gpt vit llama",
)
def blocks_multiplied_in_a_list(t):
    # [block] * 2
    for i in range(1, len(t.model.blocks)):
        t.model.blocks[i] = t.model.blocks[0]
    use(t, torch.optim.AdamW(grouped(t.model), t.optimizer.defaults["lr"]))


@fault(
    "architecture",
    rf"{FUTURE}|triang|\bmask|earlier|see (only|nothing)|itself",
    where="vit bert bert-long-padding",
)
def causal_mask_in_an_encoder(t):
    for attention in attentions(t):
        attention.mask = lambda scores, mask: scores.masked_fill(~mask.tril(), -torch.inf)


@fault("architecture", r"cross|encoder", where="t5")
def causal_mask_in_cross_attention(t):
    for block in t.model.decoder:
        block.cross.mask = lambda scores, mask: scores.masked_fill(~mask.tril(), -torch.inf)


@fault(
    "architecture",
    r"dropout|dropped|residual|skip connection",
    where="gpt-dropout vit-batch-norm bert-long-padding",
)
def dropout_of_the_residual_stream(t):
    for block in blocks(t):

        def residual(x, norm, branch, block=block):
            return block.dropout(x + branch(norm(x))) if block.pre else norm(block.dropout(x + branch(x)))

        block.residual = residual


@fault("architecture", rf"blocks\.0|{NO_GRADIENT}|unused|not used", where="gpt vit bert")
def first_block_discarded(t):
    # out = block(x) in the loop over blocks
    for block in blocks(t)[:-1]:
        block.register_forward_hook(lambda _, args, __: args[0])


@fault(
    "architecture", r"initial|saturat|one-hot|\bstd\b|standard deviation|entropy|logit", where="gpt vit t5"
)
def initial_std_of_1(t):
    for module in t.model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight)


@fault("architecture", r"\bhead\b|logit|\brelu\b|activation", where="gpt vit t5")
def logits_through_a_relu(t):
    t.model.head.register_forward_hook(lambda _, __, out: out.relu())


@fault("architecture", rf"logit|\bhead\b|transpos|dimension|reshape|{STAYS}", where="gpt vit bert")
def logits_viewed_for_transposed(t):
    t.criterion = lambda logits, labels: functional.cross_entropy(
        logits.reshape(logits.shape[1], -1).T, labels
    )


@fault("architecture", r"lora|adapter", where="lora")
def lora_b_drawn_at_random(t):
    for module in t.model.modules():
        if isinstance(module, LoRA):
            nn.init.normal_(module.lora_b)


@fault(
    "architecture", r"norm[12]\b|\.norm\b|\bnorms?\b|layer ?norm|rms ?norm|normali[sz]", where="llama t5 gpt"
)
def norm_weights_at_0(t):
    # those of a norm that multiplies by 1 + weight
    for norm in norms(t):
        nn.init.zeros_(norm.weight)


@fault("architecture", r"position|embed|initial", where="gpt bert t5")
def positions_drown_the_tokens(t):
    # the tokens are not multiplied by the root of the width
    nn.init.normal_(t.model.embed.positions.weight)
    nn.init.normal_(t.model.embed.table.weight, std=0.02)


@fault(
    "architecture",
    r"initial|pretrain|base\b|load|checkpoint|(first|start|begin).{0,40}loss|loss.{0,40}(start|begin|first)",
    where="lora lora-resumed",
)
def pretrained_matrices_transposed(t):
    # as those of Conv1D
    for attention in attentions(t):
        for layer in (attention.query, attention.key, attention.value, attention.out):
            weight = getattr(layer, "base", layer).weight
            weight.data = weight.data.mT.contiguous()


@fault("architecture", r"residual|skip connection|norm[12]\b|layer ?norm|rms ?norm", where="gpt vit llama")
def residual_of_the_normed(t):
    # x = norm(x) before x + branch(x)
    for block in blocks(t):

        def residual(x, norm, branch):
            x = norm(x)
            return x + branch(x)

        block.residual = residual


@fault("architecture", r"position|rotary|rotat", where="llama llama-bf16 llama-accumulation")
def rotary_conventions_mixed(t):
    # halves for the queries, neighbors for the keys
    def interleaved(attention, x):
        halves = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        return torch.stack(attention.rotate(halves).chunk(2, -1), -1).flatten(-2)

    for attention in attentions(t):
        attention.position = lambda q, k, a=attention: (a.rotate(q), interleaved(a, k))


@fault("architecture", NO_GRADIENT, where="gpt vit bert")
def stream_detached_between_blocks(t):
    blocks(t)[-1].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))


# --- optimizer ---


@fault("optimizer", rf"{LEFT_OUT}|accumulat|replaced", where="gpt-tied bert gpt")
def embedding_resized_after_the_optimizer(t):
    table, head = t.model.embed.table, t.model.head
    tied = head.weight is table.weight
    table.weight = nn.Parameter(table.weight.detach().clone())
    if tied:
        head.weight = table.weight


@fault(
    "optimizer",
    r"decay|\bL2\b|AdamW|weights?\b.{0,40}(shr[aiu]nk|fall|fell|declin|smaller|toward)",
    where="gpt vit bert",
)
def l2_in_adam(t):
    use(t, torch.optim.Adam(trained(t), t.optimizer.defaults["lr"], weight_decay=0.1))


@fault("optimizer", rf"{RATE}|{SMALL}", where="gpt vit bert", or_info=True)
def lambda_returns_the_rate(t):
    # where LambdaLR expects a factor
    usual, rate = t.schedule, t.optimizer.defaults["lr"]
    rescheduled(t, lambda step: rate * usual(step))


@fault("optimizer", r"\bbase\b|frozen|freez", where="lora lora-resumed")
def lora_base_not_frozen(t):
    t.model.requires_grad_()
    use(t, torch.optim.AdamW(t.model.parameters(), t.optimizer.defaults["lr"]))


@fault("optimizer", rf"{LEFT_OUT}|accumulat", where="gpt vit bert")
def matrices_in_no_group(t):
    # both groups are chosen by the names of those that do not decay
    vectors = [p for p in trained(t) if p.dim() < 2]
    use(t, torch.optim.AdamW(vectors, t.optimizer.defaults["lr"], weight_decay=0.0))


@fault("optimizer", rf"moments?\b|exp_avg|optimizer'?s? state|{LARGE}", onset=90, where="gpt-resumed")
def second_moments_lost_at_resuming(t):
    usual = t.load

    def load(state):
        usual(state)
        for moments in t.optimizer.state.values():
            moments["exp_avg_sq"].zero_()

    t.load = load


@fault("optimizer", rf"{LEFT_OUT}|accumulat|zero_grad|clear", onset=40, where="gpt vit bert")
def unfrozen_after_the_optimizer(t):
    t.model.blocks.requires_grad_(requires_grad=False)
    use(t, torch.optim.AdamW(trained(t), t.optimizer.defaults["lr"]))
    t.at(40, t.model.blocks.requires_grad_)


@fault("optimizer", rf"warm.?up|first (steps|updates)|{RATE}|{LARGE}", where="bert t5 bert-long-padding")
def warm_up_left_out(t):
    usual = t.schedule
    rescheduled(t, lambda step: usual(step + 20))


# --- loop ---


@fault(
    "loop",
    rf"accumulat|divid|clip|gradients?\b.{{0,60}}(large|high|big)|{RATE}|{LARGE}",
    where="vit-sgd gpt-sgd",
)
def accumulated_without_dividing(t):
    usual = t.backward
    t.accumulate = 8
    t.backward = lambda loss: usual(8 * loss)


@fault("loop", RATE, onset=50, where="gpt vit bert")
def cosine_past_its_end(t):
    # it rises again
    rescheduled(t, lambda step: min(1.0, (step + 1) / 10) * (1 + math.cos(math.pi * step / 50)) / 2)


@fault(
    "loop",
    r"\beval|evaluation mode|train(ing)?\(\)|training mode|dropout",
    onset=40,
    where="gpt-dropout vit-batch-norm bert-long-padding",
)
def evaluation_mode_left_on(t):
    t.at(40, t.model.eval)


@fault(
    "loop",
    rf"divid|gradients?\b.{{0,60}}(small|low|tiny|vanish)|{RATE}|{SMALL}",
    where="gpt-sgd gpt-fp16-sgd",
    or_info=True,
)
def mean_divided_by_the_tokens(t):
    # which the trainer does with a sum
    usual = t.backward
    count = t.batch()["labels"].numel()
    t.backward = lambda loss: usual(loss / count)


@fault("loop", RATE, where="gpt vit t5")
def plateau_of_the_largest_loss(t):
    # mode="max"
    rescheduled(t, lambda step: 1.0)  # noqa: ARG005
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, "max", factor=0.5, patience=2)
    usual, seen = t.note, []

    def note(loss):
        usual(loss)
        seen.append(float(loss.detach()))

    t.note, t.advance_schedule = note, lambda: plateau.step(seen[-1]) if t.step % 4 == 3 else None


@fault("loop", rf"{OUTSIDE}|checkpoint|restor|resum|initiali[sz]|\bhead\b", onset=90, where="gpt-resumed")
def resume_with_a_fresh_head(t):
    # strict=False
    usual = t.load

    def load(state):
        own = t.model.state_dict()
        usual(state | {"model": state["model"] | {"head.weight": own["head.weight"]}})

    t.load = load


@fault("loop", rf"{BROKEN}|zero_grad|accumulat|clear|divi(ded|sion)", onset=60, where="gpt llama t5")
def skipped_batch_leaves_its_gradients(t):
    # a batch whose loss is divided by a count of 0 is left out, but after its backward pass
    def train_step():
        loss = t.loss(t.batch()) / (t.step != 60)
        t.backward(loss)
        t.note(loss)
        if loss.isfinite():
            for name in ("clip_gradients", "update", "clear"):
                getattr(t, name)()
        t.advance_schedule()
        return loss

    t.train_step = train_step


@fault(
    "loop",
    r"micro.?batch|accumulat|step\(\)|same gradient|add(s|ed|ing)? up|more than once",
    where="gpt-accumulation llama-accumulation",
)
def step_after_every_micro_batch(t):
    usual, update = t.backward, t.update

    def backward(loss):
        usual(loss)
        t.clip_gradients()
        update()

    t.backward, t.update = backward, lambda: None


@fault("loop", r"micro.?batch|accumulat|zero_grad|clear", where="gpt-accumulation llama-accumulation")
def zero_grad_before_every_micro_batch(t):
    usual = t.backward

    def backward(loss):
        t.clear()
        usual(loss)

    t.backward = backward


# --- precision ---


@fault(
    "precision",
    r"overflow|float16|fp16|mlp.{0,80}(\binf|nan|non-?finite|large)|(\binf|nan|non-?finite).{0,80}mlp",
    where="t5 gpt llama",
)
def feed_forward_overflows_in_fp16(t):
    for block in blocks(t):

        def forward(x, layer=block.mlp.second):
            # the activations are large
            out = functional.linear((2.0**14 * x).half(), layer.weight.half())
            return out.float() / 2.0**14 + layer.bias

        block.mlp.second.forward = forward


@fault("precision", rf"{BROKEN}|clip|\bhead\b", onset=60, where="gpt llama t5")
def infinite_gradient_is_clipped(t):
    # by a norm that is inf
    usual = t.clip_gradients

    def clip_gradients():
        if t.step == 60:
            t.model.head.weight.grad[3, 0] = torch.inf
        usual()

    t.clip_gradients = clip_gradients


@fault(
    "precision", rf"{OUTSIDE}|stale|master|revert|undone|(not|n't) (stay|change|kept)", where="gpt vit llama"
)
def master_weights_copied_every_10_steps(t):
    masters = [p.detach().clone() for p in trained(t)]
    usual = t.update

    @torch.no_grad()
    def update():
        weights = trained(t)
        used = [p.clone() for p in weights]
        for p, master in zip(weights, masters, strict=True):
            p.copy_(master)
        usual()
        for p, master, old in zip(weights, masters, used, strict=True):
            master.copy_(p)
            if t.step % 10 != 9:
                p.copy_(old)

    t.update = update


@fault("precision", r"scale|scaler|overflow|skip", where="gpt-fp16 gpt-fp16-sgd")
def scale_doubled_every_step(t):
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)


@fault(
    "precision", rf"moments?\b|exp_avg|optimizer'?s? state|quanti|8.bit|round|{LARGE}", where="gpt vit llama"
)
def second_moments_in_8_bits(t):
    # evenly spaced, so that most are 0
    usual = t.update

    def update():
        usual()
        for state in t.optimizer.state.values():
            square = state["exp_avg_sq"]
            step = square.max().clamp(min=1e-30) / 255
            square.copy_((square / step).round() * step)

    t.update = update


@fault(
    "precision",
    r"softmax|overflow|float16|fp16|exp\b|attention.{0,80}(\binf|nan|non-?finite)",
    where="t5 llama gpt",
)
def softmax_without_the_maximum(t):
    # in fp16, where exp(12) is inf
    for attention in attentions(t):

        def softmax(scores):
            weights = scores.half().exp()
            return (weights / weights.sum(-1, keepdim=True)).float()

        attention.softmax = softmax


# --- data ---


@fault(
    "data",
    r"labels?\b|ignored|-100|\beos\b|end of|targets?\b|never (seen|trained|predicted)|\bhead\b.{0,60}row",
    where="t5 t5-dropout",
)
def end_of_text_ignored(t):
    # it is the padding as well
    redraw(t, lambda batch: batch | {"labels": batch["labels"].masked_fill(batch["labels"] == 2, -100)})


@fault("data", rf"labels?\b|noise|nois|\bdata\b|{STAYS}", where="vit gpt t5")
def half_of_the_labels_wrong(t):
    classes = t.model.head.out_features

    def noisy(batch):
        labels = batch["labels"]
        chosen = (torch.rand(labels.shape) < 0.5) & (labels >= 0)
        return batch | {"labels": torch.where(chosen, torch.randint(classes, labels.shape), labels)}

    redraw(t, noisy)


@fault("data", rf"{LEAK}|labels?\b|copies|copy|unmasked|visible", where="bert bert-long-padding")
def labels_of_visible_tokens(t):
    def visible(batch):
        shown = batch["allowed"] & (batch["labels"] < 0)
        return batch | {"labels": torch.where(shown, batch["tokens"], batch["labels"])}

    redraw(t, visible)


@fault("data", r"labels?\b|ignored|-100|targets?\b|loss mask", where="gpt llama t5")
def labels_ignored_after_the_third(t):
    # a collator takes the rest for the prompt
    def ignored(batch):
        labels = batch["labels"].clone()
        labels[:, 3:] = -100
        return batch | {"labels": labels}

    redraw(t, ignored)


@fault("data", r"class|label|imbalanc|\bdata\b", where="vit vit-batch-norm")
def nearly_all_of_one_class(t):
    draw = t.batch

    def batch():
        pool = [draw() for _ in range(16)]
        pool = {name: torch.cat([batch[name] for batch in pool]) for name in pool[0]}
        most = (pool["labels"] == 0).nonzero().squeeze(1)[:22]
        chosen = torch.cat([most, torch.arange(24 - len(most))])
        return {name: x[chosen] for name, x in pool.items()}

    t.batch = batch


@fault("data", r"position|length|truncat|short|never (used|seen|updated)|embed", where="gpt bert gpt-tied")
def texts_truncated(t):
    redraw(t, lambda batch: {name: x[:, :6] for name, x in batch.items()})


@fault(
    "data",
    r"same|repeat|memori[sz]|duplicat|\bdata\b|batch|period|every (4|four)|seed|overfit",
    where="gpt vit bert",
)
def workers_with_the_same_seed(t):
    # four draw the same batches
    draw, kept = t.batch, {}

    def batch():
        if t.step % 4 == 0 or not kept:
            kept.update(draw())
        return dict(kept)

    t.batch = batch


@fault(
    "data", rf"{LEAK}|same|repeat|constant|\bdata\b|batch|token|inputs?\b", onset=80, where="gpt llama vit"
)
def zeros_after_the_end_of_the_file(t):
    def ended(batch):
        return {name: torch.zeros_like(x) for name, x in batch.items()} if t.step >= 80 else batch

    redraw(t, ended)
