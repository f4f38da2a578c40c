"""check_finite: NaN and Inf in weights, gradients, buffers and the loss, by name, in one transfer."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn

from gradiometer.control.finite_report import FiniteReport
from gradiometer.distributed import is_active
from gradiometer.inputs import Named, check, check_names, describe, named_parameters, named_tensors, present
from gradiometer.stats import (
    Report,
    fetch,
    materialize,
    measure,
    outside_of_a_graph,
    over_ranks,
    redistributed,
)

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.stats import TensorReport, TensorStats


def check_finite(
    model: Parameters,
    loss: Tensor | float | None = None,
    *,
    buffers: bool = False,
    reduce: bool | Ranks | None = None,
) -> FiniteReport:
    """Check a model's weights and gradients, and the loss, for NaN and Inf. Waits for the device once.

    Call it between ``backward()`` and ``step()``. It takes one transfer to the host for any number of
    parameters, dtypes and devices, and changes nothing. In a compiled step, use ``found_inf`` of
    `collect_grads`.

    Args:
        model: a module, or parameters as a mapping, an iterable, or (name, parameter) pairs. Frozen
            parameters count as weights; integer parameters are left out. Parameters without a
            gradient are left out of the gradients.
        loss: a number, or a real tensor of any shape, dtype and device with at least one element.
        buffers: whether to check a module's floating-point and complex buffers too, including
            non-persistent ones. Off by default: masks, such as those of attention, hold -inf on purpose.
        reduce: whether to check the weights and gradients of all ranks: True, False, or a
            `gradiometer.Ranks`; None: only if a parameter is a DTensor. If so, all ranks have to make this
            call. The loss and buffers are always this rank's, so ranks that decide together should use
            ``report.grads.found_inf`` and ``report.weights.found_inf``, not ``has_issues``.

    Returns:
        A `FiniteReport` of the non-finite tensors, by name; ``print`` shows it with a diagnosis.

    Raises:
        RuntimeError: inside a compiled function; call it outside.
        TypeError: for a weight, gradient or buffer that cannot be measured, by name; for a loss that is
            not a real number or tensor; for ``buffers=True`` without a module.
        ValueError: for a loss with no elements, or beyond the range of float64.
        RankError: if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> loss = model(torch.tensor([[3.0, float("inf")]])).mean()
    >>> loss.backward()
    >>> report = gm.check_finite(model, loss)
    >>> report.has_issues, report.inf_grads, report.loss_is_finite
    (True, ['weight'], False)
    """
    outside_of_a_graph("check_finite")
    parameters = named_parameters(model, "check_finite")
    names, tensors = parameters
    parts: dict[str, Named] = {}
    if isinstance(loss, Tensor):
        parts["loss"] = Named(("loss",), [_real(loss)])
    elif loss is not None and not isinstance(loss, Real):
        raise TypeError(f"check_finite: the loss must be a real number or tensor, got {type(loss).__name__}")
    elif isinstance(loss, int) and abs(loss) > sys.float_info.max:
        raise ValueError(f"check_finite: the loss is {describe(loss)}; pass a float or a tensor")
    # integer tensors, such as quantized weights, are always finite
    parts["weights"] = present(names, [None if _is_integer(p) else p for p in tensors])
    parts["grads"] = present(names, [p.grad for p in tensors])
    if buffers:
        parts["buffers"] = _buffers(model)
    reports = _over_ranks(parts, parameters, reduce) if reduce or is_active() else _together(parts)
    row = reports["loss"]["loss"] if "loss" in reports else None
    value = _mean(row) if row else None if loss is None else float(loss)
    return FiniteReport(
        loss=value,
        loss_is_finite=row.n_nonfinite == 0 if row else value is None or math.isfinite(value),
        weights=reports["weights"],
        grads=reports["grads"],
        buffers=reports.get("buffers"),
        loss_report=row,
    )


# measurement

# prefixes of error messages
_WORDS: Final = {
    "loss": "check_finite",
    "weights": "check_finite, weights",
    "grads": "check_finite, gradients",
    "buffers": "check_finite, buffers",
}


def _together(parts: dict[str, Named]) -> dict[str, Report]:
    """Measure all parts in one read, with one rank; a CPU loss is measured apart from a model on a device."""
    groups = [parts]
    if "loss" in parts and parts["loss"].tensors[0].device.type == "cpu":
        model = {kind: part for kind, part in parts.items() if kind != "loss"}
        if any([part.tensors and part.tensors[0].device.type != "cpu" for part in model.values()]):
            groups = [model, {"loss": parts["loss"]}]
    stats = [_measure(group) for group in groups]
    reports = {}
    found = fetch([x for one in stats for x in (one.columns, one.flags)])
    for group, columns, flags in zip(groups, found[::2], found[1::2], strict=True):
        sizes = [len(part.names) for part in group.values()]
        rows = zip(group.items(), columns.split(sizes), flags.split(sizes), strict=True)
        for (kind, (names, _)), own, bits in rows:
            reports[kind] = Report(names, own, flags=bits)
    return reports


def _measure(parts: dict[str, Named]) -> TensorStats:
    tensors: list[Tensor] = []
    for kind, part in parts.items():
        check_names(part.names, _WORDS[kind])
        tensors += part.tensors
    try:
        # named by position, since a weight and its gradient share a name
        return measure(named_tensors(tensors, "check_finite"), "check_finite")
    except TypeError:
        # check again by name, so that the error contains it
        for kind, part in parts.items():
            check(part, _WORDS[kind])
        raise


def _over_ranks(parts: dict[str, Named], parameters: Named, reduce: bool | Ranks | None) -> dict[str, Report]:  # noqa: FBT001
    """Measure each part; weights and gradients are merged over the ranks as in `over_ranks`."""
    found = {}
    for kind, part in parts.items():

        def measured(ranks: Ranks | None, kind: str = kind, part: Named = part) -> TensorStats:
            named = redistributed(part, parameters, ranks, "check_finite") if kind == "grads" else part
            return measure(named, _WORDS[kind])

        is_merged = kind in {"weights", "grads"}
        found[kind] = (
            over_ranks(reduce, parameters, "check_finite", measured) if is_merged else measured(None)
        )
    reports: dict[str, Report] = materialize(found)
    return reports


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _real(loss: Tensor) -> Tensor:
    if loss.is_complex():
        msg = f"check_finite: the loss must be real, got {loss.dtype}; pass loss.real or loss.abs()"
        raise TypeError(msg)
    if loss.numel() == 0:
        msg = f"check_finite: the loss of shape {tuple(loss.shape)} has no elements; "
        raise ValueError(msg + "pass loss=None to skip it")
    # a quantized loss is refused like any other tensor
    return loss if loss.is_floating_point() or loss.is_quantized else loss.double()


def _buffers(model: Parameters) -> Named:
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_finite: buffers=True needs a module, got {type(model).__name__}")
    # integer buffers, such as counters or indices, are always finite
    pairs = [(name, buffer) for name, buffer in model.named_buffers() if not _is_integer(buffer)]
    return named_tensors(pairs, "check_finite")


def _mean(row: TensorReport) -> float:
    # row.mean covers the finite elements only
    if row.n_nan or (row.n_posinf and row.n_neginf):
        return math.nan
    if row.n_inf:
        return math.inf if row.n_posinf else -math.inf
    return row.mean
