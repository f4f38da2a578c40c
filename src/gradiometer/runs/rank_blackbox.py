"""The black box of one of several ranks, as a file beside the job's run record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gradiometer.runs.directory import prepare
from gradiometer.runs.files import stamp
from gradiometer.runs.json_files import json_file
from gradiometer.runs.kept_step import kept_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding


class RankBlackbox:
    """A sink that writes only faults, to ``blackbox.rank-00005.json``.

    Args:
        run_dir: the job's folder, created if missing.
        rank: the rank whose faults it writes.
    """

    name = "rank_box"

    def __init__(self, run_dir: Path | str, rank: int) -> None:
        self.path = Path(run_dir) / f"blackbox.rank-{rank:05d}.json"
        self._kept = kept_path(Path(run_dir), rank)
        self._earlier = stamp(self._kept)

    def start(self, info: RunInfo) -> None:
        """Do nothing."""

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Do nothing."""

    def fault(self, fault: Fault) -> None:
        """Write the report, replacing an earlier one; remove the kept step of an earlier attempt."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._earlier is not None and stamp(self._kept) == self._earlier:
            self._kept.unlink(missing_ok=True)
        data, _ = json_file(self.path.name, fault.to_dict() | {"time": time.time()})
        prepare(self.path.parent, self.path, data, sync=True)()

    def close(self) -> None:
        """Do nothing."""
