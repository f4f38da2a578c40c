"""Read the findings of a run, as its file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradiometer.rules import Finding, checked
from gradiometer.runs.files import unfit
from gradiometer.runs.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


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
