"""A `Monitor` for the Trainer of ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.extras import require
from gradiometer.integrations.frameworks import Watching, has_whole_gradients, scaler_of
from gradiometer.integrations.session import Session, while_running

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.monitor import Monitor

__all__ = ["MonitorCallback"]

# two names of one package; use the one that the program has imported
_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")

# with these, the module's parameters are not the trained ones unless they are DTensors
_SHARDED: Final = frozenset({"FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy"})

# with manual optimization `training_step` need not return the loss: the names by which it may be logged
_LOSSES: Final = ("loss", "train_loss", "train/loss")


def _callback() -> Any:
    for name in _PACKAGES:
        if sys.modules.get(name) is not None:
            return sys.modules[name].Callback
    try:
        return require(_PACKAGES[1], "lightning", "MonitorCallback").Callback
    except ImportError:
        return require(_PACKAGES[0], "lightning", "MonitorCallback").Callback


Callback: Any = _callback()


def _logger() -> logging.Logger:
    """Return a child of the logger of the package that the program has imported."""
    return logging.getLogger(f"{Callback.__module__.rpartition('.callbacks')[0]}.gradiometer")


class MonitorCallback(Watching, Callback):  # type: ignore[misc]
    """Watches every ``fit`` of a Lightning Trainer with a `Monitor`.

    Gradients are measured in ``on_before_optimizer_step``: accumulated, before Lightning clips them, and
    without a GradScaler's scale. The step's loss is the mean of its micro-batches, on the device. Steps are
    counted from 0.

    With manual optimization a batch is a step, and each optimizer's parameters are measured just before it
    updates them, or before they are clipped by their norm, as by ``self.clip_gradients``. The
    loss is the return value of ``training_step``, or else what it logs as ``loss``, ``train_loss`` or
    ``train/loss``.

    What the module logs during a batch, by ``self.log`` or ``self.log_dict``, is recorded with the step by
    the same name. If a step has several batches, the last one counts. The callback's own loss and learning
    rates, ``loss``, ``lr``, ``lr_1`` and so on, replace values that are logged under these names.

    The total norm of the gradients of each recorded step is logged as ``grad_norm``, so that loggers,
    ``ModelCheckpoint`` and the like have it, too. This is left out if the module itself logs that name, and
    with DTensor parameters, where a rank has the norm of its shards only.

    Updates are measured right after the optimizer's step; if a batch has several, they are the change from
    before the first to after the last. Without such a moment, as after a step that a GradScaler skips, they
    are measured at the end of the batch.

    Lightning's checkpoints contain the monitor's state. An exception or Ctrl-C in ``fit`` writes a black box.

    Findings are logged by a child of Lightning's logger.

    With several ranks, all are watched, and the first rank's sinks get the steps of the whole job, with the
    mean loss. This works with DDP, and with DTensor parameters, as in ModelParallelStrategy. With
    FSDPStrategy or DeepSpeed it warns once and does nothing. With ``ranks=False`` each rank is watched
    separately.

    Args:
        log_norm: the name by which the total gradient norm is logged; None: it is not logged.
        options: arguments of `Monitor`, except the model. Sinks are started again for each ``fit``.

    Raises:
        TypeError: for an unknown option.

    ::

        trainer = Trainer(callbacks=[MonitorCallback(run_dir="run")])
        trainer.fit(module, loader)
    """

    def __init__(self, *, log_norm: str | None = "grad_norm", **options: Any) -> None:
        super().__init__()
        self._session: Session = Session("MonitorCallback", options, _logger())
        self._log_norm = log_norm
        self._log: _WatchedLog | None = None
        self._resumed: Mapping[str, Any] | None = None

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the current or last run; None before the first."""
        return self._session.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to watch, on the module's device, from the monitor's state in a checkpoint if it has one."""
        self._session.end()
        resumed, self._resumed = self._resumed, None
        if not (trainer.is_global_zero or distributed.is_active()):
            return
        strategy = trainer.strategy
        kinds = {kind.__name__ for kind in type(strategy).__mro__} & _SHARDED
        if not has_whole_gradients(getattr(strategy, "model", None), sharded=bool(kinds)):
            kind = min(kinds, default=type(strategy).__name__)
            reason = f"with {kind}, ranks have neither full gradients nor DTensors; use ModelParallelStrategy"
            self._session.give_up(reason, for_all=True)
            return
        # with manual optimization, `global_step` counts each optimizer's update
        updates = 1 if pl_module.automatic_optimization else max(len(trainer.optimizers), 1)
        self._session.begin(
            pl_module,
            scaler=scaler_of(trainer.precision_plugin),
            step=trainer.global_step // updates,
            state=resumed,
            optimizers=trainer.optimizers,
        )
        if self._session.running:
            self._log = _WatchedLog(pl_module)

    @while_running
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """From here on, record what the module logs."""
        if self._log is not None:
            self._log.begin()

    # a compiled training step of manual optimization would trace it
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @while_running
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure the gradients that this optimizer is about to use."""
        # Lightning has unscaled the gradients already, except for an optimizer that does it itself
        scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        scaler = scaler_of(trainer.precision_plugin) if scaled else None
        several = len(trainer.optimizers) > 1
        only = [p for group in optimizer.param_groups for p in group["params"]] if several else None
        self._session.record(scaler, only)
        self._session.begin_updates(optimizer)
        for each in trainer.optimizers:
            self._session.record_updates_after(each)
        self._session.note(**{_lr_name(trainer.optimizers, optimizer): optimizer.param_groups[0]["lr"]})

    @while_running
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and end the step if there was an update."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        logged: Mapping[str, Any] = {} if self._log is None else self._log.end()
        own = {"loss", *[_lr_name(trainer.optimizers, each) for each in trainer.optimizers]}
        self._session.note(**{name: value for name, value in logged.items() if name not in own})
        if pl_module.automatic_optimization:
            self._session.add_loss(loss)
        else:
            known = [loss, *[logged.get(name) for name in _LOSSES]]
            self._session.note(loss=next((each for each in known if each is not None), None))
        if self._log is not None and self._log_norm is not None and not trainer.barebones:
            self._log.log_once(self._log_norm, self._session.total_norm())
        self._session.advance()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the monitor."""
        self._session.end()
        self._forget_log()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the black box, also after Ctrl-C, which Lightning does not re-raise."""
        self._session.end(exception)
        self._forget_module()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the module, so that it can be freed while the callback is kept."""
        self._forget_module()

    def _forget_log(self) -> None:
        if self._log is not None:
            self._log.unwrap()
        self._log = None

    def _forget_module(self) -> None:
        self._forget_log()
        # Lightning sets these methods of the module on every callback
        for name in ("log", "log_dict"):
            self.__dict__.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the monitor's state, for Lightning's checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a state for the monitor that ``fit`` creates."""
        self._resumed = state_dict


class _WatchedLog:
    """The ``log`` of a module, which ``log_dict`` calls, too: it keeps what is logged during a batch.

    A copy of the module, also a pickled one, has its own ``log``.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._log = module, module.log
        self._own = vars(module).get("log")
        # None between batches: then other hooks log, such as those of a validation
        self._values: dict[str, Any] | None = None
        self._names: set[str] = set()
        self._logged_here: set[str] = set()
        module.log = self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        self._names.add(name)
        if name in self._logged_here:
            # from `on_train_batch_end`, too: Lightning refuses a name that a hook logs with other options
            self._logged_here.remove(name)
            getattr(self._module.trainer, "_results", {}).pop(f"on_train_batch_end.{name}", None)
        result = self._log(name, value, *args, **kwargs)
        if self._values is not None:
            # a metric of torchmetrics keeps its value of the batch
            found = getattr(value, "_forward_cache", None) if isinstance(value, torch.nn.Module) else value
            if isinstance(found, torch.Tensor):
                # it may change in place before the step ends
                found = found.detach().clone()
            self._values[name] = found
        return result

    def __reduce__(self) -> Any:
        return getattr, (self._module, "log")

    def begin(self) -> None:
        self._values = {}

    def end(self) -> dict[str, Any]:
        """Return what was logged since `begin`."""
        values, self._values = self._values, None
        return values or {}

    def log_once(self, name: str, value: torch.Tensor | None) -> None:
        """Log a value of a step, unless the module logs its own value by this name."""
        if value is not None and name not in self._names:
            self._logged_here.add(name)
            # with `dataloader_iter`, Lightning demands the size of the batch
            self._log(name, value.float(), on_step=True, on_epoch=False, batch_size=1)

    def unwrap(self) -> None:
        """Restore the method."""
        if vars(self._module).get("log") is self:
            if self._own is None:
                del self._module.log
            else:
                self._module.log = self._own


def watch(trainer: Any, **options: Any) -> MonitorCallback:
    """Add a callback to a Trainer, before those that write checkpoints, and return it."""
    callback = MonitorCallback(**options)
    trainer.callbacks.insert(0, callback)
    return callback


def _lr_name(optimizers: list[Any], optimizer: Any) -> str:
    """Return ``lr`` for the first optimizer, ``lr_1`` for the second."""
    index = next((i for i, other in enumerate(optimizers) if other is optimizer), 0)
    return f"lr_{index}" if index else "lr"
