"""save_reference: run a step once, and keep in a file what its gradients are compared with elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradiometer.checks.kept_state import kept_state
from gradiometer.checks.reference_file import write_reference
from gradiometer.checks.saved_reference import reference_of
from gradiometer.checks.step_run import StepRun
from gradiometer.inputs import named_parameters
from gradiometer.stats import leaves, outside_of_a_graph

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from torch import nn

_WHAT = "save_reference"


def save_reference(
    path: str | os.PathLike[str],
    step: Callable[..., Any],
    *args: Any,
    model: nn.Module,
    projections: int = 64,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Run a step in one process, and save what a run on many ranks is compared with.

    The file is JSON. Of each gradient and each weight it has the norm and sums with random signs, and of each
    gradient the error that rounding gives it. Afterwards everything is as before.

    Args:
        path: the file to write; it is replaced if it exists.
        step: calls the model and ``backward()``, and may return the loss.
        *args: arguments of the step.
        model: the model whose gradients are saved, on one process, with the weights of the run on many ranks.
        projections: the number of sums for each tensor: 8, 16, 32, 64, 128 or 256.
        seed: of the signs.
        **kwargs: keyword arguments of the step.

    Raises:
        ValueError: if the step leaves no gradient.
        OSError: if the file can't be written.

    >>> import pathlib, tempfile, torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> step = lambda x: model(x).sum().backward()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "reference.json")
    ...     gm.save_reference(path, step, torch.ones(4, 2), model=model)
    ...     print(path.read_text()[:45])
    {"format":"gradiometer reference","version":1
    """
    outside_of_a_graph(_WHAT)
    named = named_parameters(model, _WHAT)
    weights = dict(zip(named.names, named.tensors, strict=True))
    reference, exact, rounded = _runs(step, args, kwargs, model, weights)
    if not reference.grads:
        msg = f"{_WHAT}: the step leaves no gradient of the model's parameters; call backward() in it"
        raise ValueError(msg)
    saved = reference_of(reference, exact, weights, rounded=rounded, projections=projections, seed=seed)
    write_reference(path, saved)


def _runs(
    step: Callable[..., Any], args: Any, kwargs: Any, model: nn.Module, parameters: Mapping[str, Tensor]
) -> tuple[StepRun, StepRun | None, StepRun | None]:
    """Return a run of the step, one in float64, and one with coarse matrix products."""
    with kept_state(model):
        for p in parameters.values():
            p.grad = None
        returned = step(*args, **kwargs)
        outputs = {
            name: x.detach().clone() for name, x in leaves("output", returned) if isinstance(x, Tensor)
        }
        grads = {
            name: p.grad.detach().clone()
            for name, p in reversed(list(parameters.items()))
            if p.grad is not None
        }
    return StepRun(outputs, grads), None, None
