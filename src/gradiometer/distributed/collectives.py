"""Collectives of `torch.distributed`: sums and maxima over ranks, and which ranks are present.

Ranks use the store of the default process group to agree on something, or to find missing ranks. The store
needs no device, each request to it has a timeout, and a late rank does no harm. Columns are merged by
collectives of the group, each with its own timeout on the CPU.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradiometer.distributed.process_groups import PRESENCE_TIMEOUT, Group, listed, one_line, ranks_of
from gradiometer.distributed.rendezvous import (
    SAME_CALLS,
    SLACK,
    STORE_HOLDER,
    RankError,
    exchange,
    in_time,
    missing_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# seconds between polls of a collective in a background thread, at first and at most
_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02
# seconds between checks whether another rank has given up the collective that this rank waits for
_LOOK: Final = 1.0
_NO_STORE: Final = f"the store of the process group, on {STORE_HOLDER}, does not respond either"

# number of calls in each world, by group and purpose: the same on all ranks of the group
_met: weakref.WeakKeyDictionary[Group, Counter[str]] = weakref.WeakKeyDictionary()
# why groups cannot be used any more
_broken: weakref.WeakKeyDictionary[Group, str] = weakref.WeakKeyDictionary()


class _Call(NamedTuple):
    """A call to all ranks to report that they are present, after a collective was given up.

    ``late``: the number of the collective that has not ended in time. None: one failed, and Gloo accepts no
    further collectives in its group.
    """

    late: int | None = None

    def key(self, group: Group) -> str:
        """Return its key in the store."""
        what = "broken" if self.late is None else f"late/{self.late}"
        return f"gradiometer/{group.group_name}/{what}"


_BROKEN: Final = _Call()


# sums and maxima


def all_reduce(tensor: Tensor, operation: str, group: Group, timeout: float) -> Tensor:
    """Return the sum or the maximum over a group, ``"sum"`` or ``"max"``. Traced by torch.compile.

    On the CPU it waits at most ``timeout`` seconds, and then a few more to find the missing ranks. After
    that the collective stays pending until the group's own timeout. If the last rank arrives earlier, later
    collectives of the group work again, in the same order. The process can exit meanwhile. After an error in
    Gloo, for example because a rank is gone, the group cannot be used any more, and each call raises this
    error. In a compiled function, and on other devices, nothing waits here, and the group's own timeout
    applies.

    Raises:
        RankError: on the CPU, if a rank is gone or has not responded in time, naming the rank if it is
            known; on any device, if the group was destroyed or has no backend for the device.
    """
    return all_reduce_pair([(tensor, operation)], group, timeout)[0]


def all_reduce_pair(parts: Sequence[tuple[Tensor, str]], group: Group, timeout: float) -> list[Tensor]:
    """Do what `all_reduce` does for several tensors, with all collectives pending at the same time."""
    # is_compiling() is also true in other threads than the one that compiles
    if torch.compiler.is_dynamo_compiling():
        from torch.distributed import _functional_collectives as functional  # noqa: PLC0415 its import is slow

        return [functional.all_reduce(tensor, operation, group) for tensor, operation in parts]
    ranks_of(group)
    if group in _broken:
        raise RankError(_broken[group])
    number = _count(group, "collectives")
    results = [tensor.clone(memory_format=torch.contiguous_format) for tensor, _ in parts]
    device = results[0].device
    end = time.monotonic() + timeout
    kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    try:
        works = [
            dist.all_reduce(result, kinds[operation], group=group, async_op=True)
            for result, (_, operation) in zip(results, parts, strict=True)
        ]
        for work in works:
            if device.type != "cpu":
                work.wait()
            elif (call := _given_up(work, end, group, number)) is not None:
                _keep(group, works)
                raise _gone(group, number) if call == _BROKEN else _late(group, number, timeout)
    except RuntimeError as error:
        if isinstance(error, RankError):
            raise
        if f"{device.type}:" not in str(dist.get_backend_config(group)):
            msg = f"the process group has no backend for {device.type}, where the statistics are; "
            raise RankError(msg + "use init_process_group('cpu:gloo,cuda:nccl') to have both") from error
        raise _gone(group, number, f": {one_line(error)}") from error
    return results


def _given_up(work: Any, end: float, group: Group, number: int) -> _Call | None:
    """Wait for a collective on the CPU; return None, or the call to answer if it is given up."""
    late = _Call(number)
    previous: _Call | None = _Call(number - 1)
    while True:
        left = end - time.monotonic()
        if _ends(work, max(min(left, _LOOK), 0.001)):
            # raises the error of a collective that failed
            work.wait()
            return None
        if left <= _LOOK:
            return late
        for call in (_BROKEN, late):
            if _is_called(group, call):
                return call
        if previous is not None and _is_called(group, previous):
            # others gave up the previous collective, which has ended here: report that this rank is present
            _say_here(group, previous)
            previous = None


def _ends(work: Any, seconds: float) -> bool:
    """Wait for at most ``seconds``; return whether a collective has ended."""
    if threading.current_thread() is threading.main_thread():
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=seconds))
    else:
        # a thread that returns from C++ while the interpreter shuts down crashes the process
        end, pause = time.monotonic() + seconds, _PAUSE
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    return bool(work.is_completed())


def _keep(group: Group, works: Sequence[Any]) -> None:
    """Keep a group until its collectives have ended: destroying it, or exiting, would wait for them."""

    def wait(_: Group) -> None:
        while not all([work.is_completed() for work in works]):
            time.sleep(_LOOK)

    threading.Thread(target=wait, args=(group,), daemon=True).start()


# which ranks are present


def share(value: Any, group: Group, timeout: float = 60.0, what: str = "share") -> list[Any]:
    """Return the values that all ranks of a group pass, in the order of the group, as JSON gives them back.

    Either all ranks succeed or all fail: if one is late, every rank raises a RankError, also the late one.
    ``value``: small, as the store holds those of all ranks. ``what``: the name of the call; the ranks of a
    group meet once per call of this name.
    """
    here, ranks = ranks_of(group)
    number = _count(group, what)
    key = f"gradiometer/{group.group_name}/{what}/{number}"
    text = json.dumps(value)
    try:
        missing, values = in_time(
            timeout + 2 * SLACK, lambda: exchange(_store(), key, ranks[here], ranks, text, timeout)
        )
    except RankError:
        raise
    except RuntimeError as error:
        msg = f"{what}: the store of the process group is gone: its process, {STORE_HOLDER}, has exited: "
        raise RankError(msg + one_line(error)) from error
    if missing:
        msg = f"{what}: {_named(missing)} of {len(ranks)} did not arrive within {timeout:g} s; "
        raise RankError(msg + SAME_CALLS)
    return [json.loads(value) for value in values]


def tell(value: Any, place: int, group: Group, timeout: float = 60.0, what: str = "tell") -> Any:
    """Return, on every rank, the value of the rank at this place in a group. The rest is as in `share`."""
    here, _ = ranks_of(group)
    return share(value if here == place else None, group, timeout, what)[place]


def rendezvous(group: Group, timeout: float, what: str) -> None:
    """Wait until all ranks of a group have made this call. The rest is as in `share`."""
    share(None, group, timeout, what)


def _count(group: Group, what: str) -> int:
    counts = _met.setdefault(dist.group.WORLD, Counter())
    name = f"{group.group_name} {what}"
    counts[name] += 1
    return counts[name]


def _store() -> Any:
    # there is no public way to get a store that was created elsewhere
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _late(group: Group, number: int, timeout: float) -> RankError:
    """Call all ranks after a late collective; return an error that names those that did not arrive."""
    missing = _missing(group, number, _Call(number))
    late = f"did not reach this reduction within {timeout:g} s"
    if missing is None:
        return RankError(f"a rank {late}; {_NO_STORE}")
    if missing:
        return RankError(f"{_named(missing)} {late}")
    return RankError(f"a rank {late}, although all ranks respond; {SAME_CALLS}")


def _gone(group: Group, number: int, reason: str = "") -> RankError:
    """Call all ranks after a collective failed, here or elsewhere; return the error to raise."""
    missing = _missing(group, number, _BROKEN)
    if missing is None:
        text = f"a rank does not respond{reason}; {_NO_STORE}"
    elif not missing:
        text = f"a reduction failed{reason}, although all ranks respond; {SAME_CALLS}"
    elif len(missing) == 1:
        text = f"{_named(missing)} does not respond{reason}"
    else:
        # others may be busy elsewhere, and learn of the failure at their next collective
        text = f"at least one of {_named(missing)} is gone or hangs{reason}"
    _broken[group] = text
    return RankError(text)


def _missing(group: Group, number: int, call: _Call) -> list[int] | None:
    """Call all ranks; return those that do not respond, or None if the store does not.

    When something fails, one rank may time out and another may see an error from Gloo. So a rank that
    answers any of these calls is present.
    """
    here, ranks = ranks_of(group)
    calls = [_BROKEN, _Call(number), _Call(number + 1)]
    keys = [each.key(group) for each in sorted(calls, key=lambda each: each != call)]
    try:
        return in_time(  # type: ignore[no-any-return]
            PRESENCE_TIMEOUT + SLACK,
            lambda: missing_ranks(_store(), keys, ranks[here], ranks, PRESENCE_TIMEOUT),
        )
    except RuntimeError:
        return None


def _say_here(group: Group, call: _Call) -> None:
    here, ranks = ranks_of(group)
    key, store = call.key(group), _store()
    with suppress(RuntimeError):
        in_time(_LOOK, lambda: store.set(f"{key}/{ranks[here]}", "here"))


def _is_called(group: Group, call: _Call) -> bool:
    """Return whether others have given up a collective and are looking for missing ranks."""
    store, key = _store(), call.key(group)
    try:
        return bool(in_time(_LOOK, lambda: store.check([key])))
    except RankError:
        # the store hangs, or is only slow: the timeout applies
        return False
    except RuntimeError:
        return 0 in dist.get_process_group_ranks(group)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
