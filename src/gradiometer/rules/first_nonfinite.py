"""The first non-finite tensor of a step: the one in which the NaN or Inf began.

The forward pass reads the weights before there is a gradient. So a non-finite weight comes first, and among
several the first in the model's order. Gradients are computed from the loss backwards: a NaN that arises
there reaches every parameter before it in the model, and none after it. So among several the *last* in the
model's order is where it began. Updates depend on both. With taps, activations come after the weights, and
their gradients before those of parameters; the output of a module comes after the outputs in it. If the
modules do not run in the model's order, the named tensor may be one that the NaN only reached; the number of
other tensors tells how far it spread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradiometer.columns import COLUMN_INDEX
from gradiometer.recorder import TAP_KINDS, label
from gradiometer.stats import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.recorder import Kind, StepRecord

__all__ = ["FirstNonfinite", "first_nonfinite", "first_nonfinite_text", "nonfinite"]

# in the order in which a step makes them
_ORDER: tuple[Kind, ...] = ("weights", "activations", "activation_grads", "grads", "updates")


class FirstNonfinite(NamedTuple):
    """Where the non-finite values of a step began: the tensor, the counts of its elements, and the rank."""

    kind: Kind
    name: str
    n_nan: int
    n_inf: int
    numel: int
    where: str | None = None


def nonfinite(record: StepRecord, kind: Kind = "grads") -> Tensor:
    """Return the number of NaN or Inf elements of each parameter, ``(N,) float64``."""
    return record.value("n_nonfinite", kind)


def first_nonfinite(record: StepRecord) -> FirstNonfinite | None:
    """Return the tensor in which the step's non-finite values began; None if all are finite.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> recorder = gm.Recorder(model)
    >>> model(torch.ones(1, 2)).sum().mul(float("nan")).backward()
    >>> recorder.record()
    >>> first_nonfinite(recorder.read()[-1])
    FirstNonfinite(kind='grads', name='1.bias', n_nan=1, n_inf=0, numel=1, where=None)
    """
    for kind in _ORDER:
        if kind not in record.roster.kinds or not record.total("n_nonfinite", kind):
            continue
        bad = nonfinite(record, kind).nonzero()
        place = int(bad[-1 if kind == "grads" else 0])
        if kind in TAP_KINDS:
            place = _first_tap(record.roster.names, bad.flatten().tolist(), kind)
        row = record.columns(kind)[place].tolist()
        n_nan, n_posinf, n_neginf, numel = (
            int(row[COLUMN_INDEX[name]]) for name in ("n_nan", "n_posinf", "n_neginf", "numel")
        )
        name = record.roster.names[place]
        # summed gradients spread a rank's non-finite loss to all ranks: the first need not be the cause
        where = record.where(name, kind) if record.loss_rank is None else None
        return FirstNonfinite(kind, name, n_nan, n_posinf + n_neginf, numel, where)
    return None


def _first_tap(names: Sequence[str], places: list[int], kind: Kind) -> int:
    """Return the place of the tap that comes first, in the forward or in the backward pass."""
    order = _forward_order(names)
    roots = [name.partition(".")[0] for name in names]
    # a call of `tap` whose name is not that of a part of the model may be anywhere
    known = [i for i in places if names[i].endswith(".out") or roots.count(roots[i]) > 1]
    return (max if kind == "activation_grads" else min)(known or places, key=order.__getitem__)


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
    counts = [f"{amount(n)} {word}" for n, word in ((first.n_nan, "NaN"), (first.n_inf, "Inf")) if n]
    what = label(first.kind, first.name)
    if first.where is not None:
        rank, _, shard = first.where.partition(", ")
        what += f", {rank} ({shard})" if shard else f", {rank}"
    text = f"step {record.step}, {what}, {' and '.join(counts)} of {amount(first.numel)}"
    others = int((nonfinite(record, first.kind) > 0).sum()) - 1
    measured = int(record.measured(first.kind).sum()) - 1
    if not others:
        return text
    which = f"all {measured}" if others == measured else f"{others} of {measured}"
    return f"{text} (and {which} others)"
