"""The monitor: a recorder, the transfer of its steps to the host, and the rules and sinks."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gradiometer.columns import DEFAULT_THRESHOLDS, Cursor, Thresholds
from gradiometer.monitor.failures import Failures, is_quiet, remember_handlers
from gradiometer.monitor.kept_steps import KeptSteps
from gradiometer.monitor.model_reader import ModelReader
from gradiometer.monitor.parameter_check import ParameterCheck
from gradiometer.monitor.pipeline import Pipeline
from gradiometer.monitor.rank_merger import RankMerger
from gradiometer.monitor.run_names import choose_run_dir
from gradiometer.monitor.setup import (
    class_names,
    prepare_ranks,
    prepare_rules,
    prepare_sinks,
    rank_here,
    run_info,
    together,
)
from gradiometer.monitor.signals import subscribe
from gradiometer.monitor.summary import Summary, counts_text
from gradiometer.ops import is_capturing
from gradiometer.recorder import Recorder, Updates, check_integer
from gradiometer.runs import kept_path
from gradiometer.stats import is_repeating

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Collection, Iterable
    from types import TracebackType
    from typing import Self

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.recorder import Driver, ModelState, StepRecord
    from gradiometer.rules import Finding, Rule
    from gradiometer.sinks import Sink
    from gradiometer.stats import Taps, TensorStats

__all__ = ["Monitor"]

_T = TypeVar("_T")


class _Ending(NamedTuple):
    """A step that `Monitor.advance` has begun to end, so that a later call completes it after an exception.

    ``is_recorded``: whether `Monitor.record` has run on the host in this step.
    """

    step: int
    scalars: dict[str, Any]
    is_recorded: bool


# seconds between checks for replaced parameters
_PARAMETER_CHECK = 1.0


class Monitor:
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
        capacity: steps in the ring buffer on the device, of ``(R + 1) * 72`` bytes each for R tensors, or 96
            with fingerprints; an update counts as two, and a tap as four.
        weights: also measure the parameters.
        updates: also measure the change of the parameters in each due step, see `record_updates`; this keeps
            a copy of the parameters that require a gradient.
        rules: the rules to run; None for `gradiometer.rules.default_rules`, ``()`` for none.
        sinks: sinks from `gradiometer.sinks`, or functions of a `StepRecord`.
        thresholds: the thresholds of the flags.
        skip_nonfinite: whether `skip_step` is true after a NaN or Inf in a gradient.
        skip_above: `skip_step` is also true if the total gradient norm, over all ranks, exceeds this. (Each
            rank uses its own part to decide whether to record a step that ``every`` leaves out.)
        queue: steps that may wait on the host for each sink, of ``R * 72`` or 96 bytes each. A full queue
            drops its oldest steps, and `dropped` counts them for each sink. The same number may wait for
            slower ranks; beyond that the oldest steps lose their tensors and are counted too.
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
    ) -> None:
        self._failures = Failures()
        remember_handlers()
        agreed = prepare_ranks(ranks, model)
        rank = rank_here(agreed)
        settings: dict[str, Any] = {"every": every, "weights": bool(weights), "updates": bool(updates)}
        settings |= {"skip_nonfinite": bool(skip_nonfinite), "skip_above": skip_above}
        settings["thresholds"] = repr(thresholds)
        settings["redact"] = bool(redact)
        settings["fingerprint"] = bool(fingerprint)
        settings["keep_weights"] = bool(keep_weights)
        settings["precision"] = precision
        settings["taps"] = getattr(taps, "names", None)
        with together(agreed, settings) as group:
            folder = choose_run_dir(run_dir, rank, agreed, group)
            if not isinstance(queue, int) or queue < 1:
                msg = f"Monitor(queue={queue!r}): queue must be a positive integer"
                raise ValueError(msg)
            if keep_weights and redact:
                msg = (
                    "Monitor(redact=True, keep_weights=True): a copy of the weights is not redacted; pass one"
                )
                raise ValueError(msg)
            if keep_weights and (folder is None or not skip_nonfinite):
                needs = "run_dir" if folder is None else "skip_nonfinite=True"
                msg = f"Monitor(keep_weights=True) needs {needs}: pass it, too"
                raise ValueError(msg)
            # the only state that record() reads inside a compiled step
            self._recorder = recorder = Recorder(
                model,
                weights=weights,
                updates=updates,
                capacity=capacity,
                every=every,
                skip_nonfinite=skip_nonfinite,
                skip_above=skip_above,
                thresholds=thresholds,
                fingerprint=bool(fingerprint),
                ranks=agreed,
                taps=taps,
                precision=precision,
            )
            merger = None
            if agreed is not None and group is not None:
                options: dict[str, Any] = {"fingerprint": recorder.fingerprint, "precision": precision}
                merger = RankMerger(
                    agreed, recorder.roster, thresholds, queue, self._failures, group, **options
                )
            # only the first rank sees the job's steps
            is_first = merger is None or merger.is_first
            if merger is not None and is_first:
                rank = None
            checked_rules = prepare_rules(rules)
            checked_sinks = prepare_sinks(sinks, folder, rank, is_merged=merger is not None)
            self.run_dir = None if folder is None else Path(folder)
        self._parameter_check = ParameterCheck(model, self._recorder, self._failures)
        self._model_reader = ModelReader(model, self._recorder)
        # one for each of several optimizers
        self._updates = [Updates(self._recorder)] if updates else []
        self._next_check = 0.0
        self._noted: dict[str, Any] = {}
        self._ending: _Ending | None = None
        # whether record() has run in this step; whether skip_step was read, and record() captured in a graph
        self._is_recorded = self._is_skip_read = self._is_captured = False
        # whether what only recording needs was freed
        self._is_over = False
        self._at_close: list[Callable[[], object]] = []
        self._every = every
        self.skips = self._has_advanced = self._has_loss_scale = False
        self._pipeline = pipeline = Pipeline(
            recorder,
            checked_rules if is_first else (),
            checked_sinks,
            queue,
            self._failures,
            partial(run_info, recorder, class_names(model), every, merger),
            merger,
            rank,
            redact=bool(redact),
        )
        self._kept = None
        if self.run_dir is not None and not redact:
            where = self.run_dir if rank is None or merger is not None else self.run_dir / f"rank-{rank:05d}"
            file = kept_path(where, rank if merger is not None else None)
            options = {"weights": bool(keep_weights), "failures": self._failures}
            self._kept = pipeline.box.kept = KeptSteps(file, recorder, model, **options)
            self._begin_step()
        # the step to which the device was set last
        self._device_step = 0
        # a monitor that is garbage-collected without close() must not lose recorded steps
        weakref.finalize(self, pipeline.forget).atexit = False

    def __repr__(self) -> str:
        """Return one line. Never waits."""
        tensors = self._recorder.roster.num_tensors
        return f"<Monitor: step {self.step}, {tensors} tensors, {counts_text(self.findings)}>"

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if requested, into the current step's row.

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
        self._complete()
        self._is_captured |= is_capturing(self._recorder.ring.device)
        self._is_recorded = True
        try:
            self._model_reader.note()
            self._recorder.record(stats, inv_scale=inv_scale)
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add("record", error)

    def set_driver(self, driver: Driver) -> None:
        """Say who calls this monitor, and which optimizers update the model, so that findings fit both.

        `gradiometer.watch` and the callbacks of trainers do this; your own loop need not.
        """
        self._try("model", self._model_reader.set_driver, driver)

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
        self._complete()
        scalars = {**self._noted, **scalars}
        if loss is not None:
            scalars["loss"] = loss
        if lr is not None:
            scalars["lr"] = lr
        if not self._pipeline.is_open():
            self._noted = {}
            return
        # from here on the step ends, even if an exception such as Ctrl-C interrupts this
        self._ending, self._noted = _Ending(self.step, scalars, self._is_recorded), {}
        there = self._recorder.step_if_known()
        if there not in {None, self.step}:
            self._pipeline.reader.refuse(self.step, there)
        # soon: after an interrupt, the next step's activations may be added to these
        self._try("advance", self._recorder.clear_taps, self.step + 1)
        self._end_updates()
        self._advance_device(self._ending)
        now = time.monotonic()
        is_due = now >= self._next_check
        if is_due:
            self._next_check = now + _PARAMETER_CHECK
            remember_handlers()
            self._try("parameters", self._parameter_check)
        state = self._try(
            "model", self._model_reader.read, loss, afresh=is_due, has_loss_scale=self._has_loss_scale
        )
        self._commit(self._ending, state)

    def _complete(self) -> None:
        """End the step whose `advance` was interrupted by an exception; there may be none."""
        ending = self._ending
        if ending is None:
            return
        if self.step == ending.step:
            text = (
                "advance() was interrupted by an exception: that step may have no updates, and the next one "
            )
            self._failures.add("advance", text + "neither updates nor activations")
            for updates in self._updates:
                if not updates.is_traced and updates.step != self.step + 1:
                    # the weights may be those of the next step already
                    updates.drop()
            if not (self._device_step == ending.step + 1 or ending.is_recorded):
                # a compiled step that has run since has written into this step's slot
                self._pipeline.reader.refuse(ending.step)
            self._advance_device(ending)
        self._commit(ending, None)

    def _is_repeating(self) -> bool:
        return is_repeating(self._recorder.parameters_tracked)

    def _advance_device(self, ending: _Ending) -> None:
        """Set the recorder, taps and histograms to the next step."""
        if self._device_step != ending.step + 1:
            self._try("advance", self._recorder.advance, ending.step + 1)
            self._device_step = ending.step + 1

    def _commit(self, ending: _Ending, state: ModelState | None) -> None:
        """Pass the step on, unless that was done before the exception; begin the next one."""
        if self.step == ending.step:
            self._has_advanced = True
            self._try("skips", self._pass_skips)
            self._pipeline.take(ending.scalars, state)
        self._ending = None
        self._begin_step()

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
        elif self._kept is None:
            if not self.closed:
                text = "keep() was called, but nothing is kept without a run_dir or with redact=True"
                self._failures.add("keep", text)
        elif self._pipeline.is_open():
            self._complete()
            self._try("keep", self._kept.keep, self.step, args, kwargs)

    def _begin_step(self) -> None:
        self._is_recorded = False
        for updates in self._updates:
            updates.end_step()
        if self._kept is not None:
            self._try("keep", self._kept.begin, self.step)

    def split_updates(self, parts: Iterable[Collection[str]]) -> None:
        """Measure the updates of several optimizers apart, each with a copy of its own parameters.

        Args:
            parts: the names of the parameters of each optimizer, together all of them.
        """
        if self._updates:
            self._updates = [Updates(self._recorder, names) for names in parts]

    def begin_updates(self, part: int | None = None) -> None:
        """Copy the weights right before ``optimizer.step()``, so that only what it does counts as an update.

        `gradiometer.watch` and the callbacks for trainers call it. Without this call, the weights are copied
        at the end of `advance`, and whatever changes them before the next update, such as loading a
        checkpoint, counts as a part of that update. It does nothing inside a compiled function, or without
        ``updates=True``.

        Args:
            part: the number of an optimizer, see `split_updates`; None for all weights.
        """
        if not self._updates or torch.compiler.is_compiling() or self._is_repeating():
            return
        self._complete()
        if not is_capturing(self._recorder.ring.device):
            for updates in self._updates if part is None else [self._updates[part]]:
                updates.has_begun = True
                self._try("updates", updates.keep_for, self.step, self._every)

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
        if self._is_over or (not torch.compiler.is_compiling() and self._is_repeating()):
            return
        if not self._updates:
            text = "record_updates() was called, but updates are not recorded: create the Monitor with "
            self._failures.add("updates", text + "updates=True")
            return
        measured = self._updates if part is None else [self._updates[part]]
        if torch.compiler.is_compiling():
            for updates in measured:
                updates.is_measured = updates.is_traced = True
                updates.measure_and_keep()
        elif is_capturing(self._recorder.ring.device):
            text = "record_updates() was called while a CUDA graph was captured: call it after each replay"
            self._failures.add("capture", text)
        else:
            self._complete()
            for updates in measured:
                if again or not updates.is_measured:
                    self._measure(updates)

    def _measure(self, updates: Updates) -> None:
        # set first: after an exception, another step's gradients may be there
        updates.is_measured = True
        try:
            updates.measure(self.step)
        except Exception as error:  # noqa: BLE001 training goes on
            updates.drop()
            self._failures.add("updates", error)

    def _end_updates(self) -> None:
        """Measure the updates unless that was done in this step, and copy the weights for the next one.

        They are not copied if `begin_updates` was called in this step, as it is then in the next one.
        """
        for updates in self._updates:
            if not (updates.is_measured or is_capturing(self._recorder.ring.device)):
                self._measure(updates)
            if updates.is_traced:
                self._try("updates", updates.keep_new, self.step + 1)
            elif not updates.has_begun:
                self._try("updates", updates.keep_for, self.step + 1, self._every)

    def note(self, **scalars: Any) -> None:
        """Keep values for the current step, such as its loss; the next `advance` adds them to the step.

        Values are as for `advance`, and are kept without their graph. A later value of a name replaces it.
        """
        if torch.compiler.is_compiling():
            self._say_compiled()
            return
        if self._is_repeating():
            return
        self._complete()
        if "loss" in scalars:
            self._try("model", self._model_reader.look_at, scalars["loss"])
        self._noted |= {name: x.detach() if isinstance(x, Tensor) else x for name, x in scalars.items()}

    def _say_compiled(self) -> None:
        text = "advance(), note() and keep() do nothing inside a compiled function: call them outside"
        self._failures.add("compiled", text)

    @property
    def step(self) -> int:
        """The number of the current step; it can be set, preferably before the first `advance`."""
        return self._pipeline.reader.step

    @step.setter
    def step(self, step: int) -> None:
        check_integer("Monitor", "step", step, 0)
        if self._is_repeating():
            return
        self._complete()
        if step == self.step:
            return
        self._pipeline.rewind(step)
        self._restart()

    @property
    def every(self) -> int:
        """Steps divisible by this are recorded; it can be set at any time without a recompile."""
        return self._every

    @every.setter
    def every(self, every: int) -> None:
        check_integer("Monitor", "every", every, 1)
        if self._is_repeating():
            return
        self._recorder.configure_(every=every)
        self._pipeline.dispatcher.ledger.span(every)
        self._every = every

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules so far, in the order in which they were first added."""
        return list(self._pipeline.dispatcher.ledger.findings)

    @property
    def last(self) -> StepRecord | None:
        """The newest step on the host: a step of the job on the first rank, of this rank on others."""
        return self._pipeline.last

    @property
    def dropped(self) -> int:
        """The number of steps that a sink missed, that the run record lost, or whose tensors were lost.

        A sink misses steps if it is slow, or if it could not be opened; a step that two sinks miss counts
        twice. The run record loses steps if the disk fails for long, or if its folder is removed.
        """
        return self._pipeline.dropped

    @property
    def failures(self) -> dict[str, int]:
        """The kinds of telemetry failures, and the count of each."""
        return dict(self._failures.counts)

    def summary(self) -> Summary:
        """Return what the run has found so far, on one screen: to print, or to show in a notebook.

        The last steps may be on their way; `flush` waits for them. The first rank knows the findings.

        >>> monitor = Monitor(nn.Linear(2, 1))
        >>> print(monitor.summary())
        0 steps, 0 with tensors
        no findings
        dropped: 0; failures: none
        """
        return self._pipeline.summary()

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return self.summary()._repr_html_()

    @property
    def logger(self) -> logging.Logger:
        """The logger of new findings and of the end of the run, by default ``gradiometer``; it can be set."""
        return self._pipeline.dispatcher.finding_log.logger

    @logger.setter
    def logger(self, logger: logging.Logger) -> None:
        self._pipeline.dispatcher.finding_log.logger = logger

    @property
    def closed(self) -> bool:
        """Whether the monitor was closed."""
        return self._pipeline.is_ended

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all steps so far have reached the sinks; return whether they did in ``timeout`` seconds.

        Call it on all ranks at the same place; a rank that does not call it delays the others.
        """
        if self._is_repeating():
            return True
        self._complete()
        return self._pipeline.flush(timeout)

    def close(self) -> None:
        """Write all steps to the sinks and close them, waiting up to a minute. A second call does nothing.

        One line of the `logger` says what was recorded, found, dropped and failed. It has the level WARNING
        if anything was dropped or failed, or if a finding is a warning, and otherwise INFO.
        """
        if self._is_repeating():
            return
        self._complete()
        if not self._has_advanced:
            self._try("advance", self._see_what_was_forgotten)
        self._call_at_close()
        self._pipeline.end()
        self._release()

    def call_at_close(self, function: Callable[[], object]) -> None:
        """Call a function when the monitor closes, such as one that removes hooks."""
        self._at_close.append(function)

    def _call_at_close(self) -> None:
        # one by one, and first: an interrupt of what follows leaves no hook
        while self._at_close:
            self._try("close", self._at_close.pop())

    def _release(self) -> None:
        """Free what only recording needs, so that a closed monitor costs no memory."""
        self._updates, self._kept, self._is_over = [], None, True
        self._parameter_check.release()
        self._model_reader.release()
        # a graph may still write into the ring, and the loop may still ask whether to skip a step
        if not self._is_captured:
            self._try("close", self._recorder.shrink if self._is_skip_read else self._recorder.release)

    def __enter__(self) -> Self:
        """Handle SIGTERM and SIGHUP from here on."""
        subscribe(self._pipeline)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the sinks how the run ended, and close; an exception propagates."""
        if error is None or is_quiet(error):
            self.close()
        elif not self._is_repeating():
            self._complete()
            self._call_at_close()
            self._pipeline.end_by(error)
            self._release()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: the step, ``every``, the history of the rules, the findings.

        Waits until all steps so far have reached the rules and sinks, at most a minute; with several ranks,
        at most 5 s. Then the first rank's state is the job's, and all ranks load it. If only the first rank
        calls it, the state may lack the last steps.
        """
        self._complete()
        return {"every": self._every, **self._pipeline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, preferably before the first `advance`; later it rewinds the step.

        Raises:
            TypeError, ValueError: for a state that does not fit; nothing has changed then.
        """
        if not isinstance(state, Mapping):
            msg = f"Monitor.load_state_dict: got {type(state).__name__}; pass the result of "
            raise TypeError(msg + "Monitor.state_dict()")
        missing = [key for key in ("step", "every", "black_box", "rules", "findings") if key not in state]
        if missing:
            msg = f"Monitor.load_state_dict: the state has no {', '.join(missing)}; pass the result of "
            raise ValueError(msg + "Monitor.state_dict()")
        for name, least in (("step", 0), ("every", 1)):
            check_integer("Monitor.load_state_dict", name, state[name], least)
        self._complete()
        self._pipeline.load_state_dict(state)
        self._restart()
        self.every = state["every"]

    def _restart(self) -> None:
        """Begin a step whose number was set."""
        self._device_step = self.step
        for updates in self._updates:
            self._try("updates", updates.keep, self.step)
        self._begin_step()

    def _pass_skips(self) -> None:
        self._pipeline.reader.skips = bool(self.skips)

    def _see_what_was_forgotten(self) -> None:
        # the run is over, so a host sync costs nothing
        if float(self._recorder.cursor[Cursor.COUNT]):
            text = "steps were recorded, but none was ended: call advance() once per step, after "
            text += "optimizer.step(); with gm.watch, the last of its optimizers must step"
            self._failures.add("advance", text)
        elif self._noted:
            text = "values were noted, but no step was recorded or ended: call optimizer.step() if gm.watch "
            text += "records the steps, or record() and advance()"
            self._failures.add("advance", text)

    def _try(self, what: str, call: Callable[..., _T], *args: object, **options: object) -> _T | None:
        try:
            return call(*args, **options)
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add(what, error)
            return None


# Called when a function is compiled, not when it runs. torch.compiler.assume_constant_result sets this too,
# but it would import the compiler.
Monitor._say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001
