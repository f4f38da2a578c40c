"""What a monitor begins with: rules, sinks, and what is known of the run."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradiometer.protocols import Rule, Sink
from gradiometer.steps import RunInfo
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gradiometer.recorder import Recorder

__all__ = ["class_names", "prepare_rules", "prepare_sinks", "run_info"]

# classes that are named of a mapping of models
_NAMED = 8


def prepare_rules(rules: Iterable[Rule] | None) -> list[Rule]:
    """Return the rules; the default ones for None.

    Raises:
        TypeError: for what is no rule.
    """
    if rules is None:
        from gradiometer.rules import default_rules  # noqa: PLC0415 only where it is needed

        return default_rules()
    given = list(rules) if isinstance(rules, Iterable) else [rules]
    for rule in given:
        if isinstance(rule, type) or not isinstance(rule, Rule):
            what = f"the class {rule.__name__}" if isinstance(rule, type) else repr(rule)
            msg = f"Monitor(rules=...): got {what}; a rule has a name, check, state_dict and load_state_dict"
            raise TypeError(msg)
    return given


def prepare_sinks(sinks: Iterable[Sink | Callable[..., object]], run_dir: str | Path | None) -> list[Sink]:
    """Return the sinks, functions made into sinks, the run record first.

    Raises:
        TypeError: for what is neither a sink nor a function of a step.
    """
    from gradiometer.sinks import Function, RunRecord  # noqa: PLC0415 likewise

    made: list[Sink] = [] if run_dir is None else [RunRecord(run_dir)]
    for sink in sinks:
        if isinstance(sink, type):
            msg = f"Monitor(sinks=...): got the class {sink.__name__}; make one of it, {sink.__name__}(...)"
            raise TypeError(msg)
        made.append(sink if isinstance(sink, Sink) else Function(sink))
    return made


def run_info(recorder: Recorder, model: str, every: int, first_step: int) -> RunInfo:
    """Return what sinks are told at the start."""
    versions = {"python": platform.python_version()}
    versions["gradiometer"] = __version__
    for package in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return RunInfo(
        recorder.roster,
        recorder.thresholds,
        every,
        recorder.capacity,
        model,
        time.time(),
        first_step,
        versions,
        str(recorder.ring.device),
    )


def class_names(model: Any) -> str:
    """Return the class of a model, or of several models; of a compiled one that of what was compiled.

    >>> import torch
    >>> class_names({"a": torch.nn.Linear(2, 1), "b": torch.nn.GELU()})
    'Linear, GELU'
    """
    parts = list(model.values())[:_NAMED] if isinstance(model, dict) else [model]
    return ", ".join(dict.fromkeys(type(getattr(part, "_orig_mod", part)).__name__ for part in parts))
