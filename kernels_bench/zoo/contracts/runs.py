"""One run of this family: check a model, and compare the contracts that are broken with what was planted."""

from __future__ import annotations

import functools
import importlib
import logging
import time
import warnings
import zlib

import torch
import transformers

import gradiometer as gm
from kernels_bench.zoo.contracts import (
    faults_open,
    faults_open_start,
    healthy,
    healthy_timm,
    healthy_zoo,
    subjects,
)

OPEN = faults_open.FAULTS | faults_open_start.FAULTS
HEALTHY = healthy.MODELS | healthy_timm.MODELS | healthy_zoo.MODELS
# contracts that are broken with severity info: what they tell may be meant so
INFO = ("weight_decay", "modes")


@functools.cache
def held_out():
    """Return the held-out faults."""
    return importlib.import_module("kernels_bench.zoo.contracts.faults_held_out").FAULTS


def fault_of(name):
    """Return a fault, or None if it is the name of a healthy model."""
    return OPEN.get(name) or (None if name in HEALTHY else held_out()[name])


def places(name):
    """Return the architectures in which a fault is planted; a healthy model is its own."""
    fault = fault_of(name)
    return [name] if fault is None else list(fault.where)


def start(name, place, seed):
    """Return a new subject of a healthy model, or of an architecture with a fault."""
    fault = fault_of(name)
    if fault is None:
        torch.manual_seed(zlib.crc32(name.encode()) + seed)
        return HEALTHY[name]()
    subject = subjects.start(place, seed)
    fault.plant(subject)
    return subject


def quiet():
    """Have a process print no warnings of models, and use one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("gradiometer").setLevel(logging.CRITICAL)


def run(name, place, seed, check=None):
    """Check a healthy model or one with a fault; return the row.

    ``check``: what is called instead of `gradiometer.check_model`. Its error, and a change of the model, is
    a failure of the run.
    """
    fault = fault_of(name)
    subject = start(name, place, seed)
    row = {"name": name, "kind": place, "seed": seed, "planted": fault is not None}
    row["group"] = fault and fault.group
    row["held_out"] = fault is not None and name not in OPEN
    before, results, row["error"] = state(subject), (), None
    begin = time.perf_counter()
    try:
        report = (check or gm.check_model)(
            subject.model, subject.batch, optimizer=subject.optimizer, **subject.options
        )
        results = report.results
    except Exception as error:  # noqa: BLE001 it is counted
        row["error"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.perf_counter() - begin, 3)
    if row["error"] is None and (changed := differing(before, state(subject))):
        row["error"] = f"changed {', '.join(changed)}"
    return row | judged(fault, results)


def judged(fault, results):
    """Return which contracts are broken, with which text, and the verdict on a planted fault."""
    broken = [result for result in results if result.status == "broken"]
    warned = {r.contract: r.text for r in broken if r.severity >= gm.Severity.WARNING}
    noted = {r.contract: r.text for r in broken if r.severity < gm.Severity.WARNING}
    row = {"broken": warned, "noted": noted, "verdict": None}
    if fault is not None:
        seen = {*warned, *(name for name in noted if name in INFO)}
        right = bool(seen & set(fault.contracts))
        row["contracts"] = list(fault.contracts)
        row["verdict"] = "told" if right else "another" if warned else "not told"
    return row


def state(subject):
    """Return what a check must not change, by the words for it."""
    model = subject.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = list(model.modules())
    config = getattr(model, "config", None)
    batch = subject.batch.values() if isinstance(subject.batch, dict) else subject.batch
    return {
        "weights or buffers": [(name, raw(x)) for name, x in tensors],
        "requires_grad": [x.requires_grad for _, x in tensors],
        "gradients": [x.grad is None for _, x in tensors],
        "modes": [module.training for module in modules],
        "hooks": [
            len(hooks)
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ],
        "the random state": torch.get_rng_state(),
        "the config": settings(config),
        "the batch": [raw(x) for x in batch],
    }


def settings(config):
    """Return a config as a dict, without what a classifier sets in it when it is first called."""
    found = {} if config is None else config.to_dict() | {"attention": config._attn_implementation}
    return {key: value for key, value in found.items() if key != "problem_type"}


def raw(x):
    """Return a copy of a tensor's bytes, in which NaNs are equal."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def differing(before, after):
    """Return the words for what is not the same."""
    return [word for word, value in before.items() if not same(value, after[word])]


def same(one, other):
    """Return whether two values, which may contain tensors, are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
