"""The command line, ``gradiometer`` or ``python -m gradiometer``.

Its input is the folders of runs; its output is tables, JSON and exit codes. In the package only ``__main__``
imports it.
"""

from gradiometer.cli.app import Exit, main

__all__ = [
    "Exit",
    "main",
]
