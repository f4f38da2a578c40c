"""Optimizers inside wrappers, and optimizers of master weights, under `gm.watch`."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.integrations.optimizers import masters_of, optimizers_in
from support.watching import Sink

LOSS = nn.functional.mse_loss


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def norm(parameters):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))


# wrappers, as the packages write them


class Lookahead(torch.optim.Optimizer):
    """Changes the weights after the optimizer inside; its own hooks do not work, as in some packages."""

    def __init__(self, optimizer):
        self.optimizer, self.number = optimizer, 0
        self.slow = [p.detach().clone() for p in self.params()]

    def params(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        self.number += 1
        if self.number % 2 == 0:
            for slow, p in zip(self.slow, self.params(), strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Private(torch.optim.Optimizer):
    """Replaces the gradients, and skips some steps, as Opacus' DPOptimizer; it has no hooks."""

    def __init__(self, optimizer, every=1):
        self.original_optimizer, self.every, self.number = optimizer, every, 0

    @property
    def param_groups(self):
        return self.original_optimizer.param_groups

    def step(self, closure=None):
        self.number += 1
        if self.number % self.every:
            return None
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / 2
        return self.original_optimizer.step(closure)


class ScheduleFree:
    """No Optimizer; changes the weights before and after the one inside."""

    def __init__(self, base):
        self.base = base

    @property
    def param_groups(self):
        return self.base.param_groups

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
        self.base.step()
        for p in self.param_groups[0]["params"]:
            p.mul_(2)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Changes nothing; steps at the end of accumulation only."""

    def __init__(self, optimizer):
        self.optimizer, self.is_due = optimizer, True

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        if self.is_due:
            self.optimizer.step(closure)


class Container(torch.optim.Optimizer):
    """Several optimizers of one model, as torchtitan's OptimizersContainer."""

    def __init__(self, optimizers):
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {})
        self.optimizers = optimizers

    def step(self):
        for each in self.optimizers:
            each.step()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


WRAPPERS = {
    "lookahead": (lambda m: Lookahead(sgd(m)), 1),
    "private": (lambda m: Private(sgd(m)), 0.5),
    "schedule-free": (lambda m: ScheduleFree(sgd(m)), 1),
    "accelerated": (lambda m: AcceleratedOptimizer(sgd(m)), 1),
    "two wrappers": (lambda m: AcceleratedOptimizer(Lookahead(sgd(m))), 1),
    "container": (
        lambda m: Container([sgd(m[0]), torch.optim.Adam(m[2].parameters(), lr=0.01)]),
        1,
    ),
}


@pytest.mark.parametrize(("make", "factor"), WRAPPERS.values(), ids=WRAPPERS)
def test_gradients_are_those_inside_and_updates_are_those_of_the_whole_step(make, factor):
    model, sink, norms, moved = model_of(), Sink(), [], []
    twin = copy.deepcopy(model)

    def train(model, optimizer):
        for step in range(6):
            x, y = batch(step)
            loss = LOSS(model(x), y)
            loss.backward()
            norms.append(factor * norm(model.parameters()))
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            pairs = zip(before, model.parameters(), strict=True)
            moved.append(math.sqrt(sum(float((a - b.detach()).double().square().sum()) for a, b in pairs)))
            for p in model.parameters():
                p.grad = None

    optimizer = make(model)
    with gm.watch(model, optimizer, sinks=[sink], weights=True, updates=True) as monitor:
        train(model, optimizer)
    assert (monitor.failures, monitor.findings) == ({}, [])
    assert sink.totals == pytest.approx(norms)
    found = [float(record.value("norm", "updates").norm()) for record in sink.records]
    assert found == pytest.approx(moved, rel=1e-6)
    assert "step" not in vars(optimizer)

    train(twin, make(twin))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_steps_that_a_wrapper_leaves_out_are_no_steps():
    model, sink = model_of(), Sink()
    optimizer = Private(sgd(model), every=2)
    with gm.watch(model, optimizer, sinks=[sink], rules=(), updates=True) as monitor:
        for step in range(6):
            x, y = batch(step)
            LOSS(model(x), y).backward()
            optimizer.step()
    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2])


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapper_with_a_scaler_and_a_schedule(inside):
    model, sink, norms = model_of(), Sink(), []
    optimizer = Lookahead(sgd(model)) if inside else AcceleratedOptimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with gm.watch(model, optimizer, scaler=scaler, sinks=[sink], rules=(), updates=True) as monitor:
        # a scheduler binds the step that it finds
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if inside else None
        for step in range(4):
            x, y = batch(step)
            scaler.scale(LOSS(model(x), y)).backward()
            norms.append(norm(model.parameters()) / 8)
            scaler.step(optimizer)
            scaler.update()
            for p in model.parameters():
                p.grad = None
            if schedule is not None:
                schedule.step()
    assert (monitor.failures, sink.steps) == ({}, [0, 1, 2, 3])
    assert sink.totals == pytest.approx(norms)


def test_a_watched_wrapper_can_be_copied():
    model = model_of()
    optimizer = ScheduleFree(sgd(model))
    with gm.watch(model, optimizer, rules=()):
        copied = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 our own
        assert type(copied.base) is torch.optim.SGD
    copied.step()


def test_several_clear_inner_optimizers_have_to_be_passed_one_by_one():
    class Two(Lookahead):
        def __init__(self, optimizer, other):
            super().__init__(optimizer)
            self.other = other

    model = model_of()
    with pytest.raises(TypeError, match=r"this Two holds several optimizers, in \.optimizer and \.other"):
        gm.watch(model, Two(sgd(model), torch.optim.Adam(model.parameters())))


def test_an_optimizer_of_something_else_inside_is_no_inner_optimizer():
    class Meta(torch.optim.SGD):
        pass

    model = model_of()
    optimizer = Meta(model.parameters(), lr=0.1)
    optimizer.of_the_rate = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    (found,) = optimizers_in(optimizer)
    assert (found.optimizer, found.outer) == (optimizer, None)


# master weights


def master_model():
    model = model_of().bfloat16()
    return model, [p.detach().float().requires_grad_() for p in model.parameters()]


def train_masters(model, masters, optimizer, steps=4, clip=None, write=True):
    norms, moved = [], []
    for step in range(steps):
        x, y = batch(step)
        LOSS(model(x.bfloat16()), y.bfloat16()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        norms.append(norm(masters))
        if clip is not None:
            nn.utils.clip_grad_norm_(masters, clip)
        before = [master.detach().clone() for master in masters]
        optimizer.step()
        pairs = zip(before, masters, strict=True)
        moved.append(math.sqrt(sum(float((a - b.detach()).double().square().sum()) for a, b in pairs)))
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True) if write else ():
                parameter.copy_(master)
    return norms, moved


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("order", ["same", "groups", "reversed"])
def test_gradients_and_updates_are_those_of_the_masters(clip, order):
    model, masters = master_model()
    # smaller than the rounding of bfloat16
    lr = 1e-4
    held = {"same": masters, "reversed": masters[::-1]}.get(order)
    groups = held or [{"params": masters[1::2]}, {"params": masters[::2]}]
    optimizer, sink = torch.optim.SGD(groups, lr=lr), Sink()
    with gm.watch(model, optimizer, sinks=[sink], weights=True, updates=True) as monitor:
        norms, moved = train_masters(model, masters, optimizer, clip=clip)
    assert (monitor.failures, monitor.findings) == ({}, [])
    assert sink.totals == pytest.approx(norms)
    found = [float(record.value("norm", "updates").norm()) for record in sink.records]
    assert found == pytest.approx(moved, rel=1e-6)
    assert sink.records[0].names("updates") == sink.records[0].names()


def test_parameters_that_the_optimizer_holds_itself_beside_masters():
    model, _ = master_model()
    model[2].float()
    masters = [p.detach().float().requires_grad_() for p in model[0].parameters()]
    names = {p: name for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([*model[2].parameters(), *masters], lr=0.1)
    found = masters_of(optimizer, names)
    assert {names[p]: master for p, master in found.items()} == {"0.weight": masters[0], "0.bias": masters[1]}


@pytest.mark.parametrize("what", ["other weights", "narrower", "another sign of zero"])
def test_what_is_no_copy_bit_for_bit_is_refused(what):
    model, masters = master_model()
    with torch.no_grad():
        if what == "other weights":
            masters[2][0, 3] *= 1.01
        elif what == "narrower":
            masters[2] = model[2].weight.detach().clone().to(torch.float8_e4m3fn)
        else:
            model[2].weight[0, 3] = 0.0
            masters[2][0, 3] = -0.0
    with pytest.raises(ValueError, match=r"not equal to the parameters in their dtype"):
        gm.watch(model, torch.optim.SGD(masters, lr=0.1))


def test_equal_parameters_are_paired_in_their_order_or_refused():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).bfloat16()
    with torch.no_grad():
        for layer in model:
            layer.bias.zero_()
    names = {p: name for name, p in model.named_parameters()}
    masters = {name: p.detach().float() for p, name in names.items()}
    biases, weights = [[masters[f"{i}.{kind}"] for i in range(3)] for kind in ("bias", "weight")]
    # one group for all biases: in order
    found = masters_of(torch.optim.SGD([{"params": biases}, {"params": weights[::-1]}], lr=0.1), names)
    assert {names[p]: id(master) for p, master in found.items()} == {n: id(m) for n, m in masters.items()}
    # a group for each layer, the last first: which of the equal biases is whose cannot be known
    groups = [{"params": [weights[i], biases[i]]} for i in (2, 1, 0)]
    with pytest.raises(ValueError, match=r"'0.bias' and '1.bias' are equal, so which master"):
        masters_of(torch.optim.SGD(groups, lr=0.1), names)


def test_masters_that_are_not_written_back_are_named():
    model, masters = master_model()
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with gm.watch(model, optimizer, weights=True, updates=True) as monitor:
        train_masters(model, masters, optimizer, steps=20, write=False)
    (found,) = [finding for finding in monitor.findings if finding.severity > gm.rules.Severity.INFO]
    assert found.rule == "not_updated"
    assert "master weights are not written to these parameters" in found.message
