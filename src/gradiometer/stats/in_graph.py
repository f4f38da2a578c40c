"""Collection of gradients in a compiled graph, in the ordinary case, with few guards.

Dynamo guards every function and every global that it traces, and checks the guards before each step. Those of
`gradiometer.stats.measure` take longer than the measurement of a few small tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradiometer.columns import Thresholds
from gradiometer.ops import tensor_stats_in_graph
from gradiometer.stats.tensor_stats import TensorStats

if TYPE_CHECKING:
    from gradiometer.inputs import Parameters


def grads_in_graph(model: Parameters, thresholds: Thresholds) -> TensorStats | None:
    """Return the statistics of the gradients of a module; None unless each is an ordinary dense tensor."""
    if not isinstance(model, nn.Module) or isinstance(model, (DistributedDataParallel, DataParallel)):
        return None
    names: list[str] = []
    grads: list[Tensor] = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if type(parameter) is not nn.Parameter or "_orig_mod" in name or "_wrapped_module" in name:
            return None
        if grad is None:
            continue
        if type(grad) is not Tensor or grad.is_sparse or not grad.is_floating_point() or grad.itemsize < 2:
            return None
        if grad.device != parameter.device or grad.device.type not in ("cpu", "cuda"):
            return None
        names.append(name)
        grads.append(grad)
    if not isinstance(thresholds, Thresholds) or len({grad.device for grad in grads}) != 1:
        return None
    if len(set(names)) != len(names):
        return None
    columns, flags = tensor_stats_in_graph(grads, thresholds)
    return TensorStats(tuple(names), columns, flags, thresholds)
