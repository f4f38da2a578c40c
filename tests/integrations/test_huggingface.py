"""MonitorCallback for the Trainer of Transformers, against the library itself, on a tiny model."""

# ruff: noqa: ARG002 the library names the arguments

from __future__ import annotations

import gc
import logging
import math
import os
import weakref
from pathlib import Path

import pytest
import torch

import gradiometer as gm
from support.watching import Counter, Sink, time_limit

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from gradiometer.integrations.huggingface import STATE_NAME, MonitorCallback  # noqa: E402
from gradiometer.rules import ChangedOutside, default_rules  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("_offline", "_dynamo"),
    # Dynamo checks whether a tensor has a gradient; it hides the warning, but not from a filter that raises
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NAMES = ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.bias", "transformer.wte.weight")


@pytest.fixture
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    # more threads do not speed up tensors this small, and wait for one another
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    # accelerate keeps the state of the last Trainer for the next one
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Tokens(torch.utils.data.Dataset):
    def __init__(self, fail_at=None, error=None):
        self.fail_at, self.error = fail_at, error

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if self.error is not None and i == self.fail_at:
            raise self.error
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder, data=None, **arguments):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "seed": 0,
    }
    torch.manual_seed(0)
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(str(folder), **(defaults | arguments)),
        train_dataset=data or Tokens(),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Clipped(transformers.TrainerCallback):
    """Keeps the norms that the optimizer sees."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, *, model, **kwargs):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())


def watched(trainer, **options):
    sink = Sink()
    callback = MonitorCallback(trainer, sinks=[sink], **{"rules": ()} | options)
    trainer.add_callback(callback)
    return callback, sink


def logs(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.parametrize(("accumulate", "backend"), [(3, None), (2, "aot_eager")])
def test_it_records_what_the_trainer_does(tmp_path, accumulate, backend):
    compiled = {} if backend is None else {"torch_compile": True, "torch_compile_backend": backend}
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulate, **compiled)
    callback, sink = watched(trainer)
    clipped = Clipped()
    trainer.add_callback(clipped)
    trainer.train()
    assert (trainer.model_wrapped is trainer.model) == (backend is None)
    assert sink.info.catalog.names == tuple([name for name, _ in trainer.model.named_parameters()])
    assert set(NAMES) <= set(sink.info.catalog.names)
    assert sink.steps == [0, 1, 2, 3]
    # the Trainer logs the norm before clipping, which is also what the monitor measures
    assert sink.totals == pytest.approx(logs(trainer, "grad_norm"), rel=1e-5)
    assert min(sink.totals) > 0.5
    assert clipped.norms == pytest.approx([0.1] * 4, rel=1e-4)
    assert sink.scalars("loss") == pytest.approx(logs(trainer, "loss"), rel=1e-5)
    assert sink.scalars("lr") == pytest.approx(logs(trainer, "learning_rate"))
    assert not any(record.skipped for record in sink.records)
    assert callback.monitor.failures == {}
    assert (callback.monitor.step, sink.closed, sink.faults) == (4, 1, [])


def test_a_scaled_step_is_measured_unscaled_and_one_that_overflows_is_skipped(tmp_path):
    trainer = make_trainer(tmp_path, fp16=True, max_steps=5)
    # accelerate creates a scaler only on a GPU
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
    assert trainer.accelerator.mixed_precision == "fp16"
    _, sink = watched(trainer)
    step = trainer.training_step

    def overflowing(model, *args):
        loss = step(model, *args)
        seen.append(model.transformer.wte.weight.grad.norm().item())
        return loss

    seen = []
    trainer.training_step = overflowing
    trainer.model.transformer.wte.weight.register_hook(lambda g: g * (math.inf if not seen else 1.0))
    trainer.train()
    assert [record.skipped for record in sink.records] == [True, False, False, False, False]
    assert sink.totals[1:] == pytest.approx(logs(trainer, "grad_norm")[1:], rel=1e-3)
    assert seen[1] > 2.0**10


def test_it_resumes_from_the_checkpoint(tmp_path):
    first = make_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    _, whole = watched(first, rules=[Counter(), *default_rules()])
    first.train()
    assert (tmp_path / "checkpoint-2" / STATE_NAME).exists()
    again = make_trainer(tmp_path, max_steps=4)
    rule = Counter()
    callback, rest = watched(again, rules=[rule, *default_rules()])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest.steps == [2, 3]
    assert rest.info.first_step == 2
    assert rule.seen == 4
    assert rest.totals == pytest.approx(whole.totals[2:], rel=1e-5)
    assert callback.monitor.failures == {}


@pytest.mark.parametrize("damaged", ["", "content", "pipe"])
def test_without_a_state_to_resume_the_steps_still_count_on(tmp_path, damaged, caplog):
    make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    state = tmp_path / "checkpoint-2" / STATE_NAME
    if damaged == "content":
        state.write_bytes(b"?")
    elif damaged:
        os.mkfifo(state)
    trainer = make_trainer(tmp_path, max_steps=3)
    _, sink = watched(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert sink.steps == [2]
    assert sink.info.first_step == 2
    assert ("the rules start without a history" in caplog.text) == bool(damaged)


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("a bad disk"), "exception"), (KeyboardInterrupt(), "interrupt")]
)
def test_what_ends_the_training_leaves_a_black_box(tmp_path, error, reason):
    trainer = make_trainer(tmp_path, Tokens(7, error))
    _, sink = watched(trainer)
    with pytest.raises(type(error)):
        trainer.train()
    (fault,) = sink.faults
    assert (fault.reason, fault.step) == (reason, 2)
    assert [record.step for record in fault.last] == [0, 1]
    assert sink.closed == 1


@pytest.mark.parametrize("place", ["record", "state_dict", "save", "load", "close"])
def test_what_a_signal_handler_raises_ends_the_training(tmp_path, monkeypatch, place):
    from gradiometer.monitor.monitor import Monitor

    trainer = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    watched(trainer)
    trainer.train()
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    callback, sink = watched(trainer)
    replace, close = Path.replace, Monitor.close
    calls = []
    with time_limit() as interrupted:

        def saved(self, to):
            return interrupted() if to.name == STATE_NAME else replace(self, to)

        if place == "save":
            monkeypatch.setattr(Path, "replace", saved)
        elif place == "load":
            monkeypatch.setattr("gradiometer.integrations.huggingface.open_file", interrupted)
        elif place == "close":
            monkeypatch.setattr(
                Monitor, "close", lambda self: close(self) if calls else calls.append(1) or interrupted()
            )
        else:
            monkeypatch.setattr(Monitor, place, interrupted)
        with pytest.raises(TimeoutError, match="the time is up"):
            trainer.train(resume_from_checkpoint=True)
    if place == "load":
        assert callback.monitor is None
    else:
        assert [fault.reason for fault in sink.faults] == ["exception"]
        assert callback.monitor.closed


def test_a_second_training_has_a_monitor_of_its_own(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    callback, sink = watched(trainer)
    trainer.train()
    first = callback.monitor
    trainer.train()
    assert callback.monitor is not first
    assert sink.steps == [0, 1, 0, 1]


def test_no_failure_of_ours_ends_the_training(tmp_path, monkeypatch, caplog):
    from gradiometer.monitor.monitor import Monitor

    def broken(*_, **__):
        raise RuntimeError("out of telemetry")

    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
    callback, _ = watched(trainer)
    monkeypatch.setattr(Monitor, "state_dict", broken)
    trainer.train()
    assert "the checkpoint does not contain the monitor's state" in caplog.text
    assert callback.monitor.step == 4
    for method in ("record", "advance", "close"):
        caplog.clear()
        monkeypatch.setattr(Monitor, method, broken)
        trainer.train()
        assert trainer.state.global_step == 4
        assert "out of telemetry" in caplog.text
        assert "training continues without the monitor" in caplog.text


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_training_is_not_watched_and_says_so(tmp_path, kind, caplog):
    from accelerate.utils import DistributedType

    trainer = make_trainer(tmp_path)
    callback, sink = watched(trainer)
    state = type("State", (), {"is_world_process_zero": True, "global_step": 0})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.accelerator), "distributed_type", DistributedType[kind])
        callback.on_train_begin(trainer.args, state, trainer.control, model=trainer.model)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"MonitorCallback: with {kind}, ranks have neither full gradients")
    assert line.endswith("training continues without the monitor")
    callback.on_step_end(trainer.args, state, trainer.control)
    assert callback.monitor is sink.info is None


def test_the_first_rank_alone_records(tmp_path):
    trainer = make_trainer(tmp_path)
    callback, _ = watched(trainer)
    state = type("State", (), {"is_world_process_zero": False, "global_step": 0})()
    callback.on_train_begin(trainer.args, state, trainer.control, model=trainer.model)
    assert callback.monitor is None


def test_quantized_and_frozen_weights_are_no_obstacle(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    model = trainer.model
    model.transformer.wpe.weight.requires_grad_(False)
    codes = torch.zeros(3, dtype=torch.uint8)
    model.register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))
    _, sink = watched(trainer)
    trainer.train()
    (record,) = sink.records
    assert "codes" not in record.catalog.names
    unmeasured = [n for n, m in zip(record.catalog.names, record.measured().tolist(), strict=True) if not m]
    assert unmeasured == ["transformer.wpe.weight"]


def test_bad_arguments_are_refused_at_once(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(TypeError, match="capcity"):
        MonitorCallback(trainer, capcity=3)
    with pytest.raises(TypeError, match=r"create the Trainer first, then call trainer\.add_callback"):
        MonitorCallback(trainer.model)
    _, sink = watched(trainer, capacity=0)
    with pytest.raises(ValueError, match="capacity"):
        trainer.train()
    assert logging.getLogger("gradiometer").handlers == []
    assert sink.info is None


def test_watch_gives_a_trainer_its_callback(tmp_path):
    trainer, sink = make_trainer(tmp_path), Sink()
    trainer.__class__ = type("Mine", (transformers.Trainer,), {})
    callback = gm.watch(trainer, rules=(), sinks=[sink])
    trainer.train()
    assert (sink.steps, callback.monitor.closed) == ([0, 1, 2, 3], True)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        gm.watch(trainer, evry=2)


def test_updates_are_compared_with_the_gradients_of_the_step(tmp_path):
    trainer = make_trainer(tmp_path, optim="sgd", learning_rate=0.5, weight_decay=0.0)
    callback, sink = watched(trainer, updates=True)
    trainer.train()
    assert callback.monitor.failures == {}
    cosines = [record.total("descent_cosine", "updates") for record in sink.records]
    # float32 weights hold each update up to half an ulp of theirs
    assert cosines[:3] == pytest.approx([1.0] * 3, abs=1e-4)


class Halving(transformers.TrainerCallback):
    """Overwrites weights after the third step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            with torch.no_grad():
                model.transformer.h[0].attn.c_attn.weight.mul_(0.5)


def test_a_change_between_two_steps_is_no_update(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=14)
    callback, _ = watched(trainer, updates=True, rules=[ChangedOutside()])
    trainer.add_callback(Halving())
    trainer.train()
    found = [(x.tensor, x.first_step, x.severity.name) for x in callback.monitor.findings]
    # of three pairs of steps one, so it may be a part of the loop
    assert found == [(NAMES[0], 3, "INFO")]


def test_after_the_training_nothing_of_the_monitor_is_left(tmp_path):
    trainer = make_trainer(tmp_path)
    callback, _ = watched(trainer, updates=True, weights=True)
    trainer.train()
    assert callback.monitor._recorder.is_released
    assert callback.monitor._updates.parts == []
    refs = [weakref.ref(callback), weakref.ref(callback.monitor)]
    del trainer, callback
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_rules_know_the_groups_of_the_trainers_optimizer(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=14)
    model = trainer.model
    still = list(model.transformer.h[0].parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in still)]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": still, "lr": 0.0}], lr=0.05)
    trainer.optimizer = optimizer
    callback = MonitorCallback(trainer, weights=True)
    trainer.add_callback(callback)
    trainer.train()

    (found,) = [one for one in callback.monitor.findings if one.rule == "not_updated"]
    assert str(found.severity) == "info"
    assert found.message.startswith("transformer.h.0 (")
    assert found.message.endswith("the learning rate of their param group is 0")


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_limit_and_the_factor_of_the_clip_are_recorded_without_a_second_read(tmp_path, accumulated):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulated)
    _, sink = watched(trainer)
    reads = []
    measure = gm.Monitor.record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gm.Monitor, "record", lambda *args, **kwargs: reads.append(1) or measure(*args, **kwargs)
        )
        trainer.train()
    assert len(reads) == 4
    assert sink.scalars("clip_max_norm") == [0.1] * 4
    assert sink.scalars("clip_factor") == pytest.approx([0.1 / (x + 1e-6) for x in sink.totals], rel=1e-5)
    assert sink.totals == pytest.approx(logs(trainer, "grad_norm"), rel=1e-5)


def test_a_with_block_of_the_callback(tmp_path):
    trainer = make_trainer(tmp_path)
    with gm.watch(trainer, rules=()) as callback:
        assert callback.summary() == "no run was watched"
        trainer.train()
    assert (callback.monitor.step, callback.monitor.closed) == (4, True)
    assert str(callback.summary()).startswith("4 steps")
