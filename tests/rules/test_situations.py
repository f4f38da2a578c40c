"""In each situation of a training loop, the messages say what is true there, and nothing that cannot be."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.integrations.session import Session
from gradiometer.rules import Exploding, Severity, headlines

pytestmark = pytest.mark.usefixtures("_one_thread")

STEPS = 25


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class WithTarget(nn.Module):
    """A network, and another with the same weights at the start."""

    def __init__(self, **options):
        super().__init__()
        self.online = nn.Linear(8, 8, **options)
        self.target = copy.deepcopy(self.online)

    def forward(self, x):
        return self.online(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x.argmax(1))))


class Adapted(nn.Module):
    """Three layers, each frozen but for an adapter that starts at 0."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(3):
            layer = nn.ModuleDict({"base": nn.Linear(8, 8), "mlp": nn.Linear(8, 8)}).requires_grad_(False)
            layer["lora_a"], layer["lora_b"] = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
            nn.init.zeros_(layer["lora_b"].weight)
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer["mlp"](layer["base"](x) + layer["lora_b"](layer["lora_a"](x))))
        return x


class OwnMasters(torch.optim.AdamW):
    """AdamW on float32 copies of its own; the model's weights are their rounded values."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        super().__init__(parameters, lr=lr)
        self.masters = [p.detach().float().clone() for p in parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)
        self.write = True

    def step(self):
        parameters = self.param_groups[0]["params"]
        for master, parameter in zip(self.masters, parameters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters, strict=True) if self.write else ():
                parameter.copy_(master)


class Loop:
    """A training loop, with a hook for each place in which users differ."""

    seed, lr = 0, 0.05

    def __init__(self, **options):
        torch.manual_seed(self.seed)
        self.model = self.build()
        self.options = {"weights": True, "updates": True} | options

    def build(self):
        return Net()

    def optimizers(self):
        return [torch.optim.SGD(self.model.parameters(), lr=self.lr)]

    def watched(self):
        return self.model

    def loss(self, x):
        return (self.model(x) - x.roll(1, 1)).square().mean()

    def backward(self, loss):
        loss.backward()

    def before_step(self):
        pass

    def step(self, optimizers):
        for optimizer in optimizers:
            optimizer.step()

    def after_step(self):
        pass

    def clear(self, optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad()

    def train(self, record, advance):
        for self.number in range(STEPS):
            self.model.train()
            loss = self.loss(torch.randn(32, 8))
            self.backward(loss)
            self.before_step()
            record(loss)
            self.step(self.known)
            self.after_step()
            self.clear(self.known)
            advance()

    def watch(self, **options):
        """Train under `gm.watch`."""
        self.known = self.optimizers()
        with gm.watch(self.watched(), self.known, **self.options, **options) as monitor:
            self.train(lambda loss: monitor.note(loss=loss), lambda: None)
        return monitor

    def monitor(self):
        """Train with a `Monitor`, which knows no optimizer."""
        self.known = self.optimizers()
        with gm.Monitor(self.watched(), **self.options) as monitor:
            kept = {}

            def record(loss):
                kept["loss"] = loss
                monitor.record()

            self.train(record, lambda: monitor.advance(**kept, lr=self.known[0].param_groups[0]["lr"]))
        return monitor

    def trainer(self):
        """Train as the callbacks of trainers do."""
        self.known = self.optimizers()
        session = Session("Callback", self.options)
        session.begin(self.watched(), scaler=None, step=0, state=None, optimizers=self.known)

        def record(loss):
            session.add_loss(loss)
            session.record()
            session.note(lr=self.known[0].param_groups[0]["lr"])

        self.train(record, session.advance)
        session.end()
        return session.monitor


class Tiny(Loop):
    """Gradients that are not 0, and updates far below the rounding of the weights."""

    lr = 1e-12


class TinyLate(Loop):
    """The same with Adam, which divides by an eps that is far larger than the gradients."""

    def optimizers(self):
        return [torch.optim.Adam(self.model.parameters(), lr=1e-4, eps=1e4)]


class GroupOfRate0(Loop):
    rates = 0.05, 0.0

    def optimizers(self):
        groups = zip((self.model.body, self.model.head), self.rates, strict=True)
        return [torch.optim.SGD([{"params": part.parameters(), "lr": rate} for part, rate in groups], lr=1.0)]


class FirstGroupOfRate0(GroupOfRate0):
    rates = 0.0, 0.05


class OptimizerWithAGroupOfRate0(Loop):
    """The second group of the second optimizer."""

    def optimizers(self):
        head = [{"params": [self.model.head.weight]}, {"params": [self.model.head.bias], "lr": 0.0}]
        return [torch.optim.SGD(self.model.body.parameters(), lr=0.05), torch.optim.SGD(head, lr=0.05)]


class EveryRate0(Loop):
    lr = 0.0


class UnknownRates(torch.optim.Optimizer):
    """Gradient descent with a rate that the host cannot read, here because it has two elements."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=float(torch.as_tensor(group["lr"]).max()))


class UnknownRate(Loop):
    def optimizers(self):
        rates = 0.05, torch.zeros(2)
        groups = zip((self.model.body, self.model.head), rates, strict=True)
        return [UnknownRates([{"params": part.parameters(), "lr": rate} for part, rate in groups], {})]


class Forgotten(Loop):
    def optimizers(self):
        return [torch.optim.SGD(self.model.body.parameters(), lr=self.lr)]


class NoBackward(Loop):
    def backward(self, loss):
        pass


class ClearedTooEarly(Loop):
    def before_step(self):
        self.model.zero_grad()


class Detached(Loop):
    def loss(self, x):
        return super().loss(x).detach()

    def backward(self, loss):
        pass


class Constant(Loop):
    """Gradients of exactly 0, while weight decay changes the weights."""

    def optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)]

    def loss(self, x):
        return super().loss(x) * 0


class AllFrozen(Loop):
    """The model is used, but something else is trained."""

    def build(self):
        self.prompt = nn.Parameter(torch.zeros(8))
        return Net().requires_grad_(False)

    def optimizers(self):
        return [torch.optim.SGD([self.prompt, *self.model.parameters()], lr=0.05)]

    def loss(self, x):
        return super().loss(x + self.prompt)


class TakenAway(Loop):
    """An optimizer that steps in the backward, as to save memory."""

    def optimizers(self):
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05)

        def take(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(take)
        return [inner]


class Target(Loop):
    """A target network that follows by a moving average."""

    def build(self):
        return WithTarget()

    def optimizers(self):
        return [torch.optim.Adam(self.model.online.parameters(), lr=0.01)]

    def loss(self, x):
        with torch.no_grad():
            wanted = self.model.target(x) * 0.9 + 1
        return (self.model(x) - wanted).square().mean()

    def after_step(self):
        with torch.no_grad():
            for a, b in zip(self.model.target.parameters(), self.model.online.parameters(), strict=True):
                a.lerp_(b, 0.05)


class HardTarget(Target):
    """A target network that is overwritten, by a large change."""

    def optimizers(self):
        return [torch.optim.Adam(self.model.online.parameters(), lr=1e-4)]

    def after_step(self):
        with torch.no_grad():
            for p in self.model.target.parameters():
                p.neg_()


class FrozenCopy(Target):
    """A copy that is kept, as the original module of an adapter."""

    def build(self):
        model = WithTarget()
        model.target.requires_grad_(False)
        return model

    def after_step(self):
        pass


class Copied(Loop):
    def build(self):
        return Tied()


class Bfloat16(Loop):
    lr = 1e-6

    def build(self):
        return Net().bfloat16()

    def loss(self, x):
        return (self.model(x.bfloat16()).float() - x.roll(1, 1)).square().mean()


class Masters(Bfloat16):
    """An optimizer of float32 copies, written by hand."""

    def optimizers(self):
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        return [torch.optim.AdamW(self.masters, lr=self.lr)]

    def before_step(self):
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()

    def after_step(self):
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)

    def clear(self, _):
        self.model.zero_grad()


class GradientsMovedToMasters(Masters):
    """No gradient is left at the model's parameters when the optimizer steps."""

    def before_step(self):
        super().before_step()
        self.model.zero_grad()


class MastersInside(Bfloat16):
    def optimizers(self):
        return [OwnMasters(self.model.parameters(), self.lr)]


class GradientsMovedInside(MastersInside):
    """The optimizer is given the gradients of its master weights."""

    def before_step(self):
        for master, parameter in zip(self.known[0].masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None


class MastersOfRareChanges(Masters):
    """So few weights, and updates so small, that none changes in this run."""

    lr = 1e-9


class MastersNotWritten(Masters):
    lr = 0.01

    def after_step(self):
        pass


class MastersInsideNotWritten(Bfloat16):
    """The optimizer forgets to write its master weights to the parameters."""

    def optimizers(self):
        optimizer = OwnMasters(self.model.parameters(), 0.01)
        optimizer.write = False
        return [optimizer]


class MastersNotCleared(Masters):
    """`zero_grad` of an optimizer that holds the masters clears nothing of the model."""

    lr = 1e-3

    def clear(self, optimizers):
        optimizers[0].zero_grad()


class Lookahead(Bfloat16):
    """An optimizer with slow weights, which are copies that keep no small updates."""

    def optimizers(self):
        (optimizer,) = super().optimizers()
        optimizer.slow = [p.detach().float() for p in self.model.parameters()]
        return [optimizer]

    def after_step(self):
        with torch.no_grad():
            for slow, p in zip(self.known[0].slow, self.model.parameters(), strict=True):
                if self.number % 5 == 4:
                    p.copy_(slow.lerp_(p.float(), 0.5))


class OthersOfTheSameShapes(Bfloat16):
    """The body is forgotten; the optimizer holds float32 tensors of its shapes, which are no copies."""

    def optimizers(self):
        self.other = nn.Linear(8, 16)
        return [torch.optim.SGD([*self.model.head.parameters(), *self.other.parameters()], lr=0.05)]


class FlatMasters(Loop):
    """A part of the model in bfloat16, and its master weights in one buffer."""

    def build(self):
        model = Net()
        model.body.bfloat16()
        return model

    def loss(self, x):
        return (self.model.head(torch.tanh(self.model.body(x.bfloat16()).float())) - x).square().mean()

    def optimizers(self):
        self.parts = list(self.model.body.parameters())
        self.flat = torch.cat([p.detach().float().flatten() for p in self.parts]).requires_grad_()
        return [torch.optim.AdamW([self.flat, *self.model.head.parameters()], lr=1e-6)]

    def before_step(self):
        self.flat.grad = torch.cat([p.grad.float().flatten() for p in self.parts])

    def after_step(self):
        with torch.no_grad():
            for p, part in zip(self.parts, self.flat.split([p.numel() for p in self.parts]), strict=True):
                p.copy_(part.view_as(p))

    def clear(self, _):
        self.model.zero_grad()


class GroupOfRate0InBfloat16(Bfloat16):
    def optimizers(self):
        return GroupOfRate0.optimizers(self)

    rates = 0.05, 0.0


class LaterRates(GroupOfRate0):
    """The second group gets another learning rate in a step."""

    at, later = 8, 0.0
    rates = 0.05, 0.05

    def after_step(self):
        if self.number == self.at:
            self.known[0].param_groups[1]["lr"] = self.later


class TinyThenRate0(LaterRates):
    at, rates = 5, (0.05, 1e-12)


class Rate0ThenTiny(LaterRates):
    at, rates, later = 11, (0.05, 0.0), 1e-12


class OtherRateNoted(EveryRate0):
    """A scalar that is not the learning rate of a group, though its name contains lr."""

    def watch(self):
        self.known = self.optimizers()
        with gm.watch(self.model, self.known, **self.options) as monitor:
            self.train(lambda loss: monitor.note(loss=loss, base_lr=3e-4), lambda: None)
        return monitor


class Unfrozen(Loop):
    at = 15

    def build(self):
        model = Net()
        model.body.requires_grad_(False)
        return model

    def before_step(self):
        if self.number == self.at:
            self.model.body.requires_grad_(True)


class Rate0ThenUnfrozen(Unfrozen):
    """The rate falls to 0; later, a part is thawed that no optimizer holds."""

    at = 9

    def optimizers(self):
        groups = [{"params": [p]} for p in self.model.head.parameters()]
        return [torch.optim.SGD(groups, lr=0.05)]

    def after_step(self):
        if self.number == 5:
            self.known[0].param_groups[0]["lr"] = 0.0


class ForgottenAndNotCleared(Forgotten):
    lr = 1e-3

    def clear(self, _):
        pass


class NaNThenDetached(Loop):
    """A step with a NaN is skipped; later, the gradient of other tensors is lost."""

    def before_step(self):
        if self.number == 4:
            self.model.head.weight.grad[0, 0] = float("nan")

    def step(self, optimizers):
        if self.number != 4:
            super().step(optimizers)

    def loss(self, x):
        hidden = torch.tanh(self.model.body(x))
        return (self.model.head(hidden if self.number < 13 else hidden.detach()) - x).square().mean()


class StochasticRounding(Bfloat16):
    def optimizers(self):
        (optimizer,) = super().optimizers()
        optimizer.param_groups[0]["bf16_stochastic_round"] = True
        return [optimizer]


class Adapters(Loop):
    def build(self):
        return Adapted()

    def optimizers(self):
        return [torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)]


class AlternateOptimizers(Loop):
    """The first of two optimizers steps only in the first steps."""

    def optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.model.body, self.model.head)]

    def step(self, optimizers):
        for optimizer in optimizers[self.number >= 3 :]:
            optimizer.step()


class TeacherInEvalMode(Loop):
    """A model in evaluation mode beside the one that is trained."""

    def build(self):
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))

    def watched(self):
        self.teacher = copy.deepcopy(self.model).eval()
        return {"student": self.model, "teacher": self.teacher}

    def loss(self, x):
        with torch.no_grad():
            wanted = self.teacher(x) + 1
        return (self.model(x) - wanted).square().mean()


class NotCleared(Loop):
    """The gradients of what no optimizer holds add up, which is of no consequence."""

    in_place = False

    def build(self):
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])

    def optimizers(self):
        return [torch.optim.SGD([self.model[7].weight], lr=1e-3)]

    def clear(self, optimizers):
        optimizers[0].zero_grad(set_to_none=not self.in_place)


class NotClearedInPlace(NotCleared):
    in_place = True


class NaN(Loop):
    def before_step(self):
        if self.number == 12:
            self.model.head.weight.grad[0, 0] = float("nan")


HELD = r"optimizer does not hold|not called|holds other parameters|create the optimizer with"
RECORD = r"record\(\)|monitor\.record|advance\(\)"
# loop, how it is watched, what is found: rule -> severity and texts, and what no message or advice says
SITUATIONS = [
    (Tiny, "watch", {"not_updated": ("warning", "the optimizer holds them", "rounding of float32")}, HELD),
    (TinyLate, "watch", {"not_updated": ("warning", "the optimizer holds them")}, f"{HELD}|float32 master"),
    (Tiny, "trainer", {"not_updated": ("warning", "the optimizer holds them")}, f"{HELD}|watched"),
    (Tiny, "monitor", {"not_updated": ("warning", "optimizer.step() is not called", "rounding of")}, "is 0,"),
    (GroupOfRate0, "watch", {"not_updated": ("info", "head (2 tensors)", "param group is 0")}, HELD),
    (GroupOfRate0, "trainer", {"not_updated": ("info", "head (2 tensors)", "param group is 0")}, HELD),
    (GroupOfRate0, "monitor", {"not_updated": ("warning", "the learning rate of their group is 0, or")}, "!"),
    (
        FirstGroupOfRate0,
        "watch",
        {"learning_rate": ("info", "while others do"), "not_updated": ("info", "body (2 tensors)")},
        f"{HELD}|nothing is learned",
    ),
    (OptimizerWithAGroupOfRate0, "watch", {"not_updated": ("info", "head.bias", "group is 0")}, HELD),
    (EveryRate0, "watch", {"learning_rate": ("warning", "lr is 0 since step 0")}, f"{HELD}|while others"),
    (UnknownRate, "watch", {"not_updated": ("warning", "holds them", "its learning rate is 0")}, HELD),
    (Forgotten, "watch", {"not_updated": ("warning", "no watched optimizer holds these")}, "step.. is not"),
    (Forgotten, "trainer", {"not_updated": ("warning", "no optimizer holds these")}, "step.. is not|watched"),
    (NoBackward, "watch", {"no_gradients": ("warning", "optimizer.step() finds no gradient")}, RECORD),
    (
        ClearedTooEarly,
        "watch",
        {"loop_order": ("warning", "cleared between backward() and optimizer.step()", "zero_grad() last or")},
        RECORD,
    ),
    (ClearedTooEarly, "monitor", {"no_gradients": ("warning", "record() is called after zero_grad()")}, "!"),
    (Detached, "trainer", {"no_gradients": ("warning", "does not depend")}, f"{RECORD}|backward.. is not"),
    (Constant, "watch", {"no_gradients": ("warning", "weight decay or momentum alone")}, RECORD),
    (Constant, "monitor", {"no_gradients": ("warning", "weight decay or momentum alone")}, "which must"),
    (AllFrozen, "watch", {"no_gradients": ("warning", "every parameter", "is frozen")}, f"{RECORD}|another"),
    (TakenAway, "watch", {"no_gradients": ("warning", "steps in the backward")}, RECORD),
    (TakenAway, "monitor", {"no_gradients": ("warning", "steps in the backward")}, "which must"),
    (Target, "watch", {"no_gradient_flow": ("info", "no watched optimizer holds them")}, "tied"),
    (Target, "monitor", {"no_gradient_flow": ("warning", "no gradient flows to target")}, "tied"),
    (
        HardTarget,
        "watch",
        {"no_gradient_flow": ("info", "no watched optimizer")},
        "all updates|target.*norm|tied",
    ),
    (FrozenCopy, "watch", {"no_gradient_flow": ("info", "target (2 tensors): frozen")}, "tied"),
    (FrozenCopy, "monitor", {"no_gradient_flow": ("info", "target (2 tensors): frozen")}, "tied"),
    (Copied, "watch", {"untied": ("warning", "embedding.weight and head.weight had equal values")}, "!"),
    (Bfloat16, "watch", {"stuck": ("warning", "smaller than the rounding of bfloat16")}, f"{HELD}|are lost"),
    (Bfloat16, "monitor", {"stuck": ("warning", "smaller than the rounding of bfloat16")}, "are lost"),
    (Masters, "watch", {}, "rounding|master"),
    # it cannot know of the master weights, so it has to be right with and without
    (Masters, "monitor", {"stuck": ("warning", "smaller than the rounding")}, r"are lost|; use an optimizer"),
    (
        GradientsMovedInside,
        "watch",
        {"no_gradients": ("warning", "moves them to master weights")},
        r"record\(\)|is not called",
    ),
    # the gradients of the master weights are recorded
    (GradientsMovedToMasters, "watch", {}, "!"),
    (MastersInside, "watch", {}, "rounding|master"),
    (MastersInside, "trainer", {}, "rounding|master"),
    (StochasticRounding, "watch", {}, "rounding|master"),
    *[
        (loop, how, {"not_updated": ("warning", "master weights are not written to these parameters")}, HELD)
        for loop in (MastersNotWritten, MastersInsideNotWritten)
        for how in ("watch", "trainer")
    ],
    (MastersOfRareChanges, "watch", {}, "rounding|master"),
    (MastersNotCleared, "watch", {"loop_order": ("warning", "gradients are not cleared since step 0")}, "!"),
    (Lookahead, "watch", {"stuck": ("warning", "rounding of bfloat16", "unless float32 master")}, HELD),
    (
        OthersOfTheSameShapes,
        "watch",
        {"stuck": ("warning", "no optimizer holds this", "unless the optimizer holds a copy of them, pass")},
        "; pass",
    ),
    (
        FlatMasters,
        "watch",
        {"stuck": ("warning", "no optimizer holds this", "unless the optimizer")},
        "; pass",
    ),
    *[
        (GroupOfRate0InBfloat16, how, {"not_updated": ("info", "head (2 tensors)", "param group is 0")}, HELD)
        for how in ("watch", "trainer")
    ],
    (LaterRates, "watch", {"not_updated": ("warning", "since step 10", "param group has fallen to 0")}, HELD),
    (TinyThenRate0, "watch", {"not_updated": ("warning", "since step 6", "has fallen to 0")}, HELD),
    (Rate0ThenTiny, "watch", {"not_updated": ("warning", "since step 12", "optimizer holds them")}, HELD),
    (OtherRateNoted, "watch", {"learning_rate": ("warning", "lr is 0 since step 0")}, "while others"),
    *[
        (Unfrozen, how, {"no_gradient_flow": ("info", "body (2 tensors): frozen")}, "no gradient flows")
        for how in ("watch", "monitor")
    ],
    (
        ForgottenAndNotCleared,
        "watch",
        {"not_updated": ("warning", "no watched optimizer"), "loop_order": ("warning", "are not cleared")},
        "step.. is not",
    ),
    (
        NaNThenDetached,
        "monitor",
        {"nonfinite": ("error", "1 NaN"), "no_gradient_flow": ("warning", "flows to body", "since step 13")},
        "!",
    ),
    (
        AlternateOptimizers,
        "watch",
        {"no_gradient_flow": ("warning", "or their optimizer does not step")},
        "!",
    ),
    (TeacherInEvalMode, "monitor", {"no_gradient_flow": ("warning", "teacher")}, "evaluation mode"),
    (TeacherInEvalMode, "watch", {"no_gradient_flow": ("info", "teacher")}, "evaluation mode"),
    (NotCleared, "watch", {"not_updated": ("warning", "(15 tensors)")}, "add up"),
    (NotClearedInPlace, "watch", {"not_updated": ("warning", "(15 tensors)")}, "add up"),
    (NaN, "watch", {"nonfinite": ("error", "head.weight.grad, 1 NaN")}, r"monitor\.skip_step"),
    (NaN, "trainer", {"nonfinite": ("error", "head.weight.grad, 1 NaN")}, r"monitor\.skip_step|check_finite"),
    (NaN, "monitor", {"nonfinite": ("error", "head.weight.grad, 1 NaN", "(monitor.skip_step)")}, "!"),
]


@pytest.mark.parametrize(
    ("loop", "how", "wanted", "never"),
    SITUATIONS,
    ids=[f"{loop.__name__}-{how}" for loop, how, *_ in SITUATIONS],
)
def test_the_messages_fit_the_situation(loop, how, wanted, never):
    monitor = getattr(loop(), how)()
    assert monitor.failures == {}
    shown = {finding: f"{finding} || {finding.advice}" for finding in monitor.findings}
    for rule, (severity, *texts) in wanted.items():
        of_rule = [text for finding, text in shown.items() if finding.rule == rule]
        assert of_rule, list(shown.values())
        assert of_rule[0].startswith(severity), of_rule
        for text in texts:
            assert text in of_rule[0]
    assert [text for text in shown.values() if re.search(never, text)] == []
    problems = {headline.rule for headline in headlines(shown) if headline.severity > Severity.INFO}
    expected = {rule for rule, (severity, *_) in wanted.items() if severity != "info"}
    assert problems == expected, list(shown.values())


@pytest.mark.parametrize(
    ("loop", "says"),
    [(GradientsMovedInside, "moves them to master weights"), (TakenAway, "steps in the backward")],
)
def test_without_weights_the_message_names_what_else_may_take_the_gradients(loop, says):
    (found,) = loop(weights=False, updates=False).watch().findings
    assert found.rule == "no_gradients"
    assert says in found.message
    assert "another model" not in found.message


def test_what_rounding_of_the_optimizer_keeps_needs_no_master_weights():
    (found,) = StochasticRounding(updates=False).watch().findings
    assert (found.rule, found.severity) == ("not_updated", Severity.WARNING)
    assert "which the optimizer makes up for, or other code writes the weights" in found.message
    assert "master" not in f"{found.message} {found.advice}"


def test_master_weights_of_which_some_have_a_learning_rate_of_0():
    class SomeOfRate0(MastersNotWritten):
        def optimizers(self):
            (optimizer,) = super().optimizers()
            optimizer.add_param_group({"params": [torch.zeros(3)], "lr": 0.0})
            return [optimizer]

    (found,) = SomeOfRate0().trainer().findings
    assert found.message.endswith("not written to these parameters, or have a learning rate of 0")


def test_adapters_that_start_at_0_do_not_explain_that_the_base_is_frozen():
    found = headlines(Adapters().watch().findings)
    assert {one.rule for one in found} >= {"initialization", "no_gradient_flow"}
    assert {one.rule: one.explained for one in found}["initialization"] == ()


def test_a_rate_of_0_explains_what_stays_the_same_in_its_group_alone():
    found = {one.message: one for one in headlines(Rate0ThenUnfrozen().watch().findings)}
    (rate,) = [one for one in found.values() if one.rule == "learning_rate"]
    (of_group,) = rate.explained
    assert of_group.message.endswith("the learning rate of their param group has fallen to 0")
    (left_out,) = [one for one in found.values() if one.rule == "not_updated"]
    assert left_out.message.startswith("body (2 tensors)")
    assert "no watched optimizer holds these" in left_out.message


def test_a_step_that_a_scaler_skips_needs_no_advice_to_skip_it():
    class Scaled(NaN):
        def backward(self, loss):
            self.scaler.scale(loss).backward()

        def step(self, optimizers):
            self.scaler.step(optimizers[0])
            self.scaler.update()

    loop = Scaled()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    (found,) = [one for one in loop.watch(scaler=loop.scaler).findings if one.rule == "nonfinite"]
    assert found.severity == Severity.INFO
    assert found.advice.startswith("look for a division by 0")


def test_a_norm_above_the_threshold_is_called_usual_only_with_a_past():
    model, rule, messages = nn.Linear(8, 1), Exploding(), []
    recorder = gm.Recorder(model, thresholds=gm.Thresholds(exploding=1.0))
    for _ in range(STEPS):
        model(torch.full((1, 8), 10.0)).sum().backward()
        recorder.record()
        recorder.advance()
        (found,) = rule.check(recorder.read()[-1])
        messages.append(found.message)
        model.zero_grad()
    assert messages[0].endswith("is above the threshold 1")
    assert messages[-1].endswith("is above the threshold 1, as usual for it")
