"""An imitation of the parts of torchtitan 0.3 that gradiometer uses, with the same names, calls and order.

`installed` puts it in the place of the package. `Trainer` trains parts of linear layers.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ADAPTER = "gradiometer.integrations.torchtitan"
SIZES = (6, 8, 4)


class DataloaderExhaustedError(Exception):
    """The data ran out in the middle of a step."""


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs):
            return self._owner(config=dataclasses.replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__
            cls.Config._owner = cls


class MetricsProcessor(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        log_freq: int = 10

    def __init__(self, config, *, parallel_dims, dump_folder="./outputs"):
        self.config, self.parallel_dims, self.dump_folder = config, parallel_dims, dump_folder
        self.logged = []
        self.optimizers = None
        self.model_parts = None

    def should_log(self, step):
        return step == 1 or step % self.config.log_freq == 0

    def log(self, step, loss, grad_norm):
        self.logged.append((step, loss, grad_norm))

    def close(self):
        pass


class OptimizersContainer(Optimizer):
    """Is an optimizer itself, whose groups and state are not those of the optimizers in it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        super().__init__(held, {})

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self, closure=None):
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def clip_grad_norm_(parameters, max_norm, norm_type=2.0, foreach=None, pp_mesh=None):
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    if pp_mesh is not None:
        total **= norm_type
        dist.all_reduce(total, group=pp_mesh.get_group())
        total **= 1.0 / norm_type
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


def override(*, target, description=""):
    del target, description
    return lambda factory: factory


def derive(source, target_cls, **deltas):
    known = {f.name for f in fields(target_cls)}
    assert deltas.keys() <= known
    shared = {f.name: getattr(source, f.name) for f in fields(source) if f.name in known}
    return target_cls(**(shared | deltas))


@dataclass
class ParallelDims:
    """The parallel dimensions; ``loss``: the mesh over which local losses add up."""

    loss: Any = None
    pp: Any = None

    @property
    def dp_cp_enabled(self):
        return self.loss is not None

    @property
    def pp_enabled(self):
        return self.pp is not None

    def get_optional_mesh(self, name):
        return {"loss": self.loss, "pp": self.pp}[name]


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = pairwise(SIZES)
    return nn.Sequential(*[nn.Linear(*size, dtype=dtype) for size in sizes])


@dataclass
class Config:
    steps: int = 4
    max_norm: float = 0.05
    accumulate: int = 2
    batches: int = 100
    dump_folder: str = "./outputs"
    metrics: Any = field(default_factory=lambda: MetricsProcessor.Config(log_freq=1))
    fails_at: int = 0


class Trainer:
    """As torchtitan's: ``parts`` are the parts of the model that this rank has, ``run`` gives their loss."""

    def __init__(self, config, parts=None, parallel_dims=None, run=None, *, has_last=True):
        self.config = config
        self.parallel_dims = parallel_dims or ParallelDims()
        self.pp_has_last_stage = has_last
        self.metrics_processor = config.metrics.build(
            parallel_dims=self.parallel_dims, dump_folder=config.dump_folder
        )
        self.model_parts = [layers()] if parts is None else parts
        self.run = run or (lambda x: self.model_parts[0](x).square().mean())
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in self.model_parts]
        self.optimizers = OptimizersContainer(optimizers)
        self.metrics_processor.optimizers = self.optimizers
        self.metrics_processor.model_parts = self.model_parts
        rate = torch.optim.lr_scheduler.ExponentialLR
        self.lr_schedulers = [rate(optimizer, 0.5) for optimizer in optimizers]
        self.step = 0
        # what the clip has seen
        self.norms, self.closed = [], 0

    def data(self):
        for i in range(self.config.batches):
            generator = torch.Generator().manual_seed(i)
            yield torch.randn(8, SIZES[0], dtype=torch.float64, generator=generator)

    def forward_backward_step(self, *, input_dict, labels):
        del labels
        loss = self.run(input_dict["input"])
        if loss is None:
            return torch.tensor([-1.0])
        loss.backward()
        return loss

    def train_step(self, data_iterator):
        self.optimizers.zero_grad()
        should_log = self.metrics_processor.should_log(self.step)
        total = 0.0
        for _ in range(self.config.accumulate):
            try:
                x = next(data_iterator)
            except StopIteration as error:
                raise DataloaderExhaustedError from error
            loss = self.forward_backward_step(input_dict={"input": x}, labels=x)
            total += loss.detach()
        grad_norm = self.clip()
        self.optimizers.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        if not should_log:
            return
        if self.step == self.config.fails_at:
            raise RuntimeError("Loss is not finite")
        self.metrics_processor.log(self.step, float(total), float(grad_norm))

    def clip(self):
        parameters = [p for part in self.model_parts for p in part.parameters()]
        self.norms.append(square_of([p.grad for p in parameters]))
        # looked up in the package, as torchtitan does
        utils = sys.modules["torchtitan.distributed.utils"]
        return utils.clip_grad_norm_(
            parameters, self.config.max_norm, pp_mesh=self.parallel_dims.get_optional_mesh("pp")
        )

    def train(self):
        iterator = self.data()
        while self.step < self.config.steps:
            self.step += 1
            try:
                self.train_step(iterator)
            except DataloaderExhaustedError:
                break

    def close(self):
        self.closed += 1
        self.metrics_processor.close()


# `gm.watch` looks for it by these
Trainer.__module__ = "torchtitan.trainer"


def square_of(grads):
    """Return the sum of the squares of whole gradients, in float64."""
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return sum(float(grad.double().square().sum()) for grad in whole)


@contextmanager
def installed():
    """Put the imitation in the place of torchtitan, and yield gradiometer's adapter for it."""
    parts = {
        "": {},
        ".components": {},
        ".components.metrics": {"MetricsProcessor": MetricsProcessor},
        ".config": {},
        ".config.override": {"override": override, "derive": derive},
        ".models": {},
        ".models.llama3": {"config_registry": SimpleNamespace(llama3_8b=Config)},
        ".distributed": {},
        ".distributed.utils": {"clip_grad_norm_": clip_grad_norm_},
    }
    mine = {}
    for name, found in parts.items():
        mine[f"torchtitan{name}"] = module = ModuleType(f"torchtitan{name}")
        module.__dict__.update(found, __path__=[])
    before = {name: sys.modules.pop(name, None) for name in (*mine, ADAPTER)}
    sys.modules.update(mine)
    try:
        yield importlib.import_module(ADAPTER)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
