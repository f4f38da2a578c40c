"""Measure what taps on all linear layers of a 12-layer GPT add to its training step, and alternatives.

    python -m kernels_bench.monitoring.taps --check    # GPT-2 124M, eager; exit code 1 if a bound is missed
    python -m kernels_bench.monitoring.taps --width 256 --rounds 3

One model trains. In each round every contender takes one step in turn, and steps of one round are compared.
A step is forward, backward and AdamW. "hooks, the same statistics" gets what taps get of each output and of
its gradient: norm, mean, zeros, NaN, Inf, the largest magnitude and kurtosis.

The difference of two steps of seconds is too noisy for a bound. So the taps are also timed alone: a model of
identities with outputs of the same shapes runs forward and backward, with and without taps, and the
difference is divided by a step of the same run. "every hundredth" is what a step that is not measured costs,
plus a hundredth of the cost of one that is.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from functools import partial

import torch
from torch import nn

import gradiometer as gm
from kernels_bench import machine, scripts
from kernels_bench.gpu.gpt2 import GPT2

PLAIN, TAPS, IDLE = "no telemetry", "gm.Taps", "gm.Taps, not measured"
HUNDREDTH = "gm.Taps, every hundredth"
# most that they may add to a step
BOUNDS = {TAPS: 0.05, HUNDREDTH: 0.003}


@contextlib.contextmanager
def plain(_model):
    yield lambda: None


@contextlib.contextmanager
def taps(model, every=1):
    taps = gm.Taps(model, {"linear": nn.Linear}, every=every)
    if not every:
        taps.configure_(step=1)

    def read():
        rows = taps.stats().materialize()
        if len(rows) != (2 * len(taps.names) if every else 0):
            raise RuntimeError(f"taps have measured {len(rows)} rows")

    yield read
    taps.remove()


def statistics_of(x):
    """Return the statistics as plain operators on the whole tensor, with squares in fp64."""
    wide = x.detach().double()
    square = wide * wide
    sums = [x.sum() for x in (wide, square, square * square)]
    counts = [which.sum() for which in (x == 0, x.isnan(), x.isinf())]
    return torch.stack([*sums, *counts, wide.abs().amax()])


@contextlib.contextmanager
def hooks(model):
    rows, handles = {}, []

    def hook(_module, _args, output, name):
        rows[name] = statistics_of(output)
        output.register_hook(lambda g: rows.__setitem__(f"{name}.grad", statistics_of(g)))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(partial(hook, name=name)))

    def read():
        if len({name: row.tolist() for name, row in rows.items()}) != 2 * len(handles):
            raise RuntimeError(f"hooks have measured {len(rows)} rows")

    yield read
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def hooks_with_items(model):
    """Yield the usual hand-written hooks: one number after the other is read on the host."""
    rows, handles = {}, []

    def hook(_module, _args, output, name):
        for what, x in (("norm", output.norm()), ("max", output.abs().max()), ("mean", output.mean())):
            rows[name, what] = x.item()
        output.register_hook(lambda g: rows.__setitem__((name, "grad"), g.norm().item()))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(partial(hook, name=name)))
    yield lambda: None
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def wandb_watch(model):
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = wandb.init(mode="offline", dir=folder, project="taps", settings=wandb.Settings(console="off"))
        run.watch(model, log="all", log_freq=1)
        yield lambda: run.log({})
        run.unwatch(model)
        run.finish()


@contextlib.contextmanager
def total_norm(model):
    """Yield what torchtitan reads in each step: the total norm of the gradients."""
    yield lambda: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=True).item()


CONTENDERS = {
    PLAIN: plain,
    TAPS: taps,
    IDLE: partial(taps, every=0),
    "hooks, the same statistics": hooks,
    "hooks, norm, max and mean, item()": hooks_with_items,
    "wandb.watch(log='all', log_freq=1)": wandb_watch,
    "torchtitan: total gradient norm": total_norm,
}


def measure(options):
    """Return the seconds of each contender's steps, the reasons of failures, and what taps take alone."""
    torch.manual_seed(0)
    model = GPT2(options.layers, options.width, options.width // 64, options.vocabulary, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(options.vocabulary, (options.batch, options.context + 1))
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    times, failed = {name: [] for name in CONTENDERS}, {}
    for turn in range(options.rounds + 1):
        names = [name for name in CONTENDERS if name not in failed]
        # the order rotates, so that no contender always follows the same one
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            try:
                with CONTENDERS[name](model) as read:
                    start = time.perf_counter()
                    model(tokens, targets).backward()
                    read()
                    optimizer.step()
                    times[name].append(time.perf_counter() - start)
                    optimizer.zero_grad()
            except ImportError as error:
                failed[name] = str(error)
                times.pop(name)
    times = {name: seconds[1:] for name, seconds in times.items()}
    return times, failed, costs(shapes_of(model, tokens, targets), statistics.median(times[PLAIN]))


class Outputs(nn.Module):
    """Identities whose outputs have the shapes of a model's linear layers."""

    def __init__(self, shapes):
        super().__init__()
        self.modules_of = nn.ModuleList([nn.Identity() for _ in shapes])

    def forward(self, xs):
        return [module(x) for module, x in zip(self.modules_of, xs, strict=True)]


def shapes_of(model, tokens, targets):
    """Return the shapes of the outputs of all linear layers."""
    shapes = []
    handles = [
        module.register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(tokens, targets)
    for handle in handles:
        handle.remove()
    return shapes


def alone(shapes, every, rounds=9):
    """Return the seconds of a step of the outputs, with taps; with ``every`` None, without."""
    model, one = Outputs(shapes), torch.ones((), requires_grad=True)
    values = [torch.randn(shape) for shape in shapes]
    taps = None if every is None else gm.Taps(model, {"all": nn.Identity}, every=every).configure_(step=0)
    seconds = []
    for _ in range(rounds):
        xs = [value + one for value in values]
        start = time.perf_counter()
        torch.autograd.backward(model(xs), values)
        seconds.append(time.perf_counter() - start)
    if taps is not None:
        taps.remove()
    return statistics.median(seconds)


def extras(times):
    """Return each contender's median addition to a step of the same round, as a share."""
    return {
        name: statistics.median([a / b - 1 for a, b in zip(seconds, times[PLAIN], strict=True)])
        for name, seconds in times.items()
        if name != PLAIN
    }


def costs(shapes, step):
    """Return what taps take alone, as a share of a step: of one that is measured, and of every hundredth."""
    without, idle, measured = [alone(shapes, every) for every in (None, 0, 1)]
    idle, measured = (idle - without) / step, (measured - without) / step
    return {TAPS: measured, IDLE: idle, HUNDREDTH: 0.99 * idle + 0.01 * measured}


def main():
    parser = scripts.parser("kernels_bench.monitoring.taps", __doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bound is missed")
    options = parser.parse_args()
    times, failed, shares = measure(options)
    step = statistics.median(times[PLAIN])
    print(machine.describe())
    print(f"GPT of {options.layers} layers, width {options.width}: {step * 1e3:.0f} ms a step")
    print("\nsteps of one round compared, medians")
    for name, extra in extras(times).items():
        print(f"{name:40} {extra:+8.1%}")
    for name, reason in failed.items():
        print(f"{name:40} {reason}")
    print("\ntaps alone, as a share of a step")
    for name, share in shares.items():
        print(f"{name:40} {share:8.3%}" + (f"   at most {BOUNDS[name]:.1%}" if name in BOUNDS else ""))
    missed = [name for name, most in BOUNDS.items() if shares[name] > most]
    if options.check and missed:
        sys.exit(f"monitoring.taps: above the bound: {', '.join(missed)}")


if __name__ == "__main__":
    main()
