"""A `Monitor` for the Trainer of Hugging Face Transformers."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer import distributed
from gradiometer.extras import require
from gradiometer.integrations.session import Session, has_whole_gradients, scaler_of, while_running

if TYPE_CHECKING:
    from torch import nn

    from gradiometer.monitor import Monitor

__all__ = ["MonitorCallback"]

TrainerCallback: Any = require("transformers", "transformers", "MonitorCallback").TrainerCallback

# in a checkpoint's folder
STATE_NAME: Final = "gradiometer.pt"

# where the parameters that the model has are not those that are trained, if they are no DTensors
_SHARDED: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"})


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Watches every training run of a Trainer with a `Monitor`.

    Gradients are measured when the last micro-batch of a step has been through ``backward``: accumulated,
    not yet clipped, and with a GradScaler's scale taken out. The step's loss is what the Trainer adds up,
    on the device. Steps are counted from 0: the step s leads to ``global_step`` s + 1.

    The monitor's state is a file ``gradiometer.pt`` in the Trainer's checkpoints, and
    ``train(resume_from_checkpoint=...)`` takes it up. An exception or Ctrl-C in ``train`` leaves a black box.

    On several ranks all watch, and the first one's sinks get the steps of the whole job, whose loss is the
    mean: under DDP, and where parameters are DTensors, as with version 2 of FSDP and tensor parallelism.
    With version 1, DeepSpeed or Megatron-LM it warns once and does nothing. ``ranks=False``: each rank by
    itself.

    Args:
        trainer: whose ``training_step`` and ``train`` are wrapped. Add the callback to it afterwards.
        options: of `Monitor`, but for the model. Sinks are started for each ``train`` anew.

    Attributes:
        monitor: of the current run or the last one; None before the first.

    Raises:
        TypeError: for an option that Monitor does not have, or without the Trainer.

    ::

        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(MonitorCallback(trainer, run_dir="run"))
        trainer.train()
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        if not callable(getattr(trainer, "training_step", None)):
            msg = (
                f"MonitorCallback: expected a Trainer, got {type(trainer).__name__}; make the Trainer first, "
                "then trainer.add_callback(MonitorCallback(trainer, ...))"
            )
            raise TypeError(msg)
        self._session = Session("MonitorCallback", options)
        self._trainer = trainer
        self._checkpoint: Path | None = None
        # callbacks see neither the loss nor the gradients before they are clipped, nor how a run ends
        trainer.training_step = self._observed(trainer.training_step)
        trainer.train = self._guarded(trainer.train)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the current run or the last one; None before the first."""
        return self._session.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        """Start to watch; where the checkpoint that is resumed has a state, from there."""
        del args, control, kwargs
        # an attempt that ran out of memory, with auto_find_batch_size, was another run
        self._session.end()
        if not (state.is_world_process_zero or distributed.is_active()):
            return
        accelerator = self._trainer.accelerator
        kind = str(getattr(accelerator, "distributed_type", "NO")).rpartition(".")[2]
        if not has_whole_gradients(self._trainer.model_wrapped, sharded=kind in _SHARDED):
            reason = f"with {kind} a rank has no whole gradients, nor DTensors, as with version 2 of FSDP"
            self._session.give_up(reason, for_all=True)
            return
        resumed = None
        if self._checkpoint is not None and state.global_step:
            resumed = self._load(self._checkpoint / STATE_NAME)
        self._session.begin(model, scaler=scaler_of(accelerator), step=state.global_step, state=resumed)

    @while_running
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on to the next step."""
        del args, state, control, kwargs
        self._session.advance()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the monitor's state, on several ranks the first one's, into the checkpoint just written."""
        del control, kwargs
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # on all ranks: the first one's steps wait for the others'
        values = self._session.state_dict()
        if values and folder.is_dir() and state.is_world_process_zero:
            try:
                torch.save(values, folder / f".{STATE_NAME}")
                (folder / f".{STATE_NAME}").replace(folder / STATE_NAME)
            except (OSError, RuntimeError) as error:
                self._session.say(f"{error}; the checkpoint is without the monitor's state")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        del args, state, control, kwargs
        self._session.end()

    def _load(self, path: Path) -> Any:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None  # of a run without this callback
        except Exception as error:  # noqa: BLE001 a damaged file raises what it likes
            self._session.say(f"cannot read {path} ({error}); the history begins anew")
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
            last = require(
                "transformers.trainer_utils", "transformers", "MonitorCallback"
            ).get_last_checkpoint
            folder = self._trainer.args.output_dir
            checkpoint = last(folder) if os.path.isdir(folder) else None  # noqa: PTH112 a remote path is no Path
        return Path(checkpoint) if checkpoint else None
