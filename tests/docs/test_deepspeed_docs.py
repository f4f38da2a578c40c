"""The page on DeepSpeed and Megatron-LM runs with the imitations of their buffers."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import gradiometer as gm
from support import deepspeed_buffers, megatron_buffers
from support.pages import blocks, execute

pytest.importorskip("pyarrow")
read_run = pytest.importorskip("gradiometer.runs").read_run
PAGE = "docs/how-to/deepspeed.md"


def initialize(*, model, model_parameters, config):
    stage, accumulation = config["zero_optimization"]["stage"], config["gradient_accumulation_steps"]
    optimizer = torch.optim.AdamW(list(model_parameters), lr=config["optimizer"]["params"]["lr"])
    assert stage == 2
    zero = deepspeed_buffers.DeepSpeedZeroOptimizer(optimizer, config["gradient_clipping"])
    engine = deepspeed_buffers.DeepSpeedEngine(model, zero, accumulation)
    engine.device = "cpu"
    return engine, zero, None, None


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("deepspeed")
    module.initialize = initialize
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    scope = execute(*blocks(PAGE))
    run = read_run("runs/zero2")
    assert scope["monitor"].failures == {}
    assert run.steps["step"].to_pylist() == list(range(10))
    assert run.steps["n_measured"].to_pylist() == [4] * 10
    assert run.steps["total_norm"].to_pylist()[-1] == pytest.approx(
        float(scope["engine"].get_global_grad_norm()), rel=1e-5
    )


def test_the_loop_of_megatron(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(PAGE, "py")
    ddp = megatron_buffers.DistributedDataParallel(torch.nn.Linear(4, 2), is_sharded=True)
    leaf = megatron_buffers.DistributedOptimizer(ddp, 0.1)
    norms = []

    def forward_backward_func(_):
        loss = ddp(torch.ones(3, 4)).square().mean()
        loss.backward()
        ddp.finish_grad_sync()
        grads = [p.main_grad.double().square().sum() for p in ddp.parameters()]
        norms.append(float(sum(grads).sqrt()))
        return [loss.detach()]

    names = {"model": [ddp], "optimizer": megatron_buffers.ChainedOptimizer([leaf]), "steps": 3, "gm": gm}
    execute(block, **names, forward_backward_func=forward_backward_func)
    recorded = read_run("runs/megatron").steps
    assert recorded["total_norm"].to_pylist() == pytest.approx(norms, rel=1e-6)
    assert recorded["loss"].to_pylist() == sorted(recorded["loss"].to_pylist(), reverse=True)
