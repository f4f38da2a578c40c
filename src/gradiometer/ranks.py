"""Many ranks: statistics of what each holds -> those of the whole model, by one sum and one maximum."""

from __future__ import annotations

import re
import weakref
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer import derived, distributed
from gradiometer.agreement import Agreement, DisagreementError, Member, agree
from gradiometer.distributed import RankError
from gradiometer.inputs import has_float64, named_parameters
from gradiometer.layout import Holding, Layout, Mesh, is_dtensor, layout_of, local_shard
from gradiometer.schema import NUM_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed import Group
    from gradiometer.inputs import Parameters

__all__ = ["Ranks", "agreed", "is_active", "layout_here", "ranks_for"]

# calls of reduce that are told apart: beside a hash of 32 bits they fit into an exact float64
_CALLS = 1 << 20

is_active = distributed.is_active


class Ranks:
    """What the ranks of a job have agreed on: the rows of all tensors, and which rank counts what.

    All ranks make it at the same place, once, outside of a compiled step: they compare what they have, and
    find one order of all names. Then ``collect_grads(model, reduce=ranks)``, or ``stats.reduce(ranks)``,
    merges what every rank has measured with one sum and one maximum over the group, ``(T, 7)`` and
    ``(T + 1, 2)`` float64, whatever the model. A rank that has no gradient of a tensor, or no such tensor,
    adds nothing, and waits for nobody.

    Raw columns merge over the dimensions of a mesh in which a tensor is sharded. Of copies, as in
    replicated dimensions and of plain tensors, the first rank's counts.

    Args:
        model: this rank's part: what `gradiometer.collect_grads` takes.
        group: the ranks, a process group or a device mesh; None: all.
        shards: of plain tensors that are not the same on each rank: a regular expression that is searched
            in the name -> the process group (None: all ranks) whose ranks hold different parts, such as
            experts, or shards that are no DTensors.
        timeout: seconds to wait for other ranks: here, and in each reduction on the CPU.

    Attributes:
        names: T rows, on each rank the same.
        local_names: L tensors of this rank, in its model's order.
        rank, size: this rank's place in the group, and how many there are.

    Raises:
        RankError: on every rank, where they disagree, naming the first difference; where one does not come.

    >>> import torch, gradiometer as gm
    >>> gm.Ranks(torch.nn.Linear(2, 1))  # in a process of its own
    <Ranks: rank 0 of 1, 2 tensors, 2 of them here>
    """

    def __init__(
        self,
        model: Parameters,
        *,
        group: Any = None,
        shards: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            msg = f"Ranks(timeout={timeout!r}): seconds, above 0"
            raise ValueError(msg)
        names, tensors = named_parameters(model, "Ranks")
        home = next((t.device for t in tensors if has_float64(t.device) and t.device.type != "cpu"), None)
        self._agree(_with_shards(layout_of(names, tensors), shards or {}), group, timeout, home)

    @classmethod
    def of_layout(cls, layout: Layout, *, group: Any = None, timeout: float = 60.0) -> Ranks:
        """Agree on tensors of which there is a layout."""
        self = cls.__new__(cls)
        self._agree(layout, group, timeout, None)
        return self

    def _agree(self, layout: Layout, group: Any, timeout: float, home: torch.device | None) -> None:
        self.layout = layout
        self.local_names = layout.names
        self.timeout = float(timeout)
        self.group: Group = None
        self.rank, self.global_ranks = 0, [0]
        if group is not None or distributed.is_active():
            self.group = distributed.group_of(group)
            self.rank, self.global_ranks = distributed.ranks_of(self.group)
        self.size = len(self.global_ranks)
        self.agreement = _exchange(layout, self.group, self.size, self.timeout)
        self.names = self.agreement.names
        rows = {name: row for row, name in enumerate(self.names)}
        # where this rank's tensors are among all rows
        self._rows = [rows[name] for name in self.local_names]
        self._places = {name: place for place, name in enumerate(self.local_names)}
        counted = self.agreement.counts(self.rank)
        self._counts_all = all(counted)
        self._counted = torch.tensor(counted, dtype=torch.bool, device=home).unsqueeze(1)
        self._calls = 0
        # the same on all ranks
        self._hash = zlib.crc32(b"".join(self.agreement.layouts))

    def __repr__(self) -> str:
        """Return one line."""
        here = len(self.local_names)
        return f"<Ranks: rank {self.rank} of {self.size}, {len(self.names)} tensors, {here} of them here>"

    def where(self, name: str, rank: int) -> str:
        """Return where a rank stands in the mesh of a tensor: ``rank 5, dp_shard 1 of 4, tp 0 of 2``."""
        return self.agreement.where(self.names.index(name), rank)

    def to_rows(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        """Return this rank's contribution to all rows: ``(len(names), ...) -> (T, ...)``; 0 is nothing.

        Raises:
            ValueError: for a name that is none of this rank's.
        """
        if names != self.local_names:
            unknown = [name for name in names if name not in self._places]
            if unknown:
                msg = (
                    f"reduce: {unknown[0]!r} was not there when the ranks agreed; make gm.Ranks anew, on all"
                )
                raise ValueError(msg)
            places = [self._places[name] for name in names]
            columns = derived.spread(columns, places, len(self.local_names))
        if not self._counts_all:
            counted = self._counted.to(columns.device, non_blocking=True)
            # not by a product: a sum of squares may be inf
            columns = torch.where(counted, columns, 0.0)
        return derived.spread(columns, self._rows, len(self.names))

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this one in `reduce`, that it has failed."""
        if self.size > 1 and not torch.compiler.is_compiling():
            nothing = torch.zeros((0, NUM_COLUMNS), dtype=torch.float64, device=self._counted.device)
            with suppress(Exception):
                self.reduce((), nothing, failure=error)

    def reduce(
        self, names: tuple[str, ...], columns: Tensor, *, failure: Exception | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the columns of all rows, merged over the ranks, and where what is not finite was found.

        At most two collectives. Every rank has to call it, in the same order; where one calls something
        else, it is an error on every rank: at once on the CPU; on other devices, where nothing waits, the
        columns are NaN, which ``materialize`` refuses.

        Args:
            names: rows of this rank's tensors; those without a row add nothing.
            columns: their ``(len(names), C) float64``.
            failure: why this rank has nothing to tell, and never will.

        Returns:
            ``(T, C) float64``, and ``(T,) float64``: the first rank, by its place in the group, that has a
            NaN or Inf in its part; -1: none.

        Raises:
            RankError: where a rank does something else, or does not answer.
            ValueError: for a name that is none of this rank's.
        """
        try:
            mine = self.to_rows(names, columns)
        except ValueError as error:
            if torch.compiler.is_compiling() or self.size == 1:
                raise
            # the others wait for this rank
            failure = error
            mine = columns.new_zeros((len(self.names), columns.shape[1]))
        bad = derived.value(mine, "n_nonfinite") > 0
        code = torch.where(bad, float(self.size - self.rank), 0.0).unsqueeze(1)
        if self.size == 1:
            return mine, torch.where(bad, 0.0, -1.0)
        sums, tops = derived.by_merge(mine)
        mark = self._mark(failure)
        # filled in on the device: nothing is copied there
        check = torch.cat([code.new_full((1, 1), mark), code.new_full((1, 1), -mark)], dim=1)
        tops = torch.cat([torch.cat([tops, code], dim=1), check])
        sums, tops = distributed.all_reduce_pair([(sums, "sum"), (tops, "max")], self.group, self.timeout)
        return self._merged(sums, tops, failure)

    def _merged(self, sums: Tensor, tops: Tensor, failure: Exception | None) -> tuple[Tensor, Tensor]:
        rows = len(self.names)
        agree_here = tops[rows, 0] == -tops[rows, 1]
        origin = torch.where(tops[:rows, 1] > 0, self.size - tops[:rows, 1], -1.0)
        merged = torch.cat([sums, tops[:rows, :1]], dim=1)
        if not torch.compiler.is_compiling() and tops.device.type == "cpu":
            if not bool(agree_here):
                raise self._difference(failure) from failure
        else:
            merged = torch.where(agree_here, merged, torch.nan)
        if failure is not None:
            raise failure
        return merged, origin

    def _mark(self, failure: Exception | None) -> float:
        """Return a number that is the same on all ranks if they do the same; exact in float64."""
        if torch.compiler.is_compiling():
            return float(self._hash * _CALLS)
        self._calls += 1
        calls = _CALLS - 1 if failure is not None else self._calls % (_CALLS - 1)
        return float(self._hash * _CALLS + calls)

    def _difference(self, failure: Exception | None) -> Exception:
        """Find out which rank does what. All ranks come here, as all see the same mark."""
        told = distributed.share((self._calls, None if failure is None else str(failure)), self.group)
        for rank, (_, text) in enumerate(told):
            if text is not None:
                return failure or RankError(f"reduce: rank {self.global_ranks[rank]} failed: {text}")
        calls = [count for count, _ in told]
        other = next((rank for rank, count in enumerate(calls) if count != calls[0]), 0)
        # from here on they are together again
        self._calls = max(calls)
        return RankError(
            f"reduce: rank {self.global_ranks[other]} is at call {calls[other]} of these Ranks, and rank "
            f"{self.global_ranks[0]} at call {calls[0]}: every rank has to reduce the same, in the same order"
        )

    def settle(self, grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank holds of each gradient, placed as its parameter is.

        Summands that the ranks have not added up, such as of a normalization under sequence parallelism, are
        added up first: all of one mesh and dtype in one collective. The gradient itself stays as it is. All
        ranks of its mesh have to come here.
        """
        if not any([is_dtensor(kind) for kind in {type(grad) for grad in grads}]):
            return list(grads)
        shards: list[Tensor] = []
        summands: dict[Any, list[int]] = {}
        for grad, parameter in zip(grads, parameters, strict=True):
            like, places = _summed(grad, parameter)
            if places:
                key = (grad.device_mesh, places, grad.dtype)  # type: ignore[attr-defined]
                summands.setdefault(key, []).append(len(shards))
            shards.append(local_shard(like) if is_dtensor(type(like)) else like)
        for (mesh, places, _), indices in summands.items():
            flat = torch.cat([shards[i].reshape(-1) for i in indices])
            for place in places:
                flat = distributed.all_reduce(flat, "sum", mesh.get_group(place), self.timeout)
            sizes = [shards[i].numel() for i in indices]
            for i, part in zip(indices, flat.split(sizes), strict=True):
                shards[i] = part.view(shards[i].shape)
        return shards


def agreed(layout: Layout, group: Any = None) -> Ranks:
    """Return the agreement on a layout, made the first time; all ranks come here at the same time."""
    key = (layout, group)
    if key not in _AGREED:
        while len(_AGREED) >= _KEPT:
            _AGREED.pop(next(iter(_AGREED)))
        _AGREED[key] = Ranks.of_layout(layout, group=group)
    return _AGREED[key]


def ranks_for(reduce: Any, what: str) -> Ranks | None:
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


def layout_here(names: tuple[str, ...], tensors: Sequence[Tensor]) -> Layout | None:
    """Return the layout of parameters, kept while they are the same; None where there is one rank."""
    if torch.compiler.is_compiling() or not distributed.is_active():
        return None
    key = (names, tuple([id(tensor) for tensor in tensors]))
    layout, refs = _LAYOUTS.get(key, (None, ()))
    # an id may have become another tensor's
    if layout is None or not all([ref() is tensor for ref, tensor in zip(refs, tensors, strict=True)]):
        while len(_LAYOUTS) >= _KEPT:
            _LAYOUTS.pop(next(iter(_LAYOUTS)))
        layout = layout_of(names, tensors)
        _LAYOUTS[key] = (layout, tuple([weakref.ref(tensor) for tensor in tensors]))
    return layout


# models in a process
_KEPT = 8
_AGREED: dict[tuple[Layout, Any], Ranks] = {}
_LAYOUTS: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[Layout, tuple[weakref.ref[Tensor], ...]]] = {}


def _exchange(layout: Layout, group: Group, size: int, timeout: float) -> Agreement:
    """Tell the others what is here, hear what they have, and agree; on each rank the same."""
    mine = Member(layout.digest, layout.coordinates)
    if size == 1:
        return agree([mine], {layout.digest: layout})
    distributed.rendezvous(group, timeout, "gm.Ranks")
    members: list[Member] = [Member(*told) for told in distributed.share(tuple(mine), group)]
    # most ranks have the same: only the first of each kind tells all
    rank, _ = distributed.ranks_of(group)
    first = [member.digest for member in members].index(layout.digest) == rank
    layouts = {told.digest: told for told in distributed.share(layout if first else None, group) if told}
    try:
        return agree(members, layouts)
    except DisagreementError as error:
        msg = f"gm.Ranks: the ranks differ: {error}"
        raise RankError(msg) from None


def _with_shards(layout: Layout, shards: Mapping[str, Any]) -> Layout:
    """Return the layout in which plain tensors that are cut have a mesh of their own."""
    holdings, meshes = list(layout.holdings), list(layout.meshes)
    for pattern, group in shards.items():
        size, rank = 1, 0
        if group is not None or distributed.is_active():
            rank, ranks = distributed.ranks_of(distributed.group_of(group))
            size = len(ranks)
        found = False
        for place, name in enumerate(layout.names):
            if re.search(pattern, name) and holdings[place].mesh < 0:
                holdings[place] = Holding(None, holdings[place].dtype, len(meshes), ("S",))
                found = True
        if found:
            meshes.append(Mesh((pattern,), (size,), (rank,)))
    return replace(layout, holdings=tuple(holdings), meshes=tuple(meshes))


def _summed(grad: Any, parameter: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Return the gradient as its parameter is placed, and the dimensions of the mesh to add it up over."""
    if (
        not (is_dtensor(type(grad)) and is_dtensor(type(parameter)))
        or grad.placements == parameter.placements
    ):
        return grad, ()
    pairs = list(zip(grad.placements, parameter.placements, strict=True))
    moved = tuple([i for i, (now, then) in enumerate(pairs) if now != then])
    if all([str(pairs[i][0]) == "P(sum)" and pairs[i][1].is_replicate() for i in moved]):
        return grad, moved
    with torch.no_grad():
        return grad.redistribute(placements=parameter.placements), ()
