"""Arithmetic of GPUs on NumPy arrays, as "PTX ISA" defines it."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Invalid(Exception):  # noqa: N818 the kernel is wrong, not the program that executes it
    """The kernel did something that a GPU forbids or leaves undefined."""


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # a number rather than NaN, and +0 rather than -0
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if (b == 0).any():
        msg = "division by zero"
        raise Invalid(msg)
    return np.fmod(a, b)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the quotient of integers, rounded toward zero."""
    return (a - remainder(a, b)) // b


def to_int64(x: np.ndarray) -> np.ndarray:
    if not (np.abs(x) < 2.0**63).all():
        msg = f"{x} does not fit into 64 bits"
        raise Invalid(msg)
    return x.astype(np.int64)


def shift(operation: Callable[..., np.ndarray], x: np.ndarray, by: np.ndarray) -> np.ndarray:
    # by the width or more, NumPy returns 0 or the sign, as PTX does
    return operation(x, by.astype(x.dtype))


def bit_field(x: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    above = np.uint32(8 * x.itemsize) - length
    return shift(np.right_shift, shift(np.left_shift, x, above - first), above)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Return four of the eight bytes of b and a, which four hexadecimal digits select."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for digit in (0, 4, 8, 12):
        byte = selector.astype(np.uint64) >> np.uint64(digit) & np.uint64(15)
        if (byte > 7).any():
            msg = "prmt repeats a sign"
            raise KeyError(msg)
        result |= (both >> byte * np.uint64(8) & np.uint64(255)) << np.uint64(2 * digit)
    return result.astype(np.uint32)


def pairs(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the two numbers of each register, ``(threads, 2)``."""
    return x.view(dtype).reshape(-1, 2)


def half_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    a, b = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low))
    return a << np.uint32(16) | b


def bfloat(x: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bits."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """Return the bits of fp32 values that bf16 holds, ``(2 * threads,)``."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(-1)
