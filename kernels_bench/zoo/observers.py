"""What watches a run, and the headlines that it reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

import gradiometer as gm
from gradiometer import rules
from gradiometer.rules import Severity
from kernels_bench.zoo.models import Attention, Experts


@dataclass(frozen=True)
class Headline:
    """One reported cause.

    Attributes:
        rule: the rule or detector.
        is_warning: whether it is more than an information.
        first_step: the step at which it began, as reported.
        seen: the step at which it was first reported.
        text: its message, advice and tensors.
    """

    rule: str
    is_warning: bool
    first_step: int
    seen: int
    text: str


class Ours:
    """A monitor with the default rules."""

    name = "gradiometer"

    def __init__(self, t):
        self.steps_seen = {}
        watched = t.model if t.watched is None else t.watched
        self.taps = taps_of(t.model)
        options = {"weights": True, "updates": True, "optimizer": t.optimizers, "states": 10}
        self.monitor = gm.Monitor(watched, taps=self.taps, sinks=[self], **options)
        self.scaler = t.scaler

    def record(self, _):
        self.monitor.record(inv_scale=None if self.scaler is None else gm.inverse_scale(self.scaler))

    def advance(self, loss, lr):
        self.monitor.advance(loss=loss, lr=lr)
        # so that each step's findings come alone, and the delay does not depend on the machine
        self.monitor.flush()

    # a sink

    def start(self, info):
        pass

    def write(self, _, findings):
        for finding in findings:
            self.steps_seen.setdefault(finding.key, []).append(finding.last_step)

    def fault(self, fault):
        pass

    def close(self):
        pass

    def finish(self):
        """Return the headlines, the first one first."""
        self.monitor.close()
        if self.taps is not None:
            self.taps.remove()
        # a replaced parameter is reported as a failure, and that is right
        failed = {kind: n for kind, n in self.monitor.failures.items() if not re.search("parameters", kind)}
        if failed or self.monitor.dropped:
            raise RuntimeError(f"telemetry failed: {failed}, {self.monitor.dropped} steps dropped")
        return [self._headline(*group) for group in grouped(self.monitor.findings)]

    def _headline(self, head, findings):
        steps = [
            step
            for f in findings
            for step in self.steps_seen.get(f.key, [f.last_step])
            if f.first_step <= step <= f.last_step
        ]
        text = [head.message, *(f"{f.message}. {f.advice} {f.tensor or ''}" for f in findings)]
        seen = min(steps, default=head.first_step)
        return Headline(head.rule, head.severity >= Severity.WARNING, head.first_step, seen, "\n".join(text))


def taps_of(model):
    """Return taps of all ReLUs, attention logits and routers of a model; None if it has none of them."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, (Attention, Experts)):
            module.name = name
            rows = (
                ("max_logit_bound",) if isinstance(module, Attention) else ("expert_load", "router_entropy")
            )
            names += [f"{name}.{row}" for row in rows]
    patterns = {"relu": nn.ReLU} if any(isinstance(module, nn.ReLU) for module in model.modules()) else None
    return gm.Taps(model, patterns, names=names) if patterns or names else None


def grouped(findings):
    """Return each headline and its findings; without grouping, each finding, the most severe first."""
    if (headlines := getattr(rules, "headlines", None)) is not None:
        return [(headline, headline.findings) for headline in headlines(findings)]
    ranked = sorted(findings, key=lambda f: (-f.severity, f.first_step))
    return [(finding, [finding]) for finding in ranked]
