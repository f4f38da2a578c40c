"""Exchange the shardings of all ranks, at setup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.distributed import collectives, process_groups
from gradiometer.distributed.global_plan import DisagreementError, GlobalPlan, Member, make_global_plan
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.sharding import Sharding

if TYPE_CHECKING:
    import torch

    from gradiometer.distributed.process_groups import Group


def exchange_shardings(
    sharding: Sharding, home: torch.device | None, group: Group, size: int, timeout: float
) -> tuple[GlobalPlan, list[str]]:
    """Exchange shardings with the other ranks and agree on one plan, the same on each rank.

    Returns the global plan, and the types of devices other than the CPU that hold the ranks' columns.
    """
    members, shardings = [Member(sharding.digest, sharding.coordinates)], {sharding.digest: sharding}
    kinds: list[str] = []
    if size > 1:
        mine = (sharding.digest.hex(), sharding.coordinates, None if home is None else home.type)
        told = collectives.share(mine, group, timeout, "gm.Ranks")
        members = [
            Member(
                bytes.fromhex(digest), tuple([None if place is None else tuple(place) for place in places])
            )
            for digest, places, _ in told
        ]
        kinds = [kind for *_, kind in told if kind is not None]
        # most ranks have the same sharding: only the first rank with each sharding sends it
        firsts: dict[bytes, int] = {}
        for place, member in enumerate(members):
            firsts.setdefault(member.digest, place)
        is_first = process_groups.ranks_of(group)[0] in firsts.values()
        told = collectives.share(sharding.to_plain() if is_first else None, group, timeout, "gm.Ranks")
        shardings = {digest: Sharding.from_plain(told[place]) for digest, place in firsts.items()}
    try:
        return make_global_plan(members, shardings), kinds
    except DisagreementError as error:
        raise RankError(f"gm.Ranks: the ranks disagree: {error}") from None
