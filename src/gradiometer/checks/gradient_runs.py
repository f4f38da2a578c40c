"""Run a step, and copy its outputs and gradients; as given, or without compilation and checkpoints."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from gradiometer.checks.kept_objects import same_bits
from gradiometer.checks.recompute import without_checkpoints
from gradiometer.checks.step_run import StepRun, outputs_of
from gradiometer.inputs import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.optim import Optimizer


def run_step(
    step: Callable[[], Any],
    names: Mapping[Tensor, str],
    optimizers: Iterable[Optimizer],
    order: dict[str, None] | None = None,
    called: list[Optimizer] | None = None,
) -> StepRun:
    """Run a step once, and return copies of what it returned and of the gradients.

    Gradients are read where an optimizer first begins its step, those of other parameters after the step; no
    gradients if the step leaves all of them as they were.

    Args:
        step: called without arguments.
        names: the parameters, and their names.
        optimizers: those that the step may call.
        order: is filled with the names in the order in which the backward pass completes the gradients; only
            for a step that runs eagerly.
        called: gets the optimizers that the step calls.
    """
    grads: dict[str, Tensor] = {}
    calls: list[Optimizer] = [] if called is None else called

    def read(parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            if p in names and names[p] not in grads and p.grad is not None:
                grads[names[p]] = copied(p.grad)

    def before_update(optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            calls.append(optimizer)
            read([p for group in optimizer.param_groups for p in group["params"]])

    def completed(p: Tensor) -> None:
        if order is not None:
            order.pop(names[p], None)
            order[names[p]] = None

    def with_read(optimizer: Optimizer, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            read([p for group in optimizer.param_groups for p in group["params"]])
            return compiled(*args, **kwargs)

        return step

    with ExitStack() as hooks:
        for optimizer in optimizers:
            hooks.callback(optimizer.register_step_pre_hook(before_update).remove)
            own: Any = vars(optimizer).get("step")
            # its hooks are compiled, too
            if hasattr(own, "_torchdynamo_orig_callable"):
                hooks.enter_context(patch.dict(vars(optimizer), step=with_read(optimizer, own)))
        for p in names if order is not None else ():
            if p.is_leaf and p.requires_grad:
                hooks.callback(p.register_post_accumulate_grad_hook(completed).remove)
        before = {p: (p.grad, p.grad._version, copied(p.grad)) for p in names if p.grad is not None}  # noqa: SLF001
        output = step()
    if any(p.grad is not None and (p not in before or _is_new(p.grad, *before[p])) for p in names):
        read(names)
    is_repeated = len(calls) > len({id(x) for x in calls})
    note = "the step calls an optimizer several times; these are the gradients of the first call"
    return StepRun(_outputs(output), grads, (note,) * is_repeated)


def _is_new(grad: Tensor, before: Tensor, version: int, values: Tensor) -> bool:
    """Return whether a gradient is another one than before, or was written."""
    # compiled code may write without a new version
    return grad is not before or grad._version != version or not same_bits(copied(grad), values)  # noqa: SLF001


def copied(tensor: Tensor) -> Tensor:
    """Return a dense copy of a tensor, of a DTensor the whole one: a call for all of its ranks."""
    tensor = tensor.detach()
    if is_dtensor(type(tensor)):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor.to_dense() if tensor.layout != torch.strided else tensor.clone()


def _outputs(output: Any) -> dict[str, Tensor]:
    """Return copies of the floating-point tensors, and the floats, that a step returned."""
    found: dict[str, Tensor] = {}
    for name, value in outputs_of(output):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            found[name] = copied(value)
        elif isinstance(value, float):
            found[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
    return found


@contextmanager
def eagerly(backends: list[Any] | None = None) -> Iterator[None]:
    """Run compiled functions and modules without compilation, and checkpoints without recomputation.

    To ``backends`` those of the compiled code that is called meanwhile are added.
    """
    # without it nothing is compiled
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    with ExitStack() as stack:
        stack.enter_context(without_checkpoints())
        if dynamo is not None:
            of_stance = dynamo._callback_from_stance  # noqa: SLF001

            def noted(callback: Any) -> Any:
                # neither `torch.compiler.disable` nor a return to the caller's state
                if backends is not None and callback not in (None, False):
                    backend = dynamo.innermost_backend(callback)
                    backends.extend([] if backend in backends else [backend])
                return of_stance(callback)

            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patch.object(dynamo, "_callback_from_stance", noted))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield
