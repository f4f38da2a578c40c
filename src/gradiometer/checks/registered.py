"""Whether the model owns all that its loss depends on."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.loss_graph import attributes, tensors_in, variables
from gradiometer.checks.objective import objective, some
from gradiometer.checks.optimizer import held_by
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

REGISTER: Final = (
    "use nn.ModuleList or nn.ModuleDict in place of a list or dict, assign layers and parameters to "
    "attributes of a module in __init__, and do not create them in forward: parameters(), to(), "
    "state_dict() and the optimizer know registered ones only"
)
BUFFER: Final = (
    "register it as a Parameter if it is to be trained, and otherwise do not let it require a gradient"
)


@contract("gradients", "all weights that the loss depends on are registered")
def registered(probe: Probe) -> Iterator[Evidence]:
    """Look for leaves of the graph of the loss that are neither parameters of the model nor inputs."""
    with probe.differentiated():
        value = objective(probe)
        if value.grad_fn is None:
            raise NotApplicable("the loss has no graph")
        found, is_whole = variables(value, ())
        again = {id(x) for x in variables(objective(probe), ())[0]}
    known = {id(p) for p in probe.model.parameters()} | {id(x) for x in probe.batch.tensors.values()}
    if probe.optimizer is not None:
        # what an optimizer holds is meant to be trained
        known |= {id(p) for p in held_by(probe.optimizer)}
    left = {id(x): x for x in found if id(x) not in known and not _is_activation(probe, x)}
    for name, x in probe.model.named_buffers():
        if left.pop(id(x), None) is not None:
            text = f"the buffer {name} requires a gradient, and the loss depends on it"
            yield Evidence(text, name, 1.0, 0.0, BUFFER)
    for name in _plain(probe):
        yield Evidence(f"{name} is a plain tensor, which is not trained", name, 1.0, 0.0, REGISTER)
    for place, kind, tensors in _places(probe):
        there = [left.pop(id(x)) for x in tensors if id(x) in left]
        if there:
            text = f"the loss depends on {_size(there)} in {kind} {place}, not registered in the model"
            yield Evidence(text, place, float(len(there)), 0.0, REGISTER)
    made = [x for key, x in left.items() if key not in again]
    own: list[Tensor] = [x for x in made if isinstance(x, nn.Parameter)]
    for tensors, what, severity in (
        (own, "created in forward", Severity.WARNING),
        # some models let constants require a gradient, for reentrant checkpoints
        ([x for x in made if not isinstance(x, nn.Parameter)], "created in forward", Severity.INFO),
        ([x for key, x in left.items() if key in again], "that no module owns", Severity.WARNING),
    ):
        if tensors:
            text = f"the loss depends on {_size(tensors)} {what}, of shape "
            text += some([str(tuple(x.shape)) for x in tensors])
            yield Evidence(text, None, float(len(tensors)), 0.0, REGISTER, severity)
    if not is_whole and not left:
        raise NotApplicable("the graph of the loss is too large")


def _plain(probe: Probe) -> Iterator[str]:
    """Yield the weights and biases that are tensors without a gradient, and not computed of a Parameter."""
    for path, module in probe.model.named_modules():
        own = module._parameters  # noqa: SLF001
        for key in ("weight", "bias"):
            x = vars(module).get(key)
            # weight norm and pruning compute the weight of weight_g or weight_orig
            is_computed = any(name.startswith(f"{key}_") for name in own.keys())  # noqa: SIM118 a ScriptModule's
            if isinstance(x, Tensor) and x.is_floating_point() and not (x.requires_grad or is_computed):
                yield f"{path}.{key}".removeprefix(".")


def _is_activation(probe: Probe, x: Tensor) -> bool:
    """Return whether a leaf is an input or a hidden state that was made to require a gradient."""
    shapes = [each.shape for each in probe.batch.tensors.values() if each.dim()]
    sizes = {shape[0] for shape in shapes} | {shape[0] * shape[1] for shape in shapes if len(shape) > 1}
    return not isinstance(x, nn.Parameter) and x.dim() > 0 and x.shape[0] in sizes


def _size(tensors: list[Tensor]) -> str:
    kind = "parameter" if all(isinstance(x, nn.Parameter) for x in tensors) else "tensor"
    count = len(tensors)
    elements = sum(x.numel() for x in tensors)
    return f"{count} {kind}{'s' * (count > 1)} with {elements:,} elements"


def _places(probe: Probe) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Yield where tensors may be that are not registered: name, what it is, tensors."""
    for name, kind, tensors in attributes({"": probe.model}):
        yield name, f"the {kind}", tensors
    for path, module in probe.model.named_modules():
        own: list[tuple[str, Any]] = list(vars(module).items())
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            own += [("hook", hook) for hook in vars(module).get(table, {}).values()]
        for key, value in own:
            name = f"{path}.{key}".removeprefix(".")
            if isinstance(value, Tensor | nn.Module):
                yield name, "the attribute", list(tensors_in(value, [1_000]))
            elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                yield name, "the closure of", list(tensors_in(_closure(value), [1_000]))
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                yield name, "the object", list(tensors_in(list(vars(value).values()), [1_000]))


def _closure(value: Any, depth: int = 4) -> list[Any]:
    """Return what a function refers to."""
    if not depth:
        return []
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values(), *_closure(value.func, depth - 1)]
    if isinstance(value, types.MethodType):
        return [value.__self__, *_closure(value.__func__, depth - 1)]
    if not isinstance(value, types.FunctionType):
        return [value]
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            # not assigned yet
            continue
    found: list[Any] = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    inner = [x for x in found if isinstance(x, types.FunctionType | types.MethodType | functools.partial)]
    return [*found, *(x for function in inner for x in _closure(function, depth - 1))]
