"""Draw docs/report.svg: the output of `make demo`, as a picture of a terminal.

    make demo | tee demo.txt; python docs/picture.py demo.txt

Needs rich, one of the development tools.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "report.svg"
STYLES = {
    r"\d (?:NaN|Inf)\b|\b(?:nan|inf)\b": "bold red",
    r"first (?:non-finite|exploding) gradients?": "bold yellow",
    r"^  ok\b": "bold green",
    r"^  FAILED\b": "bold red",
    r"^(?:Fault \d|The gradients|What was checked|Time per step).*": "bold cyan",
    r"^[─]+$": "dim",
    r"^… .*": "dim",
}
# system monospace fonts, so that viewing the picture loads nothing
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def main() -> None:
    """Draw the table and the first fault of the demo's output."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("The gradients"))
    stop = next(i for i, line in enumerate(lines) if line.startswith("Fault 2"))
    text = Text("\n".join(lines[start:stop]).rstrip())
    for pattern, style in STYLES.items():
        text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console = Console(record=True, width=96, file=io.StringIO())
    console.print(text, soft_wrap=True)
    picture = console.export_svg(title="make demo")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("font-family: Fira Code, monospace", f"font-family: {FONT}")
    PICTURE.write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
