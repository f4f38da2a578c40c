"""What the clip modules with a factor per tensor have in common."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import spread, take
from gradiometer.control.adaptive_clip import AdaptiveClip
from gradiometer.distributed import Ranks
from gradiometer.inputs import check_names, has_float64, named_parameters

if TYPE_CHECKING:
    from gradiometer.inputs import Named, Parameters


class TensorwiseClip(AdaptiveClip):
    """A clip module with a row per tensor; a tensor without a gradient has factor 1 and changes nothing.

    Attributes:
        names: T names, one per row.
        key: ``(1,) float64``, a buffer: a hash of the names, which a loaded checkpoint has to have.
    """

    key: Tensor

    def __init__(self, source: Parameters | Ranks, device: Any, *settings: Any) -> None:
        kind = type(self).__name__
        if isinstance(source, Ranks):
            names, home = source.names, source.device
        else:
            names, tensors = named_parameters(source, kind)
            check_names(names, kind)
            devices = [x.device for x in tensors if has_float64(x.device)]
            home = next((x for x in devices if x.type != "cpu"), torch.device("cpu"))
        device = home if device is None else device
        hashed = zlib.crc32(repr(names).encode())
        super().__init__(len(names), device, hashed, *settings)
        self.names, self._hash = names, hashed
        self.register_buffer("key", self._key(torch.float64).to(device))

    def check(self, parameters: Named, ranks: Ranks | None, order: float, what: str) -> None:
        """Reject names that this module does not have, and norms of other orders than 2."""
        self.check_order(order, what)
        for names in (parameters.names, parameters.names if ranks is None else ranks.names):
            if names != self.names:
                self._rows(names, what)

    def check_order(self, order: float, what: str) -> None:
        """Reject norms of other orders than 2."""
        if order != 2.0:
            raise ValueError(f"{what}: norm_type must be 2 with gm.{type(self).__name__}, got {order:g}")

    def _rows(self, names: tuple[str, ...], what: str) -> list[int]:
        rows = {name: row for row, name in enumerate(self.names)}
        unknown = [name for name in names if name not in rows]
        if unknown:
            kind = f"gm.{type(self).__name__}"
            raise ValueError(
                f"{what}: {unknown[0]!r} is not among the {len(rows)} tensors that {kind} was created with; "
                "pass the same model or mapping to both (model.parameters() has no names), or, if the ranks "
                f"hold different layers, create it with {kind}(gm.Ranks(model))"
            )
        return [rows[name] for name in names]

    def _spread(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        """Return the columns in the rows of this module, ``(T, C) float64``; zeros for other tensors."""
        self._check_device(columns)
        if names == self.names:
            return columns
        rows = self._rows(names, type(self).__name__)
        return spread(columns, rows, len(self.names))

    def _gathered(self, names: tuple[str, ...], factors: Tensor) -> Tensor:
        if names == self.names:
            return factors
        return take(factors, self._rows(names, type(self).__name__))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        key = state_dict.get(f"{prefix}key")
        # a checkpoint may have been cast
        if isinstance(key, Tensor) and not key.is_meta and not torch.equal(key.cpu(), self._key(key.dtype)):
            kind, own = type(self).__name__, f" {prefix.rstrip('.')!r}" if prefix else ""
            msg = f"gm.{kind}{own} was saved with other tensors; create it with the same model"
            args[-1].append(msg)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _key(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor([float(self._hash)], dtype=torch.float64, device="cpu").to(dtype)
