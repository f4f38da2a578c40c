"""A model's named parameters from a kept walk, against ``nn.Module.named_parameters``, after any change."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gradiometer.inputs import module_walk, named_parameters

if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    """A residual block with a parameter of its own, and a bias that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.norm = nn.LayerNorm(2)
        self.mlp = nn.Sequential(nn.Linear(2, 4, bias=False), nn.GELU(), nn.Linear(4, 2))
        self.last = nn.Parameter(torch.ones(2))


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(3, 2), Block(), Block(), nn.Linear(2, 3, bias=False))


def assert_named(model: nn.Module) -> None:
    """Compare names and objects, from a first call and from one that may use its plan."""
    expected = list(model.named_parameters())
    for _ in range(2):
        names, parameters = named_parameters(model, "test")
        assert names == tuple(name for name, _ in expected)
        assert list(map(id, parameters)) == [id(parameter) for _, parameter in expected]


def refused(*_: Any, **__: Any) -> Any:
    pytest.fail("named_parameters was called")


def assert_planned(model: nn.Module) -> None:
    named = named_parameters(model, "test")
    with patch.object(nn.Module, "named_modules", refused):
        again = named_parameters(model, "test")
    assert again.names == named.names
    assert list(map(id, again.tensors)) == list(map(id, named.tensors))


def moved_to_the_next_module(model: nn.Module) -> None:
    """The names of the level stay the same, in the same order."""
    first, second = model[1].mlp[2], nn.Module()
    second.register_parameter("weight", nn.Parameter(torch.ones(1)))
    model[1].mlp = nn.Sequential(first, second)
    assert_named(model)
    second._parameters = {"bias": first._parameters.pop("bias"), **second._parameters}


def renamed(model: nn.Module) -> None:
    kept = dict(model._modules)
    model._modules.clear()
    model._modules.update({f"layer{name}": module for name, module in kept.items()})


def swapped(model: nn.Module) -> None:
    model._modules["1"], model._modules["2"] = model._modules["2"], model._modules["1"]


def tied_to_an_earlier_level(model: nn.Module) -> None:
    model[1].mlp[0].weight = model[3].weight


def untied(model: nn.Module) -> None:
    model[3].weight = model[0].weight
    assert_named(model)
    model[3].weight = nn.Parameter(torch.ones(3, 2))


def no_longer_shared(model: nn.Module) -> None:
    model[2].mlp = model[1].mlp
    assert_named(model)
    model[2].mlp = copy.deepcopy(model[1].mlp)


def named_twice(model: nn.Module) -> None:
    """None and a parameter change places, so which values are equal stays the same."""
    linear = model[1].mlp[0]
    linear._parameters.update(weight=None, bias=linear.weight)


def class_with_its_own_names(model: nn.Module) -> None:
    class Own(nn.Sequential):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            yield from [(f"own.{name}", p) for name, p in super().named_parameters(*args, **options)]

    assert_named(model)
    model.__class__ = Own


def object_with_its_own_names(model: nn.Module) -> None:
    model.named_parameters = lambda *_, **__: iter([("only", model[0].weight)])  # type: ignore[method-assign]


def part_with_its_own_modules(model: nn.Module) -> None:
    class Hiding(nn.Linear):
        def named_modules(self, *_: Any, **__: Any) -> Any:
            return iter(())

    model[3] = Hiding(2, 3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "parameter replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 2))),
    "parameter added": lambda m: m[1].register_parameter("more", nn.Parameter(torch.ones(1))),
    "parameter deleted": lambda m: delattr(m[1], "scale"),
    "parameter set to None": lambda m: setattr(m[1].mlp[2], "bias", None),
    "bias given": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(3))),
    "tied": lambda m: setattr(m[3], "weight", m[0].weight),
    "tied to an earlier level": tied_to_an_earlier_level,
    "untied": untied,
    "None and parameter changed places": named_twice,
    "module replaced": lambda m: setattr(m[1], "norm", nn.Linear(1, 1)),
    "module replaced by one of the same names": lambda m: setattr(m[1], "norm", nn.LayerNorm(2)),
    "module added": lambda m: m.append(nn.Linear(1, 1)),
    "module added to a leaf": lambda m: m[1].mlp[1].add_module("adapter", nn.Linear(1, 1)),
    "module deleted": lambda m: m.__delitem__(2),
    "module set to None": lambda m: setattr(m[1], "norm", None),
    "module shared": lambda m: setattr(m[2], "mlp", m[1].mlp),
    "module no longer shared": no_longer_shared,
    "modules swapped": swapped,
    "modules renamed": renamed,
    "cycle": lambda m: m[1].mlp[1].add_module("back", m[2]),
    "cycle to the root": lambda m: m[1].add_module("back", m),
    "parametrized": lambda m: parametrizations.weight_norm(m[3]),
    "parametrized twice": lambda m: (
        parametrizations.orthogonal(m[3]),
        parametrizations.weight_norm(m[1].mlp[2]),
    ),
    "direct write of a parameter": lambda m: m[3]._parameters.update(weight=nn.Parameter(torch.ones(1))),
    "direct write of a module": lambda m: m._modules.update({"1": nn.Linear(1, 1)}),
    "other dict of parameters": lambda m: setattr(m[1], "_parameters", {"x": nn.Parameter(torch.ones(1))}),
    "other dict of modules": lambda m: setattr(m[1], "_modules", {"x": nn.Linear(1, 1)}),
    "other type of dict": lambda m: setattr(m[1], "_parameters", OrderedDict(m[1]._parameters)),
    "parameter moved to the next module": moved_to_the_next_module,
    "moved to another dtype": lambda m: m.to(torch.float64),
    "class with its own names": class_with_its_own_names,
    "object with its own names": object_with_its_own_names,
    "part with its own modules": part_with_its_own_modules,
    "compiled in place": lambda m: m.compile(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str) -> None:
    model = model_of()
    assert_named(model)
    CHANGES[change](model)
    assert_named(model)


def test_parametrizations_removed() -> None:
    model = model_of()
    parametrizations.weight_norm(model[3])
    assert_named(model)
    parametrize.remove_parametrizations(model[3], "weight")
    assert_named(model)


@pytest.mark.parametrize(
    "change",
    ["nothing", "tied", "module shared", "cycle to the root", "parametrized", "parameter set to None"],
)
def test_an_unchanged_model_is_not_asked_again(change: str) -> None:
    model = model_of()
    CHANGES[change](model)
    assert_planned(model)


@pytest.mark.parametrize("model", [nn.Linear(1, 1, bias=False), nn.Embedding(2, 2), nn.LSTM(2, 2)])
def test_models_of_one_module(model: nn.Module) -> None:
    assert_planned(model)
    assert_named(model)


def test_models_without_parameters() -> None:
    for model in (nn.ReLU(), nn.Sequential(), nn.LayerNorm(2, elementwise_affine=False)):
        assert_named(model)


def test_wrappers_leave_the_names() -> None:
    model = model_of()
    wrapped = torch.compile(model)
    assert named_parameters(wrapped, "test").names == named_parameters(model, "test").names
    inner = nn.Sequential(torch.compile(nn.Linear(1, 1)))
    for _ in range(2):
        assert named_parameters(inner, "test").names == ("0.weight", "0.bias")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_models() -> None:
    assert_named(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))


def test_a_plan_keeps_nothing_alive_and_is_not_copied() -> None:
    model = model_of()
    parameter, part, root = weakref.ref(model[0].weight), weakref.ref(model[1]), weakref.ref(model)
    before = set(vars(model))
    assert_planned(model)
    assert set(vars(model)) == before
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    for other in (copy.deepcopy(model), torch.load(memory, weights_only=False)):
        assert_named(other)
        assert not set(map(id, other.parameters())) & set(map(id, named_parameters(model, "test").tensors))
    model[1] = nn.Linear(1, 1)
    gc.collect()
    assert part() is None
    del model
    gc.collect()
    assert root() is None
    assert parameter() is None


def test_something_else_than_dicts() -> None:
    class Dicts(dict):  # type: ignore[type-arg] # no parameters are hidden from torch, only from dict's own methods
        def values(self) -> Any:
            return [nn.Parameter(torch.ones(1))]

    model = model_of()
    model[1]._parameters = Dicts(model[1]._parameters)
    assert_named(model)
    assert module_walk._walks.get(model) is None
    model = model_of()
    assert_named(model)
    model[1]._parameters = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        named_parameters(model, "test")


class Tree(RuleBasedStateMachine):
    """Random writes to the dicts of a model's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of()
        self.modules: list[nn.Module] = list(self.model.modules())
        self.parameters: list[nn.Parameter | None] = [*self.model.parameters(), None]

    module = st.integers(0, 2**30)
    name = st.sampled_from(["weight", "bias", "0", "1", "norm", "mlp"])

    def pick(self, choices: list[Any], place: int) -> Any:
        return choices[place % len(choices)]

    @rule(module=module, name=name, place=module)
    def write_parameter(self, module: int, name: str, place: int) -> None:
        self.pick(self.modules, module)._parameters[name] = self.pick(self.parameters, place)

    @rule(module=module, name=name)
    def new_parameter(self, module: int, name: str) -> None:
        self.parameters.append(nn.Parameter(torch.ones(1)))
        self.pick(self.modules, module)._parameters[name] = self.parameters[-1]

    @rule(module=module, name=name, place=module)
    def write_module(self, module: int, name: str, place: int) -> None:
        self.pick(self.modules, module)._modules[name] = self.pick([*self.modules, None], place)

    @rule(module=module, name=name)
    def new_module(self, module: int, name: str) -> None:
        self.modules.append(nn.Linear(1, 1, bias=False))
        self.pick(self.modules, module)._modules[name] = self.modules[-1]

    @rule(module=module, kind=st.sampled_from(["_parameters", "_modules"]), place=module)
    def remove(self, module: int, kind: str, place: int) -> None:
        held = getattr(self.pick(self.modules, module), kind)
        if held:
            del held[self.pick(list(held), place)]

    @rule(module=module, kind=st.sampled_from(["_parameters", "_modules"]))
    def reorder(self, module: int, kind: str) -> None:
        held = getattr(self.pick(self.modules, module), kind)
        if held:
            first = next(iter(held))
            held[first] = held.pop(first)

    @invariant()
    def is_like_torch(self) -> None:
        assert_named(self.model)


TestTree = Tree.TestCase
