"""The command of this family, and its tables."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import re
import statistics
import sys
import time

from kernels_bench import machine, scripts
from kernels_bench.zoo.tables import markdown
from kernels_bench.zoo.transformers import runs
from kernels_bench.zoo.transformers.fault import CATEGORIES

# of the effective held-out faults, and false warnings per healthy run
LEAST_DETECTED, LEAST_NAMED, MOST_FALSE = 0.60, 0.45, 0.02


def main(args, argv):
    """Run the family as the arguments of the zoo say; return the exit code."""
    names = [*runs.HEALTHY, *runs.OPEN, *(runs.HELD_OUT if args.held_out else ())]
    names = [name for name in names if re.search(args.kinds, name)]
    if args.list:
        print("\n".join(names))
        return 0
    start, about = time.perf_counter(), machine.describe()
    rows = run_all(names, args.seeds, args.jobs, steps=args.steps)
    seconds = time.perf_counter() - start
    command = scripts.command_line("kernels_bench.zoo", argv)
    note = f"    {command}\n\n{machine.one_line(about)}; {len(rows)} runs in {seconds / 60:.1f} minutes."
    args.out.mkdir(parents=True, exist_ok=True)
    text = document(rows, note)
    args.out.joinpath("transformers.md").write_text(text, encoding="utf-8")
    result = {"command": command, "machine": about, "seconds": seconds, "totals": totals(rows), "runs": rows}
    args.out.joinpath("transformers.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text)
    failed = missed(result["totals"])
    print("\n".join(f"MISSED  {line}" for line in failed) or "every bound met")
    return int(args.check and bool(failed))


def run_all(names, seeds, jobs, *, steps=None):
    """Run everything, and eight clean runs of each kind with a fault, in ``jobs`` processes; return rows."""
    wanted = [(name, seed) for name in names for seed in range(seeds)]
    planted = {runs.maker(name, seed)[1] for name, seed in wanted if name in runs.FAULTS}
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(runs.run, name, seed, steps=steps) for name, seed in wanted]
        clean = {
            kind: [pool.submit(runs.run, kind, seed, steps=steps, watched=False) for seed in runs.CLEAN]
            for kind in sorted(planted)
        }
        try:
            rows = []
            for future in waiting:
                rows.append(row := future.result())
                print(f"{len(rows)}/{len(wanted)} {line(row)}", file=sys.stderr, flush=True)
            spread = {kind: [future.result() for future in futures] for kind, futures in clean.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for row in rows:
        row["effective"] = runs.is_effective(row, spread[row["kind"]]) if row["planted"] else None
    return rows


def line(row):
    """Return a run's result as a line."""
    text = f"{row['name']} {row['seed']} ({row['kind']}), {row['seconds']:.1f} s: "
    text += verdict(row) if row["planted"] else f"{row['warnings']} false warnings"
    first = next((h for h in row["headlines"]), None)
    return text + (f"; {first['rule']}: {first['text'].splitlines()[0][:100]}" if first else "")


def verdict(row):
    """Return named, detected or unseen."""
    return "named" if row["named"] else "detected" if row["detected"] else "unseen"


def totals(rows):
    """Return counts and shares: of healthy runs, and of each half's effective faults."""
    healthy = [row for row in rows if not row["planted"]]
    found = {"healthy": len(healthy)}
    found["false"] = statistics.fmean(row["warnings"] for row in healthy) if healthy else None
    for half, held_out in (("open", False), ("held_out", True)):
        planted = [row for row in rows if row["planted"] and row["held_out"] == held_out]
        effective = [row for row in planted if row["effective"]]
        found[half] = {"planted": len(planted), "effective": len(effective)}
        for key in ("detected", "named"):
            found[half][key] = statistics.fmean(row[key] for row in effective) if effective else None
    return found


def missed(total):
    """Return the bounds that are missed, as text."""
    held = total["held_out"]
    lines = [
        f"held-out faults {key}: {held[key]:.3f}, at least {least}"
        for key, least in (("detected", LEAST_DETECTED), ("named", LEAST_NAMED))
        if held[key] is not None and held[key] < least
    ]
    if total["false"] is not None and total["false"] > MOST_FALSE:
        lines.append(f"false warnings per healthy run {total['false']:.3f}, at most {MOST_FALSE}")
    return lines


def document(rows, note):
    """Return all tables as Markdown."""
    parts = ["# Zoo of transformers", note]
    for half, held_out in (("Open", False), ("Held-out", True)):
        planted = [row for row in rows if row["planted"] and row["held_out"] == held_out]
        if planted:
            parts += [f"## {half} faults", by_category(planted), by_fault(planted)]
    healthy = [row for row in rows if not row["planted"]]
    return "\n\n".join([*parts, "## Healthy runs", by_kind(healthy)]) + "\n"


def by_category(rows):
    """Return the counts of each category as a table; only effective runs count as named and so on."""
    table = []
    for category in [*CATEGORIES, "all"]:
        here = [row for row in rows if category in (row["category"], "all")]
        effective = [row for row in here if row["effective"]]
        counts = [sum(verdict(row) == word for row in effective) for word in ("named", "detected", "unseen")]
        table.append([category, len(here), len(effective), *counts])
    heading = ("category", "runs", "effective", "named", "only detected", "unseen")
    return markdown(heading, table, ("left", *["right"] * 5))


def by_fault(rows):
    """Return the results of each fault as a table."""
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        results = ", ".join(verdict(row) + ("" if row["effective"] else " (no effect)") for row in here)
        first = dict.fromkeys(row["headlines"][0]["rule"] for row in here if row["headlines"])
        table.append([here[0]["category"], name.replace("-", " "), results, ", ".join(first)])
    return markdown(("category", "fault", "results", "first headlines"), table, ["left"] * 4)


def by_kind(rows):
    """Return the false warnings of each healthy kind as a table."""
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        rules = dict.fromkeys(h["rule"] for row in here for h in row["headlines"] if h["is_warning"])
        table.append([name, len(here), sum(row["warnings"] for row in here), ", ".join(rules)])
    return markdown(
        ("kind of run", "runs", "false warnings", "rules"), table, ("left", "right", "right", "left")
    )
