"""Measure one provider on one case: check its result, then take its time, launches and memory.

`Bench` holds one case and its providers in this process. It returns only JSON values, so a Bench of
another commit can run in a separate process (`git_base.py`) and take part in the same rounds.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import statistics
import sys
import time
from pathlib import Path

import torch

from kernels_bench.cases import CASES, FP32, Case, make
from kernels_bench.providers import MIB, PROVIDERS, tolerance

PROC = Path("/proc/self")
CACHES_FILLED = 4  # the copies of a case are this many times the last cache, so that reads miss it
DEFAULT_CACHE = 32 * MIB
HOST_SECONDS, HOST_CALLS = 0.2, 20


class Bench:
    """The providers of this process on one case."""

    def make(self, case: str, device: str, scale: int, copies: int) -> None:
        self.device = torch.device(device)
        self.data = make(CASES[case], self.device, scale, copies)
        self.truth = truth(self.data.sets[0])
        self.calls: dict = {}

    def build(self, name: str) -> dict:
        """Build a provider and check its first result. Returns the ``ms`` of a second call, and errors."""
        provider = PROVIDERS[name]
        reason = provider.needs(self.data)
        if reason:
            return {"error": reason}
        try:
            calls = provider.build(self.data)
            error = deviation(provider, calls[0](), self.truth)
            # a first estimate, by the host clock
            self.synchronize()
            start = time.perf_counter()
            calls[-1]()
            self.synchronize()
        except Exception as failure:  # noqa: BLE001 the run goes on, whatever a peer raises
            return {"error": reason_of(failure)}
        self.calls[name] = calls
        # a NaN fails this comparison
        fine = error is None or error <= tolerance(provider, self.data.case.dtype)
        told = error if error is None or math.isfinite(error) else None  # JSON has no NaN
        built = {"ms": (time.perf_counter() - start) * 1e3, "relative_error": told}
        return built | {"error": None if fine else f"wrong: {error:.0e}"}

    def sample(self, name: str, count: int, first: int) -> float:
        """Call a provider ``count`` times, starting with copy number ``first``. Returns ms per call."""
        calls = self.calls[name]
        turn = [calls[i % len(calls)] for i in range(first, first + count)]
        if self.device.type != "cuda":
            start = time.perf_counter()
            for call in turn:
                call()
            return (time.perf_counter() - start) * 1e3 / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in turn:
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def finish(self, name: str) -> dict:
        """Return launches, copies, host time and extra memory of one call; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        call = self.calls[name][0]
        return {"host_us": self._host_us(name), **launches(call), "extra_mib": _extra_mib(call)}

    def drop(self, name: str | None = None) -> None:
        """Free the memory of a provider, or of the case."""
        if name is not None:
            self.calls.pop(name, None)
        else:
            self.calls, self.data, self.truth = {}, None, None
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # each list length is another graph, and Dynamo keeps only a few
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _host_us(self, name):
        """Return the median time until a call returns; the device's queue is empty at the start."""
        calls, times, stop = self.calls[name], [], time.perf_counter() + HOST_SECONDS
        while not times or (len(times) < HOST_CALLS and time.perf_counter() < stop):
            self.synchronize()
            start = time.perf_counter()
            calls[len(times) % len(calls)]()
            times.append(time.perf_counter() - start)
        self.synchronize()
        return statistics.median(times) * 1e6


def truth(tensors):
    """Return the exact values for the tensors, from fp64 sums over short parts, on the CPU."""
    norms, largest = [], []
    for x in tensors:
        squares, most = [], 0.0
        for part in x.reshape(-1).split(2**22) if x.numel() else ():
            wide = part.double()
            squares.append(wide.square().sum().item())
            most = max(most, wide.abs_().max().item())
        norms.append(math.sqrt(math.fsum(squares)))
        largest.append(most)
    total = math.sqrt(math.fsum(norm * norm for norm in norms))
    return {"norms": norms, "total": [total], "max": largest, "found": [0.0]}


def deviation(provider, result, expected):
    """Return a result's largest relative error, or None if it is not compared."""
    if not provider.gives:
        return None
    got = provider.read(result).detach().double().cpu().reshape(-1)
    want = torch.tensor(expected[provider.gives], dtype=torch.float64)
    if got.shape != want.shape:
        raise ValueError(f"{got.numel()} values for {want.numel()}")
    return ((got - want).abs() / torch.where(want > 0, want, 1.0)).max().item()


def reason_of(failure):
    """Return an exception as one short line."""
    lines = str(failure).strip().splitlines() or [""]
    text = f"{type(failure).__name__}: {lines[0]}".removesuffix(": ")
    return text if len(text) <= 100 else text[:97] + "..."


def launches(call):
    """Count the kernels and the copies (and fills) of one call on the device, with the profiler."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
    except Exception as failure:  # noqa: BLE001 this user may not read counters; other figures do not need them
        print(f"launches were not counted: {reason_of(failure)}", file=sys.stderr)
        return {}
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in events)
    return {"launches": len(events) - copies, "copies": copies}


def _extra_mib(call):
    if hasattr(call, "extra_mib"):  # its capture has allocated the memory already
        return call.extra_mib
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def cache_bytes(device):
    """Return the size of the last cache before memory: a GPU's L2, or the CPU cache that Linux reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    found = [
        re.fullmatch(r"(\d+)K", size.read_text(encoding="ascii").strip())
        for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(match[1]) * 1024 for match in found if match), default=DEFAULT_CACHE)


# peak extra memory on a CPU


def can_read_peaks():
    return (PROC / "clear_refs").exists()


def resident(field):
    status = (PROC / "status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024


def peak_growth(cases, names, scale_of):
    """Measure peak resident growth of one call, in MiB: case -> provider -> MiB, None if it fails.

    Run it in a fresh process: earlier peaks would hide the growth.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc keeps freed memory
    warm = Case("warm", "", FP32, (((10**5,), 3), ((1000,), 9)), zeros=0.5)
    grown: dict = {}
    for case in cases:
        data = make(case, torch.device("cpu"), scale_of(case))
        for name in names:
            provider, value = PROVIDERS[name], None
            # compiled providers would be compiled here again
            if provider.level in {"eager", "op"} and not provider.needs(data):
                try:
                    # loads code and starts threads before the measured call
                    provider.build(make(warm, torch.device("cpu")))[0]()
                    call = provider.build(data)[0]
                    gc.collect()
                    release(0)
                    (PROC / "clear_refs").write_text("5", encoding="ascii")  # resets the peak
                    before = resident("VmRSS")
                    call()
                    value = (resident("VmHWM") - before) / MIB
                except Exception as failure:  # noqa: BLE001 the timed run reports it
                    print(f"{case.name}, {name}: {reason_of(failure)}", file=sys.stderr)
            grown.setdefault(case.name, {})[name] = value
    return grown
