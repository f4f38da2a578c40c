"""What the host reads of the optimizers: the groups, their learning rates, and copies of the parameters."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gradiometer.monitor.optimizer_reader import OptimizerReader


def read(optimizers, parameters):
    state = OptimizerReader(optimizers, parameters).read(afresh=True)
    assert state is not None
    return state


def test_the_groups_of_all_optimizers_are_counted_together():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = [*a.parameters(), *b.parameters(), *c.parameters()]
    first = torch.optim.SGD([{"params": [a.weight], "lr": 0.1}, {"params": [a.bias], "lr": 0.0}])
    second = torch.optim.SGD(b.parameters(), lr=0.3)
    state = read([first, second], parameters)
    assert state.groups == (0, 1, 2, 2, -1, -1)
    assert (state.rates, state.owners) == ((0.1, 0.0, 0.3), (0, 0, 1))
    assert state.held.tolist() == [True] * 4 + [False] * 2
    assert state.is_frozen.tolist() == [False, True] + [False] * 4
    measured = torch.tensor([True, False] + [False] * 4)
    assert state.idle(measured).tolist() == [False, False, True, True, False, False]
    assert not read([second], parameters).idle(~measured).any()


def test_a_state_is_the_same_object_until_a_rate_or_a_group_changes():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    reader = OptimizerReader([optimizer], list(layer.parameters()))
    state = reader.read(afresh=True)
    assert reader.read(afresh=True) is reader.read(afresh=False) is state
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    changed = reader.read(afresh=False)
    assert changed.rates == (pytest.approx(0.05),)
    assert changed.groups is state.groups
    optimizer.add_param_group({"params": [layer.bias]})
    assert reader.read(afresh=False).groups == (0, 1)


@pytest.mark.parametrize("rate", [None, torch.zeros(2), torch.zeros((), device="meta"), "fast"])
def test_a_rate_that_is_not_a_number_on_the_host_is_unknown(rate):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    state = read([optimizer], list(layer.parameters()))
    assert state.rates == (None,)
    assert state.highest_rate is None
    assert not state.is_frozen.any()


def test_without_optimizers_or_after_one_is_gone_nothing_is_known():
    layer = nn.Linear(2, 2)
    parameters = list(layer.parameters())
    assert OptimizerReader([], parameters).read(afresh=True) is None
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
    reader = OptimizerReader(optimizers, parameters)
    assert reader.read(afresh=True) is not None
    del optimizers[1]
    gc.collect()
    assert reader.read(afresh=True) is None


def half():
    torch.manual_seed(0)
    return nn.Linear(4, 4).bfloat16()


def assert_state(optimizer, parameters, *, keeps, has_masters, has_others=False):
    state = read([optimizer], parameters)
    assert state.keeps_small_updates.tolist() == [keeps] * 2
    assert state.has_masters.tolist() == [has_masters] * 2
    assert state.has_others == has_others


# attributes of an optimizer, and whether they hold master weights
ATTRIBUTES = {
    "groups_of_masters": (lambda parameters: [[p.detach().float() for p in parameters]], True),
    "fp32_copies": (lambda parameters: {p: p.detach().double() for p in parameters}, True),
    "inside": (lambda parameters: torch.optim.SGD([p.detach().float() for p in parameters], lr=0.1), True),
    # of the same shapes and a wider dtype, but no copies
    "moments": (lambda parameters: [torch.zeros_like(p, dtype=torch.float32) for p in parameters], False),
    # equal at the start, as in Lookahead
    "slow": (lambda parameters: [p.detach().float() for p in parameters], False),
    "before": (lambda parameters: [p.detach().clone() for p in parameters], False),
    "own": (list, False),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_master_weights_in_an_attribute_keep_small_updates(name):
    make, are_masters = ATTRIBUTES[name]
    parameters = list(half().parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    setattr(optimizer, name, make(parameters))
    assert_state(optimizer, parameters, keeps=are_masters, has_masters=are_masters)


@pytest.mark.parametrize(("key", "are_masters"), [("master_param", True), ("exp_avg", False)])
def test_master_weights_in_the_state_keep_small_updates(key, are_masters):
    parameters = list(half().parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for p in parameters:
        optimizer.state[p][key] = p.detach().float()
    assert_state(optimizer, parameters, keeps=are_masters, has_masters=are_masters)


def test_what_the_groups_say_of_small_updates():
    parameters = list(half().parameters())
    masters = torch.optim.SGD([p.detach().float() for p in reversed(parameters)], lr=0.1)
    assert_state(masters, parameters, keeps=True, has_masters=True, has_others=True)
    rounded = torch.optim.SGD([{"params": parameters, "bf16_stochastic_round": True}], lr=0.1)
    assert_state(rounded, parameters, keeps=True, has_masters=False)
    others = torch.optim.SGD([torch.rand_like(p, dtype=torch.float32) for p in parameters], lr=0.1)
    assert_state(others, parameters, keeps=False, has_masters=False, has_others=True)


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_master_weights_are_written_back_if_the_parameters_are_written_again_and_again(writes):
    model = half()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    reader = OptimizerReader([optimizer], list(model.parameters()))
    state = reader.read(afresh=True)
    for _ in range(writes):
        # the values stay the same
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        state = reader.read(afresh=False)
        assert reader.read(afresh=True) is reader.read(afresh=False) is state
    assert state.unwritten.tolist() == [writes < 3] * 2
    assert state.has_masters.all()


def test_a_copy_is_that_of_one_parameter():
    """Equal parameters, such as biases that start at 0, need a copy each."""
    model = nn.ModuleList([nn.Linear(2, 2).bfloat16() for _ in range(3)])
    for layer in model:
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD([p.detach().float() for p in model[:2].parameters()], lr=0.1)
    assert read([optimizer], list(model.parameters())).has_masters.tolist() == [True] * 4 + [False] * 2


def test_master_weights_of_some_parameters_only():
    model = nn.ModuleList([half(), nn.Linear(4, 4)])
    masters = [p.detach().float() for p in model[0].parameters()]
    optimizer = torch.optim.SGD([*masters, *model[1].parameters()], lr=0.1)
    state = read([optimizer], list(model.parameters()))
    assert state.groups == (-1, -1, 0, 0)
    assert state.keeps_small_updates.tolist() == [True, True, False, False]


def test_the_hyperparameters_of_each_group_are_numbers_by_name():
    layer = torch.nn.Linear(2, 1)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.0, "mode": "plain"}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-6)
    reader = OptimizerReader([optimizer], list(layer.parameters()))

    state = reader.read(afresh=True)

    adam = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6}
    assert state.options == (adam | {"weight_decay": 0.01}, adam | {"weight_decay": 0.0})
    optimizer.param_groups[1]["weight_decay"] = 0.5
    assert reader.read(afresh=False).options[1]["weight_decay"] == 0.5
    assert reader.read(afresh=False) is reader.read(afresh=False)
