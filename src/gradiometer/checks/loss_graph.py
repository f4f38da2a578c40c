"""What the autograd graph of a loss leads to: parameters of the model and others, and what it is made of."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

# nodes that are visited at most: some 20 ms
_NODES: Final = 20_000
# part of the name of a node that runs a part of the forward again in the backward
_REENTRANT: Final = "CheckpointFunction"
# FSDP's, which has the elements of the model's parameters
_FLAT: Final = "FlatParameter"
# containers in containers, and objects in them, that are looked at
_DEPTH, _OBJECTS = 3, 1_000


class Leaves(NamedTuple):
    """What a graph leads to, see `ModelState`; ``foreign``: the parameters themselves."""

    reached: bool | None
    unregistered: tuple[str, ...] = ()
    foreign: tuple[nn.Parameter, ...] = ()


def leaves_of(
    loss: Tensor,
    parameters: Sequence[Tensor],
    modules: Mapping[str, nn.Module],
    held: Collection[int] = (),
) -> Leaves:
    """Return what the graph of a loss leads to.

    Args:
        loss: the loss, with its graph.
        parameters: those that are watched.
        modules: the modules of the model, by the prefix of their names.
        held: the ids of what known optimizers hold, which is meant to be trained.
    """
    own = {id(parameter) for parameter in parameters}
    found, is_whole = variables(loss, own)
    reached = any(id(variable) in own for variable in found)
    if not is_whole:
        return Leaves(reached or None)
    # also those that are not watched, such as frozen ones
    own |= {id(p) for module in modules.values() for p in module.parameters()}
    # an input that requires a gradient is no parameter
    left = {id(x): x for x in found if isinstance(x, nn.Parameter) and id(x) not in own and id(x) not in held}
    if not left or not modules or any(type(x).__name__ == _FLAT for x in left.values()):
        return Leaves(reached)
    unregistered = []
    for attribute, kind, tensors in attributes(modules):
        there = [left.pop(id(x)) for x in tensors if id(x) in left]
        if there:
            elements = sum(x.numel() for x in there)
            count = f"{len(there)} parameter{'s' * (len(there) > 1)} with {elements:,} elements"
            unregistered.append(f"{count} in the {kind} {attribute}")
    return Leaves(reached, tuple(unregistered), tuple(left.values()))


def bounded_logits(loss: Tensor) -> str:
    """Return a softmax or sigmoid of a loss, and the function with bounded values before it; empty without.

    A loss that has its own softmax or sigmoid takes logits of any size. Its operations are those nearest to
    it, so a few nodes are visited, the nearest first. Compiled code hides them. A ReLU or tanh counts if the
    log_softmax is taken at labels: a divergence may compare features. A factor between, as of a soft cap
    ``30 * tanh(z / 30)``, is meant.

    >>> import torch
    >>> from torch.nn import functional
    >>> z = torch.randn(2, 3, requires_grad=True)
    >>> bounded_logits(functional.cross_entropy(z.softmax(-1), torch.tensor([0, 1])))
    'log_softmax of softmax'
    >>> bounded_logits(functional.cross_entropy(z.relu(), torch.tensor([0, 1])))
    'log_softmax of relu'
    >>> bounded_logits(functional.cross_entropy(z, torch.tensor([0, 1])))
    ''
    """
    seen, nodes = {loss.grad_fn}, deque([loss.grad_fn])
    at_labels: set[Any] = set()
    while nodes and len(seen) < _NEAR:
        node: Any = nodes.popleft()
        name = type(node).__name__
        function = _OWN.get(name)
        source = node.next_functions[0][0] if node.next_functions else None
        while (
            function
            and source is not None
            and _SAME.fullmatch(type(source).__name__)
            and source.next_functions
        ):
            source = source.next_functions[0][0]
        inner = None if source is None else _BOUNDED.get(type(source).__name__)
        is_compared = inner in {"relu", "tanh"} and function == "log_softmax" and node not in at_labels
        if function and inner and (function != "nll_loss" or inner == "softmax") and not is_compared:
            return f"{function} of {inner}"
        following = [x for x, _ in node.next_functions if x is not None and x not in seen]
        if _PICKS.fullmatch(name) or (node in at_labels and _SAME.fullmatch(name)):
            at_labels.update(x for x, _ in node.next_functions)
        seen.update(following)
        nodes.extend(following)
    return ""


# nodes of a loss that are visited
_NEAR: Final = 300
_OWN: Final = {
    "LogSoftmaxBackward0": "log_softmax",
    "NllLossBackward0": "nll_loss",
    "NllLoss2DBackward0": "nll_loss",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
}
_BOUNDED: Final = {
    "SoftmaxBackward0": "softmax",
    "SigmoidBackward0": "sigmoid",
    "ReluBackward0": "relu",
    "TanhBackward0": "tanh",
}
# nodes that pick the elements of labels
_PICKS: Final = re.compile(r"(NllLoss|NllLoss2D|Gather)Backward\d*")
# nodes that change the shape, the layout or the dtype, or leave elements out
_SAME: Final = re.compile(
    r"(View|UnsafeView|ReshapeAlias|Alias|ToCopy|Clone|Slice|Transpose|T|Permute|Squeeze|Unsqueeze|Select|Index"
    r"|IndexSelect|MaskedSelect|Unbind|Split)Backward\d*"
)


def variables(loss: Tensor, own: Collection[int]) -> tuple[list[Tensor], bool]:
    """Return the leaves of a graph, and whether all of it was visited.

    It is not if it is too large, or if a part of it is built in the backward only, as under reentrant
    checkpoints. Of such a graph, a leaf among ``own`` is enough.
    """
    seen: set[Any] = {loss.grad_fn}
    nodes: list[Any] = [loss.grad_fn]
    found = []
    is_whole = True
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
            if not is_whole and id(variable) in own:
                break
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
        is_whole = is_whole and _REENTRANT not in type(node).__name__
        if len(seen) > _NODES:
            return found, False
    return found, is_whole


def attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Yield the containers with tensors or layers that modules have as attributes: name, class, tensors."""
    for prefix, root in modules.items():
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if name not in _REGISTERED and isinstance(value, (list, tuple, set, dict)):
                    tensors = list(tensors_in(value, [_OBJECTS]))
                    parts = [x for x in f"{prefix}{path}".split(".") if x not in _WRAPPERS]
                    yield ".".join([*parts, name]), type(value).__name__, tensors


_REGISTERED: Final = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# attributes in which DataParallel and torch.compile have a model
_WRAPPERS: Final = frozenset({"", "module", "_orig_mod"})


def tensors_in(value: object, left: list[int], depth: int = _DEPTH) -> Iterable[Tensor]:
    """Yield the tensors in containers, and the parameters of modules in them."""
    left[0] -= 1
    if left[0] < 0:
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, (list, tuple, set, dict)):
        for part in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(part, left, depth - 1)
