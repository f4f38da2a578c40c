"""Updates: what a step added to the weights, by a copy of the weights before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.inputs import Named, local_shards

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder.recorder import Recorder

__all__ = ["Updates"]


class Updates:
    """Measures ``w - w before the step`` of the parameters that require a gradient.

    The difference is formed in the copy itself, in the parameter's own dtype, and the copy is then made
    anew: beside one copy of the weights there is nothing. Of a DTensor it is the local shard's. Parameters
    of 8 bits have no arithmetic and no updates here.

    Args:
        recorder: into whose current step they are written.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> recorder = gm.Recorder(model, updates=True)
    >>> updates = Updates(recorder)
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(0.25)
    >>> updates.measure(0, every=1)
    >>> recorder.read()[0].value("abs_max", "updates")
    tensor([0.2500], dtype=torch.float64)
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        tracked = zip(recorder.roster.names, recorder.parameters_tracked, strict=True)
        chosen = [(name, parameter) for name, parameter in tracked if parameter.dtype.itemsize > 1]
        self._names = [name for name, _ in chosen]
        self._parameters = [parameter for _, parameter in chosen]
        self._before: list[Tensor] | None = None
        # the step before which the weights were so
        self._step = -1
        self.keep(0)

    @torch.no_grad()
    def measure(self, step: int, every: int) -> None:
        """Measure the updates of a step that is due, and get ready for the next one, if it is."""
        try:
            if self._before is not None and self._step == step:
                torch._foreach_neg_(self._before)
                torch._foreach_add_(self._before, self._weights())
                changed = zip(self._names, self._parameters, self._before, strict=True)
                self._recorder.record_updates({name: x for name, p, x in changed if p.requires_grad})
        except Exception:
            # the weights have another shape, say: the next copy is a new one
            self._before = None
            raise
        finally:
            if (step + 1) % every == 0:
                self.keep(step + 1)

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the weights as they are before a step."""
        room, self._before = self._before, None
        if room is None:
            room = [weight.detach().clone() for weight in self._weights()]
        else:
            torch._foreach_copy_(room, self._weights())
        self._before, self._step = room, step

    def _weights(self) -> list[Tensor]:
        return local_shards(Named(tuple(self._names), self._parameters), "Updates").tensors
