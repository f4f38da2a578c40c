"""`watch`: a `Monitor` that the optimizer's step calls, or the callback of a trainer."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, overload

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradiometer.control import inverse_scale, is_still_scaled
from gradiometer.inputs import tracked_parameters
from gradiometer.integrations.partitioned import framework_of
from gradiometer.integrations.session import collect_part
from gradiometer.monitor import Monitor, raise_of_handlers
from gradiometer.recorder import Driver, master_copies
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from gradiometer.inputs import Parameters

_LOG = logging.getLogger("gradiometer")
_NOT_COMPILED: Final = "gm.watch records a step in optimizer.step(): use gm.Monitor in a fullgraph step"
# the class of a trainer, by the package that defines it -> the module here that watches it, by its `watch`
_TRAINERS: Final = {
    ("transformers", "Trainer"): "huggingface",
    ("lightning", "Trainer"): "lightning",
    ("pytorch_lightning", "Trainer"): "lightning",
}


@overload
def watch(
    model: Parameters | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    scaler: GradScaler | None = None,
    **options: Any,
) -> Monitor: ...


@overload
def watch(model: Any, **options: Any) -> Any: ...


def watch(
    model: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scaler: GradScaler | None = None,
    **options: Any,
) -> Any:
    """Watch a training loop, or a trainer of Hugging Face or Lightning, with one call.

    In your own loop, the optimizer calls the `Monitor`: each ``optimizer.step()`` first records the gradients
    that it is about to use, and ends the step after the update, with the learning rate of the first parameter
    group. `Monitor.note` adds the loss. Do not call `Monitor.record` and `Monitor.advance` yourself.

    * Gradients are those that the optimizer uses: accumulated, and after clipping. To record them before
      they are clipped, use a `Monitor` without ``watch``.
    * With a GradScaler, pass ``scaler``: gradients are recorded unscaled, and steps that it skips are
      recorded and marked. Without it, skipped steps are missing.
    * With a closure, as for LBFGS, the gradients of its last evaluation are recorded.
    * With several optimizers, each records its own parameters, and the last one in the list ends the step,
      with ``lr``, ``lr_1``, …
    * If the optimizer holds master weights, copies of the parameters in a wider dtype, the gradients of the
      model's own parameters are recorded: keep them until ``optimizer.step()``.
    * The model and ``optimizer.step`` may be compiled; the monitor breaks the graph of the latter. In a step
      that is one graph, use a `Monitor`.

    A trainer gets the callback of `gradiometer.integrations`, which creates a monitor for each training run.

    DeepSpeed's ZeRO stages 1 and 2 and its BF16_Optimizer, and Megatron-LM, keep gradients in buffers of
    their own, of which a rank may have a part. These are measured before they are clipped, and merged over
    ranks by the names of the parameters; weights and updates are those of the master weights.

    Args:
        model: as for `Monitor`; or a DeepSpeedEngine; or a ``transformers.Trainer``, or a Trainer of
            ``lightning`` or ``pytorch_lightning``.
        optimizer: the optimizer, or several in the order in which they step; not for a trainer or an engine.
        scaler: the GradScaler whose ``step`` calls the optimizers; its ``step`` is wrapped.
        options: other arguments of `Monitor`.

    Returns:
        the `Monitor`, for a ``with`` block; after its `close`, the loop runs without it. For a trainer its
        callback: ``callback.monitor`` is the monitor of the current or last run.

    Raises:
        TypeError: for an object that is not an optimizer, or an unknown option.
        ValueError: for an optimizer that holds neither parameters of the model nor their master weights, for
            a configuration of DeepSpeed or Megatron-LM that is not supported, and as for `Monitor`.

    >>> import torch, gradiometer as gm
    >>> model, losses = torch.nn.Linear(2, 1), []
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gm.watch(model, optimizer, sinks=[lambda record: losses.append(record.loss)]) as monitor:
    ...     for step in range(3):
    ...         loss = model(torch.tensor([[3.0, 4.0]])).square().sum() * 0 + step
    ...         loss.backward()
    ...         monitor.note(loss=loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> losses, monitor.last, monitor.last.scalars["lr"]
    ([0.0, 1.0, 2.0], <StepRecord: step 2, 2 tensors>, 0.1)
    """
    framework = framework_of(model, optimizer)
    if framework is not None:
        adapter = import_module(f"gradiometer.integrations.{framework}")
        return adapter.watch(model, optimizer, scaler=scaler, **options)
    for kind in type(model).__mro__:
        module = _TRAINERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if module is not None:
            if optimizer is not None or scaler is not None:
                msg = f"watch: a {kind.__name__} has its own optimizer and scaler; pass only it and options"
                raise TypeError(msg)
            return import_module(f"gradiometer.integrations.{module}").watch(model, **options)
    optimizers = _optimizers(optimizer)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"watch: expected scaler=torch.amp.GradScaler(...), got {type(scaler).__name__}")
    names, tensors = tracked_parameters(model)
    parts = _parts(optimizers, dict(zip(tensors, names, strict=True)))
    monitor = Monitor(model, **options)
    monitor.set_driver(Driver("watch", tuple(optimizers)))
    loop = _Loop(monitor, optimizers, parts, options)
    for each in optimizers:
        monitor.call_at_close(each.register_step_pre_hook(loop.before).remove)
        monitor.call_at_close(each.register_step_post_hook(loop.after).remove)
    if scaler is not None:
        monitor.skips = scaler.is_enabled()
        # records before `scaler.step`, and ends the step after it, even if skipped
        watched = scaler.step = _WatchedStep(loop, scaler)  # type: ignore[method-assign]
        monitor.call_at_close(watched.unwrap)
    return monitor


def _optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers, without wrappers such as Accelerate's."""
    if given is None:
        raise TypeError("watch: pass the optimizer too: gm.watch(model, optimizer)")
    found = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        inner = getattr(each, "optimizer", None)
        optimizer = inner if isinstance(inner, Optimizer) else each
        if not isinstance(optimizer, Optimizer):
            msg = f"watch: expected a torch.optim.Optimizer, or several, got {type(optimizer).__name__}"
            raise TypeError(msg)
        found.append(optimizer)
    if not found:
        raise ValueError("watch: got no optimizer; pass those that update the model")
    return found


def _parts(optimizers: Sequence[Optimizer], names: dict[Tensor, str]) -> list[list[tuple[str, Tensor]]]:
    """Return the named parameters of each optimizer; those that none has are the last one's.

    An optimizer of master weights, which are copies in a wider dtype, has the parameters that they copy.
    """
    parts, left = [], dict(names)
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for p in held if p in names]
        if not own:
            own = master_copies(held, left)
            if len(own) < len(held):
                raise ValueError(_not_held(optimizer, held))
        parts.append([(names[p], p) for p in own])
        for p in own:
            left.pop(p, None)
    parts[-1] += [(name, p) for p, name in left.items()]
    return parts


def _not_held(optimizer: Optimizer, held: Sequence[Tensor]) -> str:
    """Return the message for an optimizer that holds none of the model's parameters, nor copies of them."""
    kind = type(optimizer).__name__
    if not held:
        return f"watch: this {kind} holds no parameters; add them to it before"
    others = "another tensor" if len(held) == 1 else f"{len(held)} other tensors, the first"
    first = f"{tuple(held[0].shape)} {str(held[0].dtype).removeprefix('torch.')}"
    return (
        f"watch: this {kind} holds none of the watched model's parameters, but {others} of shape {first}: "
        "watch the model that it updates, or create it after the model is moved or replaced. If it holds "
        "copies of the parameters, such as master weights, watch these by name, gm.watch([(name, copy), "
        "...], optimizer), or use gm.Monitor(model) with record() and advance()"
    )


class _Loop:
    """Calls a monitor from optimizers, the last of which ends the step.

    An error ends the watching, and training goes on. ``parts``: the named parameters of each optimizer.
    ``options``: those of the monitor.
    """

    def __init__(
        self,
        monitor: Monitor,
        optimizers: Sequence[Optimizer],
        parts: Sequence[list[tuple[str, Tensor]]],
        options: Mapping[str, Any],
    ) -> None:
        self._monitor, self._optimizers, self._parts, self._options = monitor, optimizers, parts, options
        if len(optimizers) > 1:
            monitor.split_updates([{name for name, _ in part} for part in parts])
        self._has_failed = False
        self._in_scaler = False
        # an optimizer's hooks may be traced
        self._record_outside = torch.compiler.disable(self._record, reason=_NOT_COMPILED)
        self._begin_outside = torch.compiler.disable(self._begin, reason=_NOT_COMPILED)
        self._advance_outside = torch.compiler.disable(self._advance, reason=_NOT_COMPILED)

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the gradients, unless a closure is to compute them."""
        if self._in_scaler:
            return
        if not _has_closure(args, kwargs):
            # set for fused optimizers by a scaler that was not passed
            scale = getattr(optimizer, "grad_scale", None)
            self._record_outside(optimizer, None if scale is None else scale.double().reciprocal().float())
        self._begin_outside(optimizer)

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the step."""
        if self._in_scaler:
            return
        if _has_closure(args, kwargs):
            self._record_outside(optimizer, None)
        self._advance_outside(optimizer)

    def step_of(self, scaler: GradScaler, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``step``, the step of a scaler, and watch it."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if not any(inner is known for known in self._optimizers):
            return step(optimizer, *args, **kwargs)
        is_scaled = scaler.is_enabled() and is_still_scaled(scaler, optimizer)
        self._record_outside(inner, inverse_scale(scaler) if is_scaled else None)
        self._begin_outside(inner)
        self._in_scaler = True
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False
        self._advance_outside(inner)
        return result

    def _begin(self, optimizer: Optimizer) -> None:
        if not self._is_over:
            self._monitor.begin_updates(self._index(optimizer))

    def _record(self, optimizer: Optimizer, inv_scale: Tensor | None) -> None:
        if self._is_over:
            return
        try:
            if len(self._optimizers) == 1:
                self._monitor.record(inv_scale=inv_scale)
                return
            part = self._parts[self._index(optimizer)]
            self._monitor.record(collect_part(part, inv_scale, self._options))
        except Exception as error:  # noqa: BLE001 training goes on
            raise_of_handlers(error)
            self._has_failed = True
            text = "watch: %s; training continues without the monitor"
            _LOG.warning(text, one_line(f"{type(error).__name__}: {error}"))

    def _advance(self, optimizer: Optimizer) -> None:
        if self._is_over:
            return
        if self._options.get("updates") and len(self._optimizers) > 1:
            # now: the loop may change its weights before the others step
            self._monitor.record_updates(self._index(optimizer))
        if optimizer is not self._optimizers[-1]:
            return
        rates = [each.param_groups[0].get("lr") for each in self._optimizers]
        names = ["lr", *(f"lr_{i}" for i in range(1, len(rates)))]
        known = {name: rate for name, rate in zip(names, rates, strict=True) if rate is not None}
        self._monitor.advance(**known)

    def _index(self, optimizer: Optimizer) -> int:
        return next(i for i, each in enumerate(self._optimizers) if each is optimizer)

    @property
    def _is_over(self) -> bool:
        return self._has_failed or self._monitor.closed


class _WatchedStep:
    """The ``step`` of a watched scaler. A copy of the scaler, also a pickled one, has its own step.

    Once undone, it calls the step as it was, in case somebody else has wrapped it again.
    """

    def __init__(self, loop: _Loop, scaler: GradScaler) -> None:
        self._loop: _Loop | None = loop
        self._scaler, self._step = scaler, scaler.step
        self._had_own = "step" in vars(scaler)

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return self._step(optimizer, *args, **kwargs)
        return self._loop.step_of(self._scaler, self._step, optimizer, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._scaler, "step")

    def unwrap(self) -> None:
        """Restore the step."""
        self._loop = None
        if vars(self._scaler).get("step") is self:
            if self._had_own:
                self._scaler.step = self._step
            else:
                del self._scaler.step


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # the first argument is the optimizer itself
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
