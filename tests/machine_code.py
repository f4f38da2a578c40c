"""Compile kernels for devices that are not there, and read the code.

A launch is recorded instead of made: the package's own launchers run on CPU tensors, and what they
pass decides types, constants and options exactly as it would on a device. Triton then compiles for
any target, and its wheel brings the disassembler.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from gradiometer import ops
from gradiometer.schema import DEFAULT_THRESHOLDS, Thresholds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CUDA_TARGETS = ("sm_80", "sm_90", "sm_100")
HIP_TARGETS = ("gfx942",)
TARGETS = (*CUDA_TARGETS, *HIP_TARGETS)

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def gpu_target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch as its launcher made it."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: tuple[int, ...]

    def bind(self, target: str) -> tuple[Any, list[Any], Any]:
        """Return the arguments, their types and specializations, and the backend, as Triton's launch does."""
        backend = make_backend(gpu_target(target))
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, _ = binder(*self.args, **self.kwargs)
        return bound, specialization, backend

    def variant_of(self, target: str) -> tuple[Any, ...]:
        """Return what Triton's cache looks up: two launches that differ here are two compilations."""
        _, specialization, _ = self.bind(target)
        options = {k: v for k, v in self.kwargs.items() if k not in self.kernel.signature.parameters}
        constants = {k: v for k, v in self.kwargs.items() if k in self.kernel.signature.parameters}
        return self.kernel, repr(specialization), repr(options), repr(constants)

    def compile(self, target: str, kernel: JITFunction[Any] | None = None) -> Code:
        """Compile this launch's kernel, or another that takes the same arguments."""
        kernel = kernel or self.kernel
        bound, specialization, backend = Launch(kernel, self.args, self.kwargs, self.grid).bind(target)
        options, signature, constants, attrs = kernel._pack_args(
            backend, self.kwargs, bound, specialization, None
        )
        source = ASTSource(kernel, signature, constants, attrs)
        compiled = triton.compile(source, target=gpu_target(target), options=options.__dict__)
        read = _read_sass if target in CUDA_TARGETS else _read_amdgcn
        return read(target, compiled, {k: str(v) for k, v in signature.items()})


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches of Triton kernels in place of making them."""
    launches: list[Launch] = []

    def record(kernel, *args, grid, warmup, **kwargs):
        del warmup
        launches.append(Launch(kernel, args, kwargs, grid))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        yield launches


def launches_of(
    tensors: Sequence[torch.Tensor],
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: torch.Tensor | None = None,
    target: str = "sm_90",
) -> list[Launch]:
    """Return the launches that measuring these tensors would make on such a GPU."""
    with recorded_launches() as launches, pytest.MonkeyPatch.context() as patch:
        # the launchers ask torch how wide a warp is
        patch.setattr(torch.version, "hip", "7.0" if target in HIP_TARGETS else None)
        ops._run_kernels(list(tensors), thresholds, inv_scale)
    return launches


@dataclass(frozen=True, eq=False, repr=False)
class Code:
    """A compiled kernel. Opcodes are mnemonics with their modifiers, in the order of their addresses."""

    target: str
    signature: dict[str, str]
    ttir: str
    opcodes: list[str]
    # bodies of innermost loops
    loops: list[list[str]]
    registers: int
    # bytes of memory a thread uses for what does not fit into registers
    stack: int
    text: str

    @property
    def main_loop(self) -> Loop:
        """The first innermost loop that reads global memory; the counting path's loop follows it."""
        return next(loop for loop in map(Loop, self.loops) if loop.loads)


@dataclass(frozen=True)
class Loop:
    """The body of one loop, and what it does per element read."""

    opcodes: list[str]

    @property
    def loads(self) -> list[int]:
        """Bytes a thread reads by each load from global memory."""
        return [size for size in map(load_size, self.opcodes) if size]

    @property
    def narrow_loads(self) -> list[str]:
        """Loads from global memory of fewer than 16 bytes."""
        return [opcode for opcode in self.opcodes if 0 < load_size(opcode) < 16]

    @property
    def talk(self) -> list[str]:
        """What passes values between the threads of a block, or makes them wait for each other."""
        return [opcode for opcode in self.opcodes if is_talk(opcode)]

    def elements(self, itemsize: int) -> int:
        """Elements that a thread reads in one iteration."""
        return sum(self.loads) // itemsize

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in self.opcodes)

    @property
    def conversions(self) -> int:
        """Conversions of a floating-point number to fp64."""
        return self.count(r"F2F\.F64\.|v_cvt_f64_f(16|32)")

    @property
    def fp64_arithmetic(self) -> int:
        return self.count(r"D(FMA|ADD|MUL)\b|v_(fma|fmac|add|mul)_f64")

    @property
    def fp64_comparisons(self) -> int:
        return self.count(r"D(SETP|MNMX)\b|v_(cmpx?_\w+|max(_num)?|min(_num)?)_f64")

    def __str__(self) -> str:
        return ", ".join(f"{number} {opcode}" for opcode, number in Counter(self.opcodes).most_common())


def load_size(opcode: str) -> int:
    """Return the bytes that a thread reads by this load from global memory; 0 for any other instruction."""
    if re.match(r"(LDG|LD)\.", opcode):
        # the width is a modifier of its own: LTC128B is none
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[part] for part in reversed(opcode.split(".")) if part in sizes), 4)
    if match := re.match(r"(?:global|flat|buffer)_load_(\w+)", opcode):
        sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        return sizes.get(match[1], 1 if "byte" in match[1] else 2)
    return 0


def is_talk(opcode: str) -> bool:
    nvidia = r"(SHFL|BAR|REDUX|VOTE|MATCH|WARPSYNC|LDS|STS|LDSM|STSM|ATOMS|SYNCS)\b"
    amd = r"ds_|s_barrier|v_readlane|v_permlane|\w+_dpp\b"
    return re.match(rf"{nvidia}|{amd}", opcode) is not None


def is_atomic(opcode: str) -> bool:
    nvidia = r"(ATOM|ATOMG|ATOMS|RED|REDG)\b"
    amd = r"(global|flat|buffer)_atomic|ds_\w+_rtn"
    return re.match(rf"{nvidia}|{amd}", opcode) is not None


def flushes_subnormals(opcode: str) -> bool:
    return ".FTZ" in opcode


def parse_sass(text: str) -> tuple[list[str], list[list[str]]]:
    """Return a disassembly's opcodes, and those of its innermost loops."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", text)
    code = [(int(address, 16), opcode, operands) for address, opcode, operands in lines]
    opcodes = [opcode for _, opcode, _ in code]
    places = {address: place for place, (address, _, _) in enumerate(code)}
    spans = []
    for place, (address, opcode, operands) in enumerate(code):
        goal = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        # a branch to itself is the padding behind the end
        if goal and int(goal[1], 16) < address:
            spans.append((places[int(goal[1], 16)], place))
    return opcodes, _innermost(opcodes, spans)


def parse_amdgcn(text: str) -> tuple[list[str], list[list[str]]]:
    """Return an assembly text's opcodes, and those of its innermost loops."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    spans = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\t([a-z]\w+)(.*)", line):
            opcodes.append(instruction[1])
            goal = re.search(r"\.LBB\w+", instruction[2]) if "branch" in instruction[1] else None
            if goal and goal[0] in labels:
                spans.append((labels[goal[0]], len(opcodes) - 1))
    return opcodes, _innermost(opcodes, spans)


def _innermost(opcodes: list[str], spans: list[tuple[int, int]]) -> list[list[str]]:
    # two branches back to one place are one loop
    longest = {start: max(end for s, end in spans if s == start) for start, _ in spans}
    inner = [
        (start, end)
        for start, end in longest.items()
        if not any(start < s and e <= end for s, e in longest.items())
    ]
    return [opcodes[start : end + 1] for start, end in sorted(inner)]


def _read_sass(target: str, compiled: Any, signature: dict[str, str]) -> Code:
    cubin = Path(compiled.metadata_group[f"{compiled.name}.cubin"])
    text, usage = (
        subprocess.run([_CUOBJDUMP, option, cubin], capture_output=True, text=True, check=True).stdout
        for option in ("-sass", "-res-usage")
    )
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    opcodes, loops = parse_sass(text)
    stack = used["STACK"] + used["LOCAL"]
    return Code(target, signature, compiled.asm["ttir"], opcodes, loops, used["REG"], stack, text)


def _read_amdgcn(target: str, compiled: Any, signature: dict[str, str]) -> Code:
    text = compiled.asm["amdgcn"]
    opcodes, loops = parse_amdgcn(text)
    used = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    stack = used["private_segment_fixed_size"] + 4 * (used["vgpr_spill_count"] + used["sgpr_spill_count"])
    return Code(target, signature, compiled.asm["ttir"], opcodes, loops, used["vgpr_count"], stack, text)
