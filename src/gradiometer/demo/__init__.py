"""The demo: a small recorded training run with two faults, and its report page.

``python -m gradiometer.demo`` runs it. Nothing else imports it.
"""

from gradiometer.demo.app import main

__all__ = [
    "main",
]
