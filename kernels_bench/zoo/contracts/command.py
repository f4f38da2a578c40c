"""The command of this family, and its tables."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections import Counter

from kernels_bench import machine, scripts
from kernels_bench.zoo.contracts import healthy_timm, runs
from kernels_bench.zoo.contracts.fault import GROUPS
from kernels_bench.zoo.tables import markdown

# of the held-out faults, the share that is told by the right contract; contracts broken in healthy models
LEAST_TOLD, MOST_FALSE = 0.85, 0
VERDICTS = ("told", "another", "not told")


def main(args, argv):
    """Run the family as the arguments of the zoo say; return the exit code."""
    if not healthy_timm.MODELS:
        print("timm is left out: it is not installed", file=sys.stderr)
    names = [*runs.HEALTHY, *runs.OPEN, *(runs.held_out() if args.held_out else ())]
    names = [name for name in names if re.search(args.kinds, name)]
    if args.list or not names:
        print("\n".join(names) or f"--kinds {args.kinds}: no name matches; --list prints the names")
        return int(not names)
    start, about = time.perf_counter(), machine.describe()
    rows = run_all(names, args.seeds, args.jobs)
    seconds = time.perf_counter() - start
    command = scripts.command_line("kernels_bench.zoo", argv)
    note = f"    {command}\n\n{machine.one_line(about)}; {len(rows)} runs in {seconds / 60:.1f} minutes."
    args.out.mkdir(parents=True, exist_ok=True)
    text = document(rows, note)
    args.out.joinpath("contracts.md").write_text(text, encoding="utf-8")
    result = {"command": command, "machine": about, "seconds": seconds, "totals": totals(rows), "runs": rows}
    args.out.joinpath("contracts.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text)
    failed = missed(result["totals"])
    print("\n".join(f"MISSED  {line}" for line in failed) or "every bound met")
    return int(args.check and bool(failed))


def run_all(names, seeds, jobs):
    """Check every model, and every fault in each of its architectures, in ``jobs`` processes; return rows."""
    wanted = [(name, place, seed) for name in names for place in runs.places(name) for seed in range(seeds)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, runs.quiet) as pool:
        waiting = [pool.submit(runs.run, *key) for key in wanted]
        rows = []
        try:
            for future in waiting:
                rows.append(row := future.result())
                print(f"{len(rows)}/{len(wanted)} {line(row)}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return rows


def line(row):
    """Return a run's result as a line."""
    text = f"{row['name']} {row['seed']} ({row['kind']}), {row['seconds']:.1f} s: "
    if row["error"]:
        return text + row["error"].splitlines()[0][:150]
    verdict = row["verdict"] or f"{len(row['broken'])} false"
    return text + ", ".join([verdict, *row["broken"], *(f"{name} (info)" for name in row["noted"])])


def totals(rows):
    """Return counts and shares: of healthy models, of each half of the faults, and seconds of a check."""
    healthy = [row for row in rows if not row["planted"]]
    found = {
        "healthy": len(healthy),
        "false": sum(len(row["broken"]) for row in healthy),
        "errors": sum(row["error"] is not None for row in rows),
    }
    for half, held_out in (("open", False), ("held_out", True)):
        here = [row for row in rows if row["planted"] and row["held_out"] == held_out]
        found[half] = {"runs": len(here)} | {
            word: sum(row["verdict"] == word for row in here) for word in VERDICTS
        }
        found[half]["share"] = found[half]["told"] / len(here) if here else None
    seconds = [row["seconds"] for row in rows]
    return found | {"median_seconds": statistics.median(seconds), "max_seconds": max(seconds)}


def missed(total):
    """Return the bounds that are missed, as text."""
    lines = []
    share = total["held_out"]["share"]
    if share is not None and share < LEAST_TOLD:
        lines.append(f"held-out faults told by the right contract: {share:.3f}, at least {LEAST_TOLD}")
    if total["false"] > MOST_FALSE:
        lines.append(f"contracts broken in healthy models: {total['false']}, at most {MOST_FALSE}")
    if total["errors"]:
        lines.append(f"failed checks: {total['errors']}, at most 0")
    return lines


def document(rows, note):
    """Return all tables as Markdown."""
    parts = ["# Zoo of contracts", note]
    for half, held_out in (("Open", False), ("Held-out", True)):
        planted = [row for row in rows if row["planted"] and row["held_out"] == held_out]
        if planted:
            parts += [f"## {half} faults", by_group(planted), by_fault(planted)]
    healthy = [row for row in rows if not row["planted"]]
    if healthy:
        parts += ["## Healthy models", by_model(healthy)]
    if failed := [row for row in rows if row["error"]]:
        parts += [
            "## Failed checks",
            *(f"{row['name']}, {row['kind']}, seed {row['seed']}: {row['error']}" for row in failed),
        ]
    return "\n\n".join([*parts, "## Seconds of a check", by_seconds(rows)]) + "\n"


def by_group(rows):
    """Return the counts of each group as a table."""
    table = []
    for group in [*GROUPS, "all"]:
        here = [row for row in rows if group in (row["group"], "all")]
        counts = [sum(row["verdict"] == word for row in here) for word in VERDICTS]
        table.append([group, len(here), *counts])
    heading = ("group", "runs", "told by the right contract", "told by another one only", "not told")
    return markdown(heading, table, ("left", *["right"] * 4))


def by_fault(rows):
    """Return the results of each fault as a table: of its runs in each architecture, those that are told."""
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        results = []
        for kind in dict.fromkeys(row["kind"] for row in here):
            told = [row["verdict"] == "told" for row in here if row["kind"] == kind]
            results.append(f"{kind} {sum(told)} of {len(told)}")
        table.append([here[0]["group"], name.replace("-", " "), ", ".join(results),
                      ", ".join(here[0]["contracts"]), counted(here)])  # fmt: skip
    heading = ("group", "fault", "told", "by the contracts", "broken contracts")
    return markdown(heading, table, ["left"] * 5)


def by_model(rows):
    """Return the contracts that are broken in each healthy model as a table."""
    table = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        table.append([name, len(here), sum(len(row["broken"]) for row in here), counted(here)])
    heading = ("model", "runs", "false", "broken contracts")
    return markdown(heading, table, ("left", "right", "right", "left"))


def counted(rows):
    """Return the broken contracts of runs, with their number, and failures."""
    counts = Counter(name for row in rows for name in row["broken"])
    counts.update(f"{name} (info)" for row in rows for name in row["noted"])
    counts.update("failed" for row in rows if row["error"])
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def by_seconds(rows):
    """Return the seconds of a check of faults and of healthy models as a table."""
    table = []
    for name, planted in (("faults", True), ("healthy models", False)):
        seconds = [row["seconds"] for row in rows if row["planted"] == planted]
        if seconds:
            slowest = max((row for row in rows if row["planted"] == planted), key=lambda row: row["seconds"])
            table.append([name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", slowest["kind"]])
    return markdown(("checks of", "median", "maximum", "slowest"), table, ("left", "right", "right", "left"))
