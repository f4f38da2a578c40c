"""ExponentStats: histograms of magnitudes of named tensors on the device, and what casts would lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradiometer import ops
from gradiometer.columns import (
    EXPONENTS,
    best_scales,
    format_of,
    log2_of,
    losses,
    of_binades,
    power_of_two,
    quantile,
)
from gradiometer.inputs import Named, check_names, local_shards, named_parameters, named_tensors, present
from gradiometer.stats.device_values import ExponentValues
from gradiometer.stats.host_copy import fetch, outside_of_a_graph
from gradiometer.stats.measure import over_ranks, plain, rows_by_device
from gradiometer.stats.named_stats import NamedStats
from gradiometer.stats.precision_report import PrecisionReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters, Tensors


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ExponentStats(ExponentValues, NamedStats[PrecisionReport]):
    """Histograms of the magnitudes of T named tensors, on their device. Only a report waits for the device.

    They tell, without another read, how many elements a cast to a narrower format would lose, for every
    format and every power-of-two scale from 2**-32 to 2**64. Formats are ``"float16"``, ``"bfloat16"``,
    ``"float8_e4m3fn"`` and ``"float8_e5m2"``, or the torch dtypes. Counts are those of a cast of
    ``x * scale`` that rounds to nearest, ties to even. ExponentStats is a pytree, so
    compiled functions can take and return it.

    Attributes:
        names: T names, one per row.
        columns: ``(T, C) int64``: elements by magnitude, in ascending bins; they merge by sum.
        sharding, origin, local: as in `TensorStats`; after `reduce`, ``local`` are those of this rank.

    ``numel``, ``n_zero``, ``n_nan``, ``n_inf``, ``n_nonfinite``, ``min_exponent`` and ``max_exponent`` are
    properties, ``(T,) int64``; the exponents are ``floor(log2 |x|)`` of the smallest nonzero and the largest
    finite element, 0 if there is none.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect_exponents({"w": torch.tensor([1e-9, 1e-3, 1.0, 3e5])})
    >>> stats.n_flushed("float16"), stats.n_overflowed("float16")
    (tensor([1]), tensor([1]))
    """

    schema = EXPONENTS
    _noun = "tensor"

    @property
    def binades(self) -> Tensor:
        """Elements by exponent, ``(T, 360) int64``; column i counts ``2**(i - 199) <= |x| < 2**(i - 198)``.

        The first also counts all smaller magnitudes other than 0, and the last all larger finite ones.
        Magnitudes are rounded to float32's 24 bits first.
        """
        return of_binades(self.columns)

    def n_flushed(self, format: object, scale: float = 1.0) -> Tensor:  # noqa: A002
        """Return how many nonzero elements a cast of ``x * scale`` makes 0, ``(T,) int64``.

        Args:
            format: a format, see the class.
            scale: a power of two from 2**-32 to 2**64.

        Raises:
            ValueError: for another format or scale.
        """
        return self._losses("n_flushed", format, scale)[0]

    def n_subnormal(self, format: object, scale: float = 1.0) -> Tensor:  # noqa: A002
        """Return how many elements times ``scale`` are below the smallest normal number but not flushed."""
        return self._losses("n_subnormal", format, scale)[1]

    def n_overflowed(self, format: object, scale: float = 1.0) -> Tensor:  # noqa: A002
        """Return how many finite elements a cast of ``x * scale`` makes infinite, ``(T,) int64``.

        ``float8_e4m3fn`` has no infinity: these are the elements that round to more than 448. Torch makes
        them NaN or 448, depending on its version.
        """
        return self._losses("n_overflowed", format, scale)[2]

    def _losses(self, caller: str, form: object, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return losses(self.columns, format_of(form, caller), log2_of(scale, caller))

    def best_scale(self, format: object) -> Tensor:  # noqa: A002
        """Return the power of two by which to multiply each tensor before a cast, ``(T,) float64``.

        It has the fewest elements that overflow; of these scales, the fewest that become 0; then the fewest
        subnormal ones; then it is the one nearest to 1, and the larger of two.
        """
        return power_of_two(best_scales(self.columns, format_of(format, "best_scale")))

    def quantile(self, q: float) -> Tensor:
        """Return the power of two at or below the q-quantile of ``|x|``, ``(T,) float64``.

        Over finite elements; the quantile itself is less than twice that. NaN without finite elements.

        Raises:
            ValueError: if q is not from 0 to 1.
        """
        if not (isinstance(q, int | float) and 0 <= q <= 1):
            raise ValueError(f"quantile: q={q!r}; pass a number from 0 to 1")
        return quantile(self.columns, q)

    def report(self, formats: Iterable[Any] | None = None) -> PrecisionReport:
        """Copy everything to the host and return a table of which tensors fit which format.

        Waits for the device. A row that no rank has measured is left out.

        Args:
            formats: formats as in `n_flushed`; all four by default.

        Raises:
            RuntimeError: inside a compiled function, or while a CUDA graph is captured.
            RankError: if the ranks made different calls, and that was not an error there.
        """
        outside_of_a_graph("report")
        return self.unpacked(*fetch([self.packed()])).in_formats(formats)


def collect_exponents(tensors: Tensors, *, reduce: bool | Ranks = False) -> ExponentStats:
    """Count the elements of tensors by magnitude, in one read, without host synchronization.

    The counts tell what a cast to a narrower format would lose, see `ExponentStats`. Works the same inside
    and outside ``torch.compile``.

    Args:
        tensors: a mapping name -> tensor, (name, tensor) pairs, or tensors, which are named by position.
            Complex tensors count as two real numbers per element; of a DTensor, the local shard counts.
        reduce: whether to add up the histograms of all ranks, as for `gradiometer.collect`: exact, by a SUM
            of int64.

    Returns:
        ExponentStats with a row per tensor.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for names that occur twice.
        RankError: with ``reduce``, if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect_exponents({"w": torch.tensor([0.0, 1e-8, 0.5, 2.0])})
    >>> stats.n_zero, stats.n_flushed("float16"), stats.best_scale("float16")
    (tensor([1]), tensor([1]), tensor([8192.], dtype=torch.float64))
    """
    caller = "collect_exponents"
    named = named_tensors(tensors, caller)
    return over_ranks(reduce, named, caller, lambda _: exponents_of(named, caller), schema=EXPONENTS)


@torch.no_grad()
def exponents_of(named: Named, caller: str) -> ExponentStats:
    """Measure named tensors as `collect_exponents` does; ``caller`` names the caller in error messages."""
    check_names(named.names, caller)
    named = local_shards(named, caller)
    plan = ops.recognize(named.tensors)
    if plan is not None:
        # the list is like one that was measured before, so it is not checked again
        return ExponentStats(named.names, ops.measure_exponents(named.tensors, plan))
    names, tensors = named.names, plain(named, caller)
    if not tensors:
        return ExponentStats(names, torch.empty((0, EXPONENTS.width), dtype=torch.int64, device="cpu"))
    measured = rows_by_device(tensors, lambda rows: [ops.measure_exponents([tensors[i] for i in rows])])
    return ExponentStats(names, measured[0])


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
        grads = present(parameters.names, [p.grad for p in parameters.tensors])
        names = (*parameters.names, *[f"{name}.grad" for name in grads.names])
        named = Named(names, [*parameters.tensors, *grads.tensors])
    else:
        named = named_tensors(source, what)
    return exponents_of(named, what).report(formats)
