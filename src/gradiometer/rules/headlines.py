"""Headlines: findings grouped by rule and onset, each with the later findings that it explains."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gradiometer.rules.finding import Finding, Severity
from gradiometer.rules.flow import ROUTED
from gradiometer.rules.not_updated import LEFT_OUT, MAY_LACK, OF_GROUP
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# the order of causes within one step: a loss is computed before its gradients, and these before the update
_ORDER: Final = (
    "criterion", "label_shift", "padding", "same_batch", "one_class", "unknown_tokens",
    "same_data", "disagreeing_rank", "first_loss",
    "loop_order", "eval_mode", "untied", "not_registered", "initialization", "learning_rate", "group_lr",
    "base_not_frozen",
    "bias_correction", "high_dropout", "normalization",
    "hyperparameters", "epsilon", "state_reset", "misplaced_moments", "stale_second_moment",
    "changed_outside", "update_bound", "not_averaged", "replica_divergence", "crossed_zero", "nonfinite",
    "nonfinite_buffer", "no_gradients", "not_updated", "stuck", "accumulating", "no_gradient_flow",
    "attention_direction",
    "attention_sum", "attention_mask", "logit_scale", "residual", "loss_spike", "norm_spike", "exploding",
    "update_spike", "growing_logits", "attention_entropy", "stays_high", "chance_level", "fading_gradients",
    "collapsing_router", "dead_units", "vanishing", "dead", "unused_rows", "update_ratio", "imbalance",
    "decayed_norms", "changed_gradients",
)  # fmt: skip
# what follows when training leaves its course
_DIVERGED: Final = frozenset({
    "loss_spike", "norm_spike", "exploding", "update_spike", "nonfinite", "update_ratio", "imbalance",
    "vanishing", "dead", "dead_units", "growing_logits", "collapsing_router",
    "attention_entropy", "stays_high", "chance_level",
})  # fmt: skip
_QUIET: Final = frozenset({
    "dead", "dead_units", "vanishing", "imbalance", "not_updated", "stuck", "chance_level",
    "fading_gradients",
})  # fmt: skip
_STOPPED: Final = _QUIET | {"no_gradient_flow", "update_ratio"}
# causes of updates that are too small
_STOPS: Final = frozenset({"loop_order", "nonfinite", "no_gradients", "stuck"})
# what a learning rate of 0 explains, instead of what too large a rate does
_NOT_LEARNING: Final = frozenset({"not_updated", "stuck", "update_ratio"})
# rule of a cause -> rules of the findings that it explains
_EXPLAINS: Final[Mapping[str, frozenset[str]]] = {
    # a loss that cannot fall far, or falls to 0 soon
    "criterion": _QUIET,
    "label_shift": _QUIET | {"update_ratio"},
    "same_batch": _QUIET | {"update_ratio"},
    "one_class": _DIVERGED | _QUIET,
    # copies of weights part when their gradients do
    "not_averaged": frozenset({"replica_divergence"}),
    "unknown_tokens": frozenset({"unused_rows"}),
    # logits that are too large make large gradients
    "first_loss": _DIVERGED,
    "loop_order": _DIVERGED | _STOPPED | {"no_gradients", "accumulating", "changed_gradients"},
    "initialization": _DIVERGED | {"initialization"},
    "learning_rate": _DIVERGED | _NOT_LEARNING,
    "changed_outside": _DIVERGED,
    "update_bound": _DIVERGED,
    "misplaced_moments": _DIVERGED,
    # a group that learns slowly has small updates
    "group_lr": _NOT_LEARNING,
    # the rate of an adapter is large for other weights
    "base_not_frozen": _DIVERGED,
    # updates that are a division by 0, or too large for their learning rate
    "epsilon": _DIVERGED,
    "bias_correction": _DIVERGED,
    "high_dropout": _DIVERGED,
    "hyperparameters": _DIVERGED | _NOT_LEARNING,
    "state_reset": _DIVERGED,
    "stale_second_moment": _DIVERGED,
    "nonfinite": _DIVERGED | _STOPPED | {"no_gradients", "nonfinite_buffer"},
    "nonfinite_buffer": frozenset({"nonfinite"}),
    "crossed_zero": _DIVERGED,
    "normalization": _DIVERGED | _STOPPED | {"no_gradients"},
    "no_gradients": _STOPPED | {"initialization"},
    "accumulating": _DIVERGED,
    # an optimizer of other parameters does not clear these gradients either
    "not_updated": frozenset({"accumulating"}),
    # what is not changed by rounding stays as it was, and its ratio is small
    "stuck": frozenset({"update_ratio"}),
    "no_gradient_flow": _QUIET,
    # a spike that lasts or comes back soon is one
    "loss_spike": _DIVERGED,
    "norm_spike": _DIVERGED,
    "exploding": _DIVERGED,
    "update_spike": _DIVERGED,
    "update_ratio": _DIVERGED,
    "growing_logits": _DIVERGED,
    "attention_sum": frozenset({"attention_entropy", "attention_mask", "logit_scale"}),
    "logit_scale": frozenset({"attention_entropy", "growing_logits"}),
    "residual": frozenset({"vanishing", "imbalance", "dead"}),
    # experts without tokens get no gradient, and the routers of several layers collapse together
    "collapsing_router": _QUIET | {"no_gradient_flow", "collapsing_router"},
    "vanishing": _QUIET - {"dead_units"},
    "dead_units": _QUIET,
    "dead": frozenset({"vanishing", "imbalance", "no_gradient_flow", "chance_level", "fading_gradients"}),
    "not_registered": _QUIET,
    "attention_mask": frozenset({"chance_level"}),
    "attention_direction": frozenset({"chance_level"}),
}
# causes that make the whole model diverge, wherever they are, if they are problems
_SPREADS: Final = frozenset({
    "changed_outside", "update_bound", "misplaced_moments", "group_lr", "crossed_zero", "initialization",
    "exploding", "update_ratio", "growing_logits",
    "normalization",
    "base_not_frozen",
})  # fmt: skip
# pairs of rules that are related wherever their tensors are
_ANYWHERE: Final = frozenset({("not_updated", "accumulating"), ("collapsing_router", "collapsing_router")})
# conditions that a loop or a model has from the start, and that a NaN of the same step does not cause
_SET_UP: Final = frozenset({"no_gradient_flow", "not_updated"})
# causes that concern the whole run, even if their findings name a tensor
_WHOLE: Final = frozenset({"learning_rate", "nonfinite", "loss_spike", "norm_spike", "update_spike"})
# findings of one rule that begin within so many steps are one headline
_TOGETHER: Final = 5
# steps after a cause was last seen in which findings may follow from it
_AFTER: Final = 100
# causes of one rule that are looked at, and findings of one cause
_LIVE: Final = 64


@dataclass(frozen=True)
class Headline:
    """One cause: findings of one rule that began together, and those that follow from them.

    Attributes:
        findings: of one rule, the most severe first.
        explained: later findings that this cause explains, in the order of their first steps.
    """

    findings: tuple[Finding, ...]
    explained: tuple[Finding, ...] = ()

    @property
    def rule(self) -> str:
        """The rule of the cause."""
        return self.findings[0].rule

    @property
    def severity(self) -> Severity:
        """The highest severity of the cause and of what follows from it."""
        return max(finding.severity for finding in (*self.findings, *self.explained))

    @property
    def first_step(self) -> int:
        """The step at which it began."""
        return min(finding.first_step for finding in self.findings)

    @property
    def last_step(self) -> int:
        """The step at which the cause was last seen."""
        return max(finding.last_step for finding in self.findings)

    @property
    def advice(self) -> str:
        """What to try, one line."""
        return self.findings[0].advice

    @property
    def message(self) -> str:
        """One line: the message of the first finding, with the number and the names of the others."""
        first, *others = self.findings
        if not others:
            return first.message
        names = [finding.tensor for finding in self.findings if finding.tensor is not None]
        text = f"{len(names)} tensors, {', '.join(names[:3])}"
        text += f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{text}; {first.message}"

    def __str__(self) -> str:
        """Return one line: ``warning  step 120: lr was 1 ... (explains 4 other findings)``."""
        steps = f"step {self.first_step}"
        if self.last_step != self.first_step:
            steps += f" to {self.last_step}"
        text = f"{self.severity!s:7}  {steps}: {self.message}"
        if self.explained:
            count = len(self.explained)
            text += f" (explains {count} other {'finding' if count == 1 else 'findings'})"
        return printable(text)


def headlines(findings: Iterable[Finding]) -> list[Headline]:
    """Return the causes among findings, warnings and errors first, then by their first step.

    Findings of one rule and kind that begin within 5 steps are one headline. A finding that another rule's
    earlier one explains, such as gradients that explode up to 100 steps after a jump of the learning rate, is
    attached to that cause. A cause explains findings of certain rules, and unless it concerns the whole run,
    only those about the same tensors, the modules around them, or modules before them, from the numbers in
    their names. Findings of custom rules explain nothing, and are explained by nothing.

    >>> from gradiometer.rules import Finding, Severity
    >>> def finding(rule, step, message):
    ...     return Finding(rule, Severity.WARNING, step, step, None, None, 1.0, 0.5, message, "")
    >>> spike, jump = finding("loss_spike", 121, "loss 9"), finding("learning_rate", 120, "lr was 1")
    >>> [str(headline) for headline in headlines([spike, jump])]
    ['warning  step 120: lr was 1 (explains 1 other finding)']
    """
    groups = _grouped(findings)
    groups.sort(key=lambda group: (min(one.first_step for one in group), _rank(group[0].rule)))
    causes: list[tuple[list[Finding], list[Finding]]] = []
    # the causes that may explain a later finding, by rule: the latest, so that a long list takes no long time
    live: dict[str, deque[int]] = {rule: deque(maxlen=_LIVE) for rule in _EXPLAINS}
    for group in groups:
        rule = group[0].rule
        places = sorted({place for cause in live if rule in _EXPLAINS[cause] for place in live[cause]})
        alone: list[Finding] = []
        for finding in group:
            # the last of several causes is the nearest
            found = (place for place in reversed(places) if _explains(causes[place][0], finding))
            place = next(found, None)
            (alone if place is None else causes[place][1]).append(finding)
        if not alone:
            continue
        if rule in live:
            live[rule].append(len(causes))
        causes.append((alone, []))
    made = [Headline(tuple(group), tuple(explained)) for group, explained in causes]
    return sorted(made, key=lambda headline: (headline.severity < Severity.WARNING, headline.first_step))


def counts_text(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each severity, and of their causes if these are fewer.

    >>> counts_text([])
    'no findings'
    >>> jump = Finding("learning_rate", Severity.WARNING, 120, 120, None, None, 1.0, 0.5, "lr was 1", "")
    >>> spike = Finding("loss_spike", Severity.INFO, 121, 121, None, None, 9.0, 0.5, "loss 9", "")
    >>> counts_text([jump, spike])
    'findings: 1 warning, 1 info, from 1 cause'
    """
    counts = [
        f"{count:,} {severity}" + ("s" if count != 1 and severity is not Severity.INFO else "")
        for severity in reversed(Severity)
        if (count := sum(one.severity == severity for one in findings))
    ]
    if not counts:
        return "no findings"
    causes = len(headlines(findings))
    whence = f", from {causes:,} {'cause' if causes == 1 else 'causes'}" if causes < len(findings) else ""
    return f"findings: {', '.join(counts)}{whence}"


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return groups of findings of one rule, kind and severity that began together; the worst first."""
    groups: list[list[Finding]] = []
    last: dict[tuple[object, ...], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.first_step):
        key = finding.rule, finding.kind, finding.severity >= Severity.WARNING
        group = last.get(key)
        if finding.tensor is None:
            groups.append([finding])
        elif group is not None and finding.first_step - group[0].first_step <= _TOGETHER:
            group.append(finding)
        else:
            last[key] = [finding]
            groups.append(last[key])
    for group in groups:
        group.sort(key=lambda finding: -finding.severity)
    return groups


def _explains(cause: Sequence[Finding], finding: Finding) -> bool:
    rule, severity = cause[0].rule, max(one.severity for one in cause)
    is_problem = severity >= Severity.WARNING
    # what is only worth knowing explains no problem, unless the learning rate or updates are too large
    too_large = rule in {"learning_rate", "update_ratio"} and cause[0].value > cause[0].threshold
    if not is_problem and not too_large and finding.severity > severity:
        return False
    first = min(one.first_step for one in cause)
    last = max(one.last_step for one in cause)
    if not first <= finding.first_step <= last + _AFTER:
        return False
    is_0 = rule == "learning_rate" and cause[0].value == 0.0
    # updates that are too small are no sign of divergence
    if finding.rule == "update_ratio" and finding.value < finding.threshold and not (is_0 or rule in _STOPS):
        return False
    if not _may_set_up(cause, finding):
        return False
    if rule == "learning_rate":
        return finding.rule in (_NOT_LEARNING if is_0 else _DIVERGED)
    if rule == "update_ratio" and cause[0].value < cause[0].threshold:
        return False
    if finding.rule in _SET_UP and finding.severity < Severity.WARNING and rule != "collapsing_router":
        # nothing else causes that a part is frozen, or not passed to the optimizer
        return False
    return _is_connected(cause, finding)


def _may_set_up(cause: Sequence[Finding], finding: Finding) -> bool:
    """Return whether the cause may explain a finding about how a loop or a model is set up.

    Any other finding it may. The text of `NotUpdated` tells whether the optimizers are known.
    """
    rule = cause[0].rule
    if finding.rule == "accumulating" and rule == "not_updated":
        return any(text in cause[0].message for text in MAY_LACK)
    if any(text in finding.message for text in LEFT_OUT):
        return rule == "collapsing_router"
    if finding.rule not in _SET_UP:
        return True
    first, last = min(one.first_step for one in cause), max(one.last_step for one in cause)
    if rule == "learning_rate":
        # that of the same group falls in about the same step
        is_of_group = OF_GROUP in finding.message and finding.first_step <= first + _TOGETHER
        return is_of_group or any(text in finding.message for text in MAY_LACK)
    if rule == "nonfinite" and last + _TOGETHER < finding.first_step:
        # a step that was skipped, for example
        return finding.tensor is not None and any(one.tensor == finding.tensor for one in cause)
    return finding.first_step > first or rule not in _WHOLE


def _is_connected(cause: Sequence[Finding], finding: Finding) -> bool:
    """Return whether one concerns the whole run, or the tensors are those of related modules."""
    rule = cause[0].rule
    if (rule, finding.rule) in _ANYWHERE or (rule in _SPREADS and cause[0].severity >= Severity.WARNING):
        return True
    if rule == "collapsing_router" and ROUTED in (finding.tensor or ""):
        return True
    if any(one.tensor is None or rule in _WHOLE for one in cause):
        return True
    # a rule names a few tensors at once
    some = cause[:_LIVE]
    return finding.tensor is not None and any(_leads_to(str(one.tensor), finding.tensor) for one in some)


def _leads_to(cause: str, effect: str) -> bool:
    """Return whether the gradient of a tensor comes through the module of another, from their names.

    That is so for tensors of one module or numbered block, for a module and one in it, and for a module with
    a lower number.

    >>> _leads_to("blocks.3.mlp.w", "blocks.3.attn.w"), _leads_to("body.2.out", "body.1.weight")
    (True, True)
    >>> _leads_to("body.1.out", "body.2.weight"), _leads_to("encoder.weight", "head.weight")
    (False, False)
    """
    for one, other in zip(cause.split(".")[:-1], effect.split(".")[:-1], strict=False):
        numbers = [re.findall(r"\d+", part)[-1:] for part in (one, other)]
        if one == other and not numbers[0]:
            continue
        return all(numbers) and int(numbers[1][0]) <= int(numbers[0][0])
    return True


def _rank(rule: str) -> int:
    return _ORDER.index(rule) if rule in _ORDER else len(_ORDER)
