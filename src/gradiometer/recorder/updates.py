"""Updates: the change of the weights in a step, from a copy of the weights before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradiometer.inputs import Named, local_shards

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.recorder.recorder import Recorder

__all__ = ["Updates"]


class Updates:
    """Measures ``w - w before the step`` for the parameters that require a gradient.

    The difference is computed in the copy itself, in the parameter's dtype, and the copy is then renewed; so
    the only extra memory is one copy of the weights. For a DTensor the local shard is measured. 8-bit
    parameters support no arithmetic and have no updates here.

    Args:
        recorder: the updates are written into its current step.

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
        # the copy holds the weights before this step
        self._step = -1
        self.keep(0)

    @torch.no_grad()
    def measure(self, step: int, every: int) -> None:
        """Measure a step's updates if the step is due, and copy the weights if the next step is due."""
        try:
            if self._before is not None and self._step == step:
                with self._recorder.in_order():
                    torch._foreach_neg_(self._before)
                    torch._foreach_add_(self._before, self._weights())
                    changed = zip(self._names, self._parameters, self._before, strict=True)
                    self._recorder.record_updates({name: x for name, p, x in changed if p.requires_grad})
        except Exception:
            # the weights may have another shape now, so the next copy is a new one
            self._before = None
            raise
        finally:
            if (step + 1) % every == 0:
                self.keep(step + 1)

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copy the weights as they are before ``step``."""
        room, self._before = self._before, None
        with self._recorder.in_order():
            if room is None:
                room = [weight.detach().clone() for weight in self._weights()]
            else:
                torch._foreach_copy_(room, self._weights())
        self._before, self._step = room, step

    def _weights(self) -> list[Tensor]:
        return local_shards(Named(tuple(self._names), self._parameters), "Updates").tensors
