"""How scripts of this package are named in commands, and how they start in a separate process."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

# the folder that this package is imported from
ROOT = Path(__file__).resolve().parent.parent


def parser(module: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser with the module's command as its usage, described by the docstring's first line."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])


def command_line(module: str, argv: list[str] | None = None) -> str:
    """Return this run's command, to print. ``argv``: the arguments of ``main``; None for ``sys.argv``."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def command(module: str, *arguments: object) -> list[str]:
    """Return the command that starts a module of this package. It needs `environment`."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(*sources: Path) -> dict[str, str]:
    """Return this process's environment, with ``sources`` and then this package on Python's path.

    With it, a command works in every working directory.
    """
    paths = [*map(str, sources), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
