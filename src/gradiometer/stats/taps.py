"""Taps: measure activations and their gradients inside the step, where the model computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, Cursor
from gradiometer.inputs import describe, is_dtensor, layout, modules_by_name, unwrapped
from gradiometer.stats import grouping, running_taps
from gradiometer.stats.activation_stats import ActivationStats
from gradiometer.stats.float64_module import Float64Module
from gradiometer.stats.repeats import keep_in_repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Self

    from gradiometer.stats.grouping import GroupRule

# modules whose output has its channels in dimension 1
_CHANNELS_FIRST: Final = (
    nn.modules.conv._ConvNd,  # noqa: SLF001 the base of all convolutions has no public name
    nn.modules.batchnorm._NormBase,  # noqa: SLF001 as above
    nn.GroupNorm,
)
# modules whose output has them in the last dimension, however many dimensions it has
_CHANNELS_LAST: Final = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


def tap(x: Tensor, name: str, *, channel_dim: int = -1) -> Tensor:
    """Return ``x``, and have its value and its gradient measured under this name.

    Call it inside a model, compiled or not. It does nothing unless a `Taps` of that model lists the name, and
    the model is in training mode. Several calls with one name in a step merge into one row.

    The call belongs to the model whose forward pass runs in this thread, and of models that call one another
    to the innermost one that has a `Taps` with this name. All `Taps` of that model with this name measure it.

    Args:
        x: floating-point or complex, of any shape and strides.
        name: one of the ``names`` of `Taps`, such as ``blocks.3.attn.scores``.
        channel_dim: the dimension of the channels, for the share of those that are always zero.

    Returns:
        ``x`` itself; a view of it if it is a leaf that requires a gradient.

    Raises:
        TypeError: if ``x`` cannot be measured, or is on another device than the model's first parameter.
        IndexError: if ``channel_dim`` is not a dimension of ``x``.

    >>> import torch, gradiometer as gm
    >>> class Model(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return gm.tap(super().forward(x), "hidden").relu()
    >>> model = Model(4, 2)
    >>> taps = gm.Taps(model, names=["hidden"])
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> list(taps.stats().materialize())
    ['hidden', 'hidden.grad']
    """
    for taps, row in running_taps.taps_of(name):
        x = taps.measure(x, row, channel_dim)
    return x


class Taps(Float64Module):
    r"""Measures activations of a model, and their gradients, in every training step.

    It places a forward hook on each selected module and measures the module's output; of a tuple, list, dict
    or dataclass, the first floating-point tensor. In a compiled function the measurement is an op in the
    graph: no graph break, no recompilation, no wait. Create it before the model is compiled: a function that
    is compiled already sees neither new hooks nor `remove` until ``torch.compiler.reset()``. A compiled
    function that takes several models, with and without taps, needs
    ``torch._dynamo.config.skip_nnmodule_hook_guards = False``.

    A module's output is measured wherever the module is called, also as a part of another model. Several
    `Taps` of one model, as of a notebook cell that runs twice, all measure, at the cost of each: `remove`
    those that are no longer needed. They are freed with the model.

    A copy of the model, by `copy.deepcopy` or ``torch.save``, has `Taps` of its own. A copy of a part of the
    model has none.

    Channels are those of the last dimension, and of dimension 1 for convolutions, batch and group norms, and
    for outputs of four or more dimensions of other modules than linear layers, layer norms and embeddings.

    Calls of one module in a step merge, until `advance`. An activation that activation checkpointing computes
    a second time is measured once. Nothing is measured while the model is in evaluation mode.

    A step is measured if ``every`` divides its number. The device decides, so a change of ``every`` by
    `configure_` recompiles nothing, and a step that is not measured costs one launch per tap that returns at
    once.

    On several streams, values wait for each other, and so do gradients; not for graphs, compiled or replayed.

    Args:
        model: a module.
        patterns: group -> rule for the modules in it: a regular expression searched in the module's name, a
            predicate of the name, a collection of names, or a class of modules such as ``torch.nn.Linear``.
        names: the names of calls of `tap` in the model.
        every: measure the steps that are multiples of this; 0 for none.
        fused: whether a compiled graph gets the sums as plain operators, which Inductor fuses with the
            operators beside them, so that the activation is not read again. They are computed in steps that
            are not measured, too. False: one opaque op. None, the default: True for fp32 and fp64 on a CPU
            if ``every=1``, else False. The columns are the same but for the last places of sums. Values of
            other dtypes than fp64, fp32 and bf16, or without 64 adjacent elements whose number does not
            depend on a dynamic size, are always measured by the op.

    Attributes:
        names: the names of the N activations: ``<module>.out`` and those of ``names``.
        groups: for each group of ``patterns``, the names of its activations and of their gradients, for
            `ActivationStats.group`.
        rows: the row of each name of a call of `tap`; empty after `remove`.

    Raises:
        TypeError: if the model is not a module.
        ValueError: if a pattern selects no module, for a duplicate name, without any name, or for ``every``
            out of range.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> taps = gm.Taps(model, {"linear": torch.nn.Linear})
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> report = taps.stats().materialize()
    >>> report.names
    ('0.out', '2.out', '0.out.grad', '2.out.grad')
    >>> report["2.out.grad"].rms
    1.0
    >>> taps.advance()  # the end of the step
    """

    values: Tensor
    grads: Tensor
    cursor: Tensor

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, GroupRule | type[nn.Module]] | None = None,
        *,
        names: Iterable[str] = (),
        every: int = 1,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"Taps: pass a torch.nn.Module, got {describe(model)}")
        model = unwrapped(model)
        modules = modules_by_name(model)
        modules.pop("", None)
        selected: dict[str, None] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        if patterns is not None and not isinstance(patterns, Mapping):
            msg = f"Taps: patterns must map names of groups to rules, got {describe(patterns)}; "
            raise TypeError(msg + 'pass for example {"mlp": r"\\.mlp$"} or {"linear": torch.nn.Linear}')
        for group, rule in (patterns or {}).items():
            found = _selected(modules, group, rule)
            selected |= dict.fromkeys(found)
            own = [f"{name}.out" for name in found]
            self.groups[group] = (*own, *[f"{name}.grad" for name in own])
        # in the order of the model
        tapped = [name for name in modules if name in selected]
        given = [names] if isinstance(names, str) else list(names)
        self.names = (*[f"{name}.out" for name in tapped], *given)
        if not self.names:
            msg = 'Taps: nothing to measure; pass patterns, such as {"mlp": r"\\.mlp$"}, or the names '
            raise ValueError(msg + "of calls of gm.tap")
        twice = [name for name in self.names if self.names.count(name) > 1]
        if twice:
            raise ValueError(f"Taps: the name {twice[0]!r} appears twice")
        device = next((x.device for x in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        for name in ("values", "grads"):
            self.register_buffer(name, ops.new_store(len(self.names), device), persistent=False)
        self.register_buffer("cursor", torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=device))
        # two, so that a forward and a backward pass can run beside each other
        self._orders = ops.StreamOrder(), ops.StreamOrder()
        self.configure_(every=every)
        # a number that changes would recompile, so this is decided once
        self._fused = False if fused is None and every != 1 else fused
        # in a list, since it is not a part of this module
        self._model = [model]
        self._hooks = [_Hook(self, row) for row in range(len(tapped))]
        pairs = zip(tapped, self._hooks, strict=True)
        self._handles = [modules[name][0].register_forward_hook(hook) for name, hook in pairs]
        # copies of the whole model find the taps here; its parts do not refer to them in a copy
        self._handles.append(model.register_state_dict_pre_hook(self._do_nothing))
        self.rows = {name: row for row, name in enumerate(given, start=len(tapped))}
        if given:
            self._handles.append(model.register_forward_pre_hook(self._begin))
            self._handles.append(model.register_forward_hook(self._end, always_call=True))
        keep_in_repeats(self)

    def configure_(self, *, every: int | None = None, step: int | None = None) -> Self:
        """Change the cadence or the current step's number, without recompilation.

        Raises:
            ValueError: for anything but an integer, at least 0.
        """
        given = {Cursor.EVERY: ("every", every), Cursor.STEP: ("step", step)}
        for name, value in given.values():
            if value is not None and (type(value) is not int or not 0 <= value < 2**53):
                raise ValueError(f"Taps({name}={describe(value)}): {name} must be an integer, at least 0")
        with self.in_order():
            for place, (_, value) in given.items():
                if value is not None:
                    self.cursor[place].fill_(value)
        return self

    def stats(self) -> ActivationStats:
        """Return what was measured since the last `advance`; inside or outside of a compiled step."""
        names = (*self.names, *[f"{name}.grad" for name in self.names])
        rows = len(self.names)
        with self.in_order():
            return ActivationStats(names, torch.cat([self.values[:rows], self.grads[:rows]]))

    def advance(self) -> None:
        """End the step: clear what was measured, and count the step. Inside or outside of a compiled step."""
        # without no_grad, in which torch cannot load an exported block that returns nothing
        with self.in_order():
            self.values.zero_()
            self.grads.zero_()
            self.cursor[Cursor.STEP : Cursor.STEP + 1].add_(1)

    def in_order(self) -> AbstractContextManager[None]:
        """Return a context for a use of the buffers, as that of a recorder; all methods use it."""
        return self._orders[0].on(self.cursor.device, self._orders[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        super()._apply(fn, recurse)
        rows = len(self.names)
        for name in ("values", "grads"):
            moved = getattr(self, name)
            store = ops.new_store(rows, moved.device)
            if store.shape != moved.shape:
                # on the new device the kernels need scratch, or need none
                store[:rows].copy_(moved[:rows])
                setattr(self, name, store)
        return self

    def remove(self) -> None:
        """Remove the hooks, and let calls of `tap` with these names do nothing; again has no effect."""
        for handle in self._handles:
            handle.remove()
        self.rows.clear()
        running_taps.forget(self)

    @property
    def model(self) -> nn.Module:
        """The model, without the wrappers of torch.compile and data parallelism."""
        return self._model[0]

    def _begin(self, *_: Any) -> None:
        running_taps.begin(self)

    def _end(self, *_: Any) -> None:
        running_taps.end(self)

    def _do_nothing(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.taps = self

    def repeated(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """Return the parameters of the model, and the buffers that its steps write."""
        return self.model.parameters(), self.buffers()

    def is_due(self) -> bool:
        """Return whether a value may be measured now. In graphs and with kernels only the device knows.

        Inside the backward pass nothing is measured: activation checkpointing computes values again there.
        """
        if not self._model[0].training:
            return False
        if torch.compiler.is_compiling():
            return True
        return not running_taps.is_in_backward() and ops.may_measure(self.cursor)

    def check(self, x: object, what: str) -> None:
        """Raise a TypeError that begins with ``what``, unless the value can be measured."""
        reason = _refusal(x, self.cursor)
        if reason is not None:
            raise TypeError(f"{what} {reason}")

    def measure(self, x: Tensor, row: int, channel_dim: int) -> Tensor:
        """Return ``x``, measured as in `tap`, in a row of `names`."""
        if not self._model[0].training:
            return x
        self.check(x, f"tap: {self.names[row]!r}")
        if not -x.dim() <= channel_dim < max(x.dim(), 1) and x.dim():
            msg = f"tap: {self.names[row]!r} has {x.dim()} dimensions, so channel_dim={channel_dim} is none"
            raise IndexError(msg)
        if x.is_leaf and x.requires_grad:
            # a hook of a leaf would stay there
            x = x.view_as(x)
        # an exported program may run without a compiler
        fused = False if ops.is_exporting() else self._fused
        ops.tap(x, self.values, self.grads, self.cursor, row, channel_dim, fused=fused, orders=self._orders)
        return x


class _Hook:
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
            place = next((i for i, x in enumerate(output) if _is_measurable(x)), None)
            if place is None:
                return output
            items = [*output[:place], self._measured(output[place], module), *output[place + 1 :]]
            if isinstance(output, list) or not hasattr(output, "_fields"):
                return type(output)(items)
            return type(output)(*items)
        if isinstance(output, Mapping):
            key = next((key for key, x in output.items() if _is_measurable(x)), None)
            if key is not None and isinstance(output, MutableMapping):
                # its type may have more than its items
                output[key] = self._measured(output[key], module)
            return output
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            names = [field.name for field in dataclasses.fields(output)]
            name = next((name for name in names if _is_measurable(getattr(output, name))), None)
            if name is not None:
                x = getattr(output, name)
                measured = self._measured(x, module)
                if measured is not x:
                    return dataclasses.replace(output, **{name: measured})
        return output

    def _measured(self, x: Tensor, module: nn.Module) -> Tensor:
        if self.taps is None or not _is_measurable(x):
            return x
        is_first = isinstance(module, _CHANNELS_FIRST) or x.dim() > 3
        dim = 1 if is_first and x.dim() > 1 and not isinstance(module, _CHANNELS_LAST) else -1
        return self.taps.measure(x, self.row, dim)


def _is_measurable(x: object) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _selected(modules: Mapping[str, list[Any]], group: str, rule: GroupRule | type[nn.Module]) -> list[str]:
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


def _refusal(x: object, cursor: Tensor) -> str | None:
    """Return why a value cannot be measured, or None."""
    if not isinstance(x, Tensor):
        return f"is {describe(x)}; pass a tensor"
    if is_dtensor(type(x)):
        return "is a DTensor, of which this rank has only a part; pass its to_local()"
    if not _is_measurable(x):
        return f"has the dtype {x.dtype}; only floating-point and complex tensors are measured"
    if layout(x) != torch.strided or x.is_nested:
        return f"has the layout {layout(x)}; only strided tensors are measured"
    if x.device != cursor.device:
        return f"is on {x.device}, but the model's first parameter on {cursor.device}, when Taps was created"
    return None


with suppress(ImportError, AttributeError):
    # `Module.compile` compiles the hooks of a module each by itself. The gradient of a tensor that such a
    # graph only passes on does not go through the graph, so `_Hook` runs eagerly there, and the hooks of a
    # model note which frame called it. They are still traced in the graph of a caller.
    from torch._C._dynamo import eval_frame

    for _hook in (_Hook.__call__, Taps._begin, Taps._end):  # noqa: SLF001
        eval_frame.set_code_exec_strategy(
            _hook.__code__,
            eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),  # noqa: SLF001
        )
