"""The command line, ``gradiometer`` or ``python -m gradiometer``.

Runs come in by their folders; tables, JSON and exit codes go out. Nothing else imports it.
"""

from gradiometer.cli.app import Exit, main

__all__ = [
    "Exit",
    "main",
]
