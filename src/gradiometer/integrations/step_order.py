"""Find the order of each step: its backward passes, what cleared gradients between them, and its clips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gradiometer.control import is_still_scaled
from gradiometer.recorder import StepOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.amp import GradScaler

    from gradiometer.integrations.backward_passes import BackwardPasses

# torch is often given such a limit for the norm alone
_NO_LIMIT: Final = 1e5
# a step has never come if it would have at least so many passes, and times as many as any before
_MANY: Final = 10
_TIMES: Final = 4


class Scaling:
    """A GradScaler, and whether the gradients of optimizers still have its scale.

    Args:
        scaler: None without one.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        is_on = scaler is not None and scaler.is_enabled()
        self.backoff = float(getattr(scaler, "_backoff_factor", 0.5)) if is_on else 0.0
        # created by the first scaled loss
        is_new = is_on and getattr(scaler, "_scale", None) is None
        self.first_scale = float(getattr(scaler, "_init_scale", 0.0)) if is_new else 0.0

    def has(self, optimizers: Iterable[Any]) -> bool:
        """Return whether gradients of all of these optimizers, or wrappers, still have the scale."""
        scaler = self._scaler
        if scaler is None or not self.backoff or getattr(scaler, "_scale", None) is None:
            return False
        return all([is_still_scaled(scaler, each) for each in optimizers])

    def writes(self, optimizers: Iterable[Any]) -> int:
        """Return how often the scaler has written each gradient: once, by `unscale_`."""
        scaler = self._scaler
        if scaler is None or not self.backoff:
            return 0
        return int(not all([is_still_scaled(scaler, each) for each in optimizers]))


class OrderOfSteps:
    """Watches the order of steps, for a watch with one or several optimizers.

    Args:
        passes: counts the backward passes.
        sentinels: for each optimizer, a parameter of each param group, by name.
        parts: all parameters of each optimizer, by name; empty if something else may take their gradients.
        given: for each optimizer, it and its wrappers.
        scaling: of the gradients.
    """

    def __init__(
        self,
        passes: BackwardPasses,
        sentinels: Sequence[Sequence[tuple[str, Tensor]]],
        parts: Sequence[Sequence[tuple[str, Tensor]]],
        given: Sequence[Sequence[Any]],
        scaling: Scaling,
    ) -> None:
        self._passes, self._sentinels, self._parts, self._scaling = passes, sentinels, parts, scaling
        self._given = given
        # what the clips of this step found
        self._idle, self._is_clipped, self._is_scaled_clip = "", False, False
        # the most backward passes of a step
        self._usual, self._now = 0, StepOrder()
        self.restart()

    def restart(self) -> StepOrder:
        """Begin the next step, and return what is known of it."""
        scaling = self._scaling
        self._usual = max(self._usual, self._now.passes)
        self._now = StepOrder(backoff=scaling.backoff, first_scale=scaling.first_scale)
        return self._now

    def before_step(self, index: int, *, changed: bool) -> StepOrder:
        """Return the order of this step so far, when an optimizer is about to step.

        ``changed``: whether something that was not observed has changed gradients since the last pass.
        """
        passes, now = self._passes, self._now
        seen = [(name, p) for name, p in self._sentinels[index] if passes.since_step(p)]
        if not seen:
            return now
        count = max([passes.since_step(p) for _, p in seen])
        several = [p for _, p in seen if passes.since_step(p) > 1]
        lost = min([passes.lost(p) for p in several], default=0)
        part = self._parts[index]
        cleared = bool(part) and all([passes.was_cleared(p) for _, p in seen])
        stale = [name for name, p in seen if p.grad is not None and passes.is_stale(p)]
        self._now = now._replace(
            passes=max(now.passes, count),
            lost=max(now.lost, 0 if changed or not part else lost),
            cleared=now.cleared or (cleared and all([p.grad is None for _, p in part])),
            stale=tuple(dict.fromkeys((*now.stale, *stale))),
            idle_clip="" if self._is_clipped else self._idle,
            scaled_clip=self._is_scaled_clip,
        )
        return self._now

    def unfinished(self) -> StepOrder | None:
        """Return the order of a step that never came, though many passes added to its gradients.

        None if there is no such step, or if its gradients are finite. This waits for the device.
        """
        passes = self._passes
        counts = [max([passes.since_step(p) for _, p in each], default=0) for each in self._sentinels]
        count = min(counts, default=0)
        if count < _MANY or count <= _TIMES * self._usual:
            return None
        grads = [p.grad for each in self._sentinels for _, p in each if not passes.lost(p)]
        if all([grad is None or bool(grad.isfinite().all()) for grad in grads]):
            return None
        return self._now._replace(passes=count, is_unfinished=True)

    def clip(self, parameters: Sequence[Tensor], limit: float | Tensor | None) -> None:
        """See a clip of these parameters, which is about to begin."""
        if isinstance(limit, (int, float)) and not limit < _NO_LIMIT:
            return
        ours = set(map(id, parameters))
        mine: list[Tensor] = []
        given: list[Any] = []
        for sentinels, wrappers in zip(self._sentinels, self._given, strict=True):
            found = [p for _, p in sentinels if id(p) in ours]
            mine += found
            given += wrappers if found else ()
        writes = self._scaling.writes(given)
        self._passes.doubt([p for p in mine if self._passes.has_changed(p, writes)])
        if all([p.grad is None for p in parameters]):
            self._idle = self._idle or "none"
        elif mine and not any([self._passes.since_step(p) for p in mine]):
            self._idle = self._idle or "used"
        else:
            self._is_clipped = True
            # what was written may have been unscaled by hand
            is_raw = not any([self._passes.has_changed(p) for p in mine])
            self._is_scaled_clip = self._is_scaled_clip or (
                is_raw and bool(given) and self._scaling.has(given)
            )

    def end(self) -> None:
        """Forget the clips of a step."""
        self._idle, self._is_clipped, self._is_scaled_clip = "", False, False
