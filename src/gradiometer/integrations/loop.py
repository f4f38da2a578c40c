"""`watch`: a `Monitor` that the optimizer's step calls, or the callback of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, overload

from torch.amp import GradScaler

from gradiometer.inputs import tracked_parameters
from gradiometer.integrations.model_check import with_contracts
from gradiometer.integrations.optimizers import optimizers_in, parts_of
from gradiometer.integrations.partitioned import framework_of
from gradiometer.integrations.session import STATES
from gradiometer.integrations.training_loop import TrainingLoop
from gradiometer.integrations.unsupported import refuse
from gradiometer.monitor import Monitor
from gradiometer.recorder import Driver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from gradiometer.inputs import Parameters

# the class of a trainer, by the package that defines it -> the module here that watches it, by its `watch`
_TRAINERS: Final = {
    ("transformers", "Trainer"): "huggingface",
    ("accelerate", "Accelerator"): "accelerate",
    ("lightning", "Trainer"): "lightning",
    ("pytorch_lightning", "Trainer"): "lightning",
    ("torchtitan", "Trainer"): "torchtitan",
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
    """Watch a training loop, or the trainer of a framework, with one call.

    In your own loop, the optimizer calls the `Monitor`: each ``optimizer.step()`` first records the gradients
    that it is about to use, and ends the step after the update, with the learning rate of the first parameter
    group. `Monitor.note` adds the loss. Do not call `Monitor.record` and `Monitor.advance` yourself.

    * Gradients are those that the optimizer uses: accumulated, and as they are before they are clipped by
      `torch.nn.utils.clip_grad_norm_` or gradiometer's own functions, whose limit and factor are recorded as
      ``clip_max_norm`` and ``clip_factor``. After another change, such as clipping by value, the changed
      gradients are recorded, and the finding ``changed_gradients`` says so.
    * With a GradScaler, pass ``scaler``: gradients are recorded unscaled, and steps that it skips are
      recorded and marked. Without it, skipped steps are missing.
    * With a closure, as for LBFGS, the gradients of its last evaluation are recorded.
    * With several optimizers, each records its own parameters, and the last one in the list ends the step,
      with ``lr``, ``lr_1``, …
    * If the optimizer holds master weights, copies of the parameters in a wider dtype, their gradients and
      updates are recorded, under the names of the parameters. Without gradients of their own when it steps,
      those of the model's parameters are.
    * A wrapper of an optimizer, such as Accelerate's, Opacus' or schedulefree's, is passed as it is: the
      gradients are those that the optimizer inside uses, and an update is what the wrapper's step does.
    * The model and ``optimizer.step`` may be compiled; the monitor breaks the graph of the latter. In a step
      that is one graph, use a `Monitor`.

    A trainer gets the callback of `gradiometer.integrations`, which creates a monitor for each training run.

    DeepSpeed's ZeRO stages 1 and 2 and its BF16_Optimizer, and Megatron-LM, keep gradients in buffers of
    their own, of which a rank may have a part. These are measured before they are clipped, and merged over
    ranks by the names of the parameters; weights and updates are those of the master weights.

    Args:
        model: as for `Monitor`; or the Trainer of ``transformers``, ``trl``, ``lightning``,
            ``pytorch_lightning`` or ``torchtitan``; or an Accelerator, or a DeepSpeedEngine.
        optimizer: the optimizer, or several in the order in which they step; not for a framework's object.
        scaler: the GradScaler whose ``step`` calls the optimizers; its ``step`` is wrapped.
        options: other arguments of `Monitor`; and ``check``, a batch, or the `ModelReport` of one: the model
            is examined by `check_model` first, and its broken contracts are findings of the first step.

    Returns:
        the `Monitor`, for a ``with`` block; after its `close`, the loop runs without it. For a trainer its
        callback: ``callback.monitor`` is the monitor of the current or last run.

    Raises:
        TypeError: for an object that is not an optimizer, a wrapper of several, or an unknown option.
        ValueError: for an optimizer that holds neither parameters of the model nor copies of them that are
            equal in the parameters' dtype, for a configuration of DeepSpeed or Megatron-LM that is not
            supported, and as for `Monitor`.

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
    if isinstance(model, Iterator):
        # such as model.parameters(), which can be read once
        model = list(model)
    framework = framework_of(model, optimizer)
    if framework is not None:
        adapter = import_module(f"gradiometer.integrations.{framework}")
        return adapter.watch(model, optimizer, scaler=scaler, **options)
    for kind in type(model).__mro__:
        module = _TRAINERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if module is not None:
            if optimizer is not None or scaler is not None:
                msg = f"watch: the {kind.__name__} has its own optimizer and scaler; pass only it and options"
                raise TypeError(msg)
            return import_module(f"gradiometer.integrations.{module}").watch(model, **options)
    refuse(model, optimizer, options.get("ranks", True))
    wrapped = optimizers_in(optimizer)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"watch: expected scaler=torch.amp.GradScaler(...), got {type(scaler).__name__}")
    names, tensors = tracked_parameters(model)
    parts, masters = parts_of([each.optimizer for each in wrapped], dict(zip(tensors, names, strict=True)))
    options = with_contracts(options, model, [each.optimizer for each in wrapped])
    options = {"states": STATES, **options, "optimizer": [each.optimizer for each in wrapped]}
    monitor = Monitor(model, **options)
    loop = TrainingLoop(monitor, wrapped, parts, masters, scaler, options)
    monitor.set_driver(Driver("watch", tuple(loop.optimizers), loop.facts))
    loop.attach()
    return monitor
