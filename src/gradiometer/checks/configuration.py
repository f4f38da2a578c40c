"""The contract of the configuration: modules, sizes and batch agree with the config and with one another."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from math import isclose
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from gradiometer.checks.batch_values import batch_differences
from gradiometer.checks.contract import contract
from gradiometer.checks.made_again import differences, plain, roots
from gradiometer.checks.probe import DROPOUTS
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.checks.siblings import Siblings, odd_one, siblings
from gradiometer.rules import Severity
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

EPS: Final = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps")
_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")
_WORDS: Final = ("vocab_size", "vocabulary_size", "n_vocab", "num_embeddings")
# what layers that are made alike have in common; other attributes may follow a pattern
_COMMON: Final = re.compile(
    r"^(eps|epsilon|variance_epsilon|p|batch_first|norm_first|approximate|negative_slope|.*activation.*|act|act_fn|num_heads|"
    r"n_heads?|head_dim|n_kv_heads|is_causal|causal|is_decoder|scale|scaling|.*dropout.*)$"
)
_PAIR: Final = ("weight", "bias")
# classes of which siblings have the same one
_KINDS: Final = (
    re.compile(r"elu|silu|swish|mish|tanh|sigmoid|activation", re.IGNORECASE),
    re.compile(r"Norm"),
)
# of two layers, either may be the one that is meant
_ALWAYS: Final = re.compile(
    r"^(eps|epsilon|variance_epsilon|is_causal|causal|batch_first|norm_first|head_dim)$"
)


@contract(
    "configuration", "modules agree with the config, with their siblings and with the batch", is_static=True
)
def configuration(probe: Probe) -> Iterator[Evidence]:
    """Build the modules again from the config, without values, and compare their attributes."""
    made = [] if probe.is_sharded else roots(probe.model)
    for path, module, again in made:
        yield from differences(path, module, again)
    groups = siblings(probe.model)
    config = _values(getattr(probe.model, "config", None))
    norms = list(_norms(probe.model))
    rates = Counter(x.p for x in probe.model.modules() if isinstance(x, DROPOUTS))
    if not (made or groups or config or norms or probe.batch.labels):
        raise NotApplicable("the model has neither a config nor repeated layers")
    for group in siblings(probe.model, equal_shapes=True):
        if not any(
            group.path == path or group.path.startswith(f"{path}." if path else "") for path, _, _ in made
        ):
            yield from _odd_layers(group, rates)
    for group in groups:
        yield from _frozen_in_part(group)
    yield from _frozen_halves(probe.model, groups)
    if not made:
        yield from _against(config, probe)
    yield from _extremes(probe.model)
    if not probe.is_sharded:
        yield from _position_ids(probe.model)
        yield from batch_differences(probe, config)


# siblings


def _odd_layers(group: Siblings, rates: Counter[float]) -> Iterator[Evidence]:
    """Compare attributes of modules at the same place in each layer."""
    for path, modules in group.inside():
        names = [type(x).__name__ for x in modules]
        if len(set(names)) > 1:
            index = odd_one(names)
            if index is not None and any(all(map(kind.search, names)) for kind in _KINDS):
                yield _odd(group, index, path, "class", names, Severity.WARNING)
            continue
        for key in vars(modules[0]):
            values = [plain(vars(x).get(key)) for x in modules]
            if not _COMMON.match(key) or not all(isinstance(x, bool | int | float | str) for x in values):
                continue
            if key == "p" and not isinstance(modules[0], DROPOUTS):
                continue
            index = odd_one(values)
            if index is not None:
                # rates may differ in the first or the last layer
                at_end = index in {0, len(values) - 1} and _is_dropout(modules[0], key)
                noted = (at_end or len(values) == 2) and not (
                    _ALWAYS.match(key) or _is_alone(key, values, rates)
                )
                yield _odd(group, index, path, key, values, Severity.INFO if noted else Severity.WARNING)
        for key, value in modules[0].named_buffers(recurse=False):
            if key.endswith("inv_freq") and value is not None and value.device.type != "meta":
                rows = [x._buffers.get(key) for x in modules]  # noqa: SLF001
                texts = [str(x.tolist()) if isinstance(x, torch.Tensor) else "" for x in rows]
                index = odd_one(texts)
                if index is not None:
                    name = group.name(index, f"{path}.{key}".lstrip("."))
                    yield Evidence(
                        f"{name} differs from that of the other layers",
                        name,
                        advice="give the rotary positions of all layers the same base and head size",
                    )


def _is_alone(key: str, values: list[Any], rates: Counter[float]) -> bool:
    """Return whether one layer drops another share than all other modules of the model."""
    known = [rates[x] for x in set(values)] if key == "p" else []
    return len(rates) == 2 and 0.0 not in rates and 1 in known and rates.total() > 3


def _odd(group: Siblings, index: int, path: str, key: str, values: list[Any], severity: Severity) -> Evidence:
    name, other = group.name(index, path), 0 if index else 1
    return Evidence(
        f"{name}: {key} is {_text(values[index])}, but {_text(values[other])} in {group.name(other, path)}"
        + (" and the other layers" if len(values) > 2 else ""),
        name,
        _number(values[index]),
        _number(values[other]),
        "use the same value in all layers, unless they differ on purpose",
        severity,
    )


def _frozen_in_part(group: Siblings) -> Iterator[Evidence]:
    """Find parameters that are frozen, while most others of the layer are trained, and those of siblings."""
    tables = [dict(layer.named_parameters()) for layer in group.layers]
    trained = [{name for name, p in table.items() if p.requires_grad} for table in tables]
    for index, table in enumerate(tables):
        frozen = [name for name in table if name not in trained[index]]
        share = sum(table[name].numel() for name in frozen)
        if 2 * share >= sum(p.numel() for p in table.values()):
            continue
        for name in frozen:
            if any(name in other for other in trained):
                full = group.name(index, name)
                yield Evidence(
                    f"{full} is frozen, while the rest of its layer and the same parameter of others "
                    "are trained",
                    full,
                    advice="set requires_grad to True, or freeze the whole layer or all such parameters",
                )


def _frozen_halves(model: nn.Module, groups: list[Siblings]) -> Iterator[Evidence]:
    """Find modules of a model that is mostly trained of which only one of several parameters is frozen."""
    every = dict(model.named_parameters())
    frozen = [name for name, p in every.items() if not p.requires_grad]
    if not frozen or 4 * len(frozen) >= len(every):
        return
    # one module alone is hardly meant
    alone = len({name.rpartition(".")[0] for name in frozen}) == 1
    layers = {group.name(i) for group in groups for i in range(len(group.layers))}
    for name in frozen:
        path, _, own = name.rpartition(".")
        if any(name.startswith(f"{layer}.") for layer in layers):
            continue
        module = model.get_submodule(path)
        others = [key for key, p in module.named_parameters(recurse=False) if p.requires_grad]
        # fixed positions may be beside a trained token
        if own in _PAIR and any(key in _PAIR for key in others):
            yield Evidence(
                f"{name} is frozen, while {shortened(others)} of the same module is trained",
                name,
                advice=f"set requires_grad of {own} to True, or freeze the whole module",
            )
        elif isinstance(module, nn.Linear) or "Norm" in type(module).__name__:
            yield Evidence(
                f"{name} is frozen, while most of the model is trained",
                name,
                advice="set requires_grad to True, unless it is frozen on purpose",
                severity=Severity.WARNING if alone else Severity.INFO,
            )


# a config that no class is known for


def _against(config: dict[str, Any], probe: Probe) -> Iterator[Evidence]:
    """Compare modules with values of a config by their names: eps, rates of dropout, layers and words."""
    eps = {
        key: x for key, x in config.items() if re.search(r"(^|_|\.)eps(ilon)?$", key) and isinstance(x, float)
    }
    if eps:
        for name, module, value in _norms(probe.model):
            batch_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001
            if not batch_norm and not any(isclose(value, x) for x in eps.values()):
                key, wanted = next(iter(eps.items()))
                yield _against_one(name, "eps", value, key, wanted)
    rates = {
        key: float(x)
        for key, x in config.items()
        if "drop" in key and "path" not in key and isinstance(x, int | float) and not isinstance(x, bool)
    }
    if rates:
        for name, module in probe.model.named_modules():
            known = [*rates.values(), 0.0] if len(rates) > 1 else list(rates.values())
            if isinstance(module, DROPOUTS) and not any(isclose(module.p, x) for x in known):
                key, wanted = next(iter(rates.items()))
                yield _against_one(name, "p", module.p, key, wanted)
    lists = [
        (name, x) for name, x in probe.model.named_modules() if isinstance(x, nn.ModuleList) and len(x) > 1
    ]
    depths = {key: config[key] for key in _LAYERS if isinstance(config.get(key), int)}
    if depths and len(lists) == 1 and len(lists[0][1]) not in depths.values():
        key, wanted = next(iter(depths.items()))
        yield _against_one(lists[0][0], "length", len(lists[0][1]), key, wanted)
    words = next((key for key in _WORDS if isinstance(config.get(key), int)), None)
    tables = [(n, x.num_embeddings) for n, x in probe.model.named_modules() if isinstance(x, nn.Embedding)]
    name, rows = max(tables, key=lambda x: x[1], default=("", 0))
    if words is not None and 0 < rows < config[words]:
        yield _against_one(name, "num_embeddings", rows, words, config[words])


def _against_one(name: str, what: str, value: float, key: str, wanted: float) -> Evidence:
    return Evidence(
        f"{name}: {what} is {_text(value)}, but config.{key} is {_text(wanted)}",
        name,
        float(value),
        float(wanted),
        "build the module from the config, or update the config",
    )


def _extremes(model: nn.Module) -> Iterator[Evidence]:
    """Find values that no model is meant to have: an eps as large as a variance, dropout of everything."""
    for name, _, value in _norms(model):
        if not 0 <= value <= 0.01:
            yield Evidence(
                f"{name}: eps is {_text(value)}", name, value, 0.01, "use an eps from 1e-12 to 1e-3"
            )
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p >= 0.95:
            text = f"{name}: p is {_text(module.p)}, which drops nearly everything"
            yield Evidence(
                text, name, module.p, 0.95, "p is the fraction that is dropped, not the fraction that is kept"
            )


def _position_ids(model: nn.Module) -> Iterator[Evidence]:
    for name, x in model.named_buffers():
        whole = name.endswith("position_ids") and not x.is_floating_point() and x.dim() > 0 and not x.is_meta
        if whole and bool((x.diff(dim=-1) != 1).any()):
            yield Evidence(f"{name} does not increase by 1", name, advice="use torch.arange(length)")


# details


def _values(config: Any) -> dict[str, Any]:
    """Return the plain values of a config, a mapping or an object with attributes, also of nested ones."""
    if config is None or inspect.isclass(config) or callable(config):
        return {}
    items = config.items() if isinstance(config, Mapping) else getattr(config, "__dict__", {}).items()
    found = {}
    for key, x in items:
        if isinstance(x, bool | int | float | str):
            found[str(key)] = x
        elif hasattr(x, "model_type"):
            # those of an encoder and a decoder, such as text_config
            found |= {f"{key}.{inner}": value for inner, value in _values(x).items()}
    for alias, key in (getattr(config, "attribute_map", None) or {}).items():
        if key in found:
            found.setdefault(alias, found[key])
    return found


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Return each norm with its eps."""
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            value = next((vars(module)[key] for key in EPS if isinstance(vars(module).get(key), float)), None)
            if value is not None:
                yield name, module, value


def _is_dropout(module: nn.Module, key: str) -> bool:
    return isinstance(module, DROPOUTS) or "dropout" in key


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
