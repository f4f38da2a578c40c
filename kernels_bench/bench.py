"""Compare gradiometer with other implementations on this machine: tables, JSON and a picture.

    python -m kernels_bench                                   every case that fits on this machine
    python -m kernels_bench --cases gpt2 --providers ours,foreach64
    python -m kernels_bench --base HEAD~1 --providers ours    another commit, in the same rounds
    python -m kernels_bench --device cpu --check              exit code 1 if the CPU path misses a bound
    python -m kernels_bench --memory                          only the peak growth of resident memory, as JSON

docs/explanation/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import gradiometer
from kernels_bench import cases as cases_
from kernels_bench import machine, scripts, tables
from kernels_bench.cases import BOUND_MEMORY, BOUNDS, CASES, MEMORY_CASES
from kernels_bench.git_base import BaseError, remote, serve
from kernels_bench.measure import CACHES_FILLED, Bench, cache_bytes, can_read_peaks, peak_growth, reason_of
from kernels_bench.providers import GROUPS, PROVIDERS

MODULE = "kernels_bench"
OUT = scripts.ROOT / "build" / "bench"
SECONDS = {"cpu": 4.0, "cuda": 2.0}
# A sample makes as many calls as fit into this time, up to MOST_CALLS. On a GPU its first call starts with an
# empty queue, and so includes the time of the host
SAMPLE_MS = {"cpu": 5.0, "cuda": 20.0}
MOST_CALLS = 100
ROUNDS, CHECK_ROUNDS = (5, 100), (9, 100)
FIGURES = ("ms", "ms_low", "ms_high", "gb_s", "ceiling_gb_s", "ceiling_share")
COUNTED = ("launches", "copies", "host_us", "extra_mib", "relative_error", "error")
CHECKED = ("ceiling", "ours-eager", "foreach64", "flatten")


def main(argv=None):
    args = parse(argv)
    if args.worker:
        serve(Bench(), Path(gradiometer.__file__).resolve())
        return 0
    if args.list:
        print_lists()
        return 0
    if args.memory:
        print(json.dumps(peak_growth([CASES[name] for name in args.cases], args.providers, scale_of)))
        return 0
    result = {"machine": machine.describe(), "command": scripts.command_line(MODULE, argv), "rows": []}
    show, show_overview = shower()
    try:
        with remote(args.base) as (other, commit):
            if commit:
                result["base"] = commit
            for name in args.cases:
                rows = run_case(CASES[name], args, other)
                result["rows"] += rows
                show(rows)
                write(result, args.out)  # an interrupted run keeps its finished cases
    except BaseError as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 2
    show_overview(result["rows"])
    draw(result, args.out)
    return 0 if not args.check or check(result["rows"], args) else 1


def parse(argv):
    parser = scripts.parser(MODULE, __doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cases", help="names, separated by commas; --list shows them")
    parser.add_argument("--providers", help="names, or the groups ours and peers, separated by commas")
    parser.add_argument("--seconds", type=float, help="seconds to measure each case (default: cpu 4, cuda 2)")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for bench.json, .md and .png (default: build/bench)"
    )
    parser.add_argument("--base", metavar="REF", help="another commit of this repository to compare with")
    parser.add_argument("--check", action="store_true", help="check the bounds of the CPU path")
    parser.add_argument("--memory", action="store_true", help="measure only memory growth, as JSON (Linux)")
    parser.add_argument("--no-memory", action="store_true", help="on a CPU, do not measure peak extra memory")
    parser.add_argument("--list", action="store_true", help="list cases and providers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def refuse(message):
        parser.exit(2, f"bench: {message}\n")

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() and not (args.check or args.memory) else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch sees no GPU here; try --device cpu")
    if args.device == "cuda" and (args.check or args.memory):
        refuse("--check and --memory measure the CPU path: leave out --device cuda")
    bounded = {*MEMORY_CASES, *(case for case, _, _ in BOUNDS)}
    if args.check and args.cases and not bounded & {*args.cases.split(",")}:
        refuse(f"--check: none of these cases has a bound; choose from {', '.join(sorted(bounded))}")
    if args.memory and not can_read_peaks():
        refuse("--memory needs Linux: it reads peaks from /proc")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        refuse(f"--seconds must be a positive number, got {args.seconds}")
    args.seconds = args.seconds or SECONDS[args.device]
    args.named = args.cases is not None
    try:
        args.cases = chosen(args.cases, CASES, {}, "case") or default_cases(args)
        args.providers = chosen(args.providers, PROVIDERS, GROUPS, "provider") or default_providers(args)
    except ValueError as failure:
        refuse(str(failure))
    if not args.memory:
        args.providers = ["ceiling", *(name for name in args.providers if name != "ceiling")]
    return args


def chosen(text, table, groups, what):
    """Return the names in a comma-separated list, each once."""
    wanted = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in wanted:
        if name not in table and name not in groups:
            raise ValueError(f"no {what} {name!r}; there are: {', '.join([*groups, *table])}")
    return list(dict.fromkeys(one for name in wanted for one in groups.get(name, [name])))


def default_cases(args):
    if args.memory:
        return list(MEMORY_CASES)
    if args.check:
        return list(dict.fromkeys(case for case, _, _ in BOUNDS))
    return [name for name, case in CASES.items() if case.only in {"", args.device}]


def default_providers(args):
    if args.memory:
        return ["ours-eager"]
    return list(CHECKED) if args.check else list(PROVIDERS)


def scale_of(case, device="cpu", share=1):
    """Return the divisor that makes a case fit on this machine, in ``share`` processes at once."""
    if case.only:
        return 1  # the memory cases run on a CPU only, at full size
    limit = cases_.CPU_LIMIT
    if device == "cuda":
        limit = torch.cuda.mem_get_info()[0] * cases_.GPU_SHARE / share
    return cases_.scale_for(case, limit)


def run_case(case, args, other=None):
    """Measure every provider on one case. Returns rows."""
    device = torch.device(args.device)
    scale = scale_of(case, args.device, 2 if other else 1)
    size = cases_.nbytes(case, scale)
    copies = min(cases_.MOST_COPIES, max(1, math.ceil(CACHES_FILLED * cache_bytes(device) / max(size, 1))))
    print(f"{cases_.title(case, scale)} ...", file=sys.stderr, flush=True)

    here = Bench()
    turns = {name: (here, name) for name in args.providers}
    if other:
        ours = [name for name in args.providers if PROVIDERS[name].family == "ours"]
        turns |= {name.replace("ours-", "base-"): (other, name) for name in ours}
    rows = {}
    for label, (bench, name) in turns.items():
        provider = PROVIDERS[name]
        rows[label] = {
            "case": cases_.title(case, scale),
            "name": case.name,
            "scale": scale,
            "provider": label,
            "family": provider.family if bench is here else "base",
            "level": provider.level,
            "what": provider.what,
            "full": provider.full,
            "device": args.device,
            "dtype": str(case.dtype).removeprefix("torch."),
            "tensors": len(cases_.shapes(case, scale)),
            "elements": cases_.elements(case, scale),
            "bytes": size,
            **dict.fromkeys((*FIGURES, *COUNTED)),
        }
    try:
        for bench in {id(bench): bench for bench, _ in turns.values()}.values():
            bench.make(case.name, args.device, scale, copies)
        first = {}
        for label, (bench, name) in turns.items():
            built = bench.build(name)
            if "ms" in built:
                first[label] = built.pop("ms")
            rows[label] |= built
        fill(rows, rounds(turns, first, rows, args))
        for label in first:
            bench, name = turns[label]
            try:
                rows[label].update(bench.finish(name))
            except BaseError:
                raise
            except Exception as failure:  # noqa: BLE001 a failure belongs to the peer's row
                rows[label]["error"] = reason_of(failure)
    except (RuntimeError, MemoryError) as failure:  # the case itself does not fit
        for row in rows.values():
            row["error"] = row["error"] or reason_of(failure)
    finally:
        here.drop()
    if other:
        other.drop()
    if args.device == "cpu" and not (args.check or args.no_memory) and can_read_peaks():
        for name, mib in memory([case.name], args.providers).get(case.name, {}).items():
            rows[name]["extra_mib"] = mib
    return list(rows.values())


def rounds(turns, first, rows, args):
    """Run every provider once in each round, so that other load on the machine affects all equally.

    Returns each provider's times in ms per call; the tables show their medians.
    """
    counts = {
        label: min(MOST_CALLS, math.ceil(SAMPLE_MS[args.device] / max(ms, 1e-3)))
        for label, ms in first.items()
    }
    one = sum(counts[label] * ms for label, ms in first.items()) / 1e3
    least, most = CHECK_ROUNDS if args.check else ROUNDS
    wanted = min(most, max(least, int(args.seconds / max(one, 1e-6))))
    times = {label: [] for label in first}
    position = 0
    order = random.Random(0)  # noqa: S311 no secret
    for _ in range(1 + wanted):
        # a new random order in each round, so that no provider always runs after the same one
        for label in order.sample(list(times), len(times)):
            bench, name = turns[label]
            try:
                times[label].append(bench.sample(name, counts[label], position))
            except BaseError:
                raise
            except Exception as failure:  # noqa: BLE001 it may be out of memory; the other providers continue
                rows[label]["error"] = reason_of(failure)
                del times[label], first[label]
                bench.drop(name)
            # the next provider begins at the least recently read copy
            position += counts[label]
    # the first round warms up
    return {label: values[1:] for label, values in times.items()}


def fill(rows, times):
    """Write times, and the figures computed from them, into the rows."""
    ceilings = {
        label: statistics.median(times[label]) for label in ("ceiling", "ceiling-graph") if label in times
    }
    for label, values in times.items():
        row = rows[label]
        # replayed graphs are compared with a replayed graph
        ceiling = ceilings.get("ceiling-graph" if row["level"] == "graph" else "", ceilings.get("ceiling"))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        row |= {"ms": middle, "ms_low": low, "ms_high": high, "gb_s": row["bytes"] / middle / 1e6}
        if ceiling:
            row |= {"ceiling_gb_s": row["bytes"] / ceiling / 1e6, "ceiling_share": ceiling / middle}


def memory(names, providers):
    """Return peak resident growth, measured in a fresh process: earlier peaks would hide it."""
    wanted = ["--cases", ",".join(names), "--providers", ",".join(providers)]
    command = scripts.command(MODULE, "--memory", *wanted)
    ended = subprocess.run(command, env=scripts.environment(), stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(ended.stdout) if ended.returncode == 0 else {}


def check(rows, args):
    """Print every bound with the measured figure. Returns whether all are met; a failed case is a miss."""
    found = {(row["name"], row["provider"]): row["ms"] for row in rows}
    met = True
    for case, peer, most in BOUNDS:
        ours, its = found.get((case, "ours-eager")), found.get((case, peer))
        if case not in args.cases:
            continue
        times = ours / its if ours and its else math.inf
        met &= times <= most
        word = "met   " if times <= most else "MISSED"
        print(f"{word}  {case}: ours / {peer} {times:.3f} (at most {most:.3g})")
    wanted = [name for name in MEMORY_CASES if name in args.cases or not args.named]
    grown = memory(wanted, ["ours-eager"]) if wanted and can_read_peaks() else {}
    for case in wanted if can_read_peaks() else ():
        mib = grown.get(case, {}).get("ours-eager")
        fine = mib is not None and mib <= BOUND_MEMORY
        met &= fine
        grew = "unknown" if mib is None else f"{mib:.2f}"
        print(f"{'met   ' if fine else 'MISSED'}  {case}: peak growth {grew} MiB (at most {BOUND_MEMORY:g})")
    print("every bound met" if met else "a bound was missed")
    return met


def shower():
    """Return two functions: one prints a case's rows (as Markdown if rich is missing), one the overview."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda rows: print(tables.case_markdown(rows)), lambda _: None
    # a narrower table would cut off important columns
    console = Console(width=max(120, Console().width) if sys.stdout.isatty() else 120)
    return lambda rows: tables.show(rows, console), lambda rows: tables.show_overview(rows, console)


def write(result, out):
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "bench.md").write_text(tables.markdown(result), encoding="utf-8")


def draw(result, out):
    try:
        from kernels_bench import plot
    except ImportError as failure:
        print(f"no picture: {failure} (pip install matplotlib)", file=sys.stderr)
        return
    # remove the picture of an earlier run
    (out / "bench.png").unlink(missing_ok=True)
    drawn = plot.draw(result, out / "bench.png")
    print(f"{out}/bench.json, bench.md{' and bench.png' if drawn else ''} are written")
    if not drawn:
        print("no picture: only the ceiling was measured", file=sys.stderr)


def print_lists():
    print("cases")
    for case in CASES.values():
        size = f"{len(cases_.shapes(case))} x {str(case.dtype).removeprefix('torch.')}"
        print(f"  {case.name:16} {size:16} {cases_.nbytes(case) / 2**20:7.0f} MiB  {case.meaning}")
    print("providers (groups: " + ", ".join(GROUPS) + ")")
    for provider in PROVIDERS.values():
        print(f"  {provider.name:16} {provider.what}")


if __name__ == "__main__":
    raise SystemExit(main())
