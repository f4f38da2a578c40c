"""Whether every trainable parameter gets a gradient, and if not, why."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.objective import objective, some, trainable
from gradiometer.checks.optimizer import held_by
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gradiometer.checks.probe import Probe

DETACHED: Final = (
    "look for detach(), .data, torch.no_grad(), argmax, rounding, NumPy or a copy between this layer and the "
    "loss, and for a reentrant checkpoint none of whose inputs requires a gradient"
)
UNUSED: Final = (
    "look for a result that is overwritten or not returned, and for a layer that is not called; "
    "freeze or remove what is not meant to be trained"
)
STUCK: Final = (
    "initialize only one of two factors to 0, such as the second matrix of LoRA or the last layer of a branch"
)
CANCELS: Final = "remove a bias that cancels out; otherwise check that it is added"
HEAD: Final = (
    "if this loss is not meant to use it, freeze or remove it: DistributedDataParallel raises an error for "
    "parameters without a gradient, unless find_unused_parameters=True"
)
# other inputs and random numbers, and then small steps along the gradient, with which it is tried again
_TRIES, _STEPS = 3, 4
# the largest change of an element in such a step, and the size of what is put in place of zeros
_SIZE: Final = 0.02
# a module with at most this share of the trainable elements may be a head that the loss does not use
_SMALL: Final = 0.2
# adjacent outputs of a layer without a gradient that are not by chance behind a ReLU
_ROWS: Final = 8
# parameters that are used for some inputs only
_SOMETIMES: Final = re.compile(r"mask|seg(ment)?_|token_type|r_s_bias", re.IGNORECASE)
_EXPERT: Final = re.compile(r"expert", re.IGNORECASE)
_HEAD: Final = re.compile(r"pool|head|aux|classif", re.IGNORECASE)


@contract("gradients", "every trainable parameter gets a gradient")
def parameter_gradients(probe: Probe) -> Iterator[Evidence]:
    """Compute the gradients of the loss, or of a random projection of the outputs of a model without one.

    A gradient that is missing or exactly 0 is looked for again with other inputs, and after small steps along
    the gradients of the others: a layer behind a factor that starts at 0 gets one then. What gets none is
    examined with random values in place of zeros.
    """
    names = trainable(probe)
    if "inputs_embeds" in probe.batch.tensors and hasattr(type(probe.model), "get_input_embeddings"):
        # the vectors of tokens are given
        unused = {id(p) for p in probe.model.get_input_embeddings().parameters()}  # type: ignore[operator]
        names = {name: p for name, p in names.items() if id(p) not in unused}
    if not names:
        raise NotApplicable("no parameter is trainable")
    with probe.differentiated():
        missing = without_gradient(probe, names)
        lengths = [x.length for x in probe.streams if x.is_tokens]
        is_short = bool(lengths) and max(lengths) <= 2
        if not missing and not is_short:
            yield from _dead_rows(probe, names)
        if not missing:
            return
        for changes, seed in _others(probe):
            missing = without_gradient(probe, missing, changes, seed)
        if missing and is_short:
            raise NotApplicable("the sequences are too short: attention to one token has no gradient")
        missing = _after_steps(probe, names, missing)
        if not missing:
            return
        dead = _with_random(probe, missing)
        alive = names.keys() - missing.keys()
        stuck = {
            name: p for name, p in missing.items() if name not in dead and not _is_routed(probe, name, alive)
        }
    if stuck:
        yield _never_learns(stuck)
    for root, group in _grouped(probe, names, dead).items():
        # an expert that no token of the batch was sent to
        if not _is_routed(probe, root, alive) or _matters(probe, [names[name] for name in group]):
            yield from _about(probe, root, group, names, dead)


def without_gradient(
    probe: Probe, names: Mapping[str, Tensor], changes: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return the parameters that get no gradient."""
    if not names:
        return {}
    grads = _gradients(probe, list(names.values()), changes, seed)
    return {
        name: p for (name, p), g in zip(names.items(), grads, strict=True) if g is None or not bool(g.any())
    }


def _gradients(
    probe: Probe, parameters: Sequence[Tensor], changes: Mapping[str, Any] | None = None, seed: int = 0
) -> list[Tensor | None]:
    try:
        value = objective(probe, changes, seed)
    except Exception:
        if not changes:
            raise
        # a model that needs certain tokens, such as one at the end
        value = objective(probe, None, seed)
    if not value.requires_grad:
        return [None] * len(parameters)
    # small gradients are 0 in float16
    scale = torch.full_like(value, 1024.0 if probe.dtype == torch.float16 else 1.0)
    grads = torch.autograd.grad(value, parameters, scale, allow_unused=True)
    return [g.coalesce().values() if g is not None and g.is_sparse else g for g in grads]


def _others(probe: Probe) -> Iterable[tuple[dict[str, Any], int]]:
    """Yield other inputs and seeds, for other experts and for layers that are dropped at random."""
    for seed in range(1, _TRIES + 1):
        others = probe.other_inputs(seed).items()
        yield {name: x for name, x in others if name in probe.batch.tensors}, seed


@contextmanager
def _changed(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of parameters that are replaced, not written."""
    before = [(p, p.data) for p in parameters]
    try:
        yield
    finally:
        for p, data in before:
            p.data = data


def _after_steps(probe: Probe, names: Mapping[str, Tensor], missing: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the missing ones that get no gradient after small steps of the others either."""
    parameters = list(names.values())
    # without zeros the steps change nothing
    if not missing or all(bool(p.any()) for p in probe.model.parameters()):
        return missing
    with _changed(parameters):
        for step in range(_STEPS):
            grads = _gradients(probe, parameters, None, step)
            missing = {
                name: p
                for (name, p), g in zip(names.items(), grads, strict=True)
                if name in missing and (g is None or not bool(g.any()))
            }
            if not missing:
                break
            for p, g in zip(parameters, grads, strict=True):
                largest = 0.0 if g is None or g.shape != p.shape else float(g.abs().max())
                if g is not None and 0 < largest < float("inf"):
                    p.data = p.data - (_SIZE / largest) * g
    return missing


def _with_random(probe: Probe, missing: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those that get no gradient with small random values in place of all tensors of zeros either."""
    with random_for_zeros(probe):
        return without_gradient(probe, missing)


@contextmanager
def random_for_zeros(probe: Probe) -> Iterator[None]:
    """Replace parameters of zeros by small random values."""
    zeros = [p for p in probe.model.parameters() if p.is_floating_point() and not bool(p.any())]
    generator = torch.Generator(device="cpu").manual_seed(0)
    with _changed(zeros):
        for p in zeros:
            noise = torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float64)
            p.data = (_SIZE * noise).to(p.device, p.dtype)
        yield


def _never_learns(stuck: Mapping[str, Tensor]) -> Evidence:
    zeros = [name for name, p in stuck.items() if not bool(p.any())]
    name = next(iter(zeros or stuck))
    if zeros:
        text = f"{some(zeros)} start{'s' * (len(zeros) == 1)} at 0, and the gradients are 0 too: "
        text += "no step changes them"
    else:
        text = f"{some(list(stuck))} get no gradient, because frozen weights after them are 0"
    return Evidence(text, name, float(len(stuck)), 0.0, STUCK)


def _grouped(probe: Probe, names: Mapping[str, Tensor], dead: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters by the outermost module all of whose trainable parameters are among them."""
    left = set(dead)
    alive = [name for name in names if name not in left]
    modules = set(probe.names.values())
    groups: dict[str, list[str]] = {}
    for name in dead:
        root, parts = name, name.split(".")
        for count in range(len(parts)):
            outer = ".".join(parts[:count])
            if outer in modules and not any(x.startswith(f"{outer}." if outer else "") for x in alive):
                root = outer
                break
        groups.setdefault(root, []).append(name)
    return groups


def _about(
    probe: Probe, root: str, group: list[str], names: Mapping[str, Tensor], dead: Mapping[str, Tensor]
) -> Iterator[Evidence]:
    what = _what(root, group)
    it = "it" if len(group) == 1 else "them"
    if all(
        name.endswith("bias") and f"{name[:-4]}weight" in names and f"{name[:-4]}weight" not in dead
        for name in group
    ):
        # such as that of keys, of which a softmax sees differences
        text = f"{what}: no gradient, though the weights beside {it} get one"
        yield Evidence(text, group[0], float(len(group)), 0.0, CANCELS, Severity.INFO)
        return
    if _matters(probe, [names[name] for name in group]):
        text = f"{what}: no gradient, though the loss depends on {it}"
        yield Evidence(text, group[0], float(len(group)), 0.0, DETACHED)
        return
    text = f"{what}: no gradient, and the loss does not depend on {it}"
    if _may_be_unused(probe, root, group, names):
        yield Evidence(text, group[0], float(len(group)), 0.0, HEAD, Severity.INFO)
    else:
        yield Evidence(text, group[0], float(len(group)), 0.0, UNUSED)


def _may_be_unused(probe: Probe, root: str, group: list[str], names: Mapping[str, Tensor]) -> bool:
    """Return whether parameters may be left out on purpose: a small head, or what is used for some inputs."""
    if all(_SOMETIMES.search(name) for name in group):
        return True
    held = {} if probe.optimizer is None else held_by(probe.optimizer)
    if held and not any(names[name] in held for name in group):
        return True
    modules = dict(probe.model.named_modules())
    if all(_is_alone(probe, modules[name.rpartition(".")[0]]) for name in group):
        return True
    share = sum(names[name].numel() for name in group) / sum(p.numel() for p in names.values())
    if root not in modules or not root or share > _SMALL or _is_numbered(root):
        return False
    output = getattr(probe.model, "get_output_embeddings", lambda: None)()
    own = list(modules[root].modules())
    if output is not None and output in own:
        return False
    matrices = [
        m
        for m in own
        if not isinstance(m, nn.Embedding) and any(p.dim() > 1 for p in m.parameters(recurse=False))
    ]
    if not matrices:
        return False
    is_outer = "." not in root and probe.config is None
    return is_outer or bool(_HEAD.search(root.rpartition(".")[2]))


def _is_alone(probe: Probe, module: nn.Module) -> bool:
    """Return whether a module gets one position ``(B, C, 1, 1)`` or ``(B, 1, C)``, which mixes with none."""
    args = probe.captured([module]).get(module, ((), {}, None))[0]
    shape = args[0].shape if args and isinstance(args[0], Tensor) else ()
    return (len(shape) > 3 and max(shape[2:]) == 1) or (len(shape) == 3 and shape[1] == 1)


def _is_routed(probe: Probe, root: str, alive: Iterable[str]) -> bool:
    """Return whether this is one of several experts, of which others get gradients."""
    for place in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", root):
        above = root[: place.start()]
        if not any(name.startswith(f"{above}.") for name in alive):
            continue
        if _EXPERT.search(above):
            return True
        siblings = list(probe.model.get_submodule(above).children())
        parent = probe.model.get_submodule(above.rpartition(".")[0])
        has_router = any(p.dim() == 2 and p.shape[0] == len(siblings) > 1 for p in parent.parameters())
        # experts get different numbers of tokens, and layers all of them
        shapes = {args[0].shape for args, _, _ in probe.captured(siblings).values() if args}
        if has_router and len(shapes) > 1:
            return True
    return False


def _matters(probe: Probe, parameters: Sequence[Tensor]) -> bool:
    """Return whether the loss changes with these parameters."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    with probe.differentiated(), _changed(parameters), torch.no_grad():
        before = float(objective(probe))
        for p in parameters:
            noise = torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float64)
            spread = float(p.double().square().mean().sqrt()) if p.numel() else 0.0
            p.data = p.data + (0.5 * (spread or 0.1) * noise).to(p.device, p.dtype)
        after = float(objective(probe))
    return not abs(after - before) <= 16 * torch.finfo(probe.dtype).eps * abs(before)


def _dead_rows(probe: Probe, names: Mapping[str, Tensor]) -> Iterator[Evidence]:
    """Look for many adjacent outputs of a linear layer without a gradient: a head, or a third of a fused QKV.

    Those of layers in lists are looked at. The loss may leave out outputs of a head, and single ones may be
    behind a ReLU.
    """
    matrices = {}
    for path, module in probe.model.named_modules():
        weight = getattr(module, "weight", None)
        # an expert may get few tokens
        is_layer = _is_numbered(path) and not _EXPERT.search(path)
        if is_layer and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            # the layer of GPT-2 has the transposed matrix
            dim = 1 if hasattr(module, "nf") else 0
            if not isinstance(module, nn.Embedding) and f"{path}.weight" in names:
                matrices[f"{path}.weight"] = weight, dim
    if not matrices:
        return
    alive: dict[str, Tensor] = {}
    runs: dict[str, tuple[int, int]] = {}
    for changes, seed in [({}, 0), *_others(probe)]:
        with random_for_zeros(probe):
            grads = _gradients(probe, [p for p, _ in matrices.values()], changes, seed)
        for (name, (p, dim)), g in zip(list(matrices.items()), grads, strict=True):
            none = torch.zeros(p.shape[dim], dtype=torch.bool, device=p.device)
            alive[name] = alive.get(name, none) | (none if g is None else (g != 0).any(1 - dim))
            run = _run(~alive[name])
            if run is None:
                del matrices[name]
            else:
                runs[name] = run
        if not matrices:
            return
    for name in matrices:
        begin, end = runs[name]
        text = f"outputs {begin} to {end - 1} of {name}: no gradient"
        yield Evidence(text, name, (end - begin) / len(alive[name]), 0.0, UNUSED)


def _run(where: Tensor) -> tuple[int, int] | None:
    """Return the begin and the end of the first long run of True; None without."""
    least, begin = max(_ROWS, len(where) // 4), 0
    for i, value in enumerate([*where.tolist(), False]):
        if not value:
            if i - begin >= least:
                return begin, i
            begin = i + 1
    return None


def _is_numbered(root: str) -> bool:
    return any(part.isdigit() for part in root.split("."))


def _what(root: str, group: list[str]) -> str:
    if len(group) == 1:
        return group[0]
    return f"{len(group)} parameters of {root}" if root else f"all {len(group)} trainable parameters"
