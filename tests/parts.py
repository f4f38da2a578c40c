"""Run parts of the suite one after the other, even if one fails, and print a line for each.

    python tests/parts.py plain interpreted ranks       the parts of `make test`
    python tests/parts.py lint plain interpreted ranks  the parts of `make check`

The exit code is 1 if a part failed. `tests/matrix.py` runs the same parts with other versions of torch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
# minutes on an idle machine with two cores
MINUTES = {"lint": 1, "plain": 7, "interpreted": 2, "executed": 1, "ranks": 4}
OUTCOMES = ("passed", "failed", "skipped")
HEADER = ("part", *OUTCOMES, "seconds", "result")
# pytest's last line: "=== 3 failed, 120 passed, 2 skipped, 1 error in 61.20s (0:01:01) ==="
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s")
COLOR = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class Part:
    """One part of the suite: the outcome of its tests."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def row(self) -> tuple[str, ...]:
        counts = (str(self.counts.get(outcome, 0)) if self.counts else "-" for outcome in OUTCOMES)
        result = "ok" if self.ok else f"FAILED {self.note}".strip()
        return (self.name, *counts, f"{self.seconds:.0f}", result)


def make(
    name: str, variables: Sequence[str] = (), extra: Mapping[str, str] | None = None, root: Path = ROOT
) -> Part:
    """Run one part by its target in the Makefile; show its output, and count its tests."""
    part = Part(name)
    target = name if name == "lint" else f"run-{name}"
    color = {"PY_COLORS": "1"} if sys.stdout.isatty() else {}
    start = time.monotonic()
    command = ["make", "--no-print-directory", "-C", root, *variables, target]
    with subprocess.Popen(
        command,
        env=os.environ | color | (extra or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if closing := CLOSING.match(COLOR.sub("", line)):
                part.counts = outcomes(closing[1])
    part.seconds = time.monotonic() - start
    part.ok = process.returncode == 0
    if part.ok and name != "lint" and not part.counts.get("passed"):
        part.ok, part.note = False, "no test ran"
    return part


def outcomes(closing: str) -> dict[str, int]:
    """Return pytest's counts by outcome. An error in a fixture or a file is a failure."""
    counts = {"failed": 0}
    for part in closing.split(", "):
        number, name = part.split()
        outcome = "failed" if name in ("error", "errors") else name
        counts[outcome] = counts.get(outcome, 0) + int(number)
    return counts


def table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def duration(names: Sequence[str]) -> str:
    if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
        return "2,000 examples per property take minutes plain and hours interpreted"
    return f"about {sum(MINUTES.get(name, 0) for name in names)} minutes on two cores"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="+", metavar="PART", help=f"of {', '.join(MINUTES)}")
    names = parser.parse_args(arguments).names
    print(f"{', '.join(names)}: {duration(names)}", flush=True)
    parts = []
    for name in names:
        print(f"\n{name}", flush=True)
        parts.append(make(name, root=root))
    print(f"\n{table([HEADER, *(part.row() for part in parts)])}")
    return 0 if all(part.ok for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
