"""Which formula of `torch.optim` updates a param group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import optim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

# not their subclasses, which may do anything else
_KNOWN: Final = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad)


def method_of(optimizer: Optimizer, group: Mapping[str, object]) -> str:
    """Return the name of the optimizer of `torch.optim` whose formula updates a param group.

    Empty for any other class, and for centered RMSprop, which divides by a variance that may be nearly 0.

    >>> import torch
    >>> optimizer = torch.optim.Adam([torch.zeros(1)])
    >>> method_of(optimizer, optimizer.param_groups[0])
    'Adam'
    """
    kind = type(optimizer)
    if kind is optim.Adam and group.get("decoupled_weight_decay"):
        return "AdamW"
    return kind.__name__ if kind in _KNOWN and not group.get("centered") else ""
