"""Read a run on disk: tables, matrices, records. ``docs/reference/run-record.md`` describes the format."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gradiometer.runs.files import RunError, stamp, unfit
from gradiometer.runs.findings import FOREVER, load_findings
from gradiometer.runs.format import segment_path
from gradiometer.runs.journal import journal_path
from gradiometer.runs.json_files import from_json, read_json
from gradiometer.runs.precision import ExponentReader

if TYPE_CHECKING:
    from pathlib import Path

    from gradiometer.rules import Finding

_LOG = logging.getLogger("gradiometer")


def read_run(path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> Run:
    """Open a run on disk; its tables are read when they are accessed.

    Args:
        path: the folder.
        attempt: read the run as it was after this attempt, with the steps that later attempts have
            superseded; None for the last attempt.
        skip_damaged: leave out segments with a damaged file, or only a table that is stored sparsely, such as
            the exponents, if only its file is damaged; journals from the damage on; and ``findings.json`` and
            ``blackbox.json`` if they are damaged. ``run.damaged`` lists them, and a warning is logged for
            each. This checks every file at once.

    Raises:
        RunError: if there is no run or attempt, or its version is newer than this package reads. Without
            ``skip_damaged``, methods that read a file later raise it too, if the file is missing or is not
            as it was written.
        ImportError: without pyarrow; ``pip install 'gradiometer[monitor]'`` installs it.

    >>> import tempfile, torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gm.Monitor(model, run_dir=folder) as monitor:
    ...         model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...         monitor.record()
    ...         monitor.advance(loss=0.5)
    ...     record = gm.read_run(folder).record(0)
    >>> record.loss, record.report()["weight"].norm
    (0.5, 5.0)
    """
    return Run(path, attempt=attempt, skip_damaged=skip_damaged)


class Run(ExponentReader):
    """A run on disk, as of when it was opened or last refreshed.

    Rows that a later attempt has superseded are left out: if that attempt began at step s, rows of
    earlier attempts for step s and later no longer belong to the run; ``read_run(path, attempt=...)`` reads
    them.

    Attributes:
        path: the folder.
        info: the content of run.json; if an earlier attempt is read, as it was then.
        attempts: all attempts in the folder.
        catalog: the tables of its steps: kinds and schemas, and the names of parameters and taps.
        thresholds: the thresholds of the flags.
        damaged: with ``skip_damaged``, what is left out: the error of each file by its path in the folder.
    """

    def __init__(self, path: Path | str, *, attempt: int | None = None, skip_damaged: bool = False) -> None:
        self.damaged: dict[str, str] = {}
        super().__init__(path, attempt=attempt, skip_damaged=skip_damaged)

    def refresh(self) -> bool:
        """Load what was written since the last call; return whether anything was. Reads only new files."""
        has_changed = super().refresh()
        if has_changed and self._skip:
            self._skip_damaged()
        return has_changed

    def _skip_damaged(self) -> None:
        """Leave out segments with a damaged file, and note what is damaged."""
        before, self.damaged, left = self.damaged, {}, dict.fromkeys(self._segments)
        sparse = {kind.schema.name for kind in self.catalog.sparse}
        for key, journal in self._journals.items():
            if journal.error is not None:
                self.damaged[journal_path(self.path, *key).name] = str(journal.error)
        for key in self._segments:
            try:
                self._files.claims("steps", key)
                tables = self._files.tables(key)
            except RunError as error:
                self._leave_out("steps", key, error)
                del left[key]
                continue
            for table in tables:
                try:
                    self._files.claims(table, key)
                except RunError as error:
                    self._leave_out(table, key, error)
                    if table not in sparse:
                        left.pop(key, None)
        # they still supersede what their names say, lest rows come back that do not belong to the run
        self._segments = list(left)
        for name, read in (("findings.json", self._read_findings), ("blackbox.json", self._read_blackbox)):
            try:
                read()
            except RunError as error:
                self.damaged[name] = str(error)
        for name in self.damaged.keys() - before.keys():
            _LOG.warning("left out: %s", self.damaged[name])

    def _leave_out(self, table: str, key: tuple[int, int], error: RunError) -> None:
        self._without.add((table, key))
        self.damaged[f"{table}/{segment_path(self.path, table, *key).name}"] = str(error)

    @property
    def findings(self) -> list[Finding]:
        """The findings of the rules, without those that later attempts have superseded."""
        return [] if "findings.json" in self.damaged else self._read_findings()

    @property
    def blackbox(self) -> dict[str, Any] | None:
        """The report of the last fault in any of the attempts that are read; None if there was none."""
        return None if "blackbox.json" in self.damaged else self._read_blackbox()

    def _read_findings(self) -> list[Finding]:
        return load_findings(
            self.path,
            self._closed_with("findings.json"),
            self._ends,
            self._last,
            lambda: [self._files.claims("steps", key) for key in self._begins.items() if key in self._stamps],
        )

    def _read_blackbox(self) -> dict[str, Any] | None:
        # the newest, and those that the faults of later attempts have replaced
        earlier = [] if self._last == FOREVER else sorted(self.path.glob("blackbox-[0-9]*.json"))[::-1]
        for path in (self.path / "blackbox.json", *earlier):
            content = read_json(path, self._closed_with(path.name))
            found: dict[str, Any] | None = from_json(content)
            if not isinstance(found, dict | None):
                raise unfit(path, f"{found!r:.40}")
            attempt = 1 if found is None else found.get("attempt", 1)
            if not isinstance(attempt, int):
                raise unfit(path, f"attempt: {attempt!r:.40}")
            if found is not None and attempt <= self._last:
                return found
        return None

    def _closed_with(self, name: str) -> str | None:
        """Return the digest of a JSON file of a closed run; None if it is not known, or out of date."""
        # a writer that continues the run replaces run.json first
        is_current = stamp(self.path / "run.json") == self._seen[-1][0]
        return self.info.get("files", {}).get(name) if is_current else None
