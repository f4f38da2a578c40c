"""Record the random numbers that a run draws, and give them to another run, also in another dtype.

Both are dispatch modes: they see the operators that draw random numbers, forward and backward.
Modes belong to a thread. On the CPU the backward pass runs in the thread that calls it; for other devices,
autograd's threads take over the modes of that thread, since those are part of `at::ThreadLocalState`.

A checkpoint that recomputes its part of the forward draws again, in an order of its own: both runs have to
run without checkpoints, see `without_checkpoints`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

# the outputs are an input times a mask: only the mask is random
_DROPOUT: Final = ("aten::native_dropout", "aten::_fused_dropout")
# the slopes are random, the output is the input times these
_RRELU: Final = "aten::rrelu_with_noise"
# says which kernel will draw, and draws nothing
_CHOICE: Final = "aten::_fused_sdp_choice"

_ATTENTION: Final = functional.scaled_dot_product_attention
_RECURRENT: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class ReplayError(RuntimeError):
    """A run drew other random numbers than the run that was recorded."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The random numbers that one operator drew.

    Attributes:
        name: the operator, such as ``aten::bernoulli_``.
        values: what it drew; empty for a kernel that keeps its random numbers to itself.
        is_inside: whether it is such a kernel, for example flash attention with dropout.
    """

    name: str
    values: tuple[Tensor, ...]
    is_inside: bool = False


@dataclass(eq=False)
class Draws:
    """Random numbers in the order in which a run drew them.

    Attributes:
        drawn: one entry for each operator that drew some.
        used: the number of entries that the current or last replay has used.
    """

    drawn: list[Draw] = field(default_factory=list)
    used: int = 0


@contextmanager
def recording() -> Iterator[Draws]:
    """Record the random numbers that operators draw in a block.

    Attention with dropout and recurrent layers compute in separate operators, here and in `replaying`: fused
    kernels keep their random numbers to themselves.

    >>> import torch
    >>> x = torch.ones(4)
    >>> with recording() as draws:
    ...     first = torch.nn.functional.dropout(x)
    >>> with replaying(draws):
    ...     second = torch.nn.functional.dropout(x.double())
    >>> torch.equal(first, second.float())
    True
    """
    draws = Draws()
    with _separate_operators(), _Recording(draws):
        yield draws


@contextmanager
def replaying(draws: Draws) -> Iterator[Draws]:
    """Give the recorded random numbers to operators in a block, from the first on.

    Floating-point numbers have the dtype that the operator would return, whole numbers and bools their own.
    The generators do not advance.

    Raises:
        ReplayError: by an operator in the block, if it is not the operator that drew the next numbers, if it
            draws a tensor of another shape, or if the recorded run drew inside a fused kernel. The caller
            decides whether numbers may be left over, see ``Draws.used``.
    """
    draws.used = 0
    with _separate_operators(), _Replaying(draws):
        yield draws


@contextmanager
def _separate_operators() -> Iterator[None]:
    # functions of torch call it by its name in the module, others may have imported it
    separate = partial(_attention, _ATTENTION)
    with patch.object(functional, _ATTENTION.__name__, separate), _Separate():
        yield


class _Separate(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return _attention(func, *args, **kwargs)
        if getattr(func, "__name__", "") not in _RECURRENT:
            return func(*args, **kwargs)
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            return func(*args, **kwargs)
        finally:
            torch.backends.cudnn.enabled = before


def _attention(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """Call attention, without a fused kernel if it has dropout."""
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    with sdpa_kernel(SDPBackend.MATH) if dropout else nullcontext():
        return attention(*args, **kwargs)


class _OfDraws(TorchDispatchMode):
    # operators of these are seen one by one, as far as they are run by other operators
    supports_higher_order_operators = True

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws


class _Recording(_OfDraws):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if draws_random(func, args, kwargs):
            is_inside = _is_inside(func)
            values = () if is_inside else _drawn(func, args, kwargs, result)
            self._draws.drawn.append(Draw(func._schema.name, values, is_inside))  # noqa: SLF001
        return result


class _Replaying(_OfDraws):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_random(func, args, kwargs):
            return func(*args, **kwargs)
        return _given(func, _arguments(func, args, kwargs), self._next(func))

    def _next(self, func: Any) -> tuple[Tensor, ...]:
        name, drawn, place = func._schema.name, self._draws.drawn, self._draws.used  # noqa: SLF001
        if place == len(drawn):
            raise ReplayError(f"{name} draws random numbers, but the recorded run drew only {place} times")
        draw = drawn[place]
        if draw.is_inside or _is_inside(func):
            inside = draw.name if draw.is_inside else name
            raise ReplayError(
                f"{inside} draws random numbers inside of its kernel, where they can't be recorded; run "
                "without this dropout, or attention with torch.nn.attention.SDPBackend.MATH"
            )
        if draw.name != name:
            raise ReplayError(f"{name} draws random numbers where the recorded run called {draw.name}")
        self._draws.used += 1
        return draw.values


def draws_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    name = func._schema.name  # noqa: SLF001
    # a backward gets the numbers of its forward
    if name == _CHOICE or name.endswith("_backward"):
        return False
    given = _arguments(func, args, kwargs)
    # True if there is no such argument
    if given.get("train") is False or given.get("training") is False:
        return False
    return bool(given.get("dropout_p", given.get("dropout", True)))


def _is_inside(func: Any) -> bool:
    """Return whether a kernel mixes its random numbers with data in a way that is not known here."""
    names = {argument.name for argument in func._schema.arguments}  # noqa: SLF001
    return func.namespace != "aten" or not names.isdisjoint({"dropout_p", "dropout"})


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, with defaults."""
    schema = func._schema  # noqa: SLF001
    found: dict[str, Any] = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    return found | dict(zip([x.name for x in schema.arguments], args, strict=False)) | kwargs


def _drawn(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Tensor, ...]:
    """Return copies of what an operator drew: the step may write to its outputs."""
    name, given = func._schema.name, _arguments(func, args, kwargs)  # noqa: SLF001
    if name.startswith(_DROPOUT):
        return (result[1].clone(),)
    if name.startswith(_RRELU):
        noise = result[1] if name.endswith("_functional") else given["noise"]
        return (noise.detach().clone(),)
    written = _written(func, given)
    outputs = written or (result if isinstance(result, list | tuple) else [result])
    # an eighth or less of the memory
    is_mask = name.startswith("aten::bernoulli")
    return tuple([x.detach().bool() if is_mask else x.detach().clone() for x in outputs])


def _written(func: Any, given: dict[str, Any]) -> list[Tensor]:
    schema = func._schema.arguments  # noqa: SLF001
    return [given[x.name] for x in schema if x.alias_info is not None and x.alias_info.is_write]


def _given(func: Any, given: dict[str, Any], values: tuple[Tensor, ...]) -> Any:
    """Return what an operator would return, had it drawn these values."""
    name, value = func._schema.name, values[0]  # noqa: SLF001
    if name.startswith(_RRELU):
        return _rrelu(name, given, value)
    if name.startswith(_DROPOUT):
        x: Tensor = given["input"] if "input" in given else given["self"]
        _check(name, value, x.shape)
        # the probability of zeros, or that of the others
        kept = 1.0 - given["p"] if "input" in given else given["p"]
        outputs = [x * value * (1.0 / kept if kept else 0.0), value.clone()]
    else:
        shape = given["self"].shape if "_like" in name else given.get("size") or value.shape
        _check(name, value, shape)
        outputs = [_like_result(x, given) for x in values]
    written = _written(func, given)
    for target, output in zip(written, outputs, strict=bool(written)):
        _check(name, output, target.shape)
        target.copy_(output)
    found = written or outputs
    return found[0] if len(func._schema.returns) == 1 else tuple(found)  # noqa: SLF001


def _rrelu(name: str, given: dict[str, Any], noise: Tensor) -> Any:
    x = given["self"]
    _check(name, noise, x.shape)
    noise = noise.to(x.dtype)
    output = x * noise
    if name.endswith("_functional"):
        return output, noise
    given["noise"].copy_(noise)
    target = x if name.endswith("noise_") else given.get("out")
    return output if target is None else target.copy_(output)


def _like_result(value: Tensor, given: dict[str, Any]) -> Tensor:
    if not value.is_floating_point() and value.dtype != torch.bool:
        return value.clone()
    tensors = [x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = given.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return value.to(dtype, copy=True)


def _check(name: str, value: Tensor, shape: Any) -> None:
    if list(value.shape) != list(shape):
        raise ReplayError(
            f"{name} draws a tensor of shape {list(shape)}, but the recorded run drew {list(value.shape)}"
        )
