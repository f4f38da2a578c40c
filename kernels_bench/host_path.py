"""Measure the host time of a call without the kernels: the fixed part, and the part per tensor.

    python -m kernels_bench.host_path                     # the table
    python -m kernels_bench.host_path --check --json PATH # exit code 1 if the bound is missed

Tensors have one element and launches are stubbed. The rest is Python, the dispatcher, and on a GPU
allocations, copies and the device guard. Without a GPU, CPU tensors take the kernels' path. `foreach_norm`
is torch's own norm of the same list; its time includes launches and, on a CPU, the arithmetic of one
element. The bound is a ratio within one run. It limits the time of `ops.tensor_stats` with unchanged
addresses, beyond the list of `data_ptr()` that every pointer table begins with: at most a fifth of
`foreach_norm`'s time for lists of 1000 tensors and more. Every contender runs once a round; the table
compares medians.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, TENSORS
from gradiometer.ops import dispatch, launch_plans, uploads
from kernels_bench import scripts

COUNTS = (1, 148, 1000, 2000)
# share of foreach_norm's time, the smallest list it applies to, and the launches for a list of one dtype
BOUND_SHARE, BOUND_COUNT, BOUND_LAUNCHES = 0.2, 1000, 2
BARE, OURS, PEER = "list of data_ptr()", "ops.tensor_stats", "foreach_norm"
OP = "  through the dispatcher"
# contenders whose launches and copies are counted
COUNTED = (OURS, "  other addresses", "  a first call", OP, "  through it, other addresses")


class Stub:
    """Replaces the launchers, and counts their calls."""

    def __init__(self, count, device):
        self.launches = 0
        columns = torch.zeros((count, TENSORS.width), dtype=torch.float64, device=device)
        self.results = columns, torch.zeros((count,), dtype=torch.int32, device=device)

    def __call__(self, *_, **__):
        self.launches += 1
        return self.results

    def clip_factors(self, columns, *_, per_tensor):
        self.launches += 1
        return torch.ones(columns.shape[: int(per_tensor)], dtype=torch.float64, device=columns.device)


@contextlib.contextmanager
def stubbed(count, device):
    from gradiometer import kernels

    stub = Stub(count, device)
    with (
        patch.object(kernels, "moments", stub),
        patch.object(kernels, "finalize", stub),
        patch.object(kernels, "scale", stub),
        patch.object(kernels, "clip_factors", stub.clip_factors),
        patch.object(dispatch, "uses_kernels", lambda _: True),
        patch.object(ops, "uses_kernels", lambda _: True),
    ):
        yield stub


def model_of(tensors):
    """Return a model of modules with two parameters each, whose gradients are the tensors."""
    model = nn.Sequential()
    for i in range(0, len(tensors), 2):
        part = nn.Module()
        for name, grad in zip(("weight", "bias"), tensors[i : i + 2], strict=False):
            parameter = nn.Parameter(torch.empty_like(grad))
            parameter.grad = grad
            part.register_parameter(name, parameter)
        model.append(part)
    return model


def contenders_of(tensors):
    """Return name -> (an untimed call before it, or None; the timed call)."""
    other = [tensor.clone() for tensor in tensors]
    named = {f"blocks.{i}.attention.weight": tensor for i, tensor in enumerate(tensors)}
    model = model_of(tensors)
    z_score, per_tensor = gm.ZScoreClip(device=tensors[0].device), gm.PerTensorClip(model)
    limits = DEFAULT_THRESHOLDS.vanishing, DEFAULT_THRESHOLDS.exploding, DEFAULT_THRESHOLDS.dead

    def ours():
        return ops.tensor_stats(tensors, DEFAULT_THRESHOLDS)

    def moved():
        ops.tensor_stats(other, DEFAULT_THRESHOLDS)

    def op():
        torch.ops.gradiometer.tensor_stats(tensors, *limits)

    def op_moved():
        torch.ops.gradiometer.tensor_stats(other, *limits)

    return {
        BARE: (None, lambda: [tensor.data_ptr() for tensor in tensors]),
        OURS: (ours, ours),
        "  other addresses": (moved, ours),
        "  a first call": (launch_plans.clear, ours),
        OP: (op, op),
        "  through it, other addresses": (op_moved, op),
        "gm.collect of a list": (ours, lambda: gm.collect(tensors)),
        "gm.collect of a dict": (ours, lambda: gm.collect(named)),
        "gm.collect_grads": (ours, lambda: gm.collect_grads(model)),
        "  named_parameters()": (None, lambda: list(model.named_parameters())),
        "gm.collect_and_clip_": (ours, lambda: gm.collect_and_clip_(model, 1.0)),
        "  by gm.ZScoreClip": (ours, lambda: gm.collect_and_clip_(model, z_score)),
        "  by gm.PerTensorClip": (ours, lambda: gm.collect_and_clip_(model, per_tensor)),
        PEER: (None, lambda: torch._foreach_norm(tensors)),
    }


def measure(count, device, rounds):
    """Return the contenders' medians in us, and launches and copies of our calls."""
    tensors = [torch.ones(1, device=device) for _ in range(count)]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with stubbed(count, device) as stub:
        contenders = contenders_of(tensors)
        times = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (before, run) in contenders.items():
                if before is not None:
                    before()
                wait()
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e6)
        counted = {}
        for name in COUNTED:
            before, run = contenders[name]
            before()
            stub.launches = 0
            with patch.object(uploads, "_upload", wraps=uploads._upload) as upload:
                run()
            copied = sum(call.args[0].nbytes for call in upload.call_args_list)
            counted[name.strip()] = {"launches": stub.launches, "copies": upload.call_count, "bytes": copied}
    # the first rounds warm up
    return {name.strip(): statistics.median(values[3:]) for name, values in times.items()}, counted


def verdicts_of(medians, counted):
    """Return, for each long list, our time beyond the bare list, its limit, and the launches."""
    verdicts = {}
    for count in [count for count in COUNTS if count >= BOUND_COUNT]:
        beyond = medians[count][OURS] - medians[count][BARE]
        limit = BOUND_SHARE * medians[count][PEER]
        launches = counted[count][OURS]["launches"]
        met = beyond <= limit and launches <= BOUND_LAUNCHES and counted[count][OURS]["copies"] == 0
        verdicts[count] = {"beyond_us": beyond, "limit_us": limit, "launches": launches, "met": met}
    return verdicts


def fits_of(medians):
    """Fit fixed us + ns a tensor to each contender's time beyond the bare list."""
    fits = {}
    for name in medians[COUNTS[0]]:
        beyond = [medians[count][name] - medians[count][BARE] for count in COUNTS]
        slope, fixed = statistics.linear_regression(COUNTS, beyond)
        fits[name] = {"fixed_us": fixed, "ns_per_tensor": slope * 1e3}
    return fits


def show(where, medians, counted, fits, verdicts):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"host's time of a call, us; {where}, torch {torch.__version__}; medians")
    table.add_column("tensors")
    for count in COUNTS:
        table.add_column(str(count), justify="right")
    for title in ("beyond the bare list: fixed", "+ ns a tensor"):
        table.add_column(title, justify="right")
    for name, fit in fits.items():
        cells = [f"{medians[count][name]:.1f}" for count in COUNTS]
        fit_cells = [f"{fit['fixed_us']:.0f}", f"{fit['ns_per_tensor']:.0f}"] if name != BARE else ["", ""]
        table.add_row(name, *cells, *fit_cells)
    table.add_section()
    limits = [
        f"{verdicts[count]['limit_us'] + medians[count][BARE]:.1f}" if count in verdicts else ""
        for count in COUNTS
    ]
    table.add_row(f"{OURS} may take", *limits)
    console = Console(width=120)
    console.print(table)
    for name, counts in counted[COUNTS[-1]].items():
        console.print(
            f"{name}, {COUNTS[-1]} tensors: {counts['launches']} launches, "
            f"{counts['copies']} copies to the device of {counts['bytes']} bytes"
        )
    missed = [count for count, verdict in verdicts.items() if not verdict["met"]]
    console.print(f"[bold red]missed with {missed} tensors" if missed else "every bound met")


def main():
    parser = scripts.parser("kernels_bench.host_path", __doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 if the bound is missed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds a count")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        sys.exit("host_path: triton is not installed, and the kernels' path needs it; pip install triton")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("host_path: --device cuda: torch sees no GPU here; leave it out")

    medians, counted = {}, {}
    for count in COUNTS:
        medians[count], counted[count] = measure(count, device, args.rounds + 3)
    fits, verdicts = fits_of(medians), verdicts_of(medians, counted)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU tensors on the kernels' path"
    show(where, medians, counted, fits, verdicts)
    if args.json:
        figures = {"medians_us": medians, "beyond_bare": fits, "calls": counted, "bound": verdicts}
        about = {"torch": torch.__version__, "device": where, "rounds": args.rounds}
        args.json.write_text(json.dumps({**about, **figures}, indent=1) + "\n", encoding="utf-8")
    return int(args.check and not all(verdict["met"] for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
