"""Train small models, healthy and with one planted mistake, and count what the default rules report.

python -m kernels_bench.zoo                       # all runs: tables and JSON in build/zoo
python -m kernels_bench.zoo --kinds gpt --seeds 1 # some of them
python -m kernels_bench.zoo --list                # the names
python -m kernels_bench.zoo --family transformers # the second family; --held-out adds its held-out faults
python -m kernels_bench.zoo --family contracts    # models that check_model examines before they train
python -m kernels_bench.zoo --family gradients    # steps that check_gradients examines
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import multiprocessing
import re
import sys
import time
from pathlib import Path

from kernels_bench import machine, scripts
from kernels_bench.zoo import tables
from kernels_bench.zoo.faults import FAULTS
from kernels_bench.zoo.healthy import KINDS
from kernels_bench.zoo.runs import run

PEERS = ("pulsegrad", "trainscope")


def main(argv=None):
    parser = scripts.parser("kernels_bench.zoo", __doc__)
    parser.add_argument(
        "--family",
        choices=("first", "transformers", "contracts", "gradients"),
        default="first",
        help="default: first",
    )
    parser.add_argument("--held-out", action="store_true", help="add the held-out faults of a family")
    parser.add_argument("--kinds", default="", help="a regular expression: healthy kinds and faults to run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--steps", type=int, help="at most this number of steps in a run")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each (default: 2)")
    parser.add_argument(
        "--peers", action="store_true", help="let PulseGrad and TrainScope watch the same runs"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bound is missed")
    parser.add_argument("--out", type=Path, default=Path("build/zoo"), help="folder (default: build/zoo)")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    args = parser.parse_args(argv)
    if args.family != "first":
        family = importlib.import_module(f"kernels_bench.zoo.{args.family}.command")
        return family.main(args, argv)
    names = [name for name in [*KINDS, *FAULTS] if re.search(args.kinds, name)]
    if not names:
        parser.error(f"--kinds {args.kinds}: no name matches; --list prints the names")
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs must be 1 or more")
    if args.list:
        print("\n".join(names))
        return 0

    start, about = time.perf_counter(), machine.describe()
    rows = run_all(
        [(name, seed) for name in names for seed in range(args.seeds)],
        args.jobs,
        steps=args.steps,
        peers=installed() if args.peers else (),
    )
    seconds = time.perf_counter() - start
    command = scripts.command_line("kernels_bench.zoo", argv)
    note = f"    {command}\n\n{machine.one_line(about)}; {len(rows)} runs in {seconds / 60:.1f} minutes."
    text = tables.document(rows, note)
    args.out.mkdir(parents=True, exist_ok=True)
    args.out.joinpath("zoo.md").write_text(text, encoding="utf-8")
    result = {"command": command, "machine": about, "seconds": seconds}
    result["totals"] = {tool: tables.totals(rows, tool) for tool in tables.tools(rows)}
    args.out.joinpath("zoo.json").write_text(json.dumps(result | {"runs": rows}, indent=1) + "\n")
    print(text)
    missed = tables.missed(result["totals"]["gradiometer"])
    print("\n".join(f"MISSED  {line}" for line in missed) or "every bound met")
    return int(args.check and bool(missed))


def run_all(wanted, jobs, **options):
    """Run everything in ``jobs`` processes; an error in a run ends the zoo. Return the rows, in order."""
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, name, seed, **options): (name, seed) for name, seed in wanted}
        rows = {}
        try:
            for done in concurrent.futures.as_completed(waiting):
                rows[waiting[done]] = row = done.result()
                print(f"{len(rows)}/{len(wanted)} {line(row)}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [rows[key] for key in wanted]


def line(row):
    """Return a run's result as a line."""
    ours = row["tools"]["gradiometer"]
    text = f"{row['name']} {row['seed']} ({row['kind']}), {row['seconds']:.1f} s: "
    if row["planted"]:
        text += f"named after {ours['delay']} steps" if ours["named"] else "NOT NAMED"
    else:
        text += f"{ours['warnings']} false warnings"
    first = next(iter(ours["headlines"]), None)
    return text + (f"; {first['rule']}: {first['text'].splitlines()[0][:100]}" if first else "")


def installed():
    """Return the peers that can be imported; print why another cannot."""
    found = []
    for name in PEERS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
