"""One run of this family: train under ``gm.watch``, and compare the headlines with what was planted."""

from __future__ import annotations

import logging
import math
import statistics
import time
from dataclasses import asdict

import torch

import gradiometer as gm
from kernels_bench.zoo.observers import Ours
from kernels_bench.zoo.transformers import healthy, kinds
from kernels_bench.zoo.transformers.faults_held_out_2 import FAULTS as HELD_OUT
from kernels_bench.zoo.transformers.faults_open import FAULTS as FIRST
from kernels_bench.zoo.transformers.faults_seen import FAULTS as SEEN
from kernels_bench.zoo.transformers.loop import train
from kernels_bench.zoo.transformers.observe import taps_of

OPEN = FIRST | SEEN
FAULTS = OPEN | HELD_OUT
HEALTHY = tuple(healthy.KINDS)
CLEAN = range(100, 108)  # the seeds of the clean runs that show the spread
WINDOWS = 10


class Watched(Ours):
    """Watches a loop with ``gm.watch`` and the default rules."""

    def __init__(self):
        self.steps_seen, self.monitor, self.taps = {}, None, None

    def __call__(self, loop):
        """Return a monitor of a loop; of a resumed run, it follows another one."""
        if self.taps is not None:
            self.taps.remove()
        self.taps = taps_of(loop.model)
        options = {"weights": True, "updates": True, "taps": self.taps, "sinks": [self]}
        self.monitor = gm.watch(loop.model, loop.optimizer, scaler=loop.scaler, **options)
        return self.monitor


def maker(name, seed):
    """Return a function that returns a new loop of a kind or fault, and the name of the kind."""
    fault = FAULTS.get(name)
    kind = name if fault is None else fault.where[seed % len(fault.where)]

    def make():
        loop = kinds.start(kind, seed)
        if fault is not None:
            fault.plant(loop)
        return loop

    return make, kind


def run(name, seed, *, steps=None, watched=True):
    """Run a kind or a fault, with a monitor or without; return its row."""
    torch.set_num_threads(1)
    # the warnings are what is measured
    logging.getLogger("gradiometer").setLevel(logging.CRITICAL)
    fault = FAULTS.get(name)
    make, kind = maker(name, seed)
    watch = Watched() if watched else None
    start = time.perf_counter()
    try:
        loop, losses, _ = train(make, watch, steps=steps)
        headlines = watch.finish() if watched else []
    except Exception as error:
        error.add_note(f"in {name}, seed {seed}, kind {kind}")
        raise
    row = {"name": name, "kind": kind, "seed": seed, "steps": len(losses), "planted": fault is not None}
    row |= {"seconds": round(time.perf_counter() - start, 2), "evaluation": loop.evaluate()}
    row |= {"windows": windows(losses), "category": fault and fault.category}
    row["held_out"] = name in HELD_OUT
    return row | judged(fault, headlines)


def judged(fault, headlines):
    """Return what was reported, and whether it detects and names the fault.

    Any warning or error from the onset on detects it; the first of them names it if its words do.
    """
    row = {"headlines": [asdict(headline) for headline in headlines]}
    row["warnings"] = sum(headline.is_warning for headline in headlines)
    if fault is None:
        return row | {"detected": None, "named": None, "delay": None}
    seen = [h for h in headlines if h.seen >= fault.onset and (h.is_warning or fault.or_info)]
    warned = [h for h in seen if h.is_warning]
    named = bool(seen) and fault.names(seen[0].text)
    delay = min((h.seen for h in warned), default=None)
    row["delay"] = None if delay is None else delay - fault.onset
    return row | {"detected": bool(warned) or named, "named": named}


def windows(losses):
    """Return the mean loss of each tenth of a run."""
    size = max(1, len(losses) // WINDOWS)
    return [statistics.fmean(losses[i : i + size]) for i in range(0, len(losses) - size + 1, size)]


def is_effective(row, clean):
    """Return whether a fault changes the run: whether its loss leaves the spread of clean runs of its kind.

    It does if the training loss is not finite, if two of its windows that end after the onset are outside of
    the spread, or if the evaluation loss is: more than 3 standard deviations from the mean of eight clean
    seeds, and outside of their range.
    """
    fault = FAULTS[row["name"]]
    if not all(map(math.isfinite, [*row["windows"], row["evaluation"]])):
        return True
    begin = fault.onset * len(row["windows"]) // row["steps"]
    outside = [
        is_outside(value, [other["windows"][i] for other in clean])
        for i, value in enumerate(row["windows"])
        if i >= begin
    ]
    evaluations = [other["evaluation"] for other in clean]
    return sum(outside) >= 2 or is_outside(row["evaluation"], evaluations)


def is_outside(value, others):
    """Return whether a value is more than 3 standard deviations from others, and outside of their range."""
    far = abs(value - statistics.fmean(others)) > 3 * statistics.stdev(others)
    return far and not min(others) <= value <= max(others)
