"""What a training loop does between ``backward()`` and ``optimizer.step()``, and in which order."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gradiometer.rules.base import BaseRule
from gradiometer.rules.finding import Severity
from gradiometer.rules.first_nonfinite import first_nonfinite_text
from gradiometer.rules.flow import CALL_ORDER
from gradiometer.rules.known import has_loss_scale, most_skips, optimizers_of
from gradiometer.rules.optimizer import RESET, SCHEDULE, learning_rates
from gradiometer.rules.schedule import follow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradiometer.recorder import StepOrder, StepRecord
    from gradiometer.rules.finding import Finding

ONCE: Final = (
    "call zero_grad() once for each optimizer.step(), not once for each backward(); if these passes are "
    "meant to be discarded, as in SAM or for adversarial inputs, nothing is wrong"
)
CLEAR: Final = (
    "call optimizer.zero_grad() for skipped steps too: gradients that are not finite stay so when others are "
    "added; then look for the cause of the first one, gm.locate_nonfinite(step, batch) names the operation"
)
CLIP: Final = (
    "clip between backward() and optimizer.step(); with a GradScaler after scaler.unscale_(optimizer)"
)
UNSCALE: Final = "call scaler.unscale_(optimizer) once in each step, right before the clip"
ONE_OPTIMIZER: Final = (
    "let one optimizer update each parameter; if several are meant to, pass all of them to gm.watch"
)
SLOWER: Final = (
    "let its growth_interval be large, 2,000 steps by default, and call scaler.update() once in each step; "
    "otherwise look for the layers whose gradients are often Inf"
)
LARGE: Final = "if the loss scale is too large, start the GradScaler with a smaller init_scale"
SCALE: Final = (
    "a smaller loss scale does not help if the forward pass or the loss is not finite: use bfloat16, or keep "
    "the operation that overflows in float32; gm.locate_nonfinite(step, batch) names it"
)
VARIES: Final = (
    "if gradients are accumulated, divide each loss by the number of passes of its own step, or by the "
    "number of samples; the last step of an epoch may have fewer"
)
# below it no limit of a norm is set on purpose: usual ones are from 0.01 to 1,000
LEAST_LIMIT: Final = 0.01
# Of so many steps, a mistake is in half of them, or steps are skipped anew in a fifth: a scale that doubles
# after 2,000 steps is too large once in as many
WINDOW, HALF, FIFTH = 24, 12, 5
# the least number of steps, and the share of those with the usual number of backward passes
LEAST_STEPS: Final = 20
USUAL: Final = 0.75


@dataclass(eq=False, repr=False)
class LoopOrder(BaseRule):
    """A training loop that calls its functions in the wrong order, or one too often, or not at all.

    It needs `gradiometer.watch` or the callback of a trainer, whose hooks on the host see one parameter of
    each param group: backward passes, gradients that are cleared and that are not, and clips. What they
    cannot see, as in a compiled backward pass, is not reported. With a `gradiometer.Monitor` in your own
    loop, it only reports gradients that are not finite and not cleared, and steps that a GradScaler skips.

    Args:
        patience: number of steps in a row with the same mistake.
    """

    name = "loop_order"
    kept = (
        "state",
        "counts",
        "rates",
        "has_changed",
        "bad_since",
        "bad_steps",
        "new_grads",
        "old_grads",
        "begun",
    )
    _: KW_ONLY
    patience: int = 3
    # of each mistake: the number of steps in a row, the first of them, and the value
    state: dict[str, list[int]] = field(default_factory=dict, init=False)
    # how many steps had each number of backward passes
    counts: dict[str, int] = field(default_factory=dict, init=False)
    # see `follow`, of each learning rate
    rates: dict[str, list[float]] = field(default_factory=dict, init=False)
    # whether gradients were changed otherwise than by zeroing them
    has_changed: bool = field(default=False, init=False)
    # steps in a row whose gradients are not finite
    bad_since: int = field(default=0, init=False)
    bad_steps: int = field(default=0, init=False)
    # finite steps with a new gradient tensor, and with that of the step before
    new_grads: int = field(default=0, init=False)
    old_grads: int = field(default=0, init=False)
    # the first step
    begun: int = field(default=-1, init=False)

    def check_value(self, key: str, value: Any) -> None:
        """Raise an error unless the value can replace the attribute ``key``."""
        super().check_value(key, value)
        if key == "state" and not _are_numbers(value, lambda x: _is_list(x, 3)):
            raise ValueError("expected three integers for each mistake")
        if key == "counts" and not (_are_numbers(value, _is_int) and all(x.isdecimal() for x in value)):
            raise ValueError("expected the number of steps for each number of backward passes")
        if key == "rates" and not _are_numbers(value, _is_list_of_floats):
            raise ValueError("expected a list of numbers for each learning rate")

    def check(self, record: StepRecord) -> Iterable[Finding]:
        """Return findings about mistakes that were seen in several steps in a row."""
        if record.model is None:
            return []
        if self.begun < 0:
            self.begun = record.step
        # of mistakes about the gradients only the first is reported: the others follow from it
        made = self._about_gradients(record), self._about_clips(record), self._varying(record)
        found = [found for several in made for found in several[:1]] + self._schedules(record)
        return found + self._others(record, record.model.order.others)

    def _others(self, record: StepRecord, others: tuple[str, ...]) -> list[Finding]:
        lasting = self._lasts(record, "others", len(others), self.patience)
        if lasting is None:
            return []
        text = f"weights also change outside of the watched optimizer since step {lasting[0]}: "
        text += "; ".join(others) + ", too"
        return [self._made(record, lasting[0], text, ONE_OPTIMIZER)]

    def _lasts(self, record: StepRecord, key: str, value: int, patience: int) -> tuple[int, int] | None:
        """Return since when a value above 0 has been the same, and for how many steps, from ``patience``."""
        if not value:
            self.state.pop(key, None)
            return None
        count, since, before = self.state.get(key, (0, record.step, value))
        if before != value:
            count, since = 0, record.step
        self.state[key] = [count + 1, since, int(value)]
        return (since, count + 1) if count + 1 >= patience else None

    def _about_gradients(self, record: StepRecord) -> list[Finding]:
        model, found = record.model, []
        assert model is not None  # noqa: S101 for the type checker
        order = model.order
        if order.is_unfinished:
            found.append(self._unfinished(record, order.passes))
        # one step less: the first was added to zeros
        stale = cleared = lost = None
        count = 0
        if order.passes:
            count = self._window("stale at times", order.stale).bit_count()
            stale = self._lasts(record, "stale", bool(order.stale), self.patience + 1)
            lost = self._lasts(
                record, "lost", order.lost if order.lost == order.passes - 1 else 0, self.patience
            )
        if record.recorded:
            is_kept = self._is_kept(record)
            if self._lasts(record, "bad and kept", is_kept, 2):
                found.append(self._not_cleared(record))
            is_cleared = self._is_zeroed(record) or (order.cleared and not _takes_gradients(record))
            cleared = self._lasts(record, "cleared", is_cleared, self.patience)
        if cleared is not None:
            text = f"gradients are cleared between backward() and optimizer.step() since step {cleared[0]}: "
            text += "zero_grad() is called there, so that the step has no gradients"
            found.append(self._made(record, cleared[0], text, CALL_ORDER["watch"]))
        if lost is not None:
            # so do SAM, whose change of the weights need not be seen, and the search of adversarial inputs
            severity = min(self.severity, Severity.INFO)
            text = (
                f"only the last of {order.passes} backward passes counts in each step since step {lost[0]}: "
            )
            text += "zero_grad() is called between them, so that the other gradients are lost"
            found.append(self._made(record, lost[0], text, ONCE, severity))
        if stale is not None:
            since, names = max(stale[0] - 1, 0), ", ".join(order.stale[:3])
            text = (
                f"gradients are not cleared since step {since}: each backward() adds to those that earlier "
            )
            text += (
                f"steps have used (seen at {names}): zero_grad() is not called, or not for these parameters"
            )
            found.append(self._made(record, since, text, RESET))
        elif count >= HALF:
            text = f"in {count} of the last {WINDOW} steps, gradients still contained those that the step "
            text += "before had used: zero_grad() is not called after these steps"
            found.append(self._made(record, max(record.step - WINDOW + 1, self.begun), text, RESET))
        return found + self._skipped(record, order)

    def _window(self, key: str, value: object) -> int:
        """Return in which of the last `WINDOW` steps a value was true: as bits, the lowest for this step."""
        bits = (self.state.get(key, [0, 0, 0])[2] << 1 | bool(value)) & (1 << WINDOW) - 1
        self.state[key] = [0, 0, bits]
        return bits

    def _is_kept(self, record: StepRecord) -> bool:
        """Return whether the gradients are not finite, and those of the step before are still in them."""
        model = record.model
        assert model is not None  # noqa: S101 for the type checker
        if not record.value("n_nonfinite").any():
            self.bad_steps = 0
            if model.grad_writes:
                self.old_grads += 1
            elif record.measured().any():
                self.new_grads += 1
            return False
        self.bad_steps += 1
        if self.bad_steps == 1:
            self.bad_since = record.step
            return False
        if model.order.passes:
            # if they were never cleared, that came first
            return bool(model.order.stale) and self.state["stale"][1] > self.bad_since
        # without hooks: each step had a new gradient tensor, and these have the same
        return model.grad_writes > 0 and self.new_grads >= self.patience and self.old_grads <= 1

    def _is_zeroed(self, record: StepRecord) -> bool:
        """Return whether gradients were changed after the backward pass, to 0 and never otherwise."""
        model = record.model
        if model is None or not model.changed_gradients or not record.measured().any():
            return False
        is_zero = not record.value("abs_max").any() and not record.value("n_nonfinite").any()
        self.has_changed = self.has_changed or not is_zero
        return is_zero and not self.has_changed

    def _not_cleared(self, record: StepRecord) -> Finding:
        first = str(first_nonfinite_text(record)).partition(", ")[2]
        text = f"gradients are not finite since step {self.bad_since} and were not cleared after it, so that "
        text += (
            "those of each later step are added to a NaN or Inf, and none can be used: zero_grad() is not "
        )
        text += f"called after such a step ({first})"
        return self._made(record, self.bad_since, text, CLEAR, Severity.ERROR)

    def _unfinished(self, record: StepRecord, passes: int) -> Finding:
        text = f"no optimizer.step() after step {record.step - 1}, but {passes:,} backward passes, whose "
        text += "gradients were added up and not cleared"
        if record.nonfinite:
            first = str(first_nonfinite_text(record)).partition(", ")[2]
            text += f": they are not finite ({first}), and stay so until zero_grad() is called"
        return self._made(record, record.step, text, CLEAR, Severity.ERROR)

    def _skipped(self, record: StepRecord, order: StepOrder) -> list[Finding]:
        assert record.model is not None  # noqa: S101 for the type checker
        is_bad = record.loss is not None and not math.isfinite(record.loss)
        # 1: the loss scale may be too large
        is_skipped = record.skipped and has_loss_scale(record)
        value = (2 if is_bad else 1) * is_skipped
        found = self._lasts(record, "skipped", value, self.patience + 2 if is_bad else most_skips(record))
        skipped = self._window("skipped at times", is_skipped)
        if found is None:
            # of several in a row, the first: so a scale falls that is too large at the start
            anew = (skipped & ~(skipped >> 1)).bit_count()
            if anew < FIFTH or not is_skipped:
                return []
            text = f"the GradScaler skips {skipped.bit_count()} of {WINDOW} steps, {anew} times anew: its "
            text += "scale grows again after a few steps, until gradients overflow"
            return [self._made(record, max(record.step - WINDOW + 1, self.begun), text, SLOWER)]
        since, count = found
        text = f"the GradScaler has skipped all {count} steps since step {since}, so that no weight changes"
        if order.first_scale and since == self.begun:
            now = order.first_scale * order.backoff**count
            text += f"; its scale has fallen from {order.first_scale:,g} to {now:,.4g}"
        elif order.backoff:
            text += f"; its scale has fallen to 1/{order.backoff**-count:,.4g} of what it was"
        if record.nonfinite:
            text += f": {str(first_nonfinite_text(record)).partition(', ')[2]}"
        if is_bad:
            text += f"; the loss is {record.loss_text}"
        return [self._made(record, since, text, SCALE if is_bad else f"{LARGE}; {SCALE}", Severity.ERROR)]

    def _about_clips(self, record: StepRecord) -> list[Finding]:
        model, found = record.model, []
        assert model is not None  # noqa: S101 for the type checker
        order = model.order
        if not order.passes:
            return []
        what = ("", "none", "used").index(order.idle_clip)
        idle = self._lasts(record, "clip", what, self.patience)
        if idle is not None:
            # what is clipped after a step is seen in the next one
            since = max(idle[0] - (what == 2), 0)
            text = (
                f"clipping has no effect since step {since}: gradients are clipped after optimizer.step(), "
            )
            text += "not before it"
            if what == 1:
                text = f"clipping has no effect since step {since}: it finds no gradients, as it is called "
                text += "before backward(), or after optimizer.step() and zero_grad()"
            found.append(self._made(record, since, text, CLIP, kind=None))
        scaled = self._lasts(record, "scaled", self._scaled(record, order), self.patience)
        if scaled is not None:
            found.append(self._clipped_scaled(record, scaled[0]))
        return found

    def _scaled(self, record: StepRecord, order: StepOrder) -> int:
        factor = record.scalars.get("clip_factor")
        # without a factor, a clip by value
        acts = factor is None or factor < 1.0
        return int(order.scaled_clip and record.recorded and acts and math.isfinite(record.total()))

    def _clipped_scaled(self, record: StepRecord, since: int) -> Finding:
        factor, limit = record.scalars.get("clip_factor"), record.scalars.get("clip_max_norm")
        used = record.total() * (1.0 if factor is None else factor)
        text = (
            f"gradients are clipped before scaler.unscale_() since step {since}, while they still have the "
        )
        text += f"loss scale: the norm that a step uses is {used:.3g}"
        if limit is not None:
            text += f", the limit {limit:g} divided by the scale"
        # a limit that is multiplied by the scale is no mistake
        is_sure = factor is not None and used < LEAST_LIMIT
        severity = self.severity if is_sure else min(self.severity, Severity.INFO)
        return self._made(record, since, text, UNSCALE, severity, kind=None)

    def _varying(self, record: StepRecord) -> list[Finding]:
        assert record.model is not None  # noqa: S101 for the type checker
        passes = record.model.order.passes
        if not passes:
            return []
        self.counts[str(passes)] = self.counts.get(str(passes), 0) + 1
        total = sum(self.counts.values())
        if len(self.counts) == 1 or total < LEAST_STEPS or max(self.counts.values()) > USUAL * total:
            return []
        low, high = (f(map(int, self.counts)) for f in (min, max))
        text = f"the number of backward passes of a step varies, from {low:,} to {high:,}, and with it the "
        text += "size of gradients that are added up"
        severity = min(self.severity, Severity.INFO)
        return [self._made(record, record.step, text, VARIES, severity, kind="passes")]

    def _schedules(self, record: StepRecord) -> list[Finding]:
        found = []
        for name, rate in learning_rates(record).items():
            ended = follow(self.rates.setdefault(name, []), record.step, rate)
            if ended is not None:
                text = (
                    f"the schedule of {name} has ended at step {ended.since}, but training goes on: {name} "
                )
                severity = min(self.severity, Severity.INFO)
                made = self._made(record, ended.since, text + ended.text, SCHEDULE, severity, kind=None)
                found.append(replace(made, tensor=name))
        return found

    def _made(
        self,
        record: StepRecord,
        since: int,
        text: str,
        advice: str,
        severity: Severity | None = None,
        kind: str | None = "grads",
    ) -> Finding:
        # equal values: the first message stays
        return self.finding(record, since, None, 0.0, 0.0, text, advice, severity, kind)


def _takes_gradients(record: StepRecord) -> bool:
    """Return whether an optimizer may be given gradients of copies of the parameters."""
    known = optimizers_of(record)
    return known is not None and (known.has_others or any(known.copied))


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_list_of_floats(value: Any) -> bool:
    return isinstance(value, list) and len(value) != 1 and all(type(x) in {int, float} for x in value)


def _is_list(value: Any, size: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == size and all(map(_is_int, value))


def _are_numbers(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str) and is_one(y) for x, y in value.items())
