"""Many ranks, and the only place that imports `torch.distributed`.

Each rank's columns come in; columns merged over the ranks go out, by one SUM and one MAX all-reduce, once all
ranks have agreed on the names, on their order and on which rank counts what. Nothing here measures a tensor.
"""

from gradiometer.distributed.collectives import (
    all_reduce,
    all_reduce_pair,
    rendezvous,
    share,
    tell,
    whole,
)
from gradiometer.distributed.implicit_ranks import given_ranks, implicit_ranks_for, sharding_here
from gradiometer.distributed.process_groups import close, group_of, is_active, ranks_of, side_group
from gradiometer.distributed.ranks import Ranks
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.settle import settle
from gradiometer.distributed.sharding import UNKNOWN, Sharding, plain_sharding

__all__ = [
    "UNKNOWN",
    "RankError",
    "Ranks",
    "Sharding",
    "all_reduce",
    "all_reduce_pair",
    "close",
    "given_ranks",
    "group_of",
    "implicit_ranks_for",
    "is_active",
    "plain_sharding",
    "ranks_of",
    "rendezvous",
    "settle",
    "sharding_here",
    "share",
    "side_group",
    "tell",
    "whole",
]
