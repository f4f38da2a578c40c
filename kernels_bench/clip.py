"""Compare `clip_grad_norm_` with torch's, once with a norm above the bound and once below it.

    python -m kernels_bench.clip                         # on the GPU, or on the CPU with smaller cases
    python -m kernels_bench.clip --device cuda --json PATH

Ours reads the gradients once in fp64, and writes them only if the norm is above the bound; torch's reads
them in their own precision and always writes. In each round both run once, in alternating order, on fresh
gradients. The table compares medians; a time includes the wait for the device at the end of the call.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from gradiometer import clip_grad_norm_
from kernels_bench import cases, machine, scripts

CASES = ("gpt2", "1000x1000-fp32")
CLIPS = {"ours": clip_grad_norm_, "torch": nn.utils.clip_grad_norm_}
# the norm of the gradients is in the thousands, so only the first bound clips
BOUNDS = {"clipped": 1.0, "not clipped": 1e9}
WARM_UP = 3


def parameters_of(data):
    parameters = [nn.Parameter(torch.empty_like(x), requires_grad=False) for x in data.sets[0]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def measure(data, bound, rounds, device):
    """Return each contender's times in ms, and the norms it returned."""
    parameters, fresh = parameters_of(data), data.sets[0]
    grads = [parameter.grad for parameter in parameters]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, norms = {name: [] for name in CLIPS}, {}
    for i in range(rounds + WARM_UP):
        for name in sorted(CLIPS, reverse=i % 2 == 1):
            torch._foreach_copy_(grads, fresh)
            wait()
            start = time.perf_counter()
            norm = CLIPS[name](parameters, bound)
            wait()
            times[name].append((time.perf_counter() - start) * 1e3)
            norms[name] = norm.item()
    return {name: values[WARM_UP:] for name, values in times.items()}, norms


def show(rows, device):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"clip_grad_norm_, ms of a call; {device}, torch {torch.__version__}; medians")
    for title in ("case", "", *CLIPS, "ours / torch", "middle half"):
        table.add_column(title, justify="left" if title in {"case", ""} else "right")
    for row in rows:
        low, _, high = row["quartiles"]
        cells = [f"{row['ms'][name]:.3g}" for name in CLIPS]
        table.add_row(row["case"], row["what"], *cells, f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
    Console(width=110).print(table)


def main():
    parser = scripts.parser("kernels_bench.clip", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds a case")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(cases.CASES)}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("clip: --device cuda: torch sees no GPU here; leave it out")
    unknown = [name for name in args.cases.split(",") if name not in cases.CASES]
    if unknown or args.rounds < 2:
        known = ", ".join(cases.CASES)
        reason = f"no case {unknown[0]!r}; there are {known}" if unknown else "--rounds must be 2 or more"
        sys.exit(f"clip: {reason}")

    rows = []
    for name in args.cases.split(","):
        case = cases.CASES[name]
        scale = cases.scale_for(case, cases.CPU_LIMIT) if device == "cpu" else 1
        data = cases.make(case, device, scale)
        for what, bound in BOUNDS.items():
            times, norms = measure(data, bound, args.rounds, device)
            pairs = zip(times["ours"], times["torch"], strict=True)
            row = {"case": cases.title(case, scale), "what": what, "norms": norms}
            row["ms"] = {contender: statistics.median(values) for contender, values in times.items()}
            row["ratio"] = row["ms"]["ours"] / row["ms"]["torch"]
            row["quartiles"] = statistics.quantiles([ours / peer for ours, peer in pairs])
            rows.append(row)
    show(rows, device)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine.describe(), "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
