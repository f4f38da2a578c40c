"""Callbacks that add a `Monitor` to a training framework; one module per framework.

Importing this package does not import a framework.
"""

__all__: list[str] = []
