"""Measure what collection adds to a training step of GPT-2: compiled, as a CUDA graph, and eager.

    python -m kernels_bench.gpu.gpt2 --out build/gpt2       # GPT-2 124M in bf16 on the GPU
    python -m kernels_bench.gpu.gpt2 --device cpu --layers 2 --width 64 --heads 4 --vocabulary 128 \\
        --context 32 --batch 2 --seconds 1 --out build/gpt2 # the same code with a small model, anywhere

Weights and tokens are random. A step is forward, backward, collection and an update with torch's fused
AdamW; when compiled, all but the update is one graph. An update inside of it adds minutes of compilation.
Steps with and without collection take turns on the same weights; the figure is the median difference within
a turn, with its middle half.
Writes gpt2.json and gpt2.md; the exit code is 1 if a mode fails.
"""

from __future__ import annotations

import gc
import json
import math
import time
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

import gradiometer as gm
from kernels_bench import machine, scripts

if TYPE_CHECKING:
    import argparse

MIB = 2**20
# the bound applies to the first mode, so it is measured even if time runs out
MODES = ("compiled", "reduce-overhead", "eager")
COLLECTS = ("nothing", "grads", "grads+weights")
# the second call records a CUDA graph
WARM_UP = 4
MIN_TURNS, SECONDS_OF_A_TURN = 5, 0.1
# a shorter step has a small model
SMALL_MS = 15.0
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
# torch's own norm in fp64 is off by up to 4e-11
NORM_TOLERANCE = 1e-10


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.c_out(gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with its tied head. Its vocabulary of 50257 is padded to a multiple of 64, which is faster."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.h(self.wte(tokens) + self.wpe.weight)
        return cross_entropy(linear(self.ln_f(x), self.wte.weight).flatten(0, 1), targets.flatten())


class Training:
    """Model, AdamW's state and one batch, on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        shape = (options.layers, options.width, options.heads, options.vocabulary, options.context)
        with self.device:
            self.model = GPT2(*shape).to(getattr(torch, options.dtype))
            batch = torch.randint(options.vocabulary, (options.batch, options.context + 1))
        self.tokens, self.targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )

    def collect(self, what: str) -> list[gm.TensorStats]:
        stats = [] if what == "nothing" else [gm.collect_grads(self.model)]
        return [*stats, gm.collect_weights(self.model)] if what == "grads+weights" else stats

    def step(self, mode: str, what: str):
        """Return a function that takes one step and returns the collected stats."""

        def backward(tokens, targets):
            loss = self.model(tokens, targets)
            loss.backward()
            return loss.detach(), self.collect(what)

        # its own code object: Dynamo caches graphs by code object, and would search those of other steps
        backward.__code__ = backward.__code__.replace(co_name=f"step_with_{what}")
        if mode != "eager":
            backward = torch.compile(
                backward, fullgraph=True, dynamic=False, mode=None if mode == "compiled" else mode
            )

        def run():
            # the previous step's results are no longer needed
            torch.compiler.cudagraph_mark_step_begin()
            _, stats = backward(self.tokens, self.targets)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return stats

        return run

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class Clock:
    """The remaining time, compared with the longest compilation so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.end, self.seconds, self.longest = time.perf_counter() + options.limit, options.seconds, 0.0

    def has_time_for(self, mode: str, steps: int) -> bool:
        compiling = 0.0 if mode == "eager" else steps * self.longest
        return time.perf_counter() + compiling + self.seconds < self.end


def check(training: Training, step) -> None:
    """Compare the stats of one step with an eager call, bit for bit, and with norms in fp64."""
    weights, grads = [p.detach().clone() for p in training.parameters], []
    hook = training.optimizer.register_step_pre_hook(
        lambda *_: grads.extend([p.grad.clone() for p in training.parameters])
    )
    stats = step()
    hook.remove()
    for found, tensors in zip(stats, (grads, weights), strict=False):
        again = gm.collect(dict(zip(found.names, tensors, strict=True)))
        if not (torch.equal(again.columns, found.columns) and torch.equal(again.flags, found.flags)):
            raise AssertionError("a step's statistics differ from those of an eager call on its tensors")
        norms = torch.stack([x.double().norm() for x in tensors])
        if not (norms > 0).any() or not torch.all((found.norm - norms).abs() <= NORM_TOLERANCE * norms):
            raise AssertionError("norms differ from those that torch computes in fp64")


def take_turns(training: Training, steps: dict, seconds: float) -> dict[str, list[float]]:
    """Return each step's seconds in every turn; a turn is a few steps, and ends with a synchronization."""
    times = {what: [] for what in steps}

    def timed(step, count):
        training.wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        training.wait()
        return (time.perf_counter() - start) / count

    count = max(1, round(SECONDS_OF_A_TURN / timed(steps["nothing"], WARM_UP)))
    deadline, order = time.perf_counter() + seconds, list(steps)
    while len(times["nothing"]) < MIN_TURNS or time.perf_counter() < deadline:
        for what in order:
            times[what].append(timed(steps[what], count))
        # so that no step always follows the same other one
        order.reverse()
    return times


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak(training: Training, step) -> float | None:
    """Return the most memory allocated during a step, in MiB; None if torch does not count it."""
    if training.device.type != "cuda":
        return None
    training.wait()
    torch.cuda.reset_peak_memory_stats()
    step()
    training.wait()
    return torch.cuda.max_memory_allocated() / MIB


def measure(mode: str, options: argparse.Namespace) -> list[dict]:
    """Compile, check and time one mode's steps; return a row for each."""
    counters.clear()
    training, steps, rows = Training(options), {}, []
    for what in options.collects:
        # compile another step only if there is time; the first two are needed for the bound
        if what not in COLLECTS[:2] and not options.clock.has_time_for(mode, 1):
            rows.append({"mode": mode, "collects": what, "left_out": "no time was left"})
            continue
        start = time.perf_counter()
        steps[what] = training.step(mode, what)
        for call in range(WARM_UP):
            with torch._dynamo.config.patch(error_on_recompile=call > 0):
                steps[what]()
            if call == 0:
                training.wait()
                seconds = time.perf_counter() - start
                rows.append({"mode": mode, "collects": what, "first_call_s": seconds})
                options.clock.longest = max(options.clock.longest, seconds)
    training.wait()
    breaks, skips = sum(counters["graph_break"].values()), counters["inductor"]["cudagraph_skips"]
    graphs = counters["stats"]["unique_graphs"]
    if breaks or graphs != (0 if mode == "eager" else len(steps)):
        raise AssertionError(f"{breaks} graph breaks, {graphs} graphs of {len(steps)} steps")
    if skips and mode == "reduce-overhead" and training.device.type == "cuda":
        raise AssertionError(f"{skips} of {len(steps)} steps were not recorded as CUDA graphs")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for what, step in steps.items():
            if what != "nothing":
                check(training, step)
        peaks = {what: peak(training, step) for what, step in steps.items()}
        before = allocated(training.device)
        times = take_turns(training, steps, options.seconds)
        grown = allocated(training.device) - before
    for row in rows:
        if "left_out" in row:
            continue
        own, base = times[row["collects"]], times["nothing"]
        added = [1e6 * (a - b) for a, b in zip(own, base, strict=True)]
        low, middle, high = quantiles(added, n=4)
        row |= {"ms": 1e3 * median(own), "turns": len(own), "graph_breaks": breaks, "recompiles": 0}
        row |= {"peak_mib": peaks[row["collects"]], "grown_mib": grown / MIB}
        if row["collects"] != "nothing":
            row |= {"added_us": middle, "added_us_low": low, "added_us_high": high}
            row |= {"added_percent": 1e-4 * middle / median(base)}
            if row["peak_mib"] is not None:
                row["added_mib"] = row["peak_mib"] - peaks["nothing"]
    return rows


def markdown(result: dict) -> str:
    head = ("step", "collects", "ms", "added us (middle half)", "added", "extra MiB", "first call s")
    lines = [
        f"{result['model']}; {machine.one_line(result['machine'])}",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for row in result["rows"]:
        if "error" in row or "left_out" in row:
            why = f"failed: {row['error']}" if "error" in row else f"{row['collects']}: {row['left_out']}"
            lines.append(f"| {row['mode']} | {why} |" + " |" * (len(head) - 2))
            continue
        cells = [row["mode"], row["collects"], f"{row['ms']:.3f}"]
        if row["collects"] == "nothing":
            cells += ["", "", ""]
        else:
            spread = f"{row['added_us_low']:+.0f} to {row['added_us_high']:+.0f}"
            mib = f"{row['added_mib']:.1f}" if "added_mib" in row else ""
            cells += [f"{row['added_us']:+.0f} ({spread})", f"{row['added_percent']:+.2f} %", mib]
        lines.append(f"| {' | '.join([*cells, format(row['first_call_s'], '.1f')])} |")
    if min((row["ms"] for row in result["rows"] if "ms" in row), default=SMALL_MS) < SMALL_MS:
        lines += [
            "",
            "A step this short mostly measures host overhead: it tests the code, not the cost of collection.",
        ]
    return "\n".join(lines) + "\n"


def parse(argv) -> argparse.Namespace:
    parser = scripts.parser("kernels_bench.gpu.gpt2", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights")
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "context": 1024, "batch": 8}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--collects", default=",".join(COLLECTS), help="the first must be 'nothing'")
    parser.add_argument("--seconds", type=float, default=8.0, help="time to measure each mode")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds; start no mode that would take longer"
    )
    parser.add_argument("--out", type=Path, help="a folder for gpt2.json and gpt2.md")
    options = parser.parse_args(argv)
    options.modes, options.collects = options.modes.split(","), options.collects.split(",")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no GPU here; --device cpu runs a small model")
    if unknown := [*({*options.modes} - {*MODES}), *({*options.collects} - {*COLLECTS})]:
        parser.error(f"unknown: {', '.join(unknown)}; modes are {', '.join(MODES)}")
    if options.collects[0] != "nothing":
        parser.error("--collects must begin with nothing, which the others are compared with")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def save(result: dict, options: argparse.Namespace) -> None:
    """Write the results so far after every mode, so that an interrupted run keeps them."""
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpt2.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (options.out / "gpt2.md").write_text(markdown(result), encoding="utf-8")


def main(argv=None) -> int:
    options = parse(argv)
    torch.set_float32_matmul_precision("high")  # Inductor warns otherwise
    size = f"{options.layers} layers of {options.width}, {options.batch} x {options.context} tokens"
    result = {
        "machine": machine.describe(),
        "command": scripts.command_line("kernels_bench.gpu.gpt2", argv),
        "model": f"GPT-2, {size}, {options.dtype}, {options.device}",
        "rows": [],
    }
    options.clock = Clock(options)
    for mode in options.modes:
        if mode != options.modes[0] and not options.clock.has_time_for(mode, 2):
            rows = [
                {"mode": mode, "collects": what, "left_out": "no time was left"} for what in options.collects
            ]
            result["rows"] += rows
            save(result, options)
            continue
        try:
            # lets fullgraph=True trace loss.backward(); off by default up to torch 2.15
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                result["rows"] += measure(mode, options)
        except Exception as error:  # noqa: BLE001 the row reports it, and the other modes run
            first = next(iter(str(error).strip().splitlines()), "")
            result["rows"].append({"mode": mode, "error": f"{type(error).__name__}: {first}"})
        torch._dynamo.reset()
        gc.collect()
        save(result, options)
    print(markdown(result))
    return int(any("error" in row for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
