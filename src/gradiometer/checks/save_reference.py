"""save_reference: run a step once, and keep in a file what its gradients are compared with elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradiometer.inputs import named_parameters
from gradiometer.stats import outside_of_a_graph

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

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
    gradient the error that rounding gives it. The step runs in eager mode and in float64, from gradients of
    None. Afterwards everything is as before.

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
    # slow to import
    from gradiometer.checks.reference_file import write_reference  # noqa: PLC0415
    from gradiometer.checks.reference_runs import Runs  # noqa: PLC0415
    from gradiometer.checks.saved_reference import reference_of  # noqa: PLC0415

    runs = Runs(step, args, kwargs, model=model, clears=True)
    with runs.quietly():
        found = runs.references(step)
    if not found.eager.grads:
        msg = f"{_WHAT}: the step leaves no gradient of the model's parameters; call backward() in it"
        raise ValueError(msg)
    signs: dict[str, int] = {"projections": projections, "seed": seed}
    saved = reference_of(found.eager, found.exact, weights, rounded=found.rounded, notes=found.notes, **signs)
    write_reference(path, saved)
