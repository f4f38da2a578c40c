"""Updates that are larger than the optimizer can make them: something else writes the weights."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from gradiometer.rules.base import CHANGES, WholeRule, recorded_kind
from gradiometer.rules.finding import Severity, modules_text, times
from gradiometer.rules.known import optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gradiometer.recorder import OptimizerState, Rows, StepRecord
    from gradiometer.rules.finding import Finding

# a tensor that exceeds the bound in a larger share of the steps is changed by the training loop on purpose
RARE: Final = 0.1
# relative difference of a learning rate when the gradients were recorded and after the step
SAME: Final = 1e-3
# after this many times 1 / (1 - momentum) steps, what is left of a momentum that was restored is below 1 %
FORGOTTEN: Final = 5.0

INSIDE: Final = (
    "look for what else writes weights during optimizer.step(): float32 master weights that were copied "
    "before a checkpoint was loaded, hooks of the optimizer, averaged or projected weights"
)
BETWEEN: Final = (
    "look for code that writes weights, such as a state_dict that is loaded, averaged weights that are "
    "swapped in and not back, or an optimizer whose float32 master weights are out of date"
)


@dataclass(eq=False, repr=False)
class UpdateBound(WholeRule):
    """Weights that move further in one step than the formula of their optimizer allows.

    It needs a Monitor with ``updates=True``, or with ``weights=True``, and `gradiometer.watch` or the
    callback of a trainer, so that the optimizers are known. The formulas are those of `torch.optim`: SGD,
    Adam, AdamW, RMSprop and Adagrad; for others there is no bound. With the learning rate lr and the weight
    w, no element moves further than ``c * lr + lr * weight_decay * |w|``, where c is 1 for Adagrad, see
    `largest_step` for the others. For SGD it is lr / (1 - momentum) times the largest gradient so far. A
    finding needs twice the bound, and allows for the rounding of the weights. With weights alone, the bound
    is compared with the change of the norm from one step to the next.

    A finding has ``severity`` if this happens to a tensor in one step, or in at most a tenth of its steps,
    and otherwise info.

    Args:
        factor: limit, in times the bound.
    """

    name = "update_bound"
    kinds: ClassVar[tuple[str, ...]] = CHANGES
    kept = (*WholeRule.kept, "times", "compared", "steepest", "count", "before_step", "norms", "limits")
    _: KW_ONLY
    factor: float = 2.0

    def restart(self, size: int) -> None:
        """Start a new history of ``size`` tensors."""
        super().restart(size)
        start = torch.zeros(4, size, dtype=torch.float64, device="cpu")
        # the largest norm of a gradient of SGD, with its weight decay
        self.times, self.compared, self.steepest, self.norms = start.unbind()
        # of the step before: how far its norm may move
        self.limits = torch.full_like(self.norms, torch.nan)
        self.count = 0
        self.before_step: int | None = None
        self._read: tuple[OptimizerState, dict[str, Tensor]] | None = None

    def prepare(self, rows: Rows) -> None:
        """Find the rounding of each dtype; NaN for those whose second moments may underflow."""
        eps = [_EPS.get(dtype, math.nan) for dtype in rows.dtypes]
        self._eps = torch.tensor(eps, dtype=torch.float64, device="cpu")
        sizes = [math.prod(shape) for shape in rows.shapes]
        self._roots = torch.tensor(sizes, dtype=torch.float64, device="cpu").sqrt()

    def examine(self, record: StepRecord) -> Iterable[Finding]:
        """Compare this step's updates with the bound."""
        known, kind = optimizers_of(record), str(recorded_kind(record, self.kinds))
        if known is None or not known.methods or len(self._eps) != len(known.groups):
            return []
        facts = self._facts(known)
        follows, self.before_step = self.before_step == record.step - 1, record.step
        self.count = self.count + 1 if follows else 1
        exact = kind == "updates"
        squares = record.value("sumsq_b" if exact else "sumsq", kind)
        weights = squares.sqrt()
        # what each element, and the norm, of an update may be at most
        element = facts["rate"] * facts["largest"]
        slack = facts["rate"] * facts["decay"] + self._eps
        norm = self._of_sgd(record, facts, weights, follows=follows).fmax(element * self._roots)
        norm = norm + slack * weights
        if record.skipped or not _is_current(record, known):
            norm = element = torch.full_like(norm, torch.nan)
        if exact:
            moved = record.value("finite_norm", kind)
            largest = record.value("abs_max", "weights") if record.has("weights") else weights
            share = (moved / norm).fmax(record.value("abs_max", kind) / (element + slack * largest))
            usable = record.measured(kind) & (record.value("n_nonfinite", kind) == 0)
        else:
            before, self.norms, limits, self.limits = self.norms, weights, self.limits, norm
            share = (weights - before).abs() / (limits if follows else torch.nan)
            usable = record.measured(kind) & (record.value("n_nonfinite", kind) == 0)
        share = torch.where(usable & share.isfinite(), share, 0.0)
        self.compared = self.compared + (share > 0)
        found = share > self.factor
        if not found.any():
            return []
        self.times = self.times + found
        return [self._found(record, known, found, share, kind)]

    def _facts(self, known: OptimizerState) -> dict[str, Tensor]:
        """Return of each parameter its rate, the largest step per rate, the decay, and SGD's momentum."""
        if self._read is None or self._read[0] is not known:
            made: dict[str, list[float]] = {name: [] for name in ("rate", "largest", "decay", "momentum")}
            for rate, method, options in zip(known.rates, known.methods, known.options, strict=True):
                largest = largest_step(method, options)
                made["rate"].append(rate or math.nan)
                made["largest"].append(math.nan if largest is None else largest)
                made["decay"].append(abs(options.get("weight_decay", 0.0)))
                made["momentum"].append(options.get("momentum", 0.0) if method == "SGD" else math.nan)
            # the last one is for what no optimizer holds
            groups = torch.tensor(known.groups, dtype=torch.int64, device="cpu")
            facts = {
                name: torch.tensor([*values, math.nan], dtype=torch.float64, device="cpu")[groups]
                for name, values in made.items()
            }
            self._read = known, facts
        return self._read[1]

    def _of_sgd(
        self, record: StepRecord, facts: Mapping[str, Tensor], weights: Tensor, *, follows: bool
    ) -> Tensor:
        """Return how far SGD may move each tensor, ``(N,)``; NaN if that is not known."""
        momentum = facts["momentum"]
        steepness = record.value("finite_norm") + facts["decay"] * weights
        # gradients that were cleared too early are not those of the update
        steepness = torch.where(record.measured() & bool(record.total("abs_max")), steepness, torch.nan)
        kept = torch.where(momentum > 0, self.steepest, 0.0) if follows else torch.zeros_like(steepness)
        self.steepest = torch.where(momentum.isfinite(), torch.maximum(kept, steepness), 0.0)
        rest = 1.0 / (1.0 - momentum)
        # steps that were not recorded may have had larger gradients
        is_known = (momentum == 0) | (self.count > FORGOTTEN * rest)
        return torch.where(is_known & (momentum < 1), facts["rate"] * rest * self.steepest, torch.nan)

    def _found(
        self, record: StepRecord, known: OptimizerState, found: Tensor, share: Tensor, kind: str
    ) -> Finding:
        rare = found & (self.times <= (RARE * self.compared).clamp(min=1.0))
        severity = self.severity if rare.any() else min(self.severity, Severity.INFO)
        chosen = rare if rare.any() else found
        places, names = chosen.nonzero().flatten().tolist(), record.names(kind)
        worst = int(torch.where(chosen, share, 0.0).argmax())
        group = known.groups[worst]
        rate = known.rates[group] or 0.0
        text = f"{modules_text(names, places)}: "
        if kind == "updates":
            text += f"the update moves them by up to {times(float(share[worst]))} what "
        else:
            text += f"between steps {record.step - 1} and {record.step} their norms change by up to "
            text += f"{times(float(share[worst]))} what "
        text += f"{known.methods[group]} with learning rate {rate:.3g} can do in a step: something else "
        text += "writes them" + ", inside optimizer.step()" * (kind == "updates")
        first = None if len(places) == len(names) else names[places[0]]
        advice = INSIDE if kind == "updates" else BETWEEN
        return self.finding(
            record, record.step, first, float(share[worst]), self.factor, text, advice, severity, kind
        )


def _is_current(record: StepRecord, known: OptimizerState) -> bool:
    """Return whether the learning rates were not changed between the recording and the step.

    The rates of `OptimizerState` are those of when the gradients were recorded, and the scalars those of
    right after the step. Some loops set the learning rate in between.
    """
    for owner in sorted(set(known.owners)):
        first, name = known.rates[known.owners.index(owner)], "lr" if not owner else f"lr_{owner}"
        after = record.scalars.get(name)
        if first is not None and after is not None and not math.isclose(first, after, rel_tol=SAME):
            return False
    return True


def largest_step(method: str, options: Mapping[str, float]) -> float | None:
    """Return by how many learning rates an element may move at most in one step; None if that is not known.

    For Adam, m is a weighted sum of gradients and v one of their squares, so by the inequality of Cauchy and
    Schwarz, after t steps, with ``r = beta1**2 / beta2`` below 1,

        |m| / sqrt(v) <= (1 - beta1) / sqrt(1 - beta2) * sqrt(1 + r + ... + r**(t - 1)),

    times the bias corrections ``sqrt(1 - beta2**t) / (1 - beta1**t)``. It is 1 after one step, and 7.27 for
    the default betas at most. A constant gradient gives 1 (Kingma and Ba 2015, arXiv:1412.6980, section 2.1).
    RMSprop divides by a v of at least ``(1 - alpha) g**2``, and Adagrad by one of at least ``g**2``.

    >>> round(largest_step("AdamW", {"beta1": 0.9, "beta2": 0.999}), 2)
    7.27
    >>> largest_step("Adagrad", {}), largest_step("SGD", {"momentum": 0.9})
    (1.0, None)
    """
    try:
        if method in {"Adam", "AdamW"}:
            return _largest_of_adam(options["beta1"], options["beta2"])
        if method == "RMSprop":
            rest = 1.0 - options.get("momentum", 0.0)
            return 1.0 / math.sqrt(1.0 - options["alpha"]) / rest if rest > 0 else None
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    return 1.0 if method == "Adagrad" else None


@lru_cache(maxsize=64)
def _largest_of_adam(beta1: float, beta2: float) -> float | None:
    ratio = beta1**2 / beta2
    if not ratio < 1.0:
        return None
    largest, total, power1, power2, term = 0.0, 0.0, 1.0, 1.0, 1.0
    for _ in range(10_000):
        total, power1, power2, term = total + term, power1 * beta1, power2 * beta2, term * ratio
        at_step = (1.0 - beta1) / (1.0 - power1) * math.sqrt((1.0 - power2) / (1.0 - beta2) * total)
        largest = max(largest, at_step)
    return max(largest, (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - ratio)))


# float16 is left out: the second moments of small gradients are 0 there
_EPS: Final = {
    str(dtype).removeprefix("torch."): torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
}
