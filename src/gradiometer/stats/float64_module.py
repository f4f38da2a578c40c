"""Modules whose state keeps its dtype, such as float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["Float64Module"]


class Float64Module(nn.Module):
    """A module whose buffers, usually in float64, keep their dtypes when its owner is cast.

    Casts are meant for weights.
    """

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(*args, **kwargs)
        # with assign=True the buffers are the checkpoint's own tensors, which may have been cast
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != dtypes[name]:
                setattr(self, name, buffer.to(dtypes[name]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        def keep_dtype(buffer: Tensor) -> Tensor:
            applied = fn(buffer)
            return applied if applied.dtype == buffer.dtype else buffer.to(applied.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self
