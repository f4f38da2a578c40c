"""Compare statistics of several ranks with those of one process, and with those of a single rank's shards.

    PYTHONPATH=src python tests/compare_ranks.py [--only WORD …]

Each way to share a model trains one step in separate processes, on the CPU with Gloo, with the same weights
and data as one process. Exit code 1 if an equality fails.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

import gradiometer as gm
from gradiometer.columns import TENSORS
from support.oracle import COUNTS, exact
from support.rank_models import CASES, KINDS, Collectives, alone, names_and_parameters
from support.rank_pool import RankPool

# the relative bound for norms; for sums, relative to the sum of magnitudes
BOUND = 1e-13


def local_norm(grads):
    """Return a rank's result from its own memory alone."""
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return float(nn.utils.get_total_norm(shards))


def torch_norm(grads):
    """Return torch's norm of the same gradients, used as is; or the error that it raises."""
    try:
        norm = nn.utils.get_total_norm(grads)
    except Exception as error:  # noqa: BLE001 that it fails is what is shown
        return type(error).__name__
    return float(norm.to_local() if isinstance(norm, DTensor) else norm)


def measured(rank, kind, size):
    """Return the results of one rank of a job."""
    model = KINDS[kind][0](rank, size, torch.float64)
    ranks = gm.Ranks(model)
    with Collectives() as collectives:
        stats = gm.collect_grads(model, reduce=ranks)
    report = stats.materialize()
    grads = [parameter.grad for _, parameter in names_and_parameters(model)]
    # silence torch's warnings about its own norm
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with Collectives() as others:
        theirs = torch_norm(grads)
    return {
        "names": report.names,
        "columns": dict(zip(stats.names, stats.columns.tolist(), strict=True)),
        "flags": [int(row.flags) for row in report.rows()],
        "norm": report.total_norm,
        "collectives": collectives.calls,
        "local": local_norm(grads),
        "torch": theirs,
        "torch collectives": len(others.calls),
    }


def compare(kind, size, found):
    """Return a row: how the ranks' results differ from those of one process."""
    model = alone(torch.float64)
    report = gm.collect_grads(model).materialize()
    expected = {name: exact(parameter.grad) for name, parameter in model.named_parameters()}
    counts, worst, worst_sum = 0, 0.0, 0.0
    for one in found:
        for name, true in expected.items():
            row = dict(zip(TENSORS.index, one["columns"][name], strict=True))
            counts += sum(row[column] != getattr(true, column) for column in COUNTS)
            worst = max(
                worst, abs(math.sqrt(row["sumsq"]) / true.norm - 1), abs(row["abs_max"] / true.abs_max - 1)
            )
            worst_sum = max(worst_sum, abs(row["sum"] - true.sum) / true.abs_sum)
        worst = max(worst, abs(one["norm"] / report.total_norm - 1))
    calls = found[0]["collectives"]
    flags = [int(row.flags) for row in report.rows()]
    same = all(one["names"] == report.names and one["flags"] == flags for one in found)
    return {
        "kind": kind,
        "ranks": size,
        "tensors": len(report),
        "counts": counts,
        "norms": worst,
        "sums": worst_sum,
        "same": same,
        "collectives": len(calls),
        "bytes": sum(math.prod(shape) * dtype.itemsize for _, parts in calls for shape, dtype in parts),
        "local": [one["local"] / report.total_norm for one in found],
        "torch": [
            one["torch"] if isinstance(one["torch"], str) else one["torch"] / report.total_norm
            for one in found
        ],
        "torch collectives": max(one["torch collectives"] for one in found),
        "ok": same
        and counts == 0
        and max(worst, worst_sum) < BOUND
        and all(len(one["collectives"]) == 2 + KINDS[kind][2] for one in found),
    }


def show(rows, console):
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
    heads = ("parallelism", "ranks", "tensors", "counts\noff", "norms\noff", "sums\noff", "names,\nflags")
    heads += ("calls", "bytes", "own shards", "torch", "torch\ncalls")
    for name in heads:
        table.add_column(name, justify="left" if name == "parallelism" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["kind"] if row["ok"] else f"[red]{row['kind']}: not equal[/red]",
            *(str(row[what]) for what in ("ranks", "tensors", "counts")),
            *(f"{row[what]:.0e}" for what in ("norms", "sums")),
            "same" if row["same"] else "[red]differ[/red]",
            str(row["collectives"]),
            str(row["bytes"]),
            *(_spread(row[what]) for what in ("local", "torch")),
            str(row["torch collectives"]),
        )
    console.print(table)
    console.print(
        "off: difference from one process on the same weights and data; differing counts, and the largest"
        f" relative difference of any tensor's and rank's norm and sum (bound {BOUND:.0e}). calls, bytes:"
        " collectives of one reduction, and their bytes per rank; a third one adds up partial gradients. "
        "own shards, torch: the total norm of a rank's shards, and torch.nn.utils.get_total_norm of "
        "its gradients, each over the true norm, from the smallest to the largest of the ranks; its calls.",
        style="dim",
        highlight=False,
    )


def _spread(values):
    """Return the smallest and the largest ratio as text; red if one is wrong."""
    words = [value for value in values if isinstance(value, str)]
    if words:
        return f"[red]{words[0]}[/red]"
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    text = low if low == high else f"{low} to {high}"
    return text if low == high == "1.000" else f"[red]{text}[/red]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only rows with these words")
    args = parser.parse_args()
    cases = [(kind, size) for kind, size in CASES if all(word in f"{kind} {size}" for word in args.only)]
    if not cases:
        parser.error(f"no row contains all of {args.only}; the rows are {', '.join(KINDS)}")
    rows = []
    for size in sorted({size for _, size in cases}):
        pool = RankPool(size)
        try:
            for kind, number in cases:
                if number == size:
                    rows.append(compare(kind, size, pool.run(measured, kind, size)))
        finally:
            pool.close()
    rows.sort(key=lambda row: cases.index((row["kind"], row["ranks"])))
    show(rows, Console(width=max(130, Console().width)))
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torch")
    main()
