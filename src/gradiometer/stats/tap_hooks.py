"""The hooks of taps on modules: of what a module returns, and of what it adds to its input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.inputs import describe, is_dtensor, layout
from gradiometer.stats import grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradiometer.stats.grouping import GroupRule
    from gradiometer.stats.running_taps import Taps

_LOG = logging.getLogger("gradiometer")
# modules whose output has its channels in dimension 1
_CHANNELS_FIRST: Final = (
    nn.modules.conv._ConvNd,  # noqa: SLF001 the base of all convolutions has no public name
    nn.modules.batchnorm._NormBase,  # noqa: SLF001 as above
    nn.GroupNorm,
)
# modules whose output has them in the last dimension, however many dimensions it has
_CHANNELS_LAST: Final = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


class OutputHook:
    """The forward hook of one module."""

    def __init__(self, taps: Taps, row: int) -> None:
        self.taps: Taps | None = taps
        self.row = row

    def __getstate__(self) -> dict[str, Any]:
        # the taps refer to the whole model; if it is copied or saved, they set this again
        return {"taps": None, "row": self.row}

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with its first floating-point tensor measured."""
        del args
        if isinstance(output, Tensor):
            return self._measured(output, module)
        if isinstance(output, (tuple, list)):
            place = next((i for i, x in enumerate(output) if is_measurable(x)), None)
            if place is None:
                return output
            items = [*output[:place], self._measured(output[place], module), *output[place + 1 :]]
            if isinstance(output, list) or not hasattr(output, "_fields"):
                return type(output)(items)
            return type(output)(*items)
        if isinstance(output, Mapping):
            key = next((key for key, x in output.items() if is_measurable(x)), None)
            if key is not None and isinstance(output, MutableMapping):
                # its type may have more than its items
                output[key] = self._measured(output[key], module)
            return output
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            names = [field.name for field in dataclasses.fields(output)]
            name = next((name for name in names if is_measurable(getattr(output, name))), None)
            if name is not None:
                x = getattr(output, name)
                measured = self._measured(x, module)
                if measured is not x:
                    return dataclasses.replace(output, **{name: measured})
        return output

    def _measured(self, x: Tensor, module: nn.Module) -> Tensor:
        if self.taps is None or not is_measurable(x):
            return x
        is_first = isinstance(module, _CHANNELS_FIRST) or x.dim() > 3
        dim = 1 if is_first and x.dim() > 1 and not isinstance(module, _CHANNELS_LAST) else -1
        return self.taps.measure(x, self.row, dim)


class ResidualHook:
    """The forward hook of one block, which compares its output with its input."""

    def __init__(self, taps: Taps, row: int, name: str) -> None:
        self.taps: Taps | None = taps
        self.row, self.name = row, name
        self._is_refused = False

    def __getstate__(self) -> dict[str, Any]:
        # as for the other hook
        return {**vars(self), "taps": None}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Measure the first floating-point tensor of the output with the input's shape."""
        del module
        if self.taps is None or not self.taps.is_due():
            return
        x = next((x for x in (*args, *kwargs.values()) if _is_real(x)), None)
        out = next((y for y in _items(output) if _is_real(y) and x is not None and y.shape == x.shape), None)
        reason: str | None = "no argument is a floating-point tensor"
        if x is not None and out is None:
            reason = "nothing that it returns has the shape of its input"
        elif x is not None and x is out:
            reason = "it returns its input itself, which it may have changed in place"
        elif x is not None and out is not None:
            reason = self.taps.refusal(x) or self.taps.refusal(out)
            if reason is None and x.numel():
                self.taps.measure_rows(_residual_columns(x, out), self.row)
        if reason is not None and not torch.compiler.is_compiling() and not self._is_refused:
            self._is_refused = True
            _LOG.warning("Taps: the residual of %r is not measured: %s", self.name, reason)


def _residual_columns(x: Tensor, out: Tensor) -> Tensor:
    """Return the columns of one call, ``(1, C) float64`` in the order of `RESIDUAL`; 0 if not finite."""
    x, out = x.detach(), out.detach()
    wide = [y.float() if y.itemsize < 4 else y for y in (x, out)]
    norms = [torch.linalg.vector_norm(y, dtype=torch.float64) for y in (*wide, wide[1] - wide[0])]
    squares = torch.stack([torch.full_like(norms[0], x.numel()), *[norm * norm for norm in norms]])
    return torch.where(squares.isfinite().all(), squares, 0.0).unsqueeze(0)


def _is_real(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _items(output: object) -> Iterable[Any]:
    """Return the items of what a module returns, one level deep."""
    if isinstance(output, (tuple, list)):
        return output
    if isinstance(output, Mapping):
        return output.values()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [output]


def is_measurable(x: object) -> bool:
    """Return whether a tap measures values like this one."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def selected(modules: Mapping[str, list[Any]], group: str, rule: GroupRule | type[nn.Module]) -> list[str]:
    """Return the names of the modules that a rule selects."""
    if isinstance(rule, type):
        found = [name for name, same in modules.items() if any(isinstance(x, rule) for x in same)]
    else:
        names = tuple(modules)
        found = [names[row] for row in grouping.members(names, group, rule, None)]
    if not found:
        msg = f"Taps: {group!r} selects no module of the model with {describe(rule)}; "
        raise ValueError(msg + "see [name for name, _ in model.named_modules()]")
    return found


def checked_heads(attention: Mapping[str, int] | None) -> dict[str, int]:
    """Return the number of heads of each call, by name; raise TypeError for anything else."""
    if attention is None:
        return {}
    fits = isinstance(attention, Mapping) and all(
        [isinstance(name, str) and type(count) is int and count > 0 for name, count in attention.items()]
    )
    if not fits:
        msg = f"Taps: attention must map names of calls to numbers of heads, got {describe(attention)}; "
        raise TypeError(msg + 'pass for example {"blocks.0.attn": 4}')
    return dict(attention)


def refusal(x: object, cursor: Tensor) -> str | None:
    """Return why a value cannot be measured, or None."""
    if not isinstance(x, Tensor):
        return f"is {describe(x)}; pass a tensor"
    if is_dtensor(type(x)):
        return "is a DTensor, of which this rank has only a part; pass its to_local()"
    if not is_measurable(x):
        return f"has the dtype {x.dtype}; only floating-point and complex tensors are measured"
    if layout(x) != torch.strided or x.is_nested:
        return f"has the layout {layout(x)}; only strided tensors are measured"
    if x.device != cursor.device:
        return f"is on {x.device}, but the model's first parameter on {cursor.device}, when Taps was created"
    return None


def run_eagerly(*hooks: Callable[..., Any]) -> None:
    """Let hooks run in eager code where `Module.compile` would compile each by itself.

    The gradient of a tensor that such a graph only passes on does not go through the graph, and the hooks of
    a model note which frame called it. They are still traced in the graph of a caller.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame  # noqa: PLC0415 it has no public name

        action = eval_frame._FrameAction.SKIP  # noqa: SLF001 as above
        for hook in hooks:
            code = hook.__code__
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action, action))  # noqa: SLF001


run_eagerly(OutputHook.__call__)
