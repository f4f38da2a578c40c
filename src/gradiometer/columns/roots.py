"""Correctly rounded square roots in float64, on every path.

Where torch uses Intel's vector math library, its eager ``sqrt`` on float64 CPU tensors is off by one unit in
the last place for about 1 % of values, such as ``sqrt(2.0)``. Its complex ``sqrt`` does not use that
library. For a number with imaginary part 0 it returns the processor's real root, which is correctly rounded.
Inductor's code and other devices round correctly.

A traced graph may run compiled by Inductor, or operator by operator, as an exported program does. So on the
CPU it contains ``gradiometer::sqrt``, which is this root in eager mode and a plain ``sqrt`` in Inductor's
code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY: Final = torch.library.Library("gradiometer", "FRAGMENT")
_LIBRARY.define("sqrt(Tensor x) -> Tensor")

# builds of torch without Intel's library use the processor's root
_VECTOR_MATH: Final = torch.backends.mkl.is_available()


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of each element. Not differentiable in a compiled graph.

    ``x``: float64, no element negative; any shape, strides and device. NaN for NaN.
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
    """Let Inductor compile the op as a plain ``sqrt``; where it cannot, it calls the op."""
    # importing Inductor here would take a second; a fake runs before Inductor lowers the graph
    inductor = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(inductor, "lowerings", {})
    plain: Callable[[Any], Any] | None = lowerings.get(torch.ops.aten.sqrt.default)
    if plain is not None:
        lowerings.setdefault(torch.ops.gradiometer.sqrt.default, plain)


_LIBRARY.impl("sqrt", _sqrt, "CompositeExplicitAutograd")
# not differentiable: autograd passes the call on and records nothing
_LIBRARY.impl("sqrt", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("gradiometer::sqrt", _sqrt_fake, lib=_LIBRARY)
torch.library.register_vmap("gradiometer::sqrt", _sqrt_vmap, lib=_LIBRARY)
