"""Project named tensors, or the gradients of a model, on random signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gradiometer import ops
from gradiometer.columns import DEFAULT_PROJECTIONS, PROJECTIONS
from gradiometer.distributed import part_of
from gradiometer.inputs import (
    Named,
    check_names,
    describe,
    local_shards,
    named_parameters,
    named_tensors,
)
from gradiometer.stats.measure import grads_of, over_ranks, plain, redistributed, rows_by_device
from gradiometer.stats.projection_stats import CLASSES, ProjectionStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Part, Tensors


def check_projections(caller: str, count: object, seed: object) -> None:
    """Raise a ValueError for a number of projections or a seed that cannot be used."""
    if type(count) is not int or count not in PROJECTIONS:
        numbers = ", ".join(map(str, PROJECTIONS))
        raise ValueError(f"{caller}(projections={describe(count)}): projections must be one of {numbers}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"{caller}(seed={describe(seed)}): seed must be an integer from 0 to 2**63 - 1")


def check_hashed(names: Iterable[str], caller: str) -> None:
    """Raise a ValueError for a name that is not valid Unicode: operators don't take it."""
    for name in names:
        if any(0xD800 <= ord(letter) < 0xE000 for letter in name):
            msg = f"{caller}: the name {name!r} is not valid Unicode, and signs depend on names; rename it"
            raise ValueError(msg)


def collect_projections(
    tensors: Tensors | nn.Module,
    *,
    projections: int = DEFAULT_PROJECTIONS,
    seed: int = 0,
    reduce: bool | Ranks = False,
) -> ProjectionStats:
    """Project tensors on random signs, in one read, without host synchronization.

    Two results with the same names, ``projections`` and ``seed`` tell how far apart the tensors are, see
    `ProjectionStats`. Signs depend on the name and on an element's index in the whole tensor, so shards of
    any dimension add up to the projections of the whole. Works the same inside and outside ``torch.compile``.

    Args:
        tensors: a mapping name -> tensor, (name, tensor) pairs, tensors, which are named by position, or a
            module, whose gradients are projected. Complex tensors count as two real numbers per element.
        projections: their number k: 8, 16, 32, 64, 128 or 256.
        seed: of the signs.
        reduce: whether to add up the projections of all ranks, as for `gradiometer.collect`.

    Returns:
        ProjectionStats with a row per tensor.

    Raises:
        TypeError: for a tensor that cannot be measured; the message names it.
        ValueError: for names that occur twice, and for numbers out of range; with ``reduce``, for a part of
            which it is not known which elements of the whole tensor it has, as with ``gm.Ranks(shards=...)``.
        RankError: with ``reduce``, if the ranks disagree or one does not respond.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect_projections({"w": torch.tensor([3.0, 4.0])}, projections=8)
    >>> stats.projections  # 3 and 4 with signs
    tensor([[-7., -7., -1., -7., -7.,  1.,  1.,  7.]], dtype=torch.float64)
    """
    caller = "collect_projections"
    if isinstance(tensors, nn.Module):
        return projected(named_parameters(tensors, caller), caller, projections, seed, reduce, of_grads=True)
    return projected(named_tensors(tensors, caller), caller, projections, seed, reduce)


def projected(
    parameters: Named,
    caller: str,
    count: int,
    seed: int,
    reduce: bool | Ranks,  # noqa: FBT001
    *,
    of_grads: bool = False,
) -> ProjectionStats:
    """Project named tensors, or their gradients, as `collect_projections` does."""
    check_projections(caller, count, seed)
    grads = grads_of(parameters, caller)[0] if of_grads else None

    def measured(ranks: Ranks | None) -> ProjectionStats:
        own = parameters if grads is None else redistributed(grads, parameters, ranks, caller)
        sharding = None if ranks is None else ranks.sharding
        # gradients are placed like their parameters, and may be plain tensors now
        parts = {
            name: part_of(name, x, caller, sharding)
            for name, x in zip(*parameters, strict=True)
            if name in own.names
        }
        return projections_of(own, caller, count, seed, parts)

    # the ranks compare the text
    call = f"{caller}(projections={count}, seed={seed})"
    return over_ranks(reduce, parameters, call, measured, schema=PROJECTIONS[count])


@torch.no_grad()
def projections_of(
    named: Named, caller: str, count: int, seed: int, parts: Mapping[str, Part | None] | None = None
) -> ProjectionStats:
    """Project named tensors as `collect_projections` does.

    ``caller``: names the caller in error messages. ``parts``: by name, which part of the whole tensor each
    is; None: as they tell.
    """
    check_names(named.names, caller)
    check_hashed(named.names, caller)
    if parts is None:
        parts = {name: part_of(name, x, caller) for name, x in zip(*named, strict=True)}
    placed = [parts[name] for name in named.names]
    named = local_shards(named, caller)
    names, tensors = named.names, plain(named, caller)
    kind = CLASSES[count]
    if not tensors:
        return kind(names, torch.empty((0, kind.schema.width), dtype=torch.float64, device="cpu"))

    def of_rows(rows: list[int]) -> list[Tensor]:
        boxes = ops.encode([placed[i] for i in rows])
        return [
            ops.measure_projections([tensors[i] for i in rows], [names[i] for i in rows], count, seed, boxes)
        ]

    return kind(names, rows_by_device(tensors, of_rows)[0])
