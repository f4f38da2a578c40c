"""End the steps of a GradientAgreement, and read its cosines when they have arrived on the host."""

from __future__ import annotations

from collections import deque
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

from gradiometer.control import GradientAgreement
from gradiometer.distributed import RankError
from gradiometer.recorder import AgreementLook
from gradiometer.stats import Pending

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.control import GradientCosines

# looks that are kept, more than arrive in one step
_KEPT: Final = 32


class AgreementReader:
    """Reads the looks of a run; it does nothing without an agreement.

    Attributes:
        agreement: None without one, and after a rank did not respond.
        looks: the last ones that have arrived, in the order of their steps.
    """

    def __init__(self, agreement: GradientAgreement | None) -> None:
        if agreement is not None and not isinstance(agreement, GradientAgreement):
            msg = "Monitor(agreement=...): expected gm.GradientAgreement(model), got "
            raise TypeError(f"{msg}{type(agreement).__name__}")
        self.agreement = agreement
        self.looks: tuple[AgreementLook, ...] = ()
        self._waiting: deque[Pending[AgreementLook]] = deque()

    def note(self) -> None:
        """Measure the averaged gradients, where they are recorded."""
        if self.agreement is not None:
            self.agreement.add_averaged()

    def end(self, step: int) -> dict[str, Tensor]:
        """End a step, and return its scalars. Waits for other ranks on the CPU, as an all-reduce does."""
        agreement = self.agreement
        if agreement is None:
            return {}
        is_due = agreement.is_due
        try:
            found = agreement.step()
        except RankError:
            # one wait is enough
            self.agreement = None
            raise
        if is_due:
            self._waiting.append(_copied(step, agreement, found))
        while self._waiting and self._waiting[0].ready():
            self.looks = (*self.looks[1 - _KEPT :], self._waiting.popleft().result())
        return agreement.scalars(found) if is_due else {}

    def release(self) -> None:
        """Forget the agreement, which has the model."""
        self.agreement = None
        self._waiting.clear()


def _copied(step: int, agreement: GradientAgreement, found: GradientCosines) -> Pending[AgreementLook]:
    projections, names, has_ranks = agreement.projections, agreement.tensors, agreement.ranks is not None

    def look(host: list[Any]) -> AgreementLook:
        number, twins, cosines, rank_twins, differing = [x.tolist() for x in host]
        ranks = (tuple(rank_twins), tuple(cosines), tuple(compress(names, differing))) if has_ranks else ()
        return AgreementLook(step, projections, tuple(twins[: int(number)]), *ranks)

    tensors = [found.micro_batches, found.twins, found.rank_cosines, found.rank_twins, found.differing]
    return Pending(tensors, look)
