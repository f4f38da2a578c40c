"""Read the findings of a run, without those that later attempts have superseded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gradiometer.runs.format import finding_of, read_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gradiometer.rules import Finding

FOREVER: Final = 2**63 - 1


def load_findings(
    run: Path,
    info: Mapping[str, Any],
    closed_with: str | None,
    ends: Mapping[int, int],
    last: int,
    check: Callable[[], object],
) -> list[Finding]:
    """Return the findings, each up to where its attempt was superseded.

    Args:
        run: the folder.
        info: the content of run.json.
        closed_with: the digest of findings.json, if it is known.
        ends: the first superseded step of each attempt; it comes from names of files.
        last: findings of later attempts are left out.
        check: called before a finding is left out or shortened; it checks those files.

    Raises:
        RunError: if they cannot be read.
    """
    # a later attempt that continues a finding replaces it
    known: dict[tuple[Any, ...], Finding] = {}
    for values in read_findings(run, info, closed_with):
        if values["attempt"] > last:
            continue
        end = ends.get(values["attempt"], FOREVER)
        if values["last_step"] >= end:
            check()
        if values["first_step"] < end:
            found = finding_of(values)
            if found.last_step >= end:
                count = min(found.count, end - found.first_step)
                worst = found.worst_step if (found.worst_step or 0) < end else None
                found = replace(found, last_step=end - 1, count=count, worst_step=worst)
            known[found.key, found.first_step] = found
    return list(known.values())
