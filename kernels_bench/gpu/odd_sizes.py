"""Collect, scale and record tensors of odd sizes, each with its own allocation, for a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \\
        python -m kernels_bench.gpu.odd_sizes

A checker then detects a read beyond the end of a tensor. The sizes are close to the tile and chunk sizes, in
every dtype; some tensors are misaligned or contain NaN. The exit code is 3 if a result differs from that of
the CPU.
"""

from __future__ import annotations

import math

import torch

import gradiometer as gm
from gradiometer.columns import NUM_COLUMNS
from gradiometer.recorder import Recorder
from kernels_bench import scripts

SIZES = (0, 1, 3, 17, 1023, 2049, 2**15 - 1, 2**15 + 1, 70_001)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# 1 is the exit code of an exception
WRONG = 3
EXACT = ("numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "abs_max")


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.odd_sizes", __doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args(argv).device
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no GPU here; use --device cpu for the same comparison")
    host = {f"{dtype} {size}": torch.randn(size).to(dtype) for dtype in DTYPES for size in SIZES}
    for name in [name for name in host if name.endswith("70001")]:
        host[f"{name} with NaN"] = host[name].clone()
        host[f"{name} with NaN"][[5, -1]] = math.nan
    there = {name: x.to(device) for name, x in host.items()}
    for start in (1, 3):
        # these views end at the last byte of their allocation
        host |= {f"{name} from {start}": x[start:] for name, x in host.items() if "from" not in name}
        there |= {f"{name} from {start}": x[start:] for name, x in there.items() if "from" not in name}
    found = gm.collect(there)
    wrong = differences(found, gm.collect(host))
    recorder = Recorder(with_grads(there), capacity=2)
    recorder.record()
    (record,) = recorder.read()
    if not torch.equal(record.values[0, :, :NUM_COLUMNS], found.columns.cpu()):
        wrong.append("record")
    for start in (0, 1, 3):
        # one at a time, since these views overlap
        names = [
            name for name in host if name.endswith(f" from {start}") or (not start and "from" not in name)
        ]
        for tensors in (there, host):
            grads = with_grads({name: tensors[name] for name in names})
            gm.clip_grads_with_norm_(grads.values(), 1.0, 3.0)
    wrong += [
        f"scaled {name}"
        for name, x in host.items()
        if not torch.allclose(x, there[name].cpu(), 0.0, 0.0, equal_nan=True)
    ]
    print(f"{len(host)} tensors, wrong: {wrong or 'none'}")
    return WRONG if wrong else 0


def with_grads(tensors):
    """Return parameters whose gradients are these tensors."""
    parameters = {name: torch.nn.Parameter(torch.empty_like(x)) for name, x in tensors.items()}
    for name, x in tensors.items():
        parameters[name].grad = x
    return parameters


def differences(found, expected):
    """Return the names of columns that differ from those of the CPU."""
    wrong = [name for name in EXACT if not torch.equal(getattr(found, name).cpu(), getattr(expected, name))]
    off = (found.finite_norm.cpu() - expected.finite_norm).abs() > 1e-12 * expected.finite_norm
    return wrong + ["norm"] * bool(off.any())


if __name__ == "__main__":
    raise SystemExit(main())
