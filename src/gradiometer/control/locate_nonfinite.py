"""locate_nonfinite: name the operation that made the first NaN or Inf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import nn

from gradiometer.control.nonfinite_search import NonfiniteSearch
from gradiometer.control.step_copy import StepCopy, find_parts
from gradiometer.inputs import unwrapped
from gradiometer.stats import outside_of_a_graph, repeating

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gradiometer.control.located import Located


class Block:
    """A ``with`` block in which `locate_nonfinite` looks for the operation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._search: NonfiniteSearch | None = None

    def __enter__(self) -> Located:
        """Begin to look at all operations of this thread; return what the end of the block fills in."""
        outside_of_a_graph("locate_nonfinite")
        if self._search is not None:
            msg = "locate_nonfinite: this block was entered already; call locate_nonfinite(model) for another"
            raise RuntimeError(msg)
        self._search = NonfiniteSearch([("", unwrapped(self._model))])
        return self._search.__enter__().result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and fill in the result; an exception propagates."""
        if self._search is not None:
            self._search.__exit__(kind, error, trace)


@overload
def locate_nonfinite(model: nn.Module, /) -> Block: ...  # type: ignore[overload-overlap] # a module alone
@overload
def locate_nonfinite(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Located: ...
def locate_nonfinite(step: Any, /, *args: Any, **kwargs: Any) -> Block | Located:
    """Name the operation that made the first NaN or Inf, in forward, backward or optimizer. Runs eagerly.

    With a model alone, returns a context for a ``with`` statement, around a forward and backward::

        with gm.locate_nonfinite(model) as found:
            loss_fn(model(x), y).backward()
        print(found)

    With a function, runs ``step(*args, **kwargs)`` once in such a context, without ``torch.compile``, and
    then restores what the step has changed: all memory that operations have overwritten, such as parameters,
    buffers and gradients; the state of optimizers, schedulers and scalers; the random numbers of Python,
    NumPy and torch. These objects are found through the arguments of the step, its closure, the globals that
    it names, and the object that it is a method of. Not restored are counters and other plain values of
    yours, files, and what other processes do. Methods of a `Monitor` do nothing meanwhile, also if
    `gradiometer.watch` calls them: a repeat is not a step of the run.

    An operation that makes NaN or Inf from finite numbers is only the cause if its values reach the loss, the
    gradient of a parameter, a parameter or a buffer; without a backward, the output of the model or another
    result counts, too. So -Inf in a mask is no fault, but a softmax of a row that is masked completely is.

    Operations of other threads are not seen. Inside, everything runs eagerly, and every operation waits for
    the device: on a CPU, a step takes 2 to 10 times as long as in eager mode.

    Args:
        step: a model, compiled or not; or a function, compiled or not, that makes a training step.
        args: arguments of the function.
        kwargs: keyword arguments of the function.

    Returns:
        A `Located`, false if nothing was found; ``print`` shows it. For a model, a context that yields one,
        which is filled in at the end of the block.

    Raises:
        TypeError: for anything but a module or a function.
        RuntimeError: inside a compiled function. In a ``with`` block, exceptions propagate, and `Located`
            names the operation that raised. With a function, an exception propagates if nothing was found.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 2)
    >>> _ = torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    >>> with gm.locate_nonfinite(model) as found:
    ...     model(torch.ones(1, 2)).log().sum().backward()
    >>> found.operation, found.direction, found.reason
    ('aten.log', 'forward', 'made 2 -Inf from finite inputs')
    """
    outside_of_a_graph("locate_nonfinite")
    if isinstance(step, nn.Module) and not args and not kwargs:
        return Block(step)
    if not callable(step):
        msg = "locate_nonfinite: expected a module, or a function that makes a step, "
        raise TypeError(msg + f"got {type(step).__name__}")
    parts = find_parts(step, args, kwargs)
    copy = StepCopy(parts)
    search = NonfiniteSearch(_roots(parts), copy)
    output = None
    with repeating(copy.parameters):
        try:
            with search:
                output = step(*args, **kwargs)  # a result counts while it is in use
        except Exception:
            if not search.result:
                raise
        finally:
            del output
            copy.restore()
    return search.result


def _roots(parts: dict[str, Any]) -> list[tuple[str, nn.Module]]:
    """Return the models that are not part of another, with a prefix for names if there are several."""
    models = {name: unwrapped(x) for name, x in parts.items() if isinstance(x, nn.Module)}
    models = {name: x for name, x in models.items() if any([True for _ in x.parameters()])}
    inner = {id(part) for x in models.values() for part in x.modules() if part is not x}
    roots: dict[int, tuple[str, nn.Module]] = {}
    for name, x in models.items():
        if id(x) not in inner:
            roots.setdefault(id(x), (name, x))
    return [("" if len(roots) == 1 else f"{name}.", x) for name, x in roots.values()]
