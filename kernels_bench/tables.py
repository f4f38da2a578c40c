"""A run's rows as tables, with the same cells on a terminal and in Markdown."""

from __future__ import annotations

import re

from kernels_bench.machine import one_line

# (heading, on which devices, alignment)
COLUMNS = (
    ("provider", "any", "left"),
    ("computes", "any", "left"),
    ("ms", "any", "right"),
    ("middle half", "any", "right"),
    ("GB/s", "any", "right"),
    ("ceiling", "any", "right"),
    ("launches", "cuda", "right"),
    ("host µs", "cuda", "right"),
    ("extra MiB", "any", "right"),
    ("ours / it", "any", "right"),
)

OVERVIEW = "Our time, and as a multiple of each peer's"
UNSTEADY = "~: the middle half is wider than a third of the median; the machine is busy, ignore the ratio"


def ratio(row, rows):
    """Return ours over a peer or another commit of ours, at the same level; None if either has no time."""
    if row["family"] not in {"peer", "base"} or not row["ms"]:
        return None
    # if ours was not measured at the peer's level, the eager call is compared
    for level in (row["level"], "eager"):
        for ours in rows:
            same = ours["case"] == row["case"] and ours["family"] == "ours" and ours["level"] == level
            if same and ours["ms"]:
                return ours["ms"] / row["ms"]
    return None


def is_unsteady(row):
    """Return whether the middle half of a row's times is wider than a third of their median."""
    return bool(row["ms"]) and row["ms_high"] - row["ms_low"] > row["ms"] / 3


def cells(row, rows, count="3"):
    """Return the row's cells by heading, as text; ratios with ``count`` digits."""
    share, times, extra = row["ceiling_share"], ratio(row, rows), row["extra_mib"]
    return {
        "provider": row["provider"],
        "computes": row["what"] + (f"; {row['error']}" if row["error"] else ""),
        "ms": ("~" if is_unsteady(row) else "") + digits(row["ms"]),
        "middle half": f"{digits(row['ms_low'])} - {digits(row['ms_high'])}",
        "GB/s": digits(row["gb_s"]),
        "ceiling": "" if share is None else f"{100 * share:.0f} %" if share > 0.1 else f"{100 * share:.2g} %",
        "launches": "" if row["launches"] is None else str(row["launches"]),
        "host µs": digits(row["host_us"]),
        "extra MiB": "" if extra is None else f"{extra:.1f}",
        "ours / it": "" if times is None else ("~" if is_unsteady(row) else "") + digits(times, count),
    }


def digits(value, count="3"):
    """Return a number with ``count`` significant digits; from 1e-4 on it has no exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** int(count) / 10 else f"{value:#.{count}g}".rstrip(".")


def by_case(rows):
    """Return case -> its rows, in their order."""
    found: dict = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def heading(rows):
    """Return a case's description: "gpt2 / 8: 148 tensors of float32, 15.6 M elements, 59.3 MiB"."""
    row = rows[0]
    tensors = "1 tensor" if row["tensors"] == 1 else f"{row['tensors']} tensors"
    size = f"{row['elements'] / 1e6:,.1f} M elements, {row['bytes'] / 2**20:,.1f} MiB"
    return f"{row['case']}: {tensors} of {row['dtype']}, {size}"


def columns_for(rows):
    """Return the columns of a case on its device, with their alignment."""
    return [(name, justify) for name, where, justify in COLUMNS if where in {"any", rows[0]["device"]}]


def not_measured(rows):
    """Return the providers without a time, by reason, on one line: "apex, te (not installed)"."""
    found: dict = {}
    for row in rows:
        if not row["ms"]:
            found.setdefault(row["error"], []).append(row["provider"])
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in found.items())


def overview(rows):
    """Return headings and cells of one table of all cases: our time as a multiple of each peer's."""
    peers = list(dict.fromkeys(row["provider"] for row in rows if ratio(row, rows) is not None))
    table = []
    for case, its in by_case(rows).items():
        found = {row["provider"]: row for row in its}
        # the public call, if it was measured
        ours = next((row for row in its if row["family"] == "ours" and row["ms"]), None)
        if ours is None:
            continue
        texts = cells(ours, rows)
        times = [cells(found[peer], rows, "2")["ours / it"] if peer in found else "" for peer in peers]
        table.append([case, texts["ms"], texts["ceiling"], *times])
    return ["case", "ours, ms", "ceiling", *peers], table


def markdown(result):
    """Return a run as a page's section: the command, the machine, an overview, a table for each case."""
    parts = [f"    {result['command']}", one_line(result["machine"])]
    if "base" in result:
        parts.append(f"base: commit {result['base']}")
    head, table = overview(result["rows"])
    if len(table) > 1:
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *table]
        parts += [f"### {OVERVIEW}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts += [f"### {case_markdown(rows)}" for rows in by_case(result["rows"]).values()]
    return "\n\n".join(parts) + "\n"


def case_markdown(rows):
    columns, missing = columns_for(rows), not_measured(rows)
    lines = [
        heading(rows),
        "",
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "|".join("---:" if justify == "right" else "---" for _, justify in columns) + "|",
    ]
    for row in rows:
        if row["ms"]:
            texts = cells(row, rows)
            lines.append("| " + " | ".join(texts[name].replace("|", "\\|") for name, _ in columns) + " |")
    if any(map(is_unsteady, rows)):
        lines += ["", f"{UNSTEADY}."]
    return "\n".join(lines + (["", f"Not measured: {missing}."] if missing else []))


def show(rows, console):
    """Print one case's table."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=heading(rows), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    columns, missing = columns_for(rows), not_measured(rows)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=name != "computes")
    for row in rows:
        if row["ms"]:
            style = {"ours": "bold", "ceiling": "cyan"}.get(row["family"], "red" if row["error"] else "")
            texts = cells(row, rows)
            table.add_row(*(texts[name] for name, _ in columns), style=style)
    console.print(table)
    if any(map(is_unsteady, rows)):
        console.print(UNSTEADY, style="red", highlight=False)
    if missing:
        console.print(f"not measured: {missing}\n", style="dim", highlight=False, markup=False)


def show_overview(rows, console):
    """Print all cases as one table."""
    from rich import box
    from rich.table import Table

    head, table = overview(rows)
    if len(table) > 1:
        shown = Table(title=OVERVIEW, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in head:
            # a heading wraps at its words
            left = name == "case"
            shown.add_column(re.sub("-|, ", "\n", name), justify="left" if left else "right", no_wrap=True)
        for line in table:
            shown.add_row(*line)
        console.print(shown)
