"""The head of the report page: the run, how it ended, and the fault in the black box."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.runs import Run

MOST_LETTERS: Final = 2000  # of a fault's message


def head_of(run: Run, step: Tensor, recorded: Tensor, loss: Tensor, skipped: int) -> dict[str, Any]:
    """Return the values of the page's head.

    ``recorded`` are the steps with tensors, of all steps, ``(S,) int64``; ``loss`` has that of each step that
    was given one, and may be NaN; ``skipped`` is the number of skipped updates.
    """
    info, catalog = run.info, run.catalog
    tensors, kinds = len(catalog.parameters) + len(catalog.taps), [kind.name for kind in catalog.in_ring]
    attempts = info.get("attempts") or []
    elements = sum(math.prod(shape) for shape in catalog.parameters.shapes)
    versions = info.get("versions") or {}
    facts = [
        ("Model", str(info.get("model", ""))),
        ("Tensors", f"{tensors:,}, {elements:,} elements, {', '.join(kinds).replace('_', ' ')}"),
        ("Steps", _steps(step, recorded)),
        ("Started", _date(info.get("created"))),
        ("Device", str(info.get("device", ""))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    if skipped:
        facts.insert(3, ("Skipped updates", f"{skipped:,}"))
    if len(attempts) > 1:
        facts.insert(3, ("Attempts", f"{len(attempts)}: the run was resumed"))
    lost = sum(attempt.get("lost", 0) for attempt in attempts)
    if lost:
        facts.insert(3, ("Steps lost", f"{lost:,}, which could not be written to disk"))
    starts = [attempt.get("first_step", 0) for attempt in attempts]
    return {"facts": facts, "attempts": starts, **_ending(run, loss)}


def _ending(run: Run, loss: Tensor) -> dict[str, Any]:
    """Return the state of the run, and lines about the fault in the black box; None without a fault."""
    attempts = run.info.get("attempts") or []
    state = {"text": "✓ closed", "mood": "good"}
    if not run.info.get("closed"):
        state = {"text": "◌ not closed: still running, or killed", "mood": "open"}
    blackbox = run.blackbox
    if not blackbox or not isinstance(blackbox, dict):
        return {"state": state, "fault": None}
    last = max([entry.get("attempt", 1) for entry in attempts], default=1)
    attempt, reason = blackbox.get("attempt", last), str(blackbox.get("reason", "fault"))
    of = f" of attempt {attempt}" if len(attempts) > 1 else ""
    lines = [f"Black box{of}: {reason} at step {blackbox.get('step', '?')}"]
    if where := blackbox.get("first_nonfinite"):
        lines.append(f"First non-finite: {where}")
    if message := blackbox.get("message"):
        lines.append(str(message)[:MOST_LETTERS])
    if attempt != last:
        lines.append(f"Attempt {last} continued the run.")
    elif reason == "non-finite loss" and len(loss) and bool(loss[-1].isfinite()):
        lines.append("The loss was finite again at the end.")
    else:
        state = {"text": f"✖ {reason}", "mood": "broken"}
    return {"state": state, "fault": lines}


def _date(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(seconds)))
    except (TypeError, ValueError, OverflowError, OSError):
        return f"unknown ({seconds!r:.40})"


def _steps(step: Tensor, recorded: Tensor) -> str:
    if not len(step):
        return "none yet"
    text = f"{int(step[0]):,} to {int(step[-1]):,}" if len(step) > 1 else f"only step {int(step[0]):,}"
    return text if len(recorded) == len(step) else f"{text}, {len(recorded):,} of {len(step):,} recorded"
