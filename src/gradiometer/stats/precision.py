"""Which tensors of a model fit which narrow format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradiometer.inputs import Named, named_parameters, named_tensors
from gradiometer.stats.exponent_stats import ExponentStats, exponents_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.inputs import Parameters
    from gradiometer.stats.precision_report import PrecisionReport


def precision_report(
    source: Parameters | ExponentStats, formats: Iterable[Any] | None = None
) -> PrecisionReport:
    """Report which tensors fit which narrow floating-point format. Waits for the device.

    For each format: how many elements a cast would round to 0 or overflow, and the power-of-two scale that
    loses the fewest.

    Args:
        source: a module, whose parameters and gradients are measured; a mapping, pairs or a list of tensors;
            or `ExponentStats`. Gradients are named after their parameters, with ``.grad``.
        formats: ``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``, or the torch
            dtypes; all four by default.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for another format.

    >>> import torch, gradiometer as gm
    >>> report = gm.precision_report({"w": torch.tensor([1e-9, 0.5, 1.0])}, [torch.float16])
    >>> report["w"].formats["float16"].n_flushed
    1
    """
    what = "precision_report"
    if isinstance(source, ExponentStats):
        return source.report(formats)
    if isinstance(source, nn.Module):
        parameters = named_parameters(source, what)
        grads = [(f"{n}.grad", p.grad) for n, p in zip(*parameters, strict=True) if p.grad is not None]
        named = Named(
            (*parameters.names, *[name for name, _ in grads]),
            [*parameters.tensors, *[grad for _, grad in grads]],
        )
    else:
        named = named_tensors(source, what)
    return exponents_of(named, what).report(formats)
