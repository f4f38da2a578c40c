"""Check whether a model still has the parameters that its recorder was created with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from gradiometer.inputs import is_dtensor, named_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradiometer.monitor.failures import Failures
    from gradiometer.recorder import Recorder


class ParameterCheck:
    """Reports once which parameters were replaced, added, removed or moved to another device.

    The recorder does not notice such changes. During forward and backward, FSDP replaces each sharded
    parameter by the unsharded one; this does not count as a replacement.

    If the model is neither a module nor a mapping of names to modules, only moves are detected.
    """

    def __init__(self, model: object, recorder: Recorder, failures: Failures) -> None:
        self._modules = modules_of(model)
        self._recorder = recorder
        self._failures = failures
        self._devices = [parameter.device for parameter in recorder.parameters_tracked]
        self._has_reported = False

    def __call__(self) -> None:
        """Check the parameters, and report the first change."""
        if self._has_reported:
            return
        tracked = self._recorder.parameters_tracked
        names = self._recorder.names_tracked
        known = dict(zip(names, tracked, strict=True))
        now = [(name, _sharded(p, known.get(name))) for name, p in _parameters(self._modules)]
        if now and not (
            len(now) == len(tracked) and all([a is b for (_, a), b in zip(now, tracked, strict=True)])
        ):
            ids = {id(parameter) for parameter in tracked}
            self._report([name for name, parameter in now if id(parameter) not in ids], "replaced or added")
            present = {id(parameter) for _, parameter in now}
            gone = [name for name, p in zip(names, tracked, strict=True) if id(p) not in present]
            self._report(gone, "removed or replaced")
        moved = [
            name for name, p, device in zip(names, tracked, self._devices, strict=True) if p.device != device
        ]
        self._report(moved, "moved to another device")

    def release(self) -> None:
        """Forget the model; there is nothing to check any more."""
        self._has_reported = True
        self._modules.clear()

    def _report(self, names: list[str], change: str) -> None:
        if not names or self._has_reported:
            return
        self._has_reported = True
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        verb = "was" if len(names) == 1 else "were"
        text = f"{some} {verb} {change} after the monitor was created, so the monitor is out of date: "
        text += "create it after such changes"
        self._failures.add("parameters", text)


def modules_of(model: object) -> dict[str, nn.Module]:
    """Return the modules by the prefix of their parameters' names."""
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        return {f"{name}.": part for name, part in model.items() if isinstance(part, nn.Module)}
    return {}


def _parameters(modules: dict[str, nn.Module]) -> Iterable[tuple[str, Tensor]]:
    for prefix, module in modules.items():
        for name, parameter in zip(*named_parameters(module, "Monitor"), strict=True):
            yield prefix + name, parameter


def _sharded(parameter: Tensor, tracked: Any) -> Any:
    """Return the tracked parameter if this one is its unsharded form, otherwise this one."""
    if (
        tracked is None
        or parameter is tracked
        or not is_dtensor(type(tracked))
        or parameter.shape != tracked.shape
    ):
        return parameter
    # with tensor parallelism it is still a DTensor, on a mesh of fewer dimensions
    mesh = getattr(parameter, "device_mesh", None)
    return parameter if mesh == tracked.device_mesh else tracked
