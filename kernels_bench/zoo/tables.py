"""The totals of a zoo, and its tables as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter

LEAST_RECALL = 0.95
MOST_FALSE = 0.03


def totals(rows, tool):
    """Return recall, false warnings for each healthy run, and the median and maximum delay, of a tool."""
    healthy, planted = parts(rows, tool)
    delays = [row["delay"] for row in planted if row["delay"] is not None]
    return {
        "planted": len(planted),
        "healthy": len(healthy),
        "recall": statistics.fmean(row["named"] for row in planted) if planted else None,
        "false": statistics.fmean(row["warnings"] for row in healthy) if healthy else None,
        "median_delay": statistics.median(delays) if delays else None,
        "max_delay": max(delays, default=None),
    }


def parts(rows, tool):
    """Return a tool's results of the healthy runs, and of the planted faults."""
    healthy = [row["tools"][tool] for row in rows if not row["planted"] and tool in row["tools"]]
    planted = [row["tools"][tool] for row in rows if row["planted"] and tool in row["tools"]]
    return healthy, planted


def missed(total):
    """Return the bounds that a total misses, as text."""
    lines = []
    if total["recall"] is not None and total["recall"] < LEAST_RECALL:
        lines.append(f"recall {total['recall']:.3f}, at least {LEAST_RECALL}")
    if total["false"] is not None and total["false"] > MOST_FALSE:
        lines.append(f"false warnings per healthy run {total['false']:.3f}, at most {MOST_FALSE}")
    return lines


def tools(rows):
    """Return the names of all tools, ours first."""
    return list(dict.fromkeys(tool for row in rows for tool in row["tools"]))


def document(rows, note):
    """Return all tables as Markdown."""
    names = tools(rows)
    summary = [[tool, *_cells(totals(rows, tool))] for tool in names]
    heading = ("tool", "faults named", "false warnings per healthy run", "median delay", "max delay")
    text = ["# Zoo", note, markdown(heading, summary, ALIGN), *_errors(rows)]
    text += ["## Planted faults", _faults(rows, names), "## Healthy runs", _healthy(rows, names)]
    return "\n\n".join(text) + "\n"


ALIGN = ("left", *["right"] * 20)


def markdown(heading, rows, sides):
    """Return a table; ``sides`` has ``"left"`` or ``"right"`` for each column."""
    rule = ["---:" if side == "right" else "---" for _, side in zip(heading, sides, strict=False)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heading, rule, *rows])


def _errors(rows):
    """Return a line for each run in which another tool failed."""
    return [
        f"{tool} failed in {row['name']}, seed {row['seed']}: {headline['text']}"
        for row in rows
        for tool, result in row["tools"].items()
        for headline in result["headlines"]
        if headline["rule"] == "error"
    ]


def _cells(total):
    recall, false = total["recall"], total["false"]
    return [
        "" if recall is None else f"{recall:.1%} of {total['planted']}",
        "" if false is None else f"{false:.3f} ({total['healthy']} runs)",
        *("" if total[key] is None else f"{total[key]:g}" for key in ("median_delay", "max_delay")),
    ]


def _faults(rows, names):
    by_name = _by_name(row for row in rows if row["planted"])
    table = []
    for name, runs in by_name.items():
        results = [run["tools"][names[0]] for run in runs]
        first = Counter(
            result["headlines"][0]["rule"] if result["headlines"] else "nothing" for result in results
        )
        delays = ", ".join("-" if result["delay"] is None else str(result["delay"]) for result in results)
        counts = [
            _share([run["tools"][tool]["named"] for run in runs if tool in run["tools"]]) for tool in names
        ]
        table.append([name, counts[0], ", ".join(first), delays, *counts[1:]])
    heading = ("fault", "named", "first headline", "delay, steps", *names[1:])
    return markdown(heading, table, ("left", "right", "left", *ALIGN[1:]))


def _healthy(rows, names):
    table = []
    for name, runs in _by_name(row for row in rows if not row["planted"]).items():
        rules = Counter(
            headline["rule"]
            for run in runs
            for headline in run["tools"][names[0]]["headlines"]
            if headline["is_warning"]
        )
        warned = ", ".join(f"{rule} {count}" for rule, count in rules.items())
        counts = [sum(run["tools"][tool]["warnings"] for run in runs) for tool in names]
        table.append([name, runs[0]["steps"], counts[0], warned, *counts[1:]])
    heading = ("kind of run", "steps", f"false warnings in {_most(rows)} runs", "rules", *names[1:])
    return markdown(heading, table, ("left", "right", "right", "left", *ALIGN[1:]))


def _most(rows):
    return max(row["seed"] for row in rows) + 1


def _share(named):
    # some faults can't be made with some tools
    return f"{sum(named)} of {len(named)}" if named else ""


def _by_name(rows):
    grouped = {}
    for row in rows:
        grouped.setdefault(row["name"], []).append(row)
    return grouped
