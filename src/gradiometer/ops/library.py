"""The compile-safe ops: schemas, fakes, and the choice between kernels and eager PyTorch.

``gradiometer::tensor_stats`` is opaque to the compiler, because it reads ``data_ptr()``. It is not
differentiable. It is functional, so the compiler removes it from the graph if its result is unused.
``gradiometer::tensor_stats_fingerprints`` also returns fingerprints, from the same read.
The ops are defined through
`torch.library.Library`, which costs two to three times less per call with many tensors than the
``custom_op`` decorator.
"""

from __future__ import annotations

import math
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from gradiometer.columns import NUM_COLUMNS, NUM_FINGERPRINT_COLUMNS, Thresholds
from gradiometer.extras import is_installed
from gradiometer.ops import eager_plan, packing, reference, warm_up
from gradiometer.ops.revision import REVISION
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "INSTALL_COMPILER",
    "driver_error",
    "for_a_graph",
    "measure",
    "norm_on_host",
    "recognize",
    "scale_",
    "tensor_stats",
    "uses_kernels",
    "writable",
]


LIBRARY: Final = torch.library.Library("gradiometer", "DEF")
LIBRARY.define(
    "tensor_stats(Tensor[] tensors, float vanishing, float exploding, float dead, Tensor? inv_scale=None,"
    " str revision='') -> (Tensor columns, Tensor flags)"
)
LIBRARY.define(
    "tensor_stats_fingerprints(Tensor[] tensors, float vanishing, float exploding, float dead,"
    " Tensor? inv_scale=None, str revision='') -> (Tensor columns, Tensor flags, Tensor fingerprints)"
)

# read as Triton reads it; if set, kernels run on CPU tensors, slowly, for tests
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}
_HAS_TRITON: Final = is_installed("triton")
_KERNEL_DEVICES: Final = {"cuda", "xpu"}
INSTALL_COMPILER: Final = (
    "install a C compiler (on Debian and Ubuntu: apt-get install gcc libc6-dev), or set CC to the path of one"
)


def uses_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels measure tensors on this device."""
    if not _HAS_TRITON:
        return False
    if device.type == "cpu":
        return INTERPRETED
    return device.type in _KERNEL_DEVICES and driver_error(device.type) is None


@cache
def driver_error(kind: str) -> str | None:
    """Return why Triton cannot launch kernels on this kind of device, or None if it can; warn once."""
    if not torch.get_device_module(kind).is_available():
        return None  # there are only fake tensors
    from gradiometer import kernels  # noqa: PLC0415 as below

    try:
        kernels.load_driver()
    except Exception as error:  # noqa: BLE001 the compiler or the linker may fail in any way
        # compilers color their messages
        cause = printable((str(error).strip() or type(error).__name__).splitlines()[0])
        reason = f"Triton cannot build its driver ({cause})"
        msg = (
            f"{reason}, so gradiometer measures {kind} tensors with eager PyTorch, which is slower and makes "
        )
        warnings.warn(f"{msg}the host wait for the device at every call; {INSTALL_COMPILER}", stacklevel=2)
        return reason
    return None


def tensor_stats(
    tensors: Sequence[Tensor], thresholds: Thresholds, inv_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Measure tensors of one device in one read.

    Args:
        tensors: at least one floating-point or complex strided tensor; any shapes, strides, dtypes.
        thresholds: the limits for the flags.
        inv_scale: one element on the same device; the statistics are those of ``inv_scale * x``.

    Returns:
        columns ``(T, C) float64`` in the order of `gradiometer.columns.schema.COLUMNS`, and flags
        ``(T,) int32``, on the tensors' device.
    """
    return measure(tensors, thresholds, inv_scale, recognize(tensors))[:2]


def measure(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    plan: packing.LaunchPlan | None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `tensor_stats` does; also return fingerprints, ``(T, 3) int64``, if asked.

    ``plan`` is the result of `recognize` for these tensors. Fingerprints are those of the tensors' own bits,
    whatever ``inv_scale`` is.
    """
    if plan is not None and (inv_scale is None or is_plain(inv_scale)):
        return measure_now(tensors, thresholds, inv_scale, plan, fingerprint=fingerprint)
    limits = thresholds.vanishing, thresholds.exploding, thresholds.dead
    with torch.no_grad():
        if fingerprint:
            return torch.ops.gradiometer.tensor_stats_fingerprints(tensors, *limits, inv_scale, REVISION)  # type: ignore[no-any-return]
        return *torch.ops.gradiometer.tensor_stats(tensors, *limits, inv_scale, REVISION), None


def recognize(tensors: Sequence[Tensor]) -> packing.LaunchPlan | None:
    """Return the plan of a known list like this one, if it can be measured without the dispatcher.

    That saves 0.1 us per tensor, but compilers, modes and profilers intercept calls in the dispatcher.
    Dispatch modes, tracing and functorch change the dispatch keys, which torch's guards compare.
    """
    # Dynamo folds this condition: its graph contains the op
    if torch.compiler.is_compiling():
        return None
    return None if _profiler_enabled() or warm_up.in_function_mode() else writable(tensors)


def writable(tensors: Sequence[Tensor]) -> packing.LaunchPlan | None:
    """Do what `recognize` does, for `scale_`, which has no op that others could intercept."""
    if torch.compiler.is_compiling():
        return None
    with without_grad():
        plan = packing.recognize(tensors)
    return plan if plan is not None and plan.direct else None


def norm_on_host(tensors: Sequence[Tensor]) -> float | None:
    """Return the L2 norm of all tensors together.

    None unless `recognize` has a plan for them, and eager PyTorch measures them on the CPU.
    """
    with without_grad():
        plan = recognize(tensors)
        if plan is None or plan.device.type != "cpu" or uses_kernels(plan.device):
            return None
        with without_autocast(plan.device):
            return math.sqrt(reference.sumsq(tensors))


def is_plain(x: Tensor) -> bool:
    """Return whether code that bypasses the dispatcher can read a tensor."""
    # the dispatcher allocates memory for zero tensors, and resolves lazy negation
    return type(x) is Tensor and not (x.is_neg() or x._is_zerotensor())  # noqa: SLF001 it has no public name


def _tensor_stats(
    tensors: list[Tensor], vanishing: float, exploding: float, dead: float, inv_scale: Any = None, *_: str
) -> tuple[Tensor, Tensor]:
    return measure_now(tensors, Thresholds(vanishing, exploding, dead), inv_scale)[:2]


def _tensor_stats_fingerprints(
    tensors: list[Tensor], vanishing: float, exploding: float, dead: float, inv_scale: Any = None, *_: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    return measure_now(tensors, Thresholds(vanishing, exploding, dead), inv_scale, fingerprint=True)


def measure_now(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    plan: packing.LaunchPlan | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Measure at once; ``plan``: the result of `packing.recognize`, in a call from eager mode."""
    device = tensors[0].device
    with without_grad(), without_autocast(device):
        if not uses_kernels(device):
            plan = plan or packing.recognize(tensors) or packing.remember(tensors)
            if plan.direct and plan.eager is None:
                plan.eager = eager_plan.plan_of(tensors)
            return reference.tensor_stats(tensors, thresholds, inv_scale, plan.eager, fingerprint=fingerprint)
        with launching_on(device):
            return run_kernels(tensors, thresholds, inv_scale, plan, fingerprint=fingerprint)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current, so that kernels are launched on it."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device.type).device(device)


def without_grad() -> AbstractContextManager[None]:
    # no_grad takes 2.5 us: skip it if grad mode is already off
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    # autocast would change the dtypes of the reference's own operators
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def run_kernels(
    tensors: Sequence[Tensor],
    thresholds: Thresholds,
    inv_scale: Tensor | None,
    plan: packing.LaunchPlan | None,
    gate: Tensor | None = None,
    *,
    fingerprint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    from gradiometer import kernels  # noqa: PLC0415 triton is imported when a kernel is first needed

    tuning = kernels.tuning
    keep = plan is not None or not warm_up.is_possible()
    count = len(tensors)
    narrow = [i for i, x in enumerate(tensors) if x.itemsize == 1] if fingerprint else []
    if narrow:
        # the kernels read formats of one byte as wider ones; the bits are read from copies, as more rows
        tensors, plan = [*tensors, *[packing.in_float32(tensors[i]) for i in narrow]], None
    packed = packing.pack(tensors, tuning.CHUNK, tuning.MAX_CHUNKS, plan, keep=keep, in_words=fingerprint)
    chunk_map = packed.chunk_map
    partials = torch.empty(
        (len(kernels.PARTIALS), chunk_map.num_chunks), dtype=torch.float64, device=packed.table.device
    )
    bits = None
    if fingerprint:
        shape = kernels.NUM_FINGERPRINT_PARTIALS, chunk_map.num_chunks
        bits = torch.empty(shape, dtype=torch.int64, device=packed.table.device)
    for group in chunk_map.groups:
        kernels.moments(
            packed.pointers,
            packed.table,
            partials,
            group.dtype,
            group.first_chunk,
            group.num_chunks,
            chunk_map.num_tensors,
            gate,
            bits,
        )
    columns, flags = kernels.finalize(packed.table, partials, chunk_map.num_tensors, thresholds, inv_scale)
    if bits is None:
        return columns, flags, None
    fingerprints = kernels.finalize_fingerprints(packed.table, bits, chunk_map.num_tensors)
    for extra, i in enumerate(narrow, start=count):
        fingerprints[i].copy_(fingerprints[extra])
        fingerprints[i, 0] = tensors[i].numel()
    return columns[:count], flags[:count], fingerprints[:count]


def for_a_graph(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the arguments of an op that changes a tensor; in a graph, complex ones as their real views.

    Inductor's pass for such ops does not support complex arguments.
    """
    if not torch.compiler.is_compiling():
        return tensors
    return [torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x for x in tensors]


def scale_(tensors: Sequence[Tensor], factor: Tensor, plan: packing.LaunchPlan) -> None:
    """Multiply tensors of one device in place, by a kernel that touches none whose factor is 1.

    Args:
        tensors: those passed to `writable`; no two share memory.
        factor: 0-d float64 on their device, at most 1; or one for each tensor.
        plan: the result of `writable`.
    """
    # this bypasses the dispatcher, so we bump the version counters for autograd ourselves
    torch.autograd.graph.increment_version(tensors)
    device = tensors[0].device
    with launching_on(device):
        from gradiometer import kernels  # noqa: PLC0415 as above

        tuning = kernels.tuning
        keep = not warm_up.in_function_mode()
        packed = packing.pack(tensors, tuning.CHUNK, tuning.MAX_CHUNKS, plan, keep=keep)
        # in reverse, as the kernel does with the chunks of a group
        for group in reversed(packed.chunk_map.groups):
            kernels.scale(
                packed.pointers,
                packed.table,
                factor,
                group.dtype,
                group.first_chunk,
                group.num_chunks,
                packed.chunk_map.num_tensors,
            )


def _tensor_stats_fake(tensors: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    first = tensors[0]
    columns = first.new_empty((len(tensors), NUM_COLUMNS), dtype=torch.float64)
    return columns, first.new_empty((len(tensors),), dtype=torch.int32)


def _tensor_stats_fingerprints_fake(tensors: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    columns, flags = _tensor_stats_fake(tensors)
    size = (columns.shape[0], NUM_FINGERPRINT_COLUMNS)
    return columns, flags, columns.new_empty(size, dtype=torch.int64)


LIBRARY.impl("tensor_stats", _tensor_stats, "CompositeExplicitAutograd")
LIBRARY.impl("tensor_stats_fingerprints", _tensor_stats_fingerprints, "CompositeExplicitAutograd")
# not differentiable: autograd passes the calls on and records nothing
for _name in ("tensor_stats", "tensor_stats_fingerprints"):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("gradiometer::tensor_stats", _tensor_stats_fake, lib=LIBRARY)
torch.library.register_fake(
    "gradiometer::tensor_stats_fingerprints", _tensor_stats_fingerprints_fake, lib=LIBRARY
)
