"""Compile kernels for devices that this machine does not have, and read the code.

The package's own launchers run on CPU tensors. A launch is recorded, but not executed; its arguments decide
types, constants and options exactly as on a device. Triton then compiles for any target, and its wheel
includes the disassembler.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from gradiometer.columns import ACTIVATIONS, CURSOR_SIZE, DEFAULT_THRESHOLDS, Thresholds
from gradiometer.fp64_rates import has_few_fp64_units
from gradiometer.kernels import ACTIVATION_PARTIALS, activation, tuning
from gradiometer.ops import dispatch
from kernels_bench.machine_code.disassembly import Listing, Loop, is_spill, parse_amdgcn, parse_sass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CUDA_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
HIP_TARGETS = ("gfx942", "gfx950")
TARGETS = (*CUDA_TARGETS, *HIP_TARGETS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def gpu_target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


def assembler(target: str) -> str:
    """Return the assembler of this target, with its version."""
    if target in HIP_TARGETS:
        return f"LLVM of triton {triton.__version__}"
    from triton.backends.nvidia.compiler import get_ptxas

    tool = Path(get_ptxas(gpu_target(target).arch).path)
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{tool.name} {re.search(r'V([0-9.]+)', said)[1]}"


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch as the launcher made it."""

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

    @property
    def constants(self) -> dict[str, Any]:
        return {k: v for k, v in self.kwargs.items() if k in self.kernel.signature.parameters}

    def variant_of(self, target: str) -> tuple[Any, ...]:
        """Return the key of Triton's cache: launches with different keys are different compilations."""
        _, specialization, _ = self.bind(target)
        options = {k: v for k, v in self.kwargs.items() if k not in self.constants}
        return self.kernel, repr(specialization), repr(options), repr(self.constants)

    def build(self, target: str) -> tuple[Any, dict[str, str]]:
        """Return Triton's compiled kernel, and the types of its arguments by name."""
        bound, specialization, backend = self.bind(target)
        options, signature, constants, attrs = self.kernel._pack_args(
            backend, self.kwargs, bound, specialization, None
        )
        source = ASTSource(self.kernel, signature, constants, attrs)
        compiled = triton.compile(source, target=gpu_target(target), options=options.__dict__)
        return compiled, {name: str(kind) for name, kind in signature.items()}

    def compile(self, target: str) -> Code:
        read = _read_sass if target in CUDA_TARGETS else _read_amdgcn
        return read(target, *self.build(target))


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches of Triton kernels instead of executing them."""
    launches: list[Launch] = []

    def record(kernel, *args, grid, warmup, **kwargs):
        del warmup
        launches.append(Launch(kernel, args, kwargs, grid))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


@contextmanager
def launching_for(target: str) -> Iterator[None]:
    """Make the launchers choose what they choose on such a GPU."""
    few = target in CUDA_TARGETS and has_few_fp64_units(capability(target))
    # they ask torch for the warp size
    hip = mock.patch.object(torch.version, "hip", "7.0" if target in HIP_TARGETS else None)
    with hip, mock.patch.object(tuning, "has_few_fp64_units", return_value=few):
        yield


def capability(target: str) -> tuple[int, int]:
    """Return the compute capability of a target such as sm_90."""
    number = int(target.removeprefix("sm_"))
    return number // 10, number % 10


def launches_of(
    tensors: Sequence[torch.Tensor],
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    inv_scale: torch.Tensor | None = None,
    target: str = "sm_90",
    *,
    fingerprint: bool = False,
) -> list[Launch]:
    """Return the launches that measuring these tensors makes on such a GPU."""
    op = (
        torch.ops.gradiometer.tensor_stats_fingerprints if fingerprint else torch.ops.gradiometer.tensor_stats
    )
    limits = (thresholds.vanishing, thresholds.exploding, thresholds.dead)
    uses_kernels = mock.patch.object(dispatch, "uses_kernels", return_value=True)
    with recorded_launches() as launches, launching_for(target), uses_kernels:
        op(list(tensors), *limits, inv_scale)
    return launches


def pair_launches_of(sides: Sequence[Sequence[torch.Tensor]], target: str = "sm_90") -> list[Launch]:
    """Return the launches that measuring these pairs makes on such a GPU; ``sides``: all a, b and g."""
    uses_kernels = mock.patch.object(dispatch, "uses_kernels", return_value=True)
    with recorded_launches() as launches, launching_for(target), uses_kernels:
        torch.ops.gradiometer.pair_stats(*map(list, sides))
    return launches


def exponent_launches_of(tensors: Sequence[torch.Tensor], target: str = "sm_90") -> list[Launch]:
    """Return the launches that counting these tensors' elements by magnitude makes on such a GPU."""
    uses_kernels = mock.patch.object(dispatch, "uses_kernels", return_value=True)
    with recorded_launches() as launches, launching_for(target), uses_kernels:
        torch.ops.gradiometer.exponent_stats(list(tensors))
    return launches


def line_launches_of(tensors: Sequence[torch.Tensor], target: str = "sm_90") -> list[Launch]:
    """Return the launches that measuring the lines of these tensors makes on such a GPU."""
    uses_kernels = mock.patch.object(dispatch, "uses_kernels", return_value=True)
    with recorded_launches() as launches, launching_for(target), uses_kernels:
        torch.ops.gradiometer.line_stats(list(tensors))
    return launches


def projection_launches_of(
    tensors: Sequence[torch.Tensor], count: int = 16, target: str = "sm_90"
) -> list[Launch]:
    """Return the launches that projecting these tensors makes on such a GPU."""
    names = [f"w{i}" for i in range(len(tensors))]
    uses_kernels = mock.patch.object(dispatch, "uses_kernels", return_value=True)
    with recorded_launches() as launches, launching_for(target), uses_kernels:
        torch.ops.gradiometer.project(list(tensors), names, count, 0, [], None)
    return launches


def moments_launch(dtype: torch.dtype, target: str = "sm_90", *, fingerprint: bool = False) -> Launch:
    return launches_of([torch.zeros(9, dtype=dtype)], target=target, fingerprint=fingerprint)[0]


@cache
def moments_code(target: str, dtype: torch.dtype, *, fingerprint: bool = False) -> Code:
    """Compile the moments kernel, once in a process."""
    return moments_launch(dtype, target, fingerprint=fingerprint).compile(target)


def activation_launch(x: torch.Tensor, target: str = "sm_90", channel_dim: int = -1) -> Launch:
    """Return the launch that measuring this activation makes on such a GPU."""
    fp64, int32 = {"dtype": torch.float64}, {"dtype": torch.int32}
    store, cursor = torch.zeros(1, ACTIVATIONS.width, **fp64), torch.zeros(CURSOR_SIZE, **fp64)
    partials, counter = torch.zeros(ACTIVATION_PARTIALS, **fp64), torch.zeros(1, **int32)
    alive = torch.zeros(x.shape[channel_dim], **int32)
    with recorded_launches() as launches, launching_for(target):
        activation(x, store, 0, cursor, partials, alive, counter, channel_dim)
    return launches[0]


@dataclass(frozen=True, eq=False)
class Variant:
    """One compilation of a kernel: the dtype it reads, from how many tensors, and a launch that needs it."""

    kernel: str
    dtype: torch.dtype
    note: str
    launch: Launch
    tensors: int = 1


def variants(target: str, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Variant]:
    """Return the variants of the kernels that tensors of these dtypes can need."""
    # the launchers may distinguish these: 16-byte aligned or not, one chunk or several, one row or several
    inputs = [([16], 0), ([9], 1), ([100_000] * 3, 0), ([100_000] * 3, 1), ([2**21], 0)]
    found: dict[tuple[Any, ...], Variant] = {}
    for dtype in dtypes:
        for sizes, start in inputs:
            tensors = [torch.zeros(size + start, dtype=dtype)[start:] for size in sizes]
            for launch in launches_of(tensors, target=target)[:-1]:
                found.setdefault(launch.variant_of(target), Variant("moments", dtype, "", launch))
            launch = launches_of(tensors, target=target, fingerprint=True)[0]
            found.setdefault(launch.variant_of(target), Variant("fingerprint", dtype, "", launch))
            for launch in exponent_launches_of(tensors, target):
                found.setdefault(launch.variant_of(target), Variant("exponents", dtype, "", launch))
        launch = line_launches_of([torch.zeros(9, 9, dtype=dtype)], target)[0]
        found.setdefault(launch.variant_of(target), Variant("lines", dtype, "", launch))
        # with gaps, too
        for count in (16, 32):
            for x in (torch.zeros(9, 9, dtype=dtype), torch.zeros(9, 9, dtype=dtype)[:, :3]):
                launch = projection_launches_of([x], count, target)[0]
                found.setdefault(launch.variant_of(target), Variant("projections", dtype, "", launch))
        # of an aligned tensor; activations that are not are rare, and then the loads are narrow
        launch = activation_launch(torch.zeros(100, 1000, dtype=dtype), target)
        found.setdefault(launch.variant_of(target), Variant("activation", dtype, "", launch))
        # a and b, or also g
        for count, name in ((2, "pairs"), (3, "pairs+g")):
            for start in (0, 1):
                sides = [[torch.zeros(100_000 + start, dtype=dtype)[start:]] for _ in range(count)]
                launch = pair_launches_of(sides, target=target)[0]
                found.setdefault(launch.variant_of(target), Variant(name, dtype, "", launch, count))
    sides = [[torch.zeros(9)]] * 2
    launch = pair_launches_of(sides, target=target)[-1]
    found.setdefault(launch.variant_of(target), Variant("finalize pairs", torch.float64, "", launch))
    for scale in (None, *dtypes):
        inv_scale = None if scale is None else torch.ones((), dtype=scale)
        launch = launches_of([torch.zeros(9)], inv_scale=inv_scale, target=target)[-1]
        note = "" if scale is None else f"inv_scale {short(scale)}"
        found.setdefault(launch.variant_of(target), Variant("finalize", torch.float64, note, launch))
    return _with_constants_told(list(found.values()))


def _with_constants_told(all_variants: list[Variant]) -> list[Variant]:
    """Name the constants that distinguish variants of the same kernel and dtype."""
    told = []
    for variant in all_variants:
        alike = [v.launch.constants for v in all_variants if _title(v) == _title(variant)]
        differing = [
            f"{name}={value}"
            for name, value in variant.launch.constants.items()
            if len({repr(constants.get(name)) for constants in alike}) > 1
        ]
        told.append(replace(variant, note=" ".join(filter(None, [variant.note, *differing]))))
    return told


def _title(variant: Variant) -> tuple[Any, ...]:
    return variant.kernel, variant.dtype, variant.note


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False, repr=False)
class Code:
    """A compiled kernel."""

    target: str
    signature: dict[str, str]
    ttir: str
    # PTX, or LLVM's code for targets without PTX: the operations before an assembler expands them
    portable: str
    text: str
    listing: Listing
    registers: int
    # bytes of memory that a thread uses for values that do not fit into registers
    stack: int
    # registers spilled there, or instructions that spill them
    spills: int
    # bytes per block
    shared: int

    @property
    def opcodes(self) -> list[str]:
        return self.listing.opcodes

    @property
    def main_loop(self) -> Loop:
        start, end = self.listing.main_span
        return Loop(self.opcodes[start : end + 1])

    @property
    def marked(self) -> str:
        """The text, with ``>`` before each line of the main loop."""
        start, end = (self.listing.lines[place] for place in self.listing.main_span)
        lines = self.text.splitlines()
        return "\n".join(f"{'>' if start <= i <= end else ' '} {line}" for i, line in enumerate(lines)) + "\n"


def _read_sass(target: str, compiled: Any, signature: dict[str, str]) -> Code:
    cubin = Path(compiled.metadata_group[f"{compiled.name}.cubin"])
    text, usage = (
        subprocess.run([_BIN / "cuobjdump", option, cubin], capture_output=True, text=True, check=True).stdout
        for option in ("-sass", "-res-usage")
    )
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    listing = parse_sass(text)
    return Code(
        target,
        signature,
        compiled.asm["ttir"],
        compiled.asm["ptx"],
        text,
        listing,
        used["REG"],
        stack=used["STACK"] + used["LOCAL"],
        spills=sum(map(is_spill, listing.opcodes)),
        shared=compiled.metadata.shared,
    )


def _read_amdgcn(target: str, compiled: Any, signature: dict[str, str]) -> Code:
    text = compiled.asm["amdgcn"]
    used = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return Code(
        target,
        signature,
        compiled.asm["ttir"],
        compiled.asm["llir"],
        text,
        parse_amdgcn(text),
        used["vgpr_count"],
        stack=used["private_segment_fixed_size"],
        spills=used["vgpr_spill_count"] + used["sgpr_spill_count"],
        shared=compiled.metadata.shared,
    )
