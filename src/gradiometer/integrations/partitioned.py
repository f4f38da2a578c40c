"""Watch frameworks that keep gradients in their own buffers, of which each rank has a part.

An adapter, such as `gradiometer.integrations.deepspeed`, finds this rank's parts of the weights and gradients
in the framework's buffers. The `Monitor` watches views of them, by the names of the model's parameters, and
merges the parts of all ranks.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer import distributed, inputs
from gradiometer.distributed import Mesh, Ranks, Sharding, ShardSpec
from gradiometer.integrations.watched_step import WatchedStep
from gradiometer.monitor import Monitor, raise_of_handlers
from gradiometer.recorder import Driver, gradient_framework
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOG = logging.getLogger("gradiometer")
# the packages with an adapter, which is the module here of the same name
_PACKAGES: Final = {"DeepSpeed": "deepspeed", "Megatron-LM": "megatron"}
# their wrappers of a model
_WRAPPERS: Final = frozenset({"DeepSpeedEngine", "_BaseDataParallel", "Float16Module"})


class Part(NamedTuple):
    """This rank's part of a tensor.

    ``parameter``: of the model. ``weights``: the part of what the optimizer updates, such as master weights;
    flat, and empty if this rank has none. ``shape``: of the whole tensor, over all ranks. ``placements``: for
    each dimension of the mesh ``"S"`` if its ranks hold different parts, or ``"R"`` if they hold copies.
    ``first``: the index in the flat whole tensor at which the part begins; None: it is not such a range.
    """

    name: str
    parameter: Tensor
    weights: Tensor
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    first: int | None = 0


class Source(Protocol):
    """What the adapter of a framework tells of each step."""

    def weights(self) -> list[Tensor]:
        """Return this rank's parts of the weights, in the order of the parts."""

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's parts before they are clipped, in the order of the parts; None: not measured."""

    def loss_scale(self) -> Tensor | float:
        """Return the scale of these gradients; 1.0 for none."""

    def was_skipped(self, result: Any) -> bool:
        """Return whether the framework left out the update; ``result``: what its ``step`` returned."""


def framework_of(model: Any, optimizer: Any) -> str | None:
    """Return the package whose buffers hold the gradients of a model; None for gradients in ``p.grad``."""
    for kind in type(model).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in _PACKAGES.values() and kind.__name__ in _WRAPPERS:
            return root
    for kind in () if isinstance(optimizer, Optimizer) else type(optimizer).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in _PACKAGES.values():
            return root
    return _PACKAGES.get(gradient_framework(model.parameters())) if isinstance(model, nn.Module) else None


def described(model: Any, kind: str) -> str:
    """Return the kind of a trainer's sharding, with the stage of DeepSpeed's."""
    stage = getattr(model, "zero_optimization_stage", None)
    if not (has_class(model, "DeepSpeedEngine") and callable(stage)):
        return kind
    return f"DeepSpeed ZeRO stage {int(stage())}"


def has_class(value: Any, name: str) -> bool:
    """Return whether a value has a class of this name, without importing the package."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def place_in(group: Any) -> tuple[int, int]:
    """Return this rank's place in a group, and the number of its ranks; None: all ranks."""
    if not distributed.is_active():
        return 0, 1
    place, ranks = distributed.ranks_of(distributed.group_of(group))
    return place, len(ranks)


def watch_parts(
    model: nn.Module,
    parts: Sequence[Part],
    source: Source,
    owner: Any,
    options: Mapping[str, Any],
    *,
    mesh: Mesh,
    group: Any = None,
) -> Monitor:
    """Return a monitor of the parts, which ``owner.step`` calls: the step of the framework's optimizer.

    ``mesh``: the ranks that hold the parts. ``group``: all of them; None: all ranks.
    """
    if options.get("keep_weights"):
        raise ValueError("watch(keep_weights=True) needs whole weights on each rank; leave it out")
    ranks = options.get("ranks", True)
    if not isinstance(ranks, bool):
        msg = "watch(ranks=...): the parts that ranks hold are read from the framework; pass True or False"
        raise TypeError(msg)
    tensors = [_view(part) for part in parts]
    pairs = _Parts(zip([part.name for part in parts], tensors, strict=True))
    pairs._orig_mod = model  # noqa: SLF001 as in a compiled model, whose class names the run
    if ranks and distributed.is_active():
        home = next((x.device for x in tensors if x.device.type != "cpu"), None)
        agreed = Ranks.of_sharding(_sharding(parts, tensors, mesh), home, group=group)
        options = {**options, "ranks": agreed}
    monitor = Monitor(pairs, **options)
    monitor.set_driver(Driver("watch", model=model))
    loop = _Loop(monitor, tensors, source, owner, has_updates=bool(options.get("updates")))
    if isinstance(owner, Optimizer):
        monitor.call_at_close(owner.register_step_pre_hook(lambda *_: loop.before()).remove)
        monitor.call_at_close(owner.register_step_post_hook(lambda *_: loop.after(None)).remove)
    else:
        monitor.call_at_close(WatchedStep(owner, loop.step_of).unwrap)
    monitor.call_at_close(loop.clear)
    return monitor


class _Parts(list[tuple[str, Tensor]]):
    """Pairs of names and tensors, and the model that they are parts of."""

    _orig_mod: nn.Module


def _view(part: Part) -> Tensor:
    """Return a leaf that shares the memory of the weights; its ``grad`` may have another dtype."""
    weights = part.weights.detach()
    if weights.numel() == part.parameter.numel():
        weights = weights.view(part.parameter.shape)
    weights.requires_grad_(part.parameter.requires_grad)
    if weights.requires_grad:
        weights.grad_dtype = None
    return weights


def _sharding(parts: Sequence[Part], tensors: Sequence[Tensor], mesh: Mesh) -> Sharding:
    specs = [
        ShardSpec(part.shape, str(x.dtype).removeprefix("torch."), 0, part.placements)
        for part, x in zip(parts, tensors, strict=True)
    ]
    ranges = {part.name: _indices(part, x) for part, x in zip(parts, tensors, strict=True)}
    unplaced = frozenset([part.name for part in parts if part.first is None])
    return Sharding(tuple(ranges), tuple(specs), (mesh,), ranges, unplaced)


def _indices(part: Part, tensor: Tensor) -> inputs.Part | None:
    """Return which elements of the whole tensor a part is; None for all."""
    if part.first is None or tensor.shape == part.shape:
        return None
    box = inputs.Box((0,), (tensor.numel(),), (part.first,))
    return inputs.Part((math.prod(part.shape),), (box,))


class _Loop:
    """Calls a monitor from the step of a framework's optimizer. An error ends the watching, not training."""

    def __init__(
        self, monitor: Monitor, tensors: Sequence[Tensor], source: Source, owner: Any, *, has_updates: bool
    ) -> None:
        self._monitor, self._tensors, self._source, self._owner = monitor, tensors, source, owner
        self._has_updates = has_updates
        self._has_failed = False
        self._scale: tuple[Any, Tensor | None] = (1.0, None)

    def step_of(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``step``, and watch it."""
        self.before()
        try:
            result = step(*args, **kwargs)
        except BaseException:
            self.clear()
            raise
        self.after(result)
        return result

    def before(self) -> None:
        """Record the gradients."""
        if self._is_over:
            return
        try:
            self._follow()
            for tensor, grad in zip(self._tensors, self._source.gradients(), strict=True):
                tensor.grad = None if grad is None else grad.detach().view(tensor.shape)
            self._monitor.record(inv_scale=self._inv_scale())
            self._monitor.begin_updates()
        except Exception as error:  # noqa: BLE001 training goes on
            self._fail(error)

    def record_updates(self) -> None:
        """Measure the updates while the gradients are there; only needed before the end of the step."""
        if self._has_updates and not self._is_over:
            self._monitor.record_updates()

    def after(self, result: Any) -> None:
        """End the step."""
        if self._is_over:
            self.clear()
            return
        try:
            self.record_updates()
            # of a framework that skips steps; those with a NaN or Inf are marked
            self._monitor.skips |= self._source.was_skipped(result)
            groups = self._owner.param_groups
            rate = groups[0].get("lr") if groups else None
        except Exception as error:  # noqa: BLE001 training goes on
            self._fail(error)
            return
        self.clear()
        self._monitor.advance(lr=rate)

    def clear(self) -> None:
        """Let go of the gradients, whose memory the framework may need."""
        for tensor in self._tensors:
            tensor.grad = None

    def _follow(self) -> None:
        """View the weights where they are now: a framework may move them to the CPU and back."""
        for tensor, weights in zip(self._tensors, self._source.weights(), strict=True):
            if tensor.data_ptr() != weights.data_ptr():
                tensor.data = weights.detach().view(tensor.shape)

    def _inv_scale(self) -> Tensor | None:
        scale = self._source.loss_scale()
        if isinstance(scale, Tensor):
            return scale.detach().double().reciprocal().float().reshape(())
        if scale != self._scale[0]:
            # a copy to the device, only when the scale changes
            home = next((x.device for x in self._tensors if x.device.type != "cpu"), torch.device("cpu"))
            self._scale = scale, torch.tensor(1.0 / scale, dtype=torch.float32, device=home)
        return self._scale[1]

    def _fail(self, error: Exception) -> None:
        raise_of_handlers(error)
        self._has_failed = True
        self.clear()
        text = "watch: %s; training continues without the monitor"
        _LOG.warning(text, one_line(f"{type(error).__name__}: {error}"))

    @property
    def _is_over(self) -> bool:
        return self._has_failed or self._monitor.closed
