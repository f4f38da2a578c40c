"""All that is asked of `torch.distributed`: groups, sums and maxima over ranks, and who is there."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Group",
    "RankError",
    "absent",
    "all_reduce",
    "close",
    "group_of",
    "is_active",
    "ranks_of",
    "rendezvous",
    "share",
    "side_group",
]

# a ProcessGroup; a build of torch without torch.distributed has none
Group: TypeAlias = Any

# seconds between two looks at a store, at first and at last
_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.5
# ranks that are named in a message
_NAMED: Final = 8

_rounds: dict[str, int] = {}


class RankError(RuntimeError):
    """Ranks disagree, or one of them does not answer. One line, which says what and which."""


def is_active() -> bool:
    """Tell whether there are several ranks in this process's world."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def group_of(group: Any) -> Group:
    """Return a process group: of a group itself, a mesh, which may have several dimensions, or None: all.

    A mesh of several dimensions becomes one group, the first time on all of its ranks at once.

    Raises:
        TypeError: for what is none of these.
        RankError: without a process group.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            msg = "there is no process group: call torch.distributed.init_process_group() first"
            raise RankError(msg)
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "get_group"):
        if group.ndim == 1:
            return group.get_group()
        if group.size() == dist.get_world_size():
            return dist.group.WORLD
        return group._flatten().get_group()  # noqa: SLF001 the only way to one group of a mesh
    msg = f"expected a process group, a device mesh or None for all ranks, got {type(group).__name__}"
    raise TypeError(msg)


def ranks_of(group: Group) -> tuple[int, list[int]]:
    """Return this process's place in a group, and the global ranks of the group.

    Raises:
        RankError: where this process is none of them.
    """
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        msg = f"rank {dist.get_rank()} is not in the group of ranks {_listed(ranks)}"
        raise RankError(msg)
    return ranks.index(dist.get_rank()), ranks


def all_reduce(tensor: Tensor, operation: str, group: Group, timeout: float) -> Tensor:
    """Return the sum or the maximum over a group, ``"sum"`` or ``"max"``. Traced by torch.compile.

    Raises:
        RankError: on the CPU, where a rank is gone or has not answered in so many seconds. On other devices
            nothing waits here, and the group's own time-out counts.
    """
    return all_reduce_pair([(tensor, operation)], group, timeout)[0]


def all_reduce_pair(parts: Sequence[tuple[Tensor, str]], group: Group, timeout: float) -> list[Tensor]:
    """Do what `all_reduce` does for several tensors, all under way at the same time."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional  # noqa: PLC0415 its import is slow

        return [functional.all_reduce(tensor, operation, group) for tensor, operation in parts]
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    results = [tensor.clone(memory_format=torch.contiguous_format) for tensor, _ in parts]
    try:
        works = [
            dist.all_reduce(result, operations[operation], group=group, async_op=True)
            for result, (_, operation) in zip(results, parts, strict=True)
        ]
        for work in works:
            if results[0].device.type == "cpu":
                work.wait(timedelta(seconds=timeout))
            else:
                work.wait()
    except RuntimeError as error:
        raise _explained(group, error) from error
    return results


def share(value: Any, group: Group) -> list[Any]:
    """Return what every rank of a group gives, by rank; anything that can be pickled.

    Raises:
        RankError: where a rank is gone.
    """
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(found, value, group=group)
    except RuntimeError as error:
        raise _explained(group, error) from error
    return found


def rendezvous(group: Group, timeout: float, what: str) -> None:
    """Wait until all ranks of a group are here.

    Raises:
        RankError: names those that have not come in so many seconds.
    """
    missing = _gather_round(group, timeout, what)
    if missing:
        here = dist.get_process_group_ranks(group)
        msg = f"{what}: rank {_listed(missing)} of {len(here)} did not come within {timeout:g} s; "
        raise RankError(msg + "every rank has to make this call, in the same order")


def absent(group: Group, timeout: float) -> list[int]:
    """Return which ranks do not answer a roll call of the living; none, too, if nobody can tell."""
    try:
        return _gather_round(group, timeout, "roll call")
    except RuntimeError:
        return []


def side_group(ranks: Sequence[int], timeout: float) -> Group:
    """Return a new Gloo group, for collectives beside those of training; all its ranks have to come here."""
    try:
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")
    except (RuntimeError, ValueError) as error:
        msg = f"cannot make a Gloo group of {len(ranks)} ranks: {_line(error)}"
        raise RankError(msg) from error


def close(group: Group) -> None:
    """Give up a group; collectives that wait in it end with an error."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _gather_round(group: Group, timeout: float, what: str) -> list[int]:
    """Tell the store that this rank is here; return who has not come in time."""
    ranks = dist.get_process_group_ranks(group)
    name = f"{what} of {ranks[0]}, {len(ranks)}, {group.group_name}"
    number = _rounds[name] = _rounds.get(name, 0) + 1
    # the public way to a store is to have made it oneself
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    key = f"gradiometer/{name}/{number}"
    store.set(f"{key}/{dist.get_rank()}", "here")
    if store.add(f"{key}/count", 1) == len(ranks):
        store.set(f"{key}/all", "here")
    for _ in _until(timeout):
        if store.check([f"{key}/all"]):
            return []
    return [rank for rank in ranks if not store.check([f"{key}/{rank}"])]


def _until(timeout: float) -> Iterator[None]:
    """Yield at growing intervals until the time is over, and once then."""
    end, pause = time.monotonic() + timeout, _PAUSE
    while (left := end - time.monotonic()) > 0:
        yield
        # not by waiting in the store: other threads of this process may need it
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    yield


def _explained(group: Group, error: RuntimeError) -> RankError:
    missing = absent(group, 5.0)
    who = f"rank {_listed(missing)} does not answer" if missing else "a rank does not answer"
    return RankError(f"{who}: {_line(error)}")


def _listed(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_NAMED]))
    return f"{some} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else some


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
