"""One run of this family: check a step, and compare what is reported with what was planted."""

from __future__ import annotations

import logging
import time
import warnings
import zlib

import torch

import gradiometer as gm
from kernels_bench.zoo.contracts.runs import differing, raw
from kernels_bench.zoo.gradients import (
    faults,
    faults_compiled,
    faults_loop,
    faults_ranks,
    healthy,
    healthy_compiled,
    healthy_layers,
)

FAULTS = faults.FAULTS | faults_loop.FAULTS | faults_compiled.FAULTS | faults_ranks.FAULTS
HEALTHY = healthy.STEPS | healthy_layers.STEPS | healthy_compiled.STEPS
HEALTHY_RANKS = {f"ranks-{name}": make for name, make in faults_ranks.HEALTHY.items()}


def ranks_of(name):
    """Return the number of processes that a case needs."""
    return 2 if name in HEALTHY_RANKS else FAULTS[name].ranks if name in FAULTS else 1


def start(name, seed):
    """Return a new case; the seed is set before it is made, and before its step runs."""
    torch.manual_seed(zlib.crc32(name.encode()) + seed)
    case = FAULTS[name].make() if name in FAULTS else (HEALTHY | HEALTHY_RANKS)[name]()
    torch.manual_seed(seed)
    return case


def quiet():
    """Have a process print no warnings, and use one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradiometer").setLevel(logging.CRITICAL)


def run_seeds(name, seeds):
    """Return a row for each seed, of one process: what is compiled is shared."""
    return [run(name, seed) for seed in range(seeds)]


def run(name, seed, check=None):
    """Check a step; return the row. ``check``: what is called instead of `gradiometer.check_gradients`.

    An error of the check, and a change of the model, is a failure of the run.
    """
    case, fault = start(name, seed), FAULTS.get(name)
    before, report, error = state(case), None, None
    begin = time.perf_counter()
    try:
        report = (check or gm.check_gradients)(
            case.step, *case.args, model=case.model, against=case.against, optimizer=case.optimizer
        )
    except Exception as raised:  # noqa: BLE001 it is counted
        error = f"{type(raised).__name__}: {raised}"
    seconds = round(time.perf_counter() - begin, 3)
    if error is None and (changed := differing(before, state(case))):
        error = f"changed {', '.join(changed)}"
    against = case.against if isinstance(case.against, str) else "callable"
    row = {"name": name, "seed": seed, "planted": fault is not None, "against": against}
    return row | {"seconds": seconds, "error": error} | judged(fault, report)


def judged(fault, report):
    """Return what is reported, and whether a planted fault's tensor and kind are named."""
    if report is None:
        return {"alarm": None, "first": None, "kind": None, "named": False, "kind_named": False, "text": ""}
    kind = kind_of(report)
    row = {"alarm": not report, "first": report.first, "kind": kind, "text": str(report)}
    named = fault is not None and not report and report.first == fault.first
    right = named and fault.kind in {"other", kind}
    return row | {"named": named, "kind_named": right}


def kind_of(report):
    """Return the kind of the first failure, as one of `case.KINDS`."""
    raise NotImplementedError


def state(case):
    """Return what a check must not change, by the words for it."""
    tensors = [*case.model.named_parameters(remove_duplicate=False), *case.model.named_buffers()]
    optimizer = case.optimizer.state_dict() if case.optimizer else {}
    held = optimizer.get("state", {})
    return {
        "weights or buffers": [(name, raw(x)) for name, x in tensors],
        "gradients": [(name, None if x.grad is None else raw(dense(x.grad))) for name, x in tensors],
        "the optimizer": [
            (key, raw(x) if isinstance(x, torch.Tensor) else x)
            for key, values in held.items()
            for x in (values.values() if isinstance(values, dict) else [values])
        ],
        "modes": [module.training for module in case.model.modules()],
        "hooks": [
            len(hooks)
            for module in case.model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ]
        + [len(p._backward_hooks or ()) for p in case.model.parameters()],
        "the random state": torch.get_rng_state(),
    }


def dense(x):
    """Return a tensor with all its elements."""
    return x.to_dense() if x.is_sparse else x
