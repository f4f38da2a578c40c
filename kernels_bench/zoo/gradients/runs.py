"""One run of this family: check a step, and compare what is reported with what was planted."""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
import zlib

import torch

import gradiometer as gm
from kernels_bench.zoo.gradients import (
    faults,
    faults_compiled,
    faults_loop,
    faults_ranks,
    faults_updates,
    healthy,
    healthy_compiled,
    healthy_layers,
)

FAULTS = faults.FAULTS | faults_loop.FAULTS | faults_updates.FAULTS | faults_compiled.FAULTS
FAULTS |= faults_ranks.FAULTS
COMPILED = faults_compiled.FAULTS | healthy_compiled.STEPS
HEALTHY = healthy.STEPS | healthy_layers.STEPS | healthy_compiled.STEPS
HEALTHY_RANKS = {f"ranks-{name}": make for name, make in faults_ranks.HEALTHY.items()}
# the kinds by what is said of them; of a factor, also the number is read
SENTENCES = {
    "non-finite": r"(NaN|Inf) in",
    "sign": "the negative of the reference",
    "zeros": "all elements are 0$",
    "rows": r"\brows? .*(differs?|(is|are) 0|(is|are) .* the reference), and the others agree",
    "permutation": "rows are permuted",
}


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
    row = {"alarm": None, "first": None, "kind": None, "named": False, "kind_named": False, "text": ""}
    if report is None:
        return row
    row |= {"alarm": not report, "text": str(report)}
    if report.first is None:
        return row
    row["first"], (row["kind"], factor) = report.first.name, kind_of(report.first.text)
    # a gradient is also wrong if the loss does not change along it as it says
    what = "gradient" if report.first.what == "slope" else report.first.what
    if fault is not None:
        row["named"] = row["first"] == fault.first and what == fault.what
        right = row["kind"] == fault.kind and (fault.factor is None or math.isclose(factor, fault.factor))
        row["kind_named"] = row["named"] and (right or fault.kind == "other")
    return row


def joined(rows):
    """Return one row of the rows that the ranks of a case have: a fault is named if all of them name it."""
    first = min(rows, key=lambda row: (row["named"], row["kind_named"]))
    errors = [row["error"] for row in rows if row["error"]]
    return first | {"error": errors[0] if errors else None, "alarm": any(row["alarm"] for row in rows)}


def kind_of(text):
    """Return the kind that a failure's text tells, as one of `case.KINDS`, and its factor or None."""
    if found := re.search(r"all elements are (-?)(1/)?([\d.,]+)(?: \(2\^\d+\))? times the reference", text):
        number = float(found[3].replace(",", ""))
        return "factor", (1 / number if found[2] else number) * (-1 if found[1] else 1)
    return next((kind for kind, words in SENTENCES.items() if re.search(words, text)), "other"), None


def state(case):
    """Return what a check must not change, by the words for it."""
    model = case.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    optimizer = case.optimizer.state_dict() if case.optimizer else {}
    modules, parameters = list(model.modules()), list(model.parameters())
    return {
        "weights or buffers": [(name, content(x)) for name, x in tensors],
        "gradients": [(name, content(x.grad)) for name, x in tensors],
        "requires_grad": [x.requires_grad for _, x in tensors],
        "the optimizer": content(optimizer),
        "modes": [module.training for module in modules],
        "hooks": [
            *(len(hooks) for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
            *(len(m._backward_hooks) + len(m._backward_pre_hooks) for m in modules),
            *(len(p._backward_hooks or ()) for p in parameters),
            *(len(p._post_accumulate_grad_hooks or ()) for p in parameters),
        ],
        "the arguments": content(case.args),
        "the random state": content(torch.get_rng_state()),
    }


def content(value):
    """Return a value with the bytes of each tensor, to compare: NaNs are then equal."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return value.dtype, dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, content(each)) for key, each in value.items()]
    return [content(each) for each in value] if isinstance(value, (list, tuple)) else value


def differing(before, after):
    """Return the words for what is not the same."""
    return [word for word, value in before.items() if value != after[word]]
