"""`Ranks` that a call creates itself, once per model and group, if none are passed."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.distributed import process_groups
from gradiometer.distributed.ranks import Ranks
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.sharding import Sharding, sharding_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.distributed.process_groups import Group


def implicit_ranks_for(sharding: Sharding, home: torch.device | None, group: Any = None) -> Ranks:
    """Return the `Ranks` of a sharding, created at the first call, which all ranks make at the same time."""
    process_group = process_groups.group_of(group)
    kept = _RANKS.setdefault(process_group, {})
    if sharding not in kept:
        size = len(process_groups.ranks_of(process_group)[1])
        # a mesh of all ranks shows that tensors named by position are the same on each
        is_same = any(
            math.prod(mesh.shape) == size for mesh in sharding.meshes if mesh.coordinate is not None
        )
        if sharding.names and not is_same and sharding.names == tuple(map(str, range(len(sharding.names)))):
            raise RankError(
                "reduce: tensors in a list have no names, so the ranks cannot check that they pass the same "
                "ones; pass the model or its named_parameters(), or pass reduce=gm.Ranks(list)"
            )
        while len(kept) >= _KEPT:
            kept.pop(next(iter(kept)))
        try:
            kept[sharding] = Ranks.of_sharding(sharding, home, group=group)
        except RankError as error:
            if not kept or "did not arrive" not in str(error):
                raise
            # ranks without new tensors are already waiting in a reduction
            msg = f"{error}; if only some ranks have new tensors, create gm.Ranks(model) again on all ranks, "
            raise RankError(msg + "and pass it as reduce=") from None
    return kept[sharding]


def given_ranks(reduce: Any, what: str) -> Ranks | None:
    """Return the `Ranks` passed as ``reduce=``; None if ``reduce`` is a bool or None."""
    if isinstance(reduce, Ranks):
        return reduce
    if reduce is not None and not isinstance(reduce, bool):
        raise TypeError(f"{what}: reduce must be True, False or gm.Ranks(model), got {type(reduce).__name__}")
    if reduce and torch.compiler.is_compiling():
        msg = f"{what}: reduce=True sets up communication between ranks, which a compiled function cannot "
        raise RuntimeError(msg + "do; create ranks = gm.Ranks(model) outside, and pass reduce=ranks")
    return None


def sharding_here(names: tuple[str, ...], tensors: Sequence[Tensor]) -> Sharding | None:
    """Return the sharding of parameters; None in a compiled function, or if there is only one rank."""
    if torch.compiler.is_compiling() or not process_groups.is_active():
        return None
    key = (names, tuple([id(tensor) for tensor in tensors]))
    sharding, refs = _SHARDINGS.get(key, (None, ()))
    # another tensor may have reused an id
    if sharding is None or not all([ref() is tensor for ref, tensor in zip(refs, tensors, strict=True)]):
        while len(_SHARDINGS) >= _KEPT:
            _SHARDINGS.pop(next(iter(_SHARDINGS)))
        sharding = sharding_of(names, tensors)
        _SHARDINGS[key] = (sharding, tuple([weakref.ref(tensor) for tensor in tensors]))
    return sharding


# most models kept: `Ranks` per group, dropped with the group; shardings in all
_KEPT = 8
_RANKS: weakref.WeakKeyDictionary[Group, dict[Sharding, Ranks]] = weakref.WeakKeyDictionary()
_SHARDINGS: dict[
    tuple[tuple[str, ...], tuple[int, ...]], tuple[Sharding, tuple[weakref.ref[Tensor], ...]]
] = {}
