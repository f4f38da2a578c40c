"""The contract of modes: what trains is in training mode, and gradients are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from gradiometer.checks.contract import contract
from gradiometer.checks.kept_state import kept_state
from gradiometer.checks.probe import BATCH_NORMS, DROPOUTS
from gradiometer.checks.report import Evidence
from gradiometer.checks.siblings import siblings
from gradiometer.rules import Severity
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

_TRAIN: Final = "call model.train() before training"


@contract("configuration", "the model and all its modules are in training mode", is_static=True)
def modes(probe: Probe) -> Iterator[Evidence]:
    """Look at the modes that modules were given, and at whether `train()` and `eval()` set them."""
    model = probe.model
    yield from _gradients(model)
    named = {name: module for module, name in probe.names.items()}
    if probe.modes[model]:
        yield from _in_training(named, probe.modes)
    else:
        yield from _evaluated(model, named, probe.modes)
    yield from _switch(model, named)
    if not probe.is_sharded:
        yield from _forward(probe, named)


def _gradients(model: nn.Module) -> Iterator[Evidence]:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        what = "inference mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        yield Evidence(
            f"gradients are off here: {what} is on",
            advice="leave no_grad or inference_mode before training, or call torch.set_grad_enabled(True)",
        )
    made = [name for name, p in model.named_parameters() if p.is_inference()]
    if made:
        yield Evidence(
            f"{shortened(made)} {'was' if len(made) == 1 else 'were'} created in inference mode",
            made[0],
            len(made),
            advice="create the model outside torch.inference_mode: its weights cannot be trained",
        )


def _evaluated(
    model: nn.Module, named: dict[str, nn.Module], modes: dict[nn.Module, bool]
) -> Iterator[Evidence]:
    trained = _tops(named, modes, training=True)
    for group in siblings(model):
        for path, modules in group.inside():
            # each layer that differs is told once, by its outermost module
            for index in range(len(modules)):
                name = group.name(index, path)
                if name in trained and not all(modes.get(x, True) for x in modules):
                    text = f"{name} is in training mode in a model in evaluation mode, unlike its siblings"
                    yield Evidence(text, name, advice=_TRAIN)
    some = f", apart from {shortened(trained)}" if trained else ""
    yield Evidence(
        f"the model is in evaluation mode{some}",
        advice=f"{_TRAIN}: from_pretrained returns a model in evaluation mode",
        severity=Severity.INFO,
    )


def _in_training(named: dict[str, nn.Module], modes: dict[nn.Module, bool]) -> Iterator[Evidence]:
    """Tell modules in evaluation mode that change how the model trains."""
    dropouts = [x for x in named.values() if _drops(x)]
    none_drops = not any(modes[x] for x in dropouts)
    norms, frozen, loaded, left = [], [], [], []
    for name in _tops(named, modes, training=False):
        module = named[name]
        own = list(module.parameters())
        if isinstance(module, BATCH_NORMS):
            norms.append(name)
        elif own and not any(p.requires_grad for p in own):
            frozen.append(name)
        elif _is_pretrained(module) and not any(_is_pretrained(x) for x in _parents(named, name)):
            loaded.append(name)
        elif own or any(_drops(x) for x in module.modules()):
            left.append(name)
    if norms:
        advice = "it does not update its running statistics; call model.train() if this is not intended"
        text = f"{shortened(norms)}: BatchNorm in evaluation mode"
        yield Evidence(text, norms[0], len(norms), advice=advice, severity=Severity.INFO)
    if frozen:
        advice = "correct for a frozen part; otherwise call model.train()"
        text = f"{shortened(frozen)}: frozen, and in evaluation mode"
        yield Evidence(text, frozen[0], len(frozen), advice=advice, severity=Severity.INFO)
    if loaded:
        advice = f"{_TRAIN}: from_pretrained returns a model in evaluation mode"
        text = f"{shortened(loaded)}: a whole model in evaluation mode"
        yield Evidence(text, loaded[0], len(loaded), advice=advice, severity=Severity.INFO)
    if left:
        # all dropout may be off on purpose
        noted = none_drops and all(_drops(named[name]) for name in left)
        yield Evidence(
            f"{shortened(left)}: in evaluation mode, while the model is in training mode",
            left[0],
            len(left),
            advice="call model.train() after the last eval(): dropout does nothing in evaluation mode",
            severity=Severity.INFO if noted else Severity.WARNING,
        )


def _switch(model: nn.Module, named: dict[str, nn.Module]) -> Iterator[Evidence]:
    """Call `train` and `eval`, where a class has its own, and look at what they do."""
    if all(_switches(x) for x in named.values()):
        return
    with kept_state(model):
        for training, call in ((True, "train"), (False, "eval")):
            getattr(model, call)()
            for name, module in named.items():
                if module.training == training or _is_frozen(named, name):
                    continue
                matters = _drops(module) or (isinstance(module, BATCH_NORMS) and not training)
                if matters or not name:
                    yield Evidence(
                        f"{name or 'the model'} stays in {_word(not training)} mode after model.{call}()",
                        name or None,
                        advice=f"call super().train(mode) in an override of {call}()",
                    )
                    break


def _tops(named: dict[str, nn.Module], modes: dict[nn.Module, bool], *, training: bool) -> list[str]:
    """Return the names of modules in that mode whose parents are in the other one."""
    return [
        name
        for name, module in named.items()
        if name and modes[module] == training and modes[next(_parents(named, name))] != training
    ]


def _parents(named: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    # a module that is used in several places has one of its names
    while name:
        name = name.rpartition(".")[0]
        if name in named:
            yield named[name]


def _is_frozen(named: dict[str, nn.Module], name: str) -> bool:
    """Return whether a module, or the smallest one around it that has parameters, trains none of them."""
    for module in (named[name], *_parents(named, name)):
        own = list(module.parameters())
        if own:
            return not any(p.requires_grad for p in own)
    return False


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(type(module), "_from_config")


def _forward(probe: Probe, named: dict[str, nn.Module]) -> Iterator[Evidence]:
    """Call the model in training mode, and look at whether that changes modes."""
    trained = [name for name in named if not _is_frozen(named, name)]
    with kept_state(probe.model), probe._settings(training=True), torch.no_grad():  # noqa: SLF001
        before = [name for name in trained if named[name].training]
        try:
            probe._call({})  # noqa: SLF001
        except Exception:  # noqa: BLE001 other contracts tell
            return
        changed = [name or "the model" for name in before if not named[name].training]
    if changed:
        yield Evidence(
            f"the forward sets {shortened(changed)} to evaluation mode",
            changed[0],
            len(changed),
            advice="do not call eval() in a forward or a hook",
        )


def _switches(module: nn.Module) -> bool:
    """Return whether a module has the `train` and `eval` of all modules."""
    kind = type(module)
    usual = kind.train is nn.Module.train and kind.eval is nn.Module.eval
    return usual and not {"train", "eval"} & vars(module).keys()


def _word(training: bool) -> str:  # noqa: FBT001
    return "training" if training else "evaluation"


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.p > 0
