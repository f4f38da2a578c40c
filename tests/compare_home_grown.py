"""Compare ours with home-grown telemetry on gradients of every kind: values, errors, transfers, time.

    PYTHONPATH=src python tests/compare_home_grown.py [--only WORD …] [--rounds N]

Values are computed on the CPU; transfers are counted on a fake device (tests/support/transfers.py). A call
of ours makes the whole report, which includes the compared value. Times are the minimum of interleaved calls.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import gradiometer as gm
from gradiometer import check_finite
from support import home_grown
from support.home_grown import GradientCollector
from support.oracle import exact
from support.transfers import count_transfers

GROUPS = {"host": r"^host\.", "seed": r"^seed\."}
# a value within fp32 rounding counts as correct
FINE = 1e-6
WHOSE = ("theirs", "ours")


def report(model):
    return gm.collect_grads(model).materialize()


def ratio(model):
    return gm.group_ratio(gm.collect_grads(model).group(GROUPS), "seed", "host").item()


# the exact values, from the gradients by name


def exact_norm(grads):
    return exact(*grads.values()).norm if grads else 0.0


def exact_health(grads):
    found = [exact(grad) for grad in grads.values()]
    if any(one.n_nonfinite for one in found):
        return 0.0
    norms = [one.norm for one in found if one.numel]
    lost = 0.5 * sum(norm < 1e-7 for norm in norms) + 0.8 * sum(norm > 100 for norm in norms)
    return max(0.0, 1.0 - lost / max(len(found), 1))


def exact_count(grads):
    return float(sum(exact(grad).n_nonfinite > 0 for grad in grads.values()))


def exact_ratio(grads):
    parts = [[g for name, g in grads.items() if name.startswith(part)] for part in ("seed", "host")]
    if not all(parts):
        return 0.0
    seed, host = (exact(*part) for part in parts)
    if min(seed.norm, host.norm) < 1e-8:
        return 0.0
    return seed.norm / host.norm / math.sqrt(seed.numel / host.numel)


def not_finite(model):
    """Return the number of tensors in which the check finds NaN or Inf."""
    issues = home_grown.stability_issues(model)
    return float(len({issue.split()[-1] for issue in issues if issue[:3] in {"NaN", "Inf"}}))


def names_not_finite(model):
    found = check_finite(model)
    return float(len({*found.nan_weights, *found.inf_weights}) + len({*found.nan_grads, *found.inf_grads}))


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# (what, home-grown, ours, exact)
FUNCTIONS = (
    (".item() norms", home_grown.norm_by_item, gm.grad_norm, exact_norm),
    (
        "sum of squares",
        lambda model: float(home_grown.norm_of_squares(model.parameters())),
        gm.grad_norm,
        exact_norm,
    ),
    (
        # the norm that clip_grad_norm_ uses and returns
        "get_total_norm",
        lambda model: float(torch.nn.utils.get_total_norm(grads_of(model).values())),
        lambda model: float(gm.total_norm(grads_of(model))),
        exact_norm,
    ),
    (
        "Composer",
        lambda model: float(home_grown.optimizer_monitor(model)["l2_norm/grad/global"]),
        lambda model: report(model).total_norm,
        exact_norm,
    ),
    (
        "health",
        lambda model: GradientCollector().collect(model)["health"],
        lambda model: report(model).health,
        exact_health,
    ),
    ("not finite", not_finite, names_not_finite, exact_count),
    ("host/seed", lambda model: home_grown.host_seed_ratio(model)["ratio"], ratio, exact_ratio),
)


def attempt(call, model):
    """Return a call's result, or the error that it raises."""
    try:
        return call(model)
    except Exception as error:  # noqa: BLE001 that it fails is what is shown
        return error


def measure(calls, model, rounds):
    """Return the minimum times of calls in us, interleaved; None for a call that fails."""
    times: list[list[float]] = [[] for _ in calls]
    working = [not isinstance(attempt(call, model), Exception) for call in calls]
    for _ in range(rounds):
        for its, call, works in zip(times, calls, working, strict=True):
            if works:
                start = time.perf_counter()
                call(model)
                its.append(1e6 * (time.perf_counter() - start))
    return [min(its) if its else None for its in times]


def transfers(call, model):
    try:
        return count_transfers(lambda away, _: call(away), model)
    except Exception:  # noqa: BLE001 as above
        return ""


def compare(only, rounds):
    """Return a row for each input and function, as a dict."""
    rows = []
    for case, model in home_grown.cases().items():
        grads = grads_of(model)
        for what, theirs, ours, true in FUNCTIONS:
            if all(word in f"{case} {what}" for word in only):
                rows.append(
                    {
                        "input": case,
                        "function": what,
                        "values": [attempt(theirs, model), attempt(ours, model)],
                        "exact": true(grads),
                        "transfers": [transfers(theirs, model), transfers(ours, model)],
                        "us": measure((theirs, ours), model, rounds),
                    }
                )
    return rows


def error_of(value, true):
    """Return the relative error: 0 if both are NaN or the same inf, None if there is no value."""
    if isinstance(value, Exception):
        return None
    if value == true or (math.isnan(value) and math.isnan(true)):
        return 0.0
    return (
        abs(value - true) / abs(true) if math.isfinite(value) and math.isfinite(true) and true else math.inf
    )


def show(rows, console):
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    heads = ["exact", *(f"{what}\n{whose}" for what in ("value", "error", "waits", "µs") for whose in WHOSE)]
    for name in ("input", "function", *heads, "ours /\ntheirs"):
        table.add_column(name, justify="left" if name in {"input", "function"} else "right", no_wrap=True)
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1]["input"] != row["input"]
        if first and i:
            table.add_section()
        errors = [error_of(value, row["exact"]) for value in row["values"]]
        before, after = row["us"]
        table.add_row(
            row["input"] if first else "",
            row["function"],
            _value(row["exact"]),
            *(_mark(_value(value), error) for value, error in zip(row["values"], errors, strict=True)),
            *(_mark("" if e is None else "0" if e == 0 else f"{e:.0e}", e) for e in errors),
            *map(str, row["transfers"]),
            *("" if us is None else f"{us:.0f}" for us in row["us"]),
            "" if before is None or after is None else f"{after / before:.2g}",
        )
    console.print(table)
    console.print(
        f"error: relative; red above {FINE:.0e}. waits: for the same tensors on a device. "
        "µs: on this CPU, the minimum.",
        style="dim",
        highlight=False,
    )


def _value(value):
    return type(value).__name__.removesuffix("Error") if isinstance(value, Exception) else f"{value:.4g}"


def _mark(text, error):
    return text if error is not None and error < FINE else f"[red]{text}[/red]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only rows with these words")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each function")
    args = parser.parse_args()
    show(compare(args.only, args.rounds), Console(width=max(110, Console().width)))


if __name__ == "__main__":
    main()
