"""Layers with LoRA adapters whose own weights are trained as well."""

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.rules import BaseNotFrozen, Severity, headlines

# names in a layer, as of peft, torchtune, loralib and others
STYLES = {
    "peft": ("base_layer.weight", ["lora_A.default.weight", "lora_B.default.weight"]),
    "dora": ("base_layer.weight", ["lora_A.default.weight", "lora_magnitude_vector.default.weight"]),
    "peft of embeddings": ("base_layer.weight", ["lora_embedding_A.default", "lora_embedding_B.default"]),
    "torchtune": ("weight", ["lora_a.weight", "lora_b.weight", "magnitude"]),
    "loralib": ("weight", ["lora_A", "lora_B"]),
    "base": ("base.weight", ["lora_a", "lora_b"]),
    "linear": ("linear.weight", ["lora.A", "lora.B"]),
}
LAYERS = ("base_model.model.layers.0.q", "base_model.model.layers.1.q")
# trained on purpose
BESIDE = (
    "base_model.model.embed.weight",
    "base_model.model.layers.0.norm.weight",
    "base_model.model.head.modules_to_save.default.weight",
    "base_model.model.score.weight",
)


def put(module, path):
    """Register a parameter under a name with dots."""
    *parts, last = path.split(".")
    for part in parts:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]
    module.register_parameter(last, nn.Parameter(torch.ones(4, 4)))


def adapted(style, *, frozen=True):
    """Return a model with adapters in two layers; its base weights are frozen, or none of them."""
    base, adapters = STYLES[style]
    model = nn.Module()
    for name in (*[f"{layer}.{x}" for layer in LAYERS for x in (base, "bias", *adapters)], *BESIDE):
        put(model, name)
    for name, p in model.named_parameters():
        p.requires_grad_(not (frozen and name.endswith(f"q.{base}")))
    return model


def findings_of(model, optimizer=None, steps=3, rate_of=None):
    """Train a sum of squares."""
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with gm.watch(model, optimizer, rules=[BaseNotFrozen()]) as monitor:
        for step in range(steps):
            for group in optimizer.param_groups if rate_of is not None else ():
                group["lr"] = rate_of(step)
            optimizer.zero_grad()
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
    assert monitor.failures == {}
    return monitor.findings


@pytest.mark.parametrize("style", STYLES)
def test_a_base_that_is_trained_is_found(style):
    (found,) = findings_of(adapted(style, frozen=False))
    base = f"{LAYERS[0]}.{STYLES[style][0]}"
    assert (found.rule, found.severity, found.count) == ("base_not_frozen", Severity.WARNING, 1)
    assert (found.tensor, found.first_step) == (base, 0)
    assert found.message == (
        "the base weights of 2 layers with LoRA adapters are trained as well, with the learning rate 0.1, "
        f"beginning with {base}"
    )
    assert found.advice.startswith("freeze them")
    assert [headline.rule for headline in headlines([found])] == ["base_not_frozen"]


@pytest.mark.parametrize("style", STYLES)
def test_heads_norms_embeddings_and_biases_are_trained_on_purpose(style):
    assert findings_of(adapted(style)) == []


def test_one_of_two_layers():
    model = adapted("peft")
    model.get_parameter(f"{LAYERS[1]}.base_layer.weight").requires_grad_()
    (found,) = findings_of(model)
    assert "the base weights of 1 layer with LoRA adapters are" in found.message
    assert found.tensor == f"{LAYERS[1]}.base_layer.weight"


def test_a_base_that_no_optimizer_changes_is_quiet():
    model = adapted("peft", frozen=False)
    adapters = [p for name, p in model.named_parameters() if "lora" in name]
    bases = [p for name, p in model.named_parameters() if "lora" not in name]
    assert findings_of(model, torch.optim.SGD(adapters, lr=0.1)) == []
    groups = [{"params": adapters}, {"params": bases, "lr": 0.0}]
    assert findings_of(model, torch.optim.SGD(groups, lr=0.1)) == []
    # its adapters are frozen instead, as in a full training that goes before
    for p in adapters:
        p.requires_grad_(requires_grad=False)
    assert findings_of(model) == []


def test_a_learning_rate_of_its_own_is_on_purpose():
    model = adapted("peft", frozen=False)
    adapters = [p for name, p in model.named_parameters() if "lora" in name]
    bases = [p for name, p in model.named_parameters() if "lora" not in name]
    groups = [{"params": adapters}, {"params": bases, "lr": 1e-3}]
    (found,) = findings_of(model, torch.optim.SGD(groups, lr=0.1))
    assert found.severity == Severity.INFO


def test_a_warm_up_from_0_is_waited_for():
    model = adapted("base", frozen=False)
    (found,) = findings_of(model, rate_of=lambda step: 0.1 * step)
    assert found.first_step == 1


def test_a_low_rank_part_of_an_architecture_is_no_adapter():
    model = nn.Module()
    for name in (
        "att.w_lora.lora.0.weight",
        "att.w_lora.lora.2.weight",
        "att.q.weight",
        "att.lora_norm.bias",
    ):
        put(model, name)
    assert findings_of(model) == []


def test_its_history_is_saved():
    one, other = BaseNotFrozen(), BaseNotFrozen()
    one.is_done = True
    other.load_state_dict(one.state_dict())
    assert other.is_done
