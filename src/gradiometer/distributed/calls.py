"""Check that all ranks make the same call, by rows of the maximum that a reduction takes anyway."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import number
from gradiometer.distributed import collectives
from gradiometer.distributed.rendezvous import SAME_CALLS, RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed.agreement import Agreement

# number of distinct calls: together with a 32-bit hash they fit exactly into a float64
_MAX_CALLS: Final = 1 << 20
# seconds for ranks to report their calls, once these differ
_REPORT_TIMEOUT: Final = 10.0

# the arguments that must be the same on all ranks; the first two may be tensors
ARGUMENTS: Final = ("max_norm", "inv_scale", "norm_type", "vanishing", "exploding", "dead", "skip_nonfinite")


class StateDigest(NamedTuple):
    """Stands for an argument that is a module: the ranks compare a number that its state determines.

    ``number``: 0-d, an integer that float64 can hold. ``name``: of the module's class.
    """

    number: Tensor
    name: str


class Call(NamedTuple):
    """A call of `Ranks.reduce`; ``failure``: the error because of which this rank has no columns."""

    caller: str
    arguments: Mapping[str, Any]
    failure: Exception | None


class CallChecker:
    """Checks that all ranks of an agreement make the same reductions; ``number``: of calls so far."""

    def __init__(self) -> None:
        self.number = 0

    def rows(self, agreement: Agreement, call: Call, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the maximum: its call ``(1, 2)`` and the arguments ``(A, 2) float64``.

        A row holds a range's lower end and its negative upper end; an argument that is absent counts as 0.
        """
        low, high = self._range(agreement.digest, call)
        # created on the device, without a copy
        ends = torch.cat([like.new_full((1, 1), low), like.new_full((1, 1), -high)], dim=1)
        values = torch.stack([_number(call.arguments.get(name, 0.0), like) for name in ARGUMENTS])
        return ends, torch.stack([values, -values], dim=1)

    def _range(self, digest: int, call: Call) -> tuple[float, float]:
        """Return a range of integers, exact in float64; it overlaps those of ranks that make the same call.

        In a compiled function calls are not distinguished: its range overlaps that of any call in eager
        mode.
        """
        first = digest * _MAX_CALLS
        if call.failure is not None:
            # empty: it overlaps no other range
            return float(first + _MAX_CALLS), -1.0
        if torch.compiler.is_compiling():
            return float(first), float(first + _MAX_CALLS - 1)
        self.number += 1
        code = float(first + zlib.crc32(f"{self.number} {call.caller}".encode()) % _MAX_CALLS)
        return code, code

    def error(self, agreement: Agreement, call: Call) -> Exception:
        """Return an error that names the differing calls. All eager ranks call it: all see the same rows."""
        number, self.number = self.number, 0
        arguments = {name: _text(value) for name, value in call.arguments.items()}
        failure = None if call.failure is None else str(call.failure)
        own = _Report(number, call.caller, agreement.digest, arguments, failure)
        timeout = min(agreement.timeout, _REPORT_TIMEOUT)
        try:
            reports = collectives.share(own, agreement.group, timeout, "reduce")
        except RankError as error:
            # for example, ranks in compiled functions do not come here: nothing is raised there
            return call.failure or RankError(
                f"reduce: the ranks made different calls, and some did not report theirs; {error}"
            )
        text = _difference([_Report(*report) for report in reports], agreement.global_ranks)
        return call.failure or RankError(f"reduce: {text}")


def differ(rows: Tensor) -> Tensor:
    """Return which of the merged rows differ between ranks, ``(1 + A,) bool``."""
    return rows[:, 0] > -rows[:, 1]


def _number(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, StateDigest):
        value = value.number
    if not isinstance(value, Tensor):
        return number(value, like.device)
    value = value.detach().to(like.device, like.dtype, non_blocking=True).reshape(())
    # a maximum may drop NaN
    return torch.where(value.isnan(), torch.finfo(like.dtype).min, value)


class _Report(NamedTuple):
    """What a rank reports of its call to the others, once they know that a call differs."""

    number: int
    caller: str
    # hash of the tensors that its ranks have agreed on
    digest: int
    # as text; a tensor on another device is only named, since nothing waits for it
    arguments: dict[str, str]
    # why the rank has failed, or None
    failure: str | None


def _text(value: Any) -> str:
    if isinstance(value, StateDigest):
        state = "" if value.number.device.type != "cpu" else f" with settings and state {int(value.number):x}"
        return f"{value.name}{state}"
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return f"a tensor on {value.device}"
    return repr(value if isinstance(value, bool) else float(value))


def _difference(calls: Sequence[_Report], ranks: Sequence[int]) -> str:
    """Return how the calls of these ranks differ, or which rank has failed."""
    for rank, call in zip(ranks, calls, strict=True):
        if call.failure is not None:
            return f"rank {rank} failed: {call.failure}"
    first = calls[0]
    other = next((index for index, call in enumerate(calls) if call != first), 0)
    theirs = calls[other]
    here, there = f"rank {ranks[0]}", f"rank {ranks[other]}"
    names = [name for name in ARGUMENTS if first.arguments.get(name) != theirs.arguments.get(name)]
    if first.caller != theirs.caller:
        text = f"{there} called {theirs.caller}, but {here} called {first.caller}"
    elif first.digest != theirs.digest:
        text = f"{there} and {here} called {first.caller} with gm.Ranks of different models"
    elif names:
        own, its = (f"{names[0]}={call.arguments.get(names[0])}" for call in (first, theirs))
        text = f"{there} called {first.caller} with {its}, but {here} with {own}"
    else:
        text = f"{there} is at call {theirs.number} of its gm.Ranks, but {here} is at call {first.number}"
    return f"{text}; {SAME_CALLS}"


def differing_calls(origin: int) -> RankError:
    """Return the error for columns that `Ranks.reduce` has set to NaN, with this ``origin``."""
    first = -4 - origin
    if first < 0:
        return RankError(f"reduce: the ranks made different calls; {SAME_CALLS}")
    return RankError(f"reduce: {ARGUMENTS[first]} differs between ranks; pass the same value on all ranks")
