"""`gradiometer.watch` with DeepSpeed: an imitation of its buffers, and the package if it is installed."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import warnings
from contextlib import suppress

import pytest
import torch

import gradiometer as gm
from gradiometer.integrations import partitioned
from support import deepspeed_buffers
from support.partitioned_training import loss_of, model_of, norms_of, reference, rows_of
from support.rank_pool import pool_of
from support.watching import Sink

REAL = importlib.util.find_spec("deepspeed") is not None
KINDS = ["imitation", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="needs deepspeed"))]
STEPS = 3


def engine_of(
    kind, model, *, stage=2, bf16=False, accumulation=1, clip=0.0, scale=1.0, groups=1, lr=0.05, **config
):
    """Return an engine; ``bf16`` at stage 1 is BF16_Optimizer."""
    named = [p for p in model.parameters() if p.requires_grad]
    parts = (
        [{"params": named}] if groups == 1 else [{"params": named[:1]}, {"params": named[1:], "lr": lr / 2}]
    )
    optimizer = torch.optim.SGD(parts, lr=lr)
    if kind == "imitation":
        cls = (
            deepspeed_buffers.BF16_Optimizer
            if bf16 and stage == 1
            else deepspeed_buffers.DeepSpeedZeroOptimizer
        )
        return deepspeed_buffers.DeepSpeedEngine(model, cls(optimizer, clip, scale), accumulation)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    size = torch.distributed.get_world_size()
    settings = {
        "train_batch_size": 6 * size * accumulation,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **config},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
    if bf16:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def exact_gradients(kind, engine):
    """Return what DeepSpeed holds, of all ranks, before the step."""
    if kind == "real":
        from deepspeed.utils import safe_get_full_grad

        named = engine.module.named_parameters()
        return {name: safe_get_full_grad(p) for name, p in named if p.requires_grad}
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        whole, mapping = torch.zeros(p.numel()), p._hp_mapping
        if mapping is not None:
            at, to = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = torch.cat([x.reshape(-1) for x in partition_of(engine.optimizer, p)])
            whole[to.start : to.start + to.numel] = flat[at.start : at.start + at.numel]
        if engine.optimizer.size > 1:
            torch.distributed.all_reduce(whole)
        found[name] = whole
    return found


def partition_of(optimizer, p):
    group = next(i for i, own in enumerate(optimizer.groups) if any(p is x for x in own))
    if hasattr(optimizer, "averaged_gradients"):
        return optimizer.averaged_gradients[group]
    return [optimizer.fp32_groups_gradient_flat_partition[group]]


def train(rank, kind, size, options, case, steps=STEPS):
    """Train, and return what was recorded, and what the gradients are."""
    warnings.simplefilter("ignore")
    case = dict(case)
    accumulation, dtype = case.get("accumulation", 1), torch.bfloat16 if case.get("bf16") else torch.float32
    engine = engine_of(kind, model_of(dtype), **case)
    sink, exact, held, norms, losses = Sink(), [], [], [], []
    monitor = gm.watch(engine, sinks=[sink], rules=(), **options)
    with monitor:
        for step in range(steps):
            exact.append(norms_of(reference(engine.module, step, size, accumulation)))
            for micro in range(accumulation):
                loss = loss_of(engine, step, rank, micro, dtype)
                engine.backward(loss)
                monitor.note(loss=loss)
                # what the package returns is wrong, or never returns, with this setting
                if micro == accumulation - 1 and "round_robin_gradients" not in case:
                    held.append(norms_of(exact_gradients(kind, engine)))
                engine.step()
            norms.append(float(engine.get_global_grad_norm()))
            losses.append(float(loss.detach()))
    return {
        "optimizer": type(engine.optimizer).__name__,
        "rows": [rows_of(record) for record in sink.records],
        "totals": [record.total() for record in sink.records],
        "numel": [record.total("numel") for record in sink.records],
        "scalars": [dict(record.scalars) for record in sink.records],
        "shapes": dict(zip(sink.info.catalog.names, sink.info.catalog.parameters.shapes, strict=True))
        if sink.info
        else None,
        "model": sink.info.model if sink.info else None,
        "weights": [rows_of(record, "weights") for record in sink.records if record.has("weights")],
        "updates": [rows_of(record, "updates") for record in sink.records if record.has("updates")],
        "cosines": [
            rows_of(record, "updates", "descent_cosine") for record in sink.records if record.has("updates")
        ],
        "exact": exact,
        "held": held,
        "norms": norms,
        "losses": losses,
        "failures": monitor.failures,
        "restored": "step" not in vars(engine.optimizer),
        "clears": all(p.grad is None for p in engine.module.parameters()) or kind == "real",
    }


CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "clipped": {"stage": 2, "clip": 0.1},
    "accumulated": {"stage": 1, "accumulation": 3},
    "accumulated, stage 2, clipped": {"stage": 2, "accumulation": 2, "clip": 0.1},
    "two groups": {"stage": 2, "groups": 2},
    "bf16": {"stage": 2, "bf16": True},
    "BF16_Optimizer": {"stage": 1, "bf16": True, "clip": 0.1, "accumulation": 2, "groups": 2},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_name(request, kind, case, size):
    results = pool_of(request, size).run(train, kind, size, {}, CASES[case])
    first = results[0]
    expected = first["held"] if CASES[case].get("bf16") else first["exact"]
    assert len(first["rows"]) == STEPS
    for rows, norms in zip(first["rows"], expected, strict=True):
        assert rows == pytest.approx(norms, rel=1e-6)
    assert first["numel"] == [66] * STEPS
    assert first["shapes"]["0.weight"] == (7, 5)
    assert first["model"] == "Sequential"
    assert first["totals"] == pytest.approx(first["norms"], rel=1e-5)
    # the mean over the ranks
    losses = [sum(each) / size for each in zip(*[result["losses"] for result in results], strict=True)]
    assert [scalars["loss"] for scalars in first["scalars"]] == pytest.approx(losses, rel=1e-6)
    assert [scalars["lr"] for scalars in first["scalars"]] == [0.05] * STEPS
    assert [result["failures"] for result in results] == [{}] * size
    assert all(result["restored"] and result["clears"] for result in results)
    assert first["optimizer"] == ("BF16_Optimizer" if case == "BF16_Optimizer" else "DeepSpeedZeroOptimizer")


@pytest.mark.skipif(not REAL, reason="needs deepspeed")
@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_comm": True},
        {"contiguous_gradients": False},
        {"reduce_scatter": False, "reduce_bucket_size": 20},
        {"round_robin_gradients": True},
        {"stage": 1, "round_robin_gradients": True, "parameter_alignment": True},
        {"parameter_alignment": True, "bf16": True},
    ],
    ids=str,
)
def test_settings_of_the_reduction(two_ranks, settings):
    case = {"stage": 2, "clip": 0.1, **settings}
    first = two_ranks.run(train, "real", 2, OPTIONS, case)[0]
    expected = first["held"] if "bf16" in settings else first["exact"]
    for rows, norms in zip(first["rows"], expected, strict=True):
        assert rows == pytest.approx(norms, rel=1e-6)
    assert first["totals"] == pytest.approx(first["norms"], rel=1e-5)
    assert first["numel"] == [66] * STEPS
    assert first["failures"] == {}


OPTIONS = {"weights": True, "updates": True}


@pytest.mark.parametrize("case", ["stage 1", "two groups", "BF16_Optimizer"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_updates_are_those_of_the_master_weights(two_ranks, kind, case):
    first = two_ranks.run(train, kind, 2, OPTIONS, CASES[case])[0]
    assert [len(rows) for rows in first["weights"]] == [5] * STEPS
    # each frozen weight is counted once
    assert [rows["frozen"] for rows in first["weights"]] == [2.0] * STEPS
    assert all(set(rows) == {"0.weight", "0.bias", "2.weight", "2.bias"} for rows in first["updates"])
    settings = CASES[case]
    for rows, held, norm in zip(first["updates"], first["held"], first["norms"], strict=True):
        rate = 0.05 * min(1.0, settings.get("clip", math.inf) / (norm + 1e-6))
        others = rate / settings.get("groups", 1)
        expected = {name: held[name] * (rate if name == "0.weight" else others) for name in rows}
        # each weight is rounded to float32
        assert rows == pytest.approx(expected, rel=1e-4)
    # of SGD, also after clipping: measured before the gradients are cleared
    cosines = [value for rows in first["cosines"] for value in rows.values()]
    assert cosines == pytest.approx([1.0] * 4 * STEPS, abs=1e-6)


def train_two_weights(rank, kind):
    """Two elements: with three ranks, some have only padding."""
    warnings.simplefilter("ignore")
    engine, sink = engine_of(kind, torch.nn.Linear(2, 1, bias=False), stage=2), Sink()
    with gm.watch(engine, sinks=[sink], rules=(), **OPTIONS) as monitor:
        weights = engine.module.weight.detach().clone()
        engine.backward(engine(torch.full((6, 2), rank + 1.0)).sum())
        engine.step()
    found = [rows_of(record, kind) for record in sink.records for kind in ("grads", "weights", "updates")]
    return found, float(weights.double().norm()), monitor.failures


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_partition_is_empty(three_ranks, kind):
    (found, weights, _), *_ = results = three_ranks.run(train_two_weights, kind)
    # the mean of 6, 12 and 18, twice
    norm = 12.0 * math.sqrt(2.0)
    assert found == [pytest.approx({"weight": x}, rel=1e-6) for x in (norm, weights, 0.05 * norm)]
    assert [failures for *_, failures in results] == [{}] * 3


def train_with_overflow(rank, kind):
    warnings.simplefilter("ignore")
    engine = engine_of(kind, model_of(), stage=2, clip=1.0)
    sink = Sink()
    with gm.watch(engine, sinks=[sink], rules=()):
        for step in range(4):
            loss = loss_of(engine, step, rank)
            engine.backward(loss * (float("inf") if step == 1 and rank == 0 else 1.0))
            engine.step()
    return [record.skipped for record in sink.records], [record.is_finite for record in sink.records]


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_is_marked(two_ranks, kind):
    skipped, finite = two_ranks.run(train_with_overflow, kind)[0]
    assert skipped == [False, True, False, False]
    assert finite == [True, False, True, True]


def train_in_another_way(rank, kind, how):
    """Watch what users pass, and close in the middle."""
    warnings.simplefilter("ignore")
    engine = engine_of(kind, model_of(), stage=1, clip=0.1, scale=8.0 if kind == "imitation" else 1.0)
    optimizer, sink, second, norms = engine.optimizer, Sink(), Sink(), []
    given = {
        "the engine": (engine,),
        "the engine and its optimizer": (engine, optimizer),
        "the engine and the optimizer inside": (engine, optimizer.optimizer),
        "the module and the optimizer": (engine.module, optimizer),
    }[how]
    monitor = gm.watch(*given, sinks=[sink], rules=())
    other = gm.watch(engine, sinks=[second], rules=())
    for step in range(4):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        if step == 1:
            monitor.close()
    other.close()
    engine.backward(loss_of(engine, 4, rank))
    engine.step()
    return sink.totals, second.totals, norms


@pytest.mark.parametrize(
    "how",
    [
        "the engine",
        "the engine and its optimizer",
        "the engine and the optimizer inside",
        "the module and the optimizer",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_passes_and_a_monitor_that_closes_early(two_ranks, kind, how):
    totals, others, norms = two_ranks.run(train_in_another_way, kind, how)[0]
    assert totals == pytest.approx(norms[:2], rel=1e-5)
    assert others == pytest.approx(norms, rel=1e-5)


def fail_in_the_loop(rank, kind):
    warnings.simplefilter("ignore")
    engine = engine_of(kind, model_of())
    sink = Sink()

    def failing():
        msg = "a bad disk"
        raise OSError(msg)

    with suppress(OSError), gm.watch(engine, sinks=[sink], rules=()):
        engine.backward(loss_of(engine, 0, rank))
        engine.step()
        engine.backward(loss_of(engine, 1, rank))
        # within the step, after the gradients were recorded
        engine.optimizer.optimizer.step = failing
        engine.step()
    return sink.steps, len(sink.faults), "step" in vars(engine.optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_the_step(two_ranks, kind):
    steps, faults, is_wrapped = two_ranks.run(fail_in_the_loop, kind)[0]
    assert (steps, faults, is_wrapped) == ([0, 1], 1, False)


# without ranks


def test_training_goes_on_if_the_buffers_are_not_as_expected(caplog):
    engine = engine_of("imitation", model_of())
    sink = Sink()
    with gm.watch(engine, sinks=[sink], rules=()):
        for step in range(3):
            engine.backward(loss_of(engine, step, 0))
            if step == 1:
                pieces = engine.optimizer.averaged_gradients[0]
                pieces[0] = pieces[0].reshape(-1)[:-1]
                pieces.append(torch.zeros(1))
            engine.step()
    assert sink.steps == [0]
    (said,) = [record.message for record in caplog.records if record.name == "gradiometer"][:1]
    assert "averaged_gradients[0] has 34 elements at 0, expected 35; training continues" in said


def test_a_loss_with_its_graph_is_known_to_reach_the_model():
    engine = engine_of("imitation", model_of())
    sink = Sink()
    with gm.watch(engine, sinks=[sink], rules=()) as monitor:
        loss = loss_of(engine, 0, 0)
        monitor.note(loss=loss)
        engine.backward(loss)
        engine.step()
    (record,) = sink.records
    assert record.model.reached is True
    assert record.model.requires_grad == (False, True, True, True, True)


class _Named:
    def __init__(self, name, package="deepspeed", **attributes):
        cls = type(name, (), {"__module__": f"{package}.runtime"})
        self.value = cls()
        for key, value in attributes.items():
            setattr(self.value, key, value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "DeepSpeedZeroOptimizer_Stage3",
            r"ZeRO stage 3 .*use ZeRO stage 1 or 2, or log engine.get_global_grad_n",
        ),
        ("FP16_Optimizer", "stage 0 in 16 bits keeps no partitions; use ZeRO stage 1 or 2"),
        ("Something", r"are in DeepSpeed's buffers; use gm.watch\(engine\)"),
    ],
)
def test_another_optimizer_of_deepspeed_is_refused_by_name(name, says):
    with pytest.raises(ValueError, match=f"DeepSpeed's {name} is not supported: .*{says}"):
        gm.watch(model_of(), _Named(name).value)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"cpu_offload": True}, "offload_optimizer; leave it out"),
        ({"zenflow": True}, "leave out zenflow"),
        ({"has_moe_layers": True}, "without MoE layers"),
        ({"torch_autocast_gradscaler": object()}, "use bfloat16"),
        ({"mpu": _Named("Mpu", get_model_parallel_world_size=lambda: 2).value}, "tensor parallelism"),
    ],
)
def test_a_configuration_with_gradients_elsewhere_is_refused_by_name(attributes, says):
    engine = engine_of("imitation", model_of())
    vars(engine.optimizer).update(attributes)
    with pytest.raises(ValueError, match=f"DeepSpeed's DeepSpeedZeroOptimizer is not supported: .*{says}"):
        gm.watch(engine)


def test_the_callback_of_a_trainer_names_the_stage():
    engine = engine_of("imitation", model_of())
    engine.zero_optimization_stage = lambda: 2
    assert partitioned.described(engine, "DEEPSPEED") == "DeepSpeed ZeRO stage 2"
    assert partitioned.described(model_of(), "FSDP") == "FSDP"


def test_a_pipeline_is_refused_by_name():
    class PipelineEngine(deepspeed_buffers.DeepSpeedEngine):
        __module__ = "deepspeed.runtime.pipe.engine"

    engine = PipelineEngine(model_of(), None)
    with pytest.raises(
        ValueError, match=r"DeepSpeed's PipelineEngine is not supported: .*use a DeepSpeedEngine"
    ):
        gm.watch(engine)


def test_what_does_not_fit_an_engine():
    engine = engine_of("imitation", model_of())
    other = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    with pytest.raises(
        ValueError, match="this SGD is not the optimizer of the engine, DeepSpeedZeroOptimizer; pass"
    ):
        gm.watch(engine, other)
    with pytest.raises(TypeError, match="DeepSpeed scales the loss itself"):
        gm.watch(engine, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="holds none of the watched model's parameters; watch the module"):
        gm.watch(model_of(), engine.optimizer)
    with pytest.raises(ValueError, match="keep_weights=True"):
        gm.watch(engine, keep_weights=True)
    with pytest.raises(TypeError, match="pass True or False"):
        gm.watch(engine, ranks=gm.Ranks(model_of()))
    # the optimizer inside of DeepSpeed's, with the module, does not show where the gradients are
    for given in ((engine.module, engine.optimizer.optimizer), (engine.module,)):
        with pytest.raises(ValueError, match=r"in its own buffers: use gm.watch\(engine\)"):
            gm.watch(*given)
    engine.module.frozen.ds_id = 1
    with pytest.raises(ValueError, match="in its own buffers: ZeRO stage 3 also partitions"):
        gm.watch(*given)
    assert "step" not in vars(engine.optimizer)


def test_a_monitor_that_finds_no_gradients_names_deepspeed():
    engine = engine_of("imitation", model_of())
    with gm.Monitor(engine.module) as monitor:
        for step in range(12):
            loss = loss_of(engine, step, 0)
            engine.backward(loss)
            monitor.record()
            engine.step()
            monitor.advance(loss=loss)
    (finding,) = monitor.findings
    assert "finds no gradient since step 0: DeepSpeed keeps them in its own buffers" in finding.message
    assert finding.advice == "use gm.watch(engine) instead of gm.Monitor"


def test_an_engine_of_stage_0_is_watched_like_its_optimizer():
    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = deepspeed_buffers.DeepSpeedEngine(model, optimizer)
    norms = norms_of(reference(model, 0, 1))
    with gm.watch(engine, sinks=[sink], rules=()):
        loss_of(engine, 0, 0).backward()
        engine.step()
    assert rows_of(sink.records[0]) == pytest.approx(norms, rel=1e-6)
