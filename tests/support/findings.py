"""A finding to test with."""

from __future__ import annotations

from gradiometer.rules.finding import Finding, Severity


def finding(step=3, tensor="blocks.0.weight", severity=Severity.ERROR, rule="nonfinite", **fields):
    """Return a finding about a gradient in one step, but for these fields."""
    values = {"last_step": step, "kind": "grads", "value": 3.0, "threshold": 0.0}
    values |= {"message": f"{tensor}.grad: 3 NaN", "advice": "look at the loss scale"}
    return Finding(rule, severity, step, tensor=tensor, **values | fields)
