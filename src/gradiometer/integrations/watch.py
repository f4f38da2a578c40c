"""What the callbacks share: a `Monitor` for each training run, which cannot stop that run."""

from __future__ import annotations

import inspect
import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from gradiometer.amp import inverse_scale
from gradiometer.collect import collect_grads
from gradiometer.monitor import Monitor
from gradiometer.schema import DEFAULT_THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.amp import GradScaler

__all__ = ["Watch", "scaler_of", "while_running"]

_LOG = logging.getLogger("gradiometer")

_Hook = TypeVar("_Hook", bound="Callable[..., None]")


def while_running(hook: _Hook) -> _Hook:
    """Let a callback's hook do nothing while there is nothing to watch; an error in it ends the watching."""

    @wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        watch: Watch = self._watch
        if not watch.running:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 whatever it is, training goes on
            watch.give_up(f"{type(error).__name__}: {error}")

    return guarded  # type: ignore[return-value]


class Watch:
    """One training run after the other under a `Monitor` each.

    Args:
        what: the name of the callback, for messages.
        options: of `Monitor`, but for its model.

    Attributes:
        monitor: of the current run or the last one; None before the first.
        running: whether there is a run that is being watched.

    Raises:
        TypeError: for an option that Monitor does not have.
    """

    def __init__(self, what: str, options: Mapping[str, Any]) -> None:
        # a misspelt option is said here, not when training begins
        inspect.signature(Monitor).bind(None, **options)
        self.monitor: Monitor | None = None
        self.running = False
        self._what = what
        self._options = dict(options)
        self._names: dict[Tensor, str] = {}
        self._scalars: dict[str, Tensor | float] = {}
        self._measured = False

    def begin(
        self, model: nn.Module, *, scaler: GradScaler | None, step: int, state: Mapping[str, Any] | None
    ) -> None:
        """Start to watch a model, from this step on, or from where the state of an earlier monitor ends.

        A step is marked as skipped where the scaler skips it: nothing else there heeds ``skip_step``.

        Raises:
            ValueError: for a value that Monitor refuses.
            ImportError: for a run record or a sink whose package is not there.
        """
        self.end()
        self._names = {p: name for name, p in model.named_parameters()}
        self._scalars, self._measured = {}, False
        try:
            self.monitor = Monitor(_measurable(model), **self._options)
            self.monitor.skips = scaler is not None
        except (ValueError, ImportError):
            raise  # an option that cannot be had: to be put right before training begins
        except Exception as error:  # noqa: BLE001 such as a parameter that cannot be measured
            self.give_up(f"{type(error).__name__}: {error}")
            return
        self.running = True
        if (state is None or not self._take_up(state)) and step:
            self.monitor.step = step

    def _take_up(self, state: Mapping[str, Any]) -> bool:
        assert self.monitor is not None  # noqa: S101 for the type checker
        try:
            self.monitor.load_state_dict(state)
        except Exception as error:  # noqa: BLE001 a state from elsewhere may hold anything
            what = f"{type(error).__name__}: {error}"
            self.say(f"cannot take up the state in the checkpoint ({what}); the history begins anew")
            return False
        return True

    def record(self, scaler: GradScaler | None = None, only: Iterable[Tensor] | None = None) -> None:
        """Measure the gradients, of these parameters only, before a clip; multiplied by the scaler or not."""
        assert self.monitor is not None  # noqa: S101 for the type checker
        inv_scale = None if scaler is None else inverse_scale(scaler)
        if only is None:
            self.monitor.record(inv_scale=inv_scale)
        else:
            pairs = [(self._names[p], p) for p in only if p in self._names]
            thresholds = self._options.get("thresholds", DEFAULT_THRESHOLDS)
            self.monitor.record(collect_grads(pairs, thresholds=thresholds, inv_scale=inv_scale))
        self._measured = True

    def note(self, **scalars: Any) -> None:
        """Keep scalars for the step, as they are: tensors stay on their device."""
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                # a snapshot: a scheduler changes a learning rate in place
                self._scalars[name] = value.detach().clone()
            elif value is not None:
                self._scalars[name] = float(value)

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch to that of the step."""
        if isinstance(loss, Tensor):
            before = self._scalars.get("loss")
            self._scalars["loss"] = loss.detach() if before is None else before + loss.detach()

    def advance(self) -> None:
        """Go on to the next step, if in this one gradients were measured."""
        assert self.monitor is not None  # noqa: S101 for the type checker
        if self._measured:
            self._measured = False
            scalars, self._scalars = self._scalars, {}
            self.monitor.advance(**scalars)

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state; empty if nothing is watched. Fails as little as the rest."""
        try:
            return dict(self.monitor.state_dict()) if self.running and self.monitor is not None else {}
        except Exception as error:  # noqa: BLE001 a checkpoint must be written
            self.say(f"{type(error).__name__}: {error}; the checkpoint is without the monitor's state")
            return {}

    def end(self, error: BaseException | None = None) -> None:
        """Close the monitor; after an error with a black box."""
        running, self.running = self.running, False
        if not running or self.monitor is None:
            return
        try:
            if error is None:
                self.monitor.close()
            else:
                self.monitor.__exit__(type(error), error, None)
        except Exception as failure:  # noqa: BLE001 the training has its result, or its own error
            self.say(f"{type(failure).__name__}: {failure}; the last steps may not be written")

    def give_up(self, reason: str) -> None:
        """Say why, and watch no more of this run."""
        self.say(f"{reason}; training goes on unwatched")
        self.end()

    def say(self, message: str) -> None:
        """Log a warning: one by `warnings` would end the training where they are made errors."""
        _LOG.warning("%s: %s", self._what, message)


def _measurable(model: nn.Module) -> nn.Module | list[tuple[str, nn.Parameter]]:
    """Return the model; of one with quantized weights, the parameters that can have gradients."""
    pairs = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()]
    return model if len(pairs) == sum(1 for _ in model.parameters()) else pairs


def scaler_of(owner: Any) -> Any:
    """Return the GradScaler of an accelerator or precision plugin, if it has one in use."""
    scaler = getattr(owner, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
