"""One run of this family: train under `gm.watch`, and compare the headlines with what was planted.

What is judged:

* *effective*: the fault changes what is learned. The mean of the last fifth of the training losses, or the
  loss of the final evaluation, leaves the range of 8 clean runs of the same kind, widened by half its length
  on each side, or is not finite.
* *detected*: a headline of severity warning or error is first seen at the fault's onset or later.
* *named*: the first headline does so, and its messages, advice and tensors contain the fault's phrase. For a
  fault that may be meant so, a first headline of severity info is enough, and it is then detected too.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

import gradiometer as gm
from kernels_bench.zoo.observers import Headline, Ours, grouped
from kernels_bench.zoo.transformers import clean, faults_held_out, faults_open, healthy, kinds
from kernels_bench.zoo.transformers.loop import train
from kernels_bench.zoo.transformers.observe import taps_of

FOLDER = Path("build/zoo")
HALVES = {"open": faults_open.FAULTS, "held-out": faults_held_out.FAULTS}
FAULTS = {name: fault for half in HALVES.values() for name, fault in half.items()}
KINDS = healthy.KINDS


class Watcher(Ours):
    """Watches a loop, and goes on when it is resumed: the monitors of both parts write to it."""

    def __init__(self):
        self.steps_seen, self.taps, self.monitor, self.failures = {}, None, None, {}

    def watch(self, loop):
        """Return a new monitor of a loop."""
        self.taps = taps_of(loop.model)
        options = {"weights": True, "updates": True, "taps": self.taps, "sinks": [self]}
        self.monitor = gm.watch(loop.model, loop.optimizer, scaler=loop.scaler, **options)
        return self.monitor

    def finish(self):
        """Return the headlines; an error of gradiometer in training is kept as a failure."""
        if self.monitor is None:
            return []
        self.monitor.close()
        self.taps.remove()
        self.failures = dict(self.monitor.failures)
        return [self._headline(*group) for group in grouped(self.monitor.findings)]


def half_of(name):
    """Return the half that a fault belongs to; None for a healthy kind."""
    return next((half for half, table in HALVES.items() if name in table), None)


def start(fault, kind, seed):
    """Return a new loop of a kind with a fault, or without one if it is None."""
    loop = kinds.start(kind, seed)
    if fault is not None:
        fault.plant(loop)
    return loop


def run(name, seed, *, steps=None, folder=FOLDER):
    """Run a kind or a fault; return its row.

    Args:
        name: of a kind or a fault.
        seed: decides the weights, the batches and the kind in which a fault is planted.
        steps: at most this number of steps, after which effects are not judged.
        folder: where the outcomes of clean runs are kept.
    """
    torch.set_num_threads(1)
    # the warnings are what is measured
    logging.getLogger("gradiometer").setLevel(logging.CRITICAL)
    fault = FAULTS.get(name)
    kind = name if fault is None else fault.where[seed % len(fault.where)]
    begin, watcher = time.perf_counter(), Watcher()
    make = functools.partial(start, fault, kind, seed)
    try:
        try:
            loop, losses, _ = train(make, watcher.watch, steps=steps)
            headlines = watcher.finish()
        except Exception as error:
            if not is_ours(error):
                raise
            headlines = [Headline("error", True, 0, 0 if fault is None else fault.onset, str(error))]
            loop, losses, _ = train(make, steps=steps)
        seconds = time.perf_counter() - begin
        outcome = clean.outcome(loop, losses)
        effective = None
        if fault is not None and steps is None:
            effective = clean.is_effective(outcome, clean.clean_outcomes(kind, folder))
    except Exception as error:
        error.add_note(f"in {name}, seed {seed}, kind {kind}")
        raise
    row = {"name": name, "kind": kind, "seed": seed, "steps": len(losses), "seconds": round(seconds, 2)}
    row |= {"half": half_of(name), "category": fault.category if fault else None, "outcome": outcome}
    row |= {"effective": effective, "failures": watcher.failures, "losses": losses[:: max(1, len(losses) // 20)]}
    return row | judged(fault, headlines)


def is_ours(error):
    """Return whether gradiometer raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).is_relative_to(Path(gm.__file__).parent)


def judged(fault, headlines):
    """Return the headlines, the number of warnings, and whether they detect and name the fault."""
    row = {"headlines": [asdict(headline) for headline in headlines]}
    row["warnings"] = sum(headline.is_warning for headline in headlines)
    if fault is None:
        return row | {"detected": None, "named": None}
    named = any(
        headline.seen >= fault.onset
        and (headline.is_warning or fault.or_info)
        and fault.names(headline.text)
        for headline in headlines[:1]
    )
    detected = any(headline.is_warning and headline.seen >= fault.onset for headline in headlines)
    return row | {"detected": detected or named, "named": named}


def line(row):
    """Return a run's result as a line."""
    text = f"{row['name']} {row['seed']} ({row['kind']}), {row['seconds']:.1f} s: "
    if row["half"] is None:
        text += f"{row['warnings']} false warnings"
    else:
        text += "named" if row["named"] else "detected" if row["detected"] else "NOT DETECTED"
        text += "" if row["effective"] else ", not effective"
    first = next(iter(row["headlines"]), None)
    return text + (f"; {first['rule']}: {first['text'].splitlines()[0][:100]}" if first else "")
