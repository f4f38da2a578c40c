"""The output of the commands as rich renderables, which adapt to the terminal's width and colours."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Any, Final

from gradiometer import stats
from gradiometer.columns import Flag
from gradiometer.extras import require
from gradiometer.recorder import KINDS
from gradiometer.rules import Severity, headlines
from gradiometer.terminal import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from gradiometer.cli.doctor import Doctor
    from gradiometer.cli.show import Shown
    from gradiometer.rules import Finding
    from gradiometer.runs import Comparison, Difference, Verification
    from gradiometer.stats import TableReport

_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_BAD: Final = Flag.NAN | Flag.INF | Flag.EXPLODING
# number of lines above the first tensor in the table of a report
_HEAD: Final = 4
# styles of the columns that a narrow terminal has no room for, in this order
_DROPPED: Final = {"finite": 0, "count": 1, "fraction": 2, "cosine": 3}


def text(*parts: str | tuple[str, str]) -> Text:
    """Return `printable` text without parsing markup, because a tensor may be named ``[red]``."""
    safe = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    assembled: Text = require("rich.text", "monitor", "The command line").Text.assemble(*safe)
    return assembled


def line(*parts: str | tuple[str, str]) -> Text:
    """Return one line of text, which is cut off at the end of the terminal."""
    whole = text(*parts)
    whole.no_wrap, whole.overflow = True, "ellipsis"
    return whole


def grid(columns: Iterable[str], **options: Any) -> Table:
    """Return a table without lines; a column whose name begins with ``>`` is aligned right."""
    table: Table = require("rich.table", "monitor", "The command line").Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", **options
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return table


def group(*parts: RenderableType) -> RenderableType:
    """Return the parts one below the other."""
    parts_: RenderableType = require("rich.console", "monitor", "The command line").Group(*parts)
    return parts_


def number(x: float | None, digits: int = 3) -> str:
    """Return a number for a table; ``-`` for None."""
    return "-" if x is None else stats.number(x, digits)


def span(seconds: float) -> str:
    """Return a time such as ``3.0 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"at an unknown time ({seconds:g})"


def cut(name: str, width: int) -> str:
    """Return a name, cut to ``width`` characters."""
    # the end of a name is more specific than its beginning
    name = printable(name)
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]


def scalars_text(scalars: Mapping[str, float]) -> list[str]:
    """Return texts such as ``loss 2.31``, the loss first."""
    order = sorted(scalars, key=lambda name: (name != "loss", name != "lr"))
    return [f"{name} {number(scalars[name], 5)}" for name in order]


def findings(
    found: Sequence[Finding], most: int | None = None, *, advice: bool = True, width: int | None = None
) -> list[RenderableType]:
    """Return the headlines of findings, what follows from each, and their advice.

    With ``width``, each is cut to one line of that width, without what follows from it.
    """
    made = headlines(found)
    if not made:
        return []
    table = grid(["", ""], show_header=False)
    for headline in made[:most]:
        sentence = str(headline)[7:].lstrip()
        if width is not None and len(sentence) > width - 9:
            sentence = sentence[: width - 10] + "…"
        table.add_row(text((str(headline.severity), _STYLES[headline.severity])), text(sentence))
        if headline.advice and advice:
            table.add_row("", text((headline.advice, "dim")))
        if headline.explained and width is None:
            steps: dict[str, int] = {}
            for later in headline.explained:
                steps.setdefault(later.rule, later.first_step)
            then = ", ".join([f"{rule} at step {step}" for rule, step in steps.items()])
            table.add_row("", text((f"then {then}", "dim")))
    more = 0 if most is None else len(made) - most
    left = f"… {more} more {'cause' if more == 1 else 'causes'}"
    return [table, *([text((left, "dim"))] if more > 0 else [])]


def rows(report: TableReport[Any], most: int | None, width: int) -> RenderableType:
    """Return the first rows of a report, with as many columns as fit into ``width`` characters."""
    table = report.table(most)
    header, cells = table.header[1:], [row[1:] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    styles = {i: report.schema[name].style for i, name in enumerate(report.schema.shown)}
    # drop the least informative columns first, but not the flags
    leave = [i for i, heading in enumerate(header) if heading != "flags"]
    leave.sort(key=lambda i: _DROPPED.get(styles.get(i, ""), len(_DROPPED)))
    kept = list(range(len(header)))
    while leave and sum(widths[i] + 2 for i in kept) > width - 20:
        kept.remove(leave.pop(0))
    room = max(width - sum(widths[i] + 2 for i in kept), 8)
    found = grid(["name", *[("" if header[i] == "flags" else ">") + header[i] for i in kept]])
    for row, cell in zip(report.ordered(), cells, strict=False):
        found.add_row(text(cut(row.name, room)), *(text(cell[i]) for i in kept), style=_style(row))
    return found


def _style(row: Any) -> str:
    """Return the colour of a row of a report."""
    flags = getattr(row, "flags", 0)
    broken = getattr(row, "n_nan", 0) + getattr(row, "n_inf", 0)
    return "red" if flags & _BAD or broken else "yellow" if flags else ""


def shown(found: Shown, top: int | None, console: Console) -> RenderableType:
    """Return a step: its scalars, a table of its tensors, and its findings."""
    record = found.record
    facts = [found.run, _date(record.time), *scalars_text(record.scalars)]
    lines: list[RenderableType] = [text((f"step {record.step}", "bold"), "  " + "  ".join(facts))]
    if record.skipped:
        lines.append(text(("its update was skipped", "yellow")))
    lines.append(text(""))
    if not record.has(found.kind):
        near = " and ".join(map(str, found.nearest)) or "none"
        lines.append(text(f"its tensors were not recorded; the nearest steps that have tensors: {near}"))
    elif _fits(report := found.report.to_string(top), console):
        styles = [""] * _HEAD + [_style(row) for row in found.report.ordered()[:top]]
        styles += [""] * report.count("\n")
        lines += [text((part, style)) for part, style in zip(report.split("\n"), styles, strict=False)]
    else:
        table = found.report.table(top)
        lines += [text(table.headline), rows(found.report, top, console.width)]
        lines += [text((table.more, "dim"))] * bool(table.more)
    if len(found.attempts) > 1:
        lines.append(text((_attempts(found), "dim")))
    if len(found.report) < found.measured:
        lines.append(text((f"{len(found.report)} of {found.measured} tensors match --name", "dim")))
    listed = findings(found.findings)
    return group(*lines, *([text("")] if listed else []), *listed)


def _attempts(found: Shown) -> str:
    """Return which attempts there are, and which of them wrote the step."""
    wrote = [f"{x.number} from step {x.first_step}" for x in found.attempts if x.first_step is not None]
    note = f"attempts: {'…, ' * (len(wrote) > 4)}{', '.join(wrote[-4:])}; attempt {found.attempt} wrote this "
    return note + "step; --attempt N shows the run as it was after attempt N"


def _fits(report: str, console: Console) -> bool:
    # a file or a pipe has no width
    return not console.is_terminal or max(map(len, report.split("\n"))) <= console.width


def comparison(found: Comparison, top: int | None) -> RenderableType:
    """Return the first difference of two runs."""
    table = grid(["", "run", ">steps", ">from", ">to", ">with tensors"])
    for name, side in (("A", found.a), ("B", found.b)):
        ends = ["-" if x is None else str(x) for x in (side.first, side.last)]
        table.add_row(name, text(side.path), f"{side.steps:,}", *ends, f"{side.recorded:,}")
    how = f"within a relative tolerance of {found.rtol:g}" if found.rtol else "exactly"
    lines: list[RenderableType] = [table, text("")]
    if found.apart and found.distances is not None:
        lines += [*_apart(found, top), text("")]
    lines += [text(note) for note in _notes(found)]
    both = f"{found.tensors} tensors, {found.common} steps in both"
    if not found.not_compared:
        lines += _bits(found)
    if not found.compared and not found.first:
        lines.append(text(("No step has tensors in both runs.", "bold red"), " The scalars are equal."))
    elif found.identical:
        lines += _later(found.scalars, "scalars, which do not count, differ: ")
    elif not found.first:
        both = f"{found.tensors} tensors, {found.compared} steps"
        others = found.only_a or found.only_b or found.shapes
        style, end = ("yellow", "; the runs do not have the same tensors.") if others else ("green", ".")
        what = "All statistics are" if found.bits else "Everything that both runs recorded is"
        lines.append(text((f"{what} equal{end}", style), f" Compared {how}: {both}."))
    else:
        what = "The runs" if found.not_compared else "Statistics or scalars"
        first = f"{what} first differ at step {found.step}."
        lines.append(text((first, "bold red"), f" Compared {how}: {both}."))
        lines += _parting(found, top)
    if found.not_compared:
        note = f"Only statistics were compared, not bits: {found.not_compared}."
        if not (found.a.fingerprints and found.b.fingerprints):
            note += " Monitor(fingerprint=True) records them."
        lines.append(text((note, "dim")))
    if found.apart and found.distances is None:
        lines += _apart(found, top)
    if found.total_norm is not None and found.first and not found.identical:
        step, a, b = found.total_norm
        note = f"total norm at step {step}, the last in both: {number(a, 6)} in A, {number(b, 6)} in B"
        lines += [text(""), text((note, "dim"))]
    return group(*lines)


def _notes(found: Comparison) -> Iterable[str]:
    for where, kinds in zip("AB", found.kinds, strict=True):
        if kinds:
            yield f"only {where} has recorded {' and '.join(kinds)}"
    for where, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            yield f"only in {where}: {shortened(names)}"
    if found.shapes:
        differ = [f"{name}, {a} in A and {b} in B" for name, (a, b) in found.shapes.items()]
        yield f"different shape or dtype: {shortened(differ)}"
    for where, steps in zip("BA", found.missing, strict=True):
        if steps:
            yield f"{where} lacks {len(steps)} steps of the other run: {shortened(list(map(str, steps)))}"
    for where, side, steps in zip("AB", (found.a, found.b), found.missing, strict=True):
        if more := side.steps - found.common - len(steps):
            yield f"only the {found.common:,} common steps are compared: {where} has {more:,} more"


def _bits(found: Comparison) -> Iterable[RenderableType]:
    """Return what the fingerprints tell."""
    style = "green" if found.identical else "yellow" if found.bits is None else "bold red"
    verdict = found.verdict[0].upper() + found.verdict[1:]
    tensors = found.tensors - len(found.shapes) - len(found.unknown)
    noun = "tensor" if tensors == 1 else "tensors"
    yield text((f"{verdict}.", style), f" Compared by fingerprint: {tensors:,} {noun}.")
    if found.unknown:
        yield text((f"without a fingerprint: {shortened(found.unknown)}", "dim"))


def _apart(found: Comparison, top: int | None) -> Iterable[RenderableType]:
    """Return how far the runs are apart, and the gradients of the step where they leave rounding."""
    distances, apart = found.distances, found.apart[0].upper() + found.apart[1:]
    if distances is None:
        is_recorded = found.a.projections and found.b.projections
        more = "" if is_recorded else " Monitor(projections=16, weights=True) records them."
        yield text((f"{apart}.{more}", "dim"))
        return
    one = distances.departure
    style = "bold red" if distances.unrelated or (one and one.lasts) else "yellow" if one else "green"
    yield text((f"{apart}.", style), f" Estimated from {distances.projections} projections.")
    head = [">distance", ">rounding\nexplains", ">times the\nstep before", ">cosine", ">its\nweight"]
    table = grid(["", f"in step {distances.worst_step:,}", *head])
    for i, row in enumerate(distances.worst(most=top), 1):
        ratio = "" if row.ratio is None else number(row.ratio, 2)
        values = [row.distance, row.limit, row.cosine, row.weight]
        distance, limit, cosine, weight = ["" if x is None else number(x, 2) for x in values]
        style = "bold" if one and one.name == row.name else ""
        table.add_row(str(i), text(row.name), distance, limit, ratio, cosine, weight, style=style)
    yield table


def _parting(found: Comparison, top: int | None) -> Iterable[RenderableType]:
    table = grid(["", "in order of computation", "statistic", ">A", ">B", ">rel. diff."])
    for i, difference in enumerate(found.first[:top], 1):
        what, a, b = _most_telling(difference)
        numbers = number(a, 6), number(b, 6), _relative(a, b)
        table.add_row(str(i), text(difference.name), what, *numbers, style="bold" if i == 1 else "")
    yield table
    if top is not None and len(found.first) > top:
        yield text((f"… {len(found.first) - top} more differ in this step", "dim"))
    yield from _later([d for d in found.scalars if d.step != found.step], "differ later: ")


def _later(scalars: Sequence[Difference], what: str) -> Iterable[RenderableType]:
    if scalars:
        yield text(what + shortened([f"{d.name} at step {d.step}" for d in scalars]))


def _most_telling(difference: Difference) -> tuple[str, float | None, float | None]:
    """Return the most informative column that differs: counts of NaN and Inf, then a norm, then others."""
    kind = KINDS.get(difference.kind or "")

    def rank(name: str) -> tuple[int, float]:
        column = None if kind is None else kind.schema.columns[kind.schema.index[name]]
        a, b = [0.0 if x is None else x for x in difference.values[name]]
        apart = abs(a - b) / max(abs(a), abs(b), 1e-300)
        if name == "numel":
            return 0, 0.0
        if column is not None and column.style == "rare":
            return 1, 0.0
        place = 2 if name.startswith("sumsq") else 3 if column is not None and column.merge == "max" else 4
        return place, -apart

    name = min(difference.values, key=rank)
    a, b = difference.values[name]
    if name.startswith("sumsq") and a is not None and b is not None:
        # a file from someone else may have negative numbers
        a, b = [math.sqrt(x) if x >= 0 else math.nan for x in (a, b)]
        return name.replace("sumsq", "norm"), a, b
    return {"value": "", "numel": "elements"}.get(name, name), a, b


def _relative(a: float | None, b: float | None) -> str:
    if a is None or b is None or not math.isfinite(a - b) or a == b:
        return ""
    return number(abs(a - b) / max(abs(a), abs(b)), 2)


def verification(found: Verification) -> RenderableType:
    """Return how many files are whole, and a line for each that is not."""
    states = {"whole": "green", "no digest": "yellow", "damaged": "bold red", "missing": "bold red"}
    counts = [f"{len(files)} {state}" for state in states if (files := found.of(state))]  # type: ignore[arg-type]
    # every run has a file: 12 files whole, 1 damaged
    counts[0] = counts[0].replace(" ", " file " if counts[0].startswith("1 ") else " files ", 1)
    table = grid(["", "", ""], show_header=False)
    for file in found.files:
        if file.state != "whole":
            table.add_row(text((file.state, states[file.state])), text(file.name), text(file.reason))
    style = "green" if found.whole else "bold red"
    return group(text(f"{found.path}: ", (", ".join(counts), style)), table)


def doctor(found: Doctor) -> RenderableType:
    """Return the state of this machine, with the problems at the end."""
    facts = grid(["", ""], show_header=False)
    for name, version in found.versions.items():
        if version is not None or name == "triton":
            facts.add_row(name, version or "not installed")
    facts.add_row("triton's driver", text(found.triton))
    facts.add_row("C++ compiler", text(found.compiler or "none"))
    traces = "yes" if found.trace_autograd_ops else "no"
    facts.add_row("backward() in a graph", f"trace_autograd_ops: {traces}")
    facts.add_row("TRITON_INTERPRET", "set" if found.interpreted else "not set")
    if found.run_dir is not None and found.free is not None:
        facts.add_row("space for runs", text(f"{found.free / 2**30:,.1f} GiB free at {found.run_dir}"))
    devices = grid(["", ""], show_header=False)
    for device in found.devices:
        devices.add_row(text((device.device, "bold")), text(device.name))
        memory = [] if device.memory is None else [f"{device.memory / 2**30:,.0f} GiB of memory"]
        rate = device.gigabytes_per_second
        speed = [] if rate is None else [f"{number(rate, 2)} GB/s measured with float32"]
        works = ("works", "green") if device.works else ("does not work", "red")
        devices.add_row("", text(f"read by {', '.join([device.path, *speed, *memory])}: ", works))
        devices.add_row("", text(f"fp64: {device.fp64}"))
    packages = grid(["package", "version", "needed for", "install with"])
    for name, package in found.packages.items():
        have = package["version"]
        how = "" if have else f"pip install 'gradiometer[{package['extra']}]'"
        shown = text((have or "missing", "green" if have else "dim"))
        packages.add_row(text(name), shown, package["use"], text(how))
    problems: list[RenderableType] = [text(("no problem found", "green"))]
    if found.problems:
        n = len(found.problems)
        problems = [text((f"{n} problem{'s' if n > 1 else ''} found", "bold red"))]
        for p in found.problems:
            problems += [text((f"  {p.what}", "red")), text(f"      {p.fix}")]
    parts: Iterable[Sequence[RenderableType]] = ([facts], [devices], [packages], problems)
    gap = text("")
    return group(*itertools.chain.from_iterable((*part, gap) for part in parts))
