"""Look at the batches of a few steps: the inputs of the model, its logits, and the labels of the loss."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

from gradiometer.inputs import unwrapped
from gradiometer.monitor.batch_values import Batch, batch_of, measured
from gradiometer.monitor.hooks import ModuleHook
from gradiometer.ops import is_capturing
from gradiometer.recorder import BatchLook
from gradiometer.stats import Pending, is_repeating

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from gradiometer.monitor.failures import Failures

# the first steps are looked at, and then the powers of two
_FIRST: Final = 8
# looks that are kept: the first ones and the last
_KEPT: Final = 16


class BatchReader(ModuleHook):
    """A forward hook of a model that looks at the first batch of a step, if the step is due.

    The labels are read from the gradient of the logits, so a look is complete in the backward pass. Nothing
    is read in compiled code, in a capture or in a step that is repeated. Several models are left out: nobody
    knows which of them a step is about.
    """

    def __init__(self, modules: Mapping[str, nn.Module], failures: Failures) -> None:
        self._failures = failures
        self._is_due, self._steps = True, 0
        self._batch: Batch | None = None
        self._started: tuple[Pending[list[float]], tuple[int, ...], bool] | None = None
        self._waiting: deque[tuple[int, Pending[list[float]], tuple[int, ...], bool]] = deque()
        self._looks: tuple[BatchLook, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.attach(modules)

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Look at the batches of this model from now on; at none if there are several, or none."""
        while self._handles:
            self._handles.pop().remove()
        self._batch, self._watched = None, weakref.WeakSet()
        for module in _wrapped(*modules.values()) if len(modules) == 1 else ():
            self._watched.add(module)
            self._handles.append(module.register_forward_hook(self, with_kwargs=True))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Look at a forward pass, after it."""
        # first: nothing that changes may be read in a trace
        if torch.compiler.is_compiling() or not self._is_due:
            return
        self._failures.attempt("batch", self._begin, module, args, kwargs, output)

    def end(self, step: int) -> tuple[BatchLook, ...]:
        """End a step, and return the looks that have arrived, in the order of their steps."""
        if self._started is not None:
            self._waiting.append((step, *self._started))
            self._started = None
        while self._waiting and self._waiting[0][1].ready():
            at, pending, shape, is_tokens = self._waiting.popleft()
            length = shape[1] if len(shape) > 2 else 1
            look = BatchLook(at, shape[0], length, shape[-1], is_tokens, *pending.result())
            self._looks = (*self._looks[: _KEPT - 1], look)
        self._steps += 1
        self._is_due = self._steps < _FIRST or not self._steps & (self._steps - 1)
        self._batch = None
        return self._looks

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # of a replica, a trace, or a part of the forward that runs again in the backward
        if (
            module not in self._watched
            or torch._C._get_tracing_state() is not None  # noqa: SLF001
            or _len_torch_dispatch_stack()
            or torch._C._current_graph_task_id() >= 0  # noqa: SLF001
        ):
            return
        logits = _logits_of(output)
        if (
            logits is None
            or torch._C._functorch.is_functorch_wrapped_tensor(logits)  # noqa: SLF001
            or is_capturing(logits.device)
            or is_repeating(module.parameters())
        ):
            return
        inner = unwrapped(module)
        config = getattr(inner, "config", None)
        with torch.no_grad():
            # without inputs for its decoder, such a model makes them of the labels
            prefix = "decoder" if getattr(config, "is_encoder_decoder", False) else ""
            batch = batch_of({**_named(inner, args), **kwargs}, logits, _padding_of(inner), prefix)
        self._batch = batch
        node: Node | None = logits.grad_fn
        place = logits.output_nr
        # the loss may be computed from what was converted afterwards, as Accelerate does
        while node is not None and type(node).__name__ == "ToCopyBackward0":
            node, place = node.next_functions[0]
        if node is not None:
            node.register_prehook(partial(self._end, weakref.ref(batch), place))

    def _end(self, of: weakref.ref[Batch], place: int, grads: tuple[Tensor | None, ...]) -> None:
        """Look at the gradient of the logits."""
        batch = of()
        if batch is None or torch.compiler.is_compiling() or batch is not self._batch:
            return
        self._batch, self._is_due = None, False
        self._failures.attempt("batch", self._measure, batch, grads[place])

    def _measure(self, batch: Batch, grad: Tensor | None) -> None:
        if type(grad) is Tensor and not is_capturing(grad.device) and batch.is_as_it_was():
            with torch.no_grad():
                values = measured(batch, grad)
                pending = Pending([values], lambda host: host[0].tolist())
            self._started = pending, batch.shape, bool(batch.tokens)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and what it wraps: a loop may call one or the other."""
    while not isinstance(module, torch.jit.ScriptModule):
        yield module
        trained = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(trained) != 1 or next(module.parameters(recurse=False), None) is not None:
            return
        (module,) = trained


def _logits_of(output: Any) -> Tensor | None:
    """Return the logits among what a model returns; None if there is nothing like that."""
    found = output
    if isinstance(output, dict):
        found = output.get("logits", next(iter(output.values()), None))
    elif isinstance(output, (list, tuple)):
        found = next((x for x in output if isinstance(x, Tensor) and x.dim() > 1), None)
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    if type(found) is not Tensor or not (found.requires_grad and found.is_floating_point()):
        return None
    is_fit = found.dim() in {2, 3} and found.shape[-1] > 1 and found.numel() > 0
    return found if is_fit and found.layout == torch.strided else None


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return positional arguments by the names that the model's forward has for them."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [f"argument {i}" for i in range(len(names), len(args))]
    return dict(zip(names, args, strict=False))


def _padding_of(module: nn.Module) -> int | None:
    """Return the token that the first embedding takes for padding."""
    given = (
        x.padding_idx for x in module.modules() if isinstance(x, nn.Embedding) and x.padding_idx is not None
    )
    found = next(given, getattr(getattr(module, "config", None), "pad_token_id", None))
    return found if isinstance(found, int) else None
