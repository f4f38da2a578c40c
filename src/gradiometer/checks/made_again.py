"""A Hugging Face model made once more from its config, without values: how its modules should be."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from math import isclose
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.probe import DROPOUTS
from gradiometer.checks.report import Evidence
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADVICE: Final = "build the module from the config, or update the config: a saved model is rebuilt from it"
# what training or a call sets, and what shapes tell
_SET_LATER: Final = frozenset(
    {"training", "gradient_checkpointing", "name_or_path", "in_features", "out_features"}
)
_NOTED: Final = re.compile(
    r"cached|attention_type|rescaled|num_embeddings|vocab_size|is_parallelizable|model_parallel"
)
_FREQUENCIES: Final = re.compile(r"(^|_)inv_freq$")


def roots(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return the name of each Hugging Face model in a model, that model, and one made of its config.

    The latter's tensors are on the meta device. Models that cannot be made so are left out.
    """
    found: list[tuple[str, nn.Module, nn.Module]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{name}.") or not name for name, _, _ in found)
        config = vars(module).get("config")
        if inside or not hasattr(type(module), "_from_config") or not hasattr(config, "model_type"):
            continue
        again = _made_again(module, config)
        if again is not None:
            found.append((path, module, again))
    return found


def differences(path: str, module: nn.Module, again: nn.Module) -> Iterator[Evidence]:
    """Return what differs between a model and one that its config makes; equal differences at once."""
    given = dict(module.named_modules(remove_duplicate=False))
    parameters = dict(module.named_parameters())
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, new in again.named_modules(remove_duplicate=False):
        old = given.get(name)
        if old is None:
            continue
        full = ".".join(x for x in (path, name) if x)
        for what, value, wanted in _module_differences(old, new):
            found.setdefault((type(new).__name__, what, str(value), str(wanted)), []).append(full)
    for name, p in again.named_parameters():
        # sinusoidal positions
        if not p.requires_grad and name in parameters and parameters[name].requires_grad:
            full = ".".join(x for x in (path, name) if x)
            yield Evidence(
                f"{full} is trainable, but its class freezes it on creation",
                full,
                advice="set requires_grad to False, unless it is trained on purpose",
            )
    for (_, what, value, wanted), names in found.items():
        noted = bool(_NOTED.search(what)) or (what == "padding_idx" and value == "None")
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        yield Evidence(
            f"{names[0] or type(module).__name__}: {what} is {value}, but the config sets {wanted}{more}",
            names[0] or None,
            value=_number(value),
            threshold=_number(wanted),
            advice=_ADVICE,
            severity=Severity.INFO if noted else Severity.WARNING,
        )
    for name, old in given.items():
        yield from _frequencies(".".join(x for x in (path, name) if x), old)


def _made_again(module: nn.Module, config: Any) -> nn.Module | None:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return type(module)(copy.deepcopy(config))
    except Exception:  # noqa: BLE001 classes that take more arguments, or compute with values
        return None
    finally:
        logging.disable(level)


def _module_differences(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(new, nn.ModuleList) and isinstance(old, nn.ModuleList):
        if len(old) != len(new):
            yield "length", len(old), len(new)
        return
    if type(old) is not type(new):
        # adapters and quantization replace modules that have parameters
        empty = not any([*x._modules, *x._parameters, *x._buffers] for x in (old, new))  # noqa: SLF001
        nothing = isinstance(old, nn.Identity) and isinstance(new, DROPOUTS) and new.p == 0
        if empty and not nothing:
            yield "class", type(old).__name__, type(new).__name__
        return
    for key, wanted in vars(new).items():
        value, wanted = plain(vars(old).get(key, ...)), plain(wanted)  # noqa: PLW2901
        if key.startswith("_") or key in _SET_LATER or not (_is_plain(value) and _is_plain(wanted)):
            continue
        if not _agree(value, wanted):
            yield key, _text(value), _text(wanted)
    for key, wanted in new._parameters.items():  # noqa: SLF001
        value = old._parameters.get(key)  # noqa: SLF001
        if not (isinstance(value, Tensor) and isinstance(wanted, Tensor)) or value.shape == wanted.shape:
            continue
        # quantized weights are packed, those of ZeRO 3 are elsewhere
        if value.dim() == wanted.dim() and value.is_floating_point() and value.numel():
            yield f"the shape of {key}", tuple(value.shape), tuple(wanted.shape)


def _frequencies(name: str, module: nn.Module) -> Iterator[Evidence]:
    """Compare frequencies of rotary positions with those of a new module."""
    buffers = {key: x for key, x in module._buffers.items() if x is not None and not x.is_meta}  # noqa: SLF001
    if not any(_FREQUENCIES.search(key) for key in buffers):
        return
    try:
        with torch.device("cpu"):
            again = type(module)(copy.deepcopy(vars(module)["config"]))
    except Exception:  # noqa: BLE001 another signature, such as one of a size and a base
        return
    kinds = vars(again).get("rope_type")
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    for key, x in buffers.items():
        wanted = again._buffers.get(key)  # noqa: SLF001
        # other types change with the length of the sequences
        if "original" in key or kinds & {"dynamic", "longrope"} or not isinstance(wanted, Tensor):
            continue
        full = f"{name}.{key}".lstrip(".")
        if not _FREQUENCIES.search(key) or wanted.is_meta:
            continue
        if wanted.shape != x.shape:
            text = f"{full} has {x.numel()} frequencies, but the config makes {wanted.numel()}"
            yield Evidence(text, full, x.numel(), wanted.numel(), _ADVICE)
            continue
        error = float(((x.double().cpu() - wanted.double()).abs() / wanted.double().abs()).max())
        # half a digit of bfloat16; that it is one is another question
        if not error <= 0.01:
            place = int((x.double().cpu() - wanted.double()).abs().argmax())
            yield Evidence(
                f"{full}[{place}] is {_text(float(x[place]))}, but the config gives "
                f"{_text(float(wanted[place]))}",
                full,
                float(x[place]),
                float(wanted[place]),
                "the frequencies are 1 / theta ** (2 i / d): use the theta and the head size of the config",
            )


def plain(value: Any) -> Any:
    """Return the name of a function, such as an activation; other values as they are."""
    return getattr(value, "__name__", "a function") if inspect.isroutine(value) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(x) for x in value)
    return value is None or isinstance(value, bool | int | float | str)


def _agree(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_agree(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
