"""MLflow."""

from __future__ import annotations

import hashlib
import posixpath
import re
import time
from typing import TYPE_CHECKING, Any, Final

from gradiometer.extras import require
from gradiometer.runs import encodable
from gradiometer.sinks.selection import News, Options, Selection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

__all__ = ["MLflow", "legal"]

# limits of MLflow: metrics of one request, and the lengths of a metric's name and of a tag
_BATCH: Final = 1000
_LONGEST_NAME: Final = 250
_LONGEST_TAG: Final = 5000
_STATUS: Final = {"exception": "FAILED", "interrupt": "KILLED", "SIGTERM": "KILLED", "other rank": "FAILED"}


class MLflow:
    """Logs metrics to a run of MLflow: to the active one, or to one of its own.

    Metrics are collected and sent up to 1000 a request, when so many are there, or ``seconds`` after the last
    request, at a fault and at the end. Characters that MLflow refuses in a name become ``_``; SQL stores
    keep an infinity as the largest double. Findings and a fault become tags, ``gradiometer.findings`` and
    ``gradiometer.fault``.

    Make it in the thread that has the active run: MLflow knows of it there alone.

    Args:
        experiment: the name of the experiment for a run of its own, made if it is not there; it is ended
            by `close`.
        run_id: of a run, instead of the active one.
        tracking_uri: of the server or store; by default what MLflow is set to.
        seconds: the least time between two requests for fewer than 1000 metrics.
        **options: which steps and values, as for `gradiometer.sinks.Selection`.

    Raises:
        ImportError: without mlflow; ``pip install 'gradiometer[mlflow]'`` brings it.
        ValueError: without an experiment where there is no run.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        seconds: float = 5.0,
        **options: Unpack[Options],
    ) -> None:
        self.selection = Selection(**options)
        mlflow = require("mlflow", "mlflow", "sinks.MLflow")
        self._metric = require("mlflow.entities", "mlflow", "sinks.MLflow").Metric
        if run_id is None and (active := mlflow.active_run()) is not None:
            run_id = active.info.run_id
        if run_id is None and experiment is None:
            raise ValueError(
                "MLflow: there is no active run; call mlflow.start_run first, or give experiment=..."
            )
        self._client = mlflow.MlflowClient(tracking_uri)
        self._owned = run_id is None
        self._run_id = self._new_run(str(experiment)) if run_id is None else run_id
        self._seconds = seconds
        self._sent = time.monotonic()
        self._waiting: list[Any] = []
        self._names: dict[str, str] = {}
        self._news = News()
        self._lines: list[str] = []
        self._told = 0
        self._status = "FINISHED"

    def __repr__(self) -> str:
        """Return the run's id."""
        return f"MLflow({self._run_id!r})"

    def start(self, info: RunInfo) -> None:
        """Do nothing: the run is there."""

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Collect the steps, and send what is due."""
        for record in records:
            if self.selection.takes(record):
                milliseconds = int(record.time * 1e3)
                for key, value in self.selection.values(record).items():
                    name = self._names.get(key) or self._names.setdefault(key, legal(key))
                    self._waiting.append(self._metric(name, value, milliseconds, record.step))
        self._lines += [encodable(str(finding)) for finding in self._news.take(findings)]
        if len(self._waiting) >= _BATCH or time.monotonic() - self._sent >= self._seconds:
            self._send()

    def fault(self, fault: Fault) -> None:
        """Send all, and the fault as a tag."""
        self._send()
        self._client.set_tag(self._run_id, "gradiometer.fault", encodable(str(fault))[:_LONGEST_TAG])
        # after a loss that is not finite the run goes on
        self._status = _STATUS.get(fault.reason, self._status)

    def close(self) -> None:
        """Send all, and end the run if it is this sink's own."""
        try:
            self._send()
        finally:
            if self._owned:
                self._client.set_terminated(self._run_id, status=self._status)

    def _new_run(self, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(number).info.run_id
        return run_id

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            # what cannot be sent is lost: the error counts, and memory does not grow while a server is away
            self._client.log_batch(self._run_id, metrics=batch)
        if len(self._lines) > self._told:
            text = "\n".join(self._lines)[:_LONGEST_TAG]
            self._client.set_tag(self._run_id, "gradiometer.findings", text)
            self._told = len(self._lines)


def legal(key: str) -> str:
    """Return a name that MLflow takes; two keys that differ keep names that differ."""
    name = re.sub(r"[^\w\-. :/]", "_", key)
    # no name may look like another path
    name = posixpath.normpath(name).lstrip("/")
    while name.startswith(".."):
        name = "__" + name[2:]
    if name == key and len(name) <= _LONGEST_NAME:
        return name
    # what it was told apart by may be what is gone
    mark = "_" + hashlib.blake2s(key.encode("utf-8", "backslashreplace"), digest_size=3).hexdigest()
    return name[: _LONGEST_NAME - len(mark)] + mark
