"""Measure how long steps of 100 modules take to compile, compared with torch's clip_grad_norm_.

    python -m kernels_bench.compile_time                          # Inductor, 100 modules, three rounds
    python -m kernels_bench.compile_time --backend aot_eager --modules 30

Rounds are interleaved, caches are off, and the minimum time of each step is reported. Compare only ratios
of one run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import gradiometer as gm
from kernels_bench import scripts

if TYPE_CHECKING:
    from collections.abc import Callable


def steps(modules: int) -> dict[str, Callable[[], object]]:
    """Return the steps to compile, torch's first, on one model with a weight and a bias in each module."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(modules)])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return {
        "torch clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "gm.clip_grad_norm_": lambda: gm.clip_grad_norm_(model.parameters(), 1.0),
        "gm.collect_and_clip_": lambda: gm.collect_and_clip_(model, 1.0),
        "gm.collect_grads": lambda: gm.collect_grads(model),
        "gm.collect_grads.by_module": lambda: gm.collect_grads(model).by_module(),
    }


def seconds(step: Callable[[], object], backend: str) -> float:
    torch._dynamo.reset()
    start = time.perf_counter()
    torch.compile(step, fullgraph=True, backend=backend)()
    return time.perf_counter() - start


def main() -> None:
    parser = scripts.parser("kernels_bench.compile_time", __doc__)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--modules", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._inductor.config.force_disable_caches = True
    # the first compilation also does once-per-process work
    for step in steps(2).values():
        seconds(step, args.backend)
    made = steps(args.modules)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.rounds):
        for name, step in made.items():
            taken[name].append(seconds(step, args.backend))
    least = {name: min(times) for name, times in taken.items()}
    peer = next(iter(least.values()))
    print(f"{args.modules} modules, {args.backend}, torch {torch.__version__}")
    for name, each in least.items():
        print(f"{name:<28} {each:6.1f} s  {each / peer:5.2f} x torch's")


if __name__ == "__main__":
    main()
