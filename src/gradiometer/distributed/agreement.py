"""What ranks agree on: the rows of all tensors, and which rank counts which tensor."""

from __future__ import annotations

import weakref
import zlib
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import spread
from gradiometer.distributed import collectives, process_groups
from gradiometer.distributed.global_plan import DisagreementError, GlobalPlan, Member, make_global_plan
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.sharding import Sharding
from gradiometer.inputs import on_device

if TYPE_CHECKING:
    from gradiometer.distributed.process_groups import Group
    from gradiometer.distributed.sharding import ShardSpec


class Agreement:
    """The rows of all ranks' tensors, and this rank's part of them; the attributes are those of `Ranks`.

    ``home``: the device of the columns; None: the CPU, unless other ranks use another device.
    """

    def __init__(self, sharding: Sharding, group: Any, timeout: float, home: torch.device | None) -> None:
        self.sharding = sharding
        self.local_names = sharding.names
        self.timeout = float(timeout)
        # a weak reference: the group ends when torch.distributed destroys it
        self._group: Any = _no_group
        self.rank, self.global_ranks = 0, [0]
        if group is not None or process_groups.is_active():
            live = process_groups.group_of(group)
            self._group = weakref.ref(live)
            self.rank, self.global_ranks = process_groups.ranks_of(live)
        self.size = len(self.global_ranks)
        self.plan, device_types = _exchange(sharding, home, self.group, self.size, self.timeout)
        if home is None and device_types:
            # the others reduce on such a device, so a rank without tensors there has to use one too
            home = torch.device(device_types[0], torch.get_device_module(device_types[0]).current_device())
        self.names = self.plan.names
        # the rows of this rank's tensors
        self._rows = [self.plan.rows[name] for name in self.local_names]
        self._is_whole = self.local_names == self.names
        self._indices = {name: index for index, name in enumerate(self.local_names)}
        counted = self.plan.counts(self.rank)
        self._counts_all = all(counted)
        self.counted = frozenset(compress(self.local_names, counted))
        own = set(compress(self._rows, counted))
        mask = [row in own for row in range(len(self.names))]
        self._counted = torch.tensor(mask, dtype=torch.bool, device=home or "cpu").unsqueeze(1)
        # the same on all ranks
        self.digest = zlib.crc32(b"".join(self.plan.shardings))
        self._checked: Sharding | None = sharding

    @property
    def device(self) -> torch.device:
        """The device of merged columns: that of this rank's model, or the CPU."""
        return self._counted.device

    @property
    def group(self) -> Group:
        """The process group; None if there is one rank and no group.

        Raises:
            RankError: if it was destroyed.
        """
        group = self._group()
        if group is None and self._group is not _no_group:
            raise RankError("the process group of these gm.Ranks was destroyed; create gm.Ranks again")
        return group

    def where(self, name: str, rank: int) -> str:
        """Return a rank's position in the mesh of a tensor: ``rank 5, dp_shard 1 of 4, tp 0 of 2``.

        ``rank`` is its place in the group.
        """
        return self.plan.where(self.plan.rows[name], rank)

    def to_rows(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        """Return this rank's contribution to all rows: ``(len(names), C) -> (T, C)``; 0 adds nothing."""
        columns = self.spread(names, columns)
        if not self._counts_all:
            counted = on_device(self._counted, columns.device)
            # do not multiply by 0: a sum of squares may be inf
            columns = torch.where(counted, columns, columns.new_zeros(()))
        return columns

    def spread(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        """Return the columns of all rows, ``(len(names), C) -> (T, C)``, whether counted here or not."""
        rows = self._rows
        if names != self.local_names:
            unknown = [name for name in names if name not in self._indices]
            if unknown:
                msg = f"reduce: {unknown[0]!r} is not among the tensors that gm.Ranks was created with; pass "
                msg += "the model or mapping that it was created with (model.parameters() has no names), or "
                raise ValueError(msg + "create gm.Ranks again on all ranks")
            rows = [rows[self._indices[name]] for name in names]
        elif self._is_whole:
            return columns
        if columns.device.type != "cpu" or torch.compiler.is_compiling():
            # an index would have to be copied to the device
            return spread(columns, rows, len(self.names))
        every = columns.new_zeros((len(self.names), *columns.shape[1:]))
        return every.index_copy_(0, torch.tensor(rows, dtype=torch.int64, device="cpu"), columns)

    def check(self, sharding: Sharding | None, caller: str) -> None:
        """Reject tensors that differ from the agreement, such as one that was whole and is now sharded."""
        if sharding is None or sharding is self._checked:
            return
        for name, spec in zip(sharding.names, sharding.specs, strict=True):
            index = self._indices.get(name)
            if index is None:
                continue
            then = self.sharding.specs[index]
            if then.shape is not None and _partition(sharding, spec) != _partition(self.sharding, then):
                msg = f"{caller}: {name!r} is {spec}, but was {then} when gm.Ranks was created"
                raise ValueError(msg + "; create gm.Ranks again on all ranks")
        self._checked = sharding


def _no_group() -> None:
    return None


def _partition(sharding: Sharding, spec: ShardSpec) -> tuple[object, ...]:
    """Return the properties that decide how a tensor is merged; not its dtype, which may change."""
    mesh = None if spec.mesh < 0 else sharding.meshes[spec.mesh].shape
    return spec.shape, mesh, spec.placements


def _exchange(
    sharding: Sharding, home: torch.device | None, group: Group, size: int, timeout: float
) -> tuple[GlobalPlan, list[str]]:
    """Return the plan of all ranks, and the types of devices other than the CPU that hold their columns."""
    members, shardings = [Member(sharding.digest, sharding.coordinates)], {sharding.digest: sharding}
    kinds: list[str] = []
    if size > 1:
        mine = (sharding.digest.hex(), sharding.coordinates, None if home is None else home.type)
        gathered = collectives.share(mine, group, timeout, "gm.Ranks")
        members = []
        for digest, places, _ in gathered:
            coordinates = tuple([None if place is None else tuple(place) for place in places])
            members.append(Member(bytes.fromhex(digest), coordinates))
        kinds = [kind for *_, kind in gathered if kind is not None]
        # most ranks have the same sharding: only the first rank with each sharding sends it
        firsts: dict[bytes, int] = {}
        for place, member in enumerate(members):
            firsts.setdefault(member.digest, place)
        is_first = process_groups.ranks_of(group)[0] in firsts.values()
        gathered = collectives.share(sharding.to_plain() if is_first else None, group, timeout, "gm.Ranks")
        shardings = {digest: Sharding.from_plain(gathered[place]) for digest, place in firsts.items()}
    try:
        return make_global_plan(members, shardings), kinds
    except DisagreementError as error:
        raise RankError(f"gm.Ranks: the ranks disagree: {error}") from None
