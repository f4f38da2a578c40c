"""Execute compiled kernels on host memory: an interpreter of the PTX that Triton generates for a GPU.

    with ptx.executed_kernels("sm_90"):
        gm.collect({"x": x})

Only `JITFunction.run` is replaced, so the package's launchers, Triton's specialization of arguments and its
compiler run as they do on a GPU. The threads of a block execute each instruction together, and the blocks of
a launch run one after the other. The semantics are those of NVIDIA's manual, "PTX ISA".

A kernel that does what the hardware forbids or leaves undefined raises `Invalid`: it reads a register or
shared memory that was not written, accesses memory outside of a tensor or not aligned, takes a branch with
some threads only, or uses memory that another thread or block changes without a barrier in between. Between
blocks this is an atomic operation that releases and acquires: it orders what blocks did before theirs, and
what they do after it. Blocks may load and change the same memory by other atomic operations. An
instruction that is not among `OPERATIONS` or in `_Translation` is a KeyError.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from gradiometer.ops import dispatch, packing
from kernels_bench.machine_code.compile import Launch, launching_for
from support import arithmetic
from support.arithmetic import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# the result and the operands of an operation have these types; a register is an array of its bits
_KINDS = {"b": "u", "u": "u", "s": "i"}
TYPES = {f"{kind}{8 * n}": np.dtype(f"{code}{n}") for kind, code in _KINDS.items() for n in (2, 4, 8)}
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
TYPES |= {"bf16": np.dtype("u2"), "pred": np.dtype(bool)}
TYPES |= {"b8": np.dtype("u1")}
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

WARP = 32
# jumps of a block: the loop of a kernel that is wrong may not end
_MOST_JUMPS = 10_000
_NOBODY, _SEVERAL = -1, -2
# the bytes of a register in threads that have not written it: a huge number of any type
_POISON = b"\x7f"
_THREADS = "threads use shared memory without a barrier"

# the address space as one array, which begins here: NumPy does not accept a null pointer
_START = 1 << 16
_space = np.frombuffer((ctypes.c_uint8 * ((1 << 47) - _START)).from_address(_START), np.uint8)
_memory = {size: _space[: len(_space) // size * size].view(bits) for size, bits in _BITS.items()}


# by spelling and number of operands: the types of the result and of the operands, and an expression
OPERATIONS: dict[str, tuple[str, str, str]] = {}


def _define(names: str, types: str, operands: str, expression: str, result: str = "T") -> None:
    """Add each name for each type T; W is a type twice as wide."""
    for name in names.split():
        for kind in types.split():
            wide = f"{kind[0]}{2 * int(kind[1:])}" if kind in {"s32", "u32"} else ""
            texts = [text.replace("T", kind).replace("W", wide) for text in (result, operands, expression)]
            count = len(operands.split())
            OPERATIONS[f"{name}.{kind} of {count}"] = (texts[0], texts[1], texts[2])


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*"}.items():
    _define(f"{_name}.rn", "f32 f64", "T T", f"{{}} {_symbol} {{}}")
    _define(
        f"{_name}.rn", "f32x2", "b64 b64", f"(pairs({{}}, f32) {_symbol} pairs({{}}, f32)).reshape(-1)", "b64"
    )
    # the first operand is narrower
    _define(f"{_name}.rn.f32", "f16", "T f32", f"{{}}.astype(f32) {_symbol} {{}}", "f32")
    _define(f"{_name}.rn.f32", "bf16", "T f32", f"bfloat({{}}) {_symbol} {{}}", "f32")
    _define(_name if _name != "mul" else "mul.lo", "s32 s64", "T T", f"{{}} {_symbol} {{}}")
_define("div.rn", "f64", "T T", "{} / {}")
_define("fma.rn", "f32 f64", "T T T", "fma({}, {}, {})")
_define("fma.rn", "f32x2", "b64 b64 b64", "fma(*(pairs(x, f32) for x in ({}, {}, {}))).reshape(-1)", "b64")
_define("sqrt.rn", "f64", "T", "np.sqrt({})")
_define("abs", "f32 f64", "T", "np.abs({})")
_define("abs", "f16x2 bf16x2", "b32", "{} & np.uint32(0x7fff7fff)", "b32")
_define("abs", "f16 bf16", "b16", "{} & np.uint16(0x7fff)", "b16")
_define("max", "f32 f64", "T T", "maximum({}, {})")
_define("max", "f32", "T T T", "maximum(maximum({}, {}), {})")
_define("max", "s16 s32 s64 u32", "T T", "np.maximum({}, {})")
_define("min", "s32 s64 u32", "T T", "np.minimum({}, {})")
# the number if one is NaN
_define("min", "f64", "T T", "np.fmin({}, {})")
_define("max", "f16", "T T", "maximum({}, {})")
_define("max", "bf16", "T T", "to_bfloat(maximum(bfloat({}), bfloat({})))")
_define("max", "f16x2", "b32 b32", "maximum(pairs({}, f16), pairs({}, f16)).reshape(-1)", "b32")
_define(
    "max", "bf16x2", "b32 b32", "to_bfloat(maximum(bfloat(pairs({}, b16)), bfloat(pairs({}, b16))))", "b32"
)
_define("popc", "b32", "T", "np.bitwise_count({}).astype(u32)")
_define("neg", "s32 s64 f32", "T", "-{}")
_define("mad.lo", "s32 s64", "T T T", "{} * {} + {}")
_define("mul.wide", "s32 u32", "T T", "{}.astype(W) * {}", "W")
_define("mul.hi", "u32", "T T", "({}.astype(W) * {} >> np.uint64(32)).astype(T)")
_define("mad.wide", "s32 u32", "T T W", "{}.astype(W) * {} + {}", "W")
_define("rem", "s32 s64 u32 u64", "T T", "remainder({}, {})")
_define("div", "s32 s64 u32 u64", "T T", "quotient({}, {})")
_define("and", "b16 b32 b64 pred", "T T", "{} & {}")
_define("or", "b16 b32 b64 pred", "T T", "{} | {}")
_define("xor", "b16 b32 b64 pred", "T T", "{} ^ {}")
_define("not", "b16 b32 b64 pred", "T", "~{}")
_define("shl", "b16 b32 b64", "T b32", "shift(np.left_shift, {}, {})")
_define("shr", "s32 s64 u16 u32 u64", "T b32", "shift(np.right_shift, {}, {})")
_define("bfe", "s32 s64 u32 u64", "T b32 b32", "bit_field({}, {}, {})")
_define("prmt", "b32", "T T b32", "permute({}, {}, {})")
_define("mov", "b16 u16 b32 u32 b64 u64 f32 f64 pred", "T", "{}")
_define("selp", "b16 b32 b64 f32 f64", "T T pred", "np.where({2}, {0}, {1})")
for _to in ("u16", "u32", "u64", "s32", "s64"):
    _define(f"cvt.{_to}", "u16 u32 u64 s32 s64", "T", f"{{}}.astype({_to})", _to)
_define("cvt.rn.f64", "s32 s64 u32 u64", "T", "{}.astype(f64)", "f64")
_define("cvt.rn.f32", "f64 u32 s32", "T", "{}.astype(f32)", "f32")
_define("cvt.rn.f16", "f32", "T", "{}.astype(f16)", "f16")
_define("cvt.rn.f16x2", "f32", "T T", "half_pair({}, {})", "b32")
_define("cvt.rzi.s64", "f64", "T", "to_int64({})", "s64")
_define("cvt.f64", "f16 f32", "T", "{}.astype(f64)", "f64")
_define("cvt.f32", "f16", "T", "{}.astype(f32)", "f32")
_define("cvt.f64", "bf16", "T", "bfloat({}).astype(f64)", "f64")
_define("cvt.f32", "bf16", "T", "bfloat({})", "f32")
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _symbol in _COMPARED.items():
    _define(f"setp.{_name}", "b16 s16 b32 b64 s32 s64 u32 u64", "T T", f"{{}} {_symbol} {{}}", "pred")
for _kind, _a, _b in (
    ("f16", "{0}", "{1}"),
    ("f32", "{0}", "{1}"),
    ("f64", "{0}", "{1}"),
    ("bf16", "bfloat({0})", "bfloat({1})"),
):
    _nan = f"(np.isnan({_a}) | np.isnan({_b}))"
    _define("setp.nan", _kind, "T T", _nan, "pred")
    _define("setp.num", _kind, "T T", f"~{_nan}", "pred")
    for _name, _symbol in _COMPARED.items():
        # with NaN a comparison is false, or true if its name ends with u
        _define(f"setp.{_name}", _kind, "T T", f"({_a} {_symbol} {_b}) & ~{_nan}", "pred")
        _define(f"setp.{_name}u", _kind, "T T", f"({_a} {_symbol} {_b}) | {_nan}", "pred")
# by name: the operation, and the order of memory
ATOMICS = {
    f"atom.global.gpu.{order}.{name}": (operation, order)
    for order in ("acq_rel", "relaxed")
    for name, operation in {"add.u32": "np.add", "or.b32": "np.bitwise_or"}.items()
}


# memory


class Buffer:
    """Global memory that a launch may use, and which blocks use its bytes."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.reads = np.zeros(end - start, np.uint16)
        # who writes and who reads, before and after the block's ordering operation
        self._users = np.full((2, 2, end - start), _NOBODY, np.int32)

    def use(self, block: int, addresses: np.ndarray, size: int, *, write: bool, ordered: bool) -> None:
        places = ((addresses - np.uint64(self.start))[:, None] + np.arange(size, dtype=np.uint64)).ravel()
        what = "blocks use global memory"
        if not ordered:
            # what other blocks did after theirs does not come before this
            _refuse_others(*self._users[1], places, block, write=write, what=what)
        # the last of the blocks comes after what all did before their ordering operations
        _claim(*self._users[int(ordered)], places, block, write=write, what=what)
        if not write:
            np.add.at(self.reads, places, 1)


def _claim(
    writer: np.ndarray, reader: np.ndarray, places: np.ndarray, users: Any, *, write: bool, what: str
) -> None:
    """Note who uses these bytes; several may read one that nobody writes."""
    _refuse_others(writer, reader, places, users, write=write, what=what)
    used = writer if write else reader
    before = used[places]
    used[places] = users
    several = ((before != _NOBODY) & (before != users)) | (used[places] != users)
    used[places[several]] = _SEVERAL


def _refuse_others(
    writer: np.ndarray, reader: np.ndarray, places: np.ndarray, users: Any, *, write: bool, what: str
) -> None:
    for before in (writer[places], reader[places])[: 1 + write]:
        if ((before != _NOBODY) & (before != users)).any():
            msg = f"several {what} that one of them writes"
            raise Invalid(msg)


def buffers_of(spans: Sequence[tuple[int, int]]) -> list[Buffer]:
    """Return the buffers of these spans of addresses; those that overlap become one."""
    merged: list[list[int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [Buffer(start, end) for start, end in merged]


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one after its last."""
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class _Shared:
    """The shared memory of a block, and which threads use its bytes between two barriers."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self._written = np.zeros(size, bool)
        self._users = np.full((2, size), _NOBODY, np.int32)

    def barrier(self) -> None:
        self._users[:] = _NOBODY

    def load(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> np.ndarray:
        """Return ``(threads, size)`` bytes."""
        places, users = self._places(addresses, size), np.repeat(threads, size).astype(np.int32)
        if not self._written[places].all():
            msg = "shared memory is read before it is written"
            raise Invalid(msg)
        _claim(*self._users, places, users, write=False, what=_THREADS)
        return self._bytes[places].reshape(-1, size)

    def store(self, addresses: np.ndarray, threads: np.ndarray, values: np.ndarray) -> None:
        """Store ``(threads, size)`` bytes."""
        size = values.shape[1]
        places, users = self._places(addresses, size), np.repeat(threads, size).astype(np.int32)
        _claim(*self._users, places, users, write=True, what=_THREADS)
        self._bytes[places] = values.ravel()
        self._written[places] = True
        if (self._bytes[places] != values.ravel()).any():
            msg = "threads write different values to the same shared memory"
            raise Invalid(msg)

    def announce(self, addresses: np.ndarray, threads: np.ndarray, size: int) -> None:
        """Begin to overwrite bytes, which cannot be read until they are stored."""
        places, users = self._places(addresses, size), np.repeat(threads, size).astype(np.int32)
        _claim(*self._users, places, users, write=True, what=_THREADS)
        self._written[places] = False

    def _places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        if (addresses + np.uint64(size) > len(self._bytes)).any():
            msg = "an access beyond shared memory"
            raise Invalid(msg)
        return (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel()


class Block:
    """The state of a block of threads other than its registers, and the instructions that use it.

    A register is ``(threads,)`` bits, or one element if all threads have the same.
    """

    def __init__(self, index: int, blocks: int, threads: int, shared: int, buffers: list[Buffer]) -> None:
        self.index, self.threads = index, threads
        self.nctaid = np.array([blocks], np.uint32)
        self.tid = np.arange(threads, dtype=np.uint32)
        self.ctaid = np.array([index], np.uint32)
        self.shared = _Shared(shared)
        # groups of asynchronous copies, of which the last is not committed: addresses, threads and bytes
        self._copies: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[]]
        self._buffers = buffers
        self._starts = [buffer.start for buffer in buffers]
        self._jumps = self.instructions = 0
        # whether the block has ordered its accesses, and whether threads wrote since the last barrier
        self._ordered = self._written = False

    def barrier(self) -> None:
        self.shared.barrier()
        self._written = False

    def taken(self, predicate: np.ndarray) -> bool:
        """Return whether the threads jump."""
        self._jumps += 1
        if predicate.any() != predicate.all():
            msg = "a branch that some threads take and others do not"
            raise Invalid(msg)
        if self._jumps > _MOST_JUMPS:
            msg = f"more than {_MOST_JUMPS} jumps"
            raise Invalid(msg)
        return bool(predicate[0])

    def load_global(
        self, address: np.ndarray, size: int, count: int, guard: np.ndarray | None
    ) -> list[np.ndarray]:
        address, active = self._active(address, guard)
        found = self._checked(address[active], size * count, write=False)
        values = np.zeros((len(address), count), _BITS[size])
        values[active] = _memory[size][((found - _START) // size)[:, None] + np.arange(count)]
        return list(values.T.copy())

    def store_global(
        self, address: np.ndarray, size: int, values: list[np.ndarray], guard: np.ndarray | None
    ) -> None:
        address, active = self._active(address, guard, *values)
        told = np.stack([(x if len(address) == 1 else self._each(x))[active] for x in values], axis=1)
        places = (self._checked(address[active], size * len(values), write=True) - _START) // size
        _, first, same = np.unique(places, return_index=True, return_inverse=True)
        if (told != told[first[same]]).any():
            msg = "threads write different values to the same global memory"
            raise Invalid(msg)
        _memory[size][places[:, None] + np.arange(len(values))] = told
        self._written |= len(places) > 0

    def atomic(
        self,
        address: np.ndarray,
        value: np.ndarray,
        operation: np.ufunc,
        guard: np.ndarray | None,
        order: str,
    ) -> np.ndarray:
        """Return what was there; the threads follow one another."""
        address, active = self._active(self._each(address), guard)
        if order == "acq_rel" and self._written:
            msg = "an atomic operation releases what other threads wrote, without a barrier"
            raise Invalid(msg)
        found = np.zeros(self.threads, _BITS[4])
        value = self._each(value)
        places = (self._checked(address[active], 4, write=False) - _START) // 4
        for thread, place in zip(np.flatnonzero(active), places, strict=True):
            found[thread] = _memory[4][place]
            _memory[4][place] = operation(found[thread], value[thread])
        self._ordered |= order == "acq_rel" and active.any()
        return found

    def load_shared(
        self, address: np.ndarray, size: int, count: int, guard: np.ndarray | None
    ) -> list[np.ndarray]:
        address, active = self._active(self._each(address), guard)
        _aligned(address[active], size * count)
        values = np.zeros((self.threads, size * count), np.uint8)
        values[active] = self.shared.load(address[active], self.tid[active], size * count)
        return list(values.view(_BITS[size]).T.copy())

    def store_shared(
        self, address: np.ndarray, size: int, values: list[np.ndarray], guard: np.ndarray | None
    ) -> None:
        address, active = self._active(self._each(address), guard)
        _aligned(address[active], size * len(values))
        told = np.stack([self._each(x)[active] for x in values], axis=1)
        self.shared.store(address[active], self.tid[active], told.view(np.uint8))

    def copy_async(
        self, target: np.ndarray, source: np.ndarray, size: int, count: np.ndarray, guard: np.ndarray | None
    ) -> None:
        """cp.async: copy ``size`` bytes to shared memory, or write zeros if ``count`` is 0."""
        target, active = self._active(self._each(target), guard)
        _aligned(target[active], size)
        count = self._each(count)
        if not np.isin(count[active], (0, size)).all():
            msg = "an asynchronous copy that is filled up with zeros"
            raise KeyError(msg)
        words = self.load_global(self._each(source), 4, size // 4, active & (count > 0))
        rows = np.stack(words, axis=1)[active].view(np.uint8)
        self.shared.announce(target[active], self.tid[active], size)
        self._copies[-1].append((target[active], self.tid[active], rows))

    def commit_copies(self) -> None:
        self._copies.append([])

    def wait_copies(self, pending: int) -> None:
        """Finish all but the last committed groups."""
        *groups, last = self._copies
        done = len(groups) - pending
        for group in groups[: max(done, 0)]:
            for copy in group:
                self.shared.store(*copy)
        self._copies = [*groups[max(done, 0) :], last]

    def load_matrices(self, address: np.ndarray, count: int) -> list[np.ndarray]:
        """ldmatrix: in a warp, the threads 8 k ... 8 k + 7 give the rows of matrix k, 16 bytes each."""
        gives = self.tid % WARP < 8 * count
        address = self._each(address).astype(np.uint64)[gives]
        _aligned(address, 16)
        rows = self.shared.load(address, self.tid[gives], 16)
        # thread t of the warp receives from each matrix the words t % 4 of row t / 4
        words = rows.view(np.uint32).reshape(-1, count, WARP)
        return [words[:, k].reshape(-1) for k in range(count)]

    def shuffle(
        self, x: np.ndarray, by: np.ndarray, clamp: np.ndarray, mask: np.ndarray, *, indexed: bool
    ) -> np.ndarray:
        if clamp[0] != WARP - 1 or (mask != 2**32 - 1).any():
            msg = "a shuffle within a part of a warp"
            raise KeyError(msg)
        return self._each(x)[self.tid // WARP * WARP + by % WARP if indexed else self.tid ^ by]

    def reduce(self, x: np.ndarray, mask: np.ndarray, dtype: np.dtype, operation: np.ufunc) -> np.ndarray:
        if (mask != 2**32 - 1).any():
            msg = "a reduction of a part of a warp"
            raise KeyError(msg)
        lanes = self._each(x).view(dtype).reshape(-1, WARP)
        return np.repeat(operation.reduce(lanes, axis=1, dtype=dtype), WARP).view(x.dtype)

    def _each(self, x: np.ndarray) -> np.ndarray:
        return np.repeat(x, self.threads) if len(x) == 1 else x

    def _active(
        self, address: np.ndarray, guard: np.ndarray | None, *values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return 64-bit addresses and which of them are accessed; one if all threads do the same."""
        address = address.astype(np.uint64)
        guard = np.ones(1, bool) if guard is None else guard
        if max(map(len, (address, guard, *values))) > 1:
            address, guard = self._each(address), self._each(guard)
        return address, guard

    def _checked(self, addresses: np.ndarray, size: int, *, write: bool) -> np.ndarray:
        _aligned(addresses, size)
        left = addresses
        while len(left):
            place = bisect_right(self._starts, int(left[0])) - 1
            buffer = self._buffers[place] if place >= 0 else None
            if buffer is None or left[0] + np.uint64(size) > buffer.end:
                msg = f"{'a write' if write else 'a read'} of {size} bytes outside of every tensor"
                raise Invalid(msg)
            here = (left >= buffer.start) & (left + np.uint64(size) <= buffer.end)
            buffer.use(self.index, left[here], size, write=write, ordered=self._ordered)
            left = left[~here]
        return addresses.astype(np.int64)


def _aligned(addresses: np.ndarray, size: int) -> None:
    if (addresses % np.uint64(size)).any():
        msg = f"an access to {size} bytes that is not aligned"
        raise Invalid(msg)


# translation

_INSTRUCTION = re.compile(r"(?:@(?P<no>!?)%(?P<guard>\w+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<operands>.*)")
_ADDRESS = re.compile(r"\[\s*%?(\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
# the assembler makes a predicated instruction of a branch around one
_SKIPPED = re.compile(r"\{ \.reg \.pred p; setp\.(eq|ne)\.b32 p, ([^,]+), 0; @p bra skip; ([^;]+); skip: \}")
_REGISTERS = {"pred": 0, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Program:
    """A translated kernel."""

    name: str
    threads: int
    shared: int
    run: Callable[[Block, Sequence[np.ndarray]], None]


class _Translation:
    """Translates PTX into a Python function: a variable per register, and a branch per basic block."""

    def __init__(self, ptx: str) -> None:
        self.name = _first(r"\.entry (\w+)\(", ptx)
        self.threads = int(_first(r"\.reqntid (\d+)", ptx))
        body = re.sub(r"//[^\n]*", "", ptx[ptx.index("{", ptx.index(".entry")) + 1 :])
        body = _SKIPPED.sub(r"setp.\1.b32 %skip0, \2, 0; @!%skip0 \3;", body[: body.index("\n}")])
        registers = re.findall(r"\.reg \.(\w+)\s+%(\w+)<\d+>;", body)
        self.widths = {prefix: _REGISTERS[kind] for kind, prefix in [*registers, ("pred", "skip")]}
        targets = set(re.findall(r"\bbra(?:\.uni)?\s+(\$\w+)", body))
        statements = re.findall(r"\s*(?:(\$\w+):|([^;\n]+);)", body)
        self.places: dict[str, int] = {}
        self.constants: dict[str, np.ndarray] = {}
        # registers that instructions write, and those that are joined
        self.written: set[str] = set()
        self.joined: dict[str, int] = {}
        # the first pass finds the basic blocks
        place = 0
        for label, text in statements:
            if label in targets:
                place += 1
                self.places[label] = place
            elif re.search(r"\bbra\b", text):
                place += 1
        self.lines = ["def run(block, parameters):", " tid, ctaid, place = block.tid, block.ctaid, 0"]
        self.lines.append(" while True:")
        # instructions of each basic block
        self.counts = [0] * (place + 1)
        place = 0
        self._begin(place)
        for label, text in statements:
            instruction = " ".join(text.split())
            if label in targets:
                place += 1
                self._emit(f"place = {place}")
                self._begin(place)
            elif instruction and not instruction.startswith("."):
                self._instruction(instruction, place)
                self.counts[place] += 1
                if re.search(r"\bbra\b", instruction):
                    place += 1
                    self._begin(place)
        self._emit("return")
        # LLVM joins a half that nothing writes with one that matters, and then uses only the latter
        for name in self.joined.keys() - self.written:
            self.lines[1:1] = [f" {name} = poison{self.joined[name]}"]

    def _begin(self, place: int) -> None:
        self.lines.append(f"  if place == {place}:")
        self._emit(f"block.instructions += counts[{place}]")

    def _instruction(self, text: str, place: int) -> None:
        match = _INSTRUCTION.fullmatch(text)
        assert match, text
        name = match["name"]
        guard = None if match["guard"] is None else ("~" if match["no"] else "") + match["guard"]
        parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match["operands"])
        operands = [part.strip() for part in parts]
        if name in {"bra", "bra.uni"}:
            condition = "np.ones(1, bool)" if guard is None else guard
            target = self.places[operands[0]]
            self._emit(f"place = {target} if block.taken({condition}) else {place + 1}", "continue")
        elif name in {"ret", "bar.sync"}:
            assert guard is None, text
            self._emit("return" if name == "ret" else "block.barrier()")
        elif name in {"cp.async.ca.shared.global", "cp.async.cg.shared.global"}:
            target, source = map(self._address, operands[:2])
            count = self._value(operands[3], "b32")
            self._emit(f"block.copy_async({target}, {source}, {operands[2]}, {count}, {guard})")
        elif name == "cp.async.commit_group":
            self._emit("block.commit_copies()")
        elif name == "cp.async.wait_group":
            self._emit(f"block.wait_copies({operands[0]})")
        elif name in ATOMICS:
            operation, order = ATOMICS[name]
            value = f"{self._value(operands[2], 'b32')}, {operation}, {guard}, '{order}'"
            self._assign(operands[:1], f"[block.atomic({self._address(operands[1])}, {value})]", guard)
        elif name.startswith(("ld.param", "ld.global", "ld.shared", "ldmatrix")):
            self._load(name, operands, guard)
        elif name.startswith("st."):
            space, kind, sources = _access(name, operands[1])
            values = ", ".join(self._value(x, kind) for x in sources)
            size = TYPES[kind].itemsize
            self._emit(f"block.store_{space}({self._address(operands[0])}, {size}, [{values}], {guard})")
        elif name.startswith("mov.b") and "{" in match["operands"]:
            self._split_or_join(int(name[5:]) // 8, *operands, guard)
        elif name in {"shfl.sync.bfly.b32", "shfl.sync.idx.b32"}:
            values = ", ".join(self._value(x, "b32") for x in operands[1:])
            self._assign(operands[:1], f"[block.shuffle({values}, indexed={'idx' in name})]", guard)
        elif name in {"redux.sync.add.s32", "redux.sync.max.f32"}:
            operation = "np.add" if "add" in name else "np.fmax"
            values = ", ".join(self._value(x, "b32") for x in operands[1:])
            self._assign(operands[:1], f"[block.reduce({values}, {name[-3:]}, {operation})]", guard)
        elif name.startswith("setp.") and "|" in operands[0]:
            # a predicate for each half
            _, kinds, expression = OPERATIONS[f"{name.removesuffix('x2')} of 2"]
            halves = [
                [f"pairs({self._value(x, 'b32')}, {kinds.split()[0]})[:, {i}]" for x in operands[1:]]
                for i in range(2)
            ]
            both = [expression.format(*values) for values in halves]
            self._assign(operands[0].split("|"), f"[{', '.join(both)}]", guard)
        else:
            result, kinds, expression = OPERATIONS[f"{name} of {len(operands) - 1}"]
            values = list(map(self._value, operands[1:], kinds.split()))
            value = expression.format(*values)
            width = self._width(operands[0])
            bits = f"({value}).view(b{8 * width})" if width else value
            assert TYPES[result].itemsize == max(width, 1), text
            self._assign(operands[:1], f"[{bits}]", guard)

    def _load(self, name: str, operands: list[str], guard: str | None) -> None:
        if name.startswith("ld.param"):
            number = int(_first(r"_param_(\d+)\]", operands[1]))
            self._assign(operands[:1], f"[parameters[{number}]]", guard)
            return
        address = self._address(operands[1])
        if re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.shared\.b16", name):
            targets = _members(operands[0])
            self._assign(targets, f"block.load_matrices({address}, {len(targets)})", guard)
            return
        space, kind, targets = _access(name, operands[0])
        size = TYPES[kind].itemsize
        values = f"block.load_{space}({address}, {size}, {len(targets)}, {guard})"
        if size == 1:  # no register is as narrow
            values = f"[x.astype(b{8 * self._width(targets[0])}) for x in {values}]"
        self._assign(targets, values, guard)

    def _split_or_join(self, size: int, target: str, source: str, guard: str | None) -> None:
        if target.startswith("{"):
            parts, whole = _members(target), f"b{8 * size}"
            bits = 8 * size // len(parts)
            value = self._value(source, whole)
            halves = [f"({value} >> {whole}.type({bits * i})).astype(b{bits})" for i in range(len(parts))]
            self._assign(parts, f"[{', '.join(halves)}]", guard)
        else:
            parts, whole = _members(source), f"b{8 * size}"
            bits = 8 * size // len(parts)
            self.joined |= {x.removeprefix("%"): bits // 8 for x in parts}
            values = [f"{self._value(x, f'b{bits}')}.astype({whole})" for x in parts]
            joined = " | ".join(f"{x} << {whole}.type({bits * i})" for i, x in enumerate(values))
            self._assign([target], f"[{joined}]", guard)

    def _assign(self, targets: list[str], values: str, guard: str | None) -> None:
        names = [x.removeprefix("%") for x in targets]
        self.written.update(names)
        if guard is None:
            self._emit(f"{', '.join(names)}, = {values}")
        else:
            # the other threads keep the old value
            self._emit(f"new = {values}")
            for i, name in enumerate(names):
                self.lines[1:1] = [f" {name} = poison{self._width(targets[i])}"]
                self._emit(f"{name} = np.where({guard}, new[{i}], {name})")

    def _address(self, text: str) -> str:
        match = _ADDRESS.fullmatch(text)
        assert match, text
        base = "zero" if match[1] == "global_smem" else match[1]
        # addresses wrap
        return f"{base} + {base}.dtype.type({match[2]} % 2**({base}.itemsize * 8))" if match[2] else base

    def _value(self, text: str, kind: str) -> str:
        """Return an expression for an operand of this type."""
        special = {"%tid.x": "tid", "%ctaid.x": "ctaid", "%nctaid.x": "block.nctaid", "global_smem": "zero"}
        if text in special:
            return special[text]
        if text.startswith("%"):
            width = self._width(text)
            if kind == "b8":
                return f"{text[1:]}.astype(b8)"
            assert TYPES[kind].itemsize == max(width, 1), (text, kind)
            same = not width or kind in {f"b{8 * width}", f"u{8 * width}", "bf16"}
            return text[1:] if same else f"{text[1:]}.view({kind})"
        name = f"c{len(self.constants)}"
        self.constants[name] = _constant(text, TYPES[kind])
        return name

    def _width(self, register: str) -> int:
        return self.widths[_first(r"^%([a-z]+)\d+$", register)]

    def _emit(self, *lines: str) -> None:
        self.lines += [f"   {line}" for line in lines]


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in {text[:200]}"
    return match[1]


def _access(name: str, registers: str) -> tuple[str, str, list[str]]:
    """Return the state space, the type and the registers of a load or store."""
    _, space, *vector, kind = name.replace("shared::cta", "shared").split(".")
    found = _members(registers)
    if space not in {"global", "shared"} or vector != [f"v{len(found)}"] * (len(found) > 1):
        raise KeyError(name)
    return space, kind, found


def _members(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}").split(",")]


def _constant(text: str, dtype: np.dtype) -> np.ndarray:
    if text.startswith(("0f", "0d")):  # the bits of a number
        return np.frombuffer(bytes.fromhex(text[2:])[::-1], dtype)
    number = int(text.removesuffix("U"), 0)
    if dtype == TYPES["pred"]:
        return np.array([number != 0])
    return np.frombuffer((number % 2 ** (8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little"), dtype)


@cache
def translate(ptx: str, shared: int) -> Program:
    """Translate the PTX of a kernel that uses this many bytes of shared memory."""
    translation = _Translation(ptx)
    names = vars(arithmetic) | globals() | TYPES | translation.constants
    names |= {"zero": np.zeros(1, np.uint32), "counts": translation.counts}
    names |= {f"poison{size}": np.frombuffer(_POISON * size, bits) for size, bits in _BITS.items()}
    exec(compile("\n".join(translation.lines), f"<{translation.name}>", "exec"), names)  # noqa: S102
    return Program(translation.name, translation.threads, shared, names["run"])


def execute(
    program: Program, blocks: int, parameters: Sequence[np.ndarray], buffers: list[Buffer]
) -> list[int]:
    """Run all blocks of a launch, with parameters of one element; return the instructions of each."""
    instructions = []
    with np.errstate(all="ignore"):
        for index in range(blocks):
            block = Block(index, blocks, program.threads, program.shared, buffers)
            try:
                program.run(block, parameters)
            except NameError as error:
                msg = f"a register is read before it is written: {error}"
                raise Invalid(msg) from None
            instructions.append(block.instructions)
    return instructions


# launches


@dataclass(frozen=True)
class Executed:
    """A launch that was executed: the kernel's name, the memory that it used, instructions of each block."""

    kernel: str
    buffers: list[Buffer]
    of_blocks: list[int]

    @property
    def instructions(self) -> int:
        return sum(self.of_blocks)

    @property
    def longest(self) -> int:
        return max(self.of_blocks)

    def reads(self, x: torch.Tensor) -> np.ndarray:
        """Return how often each byte of a tensor was read."""
        start, end = span_of(x)
        if start == end:
            return np.zeros(0, np.uint16)
        buffer = next(b for b in self.buffers if b.start <= start and end <= b.end)
        return buffer.reads[start - buffer.start : end - buffer.start]


@contextmanager
def executed_kernels(
    target: str, change: Callable[[str, str], str] = lambda _, ptx: ptx
) -> Iterator[deque[Executed]]:
    """Measure CPU tensors by the kernels that Triton compiles for a GPU; return the last launches.

    ``change`` maps the name and the PTX of a kernel to the PTX that is executed.
    """
    launches: deque[Executed] = deque(maxlen=16)
    inputs: list[tuple[int, int]] = []

    def noting(pack: Callable[..., packing.Pack]) -> Callable[..., packing.Pack]:
        def note(*args: Any, **options: Any) -> packing.Pack:
            nonlocal inputs
            packed = pack(*args, **options)
            inputs = [span_of(x) for x in packed.tensors]
            return packed

        return note

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        assert not warmup
        launch = Launch(kernel, args, options, grid)
        compiled, signature = launch.build(target)
        program = translate(change(kernel.fn.__name__, compiled.asm["ptx"]), compiled.metadata.shared)
        bound = dict(zip(kernel.arg_names, args, strict=False))
        kinds = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        parameters = [_parameter(bound[name], kind) for name, kind in kinds.items()]
        spans = [span_of(x) for x in bound.values() if isinstance(x, torch.Tensor)]
        buffers = buffers_of(spans + inputs * ("pointers_ptr" in bound))
        # two more, for memory that these kernels do not need
        counts = execute(program, grid[0], [*parameters, *[np.zeros(1, np.uint64)] * 2], buffers)
        launches.append(Executed(kernel.fn.__name__, buffers, counts))

    with (
        launching_for(target),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(packing, "packed_at", noting(packing.packed_at)),
        mock.patch.object(dispatch, "INTERPRETED", True),
    ):
        yield launches


def _parameter(value: Any, kind: str) -> np.ndarray:
    bits, number = (64, value.data_ptr()) if kind.startswith("*") else (int(kind.removeprefix("i")), value)
    return np.array([number], f"i{bits // 8}").view(f"u{bits // 8}")
