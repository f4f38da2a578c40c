"""`Ranks` that a call makes by itself, once, for tensors that are DTensors."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.distributed import process_groups
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.sharding import Sharding, sharding_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.distributed.process_groups import Group
from gradiometer.distributed.ranks import Ranks

__all__ = ["given_ranks", "implicit_ranks_for", "sharding_here"]


def implicit_ranks_for(sharding: Sharding, home: torch.device | None, group: Any = None) -> Ranks:
    """Return `Ranks` of a sharding, made the first time; all ranks call it at the same time.

    ``home``: where columns are; None: on the CPU.
    """
    kept = _RANKS.setdefault(process_groups.group_of(group), {})
    if sharding not in kept:
        _refuse_nameless(sharding, group)
        while len(kept) >= _KEPT:
            kept.pop(next(iter(kept)))
        try:
            kept[sharding] = Ranks.of_sharding(sharding, home, group=group)
        except RankError as error:
            if not kept or "did not come" not in str(error):
                raise
            # ranks on which nothing is new are in a reduction, and wait there
            msg = f"{error}; where tensors are new on some ranks alone, pass reduce=gm.Ranks(model)"
            raise RankError(msg + ", made anew on all") from None
    return kept[sharding]


def _refuse_nameless(sharding: Sharding, group: Any) -> None:
    """Refuse tensors named by position, unless a mesh of all ranks tells that they are the same on each."""
    size = len(process_groups.ranks_of(process_groups.group_of(group))[1])
    whole = [
        mesh for mesh in sharding.meshes if mesh.coordinate is not None and math.prod(mesh.shape) == size
    ]
    if sharding.names and not whole and sharding.names == tuple(map(str, range(len(sharding.names)))):
        msg = (
            "reduce: tensors of a list have no names, so that ranks, stages of a pipeline say, cannot tell "
            "whether theirs are the same: pass the model, or its named_parameters(); or reduce=gm.Ranks(list)"
        )
        raise RankError(msg)


def given_ranks(reduce: Any, what: str) -> Ranks | None:
    """Return the `Ranks` that were given by ``reduce=``; None where ranks are agreed on as they come."""
    if isinstance(reduce, Ranks):
        return reduce
    if reduce is not None and not isinstance(reduce, bool):
        msg = f"{what}: reduce must be True, False or gm.Ranks(model), got {type(reduce).__name__}"
        raise TypeError(msg)
    if reduce and torch.compiler.is_compiling():
        msg = f"{what}: in a compiled step pass reduce=ranks, with ranks = gm.Ranks(model) made outside"
        raise RuntimeError(msg)
    return None


def sharding_here(names: tuple[str, ...], tensors: Sequence[Tensor]) -> Sharding | None:
    """Return the sharding of parameters, kept while they are the same; None where there is one rank."""
    if torch.compiler.is_compiling() or not process_groups.is_active():
        return None
    key = (names, tuple([id(tensor) for tensor in tensors]))
    sharding, refs = _SHARDINGS.get(key, (None, ()))
    # an id may have become another tensor's
    if sharding is None or not all([ref() is tensor for ref, tensor in zip(refs, tensors, strict=True)]):
        while len(_SHARDINGS) >= _KEPT:
            _SHARDINGS.pop(next(iter(_SHARDINGS)))
        sharding = sharding_of(names, tensors)
        _SHARDINGS[key] = (sharding, tuple([weakref.ref(tensor) for tensor in tensors]))
    return sharding


# models in a process, with one group; it goes with the group
_KEPT = 8
_RANKS: weakref.WeakKeyDictionary[Group, dict[Sharding, Ranks]] = weakref.WeakKeyDictionary()
_SHARDINGS: dict[
    tuple[tuple[str, ...], tuple[int, ...]], tuple[Sharding, tuple[weakref.ref[Tensor], ...]]
] = {}
