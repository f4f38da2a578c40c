"""Names of operators by what they do, without namespace, overload and the underscore of those in place."""

from __future__ import annotations

from typing import Final

PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
SOFTMAXES: Final = frozenset({"_softmax", "_safe_softmax", "_log_softmax"})
# operators that only choose and place elements, and keep those of a token together
MOVES: Final = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "transpose",
        "t",
        "permute",
        "expand",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "select",
        "unsqueeze",
        "squeeze",
        "repeat",
        "cat",
        "stack",
        "alias",
        "detach",
        "_to_copy",
        "clone",
        "contiguous",
        "constant_pad_nd",
        "narrow",
        "lift_fresh",
        "movedim",
        "unflatten",
        "flatten",
        "copy",
        "roll",
        "flip",
    }
)
# of these, values do not matter, only their shape
SHAPED: Final = frozenset(
    {
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
    }
)
# pointwise, though not tagged so in all versions of torch
POINTWISE: Final = frozenset({"tril", "triu", "masked_fill", "where", "native_dropout", "dropout"})
# what normalizes a token, and what is part of that
FUSED_NORMS: Final = frozenset({"native_layer_norm", "_fused_rms_norm", "rms_norm"})
NORMS: Final = FUSED_NORMS | frozenset(
    {"mean", "sum", "var", "var_mean", "std", "linalg_vector_norm", "norm", "max", "amax"}
)
