"""Updates: the change of the weights in a step, from a copy of the weights before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradiometer.inputs import Named, is_dtensor, is_partial, placed_like, present
from gradiometer.stats import Snapshot, keep_in_repeats, updates_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from gradiometer.recorder.recorder import Recorder


class Updates:
    """Measures the updates of the parameters that require a gradient, with a copy of these.

    The copy is the only memory of the size of the weights. A parameter that is unfrozen has updates from the
    next step on. For a DTensor the local shard is measured; a gradient whose values are on other ranks, such
    as a partial sum, is left out. The updates are written into the current step of the recorder.

    ``names``: of the parameters, such as those of one of several optimizers; None for all. ``masters``: by
    the names of parameters, the tensors that the optimizer updates in their place.

    Attributes:
        step: the copy has the weights before this step.
        snapshot: the copy; None if it does not fit the weights.
        has_begun: whether the weights were copied right before the update of the current step.
        is_measured: whether the updates of the current step were measured.
        is_traced: whether that was in a compiled function.
    """

    def __init__(
        self,
        recorder: Recorder,
        names: Collection[str] | None = None,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._recorder, self._names, self._masters = recorder, names, masters or {}
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
        held = [*self._recorder.parameters_tracked, *self._masters.values()]
        return held, [] if snapshot is None else list(snapshot.buffers())

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
            snapshot.keep_(self._weights(snapshot), "Updates")

    def _measure(self, snapshot: Snapshot) -> None:
        weights = self._weights(snapshot)
        names, parameters = weights
        model = self._parameters()
        # the gradient that the optimizer has used
        grads = [model[name].grad if p.grad is None else p.grad for name, p in zip(*weights, strict=True)]
        if any([is_dtensor(kind) for kind in {type(x) for x in (*parameters, *grads)}]):
            every = zip(names, grads, parameters, strict=True)
            grads = [None if grad is None else _placed(name, grad, p) for name, grad, p in every]
        self._recorder.record_updates(updates_of(weights, snapshot, present(names, grads), "record_updates"))

    def keep_for(self, step: int, every: int) -> None:
        """Copy the weights if the step is due."""
        if step % every == 0:
            self.keep(step)

    def keep(self, step: int) -> None:
        """Copy the weights as they are before ``step``."""
        self._keep(self._trained(()), step)

    def keep_new(self, step: int) -> None:
        """Copy the weights if more of them require a gradient now, or in other dtypes: after compiled code.

        Those that were kept before stay: each other copy compiles that code again.
        """
        trained = self._trained(() if self.snapshot is None else set(self.snapshot.names))
        if self.snapshot is None or not self.snapshot.fits(*trained):
            self._keep(trained, step)

    def _keep(self, trained: Named, step: int) -> None:
        # if anything fails, such as a copy of weights with another shape, the next copy is a new one
        snapshot, self.snapshot = self.snapshot, None
        with self._recorder.in_order():
            if snapshot is not None and snapshot.fits(*trained):
                snapshot.keep_(trained, "Updates")
            else:
                del snapshot
                snapshot = Snapshot(dict(zip(*trained, strict=True)))
        self.snapshot, self.step = snapshot, step

    def drop(self) -> None:
        """Forget the copy, which does not fit the weights; the next one is new."""
        self.snapshot = None

    def _parameters(self) -> dict[str, Tensor]:
        recorder, names = self._recorder, self._names
        every = zip(recorder.catalog.names, recorder.parameters_tracked, strict=True)
        return {name: p for name, p in every if names is None or name in names}

    def _weights(self, snapshot: Snapshot) -> Named:
        """Return the parameters in the snapshot."""
        there = {**self._parameters(), **self._masters}
        return Named(snapshot.names, [there[name] for name in snapshot.names])

    def _trained(self, kept: Collection[str]) -> Named:
        """Return the parameters that require a gradient, or were kept."""
        trained = [name for name, p in self._parameters().items() if p.requires_grad or name in kept]
        there = {**self._parameters(), **self._masters}
        return Named(tuple(trained), [there[name] for name in trained])


def _placed(name: str, grad: Tensor, parameter: Tensor) -> Tensor | None:
    """Return a gradient that is placed like its parameter; None if that needs other ranks."""
    if not is_dtensor(type(parameter)) and not is_dtensor(type(grad)):
        return grad
    try:
        placed = placed_like(name, grad, parameter, "record_updates")
    except TypeError:
        return None
    return None if is_dtensor(type(placed)) and is_partial(placed) else placed
