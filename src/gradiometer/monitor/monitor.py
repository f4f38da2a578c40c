"""The monitor: a recorder, the way of its steps to the host, and what rules and sinks make of them."""

from __future__ import annotations

import math
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer.columns import DEFAULT_THRESHOLDS, Cursor, Thresholds
from gradiometer.monitor.failures import Failures, is_quiet, reason_of
from gradiometer.monitor.parameter_check import ParameterCheck
from gradiometer.monitor.pipeline import Pipeline
from gradiometer.monitor.rank_merger import RankMerger
from gradiometer.monitor.setup import (
    class_names,
    prepare_ranks,
    prepare_rules,
    prepare_sinks,
    rank_here,
    run_info,
    together,
)
from gradiometer.monitor.sigterm import subscribe
from gradiometer.recorder import Recorder, Updates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding, Rule
    from gradiometer.sinks import Sink
    from gradiometer.stats import TensorStats

__all__ = ["Monitor"]

# seconds between two looks at whose parameters they are
_PARAMETER_CHECK = 1.0


class Monitor:
    """Watches a training run: records every step, looks at it with rules, and hands it to sinks.

    `record` goes into the step, compiled or not, after the last ``backward()`` and before gradients are
    cleared; `advance` outside, once per optimizer step. Neither waits for the device, a rule or a sink, and
    neither raises because of telemetry: what fails there is logged once, as a warning of the logger
    ``gradiometer``, and counted in `failures`.

    Steps travel to the host every 0.2 s, or when half of the ring is full, in one asynchronous copy; a
    later `advance` hands what has arrived to background threads: one for the rules, and one for each sink.

    In a ``with`` block the end of the run is told to the sinks: an exception, Ctrl-C, SIGTERM or
    ``sys.exit`` is a `gradiometer.rules.Fault` with the last steps and the first non-finite tensor, and goes
    on its way. SIGTERM raises SystemExit(143) in the main thread, unless a handler was there before,
    which is then called. Without ``with`` call `close`, or the end of the process will.

    Of a job of several ranks each makes the monitor, and calls its methods, at the same place; it then
    watches the whole job. Steps stay local until a background thread brings those of all ranks together,
    some at once; rules and sinks see the job's, on the first rank, with the rank and shard of what is not
    finite. Scalars are means over the ranks. Another rank has no `findings`, its ``sinks`` are not called,
    and its faults go to the log and ``blackbox.rank-00005.json``. Where a rank ends early or does not answer,
    training goes on, `failures` says so, and from then on steps have their scalars and no tensors.

    Gradients that are accumulated: record once per micro-batch or once, advance once. Several models:
    a mapping of names to modules; record after each one's ``backward()``. A process that is forked from
    this one watches nothing: make the monitor in the process that trains.

    Args:
        model: a module, what `gradiometer.collect_grads` takes, or a mapping of names to modules.
        run_dir: where to keep a run record, for `gradiometer.read_run`; needs ``gradiometer[monitor]``.
        every: record the steps that this divides, and those with a NaN, an Inf or a norm above
            ``skip_above``. Every step has a `StepRecord` with its scalars.
        capacity: steps that the ring on the device holds: ``(R + 1) * 72`` bytes each, R tensors.
        weights: also measure the parameters.
        updates: also measure what each due step adds to them, at the cost of a copy of the weights.
        rules: what to look for; None: `gradiometer.rules.default_rules`; ``()``: nothing.
        sinks: of `gradiometer.sinks`, or functions of a `StepRecord`.
        thresholds: where flags begin.
        skip_nonfinite: whether `skip_step` is true after a NaN or Inf in a gradient.
        skip_above: and of a total gradient norm above this; of several ranks, of all. (Whether a step that
            ``every`` leaves out is recorded for it, each rank decides by its own part.)
        queue: steps that may wait on the host for each sink, ``R * 72`` bytes each. Of more the oldest are
            dropped for that sink, and counted in `dropped`, once for each sink that misses one. As many may
            wait for slower ranks; of more the oldest lose their tensors, and are counted too.
        ranks: whether the job's ranks are merged, where there are several; or what they have agreed on,
            `gradiometer.Ranks`. False: each is for itself, with a run record in ``run_dir/rank-00005``.

    Attributes:
        skips: whether a step is skipped where `skip_step` is true, as its record then says. Reading
            `skip_step` and giving an ``inv_scale`` make it true; set it where something else skips them.

    Raises:
        TypeError: for a parameter that cannot be measured, or a sink that is none; the message says which.
        ValueError: without parameters, or for a number out of range.
        ImportError: for a run record without pyarrow; the message says what to install.
        RankError: on every rank, where one does not come, or makes it another way.

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
        run_dir: str | Path | None = None,
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
    ) -> None:
        self._failures = Failures()
        agreed = prepare_ranks(ranks, model)
        rank = rank_here(agreed)
        settings: dict[str, Any] = {"every": every, "weights": bool(weights), "updates": bool(updates)}
        settings |= {"skip_nonfinite": bool(skip_nonfinite), "skip_above": skip_above}
        with together(agreed, settings) as group:
            if not isinstance(queue, int) or queue < 1:
                msg = f"Monitor(queue={queue!r}): a number of steps, at least 1"
                raise ValueError(msg)
            # all that record() looks at inside a compiled step
            self._recorder = recorder = Recorder(
                model,
                weights=weights,
                updates=updates,
                capacity=capacity,
                every=every,
                skip_nonfinite=skip_nonfinite,
                skip_above=skip_above,
                thresholds=thresholds,
                ranks=agreed,
            )
            merger = None
            if agreed is not None and group is not None:
                merger = RankMerger(agreed, recorder.roster, thresholds, queue, self._failures, group)
            # what sees the job's steps is on its first rank
            is_first = merger is None or merger.is_first
            if merger is not None and is_first:
                rank = None
            checked_rules = prepare_rules(rules)
            checked_sinks = prepare_sinks(sinks, run_dir, rank, is_merged=merger is not None)
        self._parameter_check = ParameterCheck(model, self._recorder, self._failures)
        self._updates = Updates(self._recorder) if updates else None
        self._next_check = 0.0
        self._every = every
        self.skips = self._has_advanced = False
        self._pipeline = pipeline = Pipeline(
            recorder,
            checked_rules if is_first else (),
            checked_sinks,
            queue,
            self._failures,
            partial(run_info, recorder, class_names(model), every, merger),
            merger,
            rank,
        )
        # forgotten without being closed: what has been recorded is not lost for that
        weakref.finalize(self, pipeline.forget).atexit = False

    def __repr__(self) -> str:
        """Return one line. Never waits."""
        tensors = self._recorder.roster.num_rows
        return f"<Monitor: step {self.step}, {tensors} tensors, {len(self.findings)} findings>"

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if asked, and write them into the current step's row.

        Inside or outside of a compiled step. Once more in the same step writes over what it measures.

        Args:
            stats: gradients that were measured already, by the model's names: they are not read again.
            inv_scale: ``1 / scale`` of a GradScaler, see `gradiometer.inverse_scale`.
        """
        if inv_scale is not None:
            self.skips = True
        if torch.compiler.is_compiling():
            self._recorder.record(stats, inv_scale=inv_scale)
            return
        try:
            self._recorder.record(stats, inv_scale=inv_scale)
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add("record", error)

    @property
    def skip_step(self) -> Tensor:
        """Whether to skip this step's update, 0-d bool on the device; after `record`, in the same step."""
        self.skips = True
        return self._recorder.skip_step

    def advance(self, loss: Any = None, lr: Any = None, **scalars: Any) -> None:
        """End the step. Once per optimizer step, outside of a compiled function. Never waits, never raises.

        What is given may be a number, or a tensor of one element, which travels with the next copy.

        Args:
            loss: of the step. The first one that is not finite is a fault, and told to the sinks.
            lr: the learning rate.
            **scalars: others, by name.
        """
        if not self._pipeline.is_open():
            return
        if loss is not None:
            scalars["loss"] = loss
        if lr is not None:
            scalars["lr"] = lr
        if self._updates is not None:
            self._try("updates", self._updates.measure, self.step, self._every)
        self._try("advance", self._recorder.advance)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _PARAMETER_CHECK
            self._try("parameters", self._parameter_check)
        self._has_advanced = True
        self._pipeline.reader.skips = self.skips
        self._pipeline.take(scalars)

    @property
    def step(self) -> int:
        """The number of the current step; may be set, best before the first `advance`."""
        return self._pipeline.reader.step

    @step.setter
    def step(self, step: int) -> None:
        self._pipeline.rewind(step)
        if self._updates is not None:
            self._updates.keep(step)

    @property
    def every(self) -> int:
        """Steps that this divides are recorded; may be set at any time, and nothing is compiled again."""
        return self._every

    @every.setter
    def every(self, every: int) -> None:
        self._recorder.configure_(every=every)
        self._pipeline.dispatcher.ledger.span(every)
        self._every = every

    @property
    def findings(self) -> list[Finding]:
        """What the rules have found so far, in the order in which it began."""
        return list(self._pipeline.dispatcher.ledger.findings)

    @property
    def last(self) -> StepRecord | None:
        """The newest step that has arrived: of the job on its first rank, of this one on others."""
        return self._pipeline.last

    @property
    def dropped(self) -> int:
        """Steps that were not kept: the sinks were too slow for them, or their tensors were lost."""
        merger = self._pipeline.merger
        unmerged = 0 if merger is None else merger.lost
        return self._pipeline.dispatcher.dropped + self._pipeline.reader.lost + unmerged

    @property
    def failures(self) -> dict[str, int]:
        """What failed in the telemetry, and how often."""
        return dict(self._failures.counts)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all steps so far have reached the sinks; tell whether they have, in so many seconds.

        Call it on all ranks at the same place: one that does not bring its steps holds the others up.
        """
        return self._pipeline.flush(timeout)

    def close(self) -> None:
        """Bring all to the sinks and close them. Waits for them, up to a minute. Once more does nothing."""
        if not self._has_advanced:
            self._try("advance", self._see_what_was_forgotten)
        self._pipeline.end()

    def __enter__(self) -> Self:
        """Tell this monitor of SIGTERM from here on."""
        subscribe(self._pipeline)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the sinks how the run ended, and close; an exception goes on its way."""
        if error is None or is_quiet(error):
            self.close()
        else:
            self._pipeline.end(reason_of(error))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with: the step, the cadence, what rules remember, the findings.

        Waits until all steps so far have reached the rules. Of several ranks the first one's state is the
        job's, and all load it. Called there alone it waits 5 s for steps of the others, and may lack those.
        """
        return {"every": self._every, **self._pipeline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; best before the first `advance`. A later one goes back to its step."""
        missing = [key for key in ("step", "every", "black_box", "rules", "findings") if key not in state]
        if missing:
            msg = f"Monitor.load_state_dict: this is no state of a Monitor, it has no {', '.join(missing)}"
            raise ValueError(msg)
        self.step = state["step"]
        self._pipeline.load_state_dict(state)
        self.every = state["every"]

    def _see_what_was_forgotten(self) -> None:
        # the run is over: a wait for one number costs nothing
        if float(self._recorder.cursor[Cursor.COUNT]):
            text = "steps were recorded, and none ended: call advance() once per step, after the optimizer's"
            self._failures.add("advance", text)

    def _try(self, what: str, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 training goes on
            self._failures.add(what, error)
