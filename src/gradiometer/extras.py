"""Optional dependencies: whether they are installed, and their import with an actionable error."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def is_installed(module: str) -> bool:
    """Return whether a module can be found; packages that contain it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # raised by an import hook or a half-loaded package
        return False


def require(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package and return it.

    Args:
        module: the module, such as ``"pyarrow.parquet"``.
        extra: the extra of this package that installs it.
        what: the feature that needs it, for the message.

    Raises:
        ImportError: if it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise  # the package is installed, but one of its own dependencies is missing
        msg = f"{what} needs {package}, which is not installed: pip install 'gradiometer[{extra}]'"
        raise ImportError(msg, name=error.name) from None
