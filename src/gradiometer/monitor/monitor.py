"""The monitor: a recorder, the transfer of its steps to the host, and the rules and sinks."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer.columns import DEFAULT_THRESHOLDS, Thresholds
from gradiometer.monitor.failures import remember_handlers
from gradiometer.monitor.monitored_run import MonitoredRun
from gradiometer.ops import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.recorder import Driver, Kind
    from gradiometer.rules import Rule
    from gradiometer.sinks import Sink
    from gradiometer.stats import Taps, TensorStats

# seconds between checks for replaced parameters
_PARAMETER_CHECK = 1.0


class Monitor(MonitoredRun):
    """Watches a training run: records every step, checks it with rules, and passes it to sinks.

    Call `record` inside the step, compiled or not, after the last ``backward()`` and before gradients are
    cleared. Call `advance` outside, once per optimizer step. Neither waits for the device, a rule or a sink,
    and neither raises because of telemetry: each kind of failure is logged once, as a warning of the logger
    ``gradiometer``, and counted in `failures`.

    Steps are copied to the host every 0.2 s, or when half of the ring is full, in one asynchronous copy. A
    later `advance` passes the copied steps to background threads: one for the rules, and one for each sink.

    In a ``with`` block the sinks are told how the run ended: an exception, Ctrl-C, SIGTERM, SIGHUP, or
    ``sys.exit`` with a nonzero status, becomes a `gradiometer.rules.Fault` with the last steps and the first
    non-finite tensor, and then propagates. SIGTERM raises SystemExit(143) in the main thread, and SIGHUP
    SystemExit(129), unless a handler was installed before, which is then called. Without ``with``, call
    `close`; otherwise it happens at the end of the process.

    In a job of several ranks, every rank creates the monitor and calls its methods at the same place. A
    background thread merges the steps of all ranks, several at once. Rules and sinks run on the first rank
    and see the steps of the whole job, with the rank and shard of non-finite values. Scalars are averaged
    over the ranks. Other ranks have no `findings`, their ``sinks`` are not called, and their faults go to
    the log and ``blackbox.rank-00005.json``. If a rank ends early or does not respond, training goes on,
    `failures` reports it, and later steps have scalars but no tensors.

    With accumulated gradients, call `record` once per micro-batch or once per step, and `advance` once per
    step. For several models, pass a mapping of names to modules and call `record` after each ``backward()``.
    Create the monitor in the process that trains; it does nothing in a forked process.

    Args:
        model: a module, any input of `gradiometer.collect_grads`, or a mapping of names to modules.
        run_dir: the folder for a run record, for `gradiometer.read_run`; True for a new one, such as
            ``runs/2026-11-23-calm-river``. It needs ``gradiometer[monitor]``.
        every: record steps divisible by this, and steps with a NaN, an Inf or a norm above ``skip_above``.
            Every step has a `StepRecord` with its scalars.
        capacity: steps in the ring buffer on the device; each takes 72 bytes for a gradient or weight, 96
            with fingerprints, 128 for an update, and 104 for an activation or its gradient.
        weights: also measure the parameters.
        updates: also measure the change of the parameters in each due step, see `record_updates`; this keeps
            a copy of the parameters that require a gradient.
        rules: the rules to run; None for `gradiometer.rules.default_rules`, ``()`` for none.
        sinks: sinks from `gradiometer.sinks`, or functions of a `StepRecord`.
        thresholds: the thresholds of the flags.
        skip_nonfinite: whether `skip_step` is true after a NaN or Inf in a gradient.
        skip_above: `skip_step` is also true if the total gradient norm, over all ranks, exceeds this. (Each
            rank uses its own part to decide whether to record a step that ``every`` leaves out.)
        queue: steps that may wait on the host for each sink, each as large as in the ring buffer. A full
            queue drops its oldest steps, and `dropped` counts them for each sink. The same number may wait
            for slower ranks; beyond that the oldest steps lose their tensors and are counted too.
        ranks: whether to merge the ranks of a job; may be a `gradiometer.Ranks` that they agreed on. With
            False each rank is watched separately, with a run record in ``run_dir/rank-00005``.
        redact: whether to leave the text of the exception that ends a run, which may quote data, paths or
            keys, out of the black box, the sinks and the log: a fault then has the class of the exception.
            `keep` then keeps nothing, and there is no ``blackbox.pt``.
        fingerprint: also record the `gradiometer.Fingerprint` of every measured tensor, from the same read,
            so that `gradiometer.compare_runs` can tell whether two runs are equal to the bit. With several
            ranks and ``weights=True``, copies of weights are compared in every recorded step: see the rule
            `gradiometer.rules.ReplicaDivergence`.
        taps: `gradiometer.Taps` of the model: its activations and their gradients are recorded with the
            gradients. `advance` advances the taps, too. With several ranks all need taps of the same names;
            their rows are merged.
        precision: in steps divisible by this, also count the elements of gradients, and of weights with
            ``weights=True``, by magnitude, whatever ``every`` is; None: in no step. The run record then tells
            what a cast to fp16, bf16 or fp8 would lose, see ``gradiometer precision``. The histograms take
            7.5 KiB of device memory for each tensor. They are of gradients as they are in memory when
            `record` is called: with a loss scale, of scaled ones.
        projections: also project gradients, and weights with ``weights=True``, on this number of random
            signs, 16 or so, so that `gradiometer.compare_runs` can tell how far two runs are apart.
        projections_every: of the recorded steps, project those divisible by this; by default all. On a CPU,
            16 projections take as long as about 100 reads of the gradients.
        kinds: kinds of your own, `gradiometer.recorder.Kind`: each is measured in every `record`, and has a
            table in the steps, the run record, sinks and the page of the run.
        optimizer: the optimizer that updates the model, or several: their hyperparameters are recorded, and
            rules know which parameters they hold. `gradiometer.watch` passes them.
        states: in recorded steps divisible by this, and in the first two, also measure the states of the
            optimizers that have the shape of their parameter, such as Adam's ``exp_avg`` and ``exp_avg_sq``;
            each is a kind of that name. None: in no step. They are measured in `advance`, after the update.
        state_names: the names of these states; None: those that the optimizers' classes are known to have.
        keep_weights: keep a copy of the weights and buffers at the start of the step, so that a step that is
            not finite can be repeated, see `keep`; needs ``run_dir``, and ``skip_nonfinite``, which tells the
            device when to stop copying.

    Attributes:
        run_dir: the folder of the run record; None without one.
        skips: whether your loop skips the update when `skip_step` is true, so that records are marked as
            skipped. Reading `skip_step` or passing ``inv_scale`` sets it; set it if other code skips updates.

    Raises:
        TypeError: for a parameter that cannot be measured, or an invalid sink; the message names it.
        ValueError: if there are no parameters, or for a number out of range.
        ImportError: for a run record without pyarrow; the message says what to install.
        RankError: on every rank, if a rank does not create its monitor or uses other settings.

    >>> import torch, gradiometer as gm
    >>> model, losses = torch.nn.Linear(2, 1), []
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gm.Monitor(model, rules=(), sinks=[lambda record: losses.append(record.loss)]) as monitor:
    ...     for step in range(3):
    ...         loss = model(torch.tensor([[3.0, 4.0]])).square().sum() * 0 + step
    ...         loss.backward()
    ...         monitor.record()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         monitor.advance(loss=loss, lr=0.1)
    >>> losses, monitor.last
    ([0.0, 1.0, 2.0], <StepRecord: step 2, 2 tensors>)
    """

    def __init__(
        self,
        model: Parameters | Mapping[str, nn.Module],
        *,
        run_dir: str | Path | bool | None = None,
        every: int = 1,
        capacity: int = 64,
        weights: bool = False,
        updates: bool = False,
        rules: Iterable[Rule] | None = None,
        sinks: Iterable[Sink | Callable[..., object]] = (),
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        skip_nonfinite: bool = True,
        skip_above: float = math.inf,
        queue: int = 1024,
        ranks: bool | Ranks = True,
        redact: bool = False,
        fingerprint: bool = False,
        keep_weights: bool = False,
        taps: Taps | None = None,
        precision: int | None = None,
        projections: int | None = None,
        projections_every: int | None = None,
        kinds: Kind | Sequence[Kind] = (),
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        states: int | None = None,
        state_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, locals())
        self.skips = self._has_loss_scale = False
        self._next_check = 0.0

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if requested, into the current step's slot of the ring.

        It may be called inside or outside of a compiled step. Outside, `advance` may be called on another
        stream; a stream that runs a compiled step or replays a graph has to be waited for first, as for any
        result of the step. A second call in the same step overwrites the
        values that it measures again.

        Args:
            stats: statistics of gradients that were already measured, by the model's names; these gradients
                are not read again.
            inv_scale: ``1 / scale`` of a GradScaler, see `gradiometer.inverse_scale`.
        """
        if self._recorder.is_released:
            return
        if inv_scale is not None:
            self.skips = self._has_loss_scale = True
        if torch.compiler.is_compiling():
            self._recorder.record(stats, inv_scale=inv_scale)
            return
        if self._is_repeating():
            return
        self._current.complete()
        self._is_captured |= is_capturing(self._recorder.ring.device)
        self._current.is_recorded = True
        try:
            self._model_reader.note()
            self._recorder.record(stats, inv_scale=inv_scale)
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add("record", error)

    def total_norm(self) -> Tensor:
        """Return the total norm of the gradients that `record` has measured last, 0-d float64 on the device.

        It is for loggers and progress bars; there is no wait. With DDP it is the norm of the averaged
        gradients. If gradients are sharded, it is that of this rank's shards. In steps that ``every`` leaves
        out it is that of the last recorded step, and NaN before the first.

        >>> import torch, gradiometer as gm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> with gm.Monitor(model) as monitor:
        ...     monitor.record()
        ...     norm = monitor.total_norm()
        >>> norm
        tensor(5., dtype=torch.float64)
        """
        return self._recorder.total_norm()

    def set_driver(self, driver: Driver) -> None:
        """Say who calls this monitor, and which optimizers update the model, so that findings fit both.

        `gradiometer.watch` and the callbacks of trainers do this; your own loop need not.
        """
        self._failures.attempt("model", self._model_reader.set_driver, driver)

    @property
    def skip_step(self) -> Tensor:
        """Whether to skip this step's update, a 0-d bool on the device; read it after `record`."""
        self.skips = self._is_skip_read = True
        return self._recorder.skip_step

    def advance(self, loss: Any = None, lr: Any = None, **scalars: Any) -> None:
        """End the step.

        Call it once per optimizer step, outside of compiled functions: inside, it is left out of the graph,
        with one warning. It never waits and never raises. Values are numbers, or tensors of one element,
        which are copied to the host with the next steps.

        Args:
            loss: the loss of the step. The run's first non-finite loss is reported to the sinks as a fault.
                Pass it with its autograd graph, not detached, so that a rule can tell whether it depends on
                the model.
            lr: the learning rate.
            **scalars: other values, by name; they replace those of `note`.
        """
        if torch.compiler.is_compiling():
            self._say_compiled()
            return
        if self._is_repeating():
            return
        self._current.complete()
        scalars = {**self._current.noted, **scalars}
        if loss is not None:
            scalars["loss"] = loss
        if lr is not None:
            scalars["lr"] = lr
        if not self._pipeline.is_open():
            self._current.noted = {}
            return
        self._current.begin_end(scalars, self._every, self.skips)
        now = time.monotonic()
        is_due = now >= self._next_check
        if is_due:
            self._next_check = now + _PARAMETER_CHECK
            remember_handlers()
            self._failures.attempt("parameters", self._parameter_check)
        scaled = self._has_loss_scale
        state = self._failures.attempt(
            "model", self._model_reader.read, loss, afresh=is_due, has_loss_scale=scaled, step=self.step
        )
        for name, value in (self._failures.attempt("model", self._model_reader.scalars) or {}).items():
            scalars.setdefault(name, value)
        self._current.commit(state)

    def keep(self, *args: Any, **kwargs: Any) -> None:
        """Keep the random numbers and the batch of the step that begins now. Never waits and never raises.

        Call it right before the step. If an exception or a non-finite loss ends the run, ``blackbox.pt`` in
        ``run_dir`` has the current step and the first non-finite one, for `gradiometer.load_kept_step`; with
        ``keep_weights=True`` it has the weights, too. Without this call it has the random numbers, as they
        were at the end of the last `advance`. Only the owner may read the file; with ``redact=True`` it is
        not written, and nothing is kept.

        Args:
            args: what the step is called with: tensors, numbers, strings, and lists, tuples and mappings of
                these. Tensors are not copied: up to 32 batches are held until the rules have seen their
                steps. A batch that is overwritten in the meantime is not written.
            kwargs: likewise.
        """
        if torch.compiler.is_compiling():
            self._say_compiled()
        elif self._is_repeating():
            return
        elif (kept := self._pipeline.box.kept) is None:
            if not self.closed:
                text = "keep() was called, but nothing is kept without a run_dir or with redact=True"
                self._failures.add("keep", text)
        elif self._pipeline.is_open():
            self._current.complete()
            self._failures.attempt("keep", kept.keep, self.step, args, kwargs)

    def split_updates(
        self, parts: Iterable[Collection[str]], masters: Mapping[str, Tensor] | None = None
    ) -> None:
        """Measure the updates of several optimizers apart, each with a copy of its own parameters.

        Args:
            parts: the names of the parameters of each optimizer, together all of them.
            masters: by name, the tensors that an optimizer updates in place of parameters, such as their
                float32 master weights, of the same shapes; updates are then those of these tensors.
        """
        self._updates.split(parts, masters or {})
        if self._recorder.states is not None:
            self._recorder.states.masters = masters or {}

    def begin_updates(self, part: int | None = None) -> None:
        """Copy the weights right before ``optimizer.step()``, so that only what it does counts as an update.

        `gradiometer.watch` and the callbacks for trainers call it. Without this call, the weights are copied
        at the end of `advance`, and whatever changes them before the next update, such as loading a
        checkpoint, counts as a part of that update. It does nothing inside a compiled function, or without
        ``updates=True``.

        Args:
            part: the number of an optimizer, see `split_updates`; None for all weights.
        """
        if self._updates.parts and not torch.compiler.is_compiling() and not self._is_repeating():
            self._current.complete()
            self._updates.begin(part, self.step, self._every)

    def record_updates(self, part: int | None = None, *, again: bool = False) -> None:
        """Measure what the optimizer's step did to the weights; needs ``updates=True``.

        Call it after ``optimizer.step()`` and before gradients are cleared, so that the updates are compared
        with the gradients, too. If it was not called, `advance` measures the updates, with the gradients that
        are there then. Inside a compiled function, call it in every step; the weights are then copied in
        every step, whatever ``every`` is.

        Without gradients, or if all of them are 0, ``descent_cosine`` is NaN and ``stuck_fraction`` is 0.
        Rules then use a lower bound of the number of stuck elements: ``n_unchanged`` minus the number of
        zeros in the gradient that `record` has measured in this step.

        Args:
            part: the number of an optimizer, see `split_updates`; None for all weights.
            again: also if they were measured in this step, as after the last of several updates in a step.
        """
        if self._updates.is_released or (not torch.compiler.is_compiling() and self._is_repeating()):
            return
        if not self._updates.parts:
            text = "record_updates() was called, but updates are not recorded: create the Monitor with "
            self._failures.add("updates", text + "updates=True")
        elif torch.compiler.is_compiling():
            self._updates.trace(part)
        elif is_capturing(self._recorder.ring.device):
            text = "record_updates() was called while a CUDA graph was captured: call it after each replay"
            self._failures.add("capture", text)
        else:
            self._current.complete()
            self._updates.record(part, self.step, again=again)

    def note(self, **scalars: Any) -> None:
        """Keep values for the current step, such as its loss; the next `advance` adds them to the step.

        Values are as for `advance`, and are kept without their graph. A later value of a name replaces it.
        """
        if torch.compiler.is_compiling():
            self._say_compiled()
            return
        if self._is_repeating():
            return
        self._current.complete()
        if "loss" in scalars:
            self._failures.attempt("model", self._model_reader.look_at, scalars["loss"])
        self._current.noted |= {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in scalars.items()
        }

    def _say_compiled(self) -> None:
        text = "advance(), note() and keep() do nothing inside a compiled function: call them outside"
        self._failures.add("compiled", text)


# Called when a function is compiled, not when it runs. torch.compiler.assume_constant_result sets this too,
# but it would import the compiler.
Monitor._say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001
