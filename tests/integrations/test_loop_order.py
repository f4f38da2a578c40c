"""The order of a training loop: mistakes are named within 5 steps, and healthy loops are told nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.rules import Severity, default_rules, headlines
from gradiometer.rules.schedule import follow
from support.watching import Sink

pytestmark = pytest.mark.usefixtures("_one_thread")

LOSS = nn.functional.mse_loss
CLIP = nn.utils.clip_grad_norm_


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def batch(generator):
    x = torch.randn(16, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


class Loop:
    """One training loop; subclasses change one thing."""

    steps = 12
    parts = 1
    to_none = True
    scaler = None
    fp16 = False
    lr = 0.01

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def build(self):
        return model_of()

    def go(self, **options):
        self.model, self.generator = self.build(), torch.Generator().manual_seed(1)
        self.optimizer, self.sink = self.optimizers(self.model), Sink()
        options = {"scaler": self.scaler, "sinks": [self.sink]} | options
        with gm.watch(self.model, self.optimizer, **options) as self.monitor:
            for number in range(self.steps):
                self.number = number
                self.step()
        assert self.monitor.failures == {}
        return self.monitor

    def batch(self):
        return batch(self.generator)

    def forward(self, x):
        return self.model(x)

    def loss(self):
        x, y = self.batch()
        loss = LOSS(self.forward(x), y) / self.parts
        return loss if self.scaler is None else self.scaler.scale(loss)

    def zero(self):
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def clip(self, limit=0.5):
        CLIP(self.model.parameters(), limit)

    def backward(self):
        for _ in range(self.parts):
            self.loss().backward()

    def step(self):
        self.zero()
        self.backward()
        self.update()

    def update(self):
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def orders(self):
        return [record.model.order for record in self.sink.records]


def reported_at(records):
    """Return the step in which `loop_order` reports first."""
    (rule,) = (rule for rule in default_rules() if rule.name == "loop_order")
    return next(record.step for record in records if list(rule.check(record)))


# mistakes


class ClearedTooLate(Loop):
    def step(self):
        self.backward()
        self.zero()
        self.update()


class ZeroedTooLate(ClearedTooLate):
    to_none = False


class ClearedTooLateOnce(Loop):
    """From step 6 on."""

    def step(self):
        self.backward()
        if self.number >= 6:
            self.zero()
        self.update()
        self.zero()


class ClearedPerPart(Loop):
    parts = 4

    def backward(self):
        for _ in range(self.parts):
            self.zero()
            self.loss().backward()

    def zero(self):
        self.model.zero_grad(set_to_none=self.to_none)


class ZeroedPerPart(ClearedPerPart):
    to_none = False


class NeverCleared(Loop):
    def zero(self):
        pass


class NeverClearedInParts(NeverCleared):
    parts = 3


class OneGroupNeverCleared(Loop):
    def optimizers(self, model):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=self.lr)

    def zero(self):
        self.model[0].zero_grad()


class ClippedAfter(Loop):
    def step(self):
        super().step()
        self.clip()


class ClippedAfterClearing(Loop):
    def step(self):
        self.backward()
        self.update()
        self.zero()
        self.clip()


class ClippedBefore(Loop):
    def step(self):
        self.zero()
        self.clip()
        self.backward()
        self.update()


class ClippedByValueAfter(Loop):
    clips = (nn.utils.clip_grad_value_, gm.clip_grad_value_)

    def step(self):
        super().step()
        # as it is looked up now
        (nn.utils if self.number % 2 else gm).clip_grad_value_(self.model.parameters(), 0.1)


class ClippedScaled(Loop):
    def go(self, **options):
        self.scaler = torch.amp.GradScaler("cpu")
        return super().go(**options)

    def backward(self):
        super().backward()
        self.clip(1.0)


class Overflowing(Loop):
    def go(self, **options):
        self.scaler = torch.amp.GradScaler("cpu")
        return super().go(**options)

    def forward(self, x):
        return super().forward(x) * math.inf

    def loss(self):
        loss = super().loss()
        self.monitor.note(loss=loss)
        return loss


class NotClearedAfterSkip(Loop):
    """Clears only after a step that the scaler has made."""

    def go(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        return super().go(**options)

    def batch(self):
        x, y = super().batch()
        return (x * math.nan, y) if self.number == 6 else (x, y)

    def zero(self):
        pass

    def update(self):
        before = self.scaler.get_scale()
        super().update()
        if self.scaler.get_scale() >= before:
            self.optimizer.zero_grad()


MISTAKES = [
    (ClearedTooLate, 0, Severity.WARNING, "cleared between backward() and optimizer.step() since step 0"),
    (ZeroedTooLate, 0, Severity.WARNING, "cleared between backward() and optimizer.step() since step 0"),
    (ClearedTooLateOnce, 6, Severity.WARNING, "cleared between backward() and optimizer.step() since step 6"),
    (ClearedPerPart, 0, Severity.INFO, "only the last of 4 backward passes counts in each step"),
    (ZeroedPerPart, 0, Severity.INFO, "only the last of 4 backward passes counts in each step"),
    (NeverCleared, 0, Severity.WARNING, "gradients are not cleared since step 0"),
    (NeverClearedInParts, 0, Severity.WARNING, "gradients are not cleared since step 0"),
    (OneGroupNeverCleared, 0, Severity.WARNING, "(seen at 2.weight): zero_grad() is not called, or not for"),
    (ClippedAfter, 0, Severity.WARNING, "gradients are clipped after optimizer.step()"),
    (ClippedAfterClearing, 1, Severity.WARNING, "after optimizer.step() and zero_grad()"),
    (ClippedBefore, 0, Severity.WARNING, "called before backward()"),
    (ClippedByValueAfter, 0, Severity.WARNING, "gradients are clipped after optimizer.step()"),
    (ClippedScaled, 0, Severity.WARNING, "clipped before scaler.unscale_() since step 0"),
    (
        Overflowing,
        0,
        Severity.ERROR,
        "skipped all 5 steps since step 0, so that no weight changes; its scale ",
    ),
    (NotClearedAfterSkip, 6, Severity.ERROR, "not finite since step 6 and were not cleared after it"),
]


@pytest.mark.parametrize(
    ("loop", "onset", "severity", "words"), MISTAKES, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_mistake_is_the_first_headline_within_five_steps(loop, onset, severity, words):
    loop = loop()
    monitor = loop.go(weights=True)
    first, *others = headlines(monitor.findings)
    assert (first.rule, first.severity) == ("loop_order", severity)
    assert words in first.message
    assert first.first_step == onset
    assert reported_at(loop.sink.records) <= onset + 5
    assert not [other for other in others if other.severity >= Severity.WARNING]


class ClearedEveryThirdStep(Loop):
    """A step after each part of what was to be one step."""

    steps = 40

    def zero(self):
        if self.number % 3 == 0:
            super().zero()


class ClearedEveryEighthStep(Loop):
    """Never more than 7 steps in a row are stale, of 8."""

    steps = 40

    def zero(self):
        if self.number % 8 == 0:
            super().zero()


class GrowingScale(Loop):
    """The scale doubles after every step that is not skipped."""

    steps = 60

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=self.interval)

    interval = 1


class RarelyGrowingScale(GrowingScale):
    interval = 20


def test_gradients_that_are_cleared_now_and_then_are_a_mistake():
    (first, *_) = headlines(ClearedEveryThirdStep().go().findings)
    assert (first.rule, first.severity) == ("loop_order", Severity.WARNING)
    assert (
        "of the last 24 steps, gradients still contained those that the step before had used" in first.message
    )
    (first, *_) = headlines(ClearedEveryEighthStep().go().findings)
    assert "gradients are not cleared since step" in first.message


def test_a_scale_that_grows_again_after_each_step_is_a_mistake():
    found = [x for x in GrowingScale().go().findings if x.rule == "loop_order"]
    assert [x.severity for x in found] == [Severity.WARNING]
    assert "times anew: its scale grows again after a few steps" in found[0].message
    assert [x for x in RarelyGrowingScale().go().findings if x.rule == "loop_order"] == []


def test_the_scale_is_told_of_steps_that_are_all_skipped():
    (first, *_) = headlines(Overflowing().go().findings)
    assert "its scale has fallen from 65,536 to 2,048" in first.message
    assert "the loss is" in first.message


def test_passes_that_search_an_adversarial_input_are_no_problem():
    class Adversarial(Loop):
        cleared = True

        def step(self):
            x, y = self.batch()
            x.requires_grad_()
            self.zero()
            for _ in range(3):
                LOSS(self.model(x), y).backward()
                x = (x + 0.01 * x.grad.sign()).detach().requires_grad_()
                if self.cleared:
                    self.zero()
            self.zero()
            LOSS(self.model(x), y).backward()
            self.update()

    class NotCleared(Adversarial):
        cleared = False

    assert all(x.severity == Severity.INFO for x in Adversarial().go().findings)
    assert NotCleared().go().findings == []


def test_a_limit_that_is_multiplied_by_the_scale_is_only_a_hint():
    class Deliberate(ClippedScaled):
        def clip(self, limit=1.0):
            super().clip(limit * self.scaler.get_scale())

    (found,) = Deliberate().go().findings
    assert (found.rule, found.severity) == ("loop_order", Severity.INFO)


def test_a_loop_that_never_steps_again_is_told_when_it_ends():
    class Stuck(Loop):
        steps = 30

        def batch(self):
            x, y = super().batch()
            return (x * math.nan, y) if self.number == 6 else (x, y)

        def step(self):
            self.backward()
            if all(bool(p.grad.isfinite().all()) for p in self.model.parameters()):
                self.update()
                self.zero()

    (first,) = headlines(Stuck().go().findings)
    assert (first.rule, first.severity, first.first_step) == ("loop_order", Severity.ERROR, 6)
    assert "no optimizer.step() after step 5, but 24 backward passes" in first.message


def test_the_number_of_backward_passes_that_varies_is_a_hint():
    class Varying(Loop):
        steps = 24

        def step(self):
            self.parts = 1 + self.number % 3
            super().step()

    loop = Varying()
    (found,) = loop.go().findings
    assert (found.rule, found.severity) == ("loop_order", Severity.INFO)
    assert "varies, from 1 to 3" in found.message
    assert [order.passes for order in loop.orders()] == [1, 2, 3] * 8


def test_the_advice_about_an_explosion_counts_the_backward_passes():
    class Summed(Loop):
        parts = 8
        lr = 0.5
        steps = 60

        def loss(self):
            return super().loss() * self.parts

    found = [x for x in Summed().go().findings if x.rule in {"exploding", "norm_spike"}]
    assert found
    assert all(
        "8 backward passes wrote the gradients of this step: divide the loss of each by 8" in x.advice
        for x in found
    )


def test_a_monitor_without_hooks_sees_gradients_that_are_not_finite_and_not_cleared():
    def train(*, clear):
        model, generator = model_of(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with gm.Monitor(model) as monitor:
            monitor.skips = True
            for step in range(14):
                x, y = batch(generator)
                LOSS(model(x * math.nan if step == 6 else x), y).backward()
                monitor.record()
                if bool(model[0].weight.grad.isfinite().all()):
                    optimizer.step()
                    optimizer.zero_grad()
                elif clear:
                    optimizer.zero_grad()
                monitor.advance()
        return headlines(monitor.findings)

    (first,) = train(clear=False)
    assert (first.rule, first.first_step) == ("loop_order", 6)
    assert "not finite since step 6 and were not cleared" in first.message
    assert [x.rule for x in train(clear=True)] == ["nonfinite"]


# healthy loops


class Zeroed(Loop):
    to_none = False


class Accumulated(Loop):
    parts = 4


class AccumulatedZeroed(Accumulated):
    to_none = False


class ClearedAtTheEnd(Loop):
    parts = 2

    def step(self):
        self.backward()
        self.clip()
        self.update()
        self.zero()


class NormAfterwards(Loop):
    def step(self):
        super().step()
        CLIP(self.model.parameters(), math.inf)


class ClippedTwice(Loop):
    def step(self):
        self.zero()
        self.backward()
        self.clip()
        self.update()
        self.clip(1.0)


class Unscaled(Loop):
    parts = 2
    to_none = False

    def go(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return super().go(**options)

    def update(self):
        self.scaler.unscale_(self.optimizer)
        self.clip()
        super().update()


class SkippedSometimes(Unscaled):
    steps = 20
    to_none = True

    def batch(self):
        x, y = super().batch()
        return (x * math.inf, y) if self.number in {0, 1, 2, 9, 10} else (x, y)


class Closure(Loop):
    def optimizers(self, model):
        return torch.optim.LBFGS(model.parameters(), max_iter=4, lr=0.1)

    def step(self):
        x, y = self.batch()

        def closure():
            self.zero()
            loss = LOSS(self.model(x), y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Sharpness(Loop):
    """SAM: two backward passes, of which only the second counts, with other weights."""

    def step(self):
        x, y = self.batch()
        self.zero()
        LOSS(self.model(x), y).backward()
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in self.model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(self.model.parameters()), moves)
        self.zero()
        LOSS(self.model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(self.model.parameters()), moves)
        self.update()


class Surgery(Loop):
    """PCGrad: a pass for each of four tasks, whose gradients are combined and assigned."""

    def step(self):
        params, every = list(self.model.parameters()), []
        for _ in range(4):
            self.zero()
            self.loss().backward()
            every.append([p.grad.clone() for p in params])
        for p, *grads in zip(params, *every, strict=True):
            p.grad = sum(grads)
        self.clip()
        self.update()


class Retained(Loop):
    def backward(self):
        x, y = self.batch()
        out = self.model(x)
        LOSS(out, y).backward(retain_graph=True)
        out.abs().mean().backward()


class WithGraph(Loop):
    """A penalty on the gradient, whose first pass keeps its graph in the gradients."""

    def backward(self):
        x, y = self.batch()
        grads = torch.autograd.grad(LOSS(self.model(x), y), list(self.model.parameters()), create_graph=True)
        (LOSS(self.model(x), y) + 0.01 * sum(g.square().sum() for g in grads)).backward()


class Epochs(Loop):
    """Several updates with one batch, as PPO makes."""

    def step(self):
        x, y = self.batch()
        for _ in range(4):
            self.zero()
            LOSS(self.model(x), y).backward()
            self.clip()
            self.update()


class Frozen(Loop):
    steps = 18

    def step(self):
        self.model[0].weight.requires_grad_(self.number % 6 < 3)
        super().step()


class FrozenZeroed(Frozen):
    to_none = False


class UnusedBranch(Loop):
    def build(self):
        model = model_of()
        model.other = nn.Linear(6, 1)
        return model

    def optimizers(self, model):
        return torch.optim.SGD(
            [
                {"params": model.other.parameters()},
                {"params": [*model[0].parameters(), *model[2].parameters()]},
            ],
            lr=self.lr,
        )

    def forward(self, x):
        out = self.model[2](self.model[1](self.model[0](x)))
        return out + self.model.other(x) if self.number % 3 == 0 else out


class UnusedBranchZeroed(UnusedBranch):
    to_none = False


class Sparse(Loop):
    parts = 3

    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(32, 1))

    def batch(self):
        x = torch.randint(20, (16, 4), generator=self.generator)
        return x, x.double().mean(1, keepdim=True).float() / 10


class Checkpointed(Loop):
    reentrant = False

    def forward(self, x):
        model = self.model
        x = x.clone().requires_grad_()
        h = checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=self.reentrant)
        return checkpoint(model[2], h, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True
    parts = 2


class LastLayerDropped(Loop):
    """The gradients of one layer are dropped in the first epoch, as DINO does."""

    def optimizers(self, model):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=self.lr)

    def update(self):
        self.model[0].weight.grad = None
        super().update()


class BadBatchesDiscarded(Loop):
    """A batch whose gradients are too large is discarded before it is used."""

    def step(self):
        self.zero()
        self.backward()
        if self.number % 3 == 2:
            self.zero()
            self.backward()
        self.update()


class Watched(Loop):
    """Several optimizers; ``generator_first`` as in a GAN."""

    clears = ("before",)
    generator_first = False

    def build(self):
        torch.manual_seed(0)
        return nn.ModuleDict(
            {"g": nn.Linear(6, 6), "d": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))}
        )

    def optimizers(self, model):
        return [torch.optim.Adam(model[x].parameters(), lr=1e-3) for x in "dg"]

    def step(self):
        (x, _), (d, g) = self.batch(), self.optimizer
        model = self.model
        if "before" in self.clears:
            d.zero_grad()
        model["d"](x).mean().backward()
        (-model["d"](model["g"](x).detach())).mean().backward()
        d.step()
        if "after" in self.clears:
            d.zero_grad()
        g.zero_grad()
        # also writes the gradients of the discriminator
        model["d"](model["g"](x)).mean().backward()
        g.step()


class WatchedAfter(Watched):
    clears = ("before", "after")


HEALTHY = [
    Loop, Zeroed, Accumulated, AccumulatedZeroed, ClearedAtTheEnd, NormAfterwards, ClippedTwice, Unscaled,
    SkippedSometimes, Closure, Sharpness, Surgery, Retained, WithGraph, Epochs, Frozen, FrozenZeroed,
    UnusedBranch, UnusedBranchZeroed, Sparse, Checkpointed, CheckpointedReentrant, LastLayerDropped,
    BadBatchesDiscarded, Watched, WatchedAfter,
]  # fmt: skip


@pytest.mark.parametrize("loop", HEALTHY, ids=lambda loop: loop.__name__)
def test_a_healthy_loop_is_told_nothing(loop):
    loop = loop()
    monitor = loop.go()
    assert [str(x) for x in monitor.findings if x.rule in {"loop_order", "accumulating"}] == []
    # what is not known would be no evidence
    assert loop is None or isinstance(loop, Closure) or any(order.passes for order in loop.orders())


def test_only_the_discriminator_of_a_gan_is_watched():
    model = Watched().build()
    d, g = Watched().optimizers(model)
    generator = torch.Generator().manual_seed(1)
    with gm.watch(model["d"], d) as monitor:
        for _ in range(12):
            x, _ = batch(generator)
            d.zero_grad()
            model["d"](x).mean().backward()
            (-model["d"](model["g"](x).detach())).mean().backward()
            d.step()
            g.zero_grad()
            model["d"](model["g"](x)).mean().backward()
            g.step()
    assert not [x for x in monitor.findings if x.rule == "loop_order"]


# what is traced is not known


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("loop", [Loop, AccumulatedZeroed, NeverCleared, ClearedTooLate])
def test_a_compiled_model_in_an_eager_loop_is_seen_as_one_that_is_not(loop, backend):
    class Compiled(loop):
        def forward(self, x):
            if not hasattr(self, "compiled"):
                self.compiled = torch.compile(self.model, backend=backend, fullgraph=True)
            return self.compiled(x)

    eager, compiled = loop(), Compiled()
    assert [x.message for x in compiled.go().findings] == [x.message for x in eager.go().findings]
    assert compiled.orders() == eager.orders()


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("loop", [Loop, AccumulatedZeroed, NeverCleared, ClearedTooLate])
def test_a_compiled_backward_pass_is_never_called_forgotten(loop):
    class Compiled(loop):
        def backward(self):
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                super().backward()

    compiled = Compiled()
    found = [x for x in compiled.go().findings if x.rule == "loop_order"]
    expected = [x.message for x in loop().go().findings if x.rule == "loop_order"]
    assert [x.message for x in found] in ([], expected)


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("clear", ["start", "inside", "never"])
def test_a_traced_backward_pass_is_unknown(clear):
    model, sink, generator = model_of(), Sink(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend="eager", fullgraph=True)
    def forward_backward(x, y):
        if clear == "inside":
            model.zero_grad()
        LOSS(model(x), y).backward()

    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        gm.watch(model, optimizer, sinks=[sink]) as monitor,
    ):
        for _ in range(10):
            if clear == "start":
                optimizer.zero_grad()
            forward_backward(*batch(generator))
            CLIP(model.parameters(), 0.1)
            optimizer.step()
    assert {record.model.order.passes for record in sink.records} == {0}
    assert not [x for x in monitor.findings if x.rule == "loop_order"]


def test_the_state_of_the_rule_continues_a_streak():
    loop = NeverCleared()
    loop.go()
    rule, other = gm.rules.LoopOrder(), gm.rules.LoopOrder()
    records = loop.sink.records
    for record in records[:4]:
        assert not list(rule.check(record))
    other.load_state_dict(copy.deepcopy(rule.state_dict()))
    (found,) = other.check(records[4])
    assert found.first_step == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state", {"stale": [1, 2]}),
        ("counts", {"x": 1}),
        ("counts", {"1": 1.5}),
        ("rates", {"lr": [0.1, "x"]}),
        ("begun", "a"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error(key, value):
    rule = gm.rules.LoopOrder()
    with pytest.raises(ValueError, match=key):
        rule.load_state_dict(rule.state_dict() | {key: value})


# schedules


def scheduled(schedule, steps=200, lr=0.1):
    """Return the findings about a schedule of a run in which nothing else happens."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=0.9)
    scheduler, rates, found = schedule(optimizer), {}, []
    for step in range(steps):
        ended = follow(rates.setdefault("lr", []), step, optimizer.param_groups[0]["lr"])
        found += [] if ended is None else [(ended.since, ended.text)]
        optimizer.step()
        scheduler.step()
    return found


LR = torch.optim.lr_scheduler
ENDED = {
    "beyond T_max": (lambda o: LR.CosineAnnealingLR(o, 50), 50, "rises again"),
    "beyond T_max, above 0": (lambda o: LR.CosineAnnealingLR(o, 50, eta_min=1e-5), 50, "rises again"),
    "tiny": (lambda o: LR.LambdaLR(o, lambda s: max(1e-5, 1 - s / 60)), 60, "has stayed at 1e-06"),
}
GOING_ON = {
    "constant": lambda o: LR.ConstantLR(o, factor=1.0),
    "cosine": lambda o: LR.CosineAnnealingLR(o, 200),
    "cosine to a floor": lambda o: LR.LambdaLR(
        o, lambda s: max(0.1, 0.5 * (1 + math.cos(math.pi * min(s / 100, 1))))
    ),
    "warm restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 40),
    "warm-ups": lambda o: LR.LambdaLR(
        o, lambda s: min(s % 50 / 10, 0.5 * (1 + math.cos(math.pi * max(s % 50 - 10, 0) / 40)))
    ),
    "one cycle": lambda o: LR.OneCycleLR(o, 0.1, total_steps=201),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, step_size_up=20),
    "steps": lambda o: LR.StepLR(o, 60),
    "exponential": lambda o: LR.ExponentialLR(o, 0.97),
    "by epochs": lambda o: LR.LambdaLR(o, lambda s: 0.5 * (1 + math.cos(math.pi * (s // 2) / 100))),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_schedule_that_ends_before_the_training_is_told(name):
    schedule, since, words = ENDED[name]
    found = scheduled(schedule)
    assert found[0][0] == since
    assert words in found[0][1]


@pytest.mark.parametrize("name", GOING_ON)
def test_a_schedule_that_goes_on_is_told_nothing(name):
    assert scheduled(GOING_ON[name]) == []


def test_a_schedule_beyond_its_end_is_a_hint_of_the_rule():
    class Scheduled(Loop):
        steps = 30

        def optimizers(self, model):
            optimizer = super().optimizers(model)
            self.schedule = LR.CosineAnnealingLR(optimizer, 12)
            return optimizer

        def update(self):
            super().update()
            self.schedule.step()

    (found,) = [x for x in Scheduled().go().findings if x.rule == "loop_order"]
    assert (found.severity, found.first_step, found.tensor) == (Severity.INFO, 12, "lr")
    assert "the schedule of lr has ended at step 12, but training goes on: lr rises again" in found.message
