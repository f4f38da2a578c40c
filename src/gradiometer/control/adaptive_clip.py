"""Clipping that adapts to the norms of earlier steps or of the weights, decided on the device.

A module is passed in place of ``max_norm``. Its state is in buffers, and only norms that are merged over the
ranks change it, so that all ranks make the same decisions, bit for bit.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor

from gradiometer import ops
from gradiometer.control.scale import is_watched
from gradiometer.distributed import StateDigest
from gradiometer.inputs import describe
from gradiometer.stats import Float64Module, TensorStats, first_unfit

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Named
    from gradiometer.stats import Norms

_LOW_BITS: Final = 0xFFFFFFFF
# what the arguments of the modules have to be
_KINDS: Final = {
    "z_threshold": "a positive finite number",
    "decay": "a number in [0, 1)",
    "warmup_steps": "a positive integer",
    "max_norm": "a non-negative number, or math.inf for no limit",
    "max_ratio": "a positive finite number",
    "eps": "a positive finite number",
    "unitwise": "True or False",
}


class AdaptiveClip(Float64Module):
    """What all clip modules have: a record of what they did, and a digest by which ranks compare them.

    Attributes:
        record: ``(3, N) float64``, a buffer: the factors of the last step, the numbers of steps with a
            gradient that is not 0, and the numbers of those in which it was clipped. N is 1, or the number
            of tensors.
    """

    needs_weights: ClassVar[bool] = False
    names: tuple[str, ...] = ()
    record: Tensor

    def __init__(self, size: int, device: torch.device | str | int | None, *settings: Any) -> None:
        super().__init__()
        # never 0-d: compiled graphs of torch 2.11 and 2.13 lose writes into a 0-d float64 tensor on the CPU
        factor = torch.ones((1, size), dtype=torch.float64, device=device)
        self.register_buffer(
            "record", torch.cat([factor, torch.zeros_like(factor), torch.zeros_like(factor)])
        )
        self._settings = zlib.crc32(repr((type(self).__name__, *settings)).encode())

    @property
    def factor(self) -> Tensor:
        """The factor of the last step, float64 from 0 to 1; 1 if nothing was clipped."""
        return self._recorded(0)

    @property
    def n_steps(self) -> Tensor:
        """The number of steps with a gradient that is not 0, float64."""
        return self._recorded(1)

    @property
    def n_clipped(self) -> Tensor:
        """The number of steps in which the gradient was clipped, float64."""
        return self._recorded(2)

    @property
    def clip_fraction(self) -> Tensor:
        """The clipped fraction of all steps so far, of all tensors, 0-d float64; 0 without a step."""
        _, steps, clipped = self.record.unbind()
        return clipped.sum() / steps.sum().clamp(min=1.0)

    def _unfit(self, name: str, value: Tensor) -> str:
        """Refuse a record that no steps leave behind."""
        if name != "record":
            return ""
        factor, steps, clipped = value.unbind()
        return (
            first_unfit(factor, 0.0, 1.0, "the last factor", self.names)
            or first_unfit(steps, 0.0, math.inf, "the number of steps", self.names)
            or first_unfit(clipped, 0.0, math.inf, "the number of clipped steps", self.names)
        )

    def check(self, parameters: Named, ranks: Ranks | None, order: float, what: str) -> None:
        """Reject what cannot be clipped, before anything is measured.

        Args:
            parameters: all parameters, with or without gradients.
            ranks: over which the statistics will be merged.
            order: of the norm.
            what: the caller, for messages.
        """
        del parameters, ranks
        self.check_order(order, what)

    def check_order(self, order: float, what: str) -> None:
        """Reject norms of an order that this module does not use."""

    def decide(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        order: float,
        norms: Callable[[], Norms],
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the factors of these rows, 0-d or ``(len(names),) float64``, and update the state.

        Args:
            names: the rows of the gradients.
            columns: ``(len(names), C) float64``, merged over the ranks.
            order: of the norms; the columns hold those of order 2.
            norms: returns the norms of all rows together.
            weights: the same columns of the weights, if this module `needs_weights`.
        """
        raise NotImplementedError

    def digest(self) -> StateDigest:
        """Return a number that differs between ranks if their modules would decide differently."""
        # halves of float64 bits: a sum of integers is exact, so its order does not matter
        bits = [x.view(torch.int64) for x in self._state()]
        halves = [half for x in bits for half in ((x >> 32) & _LOW_BITS, x & _LOW_BITS)]
        number = torch.full((1,), self._settings, dtype=torch.int64, device=self.record.device)
        total = torch.cat([number, *halves]).sum().to(torch.float64)
        return StateDigest(total, f"gm.{type(self).__name__}")

    def _uses_kernel(self, columns: Tensor) -> bool:
        """Return whether one kernel decides; a kernel assumes that buffers are contiguous."""
        return (
            not is_watched()
            and ops.uses_kernels(columns.device)
            and all([x.is_contiguous() for x in self.buffers()])
        )

    def _state(self) -> list[Tensor]:
        """Return the buffers that decisions depend on, each with one dimension."""
        return []

    def _recorded(self, row: int) -> Tensor:
        return self.record[row].clone()

    def _note(self, factor: Tensor, steps: Tensor | float, clipped: Tensor) -> None:
        """Record the factors of a step, and add to both counts; ``(N,)`` each."""
        last, n_steps, n_clipped = self.record.unbind()
        last.copy_(factor)
        n_steps.add_(steps)
        n_clipped.add_(clipped)

    def _check_device(self, columns: Tensor) -> None:
        here, there = self.record.device, columns.device
        if here != there:
            msg = f"gm.{type(self).__name__}: the statistics are on {there}, but this module is on {here}; "
            raise ValueError(msg + f"move it with .to({str(there)!r}), or create it with device=")


def is_on_host(device: torch.device) -> bool:
    """Return whether the host itself computes on this device, so that reading a number is no wait."""
    return device.type == "cpu" and not is_watched() and not ops.uses_kernels(device)


def stats_given(stats: Any, what: str) -> TensorStats:
    """Return the stats.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(stats, TensorStats):
        msg = f"{what}: expected the TensorStats that collect_grads returns, got {type(stats).__name__}"
        raise TypeError(msg)
    return stats


def require(ok: bool, what: str, *, or_zero: bool = False, **argument: Any) -> None:  # noqa: FBT001
    """Raise a ValueError about an argument, which is passed by its name, unless ``ok``."""
    if not ok:
        ((name, value),) = argument.items()
        kind = _KINDS[name] if not or_zero else _KINDS[name].replace("positive", "non-negative")
        raise ValueError(f"{what}: {name} must be {kind}, got {describe(value)}")
