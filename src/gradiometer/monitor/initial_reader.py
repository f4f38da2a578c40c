"""Read the weights by rows and columns once, when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gradiometer.ops import is_capturing
from gradiometer.recorder import InitialValues
from gradiometer.stats import Pending
from gradiometer.stats.line_stats import measure_weights, values_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from gradiometer.recorder import Recorder
    from gradiometer.stats.line_stats import WeightValues

# elements on a CPU, where reading them takes the time of the run: some 0.1 s. Larger models are left out
_LARGE: Final = 2**22


class InitialReader:
    """Starts a copy of what is known of the weights' lines to the host, and takes it when it has arrived.

    It never waits, and looks once. Sharded parameters and those of other devices are left out, and so are
    models on a CPU with many elements.
    """

    def __init__(self) -> None:
        self._pending: Pending[list[WeightValues]] | None = None
        self._has_looked = False
        self._is_pretrained = False
        self._values = InitialValues()

    def start(self, modules: Mapping[str, nn.Module], recorder: Recorder) -> None:
        """Begin to read the weights, unless that was done before."""
        device = recorder.ring.device
        if self._has_looked or not modules or is_capturing(device):
            return
        self._has_looked = True
        weights = weights_of(modules, device=device)
        if device.type == "cpu" and sum(x.numel() for _, x in weights) > _LARGE:
            return
        with recorder.in_order():
            read, values = measure_weights(weights)
            if read:
                self._pending = Pending([values], lambda host: values_of(read, host[0]))
        self._is_pretrained = any(_is_pretrained(module) for module in modules.values())

    def read(self) -> InitialValues:
        """Return what has arrived."""
        if self._pending is not None and self._pending.ready():
            weights, self._pending = tuple(self._pending.result()), None
            norms = [x for x in weights if x.weight.kind == "norm" and "bias" not in x.weight.name]
            varied = sum(x.std > 0 for x in norms)
            self._values = InitialValues(weights, self._is_pretrained or varied * 2 > len(norms) > 0)
        return self._values


def _is_pretrained(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    names = [getattr(config, name, None) for name in ("name_or_path", "_name_or_path")]
    if any(isinstance(name, str) and name for name in names):
        return True
    # adapters on a frozen model
    return any(not p.requires_grad for p in model.parameters() if p.dim() > 1)
