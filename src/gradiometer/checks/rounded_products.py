"""A mode in which matrix products round their inputs as TF32 does: how far does that lead from float64?"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# the mantissa's last 13 bits, which TF32 does not have, and half of the last bit that it has
_LOST: Final = (1 << 13) - 1
_HALF: Final = 1 << 12
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


class RoundedProducts(TorchDispatchMode):
    """Rounds the float32 inputs of matrix products, convolutions and attention to TF32's 10-bit mantissas.

    A step that runs in it differs from its own float32 run as a healthy one that uses TF32 does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
            args = tree_map(rounded_to_tf32, args)
        return func(*args, **(kwargs or {}))


def rounded_to_tf32(x: Any) -> Any:
    """Return a float32 tensor rounded to 10-bit mantissas, and anything else as it is.

    >>> float(rounded_to_tf32(torch.tensor(1 + 2**-11 + 2**-12)))
    1.0009765625
    """
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.layout != torch.strided:
        return x
    bits = x.contiguous().view(torch.int32)
    # the sum would turn NaN into another value
    return torch.where(x.isfinite(), ((bits + _HALF) & ~_LOST).view(torch.float32), x)
