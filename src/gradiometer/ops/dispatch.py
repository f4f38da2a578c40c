"""Decide how a call is run: by kernels or eager PyTorch, through the dispatcher or past it."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from gradiometer.extras import is_installed
from gradiometer.ops import launch_plans, uploads
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

# read as Triton reads it; if set, kernels run on CPU tensors, slowly, for tests
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}
_HAS_TRITON: Final = is_installed("triton")
_KERNEL_DEVICES: Final = {"cuda", "xpu"}
# it has no state, so all calls share it
_NOTHING: Final = nullcontext()
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
    from gradiometer import kernels  # noqa: PLC0415 triton is imported when a kernel is first needed

    try:
        kernels.load_driver()
    except Exception as error:  # noqa: BLE001 the compiler or the linker may fail in any way
        # compilers color their messages
        cause = printable((str(error).strip() or type(error).__name__).splitlines()[0])
        reason = f"Triton cannot build its driver ({cause})"
        msg = f"{reason}, so gradiometer measures {kind} tensors with eager PyTorch, which is slower and "
        warnings.warn(
            f"{msg}makes the host wait for the device at every call; {INSTALL_COMPILER}", stacklevel=2
        )
        return reason
    return None


def recognize(tensors: Sequence[Tensor]) -> launch_plans.LaunchPlan | None:
    """Return the plan of a known list like this one, if it can be measured without the dispatcher.

    That saves 0.1 us per tensor, but compilers, modes and profilers intercept calls in the dispatcher.
    Dispatch modes, tracing and functorch change the dispatch keys, which torch's guards compare.
    """
    # Dynamo folds this condition: its graph contains the op
    if torch.compiler.is_compiling():
        return None
    return None if _profiler_enabled() or uploads.in_function_mode() else writable(tensors)


def writable(tensors: Sequence[Tensor]) -> launch_plans.LaunchPlan | None:
    """Do what `recognize` does, for `scale_`, which has no op that others could intercept."""
    if torch.compiler.is_compiling():
        return None
    with without_grad():
        plan = launch_plans.recognize(tensors)
    return plan if plan is not None and plan.direct else None


def is_plain(x: Tensor) -> bool:
    """Return whether code that bypasses the dispatcher can read a tensor."""
    # the dispatcher allocates memory for zero tensors, and resolves lazy negation
    return type(x) is Tensor and not (x.is_neg() or x._is_zerotensor())  # noqa: SLF001 it has no public name


def for_a_graph(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the arguments of an op that changes a tensor; in a graph, complex ones as their real views.

    Inductor's pass for such ops does not support complex arguments.
    """
    if not torch.compiler.is_compiling():
        return tensors
    return [torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x for x in tensors]


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current, so that kernels are launched on it."""
    return _NOTHING if device.type == "cpu" else torch.get_device_module(device.type).device(device)


def without_grad() -> AbstractContextManager[None]:
    """Disable grad mode."""
    # no_grad takes 2.5 us: skip it if grad mode is already off. And torch cannot load an exported program in
    # which one encloses another one, and nothing else
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disable autocast for this kind of device."""
    # autocast would change the dtypes of the reference's own operators
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else _NOTHING
