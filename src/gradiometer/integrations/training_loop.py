"""The training loop that `watch` watches: a `Monitor` that the optimizers' steps call."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.control import inverse_scale, is_still_scaled
from gradiometer.integrations.backward_passes import BackwardPasses
from gradiometer.integrations.clipping import ClippedGradients, observe
from gradiometer.integrations.optimizers import one_of_each_group
from gradiometer.integrations.other_optimizers import OtherOptimizers
from gradiometer.integrations.session import collect_part
from gradiometer.integrations.step_order import OrderOfSteps, Scaling
from gradiometer.integrations.watched_step import WatchedStep
from gradiometer.monitor import raise_of_handlers
from gradiometer.recorder import LoopFacts
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from gradiometer.integrations.optimizers import Wrapped
    from gradiometer.monitor import Monitor

_LOG = logging.getLogger("gradiometer")
_NOT_COMPILED: Final = "gm.watch records a step in optimizer.step(): use gm.Monitor in a fullgraph step"


class TrainingLoop:
    """Calls a monitor from optimizers, the last of which ends the step.

    An error ends the watching, and training goes on.

    Args:
        monitor: the monitor.
        wrapped: the optimizers in the order in which they step, with their wrappers.
        parts: the named parameters of each optimizer.
        masters: the master weights that optimizers hold, by the names of the parameters.
        scaler: the GradScaler; None without.
        options: those of the monitor.
    """

    def __init__(
        self,
        monitor: Monitor,
        wrapped: Sequence[Wrapped],
        parts: Sequence[list[tuple[str, Tensor]]],
        masters: Mapping[str, Tensor],
        scaler: GradScaler | None,
        options: Mapping[str, Any],
    ) -> None:
        self._monitor, self._wrapped, self._parts, self._masters = monitor, wrapped, parts, masters
        self.optimizers = [each.optimizer for each in wrapped]
        self._scaler, self._options = scaler, options
        if len(parts) > 1 or masters:
            monitor.split_updates([{name for name, _ in part} for part in parts], masters)
        self._has_failed = self._has_ended_any = False
        # whether a scaler or a wrapper calls the optimizer, and whether that optimizer has stepped
        self._in_scaler = self._in_wrapper = self._has_stepped = False
        # whether a closure has computed the gradients
        self._in_closure = False
        self.facts = LoopFacts(has_master_updates=bool(masters))
        of_each = zip(self.optimizers, parts, strict=True)
        self._sentinels = [one_of_each_group(optimizer, part, masters) for optimizer, part in of_each]
        self._passes = BackwardPasses([p for each in self._sentinels for _, p in each])
        used = [[*part, *((name, masters[name]) for name, _ in part if name in masters)] for part in parts]
        self._scaling = Scaling(scaler)
        self._others = OtherOptimizers(self.optimizers, {name: p for part in parts for name, p in part})
        # something else may take the gradients
        watched = [() if masters or each.outer else part for each, part in zip(wrapped, parts, strict=True)]
        given = [each.given for each in wrapped]
        self._order = OrderOfSteps(self._passes, self._sentinels, watched, given, self._scaling)
        self._clipped = ClippedGradients(
            used, self._passes, self._measure_named, monitor.note, self._attempt, self._order
        )
        # an optimizer's hooks may be traced
        self._record_outside = torch.compiler.disable(self._record, reason=_NOT_COMPILED)
        self._look_outside = torch.compiler.disable(partial(self._attempt, self._look), reason=_NOT_COMPILED)
        self._begin_outside = torch.compiler.disable(self._begin, reason=_NOT_COMPILED)
        self._advance_outside = torch.compiler.disable(self._advance, reason=_NOT_COMPILED)

    def attach(self) -> None:
        """Watch from here on, until the monitor closes."""
        at_close = self._monitor.call_at_close
        at_close(self._passes.remove)
        at_close(self._others.attach())
        at_close(self._report_no_step)
        at_close(observe(self._clipped))
        for index, each in enumerate(self._wrapped):
            at_close(each.optimizer.register_step_pre_hook(self.before).remove)
            at_close(each.optimizer.register_step_post_hook(self.after).remove)
            if each.outer is not None:
                at_close(WatchedStep(each.outer, partial(self.step_of_wrapper, index)).unwrap)
        if self._scaler is not None:
            self._monitor.skips = self._scaler.is_enabled()
            # records before `scaler.step`, and ends the step after it, even if skipped
            at_close(WatchedStep(self._scaler, self.step_of_scaler).unwrap)

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the gradients, unless a closure is to compute them."""
        if self._in_scaler:
            return
        if not _has_closure(args, kwargs):
            # set for fused optimizers by a scaler that was not passed
            scale = getattr(optimizer, "grad_scale", None)
            self._record_outside(optimizer, None if scale is None else scale.double().reciprocal().float())
        if not self._in_wrapper:
            self._begin_outside(optimizer)

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the step."""
        if self._in_scaler:
            return
        if _has_closure(args, kwargs):
            self._in_closure = True
            self._record_outside(optimizer, None)
            self._in_closure = False
        if self._in_wrapper:
            self._has_stepped = True
        else:
            self._advance_outside(optimizer)

    def step_of_wrapper(self, index: int, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the step of a wrapper, which may change weights before and after the optimizer does."""
        if self._in_scaler or self._in_wrapper:
            return step(*args, **kwargs)
        optimizer = self.optimizers[index]
        self._look_outside(index)
        self._begin_outside(optimizer)
        self._in_wrapper, self._has_stepped = True, False
        try:
            result = step(*args, **kwargs)
        finally:
            self._in_wrapper = False
        if self._has_stepped:
            self._advance_outside(optimizer)
        return result

    def step_of_scaler(self, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``step``, the step of the scaler, and watch it."""
        inner = next(
            (each.optimizer for each in self._wrapped if any(optimizer is x for x in each.given)), None
        )
        if inner is None:
            return step(optimizer, *args, **kwargs)
        self._record_outside(inner, self._inverse_scale(optimizer))
        self._begin_outside(inner)
        self._in_scaler = True
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False
        self._advance_outside(inner)
        return result

    def _inverse_scale(self, *given: Any) -> Tensor | None:
        """Return what unscales the gradients of an optimizer, or its wrappers; None if they have no scale."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None
        if not all([is_still_scaled(scaler, optimizer) for optimizer in given]):
            return None
        return inverse_scale(scaler)

    def _attempt(self, function: Callable[..., object], *args: Any) -> None:
        if self._is_over:
            return
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 training goes on
            raise_of_handlers(error)
            self._has_failed = True
            text = "watch: %s; training continues without the monitor"
            _LOG.warning(text, one_line(f"{type(error).__name__}: {error}"))

    def _begin(self, optimizer: Optimizer) -> None:
        if not self._is_over:
            self._monitor.begin_updates(self._index(optimizer))

    def _record(self, optimizer: Optimizer, inv_scale: Tensor | None) -> None:
        """Record the gradients of an optimizer that were not recorded when they were clipped."""
        self._attempt(self._record_rest, self._index(optimizer), inv_scale)

    def _record_rest(self, index: int, inv_scale: Tensor | None) -> None:
        if not self._in_wrapper:
            self._look(index)
        clipped = self._clipped.measured()
        self._measure(index, [(name, p) for name, p in self._parts[index] if name not in clipped], inv_scale)

    def _measure_named(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        """Record some gradients before they are clipped."""
        asked = {name for name, _ in pairs}
        for index, part in enumerate(self._parts):
            mine = [(name, p) for name, p in part if name in asked]
            if mine:
                self._measure(index, mine, self._inverse_scale(*self._wrapped[index].given))

    def _measure(self, index: int, pairs: Sequence[tuple[str, Tensor]], inv_scale: Tensor | None) -> None:
        part = self._parts[index]
        if len(self._parts) == 1 and len(pairs) == len(part) and not self._masters:
            self._monitor.record(inv_scale=inv_scale)
        elif pairs or not part:
            used = [(name, self._used(name, p)) for name, p in pairs]
            self._monitor.record(collect_part(used, inv_scale, self._options))

    def _used(self, name: str, parameter: Tensor) -> Tensor:
        """Return the master weight of a parameter if that has the gradient that the optimizer uses."""
        master = self._masters.get(name)
        return parameter if master is None or master.grad is None else master

    def _look(self, index: int) -> None:
        """Find out whether gradients were changed after the backward pass, by something not observed."""
        clipped = self._clipped.measured()
        writes = self._scaling.writes(self._wrapped[index].given)
        changed = any(
            self._passes.has_changed(p, writes) for name, p in self._sentinels[index] if name not in clipped
        )
        self.facts.changed_gradients |= changed
        if not self._in_closure:
            self.facts.order = self._order.before_step(index, changed=changed)

    def _advance(self, optimizer: Optimizer) -> None:
        if self._is_over:
            return
        index = self._index(optimizer)
        if self._options.get("updates") and (
            len(self.optimizers) > 1 or self._wrapped[index].outer is not None
        ):
            # now: the loop may change its weights before the others step
            self._monitor.record_updates(index)
        self._has_ended_any = True
        is_last = optimizer is self.optimizers[-1]
        self._clipped.end(index, is_last=is_last)
        if not is_last:
            return
        rates = [each.param_groups[0].get("lr") for each in self.optimizers]
        names = ["lr", *(f"lr_{i}" for i in range(1, len(rates)))]
        known = {name: rate for name, rate in zip(names, rates, strict=True) if rate is not None}
        self.facts.order = self.facts.order._replace(others=self._others.take())
        self._monitor.advance(**known)
        self.facts.changed_gradients, self.facts.order = False, self._order.restart()

    def _end_unfinished(self) -> None:
        order = self._order.unfinished() if self._has_ended_any else None
        if order is not None:
            self.facts.order = order
            for index, each in enumerate(self._wrapped):
                self._measure(index, self._parts[index], self._inverse_scale(*each.given))
            self._monitor.advance()

    def _report_no_step(self) -> None:
        self._attempt(self._end_unfinished)
        told = "advance" in self._monitor.failures
        if not self._has_ended_any and self._passes.counted() and not told:
            text = (
                "gradients were computed, but the watched optimizer did not step: pass gm.watch the one that "
            )
            text += "does; with a GradScaler, pass scaler=, too, or the steps that it skips are missing"
            self._monitor.note_failure("advance", text)

    def _index(self, optimizer: Optimizer) -> int:
        return next(i for i, each in enumerate(self.optimizers) if each is optimizer)

    @property
    def _is_over(self) -> bool:
        return self._has_failed or self._monitor.closed


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # the first argument is the optimizer itself
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
