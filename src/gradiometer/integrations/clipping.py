"""Observe clipping while a watch is open, and record gradients as they are before it."""

from __future__ import annotations

import threading
import weakref
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from gradiometer.control import clip_begins, clip_ended, observers, observers_now, value_clip_begins
from gradiometer.inputs import is_dtensor, is_partial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.control import Clip, ClipObserver
    from gradiometer.integrations.backward_passes import BackwardPasses
    from gradiometer.integrations.step_order import OrderOfSteps

# as torch adds to a norm before dividing by it
_EPS: Final = 1e-6
# a garbage collection may end an observer anywhere
_LOCK = threading.RLock()
_restore: list[Callable[[], None]] = []
# its ``order`` is that of the norm that was computed last, which torch does not pass on
_of_thread = threading.local()


def observe(observer: ClipObserver) -> Callable[[], None]:
    """Tell an observer of every clip by `torch.nn.utils` and by gradiometer; return what ends this.

    The functions of torch are replaced while there is an observer. `torch.nn.utils.clip_grad_norm_` is not:
    it looks up the two that it calls, so that it is seen however it was imported.
    """
    with _LOCK:
        observers[observer] = None
        if not _restore:
            for module, name, replace in _REPLACED:
                _patch(module, name, replace(getattr(module, name)))
    # an observer that is forgotten is told nothing more
    weakref.finalize(observer, _end, None).atexit = False
    return lambda: _end(observer)


def _end(observer: ClipObserver | None) -> None:
    with _LOCK:
        if observer is not None:
            observers.pop(observer, None)
        while _restore and not observers_now():
            _restore.pop()()


def _patch(module: Any, name: str, ours: Any) -> None:
    theirs = getattr(module, name)
    setattr(module, name, ours)

    def restore() -> None:
        # otherwise somebody else has replaced it again, and calls ours
        if getattr(module, name) is ours:
            setattr(module, name, theirs)

    _restore.append(restore)


def _norm(original: Any) -> Any:
    @wraps(original)
    def get_total_norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _of_thread.order = norm_type
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for observer in observers_now():
                observer.before_norm(tensors)
        return original(tensors, norm_type, *args, **kwargs)

    return get_total_norm


def _clip(original: Any) -> Any:
    @wraps(original)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # what is no number is torch's to refuse
        if torch.compiler.is_compiling() or not isinstance(max_norm, (Real, Tensor)):
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        if not isinstance(max_norm, Tensor):
            # such as a number of NumPy, as torch does
            max_norm = float(max_norm)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if is_dtensor(type(total_norm)) and is_partial(total_norm):
            # adds up the parts of the ranks, as torch's next operation would, and spares that one doing it
            total_norm = total_norm + 0.0
        shown = max_norm if getattr(_of_thread, "order", 2.0) == 2.0 else None
        clip = clip_begins(parameters, shown, lambda: _factor(max_norm, total_norm))
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        clip_ended(clip)
        return result

    return clip_grads_with_norm_


def _value(original: Any) -> Any:
    @wraps(original)
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            value_clip_begins(parameters)
        return original(parameters, *args, **kwargs)

    return clip_grad_value_


_REPLACED: Final = (
    (clip_grad, "_get_total_norm", _norm),
    (clip_grad, "_clip_grads_with_norm_", _clip),
    (utils, "get_total_norm", _norm),
    (utils, "clip_grads_with_norm_", _clip),
    (clip_grad, "clip_grad_value_", _value),
    (utils, "clip_grad_value_", _value),
)


def _factor(max_norm: Any, total_norm: Any) -> Tensor | None:
    """Return torch's coefficient; None if this rank has only a part of the norm."""
    if is_dtensor(type(total_norm)):
        if is_partial(total_norm):
            return None
        total_norm = total_norm.to_local()
    device = total_norm.device if isinstance(total_norm, Tensor) else torch.device("cpu")
    norm, limit = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in (total_norm, max_norm)]
    return (limit.detach() / (norm.detach() + _EPS)).clamp(max=1.0)


class _Measured(NamedTuple):
    """Gradients that were measured together.

    ``seen``: a few of their parameters, with the gradient of each, its version, and the backward passes.
    """

    names: frozenset[str]
    seen: list[tuple[Tensor, int, int, int]]


class ClippedGradients:
    """Records gradients right before they are clipped, for a watch.

    Args:
        parts: for each optimizer, its tensors by name; with master weights, a name has two tensors.
        passes: counts the backward passes.
        record: measures these gradients into the current step.
        note: keeps scalars for the current step.
        attempt: calls a function, and ends the watch if it raises.
        order: sees the clips of each step.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[tuple[str, Tensor]]],
        passes: BackwardPasses,
        record: Callable[[list[tuple[str, Tensor]]], None],
        note: Callable[..., None],
        attempt: Callable[..., None],
        order: OrderOfSteps,
    ) -> None:
        # by identity: to hash a tensor takes longer
        self._named = {id(p): name for part in parts for name, p in part}
        self._parts = [(frozenset([name for name, _ in part]), list(part)) for part in parts]
        self._passes, self._record, self._note, self._attempt = passes, record, note, attempt
        self._order = order
        self._measured: list[_Measured] = []
        # the gradients that each optimizer has used last
        self._used: dict[int, _Measured] = {}
        # the names in each clip of this step
        self._clips: list[frozenset[str]] = []
        # those that were measured since they were clipped
        self._since: set[str] = set()

    def measured(self) -> set[str]:
        """Return the names of the gradients that were measured since the last backward pass."""
        self._measured = [each for each in self._measured if self._are_current(each)]
        return set().union(*[each.names for each in self._measured])

    def note_measured(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        """Remember that these gradients were measured."""
        self._measured.append(self._state(frozenset([name for name, _ in pairs]), pairs))

    def end(self, index: int, *, is_last: bool) -> None:
        """Forget the gradients that an optimizer has used; with ``is_last``, begin the next step."""
        names, pairs = self._parts[index]
        left = [each._replace(names=each.names - names) for each in self._measured]
        self._measured = [each for each in left if each.names]
        self._used[index] = self._state(names, pairs)
        self._passes.end(self._counted(names))
        if is_last:
            self._clips, self._since = [], set()
            self._order.end()

    def before_norm(self, tensors: Sequence[Tensor]) -> None:
        """Record the gradients among these tensors: they may be scaled by hand."""
        self._attempt(self._before_norm, tensors)

    def before_clip(self, clip: Clip) -> None:
        """Record the gradients that are clipped, and by how much."""
        self._attempt(self._before_clip, clip)

    def after_clip(self, clip: Clip) -> None:
        """Take the gradients as they are now: this change is known."""
        self._attempt(self._after_clip, clip)

    def before_value_clip(self, parameters: Sequence[Tensor]) -> None:
        """See a clip by value, which is not observed otherwise."""
        self._attempt(self._see, parameters, None)

    def _see(self, parameters: Sequence[Tensor], limit: float | Tensor | None) -> None:
        ours = [p for p in parameters if id(p) in self._named]
        if ours:
            self._order.clip(ours, limit)

    def _before_norm(self, tensors: Sequence[Tensor]) -> None:
        asked = set(map(id, tensors))
        grads = ((name, p, p.grad) for _, part in self._parts for name, p in part)
        self._measure([(name, p) for name, p, grad in grads if grad is not None and id(grad) in asked])

    def _before_clip(self, clip: Clip) -> None:
        self._see(clip.parameters, clip.max_norm)
        pairs = self._ours(clip)
        if not pairs:
            return
        self._measure(pairs)
        names = frozenset([name for name, _ in pairs])
        # instead of a clip of gradients that were discarded, or that a backward pass has changed
        is_again = names in self._clips and not names.isdisjoint(self._since)
        self._since -= names
        if not is_again:
            self._clips.append(names)
        number = self._clips.index(names) if is_again else len(self._clips) - 1
        end = f"_{number}" if number else ""
        known = {"clip_max_norm": clip.max_norm, "clip_factor": clip.factor()}
        self._note(**{name + end: value for name, value in known.items() if value is not None})

    def _after_clip(self, clip: Clip) -> None:
        ours = set(map(id, clip.parameters))
        self._passes.note([p for p in self._passes.counted() if id(p) in ours])
        for each in self._measured:
            each.seen[:] = [self._now(old[0]) if id(old[0]) in ours else old for old in each.seen]

    def _ours(self, clip: Clip) -> list[tuple[str, Tensor]]:
        named = ((self._named.get(id(p)), p) for p in clip.parameters)
        return [(name, p) for name, p in named if name is not None and p.grad is not None]

    def _measure(self, asked: Sequence[tuple[str, Tensor]]) -> None:
        if not asked:
            return
        known = self.measured()
        # such as for a norm that is computed after the step, which has changed nothing
        for used in self._used.values():
            if used.seen and all([each == self._now(each[0]) for each in used.seen]):
                known |= used.names
        # a parameter may be given twice
        pairs = list({name: (name, p) for name, p in asked if name not in known}.values())
        if pairs:
            self._record(pairs)
            self.note_measured(pairs)
            self._since.update([name for name, _ in pairs])

    def _counted(self, names: frozenset[str]) -> list[Tensor]:
        return [p for p in self._passes.counted() if self._named[id(p)] in names]

    def _state(self, names: frozenset[str], pairs: Sequence[tuple[str, Tensor]]) -> _Measured:
        # one of each param group; without any, the version counter of one has to do
        seen = [p for p in self._counted(names) if p.grad is not None]
        if not seen:
            found = (p for _, p in pairs if p.grad is not None)
            seen = [p for p in (next(found, None),) if p is not None]
        return _Measured(names, [self._now(p) for p in seen])

    def _now(self, parameter: Tensor) -> tuple[Tensor, int, int, int]:
        grad = parameter.grad
        version = -1 if grad is None else grad._version  # noqa: SLF001
        return parameter, id(grad), version, self._passes.count(parameter)

    def _are_current(self, measured: _Measured) -> bool:
        """Return whether no backward pass has changed these gradients, and none was replaced."""
        for parameter, *before in measured.seen:
            _, *now = self._now(parameter)
            grad, version, count = (a == b for a, b in zip(before, now, strict=True))
            # without a count, any change may be a backward pass
            if not (grad and count and (version or before[2] > 0)):
                return False
        return bool(measured.seen)
