"""A `Monitor` for what an Accelerator of Hugging Face Accelerate has prepared."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from gradiometer.integrations import loop
from gradiometer.integrations.frameworks import has_whole_gradients, scaler_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.monitor import Monitor

# with these, the model's parameters are not the trained ones unless they are DTensors
_SHARDED: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"})


def watch(accelerator: Any, **options: Any) -> Monitor:
    """Watch the models and optimizers that an Accelerator has prepared; return the monitor.

    Each real step of an optimizer is recorded once, whatever number of batches `Accelerator.accumulate` puts
    together. With one optimizer, the mean of the losses passed to `Accelerator.backward` is the step's loss.

    Raises:
        ValueError: before `Accelerator.prepare`.
        TypeError: if a rank has neither full gradients nor DTensors, and for an unknown option.
    """
    # without public names
    models: list[Any] = getattr(accelerator, "_models", [])
    optimizers: list[Any] = getattr(accelerator, "_optimizers", [])
    if not models or not optimizers:
        missing = "optimizer" if models else "model"
        msg = (
            f"watch: this Accelerator has prepared no {missing}; call accelerator.prepare(model, optimizer) "
        )
        raise ValueError(msg + "before gm.watch(accelerator)")
    kind = str(getattr(accelerator, "distributed_type", "NO")).rpartition(".")[2]
    if not all([has_whole_gradients(model, sharded=kind in _SHARDED) for model in models]):
        msg = f"watch: with {kind} by Accelerate, ranks have neither full gradients nor DTensors; use FSDP "
        raise TypeError(msg + "version 2")
    tracked: nn.Module | Mapping[str, nn.Module] = models[0]
    if len(models) > 1:
        tracked = {f"model_{i}": model for i, model in enumerate(models)}
    monitor = loop.watch(tracked, optimizers, scaler=scaler_of(accelerator), **options)
    if len(optimizers) == 1:
        _note_losses(accelerator, monitor)
    return monitor


def _note_losses(accelerator: Any, monitor: Monitor) -> None:
    """Note the mean of the losses since the last step at each ``backward``, until the monitor is closed."""
    backward, had_own = accelerator.backward, "backward" in vars(accelerator)
    losses: list[Tensor] = []
    step = monitor.step

    @wraps(backward)
    def noting(loss: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal step
        result = backward(loss, *args, **kwargs)
        if monitor.closed:
            return result
        if isinstance(loss, Tensor) and loss.numel() == 1:
            now = loss.detach().clone()
            if monitor.step != step:
                losses.clear()
                step = monitor.step
            losses.append(now)
            monitor.note(loss=sum(losses[1:], losses[0]) / len(losses))
        return result

    def unwrap() -> None:
        if vars(accelerator).get("backward") is noting:
            if had_own:
                accelerator.backward = backward
            else:
                del accelerator.backward

    accelerator.backward = noting
    monitor.call_at_close(unwrap)
