"""Whether weights that are meant to be one tensor are one, and no others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.objective import objective
from gradiometer.checks.report import Evidence, NotApplicable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

TIE: Final = (
    "assign the same Parameter to both modules (head.weight = embedding.weight), or call "
    "model.tie_weights(), after the model has been changed or loaded; equal values are not enough"
)
UNTIE: Final = "set config.tie_word_embeddings=True if they should be tied; otherwise give the output its own"
REPEATED: Final = (
    "create a layer for each place, as in nn.ModuleList([Block() for _ in range(n)]); [Block()] * n repeats "
    "one layer"
)
SHARED: Final = "give each module its own Parameter, unless they are tied on purpose"
USED: Final = "use the Parameter itself in the output, not its .data, detach() or clone"


@contract("gradients", "tied weights share one tensor, and no layer is used twice")
def tied_weights(probe: Probe) -> Iterator[Evidence]:
    """Compare the parameters of modules with what the config ties, and with one another."""
    if not any(True for _ in probe.model.parameters()):
        raise NotApplicable("the model has no parameters")
    ties = _ties(probe)
    told: set[str] = set()
    for first, second in ties:
        a, b = _find(probe.model, first), _find(probe.model, second)
        if a is not None and b is not None and a is not b and second not in told:
            told |= {first, second}
            text = f"{second} and {first} are separate tensors, but the config ties them"
            yield Evidence(text, second, 1.0, 0.0, TIE)
    yield from _not_tied(probe)
    yield from _copies(probe, told)
    yield from _repeated(probe, {name for pair in ties for name in pair})
    yield from _used(probe)


def _ties(probe: Probe) -> list[tuple[str, str]]:
    """Return the names of parameters that a model of Hugging Face ties, in pairs."""
    pairs = [
        (str(source), str(target))
        for target, source in (getattr(probe.model, "all_tied_weights_keys", None) or {}).items()
    ]
    config = probe.config
    if config is not None and _is_tied(config):
        weights = [_name_of(probe.model, x) for x in _embeddings(probe)]
        if all(weights):
            pairs.append((weights[0], weights[1]))
    return pairs


def _is_tied(config: Any) -> bool | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", None))
    return found if isinstance(found, bool) else None


def _embeddings(probe: Probe) -> list[nn.Module | None]:
    """Return the input and the output embedding."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(probe.model, name, lambda: None)()
        except Exception:  # noqa: BLE001 models without embeddings
            module = None
        found.append(module if isinstance(getattr(module, "weight", None), Tensor) else None)
    return found


def _name_of(model: nn.Module, module: nn.Module | None) -> str:
    return next((f"{name}.weight" for name, x in model.named_modules() if x is module), "")


def _find(model: nn.Module, name: str) -> Tensor | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _not_tied(probe: Probe) -> Iterator[Evidence]:
    if probe.config is None or _is_tied(probe.config) is not False:
        return
    first, second = _embeddings(probe)
    if first is not None and second is not None and first.weight is second.weight and first is not second:
        text = f"{_name_of(probe.model, second)} is {_name_of(probe.model, first)}, though "
        text += "config.tie_word_embeddings is False"
        yield Evidence(text, _name_of(probe.model, second), 1.0, 0.0, UNTIE)


def _copies(probe: Probe, told: set[str]) -> Iterator[Evidence]:
    """Look for matrices of equal random values that are two parameters."""
    groups: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for name, p in probe.model.named_parameters():
        # vectors often begin with the same formula
        if sum(size > 1 for size in p.shape) >= 2 and p.requires_grad:
            total, last = p.detach().double().sum(), p.detach().reshape(-1)[-1]
            groups.setdefault((p.shape, float(total), float(last)), []).append((name, p))
    for group in groups.values():
        for i, (first, a) in enumerate(group):
            for second, b in group[i + 1 :]:
                if second in told or not _differ(probe, first, second):
                    continue
                if torch.equal(a.detach(), b.detach()) and _is_random(a):
                    told.add(second)
                    text = f"{first} and {second} are separate tensors with equal values"
                    yield Evidence(text, second, 1.0, 0.0, TIE)


def _differ(probe: Probe, first: str, second: str) -> bool:
    """Return whether two names are not those of layers that are copies by design."""
    if re.sub(r"\d+", "#", first) == re.sub(r"\d+", "#", second) or "position" in first + second:
        return False
    modules = [probe.model.get_submodule(name.rpartition(".")[0]) for name in (first, second)]
    is_embedding = all(isinstance(x, nn.Embedding) for x in modules)
    return is_embedding or first.split(".")[-2:] != second.split(".")[-2:]


def _is_random(x: Tensor) -> bool:
    """Return whether most values are different, unlike those of an identity matrix or a table."""
    values = x.detach().reshape(-1)[:10_000].float()
    return bool(values.unique().numel() > 0.5 * values.numel())


def _repeated(probe: Probe, tied: set[str]) -> Iterator[Evidence]:
    """Look for layers that are twice in a list, and for parameters of two modules."""
    told: set[Tensor] = set()
    for path, module in probe.model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        places: dict[nn.Module, list[str]] = {}
        # named_children leaves repetitions out
        for key, child in module._modules.items():  # noqa: SLF001
            if child is not None and any(True for _ in child.parameters()):
                places.setdefault(child, []).append(key)
        for child, keys in places.items():
            if len(keys) < 2:
                continue
            second = f"{path}.{keys[1]}".removeprefix(".")
            if {f"{second}.{name}" for name, _ in child.named_parameters()} <= tied:
                continue
            told |= set(child.parameters())
            text = f"layers {', '.join(keys[:4])} of {path or 'the model'} are the same module"
            yield Evidence(text, second, float(len(keys)), 0.0, REPEATED)
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module in probe.model.named_modules():
        for key, p in module._parameters.items():  # noqa: SLF001
            if p is not None:
                owners.setdefault(p, []).append((f"{path}.{key}".removeprefix("."), module))
    for p, found in owners.items():
        names = [name for name, _ in found]
        is_table = any(isinstance(x, nn.Embedding) or "emb" in name.lower() for name, x in found)
        if len(found) > 1 and p not in told and not is_table and not set(names) & tied:
            yield Evidence(f"{names[0]} and {names[1]} are the same tensor", names[1], 1.0, 0.0, SHARED)


def _used(probe: Probe) -> Iterator[Evidence]:
    """Look at whether a tied output trains the weight: then other tokens than the batch's get gradients."""
    first, second = _embeddings(probe)
    if first is None or second is None or first.weight is not second.weight or first is second:
        return
    weight = first.weight
    if not isinstance(weight, Tensor) or not weight.requires_grad or probe.batch.labels is None:
        return
    used = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    for stream in probe.streams:
        if stream.is_tokens:
            tokens = stream.tensor.reshape(-1)
            used[tokens[(tokens >= 0) & (tokens < len(weight))].long()] = True
    labels = probe.batch.tensors[probe.batch.labels]
    if labels.is_floating_point() or bool(used.all()):
        return
    with probe.differentiated():
        value = objective(probe)
        if not value.requires_grad:
            return
        (g,) = torch.autograd.grad(value, [weight], allow_unused=True)
    if g is not None and not g.is_sparse and bool(g[used].any()) and not bool(g[~used].any()):
        text = (
            f"the output does not train {_name_of(probe.model, first)}: tokens that are not in the batch get "
        )
        yield Evidence(text + "no gradient", _name_of(probe.model, second), 0.0, 0.0, USED)
