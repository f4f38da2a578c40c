"""Statistics of pairs: any two lists of tensors, or weights before and after a step with their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import PAIRS
from gradiometer.inputs import Named, check_names, local_shards, named_parameters, named_tensors, present
from gradiometer.stats.measure import over_ranks, plain, redistributed, rows_by_device
from gradiometer.stats.pair_stats import PairStats
from gradiometer.stats.snapshot import Snapshot

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters


def compare(a: Parameters, b: Parameters, *, reduce: bool | Ranks = False) -> PairStats:
    """Measure pairs of tensors in one read of both on their device, without host synchronization.

    For gradients of two micro-batches, weights and their average, or two checkpoints. Works the same inside
    and outside ``torch.compile``. Sums of a, of b, of their product and of u = a - b are in fp64, over the
    elements that are finite in both.

    Args:
        a: a mapping name -> tensor, (name, tensor) pairs, tensors, which are named by position, or a module,
            which stands for its parameters. Complex tensors count as two real numbers per element.
        b: the same names, in any order. Shapes and devices must be the same; strides and dtypes may differ.
        reduce: as for `gradiometer.collect`.

    Returns:
        PairStats with a row per name, in the order of ``a``.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for names that are not in both, and for a pair with different shapes or devices.
        RankError: with ``reduce``, if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> stats = gm.compare({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 4.0])})
    >>> stats.norm_u, stats.unchanged_fraction
    (tensor([2.], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    what = "compare"
    left, right = _named(a, what), _named(b, what)
    check_names(left.names, what)
    check_names(right.names, what)
    if left.names != right.names:
        there = dict(zip(*right, strict=True))
        for own, others, name in ((left.names, there, "b"), (right.names, left.names, "a")):
            missing = [known for known in own if known not in others]
            if missing:
                raise ValueError(f"{what}: {missing[0]!r} is not in {name}; pass the same names in a and b")
        right = Named(left.names, [there[name] for name in left.names])
    return over_ranks(reduce, left, what, lambda _: _measure(left, right, None, what), schema=PAIRS)


def collect_updates(model: Parameters, snapshot: Snapshot, *, reduce: bool | Ranks = False) -> PairStats:
    """Measure what a step did to the weights, in one read, without host synchronization.

    Compares each parameter (a) with its copy in the snapshot (b), and with its gradient (g) if it has one:
    call it after ``optimizer.step()`` and before ``zero_grad()``. If gradients are clipped or unscaled, those
    that the optimizer saw are measured. Works the same inside and outside ``torch.compile``.

    Args:
        model: the model that the snapshot was taken of; parameters that are not in the snapshot are left out.
        snapshot: the weights before the step, see `gradiometer.Snapshot`. Counts and sums of a sampled tensor
            are scaled from the sample to the whole; ``abs_max_u`` is that of the sample.
        reduce: as for `gradiometer.collect_grads`.

    Returns:
        PairStats with a row per parameter in the snapshot.

    Raises:
        TypeError: for a tensor that cannot be measured, which the message names; for any other snapshot.
        ValueError: if a parameter in the snapshot is missing, or has another shape or device now.
        RankError: with ``reduce``, if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> snapshot = gm.Snapshot(model)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> optimizer.step()
    >>> stats = gm.collect_updates(model, snapshot)
    >>> print(f"{stats.norm_u.item():.3f} {stats.descent_cosine.item():.3f}")
    2.500 1.000
    """
    what = "collect_updates"
    if not isinstance(snapshot, Snapshot):
        msg = f"{what}: expected gm.Snapshot(model), taken before the step, got {type(snapshot).__name__}"
        raise TypeError(msg)
    parameters = snapshot.parameters_in(model, what)

    def measured(ranks: Ranks | None) -> PairStats:
        grads = present(parameters.names, [p.grad for p in parameters.tensors])
        return updates_of(parameters, snapshot, redistributed(grads, parameters, ranks, what), what)

    return over_ranks(reduce, parameters, what, measured, schema=PAIRS)


def updates_of(parameters: Named, snapshot: Snapshot, grads: Named, what: str) -> PairStats:
    """Measure the updates of the parameters in a snapshot, with some of their gradients."""
    weights, (names, shards) = local_shards(parameters, what), local_shards(grads, what)
    if names == weights.names:
        own: list[Tensor | None] = list(shards)
    else:
        there = dict(zip(names, shards, strict=True))
        own = [there.get(name) for name in weights.names]
    sides = snapshot.pairs_of(weights, own, what)
    stats = _measure(*sides, what)
    if snapshot.scale is None:
        return stats
    sums, maxima = PAIRS.by_merge(stats.columns)
    return PairStats(stats.names, torch.cat([sums * snapshot.scale, maxima], dim=1))


def _named(source: Parameters, what: str) -> Named:
    return named_parameters(source, what) if isinstance(source, nn.Module) else named_tensors(source, what)


@torch.no_grad()
def _measure(a: Named, b: Named, g: list[Tensor | None] | None, what: str) -> PairStats:
    """Measure pairs with the same names in the same order; None in ``g`` stands for no gradient."""
    a, b = local_shards(a, what), local_shards(b, what)
    names, left, right = a.names, a.tensors, b.tensors
    grads = None
    if g is not None and any([x is not None for x in g]):
        nothing = {
            device: torch.empty(0, device=device) for device in dict.fromkeys([x.device for x in left])
        }
        grads = [nothing[x.device] if y is None else y for x, y in zip(left, g, strict=True)]
    plan = ops.recognize_pairs(left, right, grads)
    if plan is not None:
        return PairStats(names, ops.measure_pairs(left, right, grads, plan=plan))
    left, right = plain(a, what), plain(b, what)
    grads = None if grads is None else plain(Named(names, grads), what)
    for name, x, y in zip(names, left, right, strict=True):
        if x.shape != y.shape or x.device != y.device or x.is_complex() != y.is_complex():
            msg = f"{what}: {name!r} is {_described(x)} in a, but {_described(y)} in b; pass tensors of the "
            raise ValueError(msg + "same shape on the same device, both real or both complex")
    if not names:
        return PairStats(names, torch.empty((0, PAIRS.width), dtype=torch.float64, device="cpu"))

    def measured(rows: list[int]) -> list[Tensor]:
        own = [None if tensors is None else [tensors[i] for i in rows] for tensors in (left, right, grads)]
        return [ops.measure_pairs(*own)]  # type: ignore[arg-type]

    return PairStats(names, rows_by_device(left, measured)[0])


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
