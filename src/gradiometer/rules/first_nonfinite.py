"""The first non-finite tensor of a step: the one in which the NaN or Inf began.

The forward pass reads the weights before there is a gradient. So a non-finite weight comes first, and among
several the first in the model's order. Gradients are computed from the loss backwards: a NaN that arises
there reaches every parameter before it in the model, and none after it. So among several the *last* in the
model's order is where it began. Updates depend on both: `Kind.order` holds this order. With taps, activations
come after the weights, and their gradients before those of parameters; the output of a module comes after the
outputs in it. If the modules do not run in the model's order, the named tensor may be one that the NaN only
reached; the number of other tensors tells how far it spread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradiometer.recorder import label
from gradiometer.stats import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import Kind, StepRecord


class FirstNonfinite(NamedTuple):
    """Where the non-finite values of a step began: the tensor, the counts of its elements, and the rank.

    A schema of your own may count non-finite elements without counts of NaN and Inf; these are 0 then.
    """

    kind: Kind
    name: str
    n_nonfinite: int
    n_nan: int
    n_inf: int
    numel: int
    where: str | None = None


def first_nonfinite(record: StepRecord) -> FirstNonfinite | None:
    """Return the tensor in which the step's non-finite values began; None if all are finite."""
    tables = record.nonfinite
    if not tables:
        return None
    table = tables[0]
    kind, names = table.kind, table.rows.names
    bad = table.value("n_nonfinite").nonzero().flatten().tolist()
    place = bad[-1 if kind.is_backward else 0]
    if kind.rows == "tap":
        place = _first_tap(names, bad, is_backward=kind.is_backward)
    n_nonfinite, n_nan, n_inf, numel = [
        int(table.value(name)[place]) if name in kind.schema else 0
        for name in ("n_nonfinite", "n_nan", "n_inf", "numel")
    ]
    # summed gradients spread a rank's non-finite loss to all ranks: the first need not be the cause
    where = record.where(names[place], kind.name) if record.loss_rank is None else None
    return FirstNonfinite(kind, names[place], n_nonfinite, n_nan, n_inf, numel, where)


def _first_tap(names: Sequence[str], places: list[int], *, is_backward: bool) -> int:
    """Return the place of the tap that comes first, in the forward or in the backward pass."""
    order = _forward_order(names)
    roots = [name.partition(".")[0] for name in names]
    # a call of `tap` whose name is not that of a part of the model may be anywhere
    known = [i for i in places if names[i].endswith(".out") or roots.count(roots[i]) > 1]
    return (max if is_backward else min)(known or places, key=order.__getitem__)


def _forward_order(names: Sequence[str]) -> list[tuple[float, ...]]:
    """Return a sort key of each tap: modules in the order of their names, each after what is in it.

    >>> names = ["a.out", "a.mlp.out", "b.out", "a.scores"]
    >>> [name for _, name in sorted(zip(_forward_order(names), names))]
    ['a.mlp.out', 'a.scores', 'a.out', 'b.out']
    """
    paths = [tuple(name.removesuffix(".out").split(".")) for name in names]
    first: dict[tuple[str, ...], int] = {}
    for place, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(path[: depth + 1], place)
    return [(*[first[path[: depth + 1]] for depth in range(len(path))], math.inf) for path in paths]


def first_nonfinite_text(record: StepRecord) -> str | None:
    """Return one line, such as ``step 1207, blocks.3.mlp.w1.grad, 12 NaN of 4.2 M (and 40 of 76 others)``.

    The others are tensors of the same kind. If ranks are merged, the first rank with a non-finite value
    follows the tensor: ``rank 5 (dp_shard 1 of 4)``. None if all are finite.
    """
    first = first_nonfinite(record)
    if first is None:
        return None
    kind, tensor = first.kind.name, label(first.kind.name, first.name)
    counts = [f"{amount(n)} {word}" for n, word in ((first.n_nan, "NaN"), (first.n_inf, "Inf")) if n]
    if not counts:
        counts = [f"{amount(first.n_nonfinite)} NaN or Inf"]
    if first.where is not None:
        rank, _, shard = first.where.partition(", ")
        tensor += f", {rank} ({shard})" if shard else f", {rank}"
    text = f"step {record.step}, {tensor}, {' and '.join(counts)} of {amount(first.numel)}"
    others = int((record.value("n_nonfinite", kind) > 0).sum()) - 1
    measured = int(record.measured(kind).sum()) - 1
    if not others:
        return text
    which = f"all {measured}" if others == measured else f"{others} of {measured}"
    return f"{text} (and {which} others)"
