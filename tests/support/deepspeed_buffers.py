"""An imitation of the buffers of DeepSpeed 0.19, with the names of its attributes, in plain PyTorch.

It has an engine, ZeRO 1 and 2, and BF16_Optimizer, with SGD. The gradients of all ranks are averaged, and
each rank keeps one partition of those of each param group.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn


class _Optimizer:
    __module__ = "deepspeed.runtime.base_optimizer"
    mpu, has_moe_layers, overflow = None, False, False

    def __init__(self, optimizer, clip_grad=0.0, loss_scale=1.0, dtype=torch.float32):
        self.optimizer, self.clip_grad, self.loss_scale = optimizer, clip_grad, loss_scale
        self.dp_process_group = dist.group.WORLD if dist.is_initialized() else None
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._global_grad_norm = None
        self.groups, self.flat, self.masters = [], [], []
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad and p.numel()]
            self.groups.append(parameters)
            numel = sum(p.numel() for p in parameters)
            flat = torch.zeros(math.ceil(numel / (2 * self.size)) * 2 * self.size, dtype=parameters[0].dtype)
            start = 0
            for p in parameters:
                view = flat.narrow(0, start, p.numel()).view(p.shape)
                view.copy_(p.detach())
                p.data = view
                start += p.numel()
            self.flat.append(flat)
            size = flat.numel() // self.size
            self.masters.append(flat.narrow(0, self.rank * size, size).clone().to(dtype).requires_grad_())
            group["params"] = [self.masters[-1]]
            self._link(parameters, self.masters[-1], self.rank * size, size)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def _link(self, parameters, masters, first, size):
        start = 0
        for p in parameters:
            begin, end = max(start, first), min(start + p.numel(), first + size)
            p._hp_mapping = None
            if begin < end:
                own, part = begin - first, end - begin
                p._hp_mapping = SimpleNamespace(
                    lp_fragment_address=SimpleNamespace(start=begin - start, numel=part),
                    hp_fragment=masters.narrow(0, own, part),
                    hp_fragment_address=SimpleNamespace(start=own, numel=part),
                )
            start += p.numel()

    def _averaged(self, p):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.size > 1:
            grad = grad / self.size
            dist.all_reduce(grad)
        p.grad = None
        return grad.reshape(-1)

    def _finish(self, partitions):
        """Clip the partitions of the gradients, step, and copy the weights of all ranks."""
        squares = sum(part.double().square().sum() for part in partitions)
        if self.size > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        self.overflow = not bool(norm.isfinite())
        if self.overflow:
            self._global_grad_norm = math.inf
            return
        self._global_grad_norm = float(norm / self.loss_scale)
        scale = self.loss_scale
        if self.clip_grad:
            scale *= max(1.0, (self._global_grad_norm + 1e-6) / self.clip_grad)
        for part, masters in zip(partitions, self.masters, strict=True):
            part.div_(scale)
            masters.grad = part.to(masters.dtype)
        self.optimizer.step()
        for masters, flat in zip(self.masters, self.flat, strict=True):
            masters.grad = None
            size = masters.numel()
            flat.narrow(0, self.rank * size, size).copy_(masters.detach())
            if self.size > 1:
                parts = [torch.empty(size, dtype=flat.dtype) for _ in range(self.size)]
                dist.all_gather(parts, flat.narrow(0, self.rank * size, size).clone())
                flat.copy_(torch.cat(parts))


class DeepSpeedZeroOptimizer(_Optimizer):
    """ZeRO 1 or 2."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"
    cpu_offload = zenflow = False
    torch_autocast_gradscaler = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bit16_groups, self.single_partition_of_fp32_groups = self.groups, self.masters
        self.averaged_gradients = {}
        self.partition_size = [masters.numel() for masters in self.masters]
        self.grad_partition_insertion_offset, self.grad_start_offset = {}, {}
        for i, group in enumerate(self.groups):
            there = [p for p in group if p._hp_mapping is not None]
            own = {id(p): p._hp_mapping.hp_fragment_address.start for p in there}
            self.grad_partition_insertion_offset[i] = {self.rank: own}
            skipped = {id(p): p._hp_mapping.lp_fragment_address.start for p in there}
            self.grad_start_offset[i] = {self.rank: skipped}

    def get_param_id(self, p):
        return id(p)

    def reduce(self, scale):
        for i, group in enumerate(self.groups):
            flat = torch.cat([self._averaged(p) for p in group]) * scale
            flat = torch.cat([flat, flat.new_zeros(self.flat[i].numel() - flat.numel())])
            size = flat.numel() // self.size
            own = flat.narrow(0, self.rank * size, size)
            before, pieces, end = self.averaged_gradients.get(i), [], 0
            for p in group:
                if p._hp_mapping is not None:
                    at = p._hp_mapping.hp_fragment_address
                    piece = own.narrow(0, at.start, at.numel)
                    pieces.append(piece.view(p.shape) if at.numel == p.numel() else piece)
                    end = at.start + at.numel
            if end < size:
                pieces.append(torch.zeros(size - end))
            if before is not None:
                pieces = [a + b for a, b in zip(before, pieces, strict=True)]
            self.averaged_gradients[i] = pieces

    def step(self):
        if not self.averaged_gradients:
            msg = "no gradients"
            raise RuntimeError(msg)
        partitions = [torch.cat([x.reshape(-1) for x in part]) for part in self.averaged_gradients.values()]
        self.averaged_gradients = dict.fromkeys(self.averaged_gradients)
        self._finish(partitions)


class BF16_Optimizer(_Optimizer):  # noqa: N801 DeepSpeed's name
    """Master weights and gradients in float32, for a model in bfloat16."""

    __module__ = "deepspeed.runtime.bf16_optimizer"
    using_real_optimizer = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bf16_groups, self.fp32_groups_flat_partition = self.groups, self.masters
        self.buffers = [torch.zeros(flat.numel()) for flat in self.flat]
        self.fp32_groups_has_gradients = [[False] * len(group) for group in self.groups]
        self.fp32_groups_gradient_flat_partition = [
            flat.narrow(0, self.rank * masters.numel(), masters.numel())
            for flat, masters in zip(self.buffers, self.masters, strict=True)
        ]

    def reduce(self, scale):
        for i, (group, flat) in enumerate(zip(self.groups, self.buffers, strict=True)):
            start = 0
            for j, p in enumerate(group):
                self.fp32_groups_has_gradients[i][j] |= p.grad is not None
                flat.narrow(0, start, p.numel()).add_(self._averaged(p).float() * scale)
                start += p.numel()

    def step(self):
        self._finish(self.fp32_groups_gradient_flat_partition)
        for i, flat in enumerate(self.buffers):
            flat.zero_()
            self.fp32_groups_has_gradients[i] = [False] * len(self.groups[i])


class DeepSpeedEngine(nn.Module):
    """Accumulates gradients, and steps at the end of an accumulation."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module, optimizer, accumulation=1):
        super().__init__()
        self.module, self.optimizer, self.accumulation, self.micro_steps = module, optimizer, accumulation, 0

    def forward(self, *args):
        return self.module(*args)

    def backward(self, loss):
        loss.backward()
        self.optimizer.reduce(self.optimizer.loss_scale / self.accumulation)

    def step(self):
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            self.optimizer.step()

    def get_global_grad_norm(self):
        return self.optimizer._global_grad_norm
