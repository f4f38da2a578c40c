"""Taps: measure activations and their gradients inside the step, where the model computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import ATTENTION, CURSOR_SIZE, RESIDUAL, Cursor
from gradiometer.inputs import describe, modules_by_name, unwrapped
from gradiometer.stats import running_taps
from gradiometer.stats.activation_stats import ActivationStats
from gradiometer.stats.float64_module import Float64Module
from gradiometer.stats.named_stats import stats_of
from gradiometer.stats.repeats import keep_in_repeats
from gradiometer.stats.tap_hooks import (
    OutputHook,
    ResidualHook,
    checked_heads,
    refusal,
    run_eagerly,
    selected,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from typing import Self

    from gradiometer.columns import Schema
    from gradiometer.stats.grouping import GroupRule
    from gradiometer.stats.named_stats import NamedStats


# what follows the name of a call or a block in the names of its rows
HEAD = ".head"
RESIDUAL_ROW = ".residual"


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
        attention: name of a call of `tap_attention` with ``weights`` -> its number of heads. Each head has
            a row, such as ``blocks.1.attn.head3``.
        residual: group -> rule, as for ``patterns``, for the blocks of a residual stream, such as
            ``{"blocks": r"^blocks\.\d+$"}``. The output of each is compared with its input: the first
            floating-point tensor of its arguments, and the first one that it returns with that shape. Each
            has a row, such as ``blocks.1.residual``. Blocks without such tensors, or that return the input
            itself, changed in place or not, are not measured, and eager code logs that once.

    Attributes:
        names: the names of the N rows: ``<module>.out``, those of ``names``, of heads, and of blocks.
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
    of_heads: Tensor | None
    of_blocks: Tensor | None
    cursor: Tensor

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, GroupRule | type[nn.Module]] | None = None,
        *,
        names: Iterable[str] = (),
        every: int = 1,
        fused: bool | None = None,
        attention: Mapping[str, int] | None = None,
        residual: Mapping[str, GroupRule | type[nn.Module]] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"Taps: pass a torch.nn.Module, got {describe(model)}")
        model = unwrapped(model)
        modules = modules_by_name(model)
        modules.pop("", None)
        self.groups: dict[str, tuple[str, ...]] = {}
        tapped = self._selected("patterns", patterns, modules, ".out")
        blocks = self._selected("residual", residual, modules, RESIDUAL_ROW)
        given = [names] if isinstance(names, str) else list(names)
        self.heads = checked_heads(attention)
        of_heads = [f"{name}{HEAD}{i}" for name, count in self.heads.items() for i in range(count)]
        activations = [*[f"{name}.out" for name in tapped], *given]
        self.names = (*activations, *of_heads, *[name + RESIDUAL_ROW for name in blocks])
        if not self.names:
            msg = 'Taps: nothing to measure; pass patterns, such as {"mlp": r"\\.mlp$"}, or the names '
            raise ValueError(msg + "of calls of gm.tap")
        twice = [name for name in self.names if self.names.count(name) > 1]
        if twice:
            raise ValueError(f"Taps: the name {twice[0]!r} appears twice")
        device = next((x.device for x in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        for name in ("values", "grads"):
            self.register_buffer(name, ops.new_store(len(activations), device), persistent=False)
        # of which rows the other stores are, and what they hold
        self._first_rows = len(activations), len(activations) + len(of_heads), len(self.names)
        for name, schema, size in (
            ("of_heads", ATTENTION, len(of_heads)),
            ("of_blocks", RESIDUAL, len(blocks)),
        ):
            store = torch.zeros((size, schema.width), dtype=torch.float64, device=device) if size else None
            self.register_buffer(name, store, persistent=False)
        self.register_buffer("cursor", torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=device))
        # two, so that a forward and a backward pass can run beside each other
        self._orders = ops.StreamOrder(), ops.StreamOrder()
        self.configure_(every=every)
        # a number that changes would recompile, so this is decided once
        self._fused = False if fused is None and every != 1 else fused
        # in a list, since it is not a part of this module
        self._model = [model]
        outputs = [OutputHook(self, row) for row in range(len(tapped))]
        residuals = [ResidualHook(self, row, name) for row, name in enumerate(blocks)]
        self._hooks: list[OutputHook | ResidualHook] = [*outputs, *residuals]
        self._handles = [
            modules[name][0].register_forward_hook(hook, with_kwargs=isinstance(hook, ResidualHook))
            for name, hook in zip([*tapped, *blocks], self._hooks, strict=True)
        ]
        # copies of the whole model find the taps here; its parts do not refer to them in a copy
        self._handles.append(model.register_state_dict_pre_hook(self._do_nothing))
        self.rows = {name: row for row, name in enumerate(given, start=len(tapped))}
        first = 0
        for name, count in self.heads.items():
            self.rows[f"{name}{HEAD}0"] = first
            first += count
        if self.rows:
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
        rows = self._first_rows[0]
        names = self.names[:rows]
        with self.in_order():
            both = torch.cat([self.values[:rows], self.grads[:rows]])
        return ActivationStats((*names, *[f"{name}.grad" for name in names]), both)

    def attention_stats(self) -> NamedStats[Any]:
        """Return what was measured of attention heads since the last `advance`, as `stats` does."""
        first, end, _ = self._first_rows
        return stats_of(ATTENTION, self.names[first:end], self.columns_of(ATTENTION)[first:end])

    def residual_stats(self) -> NamedStats[Any]:
        """Return what was measured of blocks since the last `advance`, as `stats` does."""
        _, first, end = self._first_rows
        return stats_of(RESIDUAL, self.names[first:end], self.columns_of(RESIDUAL)[first:end])

    def measures(self, schema: Schema) -> bool:
        """Return whether rows of heads, or of blocks, are measured."""
        return (self.of_heads if schema is ATTENTION else self.of_blocks) is not None

    def columns_of(self, schema: Schema) -> Tensor:
        """Return the columns of heads, or of blocks, in the rows of all names, ``(N, C)``; 0 in others."""
        store = self.of_heads if schema is ATTENTION else self.of_blocks
        before, end = self._first_rows[:2] if schema is ATTENTION else self._first_rows[1:]
        with self.in_order():
            if store is None:
                return torch.zeros((end, schema.width), dtype=torch.float64, device=self.cursor.device)
            return nn.functional.pad(store, (0, 0, before, self._first_rows[2] - end))

    def advance(self) -> None:
        """End the step: clear what was measured, and count the step. Inside or outside of a compiled step."""
        # without no_grad, in which torch cannot load an exported block that returns nothing
        with self.in_order():
            self.values.zero_()
            self.grads.zero_()
            for store in (self.of_heads, self.of_blocks):
                if store is not None:
                    store.zero_()
            self.cursor[Cursor.STEP : Cursor.STEP + 1].add_(1)

    def in_order(self) -> AbstractContextManager[None]:
        """Return a context for a use of the buffers, as that of a recorder; all methods use it."""
        return self._orders[0].on(self.cursor.device, self._orders[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        super()._apply(fn, recurse)
        rows = self._first_rows[0]
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
        reason = self.refusal(x)
        if reason is not None:
            raise TypeError(f"{what} {reason}")

    def refusal(self, x: object) -> str | None:
        """Return why a value cannot be measured, or None."""
        return refusal(x, self.cursor)

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

    def measure_rows(self, columns: Tensor, row: int) -> None:
        """Merge columns of `ATTENTION` or `RESIDUAL` into adjacent rows of their store, if a step is due."""
        schema = ATTENTION if columns.shape[1] == ATTENTION.width else RESIDUAL
        store = self.of_heads if schema is ATTENTION else self.of_blocks
        if store is not None:
            with self._orders[0].on(self.cursor.device):
                ops.merge_rows_(columns, store, self.cursor, row, schema.num_sums)

    def _selected(
        self,
        option: str,
        rules: Mapping[str, GroupRule | type[nn.Module]] | None,
        modules: Mapping[str, list[Any]],
        end: str,
    ) -> list[str]:
        """Return the modules that rules select, in the order of the model, and note the groups of rows."""
        if rules is not None and not isinstance(rules, Mapping):
            msg = f"Taps: {option} must map names of groups to rules, got {describe(rules)}; "
            raise TypeError(msg + 'pass for example {"mlp": r"\\.mlp$"} or {"linear": torch.nn.Linear}')
        names: dict[str, None] = {}
        for group, rule in (rules or {}).items():
            found = selected(modules, group, rule)
            names |= dict.fromkeys(found)
            own = [name + end for name in found]
            if option == "patterns":
                self.groups[group] = (*own, *[f"{name}.grad" for name in own])
        return [name for name in modules if name in names]


run_eagerly(Taps._begin, Taps._end)  # noqa: SLF001 of this file
