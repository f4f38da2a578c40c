"""See optimizers that are not watched, but that update watched parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer


class OtherOptimizers:
    """Watches all optimizers of the process, from `attach` on.

    An optimizer that steps inside of a watched one, or around it, is a part of it or a wrapper. After a step
    that raises an error, those of others may be taken for its parts.

    Args:
        watched: the optimizers that are watched.
        parameters: their parameters, by name.
    """

    def __init__(self, watched: Iterable[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        self._watched = {id(optimizer) for optimizer in watched}
        self._names = {id(p): name for name, p in parameters.items()}
        # steps that run: the optimizer's id, how often it has begun, as `super().step` begins again, and
        # whether a watched one has run inside
        self._running: list[list[Any]] = []
        # what it updates, as a text; empty if none of the parameters
        self._texts: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._seen: dict[str, None] = {}

    def attach(self) -> Callable[[], None]:
        """Register the hooks; return a function that removes them."""
        handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

        def remove() -> None:
            while handles:
                handles.pop().remove()

        return remove

    def take(self) -> tuple[str, ...]:
        """Return what others have updated since the last call, such as ``"SGD updates 0.weight"``."""
        seen, self._seen = tuple(self._seen), {}
        return seen

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in self._watched:
            for step in self._running:
                step[2] = True
        again = next((step for step in self._running if step[0] == id(optimizer)), None)
        if again is None:
            self._running.append([id(optimizer), 1, False])
        else:
            again[1] += 1

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        running = next((step for step in self._running if step[0] == id(optimizer)), None)
        if torch.compiler.is_compiling() or running is None:
            return
        running[1] -= 1
        if running[1]:
            return
        self._running.remove(running)
        is_inside = any(step[0] in self._watched for step in self._running)
        if id(optimizer) in self._watched or running[2] or is_inside:
            return
        text = self._texts.get(optimizer)
        if text is None:
            text = self._texts[optimizer] = self._text_of(optimizer)
        if text:
            self._seen[text] = None

    def _text_of(self, optimizer: Optimizer) -> str:
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        names = [self._names[key] for key in held if key in self._names]
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{type(optimizer).__name__} updates {names[0]}{more}"
