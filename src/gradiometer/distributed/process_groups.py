"""Process groups: find the group of an argument, list its ranks, and create groups of our own."""

from __future__ import annotations

import re
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch.distributed as dist

from gradiometer.distributed.rendezvous import SLACK, RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

# a ProcessGroup; a build of torch without torch.distributed has none
Group: TypeAlias = Any


# seconds for live ranks to answer: longer than the time between their checks for a given-up collective
PRESENCE_TIMEOUT: Final = 3.0
# seconds by which Gloo's own timeout exceeds ours, which leaves time to search for missing ranks
_LATER: Final = PRESENCE_TIMEOUT + SLACK
# most ranks that a message names
_NAMED: Final = 8
# groups of multi-dimensional meshes, by their ranks
_of_meshes: weakref.WeakKeyDictionary[Group, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()


def is_active() -> bool:
    """Return whether there are several ranks in this process's world."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_of(group: Any) -> Group:
    """Return the process group of a group, a device mesh, or None, which means all ranks.

    A mesh of several dimensions becomes one group; all its ranks have to make the first call together.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RankError("there is no process group; call torch.distributed.init_process_group() first")
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RankError(f"rank {dist.get_rank()} is not in this process group; only its members can use it")
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group") and hasattr(group, "mesh"):
        return _group_of_mesh(group)
    msg = f"group must be a process group, a device mesh or None (all ranks), got {type(group).__name__}"
    raise TypeError(msg)


def _group_of_mesh(mesh: Any) -> Group:
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    _place_of(dist.get_rank(), ranks)
    if mesh.ndim == 1:
        return mesh.get_group()
    world: Group = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    kept = _of_meshes.setdefault(world, {})
    if ranks not in kept:
        # Ranks outside the mesh need not call this. But if the world is bound to a device, NCCL splits the
        # world's communicator, which waits for all its ranks. Not bound, it connects the group's ranks at
        # their first collective.
        device, world.bound_device_id = world.bound_device_id, None
        try:
            kept[ranks] = _new_group("process", ranks, use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    return kept[ranks]


def ranks_of(group: Group) -> tuple[int, list[int]]:
    """Return this process's place in a group, and the global ranks of the group."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        msg = "this process group was destroyed; recreate what was created with it, such as gm.Ranks"
        raise RankError(msg) from None
    return _place_of(dist.get_rank(), ranks), ranks


def _place_of(rank: int, ranks: Sequence[int]) -> int:
    if rank not in ranks:
        msg = f"rank {rank} is not in the group of ranks {listed(ranks)}; only its members can use it"
        raise RankError(msg)
    return ranks.index(rank)


def side_group(ranks: Sequence[int], timeout: float) -> Group:
    """Return a new Gloo group for collectives beside those of training; all its ranks have to call this."""
    # use local synchronization only for a part of the ranks: it reuses the name of a closed group, whose
    # addresses are still in the store
    some = len(ranks) < dist.get_world_size()
    end = timedelta(seconds=timeout + _LATER)
    return _new_group("Gloo", ranks, timeout=end, backend="gloo", use_local_synchronization=some)


def _new_group(kind: str, ranks: Sequence[int], **options: Any) -> Group:
    try:
        return dist.new_group(list(ranks), **options)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"cannot create a {kind} group of {len(ranks)} ranks: {one_line(error)}") from error


def close(group: Group) -> None:
    """Destroy a group without waiting for its pending collectives."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def listed(ranks: Sequence[int]) -> str:
    """Return ``0, 1, 2``; for many ranks the first ones and the number of the others."""
    some = ", ".join(map(str, ranks[:_NAMED]))
    return f"{some} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else some


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    # Gloo puts source lines before the reason, and advice after it
    text = " ".join(str(error).split()).partition(". This may indicate")[0]
    return re.sub(r"\[(enforce fail at )?[^\[\]\s]+:\d+\] ", "", text)[:300]
