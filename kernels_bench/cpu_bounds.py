"""Check the bounds of the eager CPU path on small lists, in a compiled step, and on a busy machine.

    python -m kernels_bench.cpu_bounds                    # the table
    python -m kernels_bench.cpu_bounds --check            # exit code 1 if a bound is missed
    python -m kernels_bench.cpu_bounds --only busy,step

Every bound is a ratio of medians of one run: our time over a peer's. Every contender runs once a round. The
peers square in fp64 too: `get_total_norm` is `torch.nn.utils.get_total_norm` of fp64 copies, `foreach64` is
`torch._foreach_norm(dtype=float64)`. In the busy case one other process per core runs a busy loop. The
clip modules are compared with `collect_and_clip_` of one limit, and the module that reads the weights with
that and `collect_weights`; nothing is clipped. The compiled step is a small model's forward, backward and
update in one graph, with and without collection.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

import gradiometer as gm
from kernels_bench import scripts

BUSY_ELEMENTS, BUSY_TENSORS = 2**25, 16
SPIN = "while True: pass"
WARM_UP = 3


class Bound(NamedTuple):
    """``ours`` takes at most ``most`` times what ``peer`` takes."""

    case: str
    ours: str
    peer: str
    most: float


BOUNDS = (
    *(Bound(f"{count} of 32", "grad_norm", "get_total_norm", 1.5) for count in (2, 100, 1000)),
    Bound("1000 of 1000", "grad_norm", "get_total_norm", 1.5),
    # a hand-written loop of norms takes half of get_total_norm here
    Bound("2 of 32", "collect_grads", "get_total_norm", 5.0),
    Bound("2 of 32", "check_finite", "get_total_norm", 8.0),
    Bound("100 of 1000", "collect_grads", "foreach64", 2.0),
    Bound("1000 of 1000", "collect_grads", "foreach64", 2.0),
    *(Bound(f"53 of {numel}", "collect_grads", "foreach64", 3.0) for numel in (5000, 16384, 32768, 100000)),
    # "53 of 5000" are tensors of 5000 elements each; here with and without fingerprints
    *(
        Bound(case, "with fingerprints", "collect_grads", 2.5)
        for case in (
            "100 of 1000",
            "1000 of 1000",
            "53 of 5000",
            "53 of 16384",
            "53 of 32768",
            "16 of 2097152",
            "53 of 16384 bfloat16",
            "16 of 2097152 bfloat16",
            "16 of 1048576 float64",
        )
    ),
    # of the same run, with one limit for all
    *(
        Bound(case, ours, peer, 1.05)
        for case in ("100 of 1000", "1000 of 1000", "16 of 2097152")
        for ours, peer in (
            ("ZScoreClip", "collect_and_clip_"),
            ("PerTensorClip", "collect_and_clip_"),
            ("WeightNormClip", "collect_and_clip_ and collect_weights"),
        )
    ),
    # pairs of 32M elements, and small ones, against statistics of the same bytes
    *(
        Bound(case, ours, peer, 2.0)
        for case in (
            "16 of 2097152",
            "16 of 2097152 bfloat16",
            "1000 of 1000",
            "1000 of 1000 bfloat16",
        )
        for ours, peer in (("compare", "collect both"), ("collect_updates", "collect all three"))
    ),
    *(
        Bound(f"{case}{dtype}", "collect_exponents", "collect", 1.5)
        for case in ("16 of 2097152", "53 of 100000", "53 of 16384", "1000 of 1000")
        for dtype in ("", " bfloat16", " float16")
    ),
    # plain reads, `sum` in float32: at most 10 a projection
    *(
        Bound(case, ours, "sum", 10 * count)
        for case in ("16 of 2097152", "53 of 100000", "1000 of 1000", "2000 of 8")
        for ours, count in (("16 projections", 16), ("64 projections", 64))
    ),
    Bound("step", "with collect_grads", "without", 1.1),
    Bound("busy", "collect_grads", "foreach64", 3.0),
)


def model_of(count, numel, dtype="float32"):
    dtype = getattr(torch, dtype)
    model = nn.ParameterList([nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)])
    for parameter in model:
        parameter.grad = torch.randn(numel).to(dtype)
    return model


def contenders_of(model):
    grads, weights = ([getattr(x, name) for x in model] for name in ("grad", "data"))
    snapshot = gm.Snapshot(model)
    kept = list(snapshot.buffers())
    return {
        "get_total_norm": lambda: torch.nn.utils.get_total_norm([grad.double() for grad in grads]),
        "foreach64": lambda: torch._foreach_norm(grads, dtype=torch.float64),
        "grad_norm": lambda: gm.grad_norm(model),
        "collect_grads": lambda: gm.collect_grads(model),
        "with fingerprints": lambda: gm.collect_grads(model, fingerprint=True),
        "check_finite": lambda: gm.check_finite(model),
        "compare": lambda: gm.compare(weights, kept),
        "collect": lambda: gm.collect(grads),
        "collect_exponents": lambda: gm.collect_exponents(grads),
        "sum": lambda: [grad.sum() for grad in grads],
        "16 projections": lambda: gm.collect_projections(grads, projections=16),
        "64 projections": lambda: gm.collect_projections(grads, projections=64),
        "collect both": lambda: gm.collect([*weights, *kept]),
        "collect_updates": lambda: gm.collect_updates(model, snapshot),
        "collect all three": lambda: gm.collect([*weights, *kept, *grads]),
        **clips_of(model),
    }


def clips_of(model):
    """Return calls that clip nothing; gradients are the same in all rounds."""
    z_score, per_tensor = (
        gm.ZScoreClip(warmup_steps=1),
        gm.PerTensorClip(model, warmup_steps=1, max_norm=math.inf),
    )
    weight_norm = gm.WeightNormClip(model, max_ratio=1e30)
    return {
        "collect_and_clip_": lambda: gm.collect_and_clip_(model, 1e30),
        "ZScoreClip": lambda: gm.collect_and_clip_(model, z_score),
        "PerTensorClip": lambda: gm.collect_and_clip_(model, per_tensor),
        "collect_and_clip_ and collect_weights": lambda: (
            gm.collect_and_clip_(model, 1e30),
            gm.collect_weights(model),
        ),
        "WeightNormClip": lambda: gm.collect_and_clip_(model, weight_norm),
    }


def steps(milliseconds=1.0):
    """Return a compiled step, with collection and without, of a batch for which the bare one takes 1 ms."""
    rows = 512
    while True:
        contenders = steps_of(rows)
        if rows >= 2**16 or medians_of({"": contenders["without"]}, 30)[""] >= milliseconds * 1000:
            return contenders
        rows *= 2


def steps_of(rows):
    x, y = torch.randn(2, rows, 32)

    def train(model):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    def update(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-3 * parameter.grad)
                parameter.grad = None

    models = [
        nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])
        for _ in range(2)
    ]

    # two functions, since the guards of all compilations of one function are tried in turn
    def with_collection():
        loss = train(models[0])
        stats = gm.collect_grads(models[0])
        update(models[0])
        return loss, stats

    def without():
        loss = train(models[1])
        update(models[1])
        return loss

    return {
        "with collect_grads": torch.compile(with_collection, fullgraph=True),
        "without": torch.compile(without, fullgraph=True),
    }


@contextmanager
def spinning(count):
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def medians_of(contenders, rounds):
    """Return each contender's median, in us."""
    times = {name: [] for name in contenders}
    for _ in range(WARM_UP + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def measure(case, wanted, rounds):
    if case == "step":
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return medians_of(steps(), rounds)
    if case == "busy":
        contenders = contenders_of(model_of(BUSY_TENSORS, BUSY_ELEMENTS // BUSY_TENSORS))
        with spinning(os.cpu_count()):
            return medians_of({name: contenders[name] for name in wanted}, 5)
    count, _, numel, *dtype = case.split()
    contenders = contenders_of(model_of(int(count), int(numel), *dtype))
    return medians_of({name: contenders[name] for name in wanted}, rounds)


def main(argv=None):
    cases = list(dict.fromkeys(bound.case for bound in BOUNDS))
    parser = scripts.parser("kernels_bench.cpu_bounds", __doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bound is missed")
    parser.add_argument("--only", help=f"cases, separated by commas: {', '.join(cases)}")
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds a case")
    args = parser.parse_args(argv)
    chosen = [name.strip() for name in args.only.split(",")] if args.only else cases
    if unknown := [name for name in chosen if name not in cases]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(cases)}")

    met = True
    for case in chosen:
        bounds = [bound for bound in BOUNDS if bound.case == case]
        wanted = dict.fromkeys(name for bound in bounds for name in (bound.peer, bound.ours))
        medians = measure(case, wanted, args.rounds)
        for bound in bounds:
            ours, peer = medians[bound.ours], medians[bound.peer]
            ratio = ours / peer if peer else math.inf
            met &= ratio <= bound.most
            print(
                f"{'met   ' if ratio <= bound.most else 'MISSED'}  {case}: {bound.ours} {ours:.0f} us / "
                f"{bound.peer} {peer:.0f} us = {ratio:.2f} (at most {bound.most:g})",
                flush=True,
            )
    print("every bound met" if met else "a bound was missed")
    return int(args.check and not met)


if __name__ == "__main__":
    raise SystemExit(main())
