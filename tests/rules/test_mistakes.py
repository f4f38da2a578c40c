"""The mistakes that everybody makes: each is named in the first headline within 20 recorded steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 its usual name

import gradiometer as gm
from gradiometer.rules import Severity, headlines
from support.real_runs import digits

pytestmark = pytest.mark.usefixtures("_one_thread")

STEPS = 45


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(self.encoder(x.flatten(1))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        tokens = (x.flatten(1).argsort(dim=1) % 32)[:, :8]
        return self.head(torch.tanh(self.mix(self.embedding(tokens)).mean(1)))


class Loop:
    """One training loop, with a hook for every place at which people make mistakes."""

    lr = 0.05

    def __init__(self, **options):
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(1)
        self.model = self.build()
        self.options = {"weights": True, "updates": True} | options

    def build(self):
        return Net()

    def watched(self):
        return self.model

    def parameters(self):
        return list(self.model.parameters())

    def criterion(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def before(self):
        self.optimizer.zero_grad()

    def backward(self, loss):
        loss.backward()

    def between(self):
        pass

    def update(self):
        self.optimizer.step()

    def rate(self):
        return self.lr

    def shown(self, loss):
        return loss

    def go(self, steps=STEPS):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        with gm.Monitor(self.watched(), **self.options) as monitor:
            for self.step in range(steps):
                x, y = digits(32, self.generator)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate()
                self.before()
                loss = self.criterion(x, y)
                self.backward(loss)
                self.between()
                monitor.record()
                self.update()
                monitor.advance(loss=self.shown(loss), lr=self.rate())
        assert monitor.failures == {}
        return monitor.findings


class ClearedBeforeRecord(Loop):
    def between(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self):
        pass


class ZeroedBeforeRecord(ClearedBeforeRecord):
    def between(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class NoBackward(Loop):
    def backward(self, loss):
        pass


class OtherModel(Loop):
    def watched(self):
        return copy.deepcopy(self.model)


class Detached(Loop):
    def criterion(self, x, y):
        model = self.model
        return F.cross_entropy(model.head(model.body(model.encoder(x.flatten(1)).detach())), y)


class Frozen(Loop):
    def build(self):
        model = Net()
        model.body.requires_grad_(False)
        return model


class FlowStops(Loop):
    def criterion(self, x, y):
        model = self.model
        encoded = model.encoder(x.flatten(1))
        return F.cross_entropy(model.head(model.body(encoded.detach() if self.step >= 10 else encoded)), y)


class MissingFromOptimizer(Loop):
    def parameters(self):
        return [p for name, p in self.model.named_parameters() if not name.startswith("body.0")]


class NoStep(Loop):
    def update(self):
        pass


class NoZeroGrad(Loop):
    def before(self):
        pass


class RateFallsToZero(Loop):
    def rate(self):
        return self.lr if self.step < 20 else 0.0


class RateJumps(Loop):
    def rate(self):
        return 1000 * self.lr if self.step == 30 else self.lr


class NothingAveraged(Loop):
    def criterion(self, x, y):
        return F.cross_entropy(self.model(x), torch.full_like(y, -100) if self.step == 30 else y)


class EmptyMask(Loop):
    def criterion(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        return losses[losses < -1 if self.step == 30 else losses > -1].mean()


class Large(Loop):
    def build(self):
        model = Net()
        with torch.no_grad():
            model.body[0].weight.mul_(100)
        return model


class Zero(Loop):
    def build(self):
        model = Net()
        nn.init.zeros_(model.body[0].weight)
        nn.init.zeros_(model.body[0].bias)
        nn.init.zeros_(model.body[2].weight)
        return model


class Constant(Loop):
    def build(self):
        model = Net()
        nn.init.constant_(model.body[0].weight, 0.03)
        return model


class Copied(Loop):
    def build(self):
        model = Tied()
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        return model


class Untied(Loop):
    def build(self):
        return Tied()

    def between(self):
        if self.model.head.weight is self.model.embedding.weight and self.ready:
            self.model.head.weight = nn.Parameter(self.model.embedding.weight.detach().clone())
        self.ready = True

    ready = False


class EvalMode(Loop):
    def before(self):
        super().before()
        if self.step == 15:
            self.model.eval()


class Rounded(Loop):
    lr = 1e-7

    def build(self):
        return Net().to(torch.bfloat16)

    def criterion(self, x, y):
        return F.cross_entropy(self.model(x.bfloat16()).float(), y)


# mistake, its rule, the step at which it begins, and what the headline says
MISTAKES = [
    (ClearedBeforeRecord, "no_gradients", 0, "record() is called after zero_grad()"),
    (ZeroedBeforeRecord, "no_gradients", 0, "record() is called after zero_grad()"),
    (NoBackward, "no_gradients", 0, "backward() is not called"),
    (OtherModel, "no_gradients", 0, "the loss does not depend on the watched model"),
    (Detached, "no_gradient_flow", 0, "no gradient flows to encoder (4 tensors)"),
    (Frozen, "no_gradient_flow", 0, "body (4 tensors): frozen"),
    (FlowStops, "no_gradient_flow", 10, "no gradient flows to encoder (4 tensors), since step 10"),
    (MissingFromOptimizer, "not_updated", 0, "body.0 (2 tensors): the weights stay exactly the same"),
    (NoStep, "not_updated", 0, "optimizer.step() is not called"),
    (NoZeroGrad, "accumulating", 0, "zero_grad() is not called"),
    (RateFallsToZero, "learning_rate", 20, "lr has fallen to 0 at step 20"),
    (RateJumps, "learning_rate", 30, "lr was 50 at step 30, usually 0.05"),
    (NothingAveraged, "nonfinite", 30, "mean over nothing"),
    (EmptyMask, "nonfinite", 30, "mean over nothing"),
    (Large, "initialization", 0, "body.0.weight: weights start with rms"),
    (Zero, "initialization", 0, "weights are still 0, as at the start"),
    (Constant, "initialization", 0, "weights are equal, 0.03"),
    (Copied, "untied", 0, "copies, not tied weights"),
    (Untied, "untied", 1, "tied no more"),
    (EvalMode, "eval_mode", 15, "1 BatchNorm1d, 1 Dropout behave as in inference"),
    (Rounded, "stuck", 0, "smaller than the rounding of bfloat16"),
]


@pytest.mark.parametrize(
    ("mistake", "rule", "onset", "text"), MISTAKES, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_mistake_is_named_in_the_first_headline(mistake, rule, onset, text):
    steps = onset + 20
    found = headlines(mistake().go(steps))
    assert found, "nothing was found"
    first = found[0]
    assert first.rule == rule, [str(one) for one in found]
    assert text in first.message, first.message
    assert abs(first.first_step - onset) <= 2
    assert first.advice


class ClearedInPlace(Loop):
    def before(self):
        self.optimizer.zero_grad(set_to_none=False)


class ClearedAsData(Loop):
    def before(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()


class ClearedAtTheEnd(Loop):
    def update(self):
        super().update()
        self.optimizer.zero_grad()


class Clipped(Loop):
    def between(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class RateEndsAtZero(Loop):
    def rate(self):
        return self.lr * max(0.0, 1 - self.step / 57)


class FrozenLater(Loop):
    def before(self):
        if self.step == 30:
            self.model.encoder.requires_grad_(False)
        super().before()


class EvaluatesInEachStep(Loop):
    def before(self):
        self.model.train()
        super().before()

    def update(self):
        super().update()
        self.model.eval()


@pytest.mark.parametrize(
    "loop",
    [
        FrozenLater,
        EvaluatesInEachStep,
        Loop,
        ClearedInPlace,
        ClearedAsData,
        ClearedAtTheEnd,
        Clipped,
        RateEndsAtZero,
    ],
)
def test_a_loop_without_a_mistake_is_quiet(loop):
    assert [str(one) for one in loop().go(60) if one.severity > Severity.INFO] == []


def test_without_weights_and_without_the_graph_of_the_loss_the_message_names_what_is_possible():
    class Bare(NoBackward):
        def shown(self, loss):
            return loss.item()

    (found,) = Bare(weights=False, updates=False).go(20)
    assert found.rule == "no_gradients"
    for cause in ("backward() is not called", "record() is called after zero_grad()", "another model is"):
        assert cause in found.message
    assert "steps in the backward" in found.message


def test_a_jump_of_the_learning_rate_explains_what_follows():
    found = headlines(RateJumps().go(60))
    assert [one.rule for one in found if one.severity > Severity.INFO] == ["learning_rate"]
    assert len(found[0].explained) > 0
    assert math.isfinite(found[0].findings[0].value)
