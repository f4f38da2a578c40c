"""Find the optimizers inside wrappers, and the parameters whose master weights they hold."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.inputs import is_dtensor, local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# wrappers that change neither weights nor gradients themselves
_THIN: Final = frozenset({"AcceleratedOptimizer"})
_BY_NAME: Final = (
    "watch the master weights by name, gm.watch([(name, master), ...], optimizer), or use gm.Monitor(model) "
    "with record() and advance()"
)


class Wrapped(NamedTuple):
    """An optimizer, and what it was passed as.

    Attributes:
        optimizer: the innermost optimizer, which updates the parameters that it holds.
        outer: the outermost wrapper that may change weights or gradients in its own ``step``; None without.
        given: the optimizer and all of its wrappers.
    """

    optimizer: Optimizer
    outer: Any
    given: tuple[Any, ...]


def optimizers_in(given: Any) -> list[Wrapped]:
    """Return the optimizers that were passed, without their wrappers.

    Raises:
        TypeError: for something else, and for a wrapper of several optimizers of the same parameters.
        ValueError: if there are none.
    """
    if given is None:
        raise TypeError("watch: pass the optimizer too: gm.watch(model, optimizer)")
    several = given if isinstance(given, (list, tuple)) else [given]
    found = [wrapped for each in several for wrapped in _unwrapped(each, ())]
    if not found:
        raise ValueError("watch: got no optimizer; pass those that update the model")
    return found


def _unwrapped(each: Any, outside: tuple[Any, ...]) -> list[Wrapped]:
    inner, is_container = _inside(each)
    if len(inner) > 1 and not is_container:
        names = " and ".join([f".{name}" for name in inner])
        msg = f"watch: this {type(each).__name__} holds several optimizers, in {names}: pass the one that "
        raise TypeError(msg + "updates the model, or several in the order in which they step")
    if not inner:
        if not isinstance(each, Optimizer):
            msg = f"watch: expected a torch.optim.Optimizer, or several, got {type(each).__name__}"
            raise TypeError(msg + "; call gm.watch(model, optimizer)" * isinstance(each, nn.Module))
        thick = [wrapper for wrapper in outside if type(wrapper).__name__ not in _THIN]
        return [Wrapped(each, thick[0] if thick else None, (*outside, each))]
    # a container only calls the step of each
    outside = () if is_container else (*outside, each)
    return [wrapped for part in inner.values() for wrapped in _unwrapped(part, outside)]


def _inside(wrapper: Any) -> tuple[dict[str, Optimizer], bool]:
    """Return the optimizers in attributes of a wrapper, and whether they are in one list."""
    found: dict[int, tuple[str, Optimizer]] = {}
    lists = []
    for name, value in getattr(wrapper, "__dict__", {}).items():
        if isinstance(value, Optimizer) and value is not wrapper and _share(wrapper, value):
            found.setdefault(id(value), (name, value))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(x, Optimizer) for x in value):
            lists.append(value)
    if not found and len(lists) == 1:
        return {f"{i}": optimizer for i, optimizer in enumerate(lists[0])}, True
    return dict(found.values()), False


def _share(wrapper: Any, inner: Optimizer) -> bool:
    """Return whether a wrapper has no parameters of its own, or some of an inner optimizer's."""
    held = getattr(wrapper, "param_groups", None) or []
    theirs = {id(p) for group in inner.param_groups for p in group["params"]}
    return not held or any(id(p) in theirs for group in held for p in group["params"])


def parts_of(
    optimizers: Sequence[Optimizer], names: dict[Tensor, str]
) -> tuple[list[list[tuple[str, Tensor]]], dict[str, Tensor]]:
    """Return the named parameters of each optimizer, and the master weights by name.

    Parameters that no optimizer has are the last one's. An optimizer of master weights has the parameters
    that they copy.

    Raises:
        ValueError: for an optimizer that holds neither parameters of the model nor master weights of them.
    """
    parts, left = [], dict(names)
    masters: dict[str, Tensor] = {}
    for optimizer in optimizers:
        held = list(_held_by(optimizer))
        own = [p for p in held if p in names]
        copied = masters_of(optimizer, left) if len(own) < len(held) else {}
        if not own and len(copied) < len(held):
            raise ValueError(_not_held(optimizer, held))
        masters |= {names[p]: master for p, master in copied.items()}
        own += copied
        parts.append([(names[p], p) for p in own])
        for p in own:
            left.pop(p, None)
    parts[-1] += [(name, p) for p, name in left.items()]
    return parts, masters


def one_of_each_group(
    optimizer: Optimizer, part: Sequence[tuple[str, Tensor]], masters: Mapping[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """Return a parameter of each param group, by name, to which a backward pass may add a gradient."""
    held = {masters.get(name, p): (name, p) for name, p in part}
    found = []
    for group in optimizer.param_groups:
        own = (held[p] for p in group["params"] if p in held)
        found.append(next((pair for pair in own if pair[1].requires_grad and pair[1].is_leaf), None))
    return [each for each in found if each is not None]


def masters_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[Tensor, Tensor]:
    """Return the master weight of each of these parameters that the optimizer holds as a copy.

    A master weight has its parameter's shape and a wider dtype, and is equal to it, bit for bit, when it is
    converted to the parameter's dtype. Equal parameters are paired in their order. This waits for the device.

    Raises:
        ValueError: if equal parameters have masters in several param groups, so their order is not known.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    held = [(p, number) for number, group in enumerate(groups) for p in group if p not in names]
    taken = {p for group in groups for p in group}
    copied = [p for p in names if p not in taken and p.is_floating_point()]
    if len(held) == len(copied) and all(
        _is_master(copy, p) for (copy, _), p in zip(held, copied, strict=True)
    ):
        return {p: copy for (copy, _), p in zip(held, copied, strict=True)}
    alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in copied:
        alike[parameter.shape].append(parameter)
    used: defaultdict[torch.Size, set[int]] = defaultdict(set)
    for copy, number in held:
        used[copy.shape].add(number)
    found: dict[Tensor, Tensor] = {}
    for copy, _ in held:
        there = alike[copy.shape]
        equal = [p for p in there if _is_master(copy, p)]
        if len(equal) > 1 and len(used[copy.shape]) > 1:
            some = " and ".join([repr(names[p]) for p in equal[:2]])
            msg = f"watch: {some} are equal, so which master weights of this {type(optimizer).__name__} are "
            raise ValueError(msg + "theirs is not known: " + _BY_NAME)
        if equal:
            found[equal[0]] = copy
            # by identity: tensors compare their elements
            alike[copy.shape] = [p for p in there if p is not equal[0]]
    return found


def _is_master(copy: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor is a copy of a parameter in a wider dtype."""
    if copy.shape != parameter.shape or not (copy.is_floating_point() and parameter.is_floating_point()):
        return False
    if copy.element_size() <= parameter.element_size() or copy.is_meta or parameter.is_meta:
        return False
    distributed = [is_dtensor(type(x)) for x in (copy, parameter)]
    if any(distributed):
        if not all(distributed) or copy.placements != parameter.placements:  # type: ignore[attr-defined]
            return False
        copy, parameter = local_shard(copy), local_shard(parameter)
    rounded = copy.detach().to(parameter.device, parameter.dtype)
    return torch.equal(_bits(rounded), _bits(parameter.detach()))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _held_by(optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _not_held(optimizer: Optimizer, held: Sequence[Tensor]) -> str:
    """Return the message for an optimizer that holds none of the model's parameters, nor copies of them."""
    kind = type(optimizer).__name__
    if not held:
        return f"watch: this {kind} holds no parameters; add them to it before"
    others = "another tensor" if len(held) == 1 else f"{len(held)} other tensors, the first"
    first = f"{tuple(held[0].shape)} {str(held[0].dtype).removeprefix('torch.')}"
    return (
        f"watch: this {kind} holds none of the watched model's parameters, but {others} of shape {first}: "
        "watch the model that it updates, or create it after the model is moved or replaced. If it holds "
        "copies of the parameters, such as master weights, these are not equal to the parameters in their "
        f"dtype: load the same weights into both, or {_BY_NAME}"
    )
