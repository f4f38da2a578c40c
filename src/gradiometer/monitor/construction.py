"""Build the parts of a monitor from its arguments, on all ranks of a job together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradiometer.monitor.current_step import CurrentStep
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
from gradiometer.monitor.update_tracker import UpdateTracker
from gradiometer.recorder import Recorder
from gradiometer.runs import kept_path

if TYPE_CHECKING:
    from gradiometer.monitor.failures import Failures
    from gradiometer.monitor.settings import Settings


class Parts(NamedTuple):
    """The parts of a monitor, and the folder of its run record."""

    run_dir: Path | None
    recorder: Recorder
    parameter_check: ParameterCheck
    model_reader: ModelReader
    updates: UpdateTracker
    pipeline: Pipeline
    current: CurrentStep


def build(model: Any, settings: Settings, failures: Failures) -> Parts:
    """Build the parts of a monitor; arguments that one rank refuses are refused on all.

    Raises:
        TypeError, ValueError, ImportError, RankError: as `Monitor`.
    """
    ranks = prepare_ranks(settings.ranks, model)
    rank = rank_here(ranks)
    with together(ranks, settings.shared()) as group:
        folder = choose_run_dir(settings.run_dir, rank, ranks, group)
        settings.check(folder)
        recorder = Recorder(model, ranks=ranks, **settings.of_recorder())
        merger = None
        if ranks is not None and group is not None:
            merger = RankMerger(
                ranks,
                recorder.catalog,
                settings.thresholds,
                settings.queue,
                failures,
                group,
                fingerprint=recorder.fingerprint,
                precision=settings.precision,
            )
        # only the first rank sees the job's steps
        is_first = merger is None or merger.is_first
        if merger is not None and is_first:
            rank = None
        rules = prepare_rules(settings.rules)
        sinks = prepare_sinks(settings.sinks, folder, rank, is_merged=merger is not None)
    parameter_check = ParameterCheck(model, recorder, failures)
    model_reader = ModelReader(model, recorder)
    updates = UpdateTracker(recorder, failures, is_enabled=bool(settings.updates))
    pipeline = Pipeline(
        recorder,
        rules if is_first else (),
        sinks,
        settings.queue,
        failures,
        partial(run_info, recorder, class_names(model), settings.every, merger),
        merger,
        rank,
        redact=bool(settings.redact),
    )
    run_dir = None if folder is None else Path(folder)
    if run_dir is not None and not settings.redact:
        of_rank = run_dir if rank is None or merger is not None else run_dir / f"rank-{rank:05d}"
        path = kept_path(of_rank, rank if merger is not None else None)
        weights = bool(settings.keep_weights)
        pipeline.box.kept = KeptSteps(path, recorder, model, weights=weights, failures=failures)
    current = CurrentStep(recorder, pipeline, updates, failures)
    return Parts(run_dir, recorder, parameter_check, model_reader, updates, pipeline, current)
