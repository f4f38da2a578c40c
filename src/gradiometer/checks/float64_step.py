"""Run a training step in float64: a reference without rounding, apart from that of its inputs."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gradiometer.checks.custom_functions import custom_functions
from gradiometer.checks.kept_state import kept_state
from gradiometer.checks.lifting import WIDE, Lifting
from gradiometer.checks.originals import Originals, in_backward, without_updates
from gradiometer.checks.precision import exchanged
from gradiometer.checks.random_replay import Draws, ReplayError, replaying
from gradiometer.checks.recompute import without_checkpoints
from gradiometer.checks.step_run import StepRun, outputs_of
from gradiometer.control.step_copy import StepCopy, find_parts
from gradiometer.inputs import named_parameters, unwrapped
from gradiometer.stats import repeating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Float64Error(RuntimeError):
    """A step does not run in float64."""


@dataclass(frozen=True, eq=False)
class Float64Run(StepRun):
    """What a step gave in float64.

    Attributes:
        narrow: operators that have no float64, and the dtype that they ran in. If there are any, the run is
            not exact, and comparing with it says no more than comparing with the eager step.
    """

    narrow: Mapping[str, torch.dtype] = field(default_factory=dict)


def float64_step(
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    model: nn.Module,
    draws: Draws | None = None,
    optimizers: Iterable[Optimizer] | None = None,
) -> Float64Run:
    """Run a step eagerly in float64, and return what it returned and its gradients.

    The parameters and buffers of the models that the step can reach are exchanged for copies in float64, and
    so are floating-point arguments, and parameters that the step has from elsewhere. `Lifting` casts all
    other tensors where an operator reads them, so that casts by the model and by autocast change nothing.
    Checkpoints keep their activations.

    Optimizers do not update. Gradients are read where an optimizer would begin its step, those of other
    parameters after the step. If the step calls an optimizer several times, the gradients of the first call
    are returned, since later ones depend on the update.

    Code of the model that looks at dtypes sees float64: ``torch.finfo(x.dtype).min`` is that of float64, and
    a branch for ``torch.float16`` is not taken.

    The step should have run before: what it keeps in caches of its own, made in float64, would stay there.
    Afterwards everything is as before in the models, optimizers, schedulers, scalers and generators that the
    step can reach, and in all tensors. The caller restores other objects, and the random state of other
    libraries than Python, NumPy and torch.

    Args:
        step: the step.
        args: its arguments.
        kwargs: its keyword arguments.
        model: whose gradients are returned.
        optimizers: all that there are, if they are known: looking for them takes long.
        draws: random numbers of a run of the same step `without_checkpoints`; without, the step draws some.

    Raises:
        Float64Error: if the step raises an error in float64.
        ReplayError: if it draws other random numbers than ``draws`` has.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    >>> run = float64_step(lambda x: model(x).sum().backward(), (torch.ones(1, 2),), {}, model)
    >>> list(run.grads), run.grads["weight"].dtype, model.weight.grad
    (['bias', 'weight'], torch.float64, None)
    """
    parts = {"model": model, **find_parts(step, args, kwargs)}
    models = list(dict.fromkeys([unwrapped(x) for x in parts.values() if isinstance(x, nn.Module)]))
    own = named_parameters(model, "check_gradients")
    kept = StepCopy(parts)
    lifting = Lifting(kept, _dtypes(own.tensors))
    originals = Originals(lifting, {id(p): name for name, p in zip(own.names, own.tensors, strict=True)})
    with ExitStack() as stack:
        stack.callback(kept.restore)
        stack.callback(originals.restore_attributes)
        stack.enter_context(repeating(kept.parameters, parts.values()))
        for each in models:
            stack.enter_context(kept_state(each, values=False))
        for each in parts.values():
            if isinstance(each, nn.parallel.DistributedDataParallel):
                # its reducer waits for gradients of the parameters, and has buffers in their dtype
                stack.enter_context(patch.object(each, "forward", functools.partial(_undistributed, each)))
        stack.enter_context(without_checkpoints())
        # without it nothing is compiled
        if "torch._dynamo.eval_frame" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        calls = stack.enter_context(without_updates(originals, _hooked(optimizers)))
        stack.enter_context(custom_functions(originals, lifting))
        stack.enter_context(in_backward(originals))
        try:
            # also a device may have no float64
            stack.enter_context(exchanged(originals.entries(models), wide=True))
            given = originals.inputs(args), originals.inputs(kwargs)
            with nullcontext() if draws is None else replaying(draws), lifting, originals:
                output = step(*given[0], **given[1])
        except ReplayError:
            raise
        except Exception as error:
            raise Float64Error(f"in float64 the step raises {type(error).__name__}: {error}") from error
        # the update, which was left out, may have drawn the rest
        if draws is not None and not calls and draws.used < len(draws.drawn):
            left = len(draws.drawn) - draws.used
            raise ReplayError(
                f"{left} of {len(draws.drawn)} recorded draws are left after the step in float64"
            )
        originals.read(own.tensors)
        outputs = _outputs(output, lifting)
    grads = {name: originals.grads[name] for name in originals.order if name in originals.grads}
    notes = [f"{name} ran in {dtype}: it has no float64" for name, dtype in lifting.narrow.items()]
    if any([count > 1 for count in Counter(calls).values()]):
        notes.append("the step calls an optimizer several times; these are the gradients of the first call")
    return Float64Run(outputs, grads | originals.grads, tuple(notes), dict(lifting.narrow))


def _dtypes(parameters: list[Tensor]) -> list[torch.dtype]:
    """Return the dtypes in which to try an operator that has no float64: first those of the parameters."""
    own = [p.dtype for p in parameters if p.dtype in WIDE and not p.dtype.is_complex]
    return list(dict.fromkeys([*own, torch.float32, torch.bfloat16, torch.float16]))


def _hooked(optimizers: Iterable[Optimizer] | None) -> list[Optimizer]:
    """Return all optimizers that update parameters, also those that the step has from an unknown place."""
    found = gc.get_objects() if optimizers is None else optimizers
    found = [x for x in found if issubclass(type(x), Optimizer)]
    # a wrapper has no hooks: it calls the optimizer that has
    return [x for x in found if hasattr(type(x).step, "hooked")]


def _undistributed(model: nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Call the module that a model distributes, with inputs on its device."""
    if model.device_ids:
        device = torch.device(model.device_type, model.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
    return model.module(*args, **kwargs)


def _outputs(output: Any, lifting: Lifting) -> dict[str, Tensor]:
    """Return copies of the floating-point tensors and the floats in what a step returned."""
    found: dict[str, Tensor] = {}
    for name, value in outputs_of(output):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            x = lifting.wide(value.detach())
            found[name] = x.to_dense() if x.layout != torch.strided else x.clone()
        elif isinstance(value, float):
            found[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
    return found
