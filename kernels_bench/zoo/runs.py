"""One run of the zoo: train, watch, and compare the headlines with what was planted."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

import torch

from kernels_bench.zoo import faults, healthy
from kernels_bench.zoo.observers import Headline, Ours


def run(name, seed, *, steps=None, peers=()):
    """Run a kind or a fault; return its row.

    ``steps``: run fewer steps than usual. ``peers``: names of other tools that watch the same run.
    """
    torch.set_num_threads(1)
    # the warnings are what is measured
    logging.getLogger("gradiometer").setLevel(logging.CRITICAL)
    fault = faults.FAULTS.get(name)
    kind = name if fault is None else [*fault.where][seed % len(fault.where)]
    start = time.perf_counter()
    try:
        losses, headlines = watched(Ours, fault, kind, seed, steps)
    except Exception as error:
        error.add_note(f"in {name}, seed {seed}, kind {kind}")
        raise
    row = {"name": name, "kind": kind, "seed": seed, "steps": len(losses), "planted": fault is not None}
    row |= {"seconds": round(time.perf_counter() - start, 2), "losses": losses[:: max(1, len(losses) // 20)]}
    row["tools"] = {Ours.name: judged(fault, kind, headlines, own=True)}
    for tool in peers:
        from kernels_bench.zoo.peers import PEERS

        # the same run again: a tool that changes what others see, or fails, harms only itself
        if fault is not None and tool in fault.without:
            continue
        try:
            _, headlines = watched(PEERS[tool], fault, kind, seed, steps)
        except Exception as error:  # noqa: BLE001 any error of another tool is its result
            headlines = [Headline("error", False, 0, 0, f"{type(error).__name__}: {error}")]
        row["tools"][tool] = judged(fault, kind, headlines, own=False)
    return row


def watched(tool, fault, kind, seed, steps):
    """Train, watched by a tool; return the losses and the tool's headlines."""
    t = healthy.start(kind, seed)
    if fault is not None:
        fault.plant(t, fault.where[kind])
    t.steps = t.steps if steps is None else min(steps, t.steps)
    watcher = tool(t)
    losses = t.run([watcher])
    return losses, watcher.finish()


def judged(fault, kind, headlines, *, own):
    """Return what a tool said of a run: its headlines, and whether and when they name the fault.

    Ours names it if the first headline does; another tool, if any report does. A report from before the
    fault does not count, and most faults need a warning.
    """
    row = {"headlines": [asdict(headline) for headline in headlines], "named": None, "delay": None}
    row["warnings"] = sum(headline.is_warning for headline in headlines)
    if fault is None:
        return row
    naming = [
        headline
        for headline in (headlines[:1] if own else headlines)
        if headline.seen >= fault.onset
        and (headline.is_warning or fault.or_info)
        and (
            fault.names(kind, headline.rule, headline.text)
            if own
            else fault.names_by_peer(headline.rule, headline.text)
        )
    ]
    row["named"] = bool(naming)
    if naming:
        row["delay"] = min(headline.seen for headline in naming) - fault.onset
    return row
