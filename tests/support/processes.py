"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gradiometer as gm

SOURCE = str(Path(gm.__file__).parents[1])
PATH = {"PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parents[1])])}
"""The environment in which the package and these modules are found."""


def python(*arguments, **environment):
    """Run Python with these arguments and variables, and return the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | PATH | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
