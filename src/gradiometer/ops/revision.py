"""The revision of the code that compiled graphs get from the ops: part of the key of every cached graph.

The caches of compiled graphs on disk know an op by its name and its arguments. They know neither the plain
operators that replaced a composite op, nor the shapes that a fake implementation returned. So each op that is
composite or returns tensors has the argument `REVISION`, a digest of the source of both.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from gradiometer.version import __version__

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

# the operators that replace ops, and the shapes of results, come from these alone
_PACKAGES: Final = ("columns", "ops")


def digest(root: Traversable) -> str:
    """Return a digest of the version and of the source of these packages, in a folder or in a zip file.

    Without source, as in an application of compiled files, it is that of the compiled files; if there are
    none either, as in a frozen application, it is that of the version alone.
    """
    found = blake2b(__version__.encode(), digest_size=8)
    for package in _PACKAGES:
        try:
            modules = {path.name: path for path in root.joinpath(package).iterdir()}
            for name in sorted(modules):
                if name.endswith((".py", ".pyc")):
                    found.update(f"\n{package}/{name}\n".encode())
                    found.update(modules[name].read_bytes())
        except (OSError, ValueError):
            continue
    return found.hexdigest()


# when the code is imported, and not when the first graph is compiled: its files may have changed by then
REVISION: Final = digest(files("gradiometer"))
"""16 hexadecimal digits."""
