"""The planted faults: each is a function that changes a healthy `Training` in one place.

The table says in which kinds of run it is planted, at which module, from which step on, and which rules name
it. A run of a seed takes one of the kinds.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from kernels_bench.zoo.models import Residual

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels_bench.zoo.training import Training

FAULTS = {}

TOO_LOW = ("update_ratio_band: too low",)
TOO_HIGH = ("update_ratio_band: too high",)
DEAD = ("dead_module", "dead_adapter")
UNCOVERED = ("coverage", *DEAD)
SPIKES = ("loss_spike", "norm_spike", "exploding")
IN_PLACE = ("dead", "vanishing", "exploding", "imbalance")


@dataclass(frozen=True)
class Fault:
    """A mistake, and what names it.

    Attributes:
        plant: changes the training; its second argument is the place.
        where: kinds of run, and the module of each; several are separated by spaces.
        rules: the rules that name it.
        onset: the step at which it begins.
        phrase: what the finding's message, advice or tensor must contain, a regular expression.
        in_place: rules that name it too, if they name the place.
        peers: the detectors of other tools that name it, with a word of the message if one decides.
        without: other tools, of which it cannot be made.
        or_info: whether a finding of severity info is enough, because it may be what the user wants.
    """

    plant: Callable[[Training, str], object]
    where: dict[str, str]
    rules: tuple[str, ...]
    onset: int = 0
    phrase: str = ""
    in_place: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    or_info: bool = False

    def names(self, kind, rule, text):
        """Return whether a finding of ``rule`` with this text names the fault, planted in ``kind``."""
        if rule in self.rules:
            return re.search(self.phrase, text) is not None
        places = "|".join(map(re.escape, self.where[kind].split()))
        return rule in self.in_place and re.search(rf"(?<![\w.])({places})\b", text) is not None

    def names_by_peer(self, detector, text):
        """Return whether another tool's report with this text names the fault."""
        wanted = [peer.partition(": ") for peer in self.peers]
        return any(detector == name and word in text for name, _, word in wanted)


def fault(*rules, onset=0, phrase="", in_place=(), peers=(), without=(), or_info=False, where):
    """Add a fault to the table, under the function's name; ``where`` is a kind, kinds, or a dict."""

    def add(plant):
        places = where if isinstance(where, dict) else dict.fromkeys(where.split(), "")
        rest = (onset, phrase, tuple(in_place), tuple(peers), tuple(without), or_info)
        FAULTS[plant.__name__.replace("_", "-")] = Fault(plant, places, rules, *rest)
        return plant

    return add


def modules(t, place):
    """Return the modules of a place."""
    return [t.model.get_submodule(name) for name in place.split()]


def lose_from(t, step, change, *, until=None):
    """Replace the first loss by ``change(loss)`` in some steps; only in ``step`` by default."""
    loss, last = t.losses[0], step if until is None else until

    def changed(*batch):
        value = loss(*batch)
        return change(value) if step <= t.step <= last else value

    t.losses = [changed, *t.losses[1:]]


def draw_at(t, step, change):
    """Replace the batch of one step by ``change(*batch)``."""
    batch = t.batch
    t.batch = lambda: change(*batch()) if t.step == step else batch()


def output_of(t, module, change, *, onset=0):
    """Replace a module's output by ``change(output)``."""
    module.register_forward_hook(lambda _, __, out: change(out) if t.step >= onset else None)


def rate(t, change):
    """Replace the schedule's factor in each step by ``change(step, factor)``."""
    schedule = t.schedule
    t.schedule = lambda step: change(step, schedule(step))


def everything(t):
    """Return all groups of all optimizers."""
    return [group for optimizer in t.optimizers for group in optimizer.param_groups]


# --- the loop ---


@fault("no_gradients", where="mlp-sgd gpt unet", without=["pulsegrad"])
def record_after_zero_grad(t, _):
    t.record_late = True


@fault("no_gradients", where="cnn-step-schedule lstm vae", without=["pulsegrad"])
def record_after_zero_grad_to_zeros(t, _):
    t.record_late, t.clear = True, lambda optimizer: optimizer.zero_grad(set_to_none=False)


@fault("no_gradients", where="cnn-step-schedule gru transformer-encoder", peers=DEAD)
def backward_forgotten(t, _):
    t.backward = lambda _: None


@fault("no_gradients", where="resnet-zero-init gpt two-towers", peers=UNCOVERED)
def copy_watched(t, _):
    t.watched = copy.deepcopy(t.model)


@fault("not_updated", where="mlp-label-noise gpt diffusion-ema", peers=["loss_plateau_early"])
def step_forgotten(t, _):
    t.update = lambda _: None


@fault("accumulating", where="mlp-sgd cnn-step-schedule resnet-zero-init")
def zero_grad_forgotten_with_sgd(t, _):
    t.clear = lambda _: None


@fault("accumulating", where="gpt-tied-linear-to-0 transformer-encoder recommender")
def zero_grad_forgotten_with_adam(t, _):
    t.clear = lambda _: None


@fault("eval_mode", onset=30, where="resnet-zero-init resnet-constant-warm-up siamese")
def eval_left_on_with_batch_norm(t, _):
    t.at(30, t.model.eval)


@fault("eval_mode", onset=30, where="mlp-dropout transformer-encoder graph-network")
def eval_left_on_with_dropout(t, _):
    t.at(30, t.model.eval)


# --- what the gradients reach ---

CUT = {"mlp-sgd": "2", "resnet-zero-init": "blocks.1", "gpt": "blocks.0"}


@fault("no_gradient_flow", where=CUT, peers=DEAD)
def half_detached(t, place):
    output_of(t, *modules(t, place), torch.Tensor.detach)


UNUSED = {"gpt": "blocks.1", "vit": "blocks.0.mlp", "diffusion-ema": "model.time"}


@fault("no_gradient_flow", where=UNUSED, peers=DEAD)
def module_unused(t, place):
    # the time of a denoiser is added, not passed on
    (module,) = modules(t, place)
    module.forward = (lambda x: x.new_zeros(len(x), 96)) if place.endswith("time") else (lambda x: x)


ENCODERS = {"unet": "encoder.0 encoder.1", "vae": "encoder", "two-towers": "first"}


@fault("no_gradient_flow", where=ENCODERS, peers=DEAD)
def encoder_under_no_grad(t, place):
    for module in modules(t, place):
        module.forward = torch.no_grad()(module.forward)


FROZEN = {"gpt": "blocks.0", "lstm": "embed rnn", "resnet-zero-init": "stem blocks.0 blocks.1"}


@fault("no_gradient_flow", where=FROZEN, peers=DEAD, or_info=True)
def frozen_by_accident(t, place):
    for module in modules(t, place):
        module.requires_grad_(requires_grad=False)


BRANCHES = {"resnet-constant-warm-up": "blocks.1", "gpt": "blocks.0.mlp", "vit": "blocks.1.attention"}


@fault("dead", "no_gradient_flow", where=BRANCHES, peers=DEAD)
def branch_times_0(t, place):
    (module,) = modules(t, place)
    if isinstance(module, Residual):
        module.gain = 0.0
    else:
        output_of(t, module, lambda out: out * 0.0)


# --- what the optimizer reaches ---

LAYERS = {"cnn-step-schedule": "blocks.1", "gpt": "blocks.1.mlp.0", "transformer-encoder": "encoder.layers.0"}


@fault("not_updated", where=LAYERS, in_place=["accumulating"])
def layer_missing_from_the_optimizer(t, place):
    # the optimizer does not clear its gradients either
    missing = {id(p) for module in modules(t, place) for p in module.parameters()}
    for group in everything(t):
        group["params"] = [p for p in group["params"] if id(p) not in missing]


HEADS = {"cnn-step-schedule": "head", "mlp-label-noise": "4", "gpt-tied-linear-to-0": "blocks.1.mlp.2"}


@fault("not_updated", where=HEADS, in_place=["no_gradients", "accumulating"], peers=UNCOVERED)
def layer_replaced_after_the_optimizer(t, place):
    renew(modules(t, place))


@fault("not_updated", "no_gradients", where="mlp-sgd gpt unet", peers=[*UNCOVERED, *TOO_LOW])
def model_replaced_after_the_optimizer(t, _):
    renew([t.model])


def renew(parents):
    """Replace all parameters by new ones of the same values."""
    for parent in parents:
        for module in parent.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


@fault(
    "stuck",
    "update_ratio",
    where="mlp-label-noise transformer-encoder vae",
    peers=TOO_LOW,
    or_info=True,
)
def updates_lost_in_bf16(t, _):
    t.model.bfloat16()
    rate(t, lambda _, factor: 0.003 * factor)
    batch = t.batch
    t.batch = lambda: tuple(x.bfloat16() if x.is_floating_point() else x for x in batch())


@fault("untied", where="gpt-tied-linear-to-0 gpt transformer-encoder")
def weight_copied_instead_of_tied(t, _):
    weight = t.model.embed.weight.detach().clone()
    if t.model.head.weight is t.model.embed.weight:
        t.model.head.weight = nn.Parameter(weight)
        everything(t)[0]["params"].append(t.model.head.weight)
    t.model.head.weight.data.copy_(weight)


@fault("untied", "not_updated", "no_gradients", onset=50, where="gpt-tied-linear-to-0")
def tie_broken_in_the_middle(t, _):
    def replace():
        t.model.head.weight = nn.Parameter(t.model.head.weight.detach().clone())

    t.at(50, replace)


# --- learning rate and optimizer state ---


@fault("learning_rate", "not_updated", onset=60, where="resnet-zero-init gpt gru", peers=TOO_LOW)
def learning_rate_0_from_60_on(t, _):
    rate(t, lambda step, factor: 0.0 if step >= 60 else factor)


@fault("learning_rate", onset=80, where="mlp-label-noise gpt resnet-zero-init", peers=TOO_HIGH)
def learning_rate_times_30_in_one_step(t, _):
    rate(t, lambda step, factor: 30 * factor if step == 80 else factor)


@fault("learning_rate", onset=100, where="mlp-sgd gpt vae", peers=TOO_HIGH)
def learning_rate_times_1000_from_100_on(t, _):
    rate(t, lambda step, factor: 1000 * factor if step >= 100 else factor)


DIVERGES = (*SPIKES, "update_ratio", "nonfinite", "learning_rate", "update_spike")
PEERS_DIVERGE = ("loss_spike", "grad_explosion", "nan_inf", *TOO_HIGH, "weight_drift", "spike")


@fault(*DIVERGES, where="mlp-sgd mlp-full-batch mlp-summed-loss", peers=PEERS_DIVERGE)
def learning_rate_too_large_with_sgd(t, _):
    rate(t, lambda _, factor: 100 * factor)


@fault(*DIVERGES, where="gpt vae transformer-encoder", peers=PEERS_DIVERGE)
def learning_rate_too_large_with_adam(t, _):
    rate(t, lambda _, factor: 300 * factor)


@fault("update_spike", "state_reset", onset=100, where="gpt-normal-embeddings vae unet", peers=TOO_HIGH)
def second_moment_zeroed(t, _):
    t.at(100, functools.partial(corrupt, t, "exp_avg_sq", 0.0))


@fault(
    "update_spike",
    "update_bound",
    onset=90,
    where="resnet-zero-init cnn-step-schedule mlp-cosine-restarts",
    peers=TOO_HIGH,
)
def momentum_times_100(t, _):
    t.at(90, functools.partial(corrupt, t, "momentum_buffer", 100.0))


def corrupt(t, key, factor):
    """Scale a part of the optimizer's state."""
    for state in t.optimizers[0].state.values():
        state[key].mul_(factor)


@fault(*DIVERGES, where="gpt resnet-zero-init mlp-label-noise", peers=PEERS_DIVERGE)
def weight_decay_of_the_wrong_sign(t, _):
    # the weights grow by 5 % in a step
    for group in everything(t):
        group["weight_decay"] = -0.05 / group["lr"] * (1 - group.get("momentum", 0.0))


@fault(*DIVERGES, where="gan", peers=PEERS_DIVERGE)
def discriminator_without_bounds(t, _):
    # the critic of a WGAN, whose weights nobody clips
    generator, critic = t.model["generator"], t.model["discriminator"]

    def judged(real):
        critic.requires_grad_()
        with torch.no_grad():
            fake = generator(torch.randn(len(real), 8))
        return critic(fake).mean() - critic(real).mean()

    t.losses = [judged, t.losses[1]]
    everything(t)[0]["lr"] *= 10


# --- batches ---


def poison(t, step):
    """Multiply the inputs of a batch by 100, if they are not indices, and shuffle its targets."""

    def poisoned(x, *rest):
        x = x * 100 if x.is_floating_point() else torch.randint_like(x, int(x.max()) + 1)
        return x, *(y.roll(1, 0) if y.is_floating_point() else hard(y) for y in rest)

    def hard(y):
        return (y + 1 + torch.randint_like(y, int(y.max()))) % (int(y.max()) + 1)

    draw_at(t, step, poisoned)


PEERS_SPIKE = ("loss_spike", "grad_explosion", "spike")


@fault(*SPIKES, onset=25, where="mlp-sgd autoencoder mlp-summed-loss", peers=PEERS_SPIKE)
def poisoned_batch_at_25(t, _):
    poison(t, 25)


@fault(*SPIKES, onset=40, where="lstm gpt transformer-encoder", peers=PEERS_SPIKE)
def poisoned_batch_at_40(t, _):
    poison(t, 40)


@fault(*SPIKES, onset=100, where="cnn-step-schedule vit unet", peers=PEERS_SPIKE)
def poisoned_batch_at_100(t, _):
    poison(t, 100)


@fault(*SPIKES, onset=200, where="gpt diffusion-ema mlp-cosine-restarts", peers=PEERS_SPIKE)
def poisoned_batch_at_200(t, _):
    poison(t, 200)


# --- NaN and Inf ---

NOTHING = r"(?i)nothing|empty"
NAN = ("nan_inf",)


@fault("nonfinite", onset=50, phrase=NOTHING, where="gpt vit transformer-encoder", peers=NAN)
def all_targets_ignored(t, _):
    draw_at(t, 50, lambda x, y: (x, torch.full_like(y, -100)))


@fault("nonfinite", onset=40, phrase=NOTHING, where="mlp-label-noise cnn-step-schedule unet", peers=NAN)
def mean_of_an_empty_mask(t, _):
    lose_from(t, 40, lambda loss: loss.expand(8)[torch.zeros(8, dtype=torch.bool)].mean())


@fault("nonfinite", onset=60, phrase=NOTHING, where="recommender two-towers siamese", peers=NAN)
def sum_over_a_count_of_0(t, _):
    lose_from(t, 60, lambda loss: (loss * torch.zeros(8)).sum() / torch.zeros(8).sum())


@fault("nonfinite", onset=70, where="cnn-step-schedule vae gru", peers=NAN)
def nan_in_an_input(t, _):
    draw_at(t, 70, lambda x, *rest: (x.index_fill(0, torch.tensor(0), torch.nan), *rest))


INF = {"mlp-sgd": "2", "gpt": "blocks.1.mlp.0", "resnet-zero-init": "blocks.1.first"}


@fault("nonfinite", onset=60, where=INF, peers=NAN)
def inf_in_a_weight(t, place):
    (module,) = modules(t, place)
    t.at(60, lambda: module.weight.data.flatten()[3].fill_(torch.inf))


@fault("nonfinite", onset=80, where="vae dqn unet", peers=NAN)
def log_of_0(t, _):
    lose_from(t, 80, lambda loss: loss - 0.01 * (loss - loss.detach()).log())


@fault("nonfinite", onset=50, where="siamese two-towers mlp-label-noise", peers=NAN)
def gradient_of_sqrt_at_0(t, _):
    lose_from(t, 50, lambda loss: loss + (loss - loss.detach()).square().sqrt())


HALF = {"gpt": "blocks.1.mlp", "vit": "blocks.0.mlp", "mlp-sgd": "2"}


@fault("nonfinite", onset=60, where=HALF, peers=NAN)
def overflow_in_fp16(t, place):
    output_of(t, *modules(t, place), lambda out: (out * 1e7).half().float() / 1e7, onset=60)


@fault("nonfinite", onset=60, where="mlp-dropout autoencoder cnn-frozen-batch-norm", peers=NAN)
def division_by_0(t, _):
    # the inputs are normalized, and this batch is constant
    draw_at(t, 60, lambda x, *rest: ((x * 0) / (x * 0).std(), *rest))


# --- initialization and activations ---

LARGE = {"mlp-sgd": "2", "gpt": "blocks.0.mlp.0", "transformer-encoder": "head"}


@fault("initialization", where=LARGE, in_place=IN_PLACE, peers=["layer_imbalance", "grad_explosion"])
def layer_times_100(t, place):
    with torch.no_grad():
        for module in modules(t, place):
            module.weight.mul_(100)


ZERO = {"mlp-sgd": "2 4", "gpt": "blocks.0.mlp.0 blocks.0.mlp.2", "vae": "decoder.0 decoder.2"}


@fault("initialization", where=ZERO, in_place=(*IN_PLACE, "no_gradient_flow"), peers=DEAD)
def two_layers_at_0(t, place):
    for module in modules(t, place):
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


DYING = {"mlp-sgd": "2", "recommender": "body.0", "cnn-step-schedule": "blocks.1.1"}


# the biases are set by hand, which is an update of that tensor
@fault(
    "dead",
    "dead_units",
    onset=50,
    where=DYING,
    in_place=("update_spike",),
    peers=[*DEAD, "dying_relu", "activation_collapse"],
)
def relus_dead_from_50_on(t, place):
    (module,) = modules(t, place)
    t.at(50, lambda: module.bias.data.fill_(-10.0 if isinstance(module, nn.BatchNorm2d) else -30.0))


@fault("growing_logits", where="gpt gpt-normal-embeddings vit", peers=PEERS_DIVERGE)
def learning_rate_of_queries_and_keys_times_300(t, _):
    named = dict(t.model.named_parameters())
    chosen = [named[name] for name in named if re.search(r"attention\.(query|key)\.", name)]
    rest = [p for p in named.values() if not any(p is other for other in chosen)]
    (group,) = everything(t)
    group["params"] = rest
    t.optimizers[0].add_param_group({**group, "params": chosen, "lr": 300 * group["lr"]})


@fault("collapsing_router", where="gpt-moe", peers=DEAD)
def router_biased_to_one_expert(t, _):
    for block in t.model.blocks:
        block.mlp.router.register_forward_hook(
            lambda _, __, out: out + 8 * functional.one_hot(torch.tensor(0), out.shape[1])
        )


@fault("collapsing_router", where="gpt-moe", peers=DEAD)
def load_balance_of_the_wrong_sign(t, _):
    (loss,) = t.losses
    t.losses = [lambda x, y: loss(x, y) - 0.3 * sum(block.mlp.balance for block in t.model.blocks)]


@fault(
    "vanishing",
    where="mlp-sgd mlp-label-noise mlp-full-batch",
    peers=["grad_vanishing", "activation_collapse"],
)
def stack_of_sigmoids(t, _):
    last = len(t.model) - 1
    for _ in range(8):
        for module in (nn.Sigmoid(), nn.Linear(64, 64)):
            t.model.insert(last, module)
    everything(t)[0]["params"] += [p for module in t.model[last : last + 16] for p in module.parameters()]


RESIDUAL = {"resnet-zero-init": "blocks", "resnet-constant-warm-up": "blocks", "diffusion-ema": "model.body"}


@fault(
    *SPIKES,
    "imbalance",
    "nonfinite",
    onset=60,
    where=RESIDUAL,
    peers=["grad_explosion", "layer_imbalance", "loss_spike", "spike"],
)
def wrong_scale_of_residual_branches(t, place):
    (part,) = modules(t, place)
    if isinstance(part, nn.ModuleList):
        t.at(60, lambda: [setattr(block, "gain", 50.0) for block in part])
    else:
        output_of(t, part, lambda out: 500.0 * out, onset=60)


RECURRENT = {"lstm": "rnn", "gru": "rnn"}


@fault(
    *SPIKES,
    "imbalance",
    "initialization",
    where=RECURRENT,
    peers=["grad_explosion", "layer_imbalance", "loss_spike", "spike"],
)
def exploding_rnn(t, place):
    (module,) = modules(t, place)
    t.clip = None
    with torch.no_grad():
        module.weight_hh_l0.mul_(20)
