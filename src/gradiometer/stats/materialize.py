"""Copy several collections, ratios and losses to the host in one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradiometer.stats.host_copy import Pending, fetch, outside_of_a_graph
from gradiometer.stats.named_stats import NamedStats

if TYPE_CHECKING:
    from collections.abc import Callable


def materialize(tree: Any) -> Any:
    """Copy all stats and tensors in a tree to the host in one transfer. Waits for the device.

    Args:
        tree: any nesting of dicts, lists and tuples of stats, such as `TensorStats`, and strided tensors, on
            any number of devices. Anything else stays as it is.

    Returns:
        The same nesting, with a report for each of the stats, such as a `Report` for TensorStats, and for
        each tensor a copy on the CPU, of the same dtype and shape.

    Raises:
        RuntimeError: inside a compiled function; return the tree and materialize it outside.
        TypeError: for a sparse, nested or meta tensor.

    >>> import torch, gradiometer as gm
    >>> stats = gm.collect({"encoder.w": torch.ones(9), "head.w": torch.ones(4)})
    >>> found = gm.materialize({"grads": stats, "loss": torch.tensor(0.5)})
    >>> found["grads"].total_norm, found["loss"]
    (3.605551275463989, tensor(0.5000))
    """
    tensors, build = _plan(tree, "materialize")
    return build(fetch(tensors))


def materialize_async(tree: Any) -> Pending[Any]:
    """Start the copy that `materialize` makes, and return at once.

    Use one call for all collections and groups of a step. The copy is a snapshot: a later clip, optimizer
    step or ``zero_grad`` does not change it. It is queued on the current stream. If that is not the stream
    that computes the tensors, make it wait for that one first, as before any other use of a tensor.

    Args:
        tree: as for `materialize`.

    Returns:
        ``pending.ready()`` never waits; ``pending.result()`` returns the same as `materialize`, and
        waits if it must.

    Raises:
        RuntimeError: inside a compiled function, as for `materialize`.
        TypeError: for a sparse, nested or meta tensor.

    >>> import torch, gradiometer as gm
    >>> pending = gm.materialize_async([gm.collect([torch.ones(9)]), gm.collect([torch.ones(4)])])
    >>> [report.total_norm for report in pending.result()]
    [3.0, 2.0]
    """
    return Pending(*_plan(tree, "materialize_async"))


def _plan(tree: Any, what: str) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Return the tensors to copy, and a function that builds the result from their copies."""
    outside_of_a_graph(what)
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, NamedStats))
    moved = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (NamedStats, Tensor))]
    tensors = [leaves[i].packed() if isinstance(leaves[i], NamedStats) else leaves[i] for i in moved]
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            reason = "is sparse or nested, which is not supported; pass its values"
        elif tensor.device.type == "meta":
            reason = "is on the meta device and has no values; omit it"
        else:
            continue
        raise TypeError(f"{what}: a tensor of shape {tuple(tensor.shape)} {reason}")

    def build(copies: list[Tensor]) -> Any:
        done = list(leaves)
        for i, copy in zip(moved, copies, strict=True):
            done[i] = leaves[i].unpacked(copy) if isinstance(leaves[i], NamedStats) else copy
        return pytree.tree_unflatten(done, structure)

    return tensors, build
