"""`gradiometer.watch` for Megatron-LM, whose gradients are in ``p.main_grad``, views of its gradient buffers.

With its DistributedOptimizer, only this rank's shard of a buffer has the sum over ranks after the reduction,
and ``optimizer.model_param_gbuf_map`` says which part of each parameter that is. With its other optimizers,
each rank has all of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradiometer import distributed
from gradiometer.distributed import Mesh
from gradiometer.inputs import tracked_parameters
from gradiometer.integrations.partitioned import Part, has_class, place_in, watch_parts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradiometer.monitor import Monitor


def watch(model: Any, optimizer: Any = None, *, scaler: Any = None, **options: Any) -> Monitor:
    """Watch a model and Megatron's optimizer, as `gradiometer.watch` does."""
    if scaler is not None:
        raise TypeError("watch: Megatron's optimizer scales the loss itself; leave out scaler=")
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError("watch: pass Megatron's optimizer too: gm.watch(model, optimizer)")
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if len(chunks) != 1:
        raise _refusal(f"a model in {len(chunks)} chunks", "use a pipeline of one stage")
    leaves = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    _check(optimizer, leaves)
    groups = _groups([*chunks, *(chunk for leaf in leaves for chunk in getattr(leaf, "model_chunks", ()))])
    module = chunks[0]
    while type(module).__module__.startswith("megatron.") and hasattr(module, "module"):
        module = module.module
    (tensor_rank, tensor_size), (rank, size) = [(0, 1) if x is None else place_in(x) for x in groups]
    mesh = Mesh(("tensor parallel", "data parallel"), (tensor_size, size), (tensor_rank, rank))
    source = _MainGrads(module, leaves, mesh)
    # with tensor parallelism the ranks of both dimensions
    group = groups[1] if tensor_size == 1 else None
    return watch_parts(module, source.parts, source, optimizer, options, mesh=mesh, group=group)


def _refusal(what: str, why: str) -> ValueError:
    return ValueError(f"watch: Megatron's {what} is not supported: {why}")


def _check(optimizer: Any, leaves: list[Any]) -> None:
    """Raise ValueError for a configuration whose gradients are elsewhere."""
    if has_class(optimizer, "LayerWiseDistributedOptimizer"):
        raise _refusal("LayerWiseDistributedOptimizer", "use the DistributedOptimizer")
    for leaf in leaves:
        config, ddp = getattr(leaf, "config", None), getattr(leaf, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            raise _refusal("FSDP", "use its DistributedOptimizer, or torch's fully_shard")
        if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1:
            raise _refusal("num_distributed_optimizer_instances > 1", "use one instance")
        if getattr(config, "optimizer_cpu_offload", False):
            raise _refusal("optimizer_cpu_offload", "leave it out")


def _groups(chunks: list[Any]) -> tuple[Any, Any]:
    """Return the groups of tensor and of data parallelism; None for one rank.

    They are those of Megatron's DistributedDataParallel, or of its global state.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    ddp = next((chunk for chunk in chunks if hasattr(chunk, "dp_cp_group")), None)
    if ddp is not None:
        tensor, data, others = (
            ddp.tp_group,
            ddp.dp_cp_group,
            {"pipeline": ddp.pp_group, "expert": ddp.ep_group},
        )
    elif state is not None and state.model_parallel_is_initialized():
        tensor = state.get_tensor_model_parallel_group()
        data = state.get_data_parallel_group(with_context_parallel=True)
        others = {
            "pipeline": state.get_pipeline_model_parallel_group(),
            "expert": state.get_expert_model_parallel_group(),
        }
    else:
        return None, distributed.group_of(None) if distributed.is_active() else None
    for kind, group in others.items():
        if group is not None and (isinstance(group, list) or place_in(group)[1] > 1):
            raise _refusal(
                f"{kind} parallelism", "ranks have other layers of the same names; use one rank for it"
            )
    return tensor, data


class _MainGrads:
    """This rank's parts of the parameters' ``main_grad``; see `partitioned.Source`."""

    def __init__(self, model: nn.Module, leaves: list[Any], mesh: Mesh) -> None:
        self._leaves = leaves
        names, parameters = tracked_parameters(model)
        if not any(hasattr(p, "main_grad") for p in parameters):
            msg = "no parameter has a main_grad; wrap it in Megatron's DistributedDataParallel before"
            raise _refusal(type(model).__name__, msg)
        shards = [leaf for leaf in leaves if has_class(leaf, "DistributedOptimizer")]
        # those of all ranks
        sharded = {p for leaf in shards for buffer in leaf.buffers for p in buffer.params}
        ranges = {
            p: leaf._get_model_param_range_map(p)["param"]  # noqa: SLF001
            for leaf in shards
            for p in leaf.model_param_gbuf_map
        }
        # the elements of each parameter that this rank has, flat
        self._slices = [
            slice(ranges[p].start, ranges[p].end)
            if p in ranges
            else slice(0, 0 if p in sharded else p.numel())
            for p in parameters
        ]
        # its precision-aware optimizer has them inside
        aware = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
        self._has_masters = any(
            has_class(leaf, "MixedPrecisionOptimizer") and not getattr(leaf.config, aware, False)
            for leaf in leaves
        )
        self._parameters = parameters
        self.parts = [
            Part(
                name,
                p,
                weights,
                _whole_shape(p, mesh),
                _placements(p, mesh, is_shard=p in sharded),
                # parts of tensor parallelism may be interleaved
                None if _is_split(p, mesh) else own.start,
            )
            for name, p, weights, own in zip(names, parameters, self.weights(), self._slices, strict=True)
        ]

    def weights(self) -> list[Tensor]:
        """Return this rank's parts of the master weights; of the weights, if there are none."""
        return [self._weights(p, own) for p, own in zip(self._parameters, self._slices, strict=True)]

    def _weights(self, parameter: Any, own: slice) -> Tensor:
        master: Tensor | None = getattr(parameter, "main_param", None) if self._has_masters else None
        if master is not None:
            return master.detach().view(-1)
        weights: Tensor = parameter.detach().view(-1)[own]
        is_absent = hasattr(parameter, "main_param") and self._has_masters and not weights.numel()
        # of the dtype that other ranks have
        return weights.float() if is_absent else weights

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's part of each gradient, with the sum over micro-batches and ranks."""
        found = [getattr(p, "main_grad", None) for p in self._parameters]
        return [
            None if grad is None or own.stop == own.start else grad.view(-1)[own]
            for grad, own in zip(found, self._slices, strict=True)
        ]

    def loss_scale(self) -> Tensor | float:
        """Return the loss scale, if there is a scaler."""
        if getattr(self._leaves[0], "grad_scaler", None) is None:
            return 1.0
        scale: Tensor = self._leaves[0].get_loss_scale()
        return scale

    def was_skipped(self, result: Any) -> bool:
        """Return whether the gradients had overflown: ``step`` returns that first."""
        return isinstance(result, tuple) and not result[0]


def _whole_shape(parameter: Any, mesh: Mesh) -> tuple[int, ...]:
    shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
    if getattr(parameter, "tensor_model_parallel", False) and dim >= 0:
        shape[dim] *= mesh.shape[0]
    return tuple(shape)


def _placements(parameter: Any, mesh: Mesh, *, is_shard: bool) -> tuple[str, ...]:
    return "S" if _is_split(parameter, mesh) else "R", "S" if is_shard else "R"


def _is_split(parameter: Any, mesh: Mesh) -> bool:
    return mesh.shape[0] > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
