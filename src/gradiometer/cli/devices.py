"""The devices of this machine: which code reads tensors on each, and how fast."""

from __future__ import annotations

import os
import platform
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from gradiometer import ops
from gradiometer.fp64_rates import FP64_RATES, has_few_fp64_units
from gradiometer.stats import collect

# float32 elements that are read to measure the rate: on a GPU (far more than its caches hold), on the CPU
_ELEMENTS: Final = (2**26, 2**22)


@dataclass(frozen=True)
class Problem:
    """A problem and its fix, one line each."""

    what: str
    fix: str


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on.

    Attributes:
        device: ``"cuda:0"``.
        name: of the hardware.
        path: the code that reads tensors there: ``"Triton kernels"`` or ``"eager PyTorch"``.
        fp64: its fp64 rate in words, and the source.
        fp64_share: the fp64 rate divided by the fp32 rate; None if unknown, or on a CPU.
        memory: the total memory in bytes; None on the CPU.
        works: whether a small collection there gave the right norm.
        gigabytes_per_second: the measured rate at which a collection reads a large float32 tensor; None if
            the device does not work, or kernels are interpreted.
    """

    device: str
    name: str
    path: str
    fp64: str
    fp64_share: float | None
    memory: int | None
    works: bool
    gigabytes_per_second: float | None


def fp64_rate(capability: tuple[int, int]) -> tuple[str, float | None]:
    """Return the fp64 rate of an NVIDIA GPU in words, and divided by its fp32 rate.

    >>> fp64_rate((8, 9))[1]
    0.015625
    """
    if capability not in FP64_RATES:
        return f"unknown for compute capability {capability[0]}.{capability[1]}", None
    fp64, fp32, source = FP64_RATES[capability]
    poor = (
        "; few, so kernels add fp32 and 16-bit tensors in fp32 with compensation"
        if has_few_fp64_units(capability)
        else ""
    )
    return f"1/{fp32 // fp64} of fp32, {fp64} per clock and multiprocessor ({source}){poor}", fp64 / fp32


def examine() -> tuple[list[Device], list[Problem]]:
    """Return the devices, the CPU last, and their problems. Takes a short measurement on each."""
    devices = [torch.device("cpu")]
    for kind in ("xpu", "cuda"):
        module = torch.get_device_module(kind)
        count = module.device_count() if module.is_available() else 0
        devices = [torch.device(kind, i) for i in range(count)] + devices
    with warnings.catch_warnings(action="ignore"):  # of a missing driver, which is a problem of its own
        problems = [(device, _problem(device)) for device in devices]
    fix = "report it with the output of `gradiometer doctor --json`; collecting on the CPU may work"
    found = [Problem(f"collecting on {device} {what}", fix) for device, what in problems if what]
    return [_device(device, works=what is None) for device, what in problems], found


def _device(device: torch.device, *, works: bool) -> Device:
    uses_kernels = ops.uses_kernels(device)
    path = "Triton kernels" if uses_kernels else "eager PyTorch"
    if device.type == "cpu":
        path += ", interpreted" if uses_kernels else ""
        rate = None if uses_kernels or not works else _read_rate(device)
        fp64 = "in hardware; a SIMD vector holds half as many elements as in fp32"
        return Device(str(device), _cpu_name(), path, fp64, None, None, works, rate)
    properties = torch.get_device_module(device.type).get_device_properties(device)
    fp64, share = "rate unknown", None
    if device.type == "cuda" and torch.version.hip is None:
        fp64, share = fp64_rate((properties.major, properties.minor))
    rate = _read_rate(device) if works else None
    return Device(str(device), properties.name, path, fp64, share, properties.total_memory, works, rate)


def _problem(device: torch.device) -> str | None:
    """Collect a small tensor; return a description of what went wrong, or None."""
    try:
        norm = collect([torch.tensor([3.0, 4.0], device=device)]).materialize().total_norm
    except Exception as error:  # noqa: BLE001 the user would see it, whatever it is
        return f"fails: {first_line(error)}"
    return None if norm == 5.0 else f"gives {norm} as the norm of (3, 4), not 5"


def _read_rate(device: torch.device) -> float:
    """Return the best rate of several collections of a float32 tensor, in GB/s."""
    x = torch.ones(_ELEMENTS[device.type == "cpu"], device=device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        collect([x])
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e9


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next((n for n in names if n and n != "unknown"), platform.processor() or platform.machine())
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
