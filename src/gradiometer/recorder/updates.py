"""Updates: the change of the weights in a step, from a copy of the weights before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.inputs import is_dtensor, is_partial, placed_like, present
from gradiometer.stats import Snapshot, keep_in_repeats, updates_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import TypeGuard

    from torch import Tensor

    from gradiometer.recorder.recorder import Recorder


class Updates:
    """Measures the updates of the parameters that require a gradient, with a copy of these.

    The copy is the only memory of the size of the weights. A parameter that is unfrozen has updates from the
    next step on. For a DTensor the local shard is measured; a gradient whose values are on other ranks, such
    as a partial sum, is left out. The updates are written into the current step of the recorder.

    ``names``: of the parameters, such as those of one of several optimizers; None for all.

    Attributes:
        step: the copy has the weights before this step.
        snapshot: the copy; None if it does not fit the weights.
        has_begun: whether the weights were copied right before the update of the current step.
        is_measured: whether the updates of the current step were measured.
        is_traced: whether that was in a compiled function.
    """

    def __init__(self, recorder: Recorder, names: Collection[str] | None = None) -> None:
        self._recorder, self._names = recorder, names
        self.snapshot: Snapshot | None = None
        self.step = -1
        self.end_step()
        self.keep(0)
        keep_in_repeats(self)

    def end_step(self) -> None:
        """Begin a step in which nothing was measured."""
        self.has_begun = self.is_measured = self.is_traced = False

    def repeated(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters, and the copies, which compiled steps write."""
        snapshot = self.snapshot
        return self._recorder.parameters_tracked, [] if snapshot is None else list(snapshot.buffers())

    def measure(self, step: int) -> None:
        """Measure a step's updates, with the gradients that are there, if its weights were copied."""
        snapshot = self.snapshot
        if snapshot is not None and self.step == step:
            with self._recorder.in_order():
                self._measure(snapshot)

    def measure_and_keep(self) -> None:
        """Measure the updates since the last copy, and copy the weights: for every step of compiled code."""
        snapshot = self.snapshot
        if snapshot is not None:
            self._measure(snapshot)
            snapshot.update_(self._parameters())

    def _measure(self, snapshot: Snapshot) -> None:
        parameters = snapshot.parameters_in(self._parameters(), "record_updates")
        placed = [
            None if p.grad is None else _placed(name, p.grad, p) for name, p in zip(*parameters, strict=True)
        ]
        grads = present(parameters.names, placed)
        self._recorder.record_updates(updates_of(parameters, snapshot, grads, "record_updates"))

    def keep_for(self, step: int, every: int) -> None:
        """Copy the weights if the step is due."""
        if step % every == 0:
            self.keep(step)

    def keep(self, step: int) -> None:
        """Copy the weights as they are before ``step``."""
        self._keep({name: p for name, p in self._parameters().items() if p.requires_grad}, step)

    def keep_new(self, step: int) -> None:
        """Copy the weights if more of them require a gradient now, or in other dtypes: after compiled code.

        Those that were kept before stay: each other copy compiles that code again.
        """
        kept = set() if self.snapshot is None else set(self.snapshot.names)
        trained = {name: p for name, p in self._parameters().items() if p.requires_grad or name in kept}
        if not _fits(self.snapshot, trained):
            self._keep(trained, step)

    def _keep(self, trained: dict[str, Tensor], step: int) -> None:
        # if anything fails, such as a copy of weights with another shape, the next copy is a new one
        snapshot, self.snapshot = self.snapshot, None
        with self._recorder.in_order():
            if _fits(snapshot, trained):
                snapshot.update_(trained)
            else:
                del snapshot
                snapshot = Snapshot(trained)
        self.snapshot, self.step = snapshot, step

    def drop(self) -> None:
        """Forget the copy, which does not fit the weights; the next one is new."""
        self.snapshot = None

    def _parameters(self) -> dict[str, Tensor]:
        recorder, names = self._recorder, self._names
        every = zip(recorder.catalog.names, recorder.parameters_tracked, strict=True)
        return {name: p for name, p in every if names is None or name in names}


def _fits(snapshot: Snapshot | None, trained: dict[str, Tensor]) -> TypeGuard[Snapshot]:
    """Return whether a copy of these parameters can be updated: in a narrower dtype they would be rounded."""
    if snapshot is None or snapshot.names != tuple(trained):
        return False
    return all([x.dtype == p.dtype for x, p in zip(snapshot.buffers(), trained.values(), strict=True)])


def _placed(name: str, grad: Tensor, parameter: Tensor) -> Tensor | None:
    """Return a gradient that is placed like its parameter; None if that needs other ranks."""
    if not is_dtensor(type(parameter)) and not is_dtensor(type(grad)):
        return grad
    try:
        placed = placed_like(name, grad, parameter, "record_updates")
    except TypeError:
        return None
    return None if is_dtensor(type(placed)) and is_partial(placed) else placed
