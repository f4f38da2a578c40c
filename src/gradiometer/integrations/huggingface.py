"""A `Monitor` for the Trainer of Hugging Face Transformers."""

from __future__ import annotations

import logging
import os
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.extras import require
from gradiometer.integrations.frameworks import Watching, has_whole_gradients, scaler_of
from gradiometer.integrations.partitioned import described
from gradiometer.integrations.session import Session, while_running
from gradiometer.monitor import raise_of_handlers
from gradiometer.runs import open_file

if TYPE_CHECKING:
    from torch import nn

    from gradiometer.monitor import Monitor

__all__ = ["MonitorCallback"]

TrainerCallback: Any = require("transformers", "transformers", "MonitorCallback").TrainerCallback

# the file of the state in a checkpoint's folder
STATE_NAME: Final = "gradiometer.pt"

# with these, the model's parameters are not the trained ones unless they are DTensors
_SHARDED: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"})


class MonitorCallback(Watching, TrainerCallback):  # type: ignore[misc]
    """Watches every training run of a Trainer with a `Monitor`.

    Gradients are measured after the last ``backward`` of a step: accumulated, before clipping, and without
    a GradScaler's scale. The step's loss is the sum that the Trainer computes, on the device. Steps are
    counted from 0: step s leads to ``global_step`` s + 1.

    The Trainer's checkpoints contain the monitor's state, in the file ``gradiometer.pt``;
    ``train(resume_from_checkpoint=...)`` restores it. An exception or Ctrl-C in ``train`` writes a black box.

    Findings are logged by ``transformers.gradiometer``, as Transformers' own messages are shown.

    With several ranks, all are watched, and the first rank's sinks get the steps of the whole job, with the
    mean loss. This works with DDP, and with DTensor parameters, as in FSDP version 2 and tensor parallelism.
    With FSDP version 1, DeepSpeed or Megatron-LM it warns once and does nothing. With ``ranks=False`` each
    rank is watched separately.

    Args:
        trainer: the Trainer; its ``training_step`` and ``train`` are wrapped. Then add the callback to it.
        options: arguments of `Monitor`, except the model. Sinks are started again for each ``train``.

    Raises:
        TypeError: for an unknown option, or if ``trainer`` is not a Trainer.

    ::

        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(MonitorCallback(trainer, run_dir="run"))
        trainer.train()
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        if not callable(getattr(trainer, "training_step", None)):
            msg = (
                f"MonitorCallback: expected a Trainer, got {type(trainer).__name__}; create the Trainer "
                "first, then call trainer.add_callback(MonitorCallback(trainer, ...))"
            )
            raise TypeError(msg)
        self._session: Session = Session(
            "MonitorCallback", options, logging.getLogger("transformers.gradiometer")
        )
        self._trainer = trainer
        self._checkpoint: Path | None = None
        # callbacks see neither the loss, nor the gradients before clipping, nor how a run ends
        trainer.training_step = self._observed(trainer.training_step)
        trainer.train = self._guarded(trainer.train)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the current or last run; None before the first."""
        return self._session.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """Start to watch, from the monitor's state in the resumed checkpoint if it has one."""
        # with auto_find_batch_size, an earlier attempt that ran out of memory was a separate run
        self._session.end()
        if not (state.is_world_process_zero or distributed.is_active()):
            return
        accelerator = self._trainer.accelerator
        kind = str(getattr(accelerator, "distributed_type", "NO")).rpartition(".")[2]
        if not has_whole_gradients(self._trainer.model_wrapped, sharded=kind in _SHARDED):
            kind = described(self._trainer.model_wrapped, kind)
            reason = f"with {kind}, ranks have neither full gradients nor DTensors; use FSDP version 2"
            if kind.startswith("DeepSpeed"):
                reason += ", or gm.watch(engine) in a loop of your own, for stages 1 and 2"
            self._session.give_up(reason, for_all=True)
            return
        resumed = None
        if self._checkpoint is not None and state.global_step:
            resumed = self._load(self._checkpoint / STATE_NAME)
        self._session.begin(
            model,
            scaler=scaler_of(accelerator),
            step=state.global_step,
            state=resumed,
            optimizers=[self._trainer.optimizer],
        )

    @while_running
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy the weights for the updates."""
        self._session.begin_updates()

    @while_running
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the updates, before the Trainer clears the gradients."""
        self._session.record_updates()

    @while_running
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step."""
        self._session.advance()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the monitor's state, of the first rank, in the checkpoint just written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # on all ranks, because the first rank waits for the steps of the others
        values = self._session.state_dict()
        if values and folder.is_dir() and state.is_world_process_zero:
            try:
                torch.save(values, folder / f".{STATE_NAME}")
                (folder / f".{STATE_NAME}").replace(folder / STATE_NAME)
            except (OSError, RuntimeError) as error:
                raise_of_handlers(error)
                self._session.say(f"{error}; the checkpoint does not contain the monitor's state")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        self._session.end()

    def _load(self, path: Path) -> Any:
        try:
            with open_file(path) as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 a damaged file may raise anything
            raise_of_handlers(error)
            # a checkpoint without this callback has no such file
            if not isinstance(error, FileNotFoundError):
                self._session.say(f"{path} cannot be read ({error}); the rules start without a history")
            return None

    def _observed(self, training_step: Any) -> Any:
        @wraps(training_step)
        def observed(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._after_backward(loss)
            return loss

        return observed

    @while_running
    def _after_backward(self, loss: Any) -> None:
        self._session.add_loss(loss)
        if self._trainer.accelerator.sync_gradients:
            self._session.record(scaler_of(self._trainer.accelerator))
            self._session.note(lr=self._trainer.optimizer.param_groups[0]["lr"])

    def _guarded(self, train: Any) -> Any:
        @wraps(train)
        def guarded(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._checkpoint = self._resumed(resume_from_checkpoint)
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            except BaseException as error:
                self._session.end(error)
                raise

        return guarded

    def _resumed(self, checkpoint: Any) -> Path | None:
        if checkpoint is True:
            utils = require("transformers.trainer_utils", "transformers", "MonitorCallback")
            folder = self._trainer.args.output_dir
            checkpoint = utils.get_last_checkpoint(folder) if os.path.isdir(folder) else None  # noqa: PTH112 may be remote
        return Path(checkpoint) if checkpoint else None


def watch(trainer: Any, **options: Any) -> MonitorCallback:
    """Add a callback to a Trainer, and return it."""
    callback = MonitorCallback(trainer, **options)
    trainer.add_callback(callback)
    return callback
