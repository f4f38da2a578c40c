"""Correctly rounded square roots in float64, on every path.

On CPUs that Intel's vector math library serves, torch's eager ``sqrt`` on float64 is off by one unit in the
last place for about 1 % of values, ``sqrt(2.0)`` among them. Its complex ``sqrt`` does not go through that
library, and the root of a number with imaginary part 0 is the real root: the processor's own, correctly
rounded. Inductor's code and other devices have exact roots.

A graph that is traced may run anywhere: compiled by Inductor, or operator by operator, as an exported
program does. So on the CPU it holds ``gradiometer::sqrt``, which is this root in eager and a plain ``sqrt``
in Inductor's code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["sqrt"]

_LIBRARY: Final = torch.library.Library("gradiometer", "FRAGMENT")
_LIBRARY.define("sqrt(Tensor x) -> Tensor")

# builds of torch without Intel's library use the processor's root
_VECTOR_MATH: Final = torch.backends.mkl.is_available()


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of each element. Not differentiable in a compiled graph.

    Args:
        x: float64, no element negative; any shape, strides and device.

    Returns:
        a tensor of the same shape, dtype and device; NaN for NaN.
    """
    if x.device.type != "cpu":
        return x.sqrt()
    if torch.compiler.is_compiling():
        root: Tensor = torch.ops.gradiometer.sqrt(x)
        return root
    return _sqrt(x)


def _sqrt(x: Tensor) -> Tensor:
    root = x.to(torch.complex128).sqrt().real if _VECTOR_MATH else x.sqrt()
    return root.contiguous()


def _sqrt_fake(x: Tensor) -> Tensor:
    _teach_inductor()
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sqrt_vmap(_: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
    return torch.ops.gradiometer.sqrt(x), in_dims[0]


def _teach_inductor() -> None:
    """Let Inductor fuse the root like any other; where it can't be taught, it calls the op."""
    # to import it here would take a second; a fake runs before the graph is lowered
    inductor = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(inductor, "lowerings", {})
    plain: Callable[[Any], Any] | None = lowerings.get(torch.ops.aten.sqrt.default)
    if plain is not None:
        lowerings.setdefault(torch.ops.gradiometer.sqrt.default, plain)


_LIBRARY.impl("sqrt", _sqrt, "CompositeExplicitAutograd")
# not differentiable: the call passes through autograd and leaves no trace
_LIBRARY.impl("sqrt", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("gradiometer::sqrt", _sqrt_fake, lib=_LIBRARY)
torch.library.register_vmap("gradiometer::sqrt", _sqrt_vmap, lib=_LIBRARY)
