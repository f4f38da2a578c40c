"""Follow a run while it is written: an updated frame in a terminal, otherwise a line for each change."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gradiometer.cli import tables
from gradiometer.cli.show import plain
from gradiometer.extras import require
from gradiometer.rules import counts_text, headlines, summarize
from gradiometer.runs import scalars_of, to_json
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from gradiometer.rules import Finding
    from gradiometer.runs import Run
    from gradiometer.stats import TableReport

# number of last steps in the curves, and for steps per second
_CURVE: Final = 2000
_PACE: Final = 50
_WORST: Final = 50
_IN_JSON: Final = 10
_FINDINGS: Final = 5
_BARS: Final = "▁▂▃▄▅▆▇█"
_NONFINITE: Final = "!"
_WIDE: Final = 100.0


@dataclass(frozen=True)
class Frame:
    """The current state of a run.

    ``step`` is the last step on disk, ``recorded_step`` the last with tensors: ``total_norm`` and ``report``
    are those of its gradients. ``steps``, ``skipped`` and ``nonfinite`` are the numbers of steps, of skipped
    updates, and of steps with a NaN or Inf in a gradient. ``age`` is in seconds since the last step ended.
    ``steps_per_second`` is the average over the last 50 steps, without those of earlier attempts. The
    findings are sorted, most severe first, then latest first.
    """

    run: str
    model: str
    device: str
    closed: bool
    fault: str | None
    attempt: int
    step: int | None
    recorded_step: int | None
    steps: int
    skipped: int
    nonfinite: int
    age: float | None
    steps_per_second: float | None
    scalars: dict[str, float]
    total_norm: float | None
    loss_curve: Sequence[float]
    norm_curve: Sequence[float]
    findings: Sequence[Finding]
    report: TableReport[Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the curves."""
        left_out = {"report", "loss_curve", "norm_curve"}
        values = {name: x for name, x in vars(self).items() if name not in left_out}
        values["findings"] = [finding.to_dict() for finding in self.findings]
        values["worst"] = {} if self.report is None else plain(self.report, _IN_JSON)["tensors"]
        return values

    @property
    def changes(self) -> tuple[Any, ...]:
        """The values whose change makes a new line of output."""
        return self.step, self.steps, self.closed, self.fault, [asdict(f) for f in self.findings]


def look(run: Run, now: float | None = None) -> Frame:
    """Return the current state of a run; ``now`` is the Unix time."""
    compute = require("pyarrow.compute", "monitor", "The command line")
    steps, info = run.steps, run.info
    drawn = steps.select(["step", "attempt", "time", "loss", "total_norm"])
    tail = drawn.slice(max(len(steps) - _CURVE, 0)).to_pylist()
    last = tail[-1] if tail else None
    recorded = steps.filter(steps["recorded"])["step"]
    recorded_step = recorded[-1].as_py() if len(recorded) else None
    record = None if recorded_step is None else run.record(recorded_step)
    bad = compute.greater(compute.add(steps["n_nan"], steps["n_inf"]), 0)
    blackbox = run.blackbox
    attempt = max((entry["attempt"] for entry in info.get("attempts", [])), default=1)
    if blackbox is not None and blackbox.get("attempt", attempt) < attempt:
        blackbox = None  # the fault of an earlier attempt
    return Frame(
        run=str(run.path),
        model=info.get("model", ""),
        device=info.get("device", ""),
        closed=bool(info.get("closed")),
        fault=None if blackbox is None else summarize(blackbox),
        attempt=attempt,
        step=last and last["step"],
        recorded_step=recorded_step,
        steps=len(steps),
        skipped=compute.sum(steps["skipped"]).as_py() or 0,
        nonfinite=compute.sum(bad).as_py() or 0,
        age=last and max((time.time() if now is None else now) - last["time"], 0.0),
        steps_per_second=_pace(tail),
        scalars=scalars_of(steps.slice(len(steps) - 1))[0] if tail else {},
        total_norm=None if record is None else record.total("norm"),
        loss_curve=[row["loss"] for row in tail if row["loss"] is not None],
        norm_curve=[row["total_norm"] for row in tail if row["total_norm"] is not None],
        findings=sorted(run.findings, key=lambda f: (-f.severity, -f.last_step)),
        report=None if record is None else record.report(),
    )


def _pace(tail: Sequence[dict[str, Any]]) -> float | None:
    """Return the steps per second over the last steps of this attempt."""
    rows = [row for row in tail[-_PACE:] if row["attempt"] == tail[-1]["attempt"]]
    if len(rows) < 2 or rows[-1]["time"] <= rows[0]["time"]:
        return None
    return float((len(rows) - 1) / (rows[-1]["time"] - rows[0]["time"]))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in ``width`` characters: the maximum of each group of values, or ``!`` if not finite.

    Values that span more than two orders of magnitude are drawn on a log scale.

    >>> sparkline([0.0, 1.0, 2.0, float("nan"), 7.0], 5)
    '▁▂▃!█'
    """
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    shares = [values[a:b] for a, b in itertools.pairwise(edges)]
    tops = [max(share) if all(map(math.isfinite, share)) else None for share in shares]
    finite = [x for x in tops if x is not None]
    if finite and min(finite) > 0 and max(finite) > _WIDE * min(finite):
        tops = [None if x is None else math.log(x) for x in tops]
        finite = [x for x in tops if x is not None]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    return "".join(_NONFINITE if x is None else _BARS[round(7 * ((x - low) / span))] for x in tops)


def render(seen: Frame, width: int, height: int) -> RenderableType:
    """Return a frame that fits a terminal."""
    lines = [tables.line((tables.cut(seen.run, width), "bold")), _state(seen)]
    if seen.fault is not None:
        lines.append(tables.line((seen.fault, "bold red")))
    if seen.step is None:
        return tables.group(*lines, tables.line("no step is on disk yet"))
    lines.append(tables.line("  ".join(_progress(seen))))
    for name, value, curve in (
        ("loss", seen.scalars.get("loss"), seen.loss_curve),
        ("total norm", seen.total_norm, seen.norm_curve),
    ):
        if value is not None:
            start = f"{name:10}  {tables.number(value, 5):>10}  "
            lines.append(tables.line(start, (sparkline(curve, width - len(start)), "cyan")))
    listed = tables.findings(seen.findings, _FINDINGS, advice=False, width=width)
    lines += [tables.line(counts_text(seen.findings)), *listed] if listed else []
    shown = min(len(headlines(seen.findings)), _FINDINGS) - 1 if listed else 0
    # minus a gap, a title, a header and the line of the cursor
    room = height - len(lines) - shown - 4
    if seen.report and room > 0:
        title = f"tensors of step {seen.recorded_step}, worst first"
        lines += [tables.text(""), tables.line((title, "bold"))]
        lines.append(tables.rows(seen.report, min(room, _WORST), width))
    return tables.group(*lines)


def _state(seen: Frame) -> RenderableType:
    state = ("closed", "green") if seen.closed else ("being written", "cyan")
    age = "" if seen.age is None or seen.closed else f", last step {tables.span(seen.age)} ago"
    return tables.line(state, f"{age}  {seen.model}" + (f" on {seen.device}" if seen.device else ""))


def _progress(seen: Frame) -> list[str]:
    found = [f"step {seen.step}", f"{seen.steps:,} steps"]
    found += [] if seen.steps_per_second is None else [f"{tables.number(seen.steps_per_second)} steps/s"]
    found += [f"attempt {seen.attempt}"] * (seen.attempt > 1)
    # a narrow terminal cuts off the end
    found += [f"{n:,} {what}" for n, what in ((seen.skipped, "skipped"), (seen.nonfinite, "not finite")) if n]
    return found + tables.scalars_text({name: x for name, x in seen.scalars.items() if name != "loss"})


def _line(seen: Frame) -> str:
    if seen.step is None:
        return f"{seen.run}: no step is on disk yet"
    found = _progress(seen)
    found[1:2] = tables.scalars_text({k: v for k, v in seen.scalars.items() if k == "loss"})
    found += [] if seen.total_norm is None else [f"total norm {tables.number(seen.total_norm, 5)}"]
    first = headlines(seen.findings)[:1]
    found += [f"{counts_text(seen.findings)}; the first: {one.message}" for one in first]
    return "  ".join([*found, *(["closed"] if seen.closed else []), *([seen.fault] if seen.fault else [])])


def watch(
    run: Run,
    console: Console,
    *,
    interval: float = 1.0,
    once: bool = False,
    follow: bool = False,
    as_json: bool = False,
) -> None:
    """Show a run until it is closed; with ``once``, only as it is now, and with ``follow``, also after that.

    A terminal shows a frame that is updated; anything else gets a line for each change, or one of JSON on
    stdout.
    """
    live = None
    if console.is_terminal and not (once or as_json):
        live = require("rich.live", "monitor", "The command line").Live(console=console, auto_refresh=False)
    changes: Any = None
    seen: Frame | None = None
    updated = 0.0
    with _interrupted() as interrupted, live or nullcontext():
        while True:
            now = time.time()
            if run.refresh() or seen is None:
                seen = look(run, now)
            elif seen.age is not None:
                # nothing new to read
                seen = replace(seen, age=seen.age + max(now - updated, 0.0))
            updated = now
            if live is not None:
                live.update(render(seen, console.width, console.height), refresh=True)
            elif seen.changes != changes:
                if as_json:
                    print(to_json(seen.to_dict(), indent=None), flush=True)
                elif once:
                    console.print(render(seen, console.width, console.height))
                else:
                    print(printable(_line(seen)), flush=True)
            changes = seen.changes
            if once or (seen.closed and not follow):
                return
            time.sleep(interval)
            if interrupted.is_set():
                raise KeyboardInterrupt


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Record a Ctrl-C in addition to raising it: Python ignores exceptions while it frees an object."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(_signal: int, _frame: object) -> None:
        noted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note) or signal.SIG_DFL
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
