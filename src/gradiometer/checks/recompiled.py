"""Compile a step again, without dropout or with the random numbers of eager mode, beside the compiled one.

Both are other programs than the one that trains. They are kept apart from it by their backend, so a step that
was compiled before is not compiled again afterwards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

# functions of dropout, and the position and name of its probability
_ATTENTION = functional.scaled_dot_product_attention
_DROPOUTS: dict[Any, tuple[int, str]] = {
    **{
        getattr(functional, name): (1, "p")
        for name in (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
        )
    },
    **{getattr(torch, name): (1, "p") for name in ("dropout", "alpha_dropout", "feature_dropout")},
    _ATTENTION: (4, "dropout_p"),
}
# backends, whether they have dropout, and what they are changed to
_known: list[tuple[Any, bool, Callable[..., Any]]] = []


def _without(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a function with dropout of 0."""
    if function not in _DROPOUTS:
        return args, kwargs
    place, name = _DROPOUTS[function]
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


class WithoutDropout(TorchFunctionMode):
    """Sets the probabilities of dropout to 0 in eager mode, also those of attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, without dropout."""
        args, kwargs = _without(func, args, kwargs or {})
        return func(*args, **kwargs)


def more_recompilations() -> AbstractContextManager[Any]:
    """Return a context with a higher limit of recompilation, at which code runs eagerly without an error."""
    config: Any = torch._dynamo.config  # noqa: SLF001
    names = ("recompile_limit", "accumulated_recompile_limit")
    patched: AbstractContextManager[Any] = config.patch({name: 2 * getattr(config, name) for name in names})
    return patched


@contextmanager
def recompiled(backend: Callable[..., Any], *, dropout: bool) -> Iterator[None]:
    """Compile all compiled functions again in a block: without dropout, or with eager's random numbers.

    ``backend``: the one that they are compiled with, which keeps its options.
    """
    with (
        more_recompilations(),
        torch.compiler.set_stance("default", force_backend=_changed(backend, dropout)),
    ):
        yield


def _changed(backend: Any, dropout: bool) -> Callable[..., Any]:  # noqa: FBT001
    """Return a changed backend, the same one for each call: what it has compiled is used again."""
    for known, *key, changed in _known:
        if known == backend and key == [dropout]:
            return changed
    is_inductor = type(backend).__name__ == "_TorchCompileInductorWrapper"

    def without(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for part in [x for x in graph.modules() if isinstance(x, torch.fx.GraphModule)]:
            for node in part.graph.nodes:
                node.args, node.kwargs = _without(node.target, node.args, node.kwargs)
            part.recompile()
        return backend(graph, inputs)

    def fallback(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if not is_inductor:
            return backend(graph, inputs)
        from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 slow to import

        return compile_fx(graph, inputs, config_patches={**backend.config, "fallback_random": True})

    _known.append((backend, dropout, fallback if dropout else without))
    return _known[-1][-1]
