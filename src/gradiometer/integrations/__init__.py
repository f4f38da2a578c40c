"""`watch` and callbacks that add a `Monitor` to a loop or a training framework; one module per framework.

Importing this package does not import a framework.
"""

from gradiometer.integrations.loop import watch

__all__ = [
    "watch",
]
