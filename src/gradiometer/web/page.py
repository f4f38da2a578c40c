"""Write the report page: one HTML file that holds one run or two, and opens offline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import secrets
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.runs import Run, compared, read_run
from gradiometer.version import __version__
from gradiometer.web.data import line_of, page_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gradiometer.runs.distances import Distances

MOST_NAMES: Final = 3  # of what differs first
MOST_DISTANCES: Final = 1000  # points of a line

# in this order; on the page they form one function, and the last lines of page.js start it
_SCRIPTS: Final = ("state", "cells", "rows", "map", "charts", "exponents", "lists", "link", "page")

# Only the script written here may run. The page loads nothing, except that a served page reloads its data.
_POLICY: Final = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def write_page(
    run: Run | Path | str, path: Path | str | None = None, *, other: Run | Path | str | None = None
) -> Path:
    """Write the report page of a run, or of two runs, and return its path.

    Args:
        run: a run, or its folder.
        path: the path of the page; by default ``report.html`` in the run's folder, or
            ``comparison.html`` with ``other``.
        other: another run, or its folder, to show on the same page.

    Raises:
        RunError: if there is no run to read.
        ImportError: without pyarrow; ``pip install 'gradiometer[monitor]'`` installs it.

    >>> from gradiometer.web import write_page
    >>> write_page("runs/mine")                                # doctest: +SKIP
    PosixPath('runs/mine/report.html')
    """
    runs = [one if isinstance(one, Run) else read_run(one) for one in (run, other) if one is not None]
    name = "report.html" if other is None else "comparison.html"
    target = runs[0].path / name if path is None else Path(path)
    page = document(*contents(runs))
    # replace atomically: a page is often rewritten while a browser has it open
    written = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        # exclusively, so that it follows no link
        with written.open("xb") as file:
            file.write(page)
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
    return target


def contents(runs: Sequence[Run]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a page of one or two runs, and its matrices by their id in the page."""
    pages = [page_of(run) for run in runs]
    values: dict[str, Any] = {"runs": [page.values for page in pages], "differ": None}
    if len(runs) == 2:
        found = compared(runs[0], runs[1])
        values["differ"] = {
            "same": found.same,
            "common": found.common,
            "step": found.step,
            "first": [d.name for d in found.first[:MOST_NAMES]],
            "more": max(0, len(found.first) - MOST_NAMES),
            "bits": "" if found.not_compared else found.verdict,
            "apart": found.apart if found.distances else "",
            "distances": None if found.distances is None else _distances(found.distances),
        }
    numbered = enumerate(page.matrices.items() for page in pages)
    return values, {f"{k}-{name}": code for k, matrices in numbered for name, code in matrices}


def _distances(found: Distances) -> dict[str, Any]:
    """Return the lines of the chart of distances: the gradient to look at first, its limit, and others."""
    steps, one = torch.tensor(found.steps, device="cpu"), found.departure
    name, bold, limit, others = found.lines()

    def line(values: Tensor) -> dict[str, list[Any]]:
        # NaN, where a run has none, is not drawn
        return line_of(steps, values, torch.zeros(len(steps), dtype=torch.bool, device="cpu"), MOST_DISTANCES)

    return {
        "name": name,
        "step": one.step if one is not None and one.lasts else None,
        "line": line(bold),
        "limit": line(limit),
        "others": [line(found.grads[:, i]) for i in others],
    }


def document(values: dict[str, Any], matrices: dict[str, str]) -> bytes:
    """Return the page of some contents; with the key ``"live"`` it asks its server for changes."""
    script = _text([f"{name}.js" for name in _SCRIPTS])
    script = _script(f'"use strict";\n(() => {{\n{script}}})();')
    style = f"\n{_text(['page.css'])}"
    connect = "'self'" if "live" in values else "'none'"
    titles = " and ".join(page["title"] for page in values["runs"])
    parts = {
        "script": script,
        "policy": _POLICY.format(script=_hash(script), style=_hash(style), connect=connect),
        "version": html.escape(__version__),
        "title": html.escape(f"{titles} \u2013 gradiometer"),
        "css": style,
        "data": to_json(values),
        "matrices": "\n".join(
            f'<script type="application/octet-stream" id="{name}">{code}</script>'
            for name, code in matrices.items()
        ),
    }
    # one pass over the template, so that inserted text is not substituted again
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text(["page.html"]))
    return page.encode("utf-8", "replace")


def _text(names: Sequence[str]) -> str:
    folder = resources.files("gradiometer.web")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _script(text: str) -> str:
    """Return a script that is safe between two tags, with line ends as the HTML parser normalizes them."""
    text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def to_json(values: dict[str, Any]) -> str:
    """Return JSON in ASCII, with characters that have a meaning in HTML escaped."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
