"""Use copies of parameters in float64, wherever a step refers to the parameters themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from gradiometer.checks.batch import like
from gradiometer.checks.lifting import WIDE, Lifting, wide_default
from gradiometer.checks.precision import Copy
from gradiometer.checks.random_replay import ReplayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

_WIDEST = frozenset(WIDE.values())


class Originals(TorchFunctionMode):
    """Replaces tensors by their copies in float64, in the arguments of all of torch's functions.

    This makes a difference where a step has tensors from elsewhere than its modules and arguments: parameters
    from a list, or from an optimizer, whose `zero_grad` then clears the gradients of the copies. Copies have
    the gradients, hooks and attributes of the originals; those of tensors that share memory share it, too.

    Args:
        lifting: has the memory of the copies.
        names: the names of parameters by their identity.

    Attributes:
        grads: copies of the gradients that `read` found, by name.
        order: names in the order in which the backward pass completed gradients.
    """

    def __init__(self, lifting: Lifting, names: Mapping[int, str]) -> None:
        super().__init__()
        self._lifting = lifting
        self.grads: dict[str, Tensor] = {}
        self.order: dict[str, None] = {}
        self._names = names
        self._attributes: list[tuple[Tensor, dict[str, Any]]] = []
        # by the identity of the original, which is kept so that it stays valid
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._lifting.is_paused:
            return func(*args, **kwargs)
        args, kwargs = self.mapped(args), self.mapped(kwargs)
        if func in {torch.tensor, torch.as_tensor}:
            # of numbers that only float64 has, such as the smallest one
            if kwargs.get("dtype") in WIDE:
                kwargs["dtype"] = WIDE[kwargs["dtype"]]
            with wide_default():
                return func(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except ReplayError:
            raise
        except RuntimeError:
            # the kernels that the step allows have no float64
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)

    @property
    def is_on(self) -> bool:
        """Whether this thread runs the step, or its backward pass."""
        return self._lifting.is_on

    def entries(self, models: Iterable[nn.Module]) -> list[Copy]:
        """Return the copies of all parameters and buffers of models; tied ones have one copy."""
        return [
            Copy(module, table, name, self.copy(x), x)
            for model in models
            for module in model.modules()
            for table in (module._parameters, module._buffers)  # noqa: SLF001
            for name, x in table.items()
            if x is not None and _is_copied(x)
        ]

    def inputs(self, value: Any) -> Any:
        """Return arguments of a step with copies of floating-point tensors, also in containers."""
        if isinstance(value, Tensor):
            return self.copy(value) if _is_copied(value) else value
        if isinstance(value, Mapping):
            return like(value, {key: self.inputs(x) for key, x in value.items()})
        if type(value) in {list, tuple} or hasattr(value, "_fields"):
            return like(value, [self.inputs(x) for x in value])
        return value

    def read(self, parameters: Iterable[Tensor]) -> None:
        """Keep copies of the gradients that parameters have now, unless they were read before."""
        for p in parameters:
            name = self._names.get(id(p))
            grad = self._copies[id(p)][1].grad if id(p) in self._copies else None
            if name is not None and name not in self.grads and grad is not None:
                self.grads[name] = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()

    def copy(self, x: Tensor) -> Tensor:
        """Return the copy of a tensor, always the same."""
        if id(x) not in self._copies:
            # also where inference mode is on: its tensors have no gradients
            with torch.inference_mode(mode=False), torch.no_grad(), self._lifting.paused():
                copy = self._lifting.copy(x.detach())
                if isinstance(x, nn.Parameter):
                    copy = Tensor._make_subclass(type(x), copy, x.requires_grad)  # noqa: SLF001
                copy.requires_grad_(x.requires_grad)
            self._copies[id(x)] = x, copy
            self._copy_attributes(x, copy)
        return self._copies[id(x)][1]

    def _copy_attributes(self, x: Tensor, copy: Tensor) -> None:
        # what the step sets on one of them, such as the gradients of examples, is there on the other
        self._attributes.append((x, dict(x.__dict__)))
        copy.__dict__ = x.__dict__
        if x.is_leaf and x.grad is not None:
            copy.grad = x.grad.detach().to(copy.dtype, copy=True)
        if not x.is_leaf or not x.requires_grad:
            return
        name = self._names.get(id(x))
        if name is not None:
            copy.register_post_accumulate_grad_hook(functools.partial(self._completed, name))
        for hook in (x._backward_hooks or {}).values():  # noqa: SLF001
            copy.register_hook(hook)
        for hook in (getattr(x, "_post_accumulate_grad_hooks", None) or {}).values():
            # which may look for the parameter in a table
            copy.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(x))

    def restore_attributes(self) -> None:
        """Restore the attributes of the originals."""
        for x, before in self._attributes:
            x.__dict__.clear()
            x.__dict__.update(before)

    def _completed(self, name: str, _: Tensor) -> None:
        self.order.pop(name, None)
        self.order[name] = None

    def mapped(self, value: Any) -> Any:
        """Return arguments with copies in place of tensors, also in lists, tuples and dicts."""
        if isinstance(value, Tensor):
            known = self._copies.get(id(value))
            if known is not None and known[0] is value:
                return known[1]
            is_copied = value.dtype in WIDE and _is_copied(value)
            if value.requires_grad:
                # the gradient of one with a graph would have to be narrow again
                is_copied = is_copied and value.is_leaf
            else:
                is_copied = is_copied and not self._lifting.is_large(value)
            return self.copy(value) if is_copied else value
        if type(value) in {list, tuple}:
            return type(value)([self.mapped(x) for x in value])
        return {key: self.mapped(x) for key, x in value.items()} if type(value) is dict else value


def _is_copied(x: Tensor) -> bool:
    # those of torch.func have no memory of their own
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001
        return False
    kind = type(x)
    # a parameter with attributes, and not one with operators of its own
    is_plain = issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    if not is_plain and kind not in {Tensor, nn.Buffer}:
        return False
    return x.layout == torch.strided and (x.dtype in WIDE or x.dtype in _WIDEST)


@contextmanager
def in_backward(originals: Originals) -> Iterator[None]:
    """Use a mode in hooks and custom functions of the backward pass, too: `Tensor.backward` leaves it."""
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # noqa: SLF001

    def with_mode(*args: Any, **kwargs: Any) -> Any:
        # the function is one for all threads
        with originals if originals.is_on else nullcontext():
            return run(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", with_mode):
        yield


@contextmanager
def without_updates(originals: Originals, optimizers: Iterable[Optimizer]) -> Iterator[list[int]]:
    """Read gradients where optimizers would begin their step, and leave the step out.

    Returns:
        The identities of the optimizers that were called, once for each call.
    """
    calls: list[int] = []

    def read(optimizer: Optimizer, *_: Any) -> None:
        if originals.is_on:
            calls.append(id(optimizer))
            originals.read([p for group in optimizer.param_groups for p in group["params"]])

    def left_out(optimizer: Optimizer) -> Any:
        @functools.wraps(optimizer.step)
        def step(closure: Any = None, **_: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            read(optimizer)
            return loss

        return step

    before = []
    for optimizer in optimizers:
        own = vars(optimizer)
        before.append((own, dict(own)))
        # a scheduler asks for this
        own |= {"step": left_out(optimizer), "_opt_called": True}
    # a step that was compiled or wrapped before updates the copies
    hook = register_optimizer_step_pre_hook(read)
    try:
        yield calls
    finally:
        hook.remove()
        for own, values in before:
            own.clear()
            own.update(values)
