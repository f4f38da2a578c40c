"""Whether ranks that hold copies of the same weights hold the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.distributed import minority, share
from gradiometer.inputs import named_parameters
from gradiometer.stats.measure import measure, over_ranks_with

if TYPE_CHECKING:
    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.stats.tensor_stats import TensorStats


def check_replicas(model: Parameters, *, reduce: bool | Ranks = True) -> dict[str, tuple[int, ...]]:
    """Compare copies of a model's parameters over the ranks, bit by bit.

    Ranks hold copies of plain tensors, as under DDP, and of DTensors in the replicated dimensions of their
    mesh, as under HSDP and tensor parallelism. One read and two collectives compare the fingerprints of all
    of them; only if copies differ do the ranks exchange fingerprints, to find the ranks in the minority. All
    ranks have to make this call.

    Args:
        model: a module, or parameters as for `gradiometer.collect_weights`.
        reduce: as for `gradiometer.collect_grads`; a `gradiometer.Ranks` saves the agreement in each process.

    Returns:
        The names of the parameters whose copies differ -> the global ranks whose copy differs from that of
        most others. If as many ranks hold one version as another, the version of the lowest rank counts as
        that of most. Empty if all copies are the same, or with one process. The same on all ranks.

    Raises:
        RuntimeError: inside a compiled function; use ``collect_weights(..., fingerprint=True, reduce=ranks)``
            there, and `TensorStats.diverged`.
        TypeError, RankError: as for `gradiometer.collect_weights`.

    >>> import torch, gradiometer as gm
    >>> gm.check_replicas(torch.nn.Linear(2, 1))  # in a process of its own
    {}
    """
    if torch.compiler.is_compiling():
        msg = "check_replicas waits for the result, which a compiled function cannot do; call it outside, or "
        raise RuntimeError(msg + "use collect_weights(model, fingerprint=True, reduce=ranks).diverged")
    named = named_parameters(model, "check_replicas")

    def measured(ranks: Ranks | None) -> tuple[TensorStats, None]:
        del ranks
        return measure(named, "check_replicas", fingerprint=True), None

    stats, _, ranks = over_ranks_with(reduce, named, "check_replicas", measured, fingerprint=True)
    if ranks is None or ranks.size == 1 or stats.local is None:
        return {}
    names = stats.materialize().diverged
    if not names:
        return {}
    own = stats.local.materialize()
    bits = {name: str(own[name].fingerprint) for name in names if name in own}
    told = share(bits, ranks.group, ranks.timeout, "check_replicas")
    return {name: minority(ranks, name, [each.get(name) for each in told]) for name in names}
