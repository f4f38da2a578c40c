"""A mode in which matrix products round their inputs coarsely: how far does that lead from float64?"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_PRODUCTS: Final = frozenset(
    {
        "mm",
        "addmm",
        "addmv",
        "bmm",
        "baddbmm",
        "mv",
        "linear",
        "matmul",
        "convolution",
        "convolution_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "_trilinear",
    }
)


# bits of the mantissa, and an integer of the same size
_FORMATS: Final = {
    torch.float32: (23, torch.int32),
    torch.float16: (10, torch.int16),
    torch.bfloat16: (7, torch.int16),
}


class RoundedProducts(TorchDispatchMode):
    """Rounds the inputs of matrix products, convolutions and attention to few bits.

    A step that runs in it differs from its own float32 run as a healthy one that uses TF32 does, and more: a
    small model with an activation such as ReLU, whose gradient jumps, has so few jumps that 10 bits may show
    none by chance where another rounding shows one.

    Args:
        bits: the number of bits of the mantissa that are kept, of bfloat16 one fewer than it has; TF32 has
            10.
    """

    def __init__(self, bits: int = 8) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
            args = tree_map(lambda x: rounded(x, self._bits), args)
        return func(*args, **(kwargs or {}))


def rounded(x: Any, bits: int) -> Any:
    """Return a tensor rounded to mantissas of a number of bits, and anything else as it is.

    >>> float(rounded(torch.tensor(1 + 2**-11 + 2**-12), bits=10))
    1.0009765625
    """
    if not isinstance(x, Tensor) or x.dtype not in _FORMATS or x.layout != torch.strided:
        return x
    has, integer = _FORMATS[x.dtype]
    lost = has - min(bits, has - 1)
    values = ((x.contiguous().view(integer) + (1 << (lost - 1))) & ~((1 << lost) - 1)).view(x.dtype)
    # the sum would turn NaN into another value, and the largest values into Inf
    return torch.where(x.isfinite() & values.isfinite(), values, x)
