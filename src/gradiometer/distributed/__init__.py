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
from gradiometer.distributed.implicit_ranks import (
    agreed,
    layout_here,
    ranks_for,
)
from gradiometer.distributed.process_groups import (
    close,
    group_of,
    is_active,
    ranks_of,
    side_group,
)
from gradiometer.distributed.ranks import (
    Ranks,
)
from gradiometer.distributed.rendezvous import (
    RankError,
)
from gradiometer.distributed.sharding import (
    UNKNOWN,
    Layout,
    plain_layout,
)

__all__ = [
    "UNKNOWN",
    "Layout",
    "RankError",
    "Ranks",
    "agreed",
    "all_reduce",
    "all_reduce_pair",
    "close",
    "group_of",
    "is_active",
    "layout_here",
    "plain_layout",
    "ranks_for",
    "ranks_of",
    "rendezvous",
    "share",
    "side_group",
    "tell",
    "whole",
]
