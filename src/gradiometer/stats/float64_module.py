"""Modules whose state keeps its dtype, such as float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self


class Float64Module(nn.Module):
    """A module whose buffers, usually in float64, keep their dtypes when its owner casts its weights."""

    def _unfit(self, name: str, value: Tensor) -> str:
        """Return what is wrong with a value of a buffer, which is in float64 on the CPU; empty if nothing is.

        A subclass overrides this to refuse values that would never leave its state again, such as NaN.
        """
        del name, value
        return ""

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # of all modules before any of them has loaded something
        for path, module in self.named_modules(prefix=prefix.removesuffix(".")):
            if isinstance(module, Float64Module):
                module._check_state(state_dict, f"{path}." if path else "")  # noqa: SLF001 of the same class
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        # with assign=True the buffers are the checkpoint's own tensors, which may have been cast
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != dtypes[name]:
                setattr(self, name, buffer.to(dtypes[name]))

    def _check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            value = state_dict.get(prefix + name)
            # torch refuses the others
            if isinstance(value, Tensor) and value.shape == buffer.shape and not value.is_meta:
                if value.is_complex() and not buffer.is_complex():
                    reason = f"because it is {value.dtype}"
                else:
                    reason = self._unfit(name, value.detach().to("cpu", torch.float64))
                if reason:
                    msg = f"gm.{type(self).__name__}.load_state_dict: {prefix + name!r} cannot be loaded, "
                    raise ValueError(f"{msg}{reason}; load another checkpoint, or begin with a new module")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        def keep_dtype(buffer: Tensor) -> Tensor:
            applied = fn(buffer)
            return applied if applied.dtype == buffer.dtype else buffer.to(applied.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self


def first_unfit(
    values: Tensor, least: float, most: float, what: str, names: Sequence[str] = (), *, or_nan: bool = False
) -> str:
    """Return a text about the first value that is not from ``least`` to ``most``; empty without one.

    ``values`` are in float64 on the CPU; ``names`` are those of the tensors that they belong to, if any.
    """
    fits = (values >= least) & (values <= most)
    if or_nan:
        fits |= values.isnan()
    if bool(fits.all()):
        return ""
    place = int((~fits).flatten().nonzero()[0])
    of = f" of {names[place]!r}" if names else ""
    return f"because {what}{of} is {values.flatten()[place].item():g}"
