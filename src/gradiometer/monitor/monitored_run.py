"""The run that a monitor watches: its number of steps, what was found, its state, and its end."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer.monitor import setup
from gradiometer.monitor.current_step import CurrentStep, UpdateTracker
from gradiometer.monitor.failures import Failures, is_quiet, remember_handlers
from gradiometer.monitor.kept_steps import KeptSteps
from gradiometer.monitor.merge_window import MergeWindow
from gradiometer.monitor.model_reader import ModelReader, ParameterCheck
from gradiometer.monitor.pipeline import Pipeline
from gradiometer.monitor.rank_merger import RankMerger
from gradiometer.monitor.run_names import choose_run_dir
from gradiometer.monitor.signals import subscribe
from gradiometer.recorder import Driver, Recorder, check_integer
from gradiometer.rules import counts_text
from gradiometer.runs import kept_path
from gradiometer.stats import is_repeating

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from gradiometer.monitor.summary import Summary
    from gradiometer.recorder import StepRecord
    from gradiometer.rules import Finding

# arguments of a monitor that its recorder gets
_OF_RECORDER: Final = (
    "every weights updates capacity skip_nonfinite skip_above thresholds fingerprint taps precision kinds "
    "projections projections_every"
)


class MonitoredRun:
    """A run from its first step to its end, without the calls that record its steps.

    Args:
        model: the model or models, as for `Monitor`.
        given: the other arguments of `Monitor`, by name; those that one rank refuses are refused on all.
    """

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        self._failures = Failures()
        remember_handlers()
        ranks = setup.prepare_ranks(given["ranks"], model)
        rank = setup.rank_here(ranks)
        queue = given["queue"]
        self._every: int = given["every"]
        with setup.together(ranks, setup.shared_options(given)) as group:
            folder = choose_run_dir(given["run_dir"], rank, ranks, group)
            setup.check_options(given, folder)
            # the only part that is used inside a compiled step, except for updates
            options = {name: given[name] for name in _OF_RECORDER.split()}
            optimizers = setup.prepare_optimizers(given["optimizer"])
            states = setup.prepare_states(optimizers, given["states"], given["state_names"], group)
            self._recorder = recorder = Recorder(model, ranks=ranks, states=states, **options)
            catalog, bits = recorder.catalog, recorder.fingerprint
            merger = None
            if ranks is not None and group is not None:
                window = MergeWindow(
                    ranks, catalog, recorder.thresholds, fingerprint=bits, precision=given["precision"]
                )
                merger = RankMerger(ranks, window, queue, self._failures, group)
                catalog = merger.catalog
            # only the first rank sees the job's steps
            is_first = merger is None or merger.is_first
            if merger is not None and is_first:
                rank = None
            rules = setup.prepare_rules(given["rules"])
            sinks = setup.prepare_sinks(given["sinks"], folder, rank, is_merged=merger is not None)
        self._parameter_check = ParameterCheck(model, recorder, self._failures)
        self._model_reader = ModelReader(model, recorder, self._failures)
        if optimizers:
            self._model_reader.set_driver(Driver(optimizers=optimizers))
        self._updates = UpdateTracker(recorder, self._failures, is_enabled=bool(given["updates"]))
        num_ranks = 1 if merger is None or ranks is None else ranks.size
        names = setup.class_names(model)
        describe = partial(setup.run_info, recorder, names, self._every, catalog, num_ranks)
        self._pipeline = Pipeline(
            recorder,
            rules if is_first else (),
            sinks,
            queue,
            self._failures,
            describe,
            merger,
            rank,
            redact=bool(given["redact"]),
        )
        self.run_dir = None if folder is None else Path(folder)
        if self.run_dir is not None and not given["redact"]:
            is_apart = rank is not None and merger is None
            path = self.run_dir / f"rank-{rank:05d}" if is_apart else self.run_dir
            path = kept_path(path, None if is_apart else rank)
            weights, failures = bool(given["keep_weights"]), self._failures
            self._pipeline.box.kept = KeptSteps(path, recorder, model, weights=weights, failures=failures)
        self._current = CurrentStep(recorder, self._pipeline, self._updates, self._failures)
        # whether a step may be skipped, and whether a graph that records steps was captured
        self._is_skip_read = self._is_captured = False
        self._at_close: list[Callable[[], object]] = []
        # a monitor that is garbage-collected without close() must not lose recorded steps
        weakref.finalize(self, self._pipeline.forget).atexit = False

    def __repr__(self) -> str:
        """Return one line. Never waits."""
        tensors = self._recorder.catalog.num_tensors
        return f"<Monitor: step {self.step}, {tensors} tensors, {counts_text(self.findings)}>"

    @property
    def step(self) -> int:
        """The number of the current step; it can be set, preferably before the first `advance`."""
        return self._pipeline.reader.step

    @step.setter
    def step(self, step: int) -> None:
        check_integer("Monitor", "step", step, 0)
        if self._is_repeating():
            return
        self._current.complete()
        if step != self.step:
            self._pipeline.rewind(step)
            self._current.restart()

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

        >>> import torch, gradiometer as gm
        >>> monitor = gm.Monitor(torch.nn.Linear(2, 1))
        >>> print(monitor.summary())
        0 steps, 0 with tensors
        no findings
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
        self._current.complete()
        return self._pipeline.flush(timeout)

    def close(self) -> None:
        """Write all steps to the sinks and close them, waiting up to a minute. A second call does nothing.

        One line of the `logger` says what was recorded, found, dropped and failed. It has the level WARNING
        if anything was dropped or failed, or if a finding is a warning, and otherwise INFO.
        """
        if self._is_repeating():
            return
        self._current.complete()
        self._failures.attempt("advance", self._current.report_missing_ends)
        self._call_at_close()
        self._pipeline.end()
        self._release()

    def note_failure(self, kind: str, text: str) -> None:
        """Log and count a failure of telemetry, as in `failures`."""
        self._failures.add(kind, text)

    def call_at_close(self, function: Callable[[], object]) -> None:
        """Call a function when the monitor closes, such as one that removes hooks."""
        self._at_close.append(function)

    def __enter__(self) -> Self:
        """Handle SIGTERM and SIGHUP from here on."""
        subscribe(self._pipeline.note_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the sinks how the run ended, and close; an exception propagates."""
        if error is None or is_quiet(error):
            self.close()
        elif not self._is_repeating():
            self._current.complete()
            self._call_at_close()
            self._pipeline.end_by(error)
            self._release()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: the step, ``every``, the history of the rules, the findings.

        Waits until all steps so far have reached the rules and sinks, at most a minute; with several ranks,
        at most 5 s. Then the first rank's state is the job's, and all ranks load it. If only the first rank
        calls it, the state may lack the last steps.
        """
        self._current.complete()
        return {"every": self._every, **self._pipeline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, preferably before the first `advance`; later it rewinds the step.

        Raises:
            TypeError, ValueError: for a state that does not fit; nothing has changed then.
        """
        setup.check_state(state)
        self._current.complete()
        self._pipeline.load_state_dict(state)
        self._current.restart()
        self.every = state["every"]

    def _is_repeating(self) -> bool:
        return is_repeating(self._recorder.parameters_tracked)

    def _call_at_close(self) -> None:
        # one by one, and first: an interrupt of what follows leaves no hook
        while self._at_close:
            self._failures.attempt("close", self._at_close.pop())

    def _release(self) -> None:
        """Free what only recording needs, so that a closed monitor costs no memory."""
        self._updates.release()
        self._parameter_check.release()
        self._model_reader.release()
        # a graph may still write into the ring, and the loop may still ask whether to skip a step
        if not self._is_captured:
            release = self._recorder.shrink if self._is_skip_read else self._recorder.release
            self._failures.attempt("close", release)
