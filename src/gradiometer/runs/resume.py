"""What earlier attempts have left in a folder, for the attempt that continues the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from gradiometer.runs.files import RunError
from gradiometer.runs.format import list_segments
from gradiometer.runs.info import catalog_of, read_findings, read_info
from gradiometer.runs.journal import journal_path, keep_damaged, list_journals, read_journal
from gradiometer.runs.open_segment import OpenSegment
from gradiometer.runs.segments import Segments

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger("gradiometer")


def earlier_info(run: Path) -> dict[str, Any]:
    """Return run.json, or nothing without one; a damaged one is kept under another name.

    Raise RunError if it is not that of a run, or of a later version.
    """
    path = run / "run.json"
    if not path.exists():
        return {}
    try:
        info = read_info(run)
        catalog_of(run, info)
    except RunError as error:
        if not error.reason:
            raise
        kept = path.with_name(f"run-damaged-{time.time_ns()}.json")
        path.replace(kept)
        _LOG.warning("%s. It is now %s, and the run goes on with a new one", error, kept.name)
        return {}
    return info


def earlier_findings(run: Path, attempt: int) -> list[dict[str, Any]]:
    """Return the findings up to an attempt; a damaged file is kept under another name."""
    try:
        return read_findings(run)
    except RunError as error:
        kept = run / f"findings-damaged-{attempt}.json"
        (run / "findings.json").replace(kept)
        _LOG.warning("%s. It is now %s, and the run goes on without earlier findings", error, kept.name)
        return []


def recover(run: Path, *, fsync: bool) -> None:
    """Write the steps in journals, which a killed process has left, to Parquet files."""
    for key in list_journals(run):
        journal = read_journal(run, *key)
        if journal is None or journal.is_unreadable:
            continue
        segments = Segments(run, list_segments(run))
        try:
            records = segments.without(key[0], journal.records)
        except RunError:
            continue  # its steps stay there, beside a damaged Parquet file
        if journal.catalog is not None and records:
            segment = OpenSegment(run, journal.catalog, key[0], segments.last_written(), fsync=fsync)
            for record in records:
                segment.add(record)
            segment.save()
        path = journal_path(run, *key)
        if journal.error is None:
            path.unlink(missing_ok=True)
        else:
            kept = keep_damaged(path).name
            _LOG.warning("%s. It is now %s, and the run goes on with the steps before", journal.error, kept)
