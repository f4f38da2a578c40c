"""Find out which ranks differ, once all ranks know that some do; all ranks call these functions together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gradiometer import distributed
from gradiometer.distributed import RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed import Ranks
    from gradiometer.recorder import StepRecord

# tensors of a step of which ranks exchange fingerprints, at most, if copies differ
_COMPARED: Final = 64


def differing_copies(
    ranks: Ranks, group: Any, found: Mapping[int, Sequence[str]], steps: Sequence[StepRecord]
) -> dict[int, dict[str, str]]:
    """Return which ranks are in the minority, by the index of the step and the name of the weight.

    Args:
        ranks: the agreement of the ranks.
        group: the process group.
        found: the weights whose copies differ, by the index of the step; the same on all ranks.
        steps: this rank's steps.
    """
    if not found:
        return {}
    own = {str(index): steps[index].bits_of("weights", names[:_COMPARED]) for index, names in found.items()}
    shared = distributed.share(own, group, ranks.timeout, "compare copies of weights")
    return {
        index: {
            name: distributed.divergence_text(ranks, name, [each[str(index)].get(name) for each in shared])
            for name in names[:_COMPARED]
        }
        | dict.fromkeys(names[_COMPARED:], "copies differ between ranks")
        for index, names in found.items()
    }


def step_difference(ranks: Ranks, group: Any, steps: Sequence[StepRecord]) -> RankError:
    """Return the error for ranks that are in different steps.

    Args:
        ranks: the agreement of the ranks.
        group: the process group.
        steps: this rank's steps.
    """
    numbers = distributed.share([step.step for step in steps], group)
    rank = next((rank for rank, given in enumerate(numbers) if given != numbers[0]), 0)
    pairs = zip(numbers[rank], numbers[0], strict=True)
    there, here = next(((a, b) for a, b in pairs if a != b), (numbers[rank][0], numbers[0][0]))
    first, other = ranks.global_ranks[0], ranks.global_ranks[rank]
    return RankError(
        f"rank {other} is in step {there}, but rank {first} is in step {here}: call advance() once per "
        "step on every rank, and set the same monitor.step"
    )
