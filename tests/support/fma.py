"""The fused multiply-add of NumPy arrays, which NumPy does not have."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_of_each = {}
for _dtype, _function, _number in (
    (np.float64, _libm.fma, ctypes.c_double),
    (np.float32, _libm.fmaf, ctypes.c_float),
):
    _function.restype, _function.argtypes = _number, [_number] * 3
    _of_each[np.dtype(_dtype)] = np.frompyfunc(_function, 3, 1)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return ``a * b + c``, rounded once, for float32 or float64 arrays."""
    a, b, c = np.broadcast_arrays(a, b, c)
    with np.errstate(all="ignore"):
        # the product of two fp32 numbers is exact in fp64
        product = a.astype(np.float64) * b.astype(np.float64)
        total = product + c
        inexact = (a != a.astype(np.float32)) | (b != b.astype(np.float32))
        if a.dtype == np.float32:
            # would be rounded twice
            other = total - product
            inexact |= (product - (total - other)) + (c - other) != 0
        result = total.astype(a.dtype)
        result[inexact] = _of_each[a.dtype](a[inexact], b[inexact], c[inexact]).astype(a.dtype)
    return result
