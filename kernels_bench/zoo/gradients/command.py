"""The command of this family, and its tables."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from kernels_bench import machine, scripts
from kernels_bench.zoo.gradients import runs
from kernels_bench.zoo.tables import markdown


def main(args, argv):
    """Run the family as the arguments of the zoo say; return the exit code."""
    names = [*runs.FAULTS, *runs.HEALTHY, *runs.HEALTHY_RANKS]
    names = [name for name in names if re.search(args.kinds, name)]
    if args.list or not names:
        print("\n".join(names) or f"--kinds {args.kinds}: no name matches; --list prints the names")
        return int(not names)
    start, about = time.perf_counter(), machine.describe()
    rows = run_all(names, args.seeds, args.jobs)
    seconds = time.perf_counter() - start
    command = scripts.command_line("kernels_bench.zoo", argv)
    note = f"    {command}\n\n{machine.one_line(about)}; {len(rows)} runs in {seconds:.0f} seconds."
    args.out.mkdir(parents=True, exist_ok=True)
    text = document(rows, note)
    args.out.joinpath("gradients.md").write_text(text, encoding="utf-8")
    result = {"command": command, "machine": about, "seconds": seconds, "runs": rows}
    args.out.joinpath("gradients.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text)
    failed = missed(rows)
    print("\n".join(f"MISSED  {line}" for line in failed) or "every bound met")
    return int(args.check and bool(failed))


def run_all(names, seeds, jobs):
    """Check all steps, each with all its seeds in one of ``jobs`` processes; return the rows, in order."""
    alone = [name for name in names if runs.ranks_of(name) == 1]
    # the longest first
    waiting = sorted(alone, key=lambda name: name not in runs.COMPILED)
    context, rows = multiprocessing.get_context("spawn"), {}
    with concurrent.futures.ProcessPoolExecutor(jobs, context, runs.quiet) as pool:
        futures = {pool.submit(runs.run_seeds, name, seeds): name for name in waiting}
        try:
            for done in concurrent.futures.as_completed(futures):
                name = futures[done]
                rows[name] = done.result()
                progress(rows[name], len(rows), len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if together := [name for name in names if name not in rows]:
        rows |= on_two_ranks(together, seeds)
        for name in together:
            progress(rows[name], len(rows), len(names))
    return [row for name in names for row in rows[name]]


def progress(rows, done, total):
    """Print the results of a name."""
    for row in rows:
        print(f"{done}/{total} {line(row)}", file=sys.stderr, flush=True)


def on_two_ranks(names, seeds):
    """Return the rows of cases by name, from two processes that are started for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, names, seeds), nprocs=2)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    return {
        name: [runs.joined(each) for each in zip(*(rank[name] for rank in found), strict=True)]
        for name in names
    }


def rank_main(rank, folder, names, seeds):
    """Check all steps on one rank; the rows go into a file."""
    runs.quiet()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows = {name: runs.run_seeds(name, seeds) for name in names}
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def line(row):
    """Return a run's result as a line."""
    text = f"{row['name']} {row['seed']}, {row['seconds']:.2f} s: "
    if row["error"]:
        return text + row["error"].splitlines()[0][:150]
    if not row["planted"]:
        return text + (f"ALARM: {row['first']}" if row["alarm"] else "ok")
    named = "named" if row["named"] else f"NOT NAMED ({row['first']})"
    return text + named + (f", {row['kind']}" if row["kind_named"] else f", kind {row['kind']}")


def missed(rows):
    """Return the bounds that are missed, as text: every fault and its kind is named, no healthy one fails."""
    lines = []
    for row in rows:
        where = f"{row['name']}, seed {row['seed']}"
        if row["error"]:
            lines.append(f"{where}: {row['error'].splitlines()[0]}")
        elif row["planted"] and not row["named"]:
            lines.append(f"{where}: {row['first']} is named, not {runs.FAULTS[row['name']].first}")
        elif row["planted"] and not row["kind_named"]:
            lines.append(f"{where}: the kind is {row['kind']}, not {runs.FAULTS[row['name']].kind}")
        elif not row["planted"] and row["alarm"]:
            lines.append(f"{where}: {row['first']} fails")
    return lines


def document(rows, note):
    """Return all tables as Markdown."""
    parts = ["# Zoo of gradients", note]
    planted = [row for row in rows if row["planted"]]
    healthy = [row for row in rows if not row["planted"]]
    parts += ["## Faults", by_fault(planted)] if planted else []
    if healthy:
        alarms = sum(bool(row["alarm"]) for row in healthy)
        parts += [f"## Healthy steps: {alarms} alarms in {len(healthy)} runs", by_step(healthy)]
    if failed := [row for row in rows if row["error"]]:
        parts += [
            "## Failed checks",
            *(f"{row['name']}, seed {row['seed']}: {row['error']}" for row in failed),
        ]
    return "\n\n".join(parts) + "\n"


def by_name(rows):
    """Return the rows of each name."""
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: [row for row in rows if row["name"] == name] for name in names}


def by_fault(rows):
    """Return the results of each fault as a table."""
    table = []
    for name, here in by_name(rows).items():
        fault = runs.FAULTS[name]
        kind = fault.kind + (f" {fault.factor:g}" if fault.factor else "")
        named, kinds = (sum(row[key] for row in here) for key in ("named", "kind_named"))
        of = len(here)
        told = f"{kinds} of {of}" if fault.kind != "other" else ""
        table.append([name.replace("-", " "), here[0]["against"], fault.first, f"{named} of {of}", kind, told,
                      f"{max(row['seconds'] for row in here):.2f}"])  # fmt: skip
    heading = ("fault", "against", "first wrong tensor", "named", "kind", "kind named", "seconds, at most")
    return markdown(heading, table, (*["left"] * 3, "right", "left", "right", "right"))


def by_step(rows):
    """Return the alarms of each healthy step as a table."""
    table = []
    for name, here in by_name(rows).items():
        firsts = Counter(row["first"] for row in here if row["alarm"])
        told = ", ".join(f"{first} ({count})" for first, count in firsts.items())
        seconds = max(row["seconds"] for row in here)
        table.append([name, here[0]["against"], len(here), sum(firsts.values()), told, f"{seconds:.2f}"])
    heading = ("step", "against", "runs", "alarms", "first tensor", "seconds, at most")
    return markdown(heading, table, ("left", "left", "right", "right", "left", "right"))
