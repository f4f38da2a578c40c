"""Write the report page: one HTML file that holds a run and opens offline."""

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
from typing import Any, Final

from gradiometer.extras import require
from gradiometer.runs import Run, read_run
from gradiometer.version import __version__
from gradiometer.web.data import page_of

__all__ = ["write_page"]

# in this order; on the page they form one function
_SCRIPTS: Final = ("state", "cells", "map", "charts", "lists", "page")

# The page loads nothing. Only the scripts written here may run. Plotly sets inline styles while it draws.
_POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'none'; base-uri 'none'; form-action 'none'"
)


def write_page(run: Run | Path | str, path: Path | str | None = None) -> Path:
    """Write the report page of a run and return its path.

    Args:
        run: a run, or its folder.
        path: the path of the page; by default ``report.html`` in the run's folder.

    Raises:
        RunError: if there is no run to read.
        ImportError: without pyarrow or plotly; ``pip install 'gradiometer[monitor]'`` installs both.

    >>> from gradiometer.web import write_page
    >>> write_page("runs/mine")                                # doctest: +SKIP
    PosixPath('runs/mine/report.html')
    """
    plotly = require("plotly.offline", "monitor", "The report page")
    run = run if isinstance(run, Run) else read_run(run)
    target = run.path / "report.html" if path is None else Path(path)
    values, matrices = page_of(run)
    ours = "\n".join(_text(f"{name}.js") for name in _SCRIPTS)
    scripts = {
        "plotly": _script(plotly.get_plotlyjs()),
        "script": _script(f'"use strict";\n(() => {{\n{ours}}})();'),
    }
    parts = {
        **scripts,
        "policy": _POLICY.format(scripts=" ".join(_hash(script) for script in scripts.values())),
        "version": html.escape(__version__),
        "title": html.escape(f"{values['title']} \u2013 gradiometer"),
        "css": _text("page.css"),
        "data": _json(values),
        "matrices": "\n".join(
            f'<script type="application/octet-stream" id="{name}">{code}</script>'
            for name, code in matrices.items()
        ),
    }
    # one pass over the template, so that inserted text is not substituted again
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))
    # replace atomically: a page is often rewritten while a browser has it open
    written = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        # exclusively, so that it follows no link
        with written.open("xb") as file:
            file.write(page.encode("utf-8", "replace"))
        written.replace(target)
    finally:
        written.unlink(missing_ok=True)
    return target


def _text(name: str) -> str:
    return resources.files("gradiometer.web").joinpath(name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """Return a script that is safe between two tags, with line ends as the HTML parser normalizes them."""
    text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(values: dict[str, Any]) -> str:
    """Return JSON in ASCII, with characters that have a meaning in HTML escaped."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
