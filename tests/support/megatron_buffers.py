"""An imitation of the gradient buffers of Megatron-LM's core 0.16, with its names, in plain PyTorch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn


class _ParamAndGradBuffer:
    """Buffers of parameters and of gradients, in one bucket; with shards, parameters are aligned."""

    __module__ = "megatron.core.distributed.param_and_grad_buffer"

    def __init__(self, params, size, *, is_sharded):
        self.params, self.param_index_map, end = params, {}, 0
        for p in params[::-1]:
            start = math.ceil(end / 64) * 64 if is_sharded else end
            end = start + p.numel()
            self.param_index_map[p] = (start, end, 0)
        divisor = math.lcm(size, 128) if is_sharded else 1
        self.numel = math.ceil(end / divisor) * divisor
        self.grad_data = torch.zeros(self.numel)
        self.param_data = torch.zeros(self.numel, dtype=params[0].dtype)
        for p, (start, end, _) in self.param_index_map.items():
            p.main_grad = self.grad_data[start:end].view(p.shape)
            if is_sharded:
                view = self.param_data[start:end].view(p.shape)
                view.copy_(p.detach())
                p.data = view


class _BaseDataParallel(nn.Module):
    __module__ = "megatron.core.distributed.data_parallel_base"


class DistributedDataParallel(_BaseDataParallel):
    """Adds gradients to the buffers; `finish_grad_sync` averages them, of its own shard only with shards."""

    __module__ = "megatron.core.distributed.distributed_data_parallel"

    def __init__(self, module, *, is_sharded=False):
        super().__init__()
        self.module, self.is_sharded = module, is_sharded
        group = dist.group.WORLD if dist.is_initialized() else None
        self.dp_cp_group, self.tp_group, self.pp_group, self.ep_group = group, None, None, None
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        params = [p for p in module.parameters() if p.requires_grad]
        self.buffers_of_gradients = [_ParamAndGradBuffer(params, self.size, is_sharded=is_sharded)]
        for p in params:
            p.register_post_accumulate_grad_hook(self._add)

    @staticmethod
    def _add(p):
        p.main_grad.add_(p.grad)
        p.grad = None

    def forward(self, *args):
        return self.module(*args)

    def zero_grad_buffer(self):
        for buffer in self.buffers_of_gradients:
            buffer.grad_data.zero_()

    def finish_grad_sync(self):
        for buffer in self.buffers_of_gradients:
            mean = buffer.grad_data / self.size
            if self.size > 1:
                dist.all_reduce(mean)
            shard = mean.numel() // self.size
            own = slice(self.rank * shard, (self.rank + 1) * shard) if self.is_sharded else slice(None)
            # the other shards keep the sums of this rank
            buffer.grad_data[own] = mean[own]


class MegatronOptimizer:
    """Clips and steps with its parts of the gradients."""

    __module__ = "megatron.core.optimizer.optimizer"
    grad_scaler = None

    def __init__(self, ddp, lr, clip_grad=0.0, scale=None):
        self.ddp, self.config = ddp, SimpleNamespace(clip_grad=clip_grad)
        if scale is not None:
            self.grad_scaler = SimpleNamespace(scale=torch.tensor([scale]))
        self.optimizer = torch.optim.SGD([{"params": [main for *_, main in self.mapped()]}], lr=lr)

    def mapped(self):
        """Return parameters, the slices of them that this rank has, and their main weights."""
        return [(p, slice(0, p.numel()), p) for p in self.ddp.module.parameters() if p.requires_grad]

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def get_loss_scale(self):
        return self.grad_scaler.scale

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        squares = torch.zeros((), dtype=torch.float64)
        for p, own, main in self.mapped():
            main.grad = p.main_grad.view(-1)[own].view(main.shape).to(main.dtype)
            if self.grad_scaler is not None:
                main.grad.div_(self.grad_scaler.scale)
            squares += main.grad.double().square().sum()
        if self.ddp.size > 1 and self.ddp.is_sharded:
            dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if not math.isfinite(norm):
            return False, None, None
        if self.config.clip_grad:
            for *_, main in self.mapped():
                main.grad.mul_(min(1.0, self.config.clip_grad / (norm + 1e-6)))
        self.optimizer.step()
        self.copy_weights()
        return True, norm, None

    def copy_weights(self):
        """Copy the main weights into the model."""


class FP32Optimizer(MegatronOptimizer):
    """For a model in float32."""

    __module__ = "megatron.core.optimizer.optimizer"


class MixedPrecisionOptimizer(MegatronOptimizer):
    __module__ = "megatron.core.optimizer.optimizer"


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """Has a copy of all weights in float32."""

    __module__ = "megatron.core.optimizer.optimizer"

    def mapped(self):
        found = [p for p in self.ddp.module.parameters() if p.requires_grad]
        for p in found:
            if not hasattr(p, "main_param"):
                p.main_param = p.detach().clone().float()
        return [(p, slice(0, p.numel()), p.main_param) for p in found]

    def copy_weights(self):
        for p, _, main in self.mapped():
            p.data.copy_(main)


class DistributedOptimizer(MixedPrecisionOptimizer):
    """Has this rank's shards of the weights, copied in float32 if the model is in 16 bits."""

    __module__ = "megatron.core.optimizer.distrib_optimizer"

    def __init__(self, ddp, *args, **kwargs):
        self.buffers, self.model_chunks = ddp.buffers_of_gradients, [ddp]
        self.model_param_gbuf_map, self._ranges, self._mains = {}, {}, {}
        (buffer,) = self.buffers
        shard = buffer.numel // ddp.size
        first = ddp.rank * shard
        for p, (start, end, _) in buffer.param_index_map.items():
            begin, stop = max(start, first), min(end, first + shard)
            if p.dtype != torch.float32:
                p.main_param = None
            if stop > begin:
                self.model_param_gbuf_map[p] = (0, (p.dtype, torch.float32), 0)
                own = self._ranges[p] = SimpleNamespace(start=begin - start, end=stop - start)
                part = p.detach().view(-1)[own.start : own.end]
                self._mains[p] = part if p.dtype == torch.float32 else part.clone().float()
                if p.dtype != torch.float32:
                    p.main_param = self._mains[p]
        super().__init__(ddp, *args, **kwargs)

    def _get_model_param_range_map(self, p):
        return {"param": self._ranges[p]}

    def mapped(self):
        return [(p, slice(own.start, own.end), self._mains[p]) for p, own in self._ranges.items()]

    def copy_weights(self):
        for p, own, main in self.mapped():
            p.data.view(-1)[own].copy_(main)
        (buffer,) = self.buffers
        if self.ddp.size > 1:
            shard = buffer.numel // self.ddp.size
            own = buffer.param_data[self.ddp.rank * shard : (self.ddp.rank + 1) * shard].clone()
            parts = [torch.empty_like(own) for _ in range(self.ddp.size)]
            dist.all_gather(parts, own)
            buffer.param_data.copy_(torch.cat(parts))


class ChainedOptimizer(MegatronOptimizer):
    """Several optimizers, here one."""

    __module__ = "megatron.core.optimizer.optimizer"

    def __init__(self, chained_optimizers):
        self.chained_optimizers = chained_optimizers

    @property
    def param_groups(self):
        return [group for leaf in self.chained_optimizers for group in leaf.param_groups]

    def zero_grad(self):
        self.chained_optimizers[0].zero_grad()

    def step(self):
        return self.chained_optimizers[0].step()
