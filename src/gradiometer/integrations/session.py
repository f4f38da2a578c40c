"""The session that callbacks share: a `Monitor` for each training run, whose errors do not stop the run."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradiometer import distributed
from gradiometer.columns import DEFAULT_THRESHOLDS
from gradiometer.control import inverse_scale, is_still_scaled
from gradiometer.distributed import RankError
from gradiometer.inputs import is_dtensor, named_parameters
from gradiometer.integrations.backward_passes import BackwardPasses
from gradiometer.integrations.clipping import ClippedGradients, observe
from gradiometer.integrations.frameworks import is_first, measurable, whole
from gradiometer.integrations.model_check import with_contracts
from gradiometer.integrations.step_order import OrderOfSteps, Scaling
from gradiometer.monitor import Monitor, raise_of_handlers
from gradiometer.recorder import Driver, LoopFacts
from gradiometer.stats import collect_grads
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.amp import GradScaler
    from torch.utils.hooks import RemovableHandle

    from gradiometer.inputs import Parameters
    from gradiometer.stats import TensorStats

_LOG = logging.getLogger("gradiometer")

# seconds to wait for other ranks to create their Monitor, which may itself wait a minute for other ranks
_TIMEOUT = 75.0
_MOMENT = 10.0

STATES: Final = 10
"""The cadence of the states of optimizers, unless ``states=`` says otherwise."""

_Hook = TypeVar("_Hook", bound="Callable[..., None]")


def while_running(hook: _Hook) -> _Hook:
    """Skip a callback's hook while no run is watched; an error in the hook ends the watching."""

    @wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        session: Session = self._session
        if not session.running:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 training goes on
            raise_of_handlers(error)
            session.give_up(f"{type(error).__name__}: {error}")

    return guarded  # type: ignore[return-value]


class Session:
    """Watches consecutive training runs, each with its own `Monitor`.

    ``caller``: the name of the callback, for messages. ``logger``: the trainer's logger, for findings. An
    unknown option raises TypeError.

    Attributes:
        monitor: the monitor of the current or last run; None before the first.
        running: whether a run is being watched.
    """

    def __init__(self, caller: str, options: Mapping[str, Any], logger: logging.Logger = _LOG) -> None:
        # report a misspelt option here, not when training begins
        inspect.signature(Monitor).bind(None, **{name: x for name, x in options.items() if name != "check"})
        self.monitor: Monitor | None = None
        self.running = False
        self._caller, self._logger = caller, logger
        self._options = dict(options)
        self._names: dict[Tensor, str] = {}
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._scalars: dict[str, Tensor | float] = {}
        self._measured = False
        self._clipped: ClippedGradients | None = None
        self._order: OrderOfSteps | None = None
        self._facts = LoopFacts()
        self._at_end: list[Callable[[], None]] = []
        # several optimizers, whose updates are measured apart, and those that have begun to update
        self._several: tuple[Optimizer, ...] = ()
        self._begun: set[int | None] = set()

    def begin(
        self,
        model: Parameters,
        *,
        scaler: GradScaler | None,
        step: int,
        state: Mapping[str, Any] | None,
        optimizers: Iterable[Any] = (),
    ) -> None:
        """Start to watch a model, or named parameters, from this step or the state of an earlier monitor on.

        Steps are marked as skipped only with a scaler, because nothing else here acts on ``skip_step``. Only
        an option that Monitor rejects, or a missing package, is an error.
        """
        self.end()
        self._measured = False
        failure = None
        try:
            # without wrappers such as Accelerate's
            known = tuple([getattr(each, "optimizer", each) for each in optimizers])
            held = known if all([isinstance(each, Optimizer) for each in known]) else ()
            options = {"states": STATES, **self._options} if held else self._options | {"states": None}
            options = with_contracts(options, model, held)
            self.monitor = Monitor(measurable(model), **options, optimizer=held or None)
            self.running = True
            names, parameters = named_parameters(model, self._caller)
            self._names = dict(zip(parameters, names, strict=True))
            self.monitor.skips = scaler is not None
            self.monitor.logger = self._logger
            self._facts = LoopFacts()
            self.monitor.set_driver(Driver("trainer", held, self._facts))
            self._several = held if len(held) > 1 else ()
            self.monitor.split_updates(self._parts())
            self._observe_clips(scaler, held)
        except (ValueError, ImportError):
            raise  # an invalid option: stop before training begins
        except Exception as error:  # noqa: BLE001 such as a parameter that cannot be measured
            raise_of_handlers(error)
            failure = error
        ranks = self._options.get("ranks", True)
        # a checkpoint has the state of the first rank, which does not fit other ranks that run separately
        state = state if is_first() else None
        if ranks is False or not distributed.is_active():
            if failure is None:
                self._resume(state, step)
        else:
            failure = self._begin_together(failure, state, step)
        if failure is not None:
            text, of_all = _description(failure)
            self.give_up(text, for_all=of_all)

    def _begin_together(
        self, failure: Exception | None, state: Mapping[str, Any] | None, step: int
    ) -> Exception | None:
        """Continue where the first rank does; return why this run is not watched, the same on all ranks."""
        group = distributed.group_of(None)
        # a rank that has already waited for others in vain waits only briefly now
        timeout = _MOMENT if isinstance(failure, RankError) else _TIMEOUT
        try:
            distributed.rendezvous(group, timeout, self._caller)
            answers = distributed.share(_description(failure), group)
            failed = [(of_all, rank, text) for rank, (text, of_all) in enumerate(answers) if text]
            if failed:
                # prefer the rank that failed itself: most ranks only know that another one failed
                of_all, rank, text = min(failed)
                return RankError(text if of_all else f"rank {rank}: {text}")
            assert self.monitor is not None  # noqa: S101 for the type checker
            if is_first():
                state = self._resume(state, step)
            mine = (None if state is None else _for_others(state), self.monitor.step) if is_first() else None
            state_of_first, step = distributed.tell(mine, 0, group)
            if not is_first():
                self._resume(state_of_first, step)
        except Exception as error:  # noqa: BLE001 such as a lost store; training goes on
            raise_of_handlers(error)
            return failure or error
        return None

    def _resume(self, state: Mapping[str, Any] | None, step: int) -> Mapping[str, Any] | None:
        """Load a state and return it; without one, or if that fails, set the step and return None."""
        assert self.monitor is not None  # noqa: S101 for the type checker
        if state is not None:
            try:
                self.monitor.load_state_dict(state)
            except Exception as error:  # noqa: BLE001 a foreign state may hold anything
                raise_of_handlers(error)
                text = f"the state in the checkpoint cannot be loaded ({type(error).__name__}: {error}); "
                self.say(text + "the rules start without a history")
            else:
                return state
        if step:
            self.monitor.step = step
        return None

    def _observe_clips(self, scaler: GradScaler | None, optimizers: Sequence[Optimizer]) -> None:
        """Record what is clipped before it, if that was not done, and the limit and the factor."""
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        ours = [[p for p in group if p in self._names and p.requires_grad and p.is_leaf] for group in groups]
        sentinels = [(self._names[group[0]], group[0]) for group in ours if group]
        passes = BackwardPasses([p for _, p in sentinels])
        # a trainer clears gradients itself, so what it clears is no mistake; of several optimizers it is not
        # known here which one steps
        alone = sentinels if len(optimizers) == 1 else []
        self._order = OrderOfSteps(passes, [alone], [()], [optimizers], Scaling(scaler))

        def record(pairs: Sequence[tuple[str, Tensor]]) -> None:
            is_scaled = scaler is not None and all([is_still_scaled(scaler, each) for each in optimizers])
            self._record(pairs, scaler if is_scaled else None)

        def attempt(function: Callable[..., object], *args: Any) -> None:
            if self.running:
                try:
                    function(*args)
                except Exception as error:  # noqa: BLE001 training goes on
                    raise_of_handlers(error)
                    self.give_up(f"{type(error).__name__}: {error}")

        named = [(name, p) for p, name in self._names.items()]
        self._clipped = ClippedGradients([named], passes, record, self.note, attempt, self._order)
        self._at_end += [passes.remove, observe(self._clipped)]

    def record(self, scaler: GradScaler | None = None, only: Iterable[Tensor] | None = None) -> None:
        """Measure the gradients, ``only`` of these parameters if given, unscaled if given a ``scaler``.

        Those that were measured before a clip stay as they are.
        """
        clipped = self._clipped
        if self._order is not None:
            self._facts.order = self._order.before_step(0, changed=False)
        known = set() if clipped is None else clipped.measured()
        asked = self._names if only is None else only
        pairs = [(self._names[p], p) for p in asked if p in self._names and self._names[p] not in known]
        if pairs or not known:
            self._record(pairs, scaler)
            if clipped is not None:
                clipped.note_measured(pairs)

    def _record(self, pairs: Sequence[tuple[str, Tensor]], scaler: GradScaler | None) -> None:
        assert self.monitor is not None  # noqa: S101 for the type checker
        inv_scale = None if scaler is None else inverse_scale(scaler)
        if len(pairs) == len(self._names):
            self.monitor.record(inv_scale=inv_scale)
        else:
            self.monitor.record(collect_part(pairs, inv_scale, self._options))
        if not self._measured:
            self._measured = True
            self._begun.clear()

    def begin_updates(self, optimizer: Optimizer | None = None) -> None:
        """Copy the weights right before the first update of a step, those of one optimizer if given."""
        part = self._part_of(optimizer)
        if self.monitor is not None and part not in self._begun:
            self._begun.add(part)
            self.monitor.begin_updates(part)

    def _parts(self) -> list[set[str]]:
        """Return the names of each optimizer's parameters; those that none has are the last one's."""
        left = set(self._names.values())
        parts = []
        for optimizer in self._several or (None,):
            groups = [] if optimizer is None else optimizer.param_groups
            own = {self._names[p] for group in groups for p in group["params"] if p in self._names}
            parts.append(own & left)
            left -= parts[-1]
        parts[-1] |= left
        return parts

    def _part_of(self, optimizer: Any) -> int | None:
        inner = getattr(optimizer, "optimizer", optimizer)
        return next((i for i, each in enumerate(self._several) if each is inner), None)

    def record_updates(self) -> None:
        """Measure the updates if they are recorded, before the gradients are cleared."""
        if self._options.get("updates") and self._measured and self.monitor is not None:
            self.monitor.record_updates()

    def record_updates_after(self, optimizer: Optimizer) -> None:
        """Measure the updates right after each step of this optimizer, until the run ends."""
        if self._options.get("updates") and optimizer not in self._hooks:
            # without the hooks of `Optimizer.__init__`, `advance` measures the updates
            with suppress(AttributeError):
                self._hooks[optimizer] = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        # after a compiled step, `advance` measures the updates
        if not torch.compiler.is_compiling() and self._measured and self.monitor is not None:
            # again after each later step of a batch, up to the last one
            self.monitor.record_updates(self._part_of(optimizer), again=True)

    def note(self, **scalars: Any) -> None:
        """Keep scalars for the step; tensors stay on their device."""
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                # clone, because a scheduler may change a learning rate in place
                self._scalars[name] = whole(value).clone()
            elif value is not None:
                self._scalars[name] = float(value)

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch to that of the step."""
        if isinstance(loss, Tensor):
            before, now = self._scalars.get("loss"), whole(loss)
            self._scalars["loss"] = now if before is None else before + now

    def advance(self) -> None:
        """End the step if its gradients were measured."""
        assert self.monitor is not None  # noqa: S101 for the type checker
        if self._measured:
            self._measured = False
            if self._clipped is not None:
                self._clipped.end(0, is_last=True)
            scalars, self._scalars = self._scalars, {}
            self.monitor.advance(**scalars)
            if self._order is not None:
                self._facts.order = self._order.restart()

    def total_norm(self) -> Tensor | None:
        """Return the total norm of the step's gradients, 0-d on the device; None if this rank has no such."""
        if not self._measured or self.monitor is None or self.monitor.step % self.monitor.every:
            return None
        # DTensors: the ring has the shards of this rank
        return None if any(is_dtensor(type(p)) for p in self._names) else self.monitor.total_norm()

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state; empty if nothing is watched or on an error.

        It raises only what the program's own signal handlers raise meanwhile.
        """
        try:
            return dict(self.monitor.state_dict()) if self.running and self.monitor is not None else {}
        except Exception as error:  # noqa: BLE001 a checkpoint must be written
            raise_of_handlers(error)
            self.say(f"{type(error).__name__}: {error}; the checkpoint does not contain the monitor's state")
            return {}

    def end(self, error: BaseException | None = None) -> None:
        """Close the monitor and free the model; after an error, write a black box.

        If a signal handler of the program raises an exception meanwhile, call this again with it.
        """
        for hook in self._hooks.values():
            hook.remove()
        while self._at_end:
            self._at_end.pop()()
        self._hooks, self._names, self._scalars, self._clipped, self._order = {}, {}, {}, None, None
        if self.running and self.monitor is not None:
            try:
                if error is None:
                    self.monitor.close()
                else:
                    self.monitor.__exit__(type(error), error, None)
            except Exception as failure:  # noqa: BLE001 training has its result, or its own error
                raise_of_handlers(failure)
                self.say(f"{type(failure).__name__}: {failure}; the last steps may be missing")
        self.running = False

    def give_up(self, reason: str, *, for_all: bool = False) -> None:
        """Log the reason and stop watching this run; with ``for_all`` only the first rank logs it."""
        if not for_all or is_first():
            self.say(f"{reason}; training continues without the monitor")
        self.end()

    def say(self, message: str) -> None:
        """Log a warning. `warnings` is not used, because a filter may turn its warnings into errors."""
        _LOG.warning("%s: %s", self._caller, one_line(message))


def collect_part(
    pairs: Sequence[tuple[str, Tensor]], inv_scale: Tensor | None, options: Mapping[str, Any]
) -> TensorStats:
    """Collect the gradients of some parameters as a monitor with these options does."""
    thresholds = options.get("thresholds", DEFAULT_THRESHOLDS)
    bits = bool(options.get("fingerprint", False))
    return collect_grads(pairs, thresholds=thresholds, inv_scale=inv_scale, fingerprint=bits)


def _for_others(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a monitor's state that ranks without rules need, as plain values."""
    box = state["black_box"]
    return {
        "step": int(state["step"]),
        "every": int(state["every"]),
        "black_box": {
            "first": None if box["first"] is None else str(box["first"]),
            "is_broken": bool(box["is_broken"]),
            "had_bad_loss": bool(box["had_bad_loss"]),
        },
        "rules": {},
        "findings": [],
    }


def _description(failure: Exception | None) -> tuple[str, bool]:
    """Return the text of a failure, and whether it concerns other ranks."""
    if failure is None:
        return "", False
    if isinstance(failure, RankError):
        return str(failure), True
    return f"{type(failure).__name__}: {failure}", False
