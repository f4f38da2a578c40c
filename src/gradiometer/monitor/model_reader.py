"""Read what rules need to know of a model beside its tensors, and check that it keeps its parameters."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from gradiometer.checks import bounded_logits, leaves_of
from gradiometer.inputs import is_dtensor, named_parameters, without_wrappers
from gradiometer.monitor.agreement_reader import AgreementReader
from gradiometer.monitor.batch_reader import BatchReader
from gradiometer.monitor.failures import Failures
from gradiometer.monitor.initial_reader import InitialReader
from gradiometer.monitor.norm_reader import NormReader
from gradiometer.monitor.optimizer_reader import OptimizerReader
from gradiometer.monitor.value_reader import ValueReader
from gradiometer.recorder import OPTION, Driver, ModelState, gradient_framework

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradiometer.recorder import OptimizerState, Recorder

# at least every so many steps everything is looked at: fewer than the patience of the rules that need it
_OFTEN = 8
# what the graph of the loss tells
_OF_LOSS = ("reached", "unregistered", "foreign", "bounded")
# the probability from which a Dropout layer is looked at
_HIGH = 0.8
# layers whose output depends on the mode
_MODAL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)  # noqa: SLF001


class ModelReader:
    """Reads a `ModelState` without waiting for the device.

    Unless the model is a module or a mapping of names to modules, only the parameters are looked at.
    """

    def __init__(
        self,
        model: object,
        recorder: Recorder,
        failures: Failures | None = None,
        agreements: AgreementReader | None = None,
    ) -> None:
        self._modules = modules_of(model)
        failures = failures or Failures()
        self._batches = BatchReader({}, failures)
        self._agreements = agreements or AgreementReader(None)
        self._initial = InitialReader()
        failures.attempt("model", self._initial.start, self._modules, recorder)
        self._parameters = recorder.parameters_tracked
        self._names = recorder.catalog.names
        self._state = ModelState(())
        self._modes: list[bool] | None = None
        self._noted: tuple[list[bool], OptimizerState | None] | None = None
        self._has_looked = False
        self._reads = 0
        self._values = ValueReader(self._modules, recorder)
        self._device = recorder.ring.device
        self._norms = NormReader({}, self._device)
        self._foreign: list[weakref.ref[Tensor]] = []
        # the hyperparameters that were recorded last, and what they are of
        self._options: dict[str, float] = {}
        self._optioned: OptimizerState | None = None
        self._gradient: tuple[Callable[[], Tensor | None], int] = (_nothing, 0)
        self.set_driver(Driver())

    def set_driver(self, driver: Driver) -> None:
        """Set who calls the monitor, and the optimizers that update the model."""
        self._driver: str = driver.name
        self._facts = driver.facts
        # those in the graph of the loss
        self._own = self._parameters
        if driver.model is not None:
            self._modules = {"": driver.model}
            own = dict(zip(*named_parameters(driver.model, "Monitor"), strict=True))
            self._own = [own.get(name, p) for name, p in zip(self._names, self._parameters, strict=True)]
        self._batches.attach(self._modules)
        self._framework = gradient_framework(self._own)
        self._tied = [pair for prefix, module in self._modules.items() for pair in _tied(prefix, module)]
        self._ties = tuple([(a.name, b.name) for a, b in self._tied])
        self._dropouts = [
            (prefix + name, layer)
            for prefix, module in self._modules.items()
            for name, layer in module.named_modules()
            if isinstance(layer, nn.modules.dropout._DropoutNd)  # noqa: SLF001
        ]
        self._optimizers = OptimizerReader(driver.optimizers, self._parameters)
        self._known = [weakref.ref(optimizer) for optimizer in driver.optimizers]
        self._norms.release()
        # in your own loop, no hooks but your own
        self._norms = NormReader({} if driver.name == "loop" else self._modules, self._device)

    def read(self, loss: object, *, afresh: bool, has_loss_scale: bool = False, step: int = 0) -> ModelState:
        """Return the state of the model; the same object if nothing has changed.

        ``afresh``: look at everything; otherwise only at what takes no time.
        """
        self._reads += 1
        afresh = afresh or self._reads % _OFTEN == 0
        modes_now = [module.training for module in self._modules.values()]
        (modes, optimizers), self._noted = self._noted or self._now(modes_now), None
        if afresh:
            # the groups of the next step
            self._optimizers.read(afresh=True)
        old = self._state
        untied = tuple([(a.name, b.name) for a, b in self._tied if a.parameter is not b.parameter])
        quick: dict[str, Any] = {
            "untied": untied,
            "tied": self._ties,
            "values": self._values.read(step, afresh=afresh),
            "batches": self._batches.end(step),
            "agreements": self._agreements.looks,
            "norms": self._norms.read(step),
            "initial": self._initial.read(),
            "grad_writes": self._grad_writes(optimizers),
            "has_loss_scale": has_loss_scale,
            "driver": self._driver,
            "framework": self._framework,
            **vars(self._facts),
        }
        before = {name: getattr(old, name) for name in quick}
        if afresh or modes != self._modes or quick != before:
            self._modes = modes
            requires = tuple([parameter.requires_grad for parameter in self._own])
            found = {name: getattr(old, name) for name in _OF_LOSS}
            # `_foreign` was found some steps ago
            is_gone = bool(self._foreign) and all([ref() is None for ref in self._foreign])
            found["is_foreign_gone"] = old.is_foreign_gone or (self._reads % _OFTEN == 0 and is_gone)
            found["evaluating"] = self._evaluating(modes)
            high = [(name, layer) for name, layer in self._dropouts if layer.training and layer.p >= _HIGH]
            found["dropouts"] = tuple([(name, float(layer.p)) for name, layer in high])
            state = ModelState(requires, optimizers=optimizers, **quick, **found)
            if state.__dict__ != old.__dict__:
                self._state = state
        elif optimizers is not old.optimizers:
            self._state = replace(old, optimizers=optimizers)
        self.look_at(loss)
        return self._state

    def scalars(self) -> dict[str, float]:
        """Return the learning rates, if nobody else passes them, and hyperparameters that have changed."""
        known = self._state.optimizers
        if known is None:
            return {}
        rates = known.first_rates() if self._driver == "loop" else {}
        if known is self._optioned:
            return rates
        self._optioned = known
        now = {**dict.fromkeys(self._options), **known.scalars()}
        changed = {name: x for name, x in now.items() if x is not None and self._options.get(name) != x}
        # a group whose rate differed once, and is that of the first group now
        for name, before in self._options.items():
            if now[name] is None and name.startswith(f"{OPTION}lr/"):
                rate = known.rates[int(name.rpartition("_")[2])]
                if rate is not None and rate != before:
                    changed[name] = rate
        self._options |= changed
        return {**rates, **changed}

    def note(self) -> None:
        """Note the modes and the learning rates now, before an update, an evaluation or a scheduler."""
        # a model without gradients, such as a teacher, is not trained
        self._noted = self._now(
            [
                module.training or all(parameter.grad is None for parameter in module.parameters())
                for module in self._modules.values()
            ]
        )

    def _now(self, modes: list[bool]) -> tuple[list[bool], OptimizerState | None]:
        return modes, self._optimizers.read(afresh=False)

    def look_at(self, loss: object) -> None:
        """Find out whether the graph of a loss, the first that has one, leads to the parameters."""
        if not self._has_looked and isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._has_looked = True
            alive = [optimizer for ref in self._known if (optimizer := ref()) is not None]
            held = {id(p) for each in alive for group in each.param_groups for p in group["params"]}
            # in the graph, FSDP has other tensors in the place of the model's parameters
            is_sharded = self._framework or any(is_dtensor(type(p)) for p in self._own)
            reached, unregistered, foreign = leaves_of(
                loss, self._own, {} if is_sharded else self._modules, held
            )
            self._foreign = [weakref.ref(parameter) for parameter in foreign]
            self._state = replace(
                self._state,
                reached=reached,
                unregistered=unregistered,
                foreign=len(foreign),
                bounded=bounded_logits(loss),
            )

    def release(self) -> None:
        """Forget the model and its optimizers."""
        self._modules.clear()
        self._values.release()
        self._foreign.clear()
        self.set_driver(Driver())

    def _evaluating(self, modes: list[bool]) -> str:
        found: Counter[str] = Counter()
        for module, is_training in zip(self._modules.values(), modes, strict=True):
            if not is_training:
                layers = [part for part in module.modules() if isinstance(part, _MODAL)]
                # a layer that trains while its model does not was put into that mode on purpose
                if not any(part.training for part in layers):
                    found.update([type(part).__name__ for part in layers if getattr(part, "p", 1.0) > 0])
        return ", ".join([f"{count} {name}" for name, count in found.items()])

    def _grad_writes(self, optimizers: OptimizerState | None) -> int:
        # nobody clears the gradients of what no optimizer holds, nor a copy of it
        state = optimizers
        grads = (
            parameter.grad
            for i, parameter in enumerate(self._parameters)
            if state is None or state.groups[i] >= 0 or state.rounded_well[i]
        )
        grad = next((grad for grad in grads if grad is not None), None)
        known, version = self._gradient
        is_kept = grad is not None and known() is grad
        # not a reference, which would keep its memory
        self._gradient = (_nothing, 0) if grad is None else (weakref.ref(grad), grad._version)  # noqa: SLF001
        return self._gradient[1] - version if is_kept else 0


def _nothing() -> None:
    return None


class _Owned(NamedTuple):
    """A parameter of a model, looked up in the module that owns it."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def parameter(self) -> object:
        return self.owner._parameters.get(self.attribute)  # noqa: SLF001


def _tied(prefix: str, module: nn.Module) -> Iterable[tuple[_Owned, _Owned]]:
    """Return pairs of names of one parameter, the first name of each with every other."""
    first: dict[Tensor, _Owned] = {}
    pairs = list(module.named_parameters(remove_duplicate=False))
    names = without_wrappers(module, [path for path, _ in pairs])
    for name, (path, parameter) in zip(names, pairs, strict=True):
        owner, _, attribute = path.rpartition(".")
        owned = _Owned(prefix + name, module.get_submodule(owner), attribute)
        if first.setdefault(parameter, owned) is not owned:
            yield first[parameter], owned


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
        names = self._recorder.catalog.names
        known = dict(zip(names, tracked, strict=True))
        now = [
            (prefix + name, _sharded(p, known.get(prefix + name)))
            for prefix, module in self._modules.items()
            for name, p in zip(*named_parameters(module, "Monitor"), strict=True)
        ]
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
        self._failures.add("parameters", text + "create it after such changes")


def modules_of(model: object) -> dict[str, nn.Module]:
    """Return the modules by the prefix of their parameters' names."""
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        return {f"{name}.": part for name, part in model.items() if isinstance(part, nn.Module)}
    return {}


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
