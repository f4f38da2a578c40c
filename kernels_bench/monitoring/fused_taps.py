"""Compare taps as plain operators that Inductor fuses with taps as one op, in compiled steps on the CPU.

    python -m kernels_bench.monitoring.fused_taps
    python -m kernels_bench.monitoring.fused_taps --layers 2 --width 128 --rounds 3

A step is forward and backward of a GPT of 12 layers. In each round every contender takes one step in turn,
and steps of one round are compared. Everything runs on one thread and its processor time is measured, so that
other processes disturb it less. "every hundredth" is what a step that is not measured costs, plus a hundredth
of what a measured one costs in addition.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import gradiometer as gm
from kernels_bench import machine, scripts
from kernels_bench.monitoring.tap_kernels import MLP

PATTERNS = {"linear layers": nn.Linear, "activation functions": nn.GELU}
ROUTES = {"op": False, "fused": True}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = MLP(width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 64)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(heads.transpose(1, 2).flatten(2)))


def contender(options, dtype, pattern, fused):
    """Return a compiled step, and its taps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(options.width) for _ in range(options.layers)]).to(dtype)
    taps = None if pattern is None else gm.Taps(model, {"tapped": pattern}, fused=fused)

    def loss_of(x):
        return model(x).float().square().mean()

    # Dynamo would reuse the graph of another contender, which has other hooks
    code = loss_of.__code__.replace(co_name=f"loss_{id(model)}")
    loss_of = type(loss_of)(code, loss_of.__globals__, closure=loss_of.__closure__)
    return torch.compile(loss_of, fullgraph=True), taps, model


def measure(options, dtype):
    """Return the seconds of each contender's steps, by (pattern, route, whether it is measured)."""
    contenders = {(None, None): contender(options, dtype, None, None)}
    for name, pattern in PATTERNS.items():
        for route, fused in ROUTES.items():
            contenders[name, route] = contender(options, dtype, pattern, fused)
    x = torch.randn(options.batch, options.context, options.width).to(dtype)
    times = {}
    for turn in range(options.rounds + 2):
        for name, (step, taps, model) in contenders.items():
            for every in (0, 1):
                if taps is not None:
                    taps.advance()
                    taps.configure_(every=every, step=0)
                elif every:
                    continue
                model.zero_grad()
                start = time.thread_time()
                step(x).backward()
                if turn > 1:
                    times.setdefault((*name, every), []).append(time.thread_time() - start)
                if taps is not None and bool(len(taps.stats().materialize())) != bool(every):
                    raise RuntimeError(f"{name}: the taps have not measured the steps that are due")
    return times


def main():
    parser = scripts.parser("kernels_bench.monitoring.fused_taps", __doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.describe())
    print("| dtype | tapped | route | every step | not measured | every hundredth |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        times = measure(options, dtype)
        plain = times.pop((None, None, 0))

        def share(key, times=times, plain=plain):
            return statistics.median([a / b - 1 for a, b in zip(times[key], plain, strict=True)])

        for name in PATTERNS:
            for route in ROUTES:
                idle, due = share((name, route, 0)), share((name, route, 1))
                shares = " | ".join(f"{x:+.2%}" for x in (due, idle, idle + 0.01 * (due - idle)))
                print(f"| {str(dtype).removeprefix('torch.')} | {name} | {route} | {shares} |", flush=True)
        print(f"a step of {statistics.median(plain):.2f} s without taps", flush=True)


if __name__ == "__main__":
    main()
