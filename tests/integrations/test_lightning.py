"""MonitorCallback for Lightning's Trainer, against the library itself."""

# ruff: noqa: ARG001, ARG002 the library names the arguments

from __future__ import annotations

import copy
import gc
import importlib
import math
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

import gradiometer as gm
from support.watching import Counter, NoReads, Sink, time_limit

pl = pytest.importorskip("pytorch_lightning")

from gradiometer.integrations import lightning as integration  # noqa: E402
from gradiometer.integrations.lightning import MonitorCallback  # noqa: E402
from gradiometer.monitor import signals  # noqa: E402
from gradiometer.rules import ChangedOutside, NotUpdated, default_rules  # noqa: E402

# warnings of the libraries: loaders without workers, torch's pytrees, the order of a scheduler's calls
pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:(pytorch_)?lightning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.usefixtures("_dynamo"),
]


def make_module(package=pl, **methods):
    """Return a module that keeps the norms of the gradients before and after Lightning clips them."""

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
            self.before, self.after, self.losses, self.lrs = [], [], [], []

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def configure_gradient_clipping(self, optimizer, **kwargs):
            self.before.append(norm(self))
            self.lrs.append(optimizer.param_groups[0]["lr"])
            self.clip_gradients(optimizer, **kwargs)
            self.after.append(norm(self))

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def norm(module):
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).item()


def loader(batches=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * batches, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 10 * x[:, :1]), batch_size=2)


def make_trainer(folder, callbacks=(), package=pl, **options):
    defaults = {"max_steps": 4, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    return package.Trainer(callbacks=list(callbacks), **(defaults | quiet | options))


def fit(module, folder, callbacks, package=pl, data=None, ckpt_path=None, **options):
    trainer = make_trainer(folder, callbacks, package, **options)
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return trainer


def watching(**options):
    sink = Sink()
    return MonitorCallback(sinks=[sink], **{"rules": ()} | options), sink


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_it_records_what_the_trainer_does(tmp_path, accumulate, backend):
    module = make_module()
    callback, sink = watching()
    whole = module if backend is None else torch.compile(module, backend=backend)
    # 8 batches per epoch: with 3 per step, the last step of an epoch has 2
    fit(whole, tmp_path, [callback], accumulate_grad_batches=accumulate, gradient_clip_val=0.01)
    assert sink.info.catalog.names == ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
    assert sink.steps == [0, 1, 2, 3]
    assert sink.totals == pytest.approx(module.before, rel=1e-5)
    assert min(sink.totals) > 1
    assert module.after == pytest.approx([0.01] * 4, rel=1e-3)
    assert sink.scalars("lr") == pytest.approx(module.lrs)
    assert module.lrs[0] > module.lrs[3]
    assert not any(record.skipped for record in sink.records)
    assert (callback.monitor.step, callback.monitor.failures, sink.closed) == (4, {}, 1)


def test_the_loss_is_the_mean_of_the_micro_batches(tmp_path):
    def training_step(self, batch, batch_idx):
        self.losses.append(float(batch_idx))
        return self.net(batch[0]).sum() * 0 + batch_idx

    _, sink = callback = watching()
    fit(make_module(training_step=training_step), tmp_path, [callback[0]], accumulate_grad_batches=2)
    assert sink.scalars("loss") == [0.5, 2.5, 4.5, 6.5]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_step_is_measured_unscaled_and_one_that_overflows_is_skipped(tmp_path, fused):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=fused)

    def on_before_optimizer_step(self, optimizer):
        self.losses.append(norm(self))

    module = make_module(
        configure_optimizers=configure_optimizers, on_before_optimizer_step=on_before_optimizer_step
    )
    broken = []
    module.net[0].weight.register_hook(lambda g: g * (1.0 if broken else broken.append(1) or math.inf))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    callback, sink = watching()
    fit(module, tmp_path, [callback], plugins=[precision])
    assert [record.skipped for record in sink.records] == [True, False, False, False]
    scale = 512.0 if fused else 1.0
    assert [total * scale for total in sink.totals[1:]] == pytest.approx(module.losses[1:], rel=1e-5)


def test_without_a_scaler_nothing_is_skipped_and_nothing_said_to_be(tmp_path):
    module = make_module()
    module.net[2].bias.register_hook(lambda g: g * math.nan)
    callback, sink = watching()
    fit(module, tmp_path, [callback], max_steps=1)
    (record,) = sink.records
    assert not record.skipped
    assert record.total("n_nan") == 1
    assert module.net[2].bias.isnan().all()


def test_each_of_several_optimizers_is_measured_before_its_own_update(tmp_path):
    class Gan(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)
            self.norms = {"maker": [], "judge": []}

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for name, part, optimizer, fake in (
                ("judge", self.judge, second, self.maker(batch[0]).detach()),
                ("maker", self.maker, first, self.maker(batch[0])),
            ):
                optimizer.zero_grad()
                loss = self.judge(fake).square().mean()
                # the maker's backward also adds gradients to the judge, which no update uses
                self.manual_backward(loss)
                self.norms[name].append(norm(part))
                optimizer.step()
            return {"loss": loss}

        def configure_optimizers(self):
            parts = zip((self.maker, self.judge), (0.1, 0.01), strict=True)
            return [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in parts]

    module = Gan()
    callback, sink = watching()
    fit(module, tmp_path, [callback], max_steps=6)
    assert sink.steps == [0, 1, 2]
    names = sink.info.catalog.names
    for part, norms in module.norms.items():
        rows = [i for i, name in enumerate(names) if name.startswith(part)]
        measured = [record.value("sumsq")[rows].sum().sqrt().item() for record in sink.records]
        assert measured == pytest.approx(norms, rel=1e-5)
    assert sink.scalars("lr") == [0.1] * 3
    assert sink.scalars("lr_1") == [0.01] * 3
    assert all(loss > 0 for loss in sink.scalars("loss"))


def test_it_resumes_from_the_checkpoint(tmp_path):
    def saving():
        return pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")

    callback, _ = watching(rules=[Counter(), *default_rules()])
    fit(make_module(), tmp_path, [callback, saving()], enable_checkpointing=True)
    rule = Counter()
    callback, rest = watching(rules=[rule, *default_rules()])
    module = make_module()
    fit(module, tmp_path, [callback], ckpt_path=tmp_path / "step=2.ckpt")
    assert rest.steps == [2, 3]
    assert rest.info.first_step == 2
    assert rule.seen == 4
    assert rest.totals == pytest.approx(module.before, rel=1e-5)
    # without the state of a monitor, the steps still continue from the checkpoint
    fit(make_module(), tmp_path, [saving()], enable_checkpointing=True, max_steps=6)
    callback, rest = watching()
    fit(make_module(), tmp_path, [callback], ckpt_path=tmp_path / "step=6.ckpt", max_steps=7)
    assert rest.steps == [6]
    assert rest.info.first_step == 6


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [
        (RuntimeError("a bad disk"), RuntimeError, "exception"),
        # Lightning turns it into the end of the program
        (KeyboardInterrupt(), SystemExit, "interrupt"),
    ],
)
def test_what_ends_the_training_leaves_a_black_box(tmp_path, error, raised, reason, monkeypatch):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise error
        return self.net(batch[0]).sum()

    # Lightning would leave SIGINT ignored
    monkeypatch.setattr("signal.signal", lambda *_: None)
    callback, sink = watching()
    with pytest.raises(raised):
        fit(make_module(training_step=training_step), tmp_path, [callback])
    (fault,) = sink.faults
    assert (fault.reason, fault.step) == (reason, 2)
    assert [record.step for record in fault.last] == [0, 1]
    assert sink.closed == 1


def test_a_second_fit_has_a_monitor_of_its_own_and_a_step_without_a_loss_does_no_harm(tmp_path):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.net(batch[0]).sum()

    callback, sink = watching()
    for _ in range(2):
        fit(make_module(training_step=training_step), tmp_path, [callback], max_steps=3)
    assert sink.steps == [0, 1, 2] * 2
    assert [record.loss is None for record in sink.records] == [False, True, False] * 2
    assert sink.records[1].measured().sum() == 0


@pytest.mark.parametrize("method", ["record", "advance", "close", "state_dict"])
def test_no_failure_of_ours_ends_the_training(tmp_path, monkeypatch, caplog, method):
    from gradiometer.monitor.monitor import Monitor

    def broken(*_, **__):
        raise RuntimeError("out of telemetry")

    monkeypatch.setattr(Monitor, method, broken)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trainer = fit(make_module(), tmp_path, [watching()[0], saving], enable_checkpointing=True)
    assert trainer.global_step == 4
    assert "out of telemetry" in caplog.text


def test_sharded_training_is_not_watched_and_says_so_and_other_ranks_are_silent(caplog):
    class Trainer:
        strategy = type("FSDPStrategy", (), {})()
        is_global_zero = True

    callback, sink = watching()
    callback.on_train_start(Trainer(), make_module())
    callback.on_before_optimizer_step(Trainer(), make_module(), None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("MonitorCallback: with FSDPStrategy, ranks have neither full gradients")
    Trainer.is_global_zero = False
    callback.on_train_start(Trainer(), make_module())
    assert len(caplog.records) == 1
    assert callback.monitor is sink.info is None


def test_it_serves_both_names_of_the_package(tmp_path, monkeypatch):
    other = pytest.importorskip("lightning.pytorch")
    assert issubclass(MonitorCallback, pl.Callback) != issubclass(MonitorCallback, other.Callback)
    for package in (pl, other):
        module = make_module(package)
        callback, sink = watching()
        fit(module, tmp_path, [callback], package)
        assert sink.totals == pytest.approx(module.before, rel=1e-5)
    # the class derives from the package in use
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    try:
        assert issubclass(importlib.reload(integration).MonitorCallback, other.Callback)
    finally:
        monkeypatch.undo()
        importlib.reload(integration)


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_watch_gives_a_trainer_its_callback(tmp_path, name):
    package, sink = pytest.importorskip(name), Sink()
    trainer = make_trainer(tmp_path, package=package)
    callback = gm.watch(trainer, rules=(), sinks=[sink])
    module = make_module(package)
    trainer.fit(module, loader())
    assert callback in trainer.callbacks
    assert (sink.steps, callback.monitor.closed) == ([0, 1, 2, 3], True)
    with pytest.raises(TypeError, match="the Trainer has its own optimizer and scaler"):
        gm.watch(trainer, torch.optim.SGD(module.parameters()))


def test_updates_are_compared_with_the_gradients_of_the_step(tmp_path):
    callback, sink = watching(updates=True)
    fit(make_module(), tmp_path, [callback])
    assert callback.monitor.failures == {}
    known = [record.total("n_nonzero_g", "updates") for record in sink.records]
    assert known == [record.total("numel") - record.total("n_zero") for record in sink.records]
    assert all(record.total("update_ratio", "updates") > 0 for record in sink.records)


def automatic_steps(self, epoch, batch_idx, optimizer, closure):
    """Updates the weights by 0.1 each, and sets them to 0 after it."""
    optimizer.step(closure)
    nn.init.zeros_(self.net.weight)


def manual_steps(self, batch, batch_idx):
    """The same with manual optimization; self.steps steps, of all optimizers in turn."""
    optimizers = self.optimizers()
    # a copy: the list is the Trainer's
    optimizers = list(optimizers) if isinstance(optimizers, list) else [optimizers]
    if self.is_raw:
        optimizers[-1] = optimizers[-1].optimizer
    for step in range(self.steps):
        self.manual_backward(self.net(batch).mean())
        optimizers[step % len(optimizers)].step()
        self.zero_grad()
    nn.init.zeros_(self.net.weight)


@pytest.mark.parametrize(
    ("is_manual", "steps", "optimizers", "is_raw"),
    [
        (False, 1, 1, False),
        (True, 1, 1, False),
        (True, 3, 1, False),
        (True, 4, 2, False),
        # Lightning tells callbacks nothing about the last optimizer
        (True, 2, 2, True),
    ],
)
def test_what_follows_the_last_step_of_a_batch_is_no_update(tmp_path, is_manual, steps, optimizers, is_raw):
    def configure_optimizers(self):
        parts = [[self.net.weight], [self.net.bias]] if optimizers == 2 else [list(self.parameters())]
        return [torch.optim.SGD(part, lr=0.1) for part in parts]

    methods = (
        {"training_step": manual_steps}
        if is_manual
        else {
            "optimizer_step": automatic_steps,
            "training_step": lambda self, batch, _: self.net(batch).mean(),
        }
    )
    module = make_module(configure_optimizers=configure_optimizers, **methods)
    module.net = nn.Linear(1, 1)
    module.automatic_optimization = not is_manual
    module.steps, module.is_raw = steps, is_raw
    callback, sink = watching(updates=True)
    data = torch.utils.data.DataLoader(torch.ones(3, 1))
    fit(module, tmp_path, [callback], data=data, max_steps=-1, max_epochs=1)
    assert callback.monitor.failures == {}
    moved = 0.1 * steps / optimizers
    measured = [record.value("norm", "updates").tolist() for record in sink.records]
    assert measured == [pytest.approx([moved, moved], rel=1e-5)] * 3


def test_a_compiled_step_of_the_optimizer_is_measured(tmp_path):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return optimizer

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(batch[0]).sum())
        self.optimizers().step()
        self.before.append(0.1 * norm(self))
        self.zero_grad()

    module = make_module(training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    callback, sink = watching(updates=True)
    fit(module, tmp_path, [callback], max_steps=3)
    assert callback.monitor.failures == {}
    measured = [record.value("norm", "updates").norm().item() for record in sink.records]
    assert measured == pytest.approx(module.before, rel=1e-3)


@pytest.mark.parametrize("method", ["state_dict", "close"])
def test_what_a_signal_handler_raises_ends_the_training(tmp_path, monkeypatch, method):
    from gradiometer.monitor.monitor import Monitor

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    callback, sink = watching()
    with time_limit() as interrupted:
        original = getattr(Monitor, method)
        calls = []
        monkeypatch.setattr(
            Monitor, method, lambda self: (calls or calls.append(1) or interrupted()) and original(self)
        )
        with pytest.raises(TimeoutError, match="the time is up"):
            fit(make_module(), tmp_path, [callback, Saving()])
    assert [fault.reason for fault in sink.faults] == ["exception"]
    assert callback.monitor.closed


def test_a_change_between_two_steps_is_no_update(tmp_path):
    class Halving(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                with torch.no_grad():
                    next(pl_module.parameters()).mul_(0.5)

    callback, _ = watching(updates=True, rules=[ChangedOutside()])
    module = make_module()
    fit(module, tmp_path, [callback, Halving()])
    assert callback.monitor.failures == {}
    name, _ = next(module.named_parameters())
    assert [(x.tensor, x.first_step) for x in callback.monitor.findings] == [(name, 3)]


def test_after_the_training_nothing_of_the_monitor_is_left(tmp_path, monkeypatch):
    # while a monitor of another test is open, our handlers, and thus the trainer's, stay
    monkeypatch.setattr(signals, "_subscribers", [])
    callback, _ = watching(updates=True, weights=True)
    module = make_module()
    trainer = fit(module, tmp_path, [callback])
    assert callback.monitor._recorder.is_released
    assert callback.monitor._updates.parts == []
    assert not any(each._optimizer_step_post_hooks for each in trainer.optimizers)
    weight = weakref.ref(module.net[0].weight)
    del module, trainer
    gc.collect()
    assert weight() is None
    refs = [weakref.ref(callback), weakref.ref(callback.monitor)]
    del callback
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_rules_know_the_groups_of_the_trainers_optimizers(tmp_path):
    def configure_optimizers(self):
        parts = [{"params": self.net[0].parameters()}, {"params": [self.net[2].weight], "lr": 0.0}]
        return torch.optim.SGD(parts, lr=0.01)

    callback = MonitorCallback(weights=True)
    fit(make_module(configure_optimizers=configure_optimizers), tmp_path, [callback], max_steps=14)

    # the bias is in no group, and a single number
    (found,) = [one for one in callback.monitor.findings if one.rule == "not_updated"]
    assert str(found.severity) == "info"
    assert found.message.startswith("net.2.weight: ")
    assert found.message.endswith("the learning rate of their param group is 0")


def test_without_gradients_the_message_is_about_the_trainer(tmp_path):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(batch[0].detach()).sum() * 0 + self.other.sum())
        self.optimizers().step()
        self.optimizers().zero_grad()

    module = make_module(
        training_step=training_step, configure_optimizers=lambda self: torch.optim.SGD([self.other], lr=0.1)
    )
    module.automatic_optimization = False
    module.other = nn.Parameter(torch.zeros(()))
    module.net.requires_grad_(False)
    module.other.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    callback = MonitorCallback()
    fit(module, tmp_path, [callback], max_steps=8)

    (found,) = [one for one in callback.monitor.findings if one.rule == "no_gradients"]
    assert found.message.startswith("the trainer's optimizer finds no gradient since step 0")
    assert "record()" not in found.message + found.advice


def test_optimizers_that_toggle_their_parameters_have_updates_of_their_own(tmp_path):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.01) for i in (0, 2)]

    def training_step(self, batch, batch_idx):
        for i, optimizer in zip((0, 2), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
            before = self.net[i].weight.detach().clone()
            optimizer.step()
            true[i].append((self.net[i].weight.detach() - before).norm().item())
            self.untoggle_optimizer(optimizer)
            with torch.no_grad():
                self.net[i].weight.mul_(0.9)

    true = {0: [], 2: []}
    module = make_module(training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    callback, sink = watching(updates=True, weights=True, rules=[NotUpdated()])
    fit(module, tmp_path, [callback], max_steps=32)
    assert callback.monitor.failures == {}
    assert callback.monitor.findings == []
    for i, norms in true.items():
        place = sink.info.catalog.names.index(f"net.{i}.weight")
        recorded = [float(record.value("norm", "updates")[place]) for record in sink.records]
        assert recorded == pytest.approx(norms, rel=1e-4)


class Values(pl.loggers.logger.Logger):
    """A logger that keeps what Lightning passes to it."""

    name, version = "values", 0

    def __init__(self):
        super().__init__()
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def test_what_the_module_logs_in_a_batch_is_recorded_with_its_step(tmp_path):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss.detach() * 2, on_step=False, on_epoch=True)
        self.log_dict({"both": torch.tensor(1.0 + batch_idx), "lr": 7.0}, on_step=True, on_epoch=True)
        if batch_idx == 1:
            self.log("once", 5)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

    module = make_module(training_step=training_step, validation_step=validation_step)
    callback, sink = watching()
    trainer = make_trainer(tmp_path, [callback], val_check_interval=1, limit_val_batches=1)
    trainer.fit(module, loader(), loader())
    assert callback.monitor.failures == {}
    assert sink.scalars("train_loss") == pytest.approx([2 * loss for loss in sink.scalars("loss")], rel=1e-6)
    assert sink.scalars("both") == [1.0, 2.0, 3.0, 4.0]
    # the rates are those of the optimizer
    assert sink.scalars("lr") == pytest.approx(module.lrs)
    names = [{x for x in record.scalars if not x.startswith("optimizer/")} for record in sink.records]
    assert names == [{"loss", "lr", "train_loss", "both"} | ({"once"} if i == 1 else set()) for i in range(4)]
    assert "log" not in vars(module)


def test_the_loss_of_manual_optimization_is_what_the_module_logs(tmp_path):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())
        self.log_dict({"train_loss": loss, "g": loss * 2})

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    callback, sink = watching()
    fit(module, tmp_path, [callback])
    assert sink.scalars("loss") == sink.scalars("train_loss") == pytest.approx(module.losses, rel=1e-6)
    assert sink.scalars("g") == pytest.approx([2 * loss for loss in module.losses], rel=1e-6)


def test_the_logger_gets_the_norm(tmp_path):
    module, values = make_module(), Values()
    callback, sink = watching()
    fit(module, tmp_path, [callback], logger=values, log_every_n_steps=1, accumulate_grad_batches=2)
    logged = [metrics["grad_norm"] for metrics in values.logged if "grad_norm" in metrics]
    assert logged == pytest.approx(sink.totals, rel=1e-6)
    assert logged == pytest.approx(module.before, rel=1e-5)
    # a run that is not watched logs nothing
    assert len(logged) == 4


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end"])
def test_a_norm_that_the_module_logs_itself_is_left_as_it_is(tmp_path, hook):
    def log(self, *args):
        self.log("grad_norm", -1.0, prog_bar=True)

    module, values = make_module(**{hook: log}), Values()
    callback, sink = watching()
    fit(module, tmp_path, [callback], logger=values, log_every_n_steps=1)
    assert sink.steps == [0, 1, 2, 3]
    assert {metrics["grad_norm"] for metrics in values.logged if "grad_norm" in metrics} == {-1.0}


@pytest.mark.parametrize("options", [{"log_norm": None}, {"log_norm": "norm"}, {"every": 2}])
def test_the_norm_is_logged_as_asked(tmp_path, options):
    values = Values()
    callback, sink = watching(**options)
    fit(make_module(), tmp_path, [callback], logger=values, log_every_n_steps=1)
    logged = {name: value for metrics in values.logged for name, value in metrics.items() if "norm" in name}
    assert set(logged) == {options.get("log_norm", "grad_norm")} - {None}
    if "every" in options:
        # that of step 2, the last recorded one
        assert logged["grad_norm"] == pytest.approx(sink.totals[2], rel=1e-6)


def test_a_copy_of_a_watched_module_logs_for_itself(tmp_path):
    copies = []

    class Copying(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            copies.append(copy.deepcopy(pl_module))

    module = make_module()
    fit(module, tmp_path, [watching()[0], Copying()], max_steps=1)
    assert copies[0].log.__self__ is copies[0]
    module = pl.LightningModule()
    log = integration._WatchedLog(module)
    assert module.log is log
    loaded = pickle.loads(pickle.dumps(module))  # noqa: S301 our own bytes
    assert loaded.log.__self__ is loaded
    log.unwrap()
    assert module.log.__self__ is module


def test_values_are_logged_without_a_wait(tmp_path):
    module = make_module()
    log = integration._WatchedLog(module)
    kept = []
    log._log = lambda *args, **_: kept.append(args)
    log.begin()
    value = torch.tensor(2.0, requires_grad=True)
    with NoReads():
        module.log("x", value)
        module.log(name="y", value=value * 2)
        value.data.zero_()
        logged = log.end()
        log.log_once("grad_norm", value.detach().double())
        module.log("z", value)
    assert {name: float(x) for name, x in logged.items()} == {"x": 2.0, "y": 4.0}
    assert [name for name, *_ in kept] == ["x", "y", "grad_norm", "z"]
    assert log.end() == {}


# from Dynamo, of the loss
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_manual_step_does_not_trace_the_callback(tmp_path, monkeypatch):
    from gradiometer.integrations.session import Session

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        self.optimizers().step()
        self.zero_grad()
        self.log("train_loss", loss)
        graphs.append(torch.compiler.is_compiling())

    def record(self, *args):
        traced.append(torch.compiler.is_compiling())
        original(self, *args)

    graphs, traced, original = [], [], Session.record
    monkeypatch.setattr(Session, "record", record)
    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    callback, sink = watching()
    fit(torch.compile(module, backend="eager"), tmp_path, [callback])
    assert graphs == [True] * 4
    assert traced == [False] * 4
    assert sink.scalars("loss") == sink.scalars("train_loss")


def test_fabric_needs_nothing_but_what_it_has_set_up():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    sink, norms = Sink(), []
    with pytest.raises(TypeError, match=r"^watch: got Lightning Fabric, .*gm\.watch\(model, optimizer\)"):
        gm.watch(fabric)
    with gm.watch(model, optimizer, rules=(), sinks=[sink]) as monitor:
        for _ in range(3):
            loss = model(torch.ones(1, 2)).square().sum()
            fabric.backward(loss)
            monitor.note(loss=loss)
            norms.append(norm(module))
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.failures == {}
    assert sink.info.catalog.names == ("weight", "bias")
    assert sink.totals == pytest.approx(norms, rel=1e-6)


def test_the_limit_and_the_factor_of_the_clip_are_recorded(tmp_path):
    callback, sink = watching()
    fit(make_module(), tmp_path, [callback], gradient_clip_val=0.1)
    assert sink.scalars("clip_max_norm") == [0.1] * 4
    assert sink.scalars("clip_factor") == pytest.approx([0.1 / (x + 1e-6) for x in sink.totals], rel=1e-5)


def test_with_manual_optimization_gradients_are_recorded_before_they_are_clipped(tmp_path):
    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self.net(x), y))
        self.before.append(norm(self))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    callback, sink = watching()
    fit(module, tmp_path, [callback])
    assert sink.totals == pytest.approx(module.before, rel=1e-5)
    assert sink.scalars("clip_max_norm") == [0.1] * 4


def test_a_with_block_of_the_callback(tmp_path):
    trainer = make_trainer(tmp_path)
    with gm.watch(trainer, rules=()) as callback:
        assert callback.summary() == "no run was watched"
        trainer.fit(make_module(), loader())
    assert (callback.monitor.step, callback.monitor.closed) == (4, True)
    assert str(callback.summary()).startswith("4 steps")
