"""Clipping that adapts to the norms of earlier steps or of the weights, decided on the device.

A module is passed in place of ``max_norm``. Its state is in buffers, and only norms that are merged over the
ranks change it, so that all ranks make the same decisions, bit for bit.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer import ops
from gradiometer.columns import spread, take
from gradiometer.control.scale import is_watched
from gradiometer.distributed import Ranks, StateDigest
from gradiometer.inputs import check_names, describe, has_float64, is_limit, named_parameters
from gradiometer.stats import Float64Module, TensorStats, first_unfit, norms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gradiometer.inputs import Named, Parameters
    from gradiometer.stats import Norms

_LOW_BITS: Final = 0xFFFFFFFF


class Gradients(NamedTuple):
    """The statistics of a step by which a module clips.

    ``names``: of the rows. ``columns``: ``(len(names), C) float64``, merged over the ranks. ``order``: of the
    norms; the columns hold those of order 2. ``norms``: returns the norms of all rows together. ``weights``:
    the same columns of the weights, if the module `needs_weights`.
    """

    names: tuple[str, ...]
    columns: Tensor
    order: float
    norms: Callable[[], Norms]
    weights: Tensor | None = None

    @classmethod
    def of(cls, stats: TensorStats, order: float = 2.0, weights: Tensor | None = None) -> Gradients:
        """Return those of collected statistics."""
        return cls(stats.names, stats.columns, order, lambda: norms_of(stats.columns, order), weights)


class AdaptiveClip(Float64Module):
    """The common part of all clip modules: a record of the steps, and a digest by which ranks compare them.

    ``record``: ``(3, N) float64``, a buffer: the factors of the last step, the numbers of steps with a
    gradient that is not 0, and of those in which it was clipped. N is 1, or the number of tensors.

    ``settings``: the arguments of the module, which are checked; those in ``_or_zero`` may be 0.
    ``identity``: other values that the modules of all ranks must have in common.
    """

    needs_weights: ClassVar[bool] = False
    _or_zero: ClassVar[Collection[str]] = ()
    names: tuple[str, ...] = ()
    record: Tensor

    def __init__(self, size: int, device: Any, settings: Mapping[str, float], *identity: object) -> None:
        super().__init__()
        for name, value in settings.items():
            kind, fits = _KINDS[name]
            if not fits(value, name in self._or_zero):
                kind = kind.replace("positive", "non-negative") if name in self._or_zero else kind
                raise ValueError(f"{type(self).__name__}: {name} must be {kind}, got {describe(value)}")
        self.settings = {name: float(value) for name, value in settings.items()}
        # never 0-d: compiled graphs of torch 2.11 and 2.13 lose writes into a 0-d float64 tensor on the CPU
        factor = torch.ones((1, size), dtype=torch.float64, device=device)
        zeros = torch.zeros((2, size), dtype=torch.float64, device=device)
        self.register_buffer("record", torch.cat([factor, zeros]))
        self._identity = zlib.crc32(repr((type(self).__name__, self.settings, identity)).encode())

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

    def forward(self, stats: TensorStats) -> Tensor:
        """Count these statistics as a step, and return its factors; nothing is scaled.

        Args:
            stats: of all gradients; with several ranks, merged.

        Returns:
            float64 from 0 to 1, 0-d, or ``(len(stats.names),)`` from a module with a factor per tensor.

        Raises:
            TypeError: if ``stats`` is not TensorStats.
            ValueError: for another device, and for a name that is not in `names`.
        """
        return self.decide(Gradients.of(stats_given(stats, type(self).__name__)))

    def extra_repr(self) -> str:
        """Return the arguments."""
        return ", ".join([f"{name}={value:g}" for name, value in self.settings.items()])

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
        """Reject parameters that cannot be clipped, and orders, before anything is measured."""
        del parameters, ranks
        self.check_order(order, what)

    def check_order(self, order: float, what: str) -> None:
        """Reject norms of an order that this module does not use."""

    def decide(self, gradients: Gradients) -> Tensor:
        """Return the factors of these rows, 0-d or ``(len(names),) float64``, and update the state."""
        raise NotImplementedError

    def digest(self) -> StateDigest:
        """Return a number that differs between ranks if their modules would decide differently."""
        # halves of float64 bits: a sum of integers is exact, so its order does not matter
        bits = [x.view(torch.int64) for x in self._state()]
        halves = [half for x in bits for half in ((x >> 32) & _LOW_BITS, x & _LOW_BITS)]
        number = torch.full((1,), self._identity, dtype=torch.int64, device=self.record.device)
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


class TensorwiseClip(AdaptiveClip):
    """A clip module with a row per tensor; a tensor without a gradient has factor 1 and changes nothing.

    ``key``: ``(1,) float64``, a buffer: a hash of the names, which a loaded checkpoint has to have.
    """

    key: Tensor

    def __init__(
        self, source: Parameters | Ranks, device: Any, settings: Mapping[str, float], *identity: object
    ) -> None:
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
        super().__init__(len(names), device, settings, hashed, *identity)
        self.names, self._hash = names, hashed
        self.register_buffer("key", self._key(torch.float64).to(device))

    def extra_repr(self) -> str:
        """Return the number of tensors, and the arguments."""
        return f"{len(self.names)} tensors, {super().extra_repr()}"

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


def is_on_host(device: torch.device) -> bool:
    """Return whether the host itself computes on this device, so that reading a number is no wait."""
    return device.type == "cpu" and not is_watched() and not ops.uses_kernels(device)


def stats_given(stats: Any, what: str) -> TensorStats:
    """Return the stats; raise a TypeError for anything else."""
    if not isinstance(stats, TensorStats):
        msg = f"{what}: expected the TensorStats that collect_grads returns, got {type(stats).__name__}"
        raise TypeError(msg)
    return stats


def _is_finite(value: Any, or_zero: bool) -> bool:  # noqa: FBT001
    return is_limit(value) and value < math.inf and (or_zero or value > 0)


# what the settings have to be
_KINDS: Final[dict[str, tuple[str, Callable[[Any, bool], bool]]]] = {
    "z_threshold": ("a positive finite number", _is_finite),
    "max_ratio": ("a positive finite number", _is_finite),
    "eps": ("a positive finite number", _is_finite),
    "decay": ("a number in [0, 1)", lambda x, _: is_limit(x) and x < 1),
    "warmup_steps": ("a positive integer", lambda x, or_zero: type(x) is int and _is_finite(x, or_zero)),
    "max_norm": ("a non-negative number, or math.inf for no limit", lambda x, _: is_limit(x)),
}
