"""Run operators in float64: a dispatch mode that casts their inputs, and casts inside the model."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from gradiometer.checks.exact_operators import EXACT
from gradiometer.checks.random_replay import ReplayError
from gradiometer.control.operations import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradiometer.control.step_copy import StepCopy

# dtypes of 8 bits stay: a cast to these is a quantization with scales of its own
WIDE: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_WIDEST: Final = frozenset(WIDE.values())
# not views, although their schemas say so: torch.tensor() ends with it
_NEW: Final = ("aten::lift_fresh",)
# these take elements of what may be a whole data set
_SELECT: Final = {f"aten::{name}" for name in ("index", "index_select", "gather", "take", "masked_select")}
# bytes of a tensor that is small
_SMALL: Final = 1 << 26
# these compute no gradients
_QUIET: Final = ("aten::_amp_update_scale_",)
_TORCH: Final = {"aten", "prim", "prims", "higher_order"}


class Lifting(TorchDispatchMode):
    """Casts the floating-point inputs of operators to float64, those that are complex to complex128.

    A cast to a narrower dtype gives float64, and so do factories. Views of narrower tensors stay views; the
    operator that reads one gets it in float64. An operator in place on a narrower tensor, which was there
    before, writes to a copy that is used in its place from then on: the tensor itself keeps its values.

    An operator that raises an error for float64 runs in a narrower dtype, and its results are cast.

    Args:
        kept: keeps what operators write in other dtypes, such as counters.
        dtypes: those in which an operator without float64 is tried, after that of autocast.

    Attributes:
        narrow: operators that ran in a narrower dtype, and that dtype.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: StepCopy, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow: dict[str, torch.dtype] = {}
        self._kept = kept
        self._dtypes = dtypes
        self._of_thread = threading.local()
        # copies of storages in float64, by storage and dtype; the storages are kept so that keys stay valid
        self._wide_storages: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        # a subclass with operators of its own calls others, which come here
        if any([kind not in {Tensor, torch.nn.Parameter, torch.nn.Buffer} for kind in types]):
            return NotImplemented
        name = _name(func)
        if getattr(func, "is_view", False) and name not in _NEW:
            return func(*args, **kwargs)
        # by the identity of the tensor that is written in place of it
        written: dict[int, Tensor] = {}

        def wide(x: Any, is_written: bool) -> Any:  # noqa: FBT001
            if isinstance(x, Tensor):
                y = self.wide(x, written=is_written)
                if is_written:
                    written[id(y)] = x
                return y
            return WIDE.get(x, x) if isinstance(x, torch.dtype) else x

        lifted, named = _mapped(func, args, kwargs, wide) if not self._selects(name, args) else (args, kwargs)
        self._kept.before(func, lifted, named)
        try:
            # of whole numbers, or of none: `torch.ones(2)`, or `torch.arange(3) / 3`
            has_default = not _is_random(func) and not _is_wide((lifted, named))
            with wide_default() if has_default else nullcontext():
                result = EXACT.get(name, func)(*lifted, **named)
        except (ReplayError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 whatever a library raises for float64
            result = self._in_own_dtype(func, args, kwargs, error)
        else:
            if getattr(func, "namespace", "aten") not in _TORCH:
                self.examine(name, result, (lifted, named))
        self._kept.after(result, lifted, named)

        def back(x: Any, _: bool) -> Any:  # noqa: FBT001
            if not isinstance(x, Tensor):
                return x
            return written[id(x)] if id(x) in written else x.to(WIDE.get(x.dtype, x.dtype))

        return _each(back, result, is_written=False)

    def wide(self, x: Tensor, *, written: bool = False) -> Tensor:
        """Return a tensor in float64; if it is written, or has been, always the same memory."""
        dtype = WIDE.get(x.dtype)
        if dtype is None:
            return x
        if x.layout != torch.strided or x.is_meta:
            return x.to(dtype)
        storage = x.untyped_storage()
        key = storage._cdata, x.dtype  # noqa: SLF001
        if key not in self._wide_storages:
            if not written:
                return x.to(dtype)
            flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
            self._wide_storages[key] = storage, flat.to(dtype)
            self._kept.after(self._wide_storages[key][1], (), {})
        return self._wide_storages[key][1].as_strided(x.shape, x.stride(), x.storage_offset())

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy in float64, which shares memory with other copies if tensors share memory.

        A small part of a large tensor has a copy of its own: such as a batch of a data set in memory.
        """
        own = x.numel() * x.element_size()
        shares = x.dtype in WIDE and (x.is_meta or x.untyped_storage().nbytes() <= max(4 * own, _SMALL))
        return self.wide(x, written=True).data if shares else x.to(WIDE.get(x.dtype, x.dtype), copy=True)

    def is_large(self, x: Tensor) -> bool:
        """Return whether a copy of a tensor may need much memory: then it is cast where it is read."""
        return x.numel() * x.element_size() > _SMALL

    @property
    def is_paused(self) -> bool:
        """Whether operators of this thread run as they are."""
        return getattr(self._of_thread, "is_paused", False)

    @property
    def is_on(self) -> bool:
        """Whether this thread runs the step, or its backward pass."""
        return any([mode is self for mode in _get_current_dispatch_mode_stack()])

    def pause(self, is_paused: bool) -> None:  # noqa: FBT001
        """Run operators of this thread as they are from now on, or no longer."""
        self._of_thread.is_paused = is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operators as they are in a block."""
        before = self.is_paused
        self.pause(True)
        try:
            yield
        finally:
            self.pause(before)

    def dtypes(self, device: torch.device) -> list[torch.dtype]:
        """Return the dtypes in which to try what has no float64: first those that it would have seen."""
        is_on = torch.is_autocast_enabled(device.type)
        likely = [torch.get_autocast_dtype(device.type)] if is_on else []
        return list(dict.fromkeys([*likely, *self._dtypes]))

    def examine(self, name: str, result: Any, inputs: Any) -> None:
        """Note an operator that took float64, but computed in float32: its results have no more digits."""
        outputs, given = (
            [x.detach() for x in tensors_in(values) if x.dtype == torch.float64 and not x.is_meta]
            for values in (result, inputs)
        )
        with self.paused():
            if all([_fits(x, torch.float32) for x in given]) or not all(
                [_fits(x, torch.float32) for x in outputs]
            ):
                return
            # masks, counts and quantized values fit, too
            is_short = [_fits(x, torch.bfloat16) or _fits(x, torch.float16) for x in outputs]
            if not all(is_short) and any([bool((x != x.round()).any()) for x in outputs]):
                self.narrow.setdefault(name, torch.float32)

    def _selects(self, name: str, args: Any) -> bool:
        """Return whether an operator only takes elements of a tensor that has not been written."""
        if name not in _SELECT or args[0].dtype not in WIDE or args[0].layout != torch.strided:
            return False
        return (args[0].untyped_storage()._cdata, args[0].dtype) not in self._wide_storages  # noqa: SLF001

    def _in_own_dtype(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run an operator that has no float64 in the first dtype in which it runs."""
        devices = [x.device for x in tensors_in((args, kwargs))]
        for dtype in self.dtypes(devices[0]) if devices else ():
            # by the identity of the narrower copy
            targets: dict[int, tuple[Tensor, Tensor]] = {}
            change = functools.partial(self._narrowed, dtype, targets)
            given, named = _mapped(func, args, kwargs, change)
            try:
                result = func(*given, **named)
            except Exception:  # noqa: BLE001, S112 the first error is raised
                continue
            for y, z in targets.values():
                y.copy_(z)
            if not _name(func).startswith(_QUIET):
                self.narrow.setdefault(_name(func), dtype)
            written = {key: y for key, (y, _) in targets.items()}
            return _each(lambda x, _, known=written: known.get(id(x), x), result, is_written=False)  # type: ignore[misc]
        raise error

    def _narrowed(
        self,
        dtype: torch.dtype,
        targets: dict[int, tuple[Tensor, Tensor]],
        x: Any,
        is_written: bool,  # noqa: FBT001
    ) -> Any:
        """Return an argument in a narrower dtype, in its own if it has one."""
        if not isinstance(x, Tensor):
            return x
        y = self.wide(x, written=is_written)
        if y.dtype not in _WIDEST:
            return x
        own = x.dtype if x.dtype in WIDE else dtype
        z = y.to(own if own.is_complex == y.is_complex() else torch.complex64)
        if is_written:
            targets[id(z)] = y, z
        return z


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else str(schema.name)


def _mapped(
    func: Any, args: Any, kwargs: Any, change: Callable[[Any, bool], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator, changed by a function of a value and whether it is written."""
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    writes = {x.name: x.alias_info is not None and x.alias_info.is_write for x in arguments}
    by_place = list(writes.values()) + [False] * len(args)
    return (
        tuple([_each(change, x, is_written=by_place[i]) for i, x in enumerate(args)]),
        {name: _each(change, x, is_written=writes.get(name, False)) for name, x in kwargs.items()},
    )


def _each(change: Callable[[Any, bool], Any], value: Any, *, is_written: bool) -> Any:
    if type(value) in {list, tuple}:
        return type(value)([_each(change, x, is_written=is_written) for x in value])
    return change(value, is_written)


def _is_wide(values: Any) -> bool:
    return any([x.dtype in _WIDEST for x in tensors_in(values)])


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@contextmanager
def wide_default() -> Iterator[None]:
    """Make float64 the default dtype in a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values are numbers of a dtype."""
    return bool(((x.to(dtype).double() == x) | x.isnan()).all())
