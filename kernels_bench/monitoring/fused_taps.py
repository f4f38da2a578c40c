"""Compare taps as plain operators that Inductor fuses with taps as one op, in compiled steps.

    python -m kernels_bench.monitoring.fused_taps
    python -m kernels_bench.monitoring.fused_taps --layers 2 --width 128 --rounds 3
    python -m kernels_bench.monitoring.fused_taps --device cuda --mode reduce-overhead --width 768 \\
        --context 1024 --batch 8 --rounds 30

A step is forward and backward of a GPT of 12 layers. In each round every contender takes one step in turn,
and steps of one round are compared. On a CPU everything runs on one thread and its processor time is
measured, so that other processes disturb it less; on a GPU, the time until the device has finished.
"every hundredth" is what a step that is not measured costs, plus a hundredth of what a measured one costs in
addition. On a GPU this decides what ``fused=None`` means there, see docs/how-to/activations.md.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch._dynamo.utils import counters
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
    model = nn.Sequential(*[Block(options.width) for _ in range(options.layers)]).to(options.device, dtype)
    taps = None if pattern is None else gm.Taps(model, {"tapped": pattern}, fused=fused)

    def loss_of(x):
        return model(x).float().square().mean()

    # Dynamo would reuse the graph of another contender, which has other hooks
    code = loss_of.__code__.replace(co_name=f"loss_{id(model)}")
    loss_of = type(loss_of)(code, loss_of.__globals__, closure=loss_of.__closure__)
    return torch.compile(loss_of, fullgraph=True, mode=options.mode), taps, model


def now(device):
    """Return the seconds of this thread's processor, or those when a GPU has finished."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure(options, dtype):
    """Return the seconds of each contender's steps, by (pattern, route, whether it is measured)."""
    contenders = {(None, None): contender(options, dtype, None, None)}
    for name, pattern in PATTERNS.items():
        for route, fused in ROUTES.items():
            contenders[name, route] = contender(options, dtype, pattern, fused)
    x = torch.randn(options.batch, options.context, options.width).to(options.device, dtype)
    times = {}
    # not timed: calls that compile, and then record CUDA graphs
    unmeasured = 2 if options.mode is None else 4
    for turn in range(options.rounds + unmeasured):
        for name, (step, taps, model) in contenders.items():
            for every in (0, 1):
                if taps is not None:
                    taps.advance()
                    taps.configure_(every=every, step=0)
                elif every:
                    continue
                model.zero_grad(set_to_none=options.mode is None)
                torch.compiler.cudagraph_mark_step_begin()
                start = now(x.device)
                step(x).backward()
                seconds = now(x.device) - start
                if turn >= unmeasured:
                    times.setdefault((*name, every), []).append(seconds)
                if taps is not None and bool(len(taps.stats().materialize())) != bool(every):
                    raise RuntimeError(f"{name}: the taps have not measured the steps that are due")
    return times


def main(argv=None):
    parser = scripts.parser("kernels_bench.monitoring.fused_taps", __doc__)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--mode", choices=["reduce-overhead"], help="of torch.compile")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds")
    options = parser.parse_args(argv)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no GPU here")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # Inductor warns otherwise
    print(machine.describe())
    print(f"{options.layers} layers of {options.width}, {options.batch} x {options.context} tokens")
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
        print(f"a step of {1e3 * statistics.median(plain):.1f} ms without taps", flush=True)
    if skips := counters["inductor"]["cudagraph_skips"]:
        print(f"{skips} graphs of Inductor were not recorded as CUDA graphs")


if __name__ == "__main__":
    main()
