"""The demo: a small recorded training run with two faults, and its report page.

``gradiometer demo`` or ``python -m gradiometer.demo`` runs it. In the package only the command line imports
it.
"""

from gradiometer.demo.app import main

__all__ = [
    "main",
]
