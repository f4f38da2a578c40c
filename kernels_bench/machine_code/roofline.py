"""The best possible time of a pass over memory on each GPU, from the rates of its units and their sources.

This is a prediction from tables and machine code, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer.fp64_rates import FP64_RATES

__all__ = ["GPUS", "REACHABLE", "Gpu", "binding", "times"]

# share of the specified bandwidth that a read reaches: CUB's DeviceReduce on an H200 read 4.31 of 4.8 TB/s
# (NVIDIA/cccl#9722)
REACHABLE = 0.90

_GUIDE = "CUDA C++ Programming Guide, table 'Throughput of Native Arithmetic Instructions'"
_SCHEDULERS = "4 schedulers an SM, each issues one instruction of 32 lanes a clock"


@dataclass(frozen=True)
class Gpu:
    """Rates are per clock of one processor: an SM, or a CU on AMD. Each has a source."""

    name: str
    # the target to compile kernels for
    target: str
    processors: int
    # Hz, the vendor's maximum
    clock: float
    # bytes/s, as specified
    bandwidth: float
    # lanes that instructions are issued for
    lanes: int
    # fp64 additions, multiplications, fused ones and comparisons
    fp64: int
    # conversions to fp64
    conversions: int
    sources: dict[str, str]


def _cuda(
    name: str,
    target: str,
    numbers: tuple[int, float, float, int],
    processors: str,
    clock: str,
    bandwidth: str,
    conversions: str = "",
) -> Gpu:
    """Make a GPU from numbers (SMs, MHz, GB/s, conversions) and their sources."""
    sms, mhz, gigabytes, conversion_rate = numbers
    fp64_rate, _, fp64 = FP64_RATES[int(target[3:-1]), int(target[-1])]
    sources = {
        "processors": processors,
        "clock": clock,
        "bandwidth": bandwidth,
        "lanes": "CUDA C++ Programming Guide: an SM has 4 schedulers, each issues for one warp of 32 a clock",
        "fp64": f"{fp64}; comparisons are taken as multiplications",
        "conversions": conversions
        or f"{_GUIDE}, {target[3:-1]}.{target[-1]}: type conversions from and to 64-bit types",
    }
    return Gpu(
        name, target, sms, mhz * 1e6, gigabytes * 1e9, 128, fp64_rate, conversion_rate, sources=sources
    )


def _cdna(name: str, target: str, numbers: tuple[int, float, float], sheet: str) -> Gpu:
    """Make a GPU from numbers (CUs, MHz, GB/s) and their data sheet."""
    cus, mhz, gigabytes = numbers
    sources = {
        "processors": sheet,
        "clock": f"{sheet}: peak engine clock",
        "bandwidth": f"{sheet}: peak memory bandwidth",
        "lanes": "AMD CDNA 3 white paper: 4 SIMD units of 16 lanes a CU; packed fp32 is not counted on",
        "fp64": f"inferred from the peak fp64 vector rate ({sheet}): 128 operations a clock and CU, fused 64",
        "conversions": "LLVM's SISchedule.td, SIDPGFX940FullSpeedModel: WriteDoubleCvt takes one pass",
    }
    return Gpu(name, target, cus, mhz * 1e6, gigabytes * 1e9, 64, 64, 64, sources)


GPUS = (
    _cuda(
        "A100",
        "sm_80",
        (108, 1410, 2039, 16),
        processors="NVIDIA A100 Tensor Core GPU Architecture white paper",
        clock="NVIDIA A100 Tensor Core GPU Architecture white paper: boost clock",
        bandwidth="NVIDIA A100 data sheet, 80 GB SXM",
    ),
    _cuda(
        "H100",
        "sm_90",
        (132, 1980, 3350, 16),
        processors="NVIDIA H100 Tensor Core GPU Architecture white paper, SXM5",
        clock="inferred from the data sheet's 67 TFLOPS fp32: 132 SMs x 128 lanes x 2 x 1.98 GHz",
        bandwidth="NVIDIA H100 data sheet, SXM",
    ),
    _cuda(
        "H200",
        "sm_90",
        (132, 1980, 4800, 16),
        processors="inferred from the data sheet's 67 TFLOPS fp32, the same as H100 SXM",
        clock="inferred from the data sheet's 67 TFLOPS fp32, the same as H100 SXM",
        bandwidth="NVIDIA H200 data sheet, SXM",
    ),
    _cuda(
        "B200",
        "sm_100",
        (148, 1965, 8000, 16),
        processors="reported by others from the device's properties; NVIDIA states none",
        clock="reported by others (Cornell Virtual Workshop, Blackwell B200); NVIDIA states none",
        bandwidth="NVIDIA HGX B200 data sheet",
        conversions="inferred: as compute capability 9.0's",
    ),
    _cuda(
        "B300",
        "sm_103",
        (148, 1980, 8000, 2),
        processors="inferred: as B200's, whose data sheet has the same 75 TFLOPS fp32",
        clock="inferred from the HGX B300 data sheet's 75 TFLOPS fp32: 148 SMs x 128 lanes x 2 x 1.98 GHz",
        bandwidth="NVIDIA HGX B300 data sheet",
        conversions="inferred: as compute capability 8.9's",
    ),
    _cuda(
        "RTX 4090",
        "sm_89",
        (128, 2520, 1008, 2),
        processors="NVIDIA Ada GPU Architecture white paper",
        clock="NVIDIA Ada GPU Architecture white paper: boost clock",
        bandwidth="NVIDIA Ada GPU Architecture white paper",
    ),
    _cuda(
        "L40S",
        "sm_89",
        (142, 2520, 864, 2),
        processors="inferred from the data sheet's 18,176 CUDA cores, 128 an SM",
        clock="inferred from the data sheet's 91.6 TFLOPS fp32: 142 SMs x 128 lanes x 2 x 2.52 GHz",
        bandwidth="NVIDIA L40S data sheet",
    ),
    _cdna("MI300X", "gfx942", (304, 2100, 5300), sheet="AMD Instinct MI300X data sheet"),
)


def times(
    gpu: Gpu,
    itemsize: int,
    slots: float,
    fp64: float,
    conversions: float,
    elements: float = 1e9,
) -> dict[str, float]:
    """Return the least seconds that each resource needs to read ``elements`` elements once.

    ``T >= t_launch + max(N*s / (0.90*BW), N*i / (lanes*SM*f), N*k / (R64*SM*f), N*c / (Rcvt*SM*f))``: the
    roofline model with issue slots, fp64 units and converters as further roofs. It assumes that units overlap
    perfectly, that clocks never fall, and that code outside the main loop costs nothing: no kernel
    is faster, and a real one is slower.

    Args:
        gpu: rates.
        itemsize: s, bytes of an element.
        slots: i, issue slots an element takes, fp64 instructions and conversions among them.
        fp64: k, fp64 additions, multiplications, fused ones and comparisons an element takes.
        conversions: c, conversions to fp64 an element takes.
        elements: N.
    """
    cycles = gpu.processors * gpu.clock / elements
    return {
        "memory": elements * itemsize / (REACHABLE * gpu.bandwidth),
        "issue": slots / (gpu.lanes * cycles),
        "fp64": fp64 / (gpu.fp64 * cycles),
        "conversion": conversions / (gpu.conversions * cycles),
    }


def binding(seconds: dict[str, float]) -> str:
    """Return the name of the resource that takes longest."""
    return max(seconds, key=lambda name: seconds[name])
