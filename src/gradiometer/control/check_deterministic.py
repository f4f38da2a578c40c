"""check_deterministic: run a training step twice from the same state, and name what differs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.control.random_state import random_state, restore_random_state
from gradiometer.inputs import is_dtensor, local_shard, named_buffers, named_parameters, unwrapped
from gradiometer.stats import NOT_COMPARED, leaves, outside_of_a_graph, preformatted, repeating, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_WHAT = "check_deterministic"


@dataclass(frozen=True)
class Determinism:
    """What differs between two runs of a step, as `check_deterministic` returns it. True if nothing does.

    Attributes:
        differing: the names of what differs: what the step returned, as ``output``; gradients, as
            ``emb.weight.grad``, the last parameter first; parameters; buffers; the state of optimizers and
            everything else.
        compared: the number of tensors and other values that were compared.
        unread: the names of objects that were not, because they are neither tensors nor plain values.
    """

    differing: tuple[str, ...]
    compared: int
    unread: tuple[str, ...] = ()

    @property
    def deterministic(self) -> bool:
        """Whether nothing differs."""
        return not self.differing

    @property
    def first(self) -> str | None:
        """The first of the names: the nearest to the cause. None if nothing differs."""
        return self.differing[0] if self.differing else None

    def __bool__(self) -> bool:
        return self.deterministic

    def __str__(self) -> str:
        left = f"; not compared: {', '.join(map(repr, self.unread))}" if self.unread else ""
        if self.first is None:
            return f"2 runs of the step are equal in all of {self.compared:,} tensors and values{left}"
        count, name = len(self.differing), self.first.removesuffix(".grad")
        what = f"{name!r}" if name == self.first else f"the gradient of {name!r}"
        said = f"2 runs of the step differ in {count:,} of {self.compared:,} tensors and values"
        return f"{said}, first in {what}{left}"

    def _repr_html_(self) -> str:
        """Return the same text for a notebook."""
        return preformatted(str(self))


def check_deterministic(step: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Determinism:
    """Run a training step twice from the same state, and name what differs. Waits for the device.

    Before the second run, everything in ``state`` is restored, and so are the gradients of its parameters and
    the random numbers of Python, NumPy, and torch on the CPU and on the devices of the state. Afterwards all
    of it is as after one step.
    The values are compared by their `fingerprint`: bit by bit, in one read. Gradients are read where an
    optimizer of the state begins its step, and after the step.

    Neither run is a step of the training run: methods of a `Monitor` do nothing meanwhile, also if
    `gradiometer.watch` calls them, and a `Recorder` or `Taps` outside of ``state`` is afterwards as before.

    The check needs memory for a second copy of the state. With several ranks, all of them have to make this
    call; each compares its own shards.

    Args:
        step: a function that makes one training step, compiled or not. What it returns is compared too.
        state: what the step changes: a model, or a list or mapping of models, optimizers, schedulers, a
            GradScaler, a `Recorder`, or any other objects with ``state_dict`` and ``load_state_dict``, of
            tensors, and of ``torch.Generator``. Names begin with the key of a mapping; in a list, with the
            position if two names would be equal.
        args: arguments of the step, such as a batch.
        kwargs: keyword arguments of the step.

    Returns:
        A `Determinism`: false if something differs; ``print`` shows a sentence.

    Raises:
        TypeError: if the step is not a function, or an object of the state cannot be saved.
        ValueError: if there is no tensor in the state.
        RuntimeError: if the state is not the same after ``load_state_dict``; inside a compiled function.
            Errors of the step are passed on; the state is then as the step left it.

    >>> import torch, gradiometer as gm
    >>> model, calls = torch.nn.Linear(2, 1), []
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step(x):
    ...     calls.append(x)
    ...     (model(x).sum() * len(calls)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> result = gm.check_deterministic(step, [model, optimizer], torch.ones(1, 2))
    >>> result.deterministic, result.differing
    (False, ('bias.grad', 'weight.grad', 'weight', 'bias'))
    """
    outside_of_a_graph(_WHAT)
    if not callable(step):
        msg = f"{_WHAT}: the step must be a function, got {type(step).__name__}; pass the function itself, "
        raise TypeError(msg + "and its arguments after the state")
    known = _State(state)
    before = known.texts()
    undo = known.saved()
    devices = {x.device for _, x in known.contents() if isinstance(x, Tensor)}
    undo.append(partial(restore_random_state, random_state(devices)))
    # by name, for each call of an optimizer's step
    grads: dict[str, str] = {}

    def read(optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            for name, text in _texts(known.grads(optimizer)).items():
                grads[name] = f"{grads[name]}, {text}" if name in grads else text

    def run() -> dict[str, str]:
        grads.clear()
        output = step(*args, **kwargs)
        found = {} if output is None else _texts(leaves("output", output))
        return found | known.texts(grads)

    with ExitStack() as hooks:
        hooks.enter_context(repeating(known.parameters, [part for _, part in known.parts]))
        for _, part in known.parts:
            if isinstance(part, Optimizer):
                hooks.callback(part.register_step_pre_hook(read).remove)
        first = run()
        try:
            for restore in undo:
                restore()
        except Exception as error:
            msg = f"{_WHAT}: the state cannot be restored after the first run: {error}; if that run created "
            raise RuntimeError(msg + "a buffer or a parameter, run one step before the check") from error
        for name in _differing(before, known.texts()):
            if name not in before:
                msg = f"{_WHAT}: the first run created {name!r}, which cannot be undone; "
                raise RuntimeError(msg + "run one step before the check")
            msg = f"{_WHAT}: load_state_dict does not restore {name!r}; "
            raise RuntimeError(msg + "correct it, or leave its object out of the state")
        second = run()
    both = first | second
    unread = tuple([name for name, text in both.items() if text.endswith(NOT_COMPARED)])
    return Determinism(tuple(_differing(first, second)), len(both) - len(unread), unread)


class _State:
    """The objects of a state, and the names of what they hold."""

    def __init__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            parts = [(f"{key}.", value) for key, value in state.items()]
        else:
            parts = [("", value) for value in (state if isinstance(state, list | tuple) else [state])]
        for prefix, value in parts:
            has_state = [callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")]
            if not isinstance(value, Tensor | torch.Generator) and not all(has_state):
                which = f"{prefix.removesuffix('.')!r} of the state" if prefix else "an object of the state"
                msg = f"{_WHAT}: {which} has type {type(value).__name__}, which has no state_dict and "
                raise TypeError(msg + "load_state_dict; pass models, optimizers and tensors")
        self._set(parts)
        names = [name for name, _ in self.contents()]
        if len(set(names)) < len(names) or "" in names:
            self._set([(f"{i}.", value) for i, (_, value) in enumerate(parts)])
        if not any([isinstance(x, Tensor) for _, x in self.contents()]):
            msg = f"{_WHAT}: there is no tensor in the state, {type(state).__name__}; "
            raise ValueError(msg + "pass the model and the optimizer, [model, optimizer]")

    def _set(self, parts: list[tuple[str, Any]]) -> None:
        # modules name the parameters of the optimizers
        self.parts = sorted(parts, key=lambda part: not isinstance(part[1], nn.Module))
        # of all tensors that may have a gradient, in order
        self.parameters: dict[Tensor, str] = {}
        for prefix, value in self.parts:
            for name, p in _parameters(value):
                self.parameters.setdefault(p, f"{prefix}{name}".removesuffix("."))

    def grads(self, optimizer: Optimizer | None = None) -> list[tuple[str, Tensor]]:
        """Return the gradients there are, the last parameter first; only those of an optimizer if given."""
        owned = None if optimizer is None else {p for _, p in _parameters(optimizer)}
        own = [(name, p) for p, name in self.parameters.items() if owned is None or p in owned]
        return [(f"{name}.grad", p.grad) for name, p in reversed(own) if p.is_leaf and p.grad is not None]

    def contents(self) -> Iterator[tuple[str, Any]]:
        """Return the names and values of parameters, buffers, and everything else."""
        yield from [(name, p) for p, name in self.parameters.items()]
        for prefix, module in self.parts:
            if isinstance(module, nn.Module):
                yield from [(prefix + name, x) for name, x in named_buffers(unwrapped(module))]
        for prefix, value in self.parts:
            if isinstance(value, Optimizer):
                found = self._optimizer(prefix, value)
            elif isinstance(value, torch.Generator):
                found = [(f"{prefix}generator", value.get_state())]
            elif isinstance(value, Tensor):
                found = []
            else:
                content = value.state_dict()
                if isinstance(value, nn.Module):
                    content = {name: content[name] for name in content if name.endswith("_extra_state")}
                found = [(prefix + name, x) for name, x in leaves("", content) if name]
            yield from found

    def _optimizer(self, prefix: str, optimizer: Optimizer) -> list[tuple[str, Any]]:
        """Return the state of an optimizer, with the names of its parameters instead of their numbers."""
        content = optimizer.state_dict()
        own = [p for _, p in _parameters(optimizer)]
        found: list[tuple[str, Any]] = []
        for key, value in content.pop("state", {}).items():
            name = self.parameters[own[key]] if isinstance(key, int) else f"{prefix}state.{key}"
            found += leaves(name, value)
        others = [(name, x) for name, x in leaves("", content) if name and not name.endswith(".params")]
        return found + [(prefix + name, x) for name, x in others]

    def texts(self, seen: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the texts of the gradients, also of those ``seen`` earlier, and of the contents."""
        grads = _texts(self.grads())
        every = [f"{name}.grad" for name in reversed(self.parameters.values())]
        both = {name: [x[name] for x in (seen or {}, grads) if name in x] for name in every}
        return {name: ", ".join(texts) for name, texts in both.items() if texts} | _texts(self.contents())

    def saved(self) -> list[Callable[[], Any]]:
        """Return functions that restore everything as it is now; each is called once at most."""
        undo: list[Callable[[], Any]] = []
        # parameters of an optimizer may be in no module
        alone = dict.fromkeys(self.parameters)
        for _, value in self.parts:
            if isinstance(value, nn.Module):
                module = unwrapped(value)
                kept = copy.deepcopy(module.state_dict())
                undo.append(partial(module.load_state_dict, kept))
                others = [(name, x) for name, x in module.named_buffers() if name not in kept]
                undo += [
                    partial(_put_back_buffer, module, *other, other[1].detach().clone()) for other in others
                ]
                for _, parameter in _parameters(module):
                    alone.pop(parameter, None)
            elif isinstance(value, torch.Generator):
                undo.append(partial(value.set_state, value.get_state()))
            elif not isinstance(value, Tensor):
                undo.append(partial(value.load_state_dict, copy.deepcopy(value.state_dict())))
        undo += [partial(_put_back, p, p.detach().clone()) for p in alone]
        for p in self.parameters:
            if p.is_leaf and p.grad is not None:
                undo.append(partial(_put_back, p.grad, p.grad.detach().clone()))
            if p.is_leaf:
                undo.append(partial(setattr, p, "grad", p.grad))
        return undo


def _parameters(value: object) -> list[tuple[str, Tensor]]:
    """Return the tensors of an object that may have a gradient."""
    if isinstance(value, nn.Module):
        return list(zip(*named_parameters(value, _WHAT), strict=True))
    if isinstance(value, Optimizer):
        groups = enumerate(value.param_groups)
        return [(f"param_groups.{i}.params.{j}", p) for i, x in groups for j, p in enumerate(x["params"])]
    return [("", value)] if isinstance(value, Tensor) else []


def _texts(contents: Iterable[tuple[str, Any]]) -> dict[str, str]:
    # both runs have the same shards
    return texts([(name, local_shard(x) if is_dtensor(type(x)) else x) for name, x in contents], _WHAT)


def _differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name in a | b if a.get(name) != b.get(name)]


# restore


def _put_back(tensor: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(saved)


def _put_back_buffer(module: nn.Module, name: str, buffer: Tensor, saved: Tensor) -> None:
    """Restore a buffer that is not part of the state dict, which the step may have replaced."""
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, buffer)
    _put_back(buffer, saved)
