"""`gradiometer.watch` with Megatron-LM: an imitation of its buffers, and the package if it is installed."""

from __future__ import annotations

import importlib.util
import math
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gradiometer as gm
from gradiometer.integrations import megatron
from support import megatron_buffers
from support.partitioned_training import loss_of, model_of, norms_of, reference, rows_of
from support.rank_pool import pool_of
from support.watching import Sink

REAL = importlib.util.find_spec("megatron") is not None
KINDS = ["imitation", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="needs megatron-core"))]
STEPS = 3


class OnTheCPU(TorchFunctionMode):
    """Runs code that names the device ``cuda`` on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")) == "cuda":
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


def training_of(kind, model, *, sharded=False, bf16=False, clip=0.0, scale=None, lr=0.05):
    """Return the wrapped model, the optimizer, and what steps it."""
    if kind == "imitation":
        ddp = megatron_buffers.DistributedDataParallel(model, is_sharded=sharded)
        name = "DistributedOptimizer" if sharded else "FP32Optimizer"
        if bf16 and not sharded:
            name = "Float16OptimizerWithFloat16Params"
        leaf = getattr(megatron_buffers, name)(ddp, lr, clip, scale)
        return ddp, megatron_buffers.ChainedOptimizer([leaf]), nullcontext
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    with OnTheCPU():
        ddp = DistributedDataParallel(config, ddp_config, model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            bf16=bf16,
            clip_grad=clip,
            use_distributed_optimizer=sharded,
        )
        return ddp, get_megatron_optimizer(settings, [ddp]), OnTheCPU


def train(rank, kind, size, options, case, steps=STEPS, accumulation=2):
    warnings.simplefilter("ignore")
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    ddp, optimizer, mode = training_of(kind, model_of(dtype), **case)
    sink, exact, held, norms = Sink(), [], [], []
    scale = case.get("scale") or 1.0
    with gm.watch(ddp, optimizer, sinks=[sink], rules=(), **options) as monitor:
        for step in range(steps):
            exact.append(norms_of(reference(ddp.module, step, size, accumulation)))
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            for micro in range(accumulation):
                loss = loss_of(ddp, step, rank, micro, dtype) / accumulation
                (loss * scale).backward()
                monitor.note(loss=loss)
            ddp.finish_grad_sync()
            held.append(norms_of(whole_gradients(ddp, sharded=case.get("sharded", False), size=size)))
            with mode():
                _, norm, _ = optimizer.step()
            norms.append(norm)
    return {
        "rows": [rows_of(record) for record in sink.records],
        "totals": [record.total() for record in sink.records],
        "numel": [record.total("numel") for record in sink.records],
        "lr": [record.scalars["lr"] for record in sink.records],
        "skipped": [record.skipped for record in sink.records],
        "weights": [rows_of(record, "weights") for record in sink.records if record.has("weights")],
        "updates": [rows_of(record, "updates") for record in sink.records if record.has("updates")],
        "shapes": dict(zip(sink.info.catalog.names, sink.info.catalog.parameters.shapes, strict=True))
        if sink.info
        else None,
        "exact": exact,
        "held": held,
        "norms": norms,
        "failures": monitor.failures,
        "restored": "step" not in vars(optimizer),
    }


def whole_gradients(ddp, *, sharded, size):
    """Return the reduced gradients by name, collected from all ranks' shards of the buffers."""
    found = {}
    buffers = getattr(ddp, "buffers_of_gradients", None) or ddp.buffers
    for buffer in buffers:
        flat = buffer.grad_data.clone()
        if sharded and size > 1:
            rank, shard = torch.distributed.get_rank(), flat.numel() // size
            own = flat[rank * shard : (rank + 1) * shard].clone()
            flat = torch.zeros_like(flat)
            flat[rank * shard : (rank + 1) * shard] = own
            torch.distributed.all_reduce(flat)
        for name, p in ddp.module.named_parameters():
            if p in buffer.param_index_map:
                start, end, _ = buffer.param_index_map[p]
                found[name] = flat[start:end]
    return found


CASES = {
    "FP32Optimizer": {"clip": 0.1},
    "DistributedOptimizer": {"sharded": True, "clip": 0.1},
    "Float16OptimizerWithFloat16Params": {"bf16": True, "clip": 0.1},
    "DistributedOptimizer in bf16": {"sharded": True, "bf16": True, "clip": 1.0},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grads_by_name(request, kind, case, size):
    results = pool_of(request, size).run(train, kind, size, {}, CASES[case])
    first = results[0]
    expected = first["held"] if CASES[case].get("bf16") else first["exact"]
    assert len(first["rows"]) == STEPS
    for rows, norms in zip(first["rows"], expected, strict=True):
        assert rows == pytest.approx(norms, rel=1e-6)
    assert first["numel"] == [66] * STEPS
    assert first["shapes"]["0.weight"] == (7, 5)
    assert first["totals"] == pytest.approx(first["norms"], rel=1e-5)
    assert first["lr"] == [0.05] * STEPS
    assert [result["failures"] for result in results] == [{}] * size
    assert all(result["restored"] for result in results)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_updates(two_ranks, kind, case):
    first = two_ranks.run(train, kind, 2, {"weights": True, "updates": True}, CASES[case])[0]
    assert [len(rows) for rows in first["weights"]] == [5] * STEPS
    assert [rows["frozen"] for rows in first["weights"]] == [2.0] * STEPS
    for rows, held, norm in zip(first["updates"], first["held"], first["norms"], strict=True):
        assert set(rows) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        # the package has no SGD for its DistributedOptimizer
        if kind == "imitation":
            rate = 0.05 * min(1.0, CASES[case]["clip"] / (norm + 1e-6))
            assert rows == pytest.approx({name: held[name] * rate for name in rows}, rel=1e-4)
    assert first["failures"] == {}


def test_a_loss_scale_and_a_skipped_step(two_ranks):
    case = {"sharded": True, "bf16": True, "clip": 1.0, "scale": 1024.0}
    first = two_ranks.run(train, "imitation", 2, {}, case)[0]
    for rows, norms in zip(first["rows"], first["held"], strict=True):
        assert rows == pytest.approx({name: norm / 1024 for name, norm in norms.items()}, rel=1e-6)
    assert first["totals"] == pytest.approx(first["norms"], rel=1e-5)
    assert first["skipped"] == [False] * STEPS
    skipping = two_ranks.run(train, "imitation", 2, {}, {**case, "scale": math.inf})[0]
    assert skipping["norms"] == [None] * STEPS
    assert skipping["skipped"] == [True] * STEPS


def train_with_tensor_parallelism(rank):
    """The first layer is split over the ranks, and the other tensors have copies."""
    torch.manual_seed(5)
    whole = torch.randn(6, 4)
    model = torch.nn.Linear(4, 3)
    model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0
    ddp = megatron_buffers.DistributedDataParallel(model)
    ddp.size, ddp.tp_group, ddp.dp_cp_group = 1, torch.distributed.group.WORLD, None
    sink = Sink()
    optimizer = megatron_buffers.FP32Optimizer(ddp, 0.1)
    with gm.watch(ddp, optimizer, sinks=[sink], rules=()):
        model.weight.main_grad.copy_(whole[3 * rank : 3 * rank + 3])
        model.bias.main_grad.fill_(2.0)
        optimizer.step()
    shapes = None if sink.info is None else sink.info.catalog.parameters.shapes
    return [rows_of(record) for record in sink.records], shapes, float(whole.double().norm())


def test_tensor_parallelism(two_ranks):
    rows, shapes, norm = two_ranks.run(train_with_tensor_parallelism)[0]
    assert shapes == ((6, 4), (3,))
    assert rows == [pytest.approx({"weight": norm, "bias": math.sqrt(12.0)}, rel=1e-6)]


def watched(**options):
    ddp, optimizer, _ = training_of("imitation", model_of(), **options)
    return ddp, optimizer


def test_one_chunk_in_a_list_and_the_inner_optimizer_are_watched():
    ddp, optimizer = watched(sharded=True)
    (leaf,) = optimizer.chained_optimizers
    for model in ([ddp], ddp.module):
        sink = Sink()
        with gm.watch(model, leaf, sinks=[sink], rules=()):
            loss_of(ddp, 0, 0).backward()
            leaf.step()
            ddp.zero_grad_buffer()
        assert rows_of(sink.records[0]).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_optimizer_of_torch_that_uses_main_grad():
    """Its hooks are used, so that a scheduler may be created afterwards."""
    ddp, _ = watched()
    named = [p for p in ddp.module.parameters() if p.requires_grad]
    optimizer, sink, norms = torch.optim.SGD(named, lr=0.1), Sink(), []
    with gm.watch(ddp, optimizer, sinks=[sink], rules=()) as monitor:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(2):
            norms.append(norms_of(reference(ddp.module, step, 1)))
            loss_of(ddp, step, 0).backward()
            for p in named:
                p.grad = p.main_grad
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ddp.zero_grad_buffer()
    assert [rows_of(record) for record in sink.records] == [pytest.approx(x, rel=1e-6) for x in norms]
    assert sink.scalars("lr") == [0.1, 0.05]
    assert monitor.failures == {}


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        (
            {"ddp_config": SimpleNamespace(use_megatron_fsdp=True)},
            "Megatron's FSDP is not supported: use its Dis",
        ),
        (
            {"ddp_config": SimpleNamespace(num_distributed_optimizer_instances=2)},
            "num_distributed_optimizer_instances > 1 is not supported: use one",
        ),
        (
            {"config": SimpleNamespace(optimizer_cpu_offload=True)},
            "optimizer_cpu_offload is not supported: leave",
        ),
    ],
)
def test_a_configuration_with_gradients_elsewhere_is_refused_by_name(attributes, says):
    ddp, optimizer = watched()
    vars(optimizer.chained_optimizers[0]).update(attributes)
    with pytest.raises(ValueError, match=says):
        gm.watch(ddp, optimizer)


def test_what_cannot_be_watched_is_refused_by_name(monkeypatch):
    ddp, optimizer = watched()
    with pytest.raises(TypeError, match="pass Megatron's optimizer too"):
        gm.watch(ddp)
    with pytest.raises(TypeError, match="Megatron's optimizer scales the loss itself"):
        gm.watch(ddp, optimizer, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="a model in 2 chunks is not supported: use a pipeline of one stage"):
        gm.watch([ddp, ddp], optimizer)
    with pytest.raises(ValueError, match="no parameter has a main_grad; wrap it in Megatron's Distributed"):
        gm.watch(model_of(), optimizer)
    ddp.pp_group = [None, None]
    with pytest.raises(ValueError, match="pipeline parallelism is not supported"):
        gm.watch(ddp, optimizer)
    ddp.pp_group, ddp.ep_group = None, object()
    monkeypatch.setattr(megatron, "place_in", lambda group: (0, 2 if group is ddp.ep_group else 1))
    with pytest.raises(ValueError, match="expert parallelism is not supported: ranks have other layers"):
        gm.watch(ddp, optimizer)

    class LayerWiseDistributedOptimizer(megatron_buffers.ChainedOptimizer):
        __module__ = "megatron.core.optimizer.layer_wise_optimizer"

    with pytest.raises(ValueError, match="LayerWiseDistributedOptimizer is not supported: use the Dist"):
        gm.watch(ddp, LayerWiseDistributedOptimizer(optimizer.chained_optimizers))
    assert "step" not in vars(optimizer)
