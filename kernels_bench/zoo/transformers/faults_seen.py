"""The first held-out half of the faults; its results have been seen, in November 2026, so it is open now."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.transformers.fault import (
    FUTURE,
    LEAK,
    OUTSIDE,
    PADDING,
    STAYS,
    SUMS,
    adder,
    attentions,
    backward,
    blocks,
    ordered,
    part,
    redraw,
    scaled_state,
    trained,
    use,
)

FAULTS = {}
fault = adder(FAULTS)

# --- architecture ---


@fault("architecture", FUTURE, where="gpt llama")
def causal_mask_inverted(t):
    # triu for tril
    for attention in attentions(t):
        attention.mask = lambda scores, mask: scores.masked_fill(~mask.mT, -torch.inf)


@fault("architecture", LEAK, where="gpt llama gpt-dropout")
def causal_mask_one_too_late(t):
    for attention in attentions(t):
        attention.mask = lambda scores, mask: scores.masked_fill(~torch.ones_like(mask).tril(1), -torch.inf)


@fault("architecture", r"dropout", where="gpt-dropout vit-batch-norm bert-long-padding")
def dropout_is_the_kept_share(t):
    for module in t.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9


@fault("architecture", r"mlp|feed-?forward|activation function|nonlinear", where="gpt vit bert")
def ffn_without_activation(t):
    for block in blocks(t):
        block.mlp.activation = nn.Identity()


@fault("architecture", rf"\bheads?\b|attention|{FUTURE}", where="gpt bert vit")
def heads_merged_without_transposing(t):
    for attention in attentions(t):

        def combine(weights, v, attention=attention):
            mixed = weights @ attention.repeated(v)
            return mixed.reshape(len(mixed), mixed.shape[2], -1)

        attention.combine = combine


@fault("architecture", r"(attention|cross)\.(key|value)\b", where="gpt t5 bert")
def keys_and_values_detached(t):
    # as from a cache that was filled under no_grad
    for attention in attentions(t):

        def project(x, source, usual=attention.project):
            q, k, v = usual(x, source)
            return q, k.detach(), v.detach()

        attention.project = project


@fault("architecture", r"lora|adapter", where="lora")
def lora_merged_away(t):
    # the layers of the attention are replaced by their bases; those of the feed-forward network are not
    for attention in attentions(t):
        for layer in (attention.query, attention.value):
            layer.forward = layer.base.forward


@fault("architecture", rf"{SUMS}|\bmask|normali[sz]", where="gpt llama bert-long-padding")
def mask_after_softmax(t):
    for attention in attentions(t):

        def mask(scores, allowed, attention=attention):
            attention.allowed = allowed
            return scores

        attention.mask = mask
        attention.softmax = lambda scores, attention=attention: scores.softmax(-1) * attention.allowed


NORMS = r"norm[12]\b|\.norm\b|layer ?norm|rms ?norm|normali[sz]|norm_cross"


@fault("architecture", NORMS, where="gpt t5 vit")
def norm_without_the_root(t):
    # divides by the variance
    for module in t.model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):

            def forward(x, module=module):
                x = x - x.mean(-1, keepdim=True)
                x = x / (x.square().mean(-1, keepdim=True) + 1e-5) * module.weight
                return x if getattr(module, "bias", None) is None else x + module.bias

            module.forward = forward


@fault("architecture", PADDING, where="bert-long-padding t5 bert")
def padding_mask_missing(t):
    for attention in attentions(t):
        attention.mask = lambda scores, mask, attention=attention: scores.masked_fill(
            ~torch.ones_like(mask).tril() if attention.causal else ~torch.ones_like(mask), -torch.inf
        )


@fault("architecture", r"position|rotary|order of", where="gpt llama vit t5")
def positions_missing(t):
    owner = t.model if hasattr(t.model, "position") else t.model.embed
    owner.position = lambda x: x
    for attention in attentions(t):
        attention.rotary = False


@fault("architecture", r"position|rotary|rotat", where="llama llama-bf16")
def rotary_by_head(t):
    # the dimension of the heads is taken for that of the positions
    for attention in attentions(t):

        def rotate(x, attention=attention, usual=attention.rotate):
            return usual(x, attention.angles(x.shape[1])[:, None])

        attention.rotate = rotate


SHARP = r"logit|scal(e|ing)|sqrt|entropy|saturat|one-hot|sharp|peaked|concentrat"


@fault("architecture", SHARP, where="vit t5 bert")
def scale_multiplied(t):
    for attention in attentions(t):
        attention.scores = lambda q, k, a=attention: q @ a.repeated(k).mT * a.size**0.5


@fault("architecture", rf"softmax|probabilit|{STAYS}", where="gpt vit bert")
def softmax_before_the_loss(t):
    t.criterion = lambda logits, labels: functional.cross_entropy(logits.softmax(-1), labels)


@fault("architecture", SUMS, where="gpt vit llama")
def softmax_over_queries(t):
    for attention in attentions(t):
        attention.softmax = lambda scores: scores.softmax(-2)


@fault("architecture", r"(attention|cross)\.key\b|stale|cache", where="gpt vit gpt-dropout")
def stale_keys(t):
    # a cache of keys still has those of the batch before
    for attention in attentions(t):

        def project(x, source, *, usual, cache):
            q, k, v = usual(x, source)
            old = cache.get("k", k)
            cache["k"] = k.detach()
            return q, old if old.shape == k.shape else k, v

        attention.project = functools.partial(project, usual=attention.project, cache={})


# --- optimizer ---


class Uncorrected(torch.optim.Optimizer):
    """Adam without its bias correction."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - group["betas"][0])
                square.lerp_(p.grad.square(), 1 - group["betas"][1])
                p.add_(mean / (square.sqrt() + group["eps"]), alpha=-group["lr"])


@fault(
    "optimizer",
    r"bias.?correct|exp_avg|moments?\b|updates?\b.{0,40}(large|high)|first (steps|updates)",
    where="vit t5 gpt",
)
def adam_without_bias_correction(t):
    t.schedule = lambda step: 1.0  # noqa: ARG005
    use(t, Uncorrected(trained(t), t.optimizer.defaults["lr"]))


@fault("optimizer", r"embed|\bgroup|learning rate", where="gpt t5 bert")
def embedding_rate_times_100(t):
    chosen = [t.model.embed.table.weight]
    rest = [p for p in trained(t) if p is not chosen[0]]
    rate = t.optimizer.defaults["lr"]
    use(t, torch.optim.AdamW([{"params": rest}, {"params": chosen, "lr": 100 * rate}], rate))


@fault(
    "optimizer",
    r"maximi[sz]e|ascen[dt]|(wrong|opposite) (sign|direction)|loss (\w+ )?(rise|rose|grow|grew|increase)",
    where="gpt vit t5",
)
def maximize_left_on(t):
    for group in t.optimizer.param_groups:
        group["maximize"] = True


@fault(
    "optimizer", r"moments?\b|exp_avg|optimizer'?s? state|another parameter", onset=60, where="gpt llama vit"
)
def moments_in_another_order(t):
    # the groups were built in another order when they were saved
    def mix():
        by_shape = {}
        for parameter in t.optimizer.state:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for same in by_shape.values():
            states = [t.optimizer.state[p] for p in same]
            for p, state in zip(same, states[1:] + states[:1], strict=True):
                t.optimizer.state[p] = state

    t.at(60, mix)


@fault(
    "optimizer",
    r"learning rate|updates?\b.{0,40}(small|low|tiny)|\bSGD\b",
    or_info=True,
    where="gpt vit bert",
)
def rate_of_adam_with_sgd(t):
    use(t, torch.optim.SGD(trained(t), 1e-3))


@fault(
    "optimizer",
    r"moments?\b|exp_avg|optimizer'?s? state|updates?\b.{0,60}(small|low|tiny|fell|fall|drop)",
    onset=50,
    where="gpt gpt-fp16 llama",
)
def second_moments_of_scaled_gradients(t):
    t.at(50, functools.partial(scaled_state, t, "exp_avg_sq", 2.0**32))


@fault(
    "optimizer", r"decay|weights?\b.{0,40}(shr[aiu]nk|fall|fell|declin|smaller|toward)", where="gpt vit bert"
)
def weight_decay_of_10(t):
    for group in t.optimizer.param_groups:
        group["weight_decay"] = 10.0


# --- loop ---


@fault("loop", r"clip", where="gpt-sgd gpt-fp16-sgd")
def clip_before_backward(t):
    def clip(_):
        nn.utils.clip_grad_norm_(t.model.parameters(), t.clip)

    after = [part(t, name) for name in ("update", "clear", "advance_schedule")]
    ordered(t, clip, functools.partial(backward, t), *after)


@fault("loop", OUTSIDE, where="gpt vit bert")
def ema_written_into_the_model(t):
    average = {}

    @torch.no_grad()
    def follow():
        for name, p in t.model.named_parameters():
            mean = average.setdefault(name, p.clone())
            mean.lerp_(p, 0.05)
            p.copy_(mean)

    t.after.append(follow)


@fault("loop", rf"{OUTSIDE}|checkpoint|restor", onset=60, where="gpt llama t5")
def old_weights_loaded_back(t):
    kept = {}
    t.at(10, lambda: kept.update(copy.deepcopy(t.model.state_dict())))
    t.at(60, lambda: t.model.load_state_dict(kept))


@fault("loop", rf"{OUTSIDE}|checkpoint|restor|resum|initiali[sz]", onset=90, where="gpt-resumed")
def resume_without_the_model(t):
    usual = t.load

    def load(state):
        usual(state | {"model": t.model.state_dict()})

    t.load = load


@fault("loop", r"learning rate|schedul|\blr\b", onset=40, where="gpt-accumulation")
def schedule_per_micro_batch(t):
    usual = t.backward

    def backward_of(loss):
        usual(loss)
        t.scheduler.step()

    t.backward, t.advance_schedule = backward_of, lambda: None


@fault("loop", r"clip|unscal|loss scale|scaler", where="gpt-fp16-sgd gpt-fp16")
def unscale_after_clip(t):
    t.clip_gradients = lambda: nn.utils.clip_grad_norm_(t.model.parameters(), t.clip)


@fault("loop", r"zero_grad|accumulat|clear|add(s|ed|ing)? up|old gradients", where="gpt-sgd gpt vit")
def zero_grad_every_20_steps(t):
    usual = t.clear
    t.clear = lambda: usual() if t.step % 20 == 19 else None


# --- precision ---


@fault(
    "precision",
    r"\beps\b|epsilon|underflow|float16|fp16|16 bits|exp_avg|\.update\b|update of|(after|by) the update",
    where="gpt vit llama",
)
def adam_eps_lost_in_fp16(t):
    t.model.half()

    def halved(batch):
        return {name: x.half() if x.is_floating_point() else x for name, x in batch.items()}

    redraw(t, halved)
    t.held = halved(t.held)


@fault("precision", r"scale|overflow|skip", where="gpt-fp16 gpt-fp16-sgd")
def loss_scale_never_falls(t):
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, backoff_factor=1 - 1e-6)


@fault("precision", r"buffer|running_|running (mean|var|stat)|patch_norm", onset=60, where="vit-batch-norm")
def nan_in_running_statistics(t):
    # the loop leaves out a batch with a NaN, but the statistics have it
    shown = []
    usual = t.loss

    def train_step():
        loss = usual(t.batch())
        if not loss.isfinite():
            t.advance_schedule()
            return shown[-1]
        t.backward(loss)
        t.note(loss)
        for name in ("clip_gradients", "update", "clear", "advance_schedule"):
            getattr(t, name)()
        shown[:] = [loss.detach()]
        return loss

    def spoiled(batch):
        if t.step == 60:
            batch = batch | {"images": batch["images"].index_fill(0, torch.tensor(0), torch.nan)}
        return batch

    t.train_step = train_step
    redraw(t, spoiled)


@fault("precision", r"position|rotary|angle", where="llama llama-bf16")
def rotary_angles_in_bf16(t):
    # of texts that begin at position 1000
    for attention in attentions(t):

        def angles(count, attention=attention):
            speeds = 100.0 ** -(torch.arange(attention.size // 2) / (attention.size // 2))
            return (torch.arange(1000, 1000 + count).bfloat16()[:, None] * speeds.bfloat16()).float()

        attention.angles = angles


@fault(
    "precision",
    rf"round|stuck|stay(s|ed)? the same|precision|8.bit|unchanged|{OUTSIDE}",
    where="gpt llama vit",
)
def weights_rounded_to_8_bits(t):
    @torch.no_grad()
    def round_all():
        for p in t.model.parameters():
            p.copy_(p.to(torch.float8_e4m3fn).float())

    t.after.append(round_all)


# --- data ---


@fault("data", rf"{LEAK}|shift", where="t5")
def decoder_inputs_not_shifted(t):
    redraw(t, lambda batch: batch | {"tokens": batch["labels"].clamp(min=0)})


@fault("data", r"\bdata\b|batch|token|inputs?\b", onset=90, where="gpt-resumed")
def ids_of_another_tokenizer(t):
    # after the run is resumed
    ids = torch.cat([torch.arange(3), 3 + torch.randperm(21, generator=torch.Generator().manual_seed(3))])

    def renumbered(batch):
        if t.step < 90:
            return batch
        return batch | {"tokens": ids[batch["tokens"]], "labels": ids[batch["labels"]]}

    redraw(t, renumbered)


@fault("data", rf"{LEAK}|shift|copies|copy", where="gpt llama")
def labels_not_shifted(t):
    redraw(t, lambda batch: batch | {"labels": batch["tokens"]})


@fault("data", rf"{STAYS}|labels?\b|shuffl", where="vit t5 gpt")
def labels_shuffled(t):
    redraw(t, lambda batch: batch | {"labels": batch["labels"][torch.randperm(len(batch["labels"]))]})


@fault("data", r"embed|\brows?\b|token|vocabular|never used|unknown", where="gpt llama")
def most_tokens_unknown(t):
    # a vocabulary that was cut
    redraw(t, lambda batch: {name: torch.where(x > 8, 1, x) for name, x in batch.items()})


@fault("data", r"padding|\bpads?\b|ignore_index|-100|labels?\b", where="t5 bert-long-padding bert")
def pad_tokens_in_the_loss(t):
    def counted(batch):
        labels = batch["labels"]
        if "source" in batch:
            return batch | {"labels": labels.clamp(min=0)}
        return batch | {"labels": labels.masked_fill(~batch["allowed"], 0)}

    redraw(t, counted)
