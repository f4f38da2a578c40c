"""The console sink: a line every few seconds, findings at once, a fault as a panel."""

from __future__ import annotations

import io
import math
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import Flag
from gradiometer.extras import require
from gradiometer.rules import Severity
from gradiometer.sinks.selection import News, check_key, check_severity, lookup
from gradiometer.terminal import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from gradiometer.recorder import RunInfo, StepRecord
    from gradiometer.rules import Fault, Finding

_STYLES: Final = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_SHORT: Final = {"grads/total_norm": "grad norm"}
_WORDS: Final = {
    Flag.NAN: "with NaN",
    Flag.INF: "with Inf",
    Flag.EXPLODING: "exploding",
    Flag.DEAD: "dead",
    Flag.VANISHING: "vanishing",
}
_STEPS: Final = 8
_FINDINGS: Final = 4


class Console:
    """Prints the newest step every few seconds, findings, and faults as a panel, to stderr.

    A finding is printed when it begins, and again if it becomes more severe.

    Output is coloured on a terminal, plain text in a file. Lines stay above a progress bar of tqdm or rich.

    Args:
        show: keys to show, in this order, as in `gradiometer.sinks.selection`. A key may name one tensor:
            ``"grads/head.weight/norm"``.
        seconds: the minimum time between two lines of steps.
        severity: findings below it are not printed.
        most: the maximum number of findings printed at once: the worst ones, and a count of the rest.
        file: the output file; by default the value of ``sys.stderr`` when a line is printed.

    Raises:
        ImportError: without rich; ``pip install 'gradiometer[monitor]'`` installs it.
        ValueError: for an invalid key.
        TypeError: for a severity that is not one.
    """

    # so that the log does not show them again
    shows_findings: Final = True

    def __init__(
        self,
        show: Sequence[str] = ("train/loss", "train/lr", "grads/total_norm"),
        *,
        seconds: float = 5.0,
        severity: Severity = Severity.INFO,
        most: int = 8,
        file: TextIO | None = None,
    ) -> None:
        require("rich", "monitor", "sinks.Console")
        self.show = (show,) if isinstance(show, str) else tuple(show)
        for key in self.show:
            check_key(key)
        check_severity("Console: severity", severity)
        self._seconds, self._severity, self._most, self._file = seconds, severity, most, file
        self._news = News()
        self._widths = dict.fromkeys(self.show, 0)
        self._due = -math.inf
        self._last: StepRecord | None = None  # the last one shown
        self._newest: StepRecord | None = None
        self._printed: dict[tuple[object, ...], Severity] = {}

    def __repr__(self) -> str:
        return "Console()"

    def start(self, info: RunInfo) -> None:
        """Print the model, the kinds and number of tensors, and how often they are recorded."""
        catalog = info.catalog
        tensors, kinds = len(catalog.parameters) + len(catalog.taps), [kind.name for kind in catalog.in_ring]
        every = "every step" if info.every == 1 else f"every {info.every} steps"
        text = f"watching {info.model}: {', '.join(kinds)} of {tensors} tensors, {every}"
        self._print(self._text((text, "dim")))

    def write(self, records: Sequence[StepRecord], findings: Sequence[Finding]) -> None:
        """Print new findings, and the newest step if a line is due."""
        new = [finding for finding in self._news.take(findings) if finding.severity >= self._severity]
        if new:
            self._print_findings(new)
        if not records:
            return
        self._newest = records[-1]
        now = time.monotonic()
        if now >= self._due:
            # a step with gradients is more useful than a newer one without
            recorded = [record for record in records if record.recorded]
            self._print_step((recorded or records)[-1])
            self._due = now + self._seconds

    def fault(self, fault: Fault) -> None:
        """Print the panel, except for the reason ``"exit"``."""
        if fault.reason != "exit":
            self._print(_panel(fault))

    def close(self) -> None:
        """Print the last step and the number of findings."""
        if self._newest is not None and (self._last is None or self._newest.step > self._last.step):
            self._print_step(self._newest)
        counts = [
            f"{n} {severity}" + ("s" if n != 1 and severity is not Severity.INFO else "")
            for severity in reversed(Severity)
            if (n := [*self._printed.values()].count(severity))
        ]
        if counts:
            self._print(self._text((f"findings: {', '.join(counts)}", "dim")))

    def _print_step(self, record: StepRecord) -> None:
        parts = [(f"step {record.step:>7}", "bold")]
        for key in self.show:
            value = lookup(record, key)
            cell = "-" if value is None else _number(value)
            # columns only grow, so that they stay aligned
            self._widths[key] = max(self._widths[key], len(cell))
            bad = value is not None and not math.isfinite(value)
            name = _SHORT.get(key, key.removeprefix("train/"))
            parts += [(f"   {name} ", "dim"), (f"{cell:>{self._widths[key]}}", "bold red" if bad else "")]
        if self._last is not None and record.step > self._last.step:
            pace = 1e3 * (record.time - self._last.time) / (record.step - self._last.step)
            parts.append((f"   {max(pace, 0.0):.1f} ms/step", "dim"))
        parts += _state(record)
        self._last = record
        self._print(self._text(*parts))

    def _print_findings(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._printed[*finding.key, finding.first_step] = finding.severity
        worst = sorted(findings, key=lambda finding: (-finding.severity, finding.first_step))
        advised = set()
        for finding in worst[: self._most]:
            style = _STYLES[finding.severity]
            head = f"{finding.severity!s:7}  step {finding.first_step}: "
            self._print(self._text((head, style), (finding.message, "")))
            # print the same advice once, not for each of a hundred tensors
            if finding.advice and finding.advice not in advised:
                advised.add(finding.advice)
                self._print(self._text((f"         try: {finding.advice}", "dim")))
        if len(worst) > self._most:
            rules = Counter(finding.rule for finding in worst[self._most :])
            rest = ", ".join(f"{n} {rule}" for rule, n in rules.items())
            self._print(self._text((f"         and {len(worst) - self._most} more: {rest}", "dim")))

    def _text(self, *parts: tuple[str, str]) -> Any:
        # a Text does not parse markup, so brackets in names are safe
        text = require("rich.text", "monitor", "sinks.Console")
        safe = [(printable(part), style) for part, style in parts]
        return text.Text.assemble(*safe, no_wrap=True, overflow="ignore")

    def _print(self, renderable: Any) -> None:
        file = self._file or sys.stderr
        if file is None:  # a program without a console
            return
        rich = require("rich.console", "monitor", "sinks.Console")
        # render here and write text, so that rich's progress bar puts it above itself
        inner = getattr(file, "rich_proxied_file", file)
        size = rich.Console(file=inner)
        page = io.StringIO()
        console = rich.Console(
            file=page,
            force_terminal=size.is_terminal,
            color_system=size.color_system if size.is_terminal else None,
            width=size.width if size.is_terminal else 110,
            highlight=False,
            legacy_windows=False,
        )
        console.print(renderable, soft_wrap=not hasattr(renderable, "renderable"))
        _write(file, _encodable(page.getvalue(), inner))


def _write(file: TextIO, text: str) -> None:
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        file.write(text)
    else:
        # clears the bars and redraws them below
        with tqdm.external_write_mode(file=file):
            file.write(text)
    file.flush()


def _encodable(text: str, file: Any) -> str:
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _number(x: float) -> str:
    if x != 0 and math.isfinite(x) and not 1e-2 <= abs(x) < 1e5:
        return f"{x:.2e}"
    return f"{x:#.4g}"


def _state(record: StepRecord) -> list[tuple[str, str]]:
    if not record.recorded:
        return [("   not recorded", "dim")]
    flags = record.flags()
    counts = {word: int((flags & int(flag) != 0).sum()) for flag, word in _WORDS.items()}
    # non-finite tensors are flagged as exploding too; count them only once
    exploding = (flags & int(Flag.EXPLODING | Flag.NAN | Flag.INF)) == int(Flag.EXPLODING)
    counts["exploding"] = int(exploding.sum())
    found = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    parts = [(f"   {found}", "yellow") if found else ("   ok", "green")]
    return parts + [("   skipped", "bold yellow")] * record.skipped


def _panel(fault: Fault) -> Any:
    modules = ("text", "console", "panel", "table")
    rich_text, console, panel, table = [require(f"rich.{name}", "monitor", "Console") for name in modules]
    text = rich_text.Text
    message = f"  {one_line(fault.message)}".rstrip()
    rows: list[Any] = [text.assemble((printable(fault.reason), "bold red"), message)]
    if fault.first_nonfinite:
        rows.append(text.assemble(("first non-finite: ", "bold"), printable(fault.first_nonfinite)))
    worst = sorted(fault.findings, key=lambda finding: (-finding.severity, finding.first_step))
    rows += [
        text(str(finding), style=_STYLES[finding.severity], no_wrap=True, overflow="ellipsis")
        for finding in worst[:_FINDINGS]
    ]
    if len(worst) > _FINDINGS:
        rows.append(text(f"and {len(worst) - _FINDINGS} more findings", style="dim"))
    last = [record for record in fault.last if record.recorded][-_STEPS:]
    if last:
        grid = table.Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("step", "loss", "grad norm", "not finite", "flagged"):
            grid.add_column(title, justify="right")
        for record in last:
            loss = "-" if record.loss is None else _number(record.loss)
            bad = record.total("n_nonfinite")
            flagged = int((record.flags() != 0).sum())
            cells = (f"{record.step}", loss, _number(record.total()), f"{bad:,.0f}", str(flagged))
            grid.add_row(*cells, style="red" if bad > 0 else "")
        rows += [text(""), grid]
    title = f"gradiometer: the last steps before step {fault.step}"
    return panel.Panel(console.Group(*rows), title=title, title_align="left", border_style="red")
