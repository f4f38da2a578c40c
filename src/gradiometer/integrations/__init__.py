"""Callbacks for training frameworks, a module for each: a `Monitor` in a loop that is not yours.

Importing this imports no framework.
"""

__all__: list[str] = []
