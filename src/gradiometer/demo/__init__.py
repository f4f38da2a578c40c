"""The demo: a small training run that is recorded, two faults that are named, and a page to look at.

``python -m gradiometer.demo`` runs it. Nothing else imports it.
"""

from gradiometer.demo.app import main

__all__ = [
    "main",
]
