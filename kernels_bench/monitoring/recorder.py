"""Compare recording with a collection: the time of `Recorder.record` and `advance`, and of `collect_grads`.

    python -m kernels_bench.monitoring.recorder           # on the CPU; exit code 1 above 5 %
    python -m kernels_bench.monitoring.recorder --device cuda --json PATH

Both read the same gradients of the same model in eager mode, and the script waits for both. In each round
both run once, in alternating order; the ratio is the median over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gradiometer as gm
from kernels_bench import machine, scripts

# (layers, width): many small tensors, and few large ones
MODELS = {
    "148 tensors of 64x64 and 64": (74, 64),
    "24 of 512x512 and 512": (12, 512),
    "8 of 2048x2048": (4, 2048),
}
BOUND = 1.05
WARM_UP = 20


def measure(layers, width, rounds, device):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    recorder = gm.Recorder(model)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def record():
        recorder.record()
        recorder.advance()

    calls = {"record": record, "collect": lambda: gm.collect_grads(model)}
    times = {name: [] for name in calls}
    for i in range(rounds + WARM_UP):
        for name in sorted(calls, reverse=i % 2 == 1):
            start = time.perf_counter()
            calls[name]()
            wait()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: values[WARM_UP:] for name, values in times.items()}


def main():
    parser = scripts.parser("kernels_bench.monitoring.recorder", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds a model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("monitoring.recorder: --device cuda: torch sees no GPU here; leave it out")

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"ms of a call; {args.device}, torch {torch.__version__}; medians")
    for title in ("model", "record + advance", "collect_grads", "ratio", "middle half"):
        table.add_column(title, justify="left" if title == "model" else "right")
    rows = []
    for name, (layers, width) in MODELS.items():
        times = measure(layers, width, args.rounds, args.device)
        ratios = [a / b for a, b in zip(times["record"], times["collect"], strict=True)]
        ms = {what: statistics.median(values) for what, values in times.items()}
        low, ratio, high = statistics.quantiles(ratios)
        rows.append({"model": name, "ms": ms, "ratio": ratio, "quartiles": [low, high]})
        cells = [f"{ms[what]:.3g}" for what in ("record", "collect")]
        table.add_row(name, *cells, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
    Console(width=110).print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=1) + "\n")
    if args.device == "cpu" and any(row["ratio"] > BOUND for row in rows):
        sys.exit(f"monitoring.recorder: recording takes more than {BOUND} times a collection")


if __name__ == "__main__":
    main()
