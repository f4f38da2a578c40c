"""Define the package's ops, and choose between the kernels and eager PyTorch.

The ops are defined through `torch.library.Library`, which costs two to three times less per call with many
tensors than the ``custom_op`` decorator.

The caches of compiled graphs on disk know an op by its name and its arguments. They know neither the plain
operators that replaced a composite op, nor the shapes that a fake implementation returned. So each op that is
composite or returns tensors has the argument `REVISION`, a digest of the source of both.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from gradiometer.ops import dispatch
from gradiometer.ops.dispatch import without_autocast
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.resources.abc import Traversable

Args = ParamSpec("Args")
Result = TypeVar("Result")

_LIBRARY: Final = torch.library.Library("gradiometer", "DEF")
# the operators that replace ops, and the shapes of results, come from these alone
_PACKAGES: Final = ("columns", "ops")


def digest(root: Traversable) -> str:
    """Return a digest of the version and of the source of `_PACKAGES`, in a folder or in a zip file.

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


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    composite: bool = False,
    any_strides: bool = False,
) -> None:
    """Define an op that is not differentiable, and is opaque to the compiler unless it is composite.

    An op that returns tensors is functional, so the compiler removes it from the graph if its result is
    unused. One that changes an argument stays in the graph. An op that is composite or returns tensors gets
    one more argument, ``str revision=''``, which no function here receives: callers pass `REVISION`.

    Args:
        schema: name, arguments and results.
        implementation: for tensors on any device, such as the result of `by_device`.
        fake: returns results without values; not needed for an op that returns nothing.
        composite: whether the implementation only calls other operators, which replace the op in a graph.
        any_strides: whether Inductor may give the arguments other strides than eager code does. Otherwise it
            copies some of them, such as the channels_last result of a convolution.
    """
    arguments, results = schema.split(" -> ")
    name = arguments.partition("(")[0]
    if composite or results != "()":
        arguments = f"{arguments[:-1]}, str revision='')"
    _LIBRARY.define(f"{arguments} -> {results}", tags=(torch.Tag.flexible_layout,) if any_strides else ())
    if composite:
        _LIBRARY.impl(name, _without_revision(implementation), "CompositeImplicitAutograd")
        return
    _LIBRARY.impl(name, _without_revision(implementation), "CompositeExplicitAutograd")
    # autograd passes the call on and records nothing
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    fake = _without_revision(fake or (lambda *_: None))
    torch.library.register_fake(f"gradiometer::{name}", fake, lib=_LIBRARY)


def _without_revision(function: Callable[..., Result]) -> Callable[..., Result]:
    # the dispatcher leaves out trailing arguments that have their default values
    return lambda *args: function(*(args[:-1] if args and isinstance(args[-1], str) else args))


def by_device(reference: Callable[Args, Result], kernels: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a function that calls one of two implementations; it does not need the dispatcher.

    ``reference`` measures in eager PyTorch; its first argument is a tensor, or tensors of one device.
    ``kernels`` does the same by launching Triton kernels, on a device that is then the current one.
    """

    def run(*args: Args.args, **options: Args.kwargs) -> Result:
        first: Any = args[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            with torch.no_grad(), without_autocast(device):
                return run(*args, **options)
        if not dispatch.uses_kernels(device):
            return reference(*args, **options)
        with dispatch.launching_on(device):
            return kernels(*args, **options)

    return run
