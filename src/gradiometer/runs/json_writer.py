"""The JSON files of a run that is being written: run.json, findings.json and blackbox.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradiometer.rules import checked
from gradiometer.runs.attempts import keep_changed
from gradiometer.runs.directory import prepare
from gradiometer.runs.files import RunError, stamp
from gradiometer.runs.format import FORMAT, VERSION
from gradiometer.runs.json_files import json_file, read_json
from gradiometer.runs.kept_step import kept_path, move_kept
from gradiometer.runs.resume import earlier_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gradiometer.recorder import Catalog, RunInfo
    from gradiometer.rules import Finding


def info_of(info: RunInfo, catalog: Catalog, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of run.json for an attempt with this catalog, which goes on after an old content."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "created": old.get("created", info.started),
        "model": info.model,
        "catalog": catalog.to_dict(),
        "thresholds": asdict(info.thresholds),
        "every": info.every,
        "capacity": info.capacity,
        "versions": dict(info.versions),
        "device": info.device,
        "ranks": info.ranks,
        "fingerprint": info.fingerprint,
        "attempts": old.get("attempts", []),
        "closed": False,
    }
    if info.precision is not None or "precision" in old:
        content["precision"] = info.precision
    return content


class JsonWriter:
    """Holds the content of the JSON files, and writes each that has changed.

    ``restore`` is called before a file is written; it makes the folder again if it was removed.

    Attributes:
        info: the content of run.json.
        info_changed: whether it must be written again.
        report: that of a fault, until it is on disk.
    """

    def __init__(self, run: Path, *, fsync: bool, restore: Callable[[], None]) -> None:
        self._run, self._fsync, self._restore = run, fsync, restore
        self._kept = stamp(kept_path(run))  # of an earlier attempt
        self.info: dict[str, Any] = {}
        self.info_changed = False
        self._findings: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._findings_changed = False
        self.report: dict[str, Any] | None = None
        self._digests: dict[str, str] = {}  # of the files

    def start(self, info: dict[str, Any], old: Mapping[str, Any], attempt: int) -> None:
        """Set the content of run.json; take over the findings of the attempts up to this one."""
        self.info = info
        keep_changed(old, info)
        self._digests = {k: v for k, v in old.get("files", {}).items() if k.endswith(".json")}
        for entry in earlier_findings(self._run, attempt):
            self._findings[_key(entry)] = entry
        if not (self._run / "findings.json").exists():
            self._digests.pop("findings.json", None)

    def add(self, finding: Finding, attempt: int) -> None:
        """Add a finding, or replace it by what is known now; raise TypeError for anything else."""
        entry = checked(finding).to_dict() | {"attempt": attempt}
        self._findings[_key(entry)] = entry
        self._findings_changed = True

    @property
    def has_changed(self) -> bool:
        """Whether a file must be written."""
        return self._findings_changed or self.info_changed or self.report is not None

    def forget(self, *, digests: bool) -> None:
        """Write all files again, because the folder was removed; with ``digests``, forget theirs, too."""
        self.info_changed, self._findings_changed = True, bool(self._findings)
        if digests:
            self._digests = {}

    def write_info(self) -> None:
        """Write run.json."""
        self._replace("run.json", self.info)
        self.info_changed = False

    def write_new_info(self) -> None:
        """Write run.json if it has changed."""
        if self.info_changed:
            self.write_info()

    def write_new_findings(self) -> None:
        """Write findings.json if there are other findings."""
        if self._findings_changed:
            self._replace("findings.json", {"findings": list(self._findings.values())})
            self._findings_changed = False

    def write_report(self) -> None:
        """Write the report of a fault, if there is one that is not on disk."""
        if self.report is not None:
            self._keep_earlier_report(self.report["attempt"])
            self._replace("blackbox.json", self.report)
            self.report = None

    def _keep_earlier_report(self, attempt: int) -> None:
        """Give the report and the kept step of an earlier attempt their own files."""
        path = self._run / "blackbox.json"
        try:
            earlier = read_json(path)
            of = None if earlier is None else earlier.get("attempt", 1)
        except RunError:
            path.replace(self._run / f"blackbox-damaged-{attempt}.json")
            of = None
        number = of if isinstance(of, int) and of < attempt else attempt - 1
        move_kept(self._run, self._kept, number)
        if of == number:
            self._replace(f"blackbox-{of:04d}.json", earlier)

    def _replace(self, name: str, value: Mapping[str, Any]) -> None:
        self._restore()
        data, digest = json_file(name, value)
        self._digests.pop(name, None)
        prepare(self._run, self._run / name, data, sync=self._fsync)()
        self._digests[name] = digest

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the files but run.json, which has them when the run is closed."""
        return {name: digest for name, digest in self._digests.items() if name != "run.json"}


def _key(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([finding[name] for name in ("rule", "kind", "tensor", "first_step", "attempt")])
