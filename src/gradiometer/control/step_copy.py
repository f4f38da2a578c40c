"""The state that a step changes: found through the step's function, kept as it was, and put back."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradiometer.control.located import values_of
from gradiometer.control.operations import arguments_of, storage_of, tensors_in
from gradiometer.control.random_state import random_state, restore_random_state
from gradiometer.inputs import is_dtensor, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable

_DEPTH = 5
_SET_VERSIONS = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001
_LIBRARIES = ("torch.", "numpy", "gradiometer")
_KINDS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, torch.Generator)


def find_parts(
    step: Any, args: Any, kwargs: Any, others: list[tuple[str, Any]] | None = None
) -> dict[str, Any]:
    """Return models, optimizers, schedulers, scalers and generators that a step can reach, by name.

    They are looked for in its arguments and closure, the globals that it names, the object that it is a
    method of, and in functions, containers and objects among these. To ``others``, if given, the remaining
    values that were found are added, tensors, functions, containers and objects, with the package of the
    function or object that refers to them; of arguments, an empty text.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def look(name: str, value: Any, depth: int, package: str = "") -> None:
        if id(value) in seen or depth > _DEPTH or isinstance(value, types.ModuleType | type):
            return
        seen.add(id(value))
        if others is not None and not isinstance(value, _KINDS):
            others.append((package, value))
        if isinstance(value, Tensor):
            return
        compiled = getattr(value, "_torchdynamo_orig_callable", None)
        if isinstance(value, _KINDS):
            found.setdefault(name if name not in found else f"{name}_{len(found)}", value)
            inner: Mapping[str, Any] = {}
        elif callable(compiled):
            inner = {name: compiled}
        elif isinstance(value, functools.partial):
            inner = {name: value.func, "args": value.args, "keywords": value.keywords}
        elif isinstance(value, types.MethodType):
            inner = {value.__func__.__name__: value.__func__, "self": value.__self__}
        elif isinstance(value, types.FunctionType):
            inner = _names_of(value)
            package = str(value.__module__).partition(".")[0]
        elif isinstance(value, Mapping):
            inner = {str(key): x for key, x in value.items()}
        elif isinstance(value, list | tuple):
            inner = {f"{name}_{i}": x for i, x in enumerate(value)}
        elif hasattr(value, "__dict__") and not type(value).__module__.startswith(_LIBRARIES):
            inner = vars(value) | ({"call": type(value).__call__} if callable(value) else {})
            package = type(value).__module__.partition(".")[0]
        else:
            return
        for key, x in inner.items():
            look(key, x, depth + 1, package)

    for name, value in {"args": args, "kwargs": kwargs, "step": step}.items():
        look(name, value, 0)
    return found


def _names_of(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function's code refers to: cells, globals, defaults."""
    names: dict[str, Any] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        # co_names has names of attributes, too
        loaded = {x.argval for x in dis.get_instructions(code) if x.opname in {"LOAD_GLOBAL", "STORE_GLOBAL"}}
        names |= {name: x for name, x in function.__globals__.items() if name in loaded}
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return names | {str(i): x for i, x in enumerate(function.__defaults__ or ())}


class StepCopy:
    """Keeps what a step overwrites, and puts it back.

    Memory is kept when an operation is about to write it for the first time, so all tensors that were there
    before the step are restored, wherever the step has them from. Of the given parts, attributes are kept
    too: gradients, replaced buffers, the entries of an optimizer's state, the counters of a scheduler.

    ``parts``: see `find_parts`. ``parameters``: those of the models and optimizers among them.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._kept: dict[int, tuple[Any, Any]] = {}
        # the storages that were created since
        self._new: dict[int, StorageWeakRef] = {}
        devices: dict[torch.device, None] = {}
        parameters: dict[Tensor, None] = {}
        self._seen: set[int] = set()
        for part in parts.values():
            if isinstance(part, nn.Module):
                module = unwrapped(part)
                for buffer in module.buffers():
                    # batch norms write theirs although the schema of the operation does not say so
                    self._keep(buffer)
                devices |= {x.device: None for x in [*module.parameters(), *module.buffers()]}
                parameters |= dict.fromkeys(module.parameters())
                for inner in module.modules():
                    self._keep_entries(inner._buffers)  # noqa: SLF001
                    self._keep_entries(inner._parameters)  # noqa: SLF001
            elif isinstance(part, Optimizer):
                parameters |= {p: None for group in part.param_groups for p in group["params"]}
            self._keep_entries(part)
        self.parameters = list(parameters)
        plain = tuple([p for p in parameters if not (p.is_inference() or is_dtensor(type(p)))])
        versions = tuple([p._version for p in plain])  # noqa: SLF001
        # so that a backward pass after the repeat finds what its forward has used
        self._undo.append(functools.partial(_SET_VERSIONS, plain, versions))
        for p in parameters:
            self._undo.append(functools.partial(setattr, p, "grad", p.grad))
        self._undo.append(functools.partial(restore_random_state, random_state(devices)))

    def _keep_entries(self, value: Any) -> None:
        """Keep the entries of containers, and the attributes of optimizers, schedulers and scalers."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self._undo.append(functools.partial(_put_back, value, dict(value)))
            for x in value.values():
                self._keep_entries(x)
        elif isinstance(value, list):
            self._undo.append(functools.partial(value.__setitem__, slice(None), list(value)))
            for x in value:
                self._keep_entries(x)
        elif isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, Optimizer | LRScheduler | torch.amp.GradScaler):
            self._keep_entries(vars(value))

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the memory that an operation is about to write."""
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument in arguments_of(func, args, kwargs):
                if argument.written:
                    self._keep(argument.tensor)

    def _keep(self, tensor: Tensor) -> None:
        values = values_of(tensor)
        if values is not None:
            storage = values.untyped_storage()
            key = storage._cdata  # noqa: SLF001
            if key not in self._new and key not in self._kept:
                self._kept[key] = storage, storage.clone()

    def after(self, output: Any, args: Any, kwargs: Any) -> None:
        """Note the memory that an operation has created: of outputs that are no views of its inputs."""
        created = _storages(output)
        for key in created.keys() - _storages((args, kwargs)).keys() - self._kept.keys() - self._new.keys():
            self._new[key] = StorageWeakRef(created[key])

    def restore(self) -> None:
        """Put everything back."""
        for storage, copy in self._kept.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for undo in self._undo:
            undo()


def _storages(value: Any) -> dict[int, Any]:
    found = [storage for tensor in tensors_in(value) if (storage := storage_of(tensor)) is not None]
    return {storage._cdata: storage for storage in found}  # noqa: SLF001


def _put_back(mapping: dict[Any, Any], entries: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(entries)
