"""The MLflow sink."""

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

# limits of MLflow: metrics per request, and the lengths of a metric's name and of a tag
_BATCH: Final = 1000
_LONGEST_NAME: Final = 250
_LONGEST_TAG: Final = 5000
_STATUS: Final = {
    "exception": "FAILED",
    "interrupt": "KILLED",
    "SIGTERM": "KILLED",
    "SIGHUP": "KILLED",
    "other rank": "FAILED",
}


class MLflow:
    """Logs metrics to an MLflow run: the active run, or a new one.

    Metrics are sent in requests of up to 1000: when 1000 are waiting, when ``seconds`` have passed since the
    last request, at a fault, and at the end. Characters that MLflow rejects in a name become ``_``. SQL
    stores keep an infinity as the largest double. Findings and a fault are stored in the tags
    ``gradiometer.findings`` and ``gradiometer.fault``.

    Create the sink in the thread that started the active run; MLflow keeps the active run per thread.

    Args:
        experiment: the experiment for a new run, created if missing; `close` ends that run.
        run_id: the id of a run to use instead of the active one.
        tracking_uri: the URI of the server or store; by default MLflow's setting.
        seconds: the minimum time between two requests with fewer than 1000 metrics.
        **options: which steps and values to log, as for `gradiometer.sinks.Selection`.

    Raises:
        ImportError: without mlflow; ``pip install 'gradiometer[mlflow]'`` installs it.
        ValueError: if there is no run and no experiment was given.
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
            msg = "MLflow: there is no active run; call mlflow.start_run first, or pass experiment=..."
            raise ValueError(msg)
        self._client = mlflow.MlflowClient(tracking_uri)
        self._owned = run_id is None
        self._run_id = self._new_run(str(experiment)) if run_id is None else run_id
        self._seconds = seconds
        self._sent = time.monotonic()
        self._waiting: list[Any] = []
        self._names: dict[str, str] = {}
        self._news = News()
        self._lines: list[str] = []
        self._num_sent = 0
        self._status = "FINISHED"

    def __repr__(self) -> str:
        return f"MLflow({self._run_id!r})"

    def start(self, info: RunInfo) -> None:
        """Do nothing; the run exists already."""

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Collect the steps, and send the metrics if a request is due."""
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
        """Send all metrics, and the fault as a tag."""
        self._send()
        self._client.set_tag(self._run_id, "gradiometer.fault", encodable(str(fault))[:_LONGEST_TAG])
        # after a non-finite loss the run goes on, and its status stays
        self._status = _STATUS.get(fault.reason, self._status)

    def close(self) -> None:
        """Send all metrics, and end the run if this sink created it."""
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
            # a batch that cannot be sent is lost: the error is counted, and memory stays bounded
            self._client.log_batch(self._run_id, metrics=batch)
        if len(self._lines) > self._num_sent:
            text = "\n".join(self._lines)[:_LONGEST_TAG]
            self._client.set_tag(self._run_id, "gradiometer.findings", text)
            self._num_sent = len(self._lines)


def legal(key: str) -> str:
    """Return a name that MLflow accepts; different keys get different names."""
    name = re.sub(r"[^\w\-. :/]", "_", key)
    # MLflow rejects names that are not normalized paths
    name = posixpath.normpath(name).lstrip("/")
    while name.startswith(".."):
        name = "__" + name[2:]
    if name == key and len(name) <= _LONGEST_NAME:
        return name
    # the replaced or cut characters may be what distinguished the key, so append a hash
    mark = "_" + hashlib.blake2s(key.encode("utf-8", "backslashreplace"), digest_size=3).hexdigest()
    return name[: _LONGEST_NAME - len(mark)] + mark
