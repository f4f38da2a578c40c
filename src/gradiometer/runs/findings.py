"""Read the findings of a run: those of its file, and those that later attempts have not superseded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules import Finding, checked
from gradiometer.runs.files import unfit
from gradiometer.runs.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FOREVER: Final = 2**63 - 1


def load_findings(
    run: Path,
    closed_with: str | None,
    ends: Mapping[int, int],
    last: int,
    check: Callable[[], object],
) -> list[Finding]:
    """Return the findings, each up to where its attempt was superseded.

    Args:
        run: the folder.
        closed_with: the digest of findings.json, if it is known.
        ends: the first superseded step of each attempt; it comes from names of files.
        last: findings of later attempts are left out.
        check: called before a finding is left out or shortened; it checks those files.

    Raises:
        RunError: if they cannot be read.
    """
    # a later attempt that continues a finding replaces it
    known: dict[tuple[Any, ...], Finding] = {}
    for values in read_findings(run, closed_with):
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


def read_findings(path: Path, closed_with: str | None = None) -> list[dict[str, Any]]:
    """Return the findings of findings.json; each finding has the attempt that saw it last."""
    content = read_json(path / "findings.json", closed_with)
    if content is None:
        return []
    found = content.get("findings")
    keys = {"attempt", "rule", "kind", "tensor", "first_step", "last_step", "value", "threshold"}
    steps = ("attempt", "first_step", "last_step")
    if (
        not isinstance(found, list)
        or not all([isinstance(x, dict) and keys <= x.keys() for x in found])
        or not all([isinstance(x[name], int) for x in found for name in steps])
    ):
        raise unfit(path / "findings.json", f"{content!r:.40}")
    try:
        for values in found:
            finding_of(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise unfit(path / "findings.json", repr(error)) from None
    return found


def finding_of(values: Mapping[str, Any]) -> Finding:
    """Return a finding of findings.json; a TypeError or another error if it is not one."""
    numbers = {name: float(values[name]) for name in ("value", "threshold")}
    return checked(Finding.from_dict({k: x for k, x in values.items() if k != "attempt"} | numbers))
