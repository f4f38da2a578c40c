"""`watch` of an Accelerator, against the library itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.watching import Sink

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _fresh_state():
    # they are shared by all Accelerators of a process
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def prepared(accumulate=1, models=1, scaler=None):
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    accelerator.scaler = scaler
    torch.manual_seed(0)
    parts = [nn.Linear(4, 1) for _ in range(models)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    x = torch.randn(20, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return accelerator, accelerator.prepare(
        *parts, *optimizers, torch.utils.data.DataLoader(data, batch_size=4)
    )


def watching(accelerator, **options):
    sink = Sink()
    return gm.watch(accelerator, sinks=[sink], **{"rules": ()} | options), sink


def norm(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_real_step_is_recorded_once_with_the_mean_loss(accumulate):
    accelerator, (model, optimizer, loader) = prepared(accumulate)
    monitor, sink = watching(accelerator, updates=True)
    norms, losses, step = [], [], []
    with monitor:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                step.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(norm(model))
                    losses.append(sum(step) / len(step))
                    step.clear()
                optimizer.step()
                optimizer.zero_grad()
    # 5 batches: the last step has one
    assert sink.steps == list(range(math.ceil(5 / accumulate)))
    assert sink.info.catalog.names == ("weight", "bias")
    assert sink.totals == pytest.approx(norms, rel=1e-6)
    assert sink.scalars("loss") == pytest.approx(losses, rel=1e-6)
    assert sink.scalars("lr") == [0.1] * len(sink.steps)
    assert monitor.failures == {}
    assert "backward" not in vars(accelerator)


def test_a_scaled_step_is_recorded_unscaled_and_an_overflow_is_skipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator, (model, optimizer, loader) = prepared(scaler=scaler)
    monitor, sink = watching(accelerator)
    broken = []
    model.weight.register_hook(lambda g: g * (1.0 if broken else broken.append(1) or math.inf))
    norms = []
    with monitor:
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            norms.append(norm(model) / scaler.get_scale())
            optimizer.step()
            optimizer.zero_grad()
    assert [record.skipped for record in sink.records] == [True, False, False, False, False]
    assert sink.totals[1:] == pytest.approx(norms[1:], rel=1e-6)
    assert max(sink.scalars("loss")) < 100


def test_several_models_have_names_by_their_order():
    accelerator, (first, second, one, two, loader) = prepared(models=2)
    monitor, sink = watching(accelerator)
    with monitor:
        for x, _ in loader:
            for model, optimizer in ((first, one), (second, two)):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert sink.info.catalog.names == tuple(
        f"model_{i}.{name}" for i in (0, 1) for name in ("weight", "bias")
    )
    assert len(sink.steps) == 5
    options = {"optimizer/momentum", "optimizer/weight_decay"}
    assert set(sink.records[0].scalars) == {"lr", "lr_1"} | options


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^watch: this Accelerator has prepared no model; call accelerator\."
    ):
        gm.watch(accelerate.Accelerator(cpu=True))
    accelerator, _ = prepared()
    with pytest.raises(TypeError, match="Accelerator has its own optimizer and scaler"):
        gm.watch(accelerator, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    kind = type(accelerator)
    monkeypatch.setattr(kind, "distributed_type", accelerate.utils.DistributedType.FSDP)
    with pytest.raises(TypeError, match=r"^watch: with FSDP by Accelerate, ranks have neither .*version 2"):
        gm.watch(accelerator)
