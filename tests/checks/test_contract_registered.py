import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gradiometer.checks import check_model

torch.set_num_threads(1)
VALUES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def result(model, batch=VALUES, **options):
    return check_model(model, batch, only=["registered"], **options)["registered"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.added(self.body(x))

    def added(self, x):
        return x


class InList(Model):
    def __init__(self):
        super().__init__()
        self.parts = [nn.Linear(8, 8), nn.Linear(8, 8)]

    def added(self, x):
        return self.parts[1](self.parts[0](x))


class Plain(Model):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(8, requires_grad=True)

    def added(self, x):
        return x * self.scale


class Buffer(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def added(self, x):
        return x * self.scale


class Made(Model):
    def added(self, x):
        return x @ nn.Parameter(torch.ones(8, 8))


class Closure(Model):
    def __init__(self):
        super().__init__()
        layer, forward = nn.Linear(8, 8), self.body.forward
        self.body.forward = lambda x: layer(forward(x))


class Hook(Model):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(8, 8)
        self.body.register_forward_hook(lambda *args: layer(args[-1]))


class Teacher(Model):
    """Keeps a frozen model out of its parameters on purpose."""

    def __init__(self):
        super().__init__()
        self.teacher = [nn.Linear(8, 8).requires_grad_(False)]

    def added(self, x):
        return x - self.teacher[0](x)


class Activations(Model):
    """Lets a hidden state require a gradient, as for checkpoints."""

    def forward(self, x):
        return self.body(x.detach().requires_grad_())


@pytest.mark.parametrize("kind", [Model, Teacher, Activations])
def test_it_holds(kind):
    assert str(result(kind()).status) == "holds"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (InList, "4 parameters with 144 elements in the list parts, not registered"),
        (Plain, "1 tensor with 8 elements in the attribute scale, not registered"),
        (Buffer, "the buffer scale requires a gradient"),
        (Made, "1 parameter with 64 elements created in forward, of shape (8, 8)"),
        (Closure, "2 parameters with 72 elements in the closure of body.forward, not registered"),
        (Hook, "2 parameters with 72 elements in the closure of body.hook, not registered"),
    ],
)
def test_it_names_what_is_not_registered(kind, text):
    found = result(kind())
    assert found.is_failure
    assert text in found.text


def test_a_weight_that_is_a_plain_tensor():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    weight = model[0].weight.detach()
    del model[0].weight
    model[0].weight = weight
    found = result(model)
    assert found.is_failure
    assert found.text == "0.weight is a plain tensor, which is not trained"


def test_pruned_weights_are_computed_of_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    nn.utils.parametrizations.weight_norm(model[1])
    assert str(result(model).status) == "holds"


class Constant(Model):
    """Lets a constant require a gradient."""

    def added(self, x):
        return x + torch.zeros(8, requires_grad=True)


def test_a_constant_that_requires_a_gradient_is_only_noted():
    found = result(Constant())
    assert found.evidence
    assert not found.is_failure


def test_what_an_optimizer_holds_is_meant():
    model = InList()
    extra = [p for layer in model.parts for p in layer.parameters()]
    optimizer = torch.optim.SGD([*model.parameters(), *extra], 0.1)
    assert str(result(model, optimizer=optimizer).status) == "holds"


def test_a_model_without_a_graph():
    assert str(result(Model().requires_grad_(False)).status) == "does not apply"


def test_inputs_that_require_gradients_are_not_parameters():
    assert str(result(Model(), VALUES.clone().requires_grad_()).status) == "holds"
