"""check_gradients: is this gradient right? Run a step and a reference from one state, and compare them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradiometer.checks.allowed_error import FACTOR
from gradiometer.inputs import named_parameters
from gradiometer.stats import outside_of_a_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from gradiometer.checks.gradient_report import GradientReport

_WHAT = "check_gradients"


def check_gradients(
    step: Callable[..., Any],
    *args: Any,
    model: nn.Module,
    against: Any = "eager",
    optimizer: Optimizer | None = None,
    factor: float = FACTOR,
    **kwargs: Any,
) -> GradientReport:
    """Run a training step and a reference from one state, and name the gradients that are wrong.

    The step runs as given, compiled or not. The reference is the same step in eager mode, and both are
    compared with the same step in float64: a tensor is wrong if it is farther from that than the rounding of
    the eager step explains. So rounding is measured, not guessed. The report names the first wrong tensor in
    the order of the backward pass, its module, its error, and what kind of fault the numbers tell of.

    Gradients are read where an optimizer begins its step, those of other parameters after the step. The step
    may have several micro-batches, checkpoints, autocast and a GradScaler. What it returns is compared, too.

    Random numbers: eager mode and float64 have the same ones. Compiled code draws others. Then the step is
    compiled again, with ``torch._inductor.config.fallback_random`` and without dropout, and the report says
    so. The program that trains is checked by its loss, if the step returns it: with the same random state,
    the slope of the loss along the gradient is the norm of the gradient. If neither the first nor the last is
    possible, the step does not pass.

    The smallest fault that is found depends on how the step rounds: 1e-4 of a gradient's norm in float32
    without TF32, 0.3 % with it or if gradients may jump, as with ReLU, and a few per cent in 16 bits.

    Afterwards everything is as before: parameters, gradients, buffers, attributes and hooks of models;
    optimizers, schedulers, scalers and generators; tensors and containers in the arguments, the closure and
    the globals of the step; random states. Monitors do not record these runs. Files, attributes of classes
    and of Python modules, and what other processes do are not restored; iterators can't be, so a step that
    has one, such as that of a data loader, is an error: pass the batch. The check runs the step 5 times, a
    compiled step with random numbers 20 times or more, and needs memory for 6 copies of the model's state.

    With DistributedDataParallel, all ranks have to make this call, and the float64 gradients are averaged
    over the ranks. Parameters that are DTensors have no float64 run. Faults of the parallel layers themselves
    are the same in eager mode: pass a function that computes the gradients of the whole batch in one process,
    or what `save_reference` has saved of it.

    Args:
        step: a function that makes a training step, or the forward and backward of one.
        args: arguments of the step.
        model: the model whose gradients are compared.
        against: ``"eager"``; or ``"float64"``, which also finds what eager mode computes wrong in its own
            precision, such as an overflow; or a function with the arguments of the step, which runs in eager
            mode, and tells a formula that is wrong in any precision. It leaves gradients in the parameters,
            or returns a mapping from names of parameters to gradients, such as those of another copy of the
            model. Its outputs are compared where both have the same names, and with several ranks not at all.
            Or the path of a file that `save_reference` has written, for a step from the same weights and
            without earlier gradients.
        optimizer: its update is compared too, from the same gradients, as are those of optimizers that the
            step calls: with ``foreach=False, fused=False`` in eager mode. ``torch.compile(optimizer.step)``
            is compared as it is; an update that is compiled together with more can't be.
        factor: by how much an error may exceed that of eager mode.
        kwargs: keyword arguments of the step.

    Returns:
        A `GradientReport`, false if a tensor is wrong or too little could be compared; ``print`` shows it.

    Raises:
        TypeError: if the step is not a function or the model not a module.
        ValueError: if the model has no parameters or the step leaves no gradients or has an iterator,
            if two runs of it from the same state have different gradients, or for any other ``against``.
        RuntimeError: inside a compiled function. Errors of the step are passed on.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(3, 1)
    >>> def step(x):
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> report = gm.check_gradients(step, torch.randn(4, 3), model=model)
    >>> bool(report), [row.name for row in report]
    (True, ['output', 'bias', 'weight'])
    """
    outside_of_a_graph(_WHAT)
    if not callable(step):
        msg = f"{_WHAT}: the step must be a function, got {type(step).__name__}; pass the function itself, "
        raise TypeError(msg + "and then its arguments")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_WHAT}: model must be a module, got {type(model).__name__}; pass model=...")
    if not named_parameters(model, _WHAT).names:
        raise ValueError(f"{_WHAT}: {type(model).__name__} has no parameters; pass the model that is trained")
    # slow to import
    from gradiometer.checks.compared_step import compared_step  # noqa: PLC0415

    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "factor": factor}
    return compared_step(step, args, kwargs, against=_reference(against), **options)


def _reference(against: Any) -> Any:
    """Return a saved reference for a path, and other references as they are."""
    from gradiometer.checks.reference_file import read_reference  # noqa: PLC0415 as above
    from gradiometer.checks.saved_reference import SavedReference  # noqa: PLC0415

    if callable(against) or isinstance(against, SavedReference):
        return against
    if isinstance(against, str | os.PathLike):
        if against in {"eager", "float64"}:
            return against
        if Path(against).is_file():
            return read_reference(against)
    msg = f"{_WHAT}: against={against!r} is neither 'eager' or 'float64' nor a file of gm.save_reference; "
    raise ValueError(msg + "pass one of these, or a function")
