"""Merge statistics over ranks; the only package that imports `torch.distributed`.

All ranks first agree on the names, their order, and which rank counts which tensor. Then one SUM and one MAX
all-reduce merge the columns of all ranks. Nothing here measures a tensor.
"""

from gradiometer.distributed.calls import StateDigest, differing_calls
from gradiometer.distributed.collectives import all_reduce, all_reduce_pair, rendezvous, share, tell
from gradiometer.distributed.comm_hook import register_bucket_hook
from gradiometer.distributed.implicit_ranks import given_ranks, implicit_ranks_for, sharding_here
from gradiometer.distributed.parts import part_of
from gradiometer.distributed.process_groups import close, group_of, is_active, ranks_of, side_group
from gradiometer.distributed.ranks import Ranks
from gradiometer.distributed.redistribution import redistribute
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.replicas import NUM_SUMMED, divergence_text, minority
from gradiometer.distributed.sharding import UNKNOWN, Mesh, Sharding, ShardSpec, plain_sharding, with_shards

__all__ = [
    "NUM_SUMMED",
    "UNKNOWN",
    "Mesh",
    "RankError",
    "Ranks",
    "ShardSpec",
    "Sharding",
    "StateDigest",
    "all_reduce",
    "all_reduce_pair",
    "close",
    "differing_calls",
    "divergence_text",
    "given_ranks",
    "group_of",
    "implicit_ranks_for",
    "is_active",
    "minority",
    "part_of",
    "plain_sharding",
    "ranks_of",
    "redistribute",
    "register_bucket_hook",
    "rendezvous",
    "sharding_here",
    "share",
    "side_group",
    "tell",
    "with_shards",
]
