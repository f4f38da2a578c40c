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


# operators whose derivative jumps, or whose result does
_JUMPS: Final = frozenset(
    {
        *(
            "relu",
            "relu6",
            "prelu",
            "_prelu_kernel",
            "leaky_relu",
            "rrelu_with_noise",
            "hardtanh",
            "threshold",
        ),
        *(
            "hardswish",
            "hardsigmoid",
            "hardshrink",
            "softshrink",
            "elu",
            "celu",
            "abs",
            "sgn",
            "sign",
            "round",
        ),
        *(
            "floor",
            "ceil",
            "trunc",
            "frac",
            "fmod",
            "remainder",
            "clamp",
            "clamp_min",
            "clamp_max",
            "bucketize",
        ),
        *("maximum", "minimum", "fmax", "fmin", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin"),
        *("cummax", "cummin", "topk", "kthvalue", "median", "nanmedian", "mode", "sort", "argsort", "cdist"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "mkldnn_max_pool2d", "mkldnn_max_pool3d"),
        *("gt", "ge", "lt", "le", "eq", "ne", "searchsorted", "nonzero", "heaviside", "multi_margin_loss"),
        *("multilabel_margin_loss_forward", "_cdist_forward", "_embedding_bag", "segment_reduce"),
        *("scatter_reduce", "index_reduce"),
    }
)
# the largest number of elements in them that leads to a jump in one of 1,000 steps in float32
_FEW_JUMPS: Final = 2**12
# of operators that are known; others may have a jump inside
_NAMESPACES: Final = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "gradiometer"}
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

    Attributes:
        is_smooth: whether the step has had so few elements in operators whose derivative jumps, such as ReLU,
            that float32 rounding hardly leads to a jump.
    """

    def __init__(self, bits: int = 8) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bits, self._jumps = bits, 0

    @property
    def is_smooth(self) -> bool:  # noqa: D102 see the class
        return self._jumps <= _FEW_JUMPS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace not in _NAMESPACES:
            self._jumps = _FEW_JUMPS + 1
        elif name.rstrip("_") in _JUMPS:
            self._jumps += max(
                [x.numel() for x in args if isinstance(x, Tensor) and x.is_floating_point()], default=0
            )
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
