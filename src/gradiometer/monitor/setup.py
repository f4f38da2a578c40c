"""Prepare the arguments of a monitor: rules, sinks, ranks, and the information about the run."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from gradiometer import distributed, sinks
from gradiometer.distributed import RankError, Ranks
from gradiometer.inputs import tracked_parameters
from gradiometer.monitor.failures import describe
from gradiometer.recorder import OptimizerStates, RunInfo, check_integer, described, state_names
from gradiometer.rules import Rule, default_rules
from gradiometer.runs import RankBlackbox, RunRecord
from gradiometer.sinks import Function, Sink
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradiometer.recorder import Catalog, Recorder

# seconds to wait for other ranks
TIMEOUT = 60.0
# arguments of a monitor that must be equal on all ranks
_SHARED_FLAGS: Final = "weights updates skip_nonfinite redact fingerprint keep_weights"
# models of a mapping whose classes are named, at most
_NAMED = 8


def check_options(given: Mapping[str, Any], folder: object) -> None:
    """Check the arguments of a monitor that no part of it checks itself.

    ``folder``: the folder of the run record, if there is one.
    """
    queue, keeps = given["queue"], given["keep_weights"]
    if not isinstance(queue, int) or queue < 1:
        raise ValueError(f"Monitor(queue={queue!r}): queue must be a positive integer")
    if keeps and given["redact"]:
        msg = "Monitor(redact=True, keep_weights=True): a copy of the weights is not redacted; pass one"
        raise ValueError(msg)
    if keeps and (folder is None or not given["skip_nonfinite"]):
        needs = "run_dir" if folder is None else "skip_nonfinite=True"
        raise ValueError(f"Monitor(keep_weights=True) needs {needs}: pass it, too")


def shared_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a monitor that must be equal on all ranks, as plain values."""
    return {
        **{name: given[name] for name in ("every", "skip_above", "precision", "states", "state_names")},
        **{name: given[name] for name in ("projections", "projections_every")},
        **{name: bool(given[name]) for name in _SHARED_FLAGS.split()},
        "thresholds": repr(given["thresholds"]),
        "taps": getattr(given["taps"], "names", None),
        "kinds": described(given["kinds"]),
    }


def prepare_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers of a monitor; raise TypeError for anything else."""
    found = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in found:
        if not isinstance(each, Optimizer):
            msg = f"Monitor(optimizer=...): expected a torch.optim.Optimizer, or several, got {each!r:.40}"
            raise TypeError(msg)
    return found


def prepare_states(
    optimizers: Sequence[Optimizer], every: Any, names: Any, group: Any
) -> OptimizerStates | None:
    """Return the states of optimizers that a monitor measures, the same on all ranks; None if it does not."""
    if every is None:
        return None
    check_integer("Monitor", "states", every, 1)
    if not optimizers:
        raise ValueError(f"Monitor(states={every}) needs optimizer=..., the optimizer with these states")
    if names is None:
        names = [name for optimizer in optimizers for name in state_names(optimizer)]
        if group is not None:
            # a rank may hold no states yet
            names = [name for own in distributed.share(names, group) for name in own]
    asked = [names] if isinstance(names, str) else names
    return OptimizerStates(optimizers, sorted(dict.fromkeys(asked)), every)


def prepare_rules(rules: Iterable[Rule] | None) -> list[Rule]:
    """Return the rules; the default rules for None."""
    if rules is None:
        return default_rules()
    given = list(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else [rules]
    for rule in given:
        if isinstance(rule, type) or not isinstance(rule, Rule):
            shown = f"the class {rule.__name__}" if isinstance(rule, type) else repr(rule)
            msg = f"Monitor(rules=...): got {shown}, not a rule; pass an object with name, check, state_dict "
            raise TypeError(msg + "and load_state_dict")
    return given


def prepare_sinks(
    sinks: Iterable[Sink | Callable[..., object]],
    run_dir: str | Path | None,
    rank: int | None = None,
    *,
    is_merged: bool = False,
) -> list[Sink]:
    """Return the sinks, with the run record first and functions wrapped as sinks.

    If ranks are merged, all but the first write only their black box. If they are not merged, each has its
    own run record.

    Raises:
        TypeError: for an object that is neither a sink nor a function of a step, or not a path.
        ValueError: for an empty path.
    """
    if run_dir is not None and not isinstance(run_dir, (str, PathLike)):
        msg = f"Monitor(run_dir=...): expected the path of a folder or True, got {type(run_dir).__name__}"
        raise TypeError(msg)
    if run_dir == "":
        msg = 'Monitor(run_dir=""): pass the path of a folder, "." for the working directory, or None'
        raise ValueError(msg)
    if rank is not None and is_merged:
        return [] if run_dir is None else [RankBlackbox(run_dir, rank)]
    if rank is not None and run_dir is not None:
        run_dir = Path(run_dir) / f"rank-{rank:05d}"
    made: list[Sink] = [] if run_dir is None else [RunRecord(run_dir)]
    for sink in sinks if isinstance(sinks, Iterable) and not isinstance(sinks, str) else [sinks]:
        if isinstance(sink, str):
            raise TypeError(_not_a_name(sink))
        if isinstance(sink, type):
            msg = f"Monitor(sinks=...): got the class {sink.__name__}; pass an instance, {sink.__name__}(...)"
            raise TypeError(msg)
        if not isinstance(sink, Sink) and not callable(sink):
            methods = ("start", "write", "fault", "close")
            missing = ", ".join([name for name in methods if not hasattr(sink, name)])
            msg = f"Monitor(sinks=...): got {sink!r}, which is neither a function of a step nor a sink: it "
            raise TypeError(f"{msg}has no {missing}; pass sinks from gradiometer.sinks, or functions")
        made.append(sink if isinstance(sink, Sink) else Function(sink))
    return made


def _not_a_name(sink: str) -> str:
    """Return the message for a name that was passed as a sink."""
    short = {"jsonl": "JSONLines", "json": "JSONLines", "wandb": "WeightsAndBiases"}
    known = {name.lower(): name for name in sinks.__all__ if name not in {"Function", "Selection", "Sink"}}
    name = sink.lower().replace("_", "")
    found = short.get(name, known.get(name))
    msg = f"Monitor(sinks=...): got the string {sink!r:.40}, not a sink; pass "
    if found is None:
        return msg + f"an object of gm.sinks: {', '.join(known.values())}; or a function of a step"
    return msg + f"an object: sinks=[gm.sinks.{found}(...)]"


def prepare_ranks(ranks: Ranks | bool, model: Any) -> Ranks | None:  # noqa: FBT001 an argument of Monitor
    """Return the agreement of the job's ranks; None without a process group or with ``ranks=False``.

    Raises:
        TypeError: if ``ranks`` is neither a bool nor a `Ranks`.
        RankError: if other ranks do not respond, or have another model.
    """
    if isinstance(ranks, Ranks):
        return ranks
    if not isinstance(ranks, bool):
        msg = f"Monitor(ranks=...): expected True, False or gm.Ranks(model), got {type(ranks).__name__}"
        raise TypeError(msg)
    if not ranks or not distributed.is_active():
        return None
    names, parameters = tracked_parameters(model)
    try:
        return Ranks(list(zip(names, parameters, strict=True)), timeout=TIMEOUT)
    except RankError as error:
        raise RankError(f"Monitor: {error}. Create the Monitor on every rank, or pass ranks=False") from None


def rank_here(ranks: Ranks | None) -> int | None:
    """Return the global rank of this process; None without other ranks."""
    if ranks is not None:
        return ranks.global_ranks[ranks.rank] if ranks.size > 1 else None
    if not distributed.is_active():
        return None
    index, all_ranks = distributed.ranks_of(distributed.group_of(None))
    return all_ranks[index]


@contextmanager
def together(ranks: Ranks | None, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a process group for the background, or None for one rank; then compare the ranks' settings.

    If the body raises on one rank, all ranks raise.

    Raises:
        RankError: if another rank raised, or has other settings.
    """
    if ranks is None or ranks.size == 1:
        yield None
        return
    try:
        group = distributed.side_group(ranks.global_ranks, ranks.timeout)
    except RankError:
        # raises an error that names ranks that are gone
        distributed.rendezvous(ranks.group, ranks.timeout, "Monitor")
        raise
    try:
        try:
            yield group
        except Exception as error:
            # tell the other ranks, which wait for this one
            with suppress(RankError):
                distributed.share((describe(error), {}), group)
            raise
        _compare(distributed.share((None, dict(settings)), group), ranks.global_ranks)
    except BaseException:
        distributed.close(group)
        raise


def _compare(answers: Sequence[tuple[str | None, dict[str, Any]]], ranks: Sequence[int]) -> None:
    for rank, (problem, _) in zip(ranks, answers, strict=True):
        if problem is not None:
            raise RankError(f"Monitor: rank {rank} could not create its Monitor: {problem}")
    first = answers[0][1]
    for rank, (_, settings) in zip(ranks, answers, strict=True):
        for name, value in settings.items():
            if value != first[name]:
                msg = f"Monitor({name}={value!r}) on rank {rank}, but {first[name]!r} on rank {ranks[0]}: "
                raise RankError(msg + "pass the same value on all ranks")


def run_info(
    recorder: Recorder, model: str, every: int, catalog: Catalog, num_ranks: int, first_step: int
) -> RunInfo:
    """Return the information about the run for sinks."""
    versions = {"python": platform.python_version()}
    versions["gradiometer"] = __version__
    for package in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return RunInfo(
        catalog,
        recorder.thresholds,
        every,
        recorder.capacity,
        model,
        time.time(),
        first_step,
        versions,
        str(recorder.ring.device),
        num_ranks,
        recorder.fingerprint,
        None if recorder.exponents is None else recorder.exponents.every,
    )


def class_names(model: Any) -> str:
    """Return the class of a model, or of several models; for a compiled model its original class.

    >>> import torch
    >>> class_names({"a": torch.nn.Linear(2, 1), "b": torch.nn.GELU()})
    'Linear, GELU'
    """
    parts = list(model.values())[:_NAMED] if isinstance(model, dict) else [model]
    return ", ".join(dict.fromkeys(type(getattr(part, "_orig_mod", part)).__name__ for part in parts))


def check_state(state: Any) -> None:
    """Refuse what `Monitor.load_state_dict` is given if it cannot be a state of a monitor."""
    if not isinstance(state, Mapping):
        msg = f"Monitor.load_state_dict: got {type(state).__name__}; pass the result of "
        raise TypeError(msg + "Monitor.state_dict()")
    missing = [key for key in ("step", "every", "black_box", "rules", "findings") if key not in state]
    if missing:
        msg = f"Monitor.load_state_dict: the state has no {', '.join(missing)}; pass the result of "
        raise ValueError(msg + "Monitor.state_dict()")
    for name, least in (("step", 0), ("every", 1)):
        check_integer("Monitor.load_state_dict", name, state[name], least)
