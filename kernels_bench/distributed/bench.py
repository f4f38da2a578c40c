"""Measure what a reduction over ranks costs: with Gloo on this machine, simulated, and predicted.

    python -m kernels_bench.distributed.bench             # all of it: some minutes
    python -m kernels_bench.distributed.bench --quick
    python -m kernels_bench.distributed.bench --parts setup,model --ranks 8,16384 --tensors 100 --json PATH

`measured`: processes of this machine time `collect_grads(reduce=ranks)`, its two all-reduces alone, and
alternatives that use DTensors. It counts collectives, their bytes, and the bytes that the sockets
receive. `setup`: one process simulates the set-up of thousands of ranks. `model`: NCCL's own cost model
predicts the time of the two all-reduces. Tables are Markdown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kernels_bench import machine, scripts
from kernels_bench.distributed import cost_model
from kernels_bench.distributed.processes import SHAPE, fit, measure

PARTS = ("measured", "setup", "model")
PROCESSES = (2, 4, 8)
RANKS, TENSORS = (8, 64, 512, 4096, 16_384), (100, 1000, 10_000)
# steps that a Monitor's background thread merges in one exchange
WINDOW = 16
# a gradient's size, for comparison with the statistics of a tensor: a million elements of bfloat16
GRADIENT_BYTES = 2 * 2**20
CALLS = {
    "ours": "gm.collect_grads(model, reduce=ranks)",
    "local": "gm.collect_grads(model), this rank's shards",
    "merge": "stats.reduce(ranks)",
    "pair": "the two all-reduces alone",
    "total norm": "torch.nn.utils.get_total_norm(grads).full_tensor()",
    "norms apart": "grad.norm().full_tensor().item() for each",
    "gathered": "grad.full_tensor() for each",
}


def show(title, headings, rows):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print(f"\n{title}\n")
    Console(width=240).print(table)


def size_of(nbytes):
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.3g} {unit}"
    return f"{nbytes:.0f} B"


def short(value):
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def show_measured(rows):
    print("".join(f"\n{name}: {what}" for name, what in CALLS.items()))
    title = f"Gloo, torch {torch.__version__}: ms of a call on the slowest rank, medians of rounds"
    cells = []
    for row in rows:
        times = [f"{row['ms'][name]:.3g}" if name in row["ms"] else "" for name in CALLS]
        cells.append([f"{row['ranks']} x {row['tensors']}", *times, f"{row['setup_ms']:.3g}"])
    show(title, ["ranks x tensors", *CALLS, "gm.Ranks, once"], cells)

    others = [*CALLS][3:]
    cells = []
    for row in rows:
        clock, cpu = row["ratio_ms"], row["ratio_cpu_ms"]
        ratios = [f"{clock[name]:.2g} ({cpu[name]:.2g})" if name in clock else "" for name in others]
        cells.append([f"{row['ranks']} x {row['tensors']}", *ratios])
    title = "Our time over theirs, wall (CPU); medians of the rounds"
    show(title, ["ranks x tensors", *others], cells)

    cells = []
    for row in rows:
        for name in ("ours", *others[1:]):
            if name not in row["traffic"]:
                continue
            one = row["traffic"][name]
            seen = ["", ""]
            if one["received"] is not None:
                seen = [
                    f"{one['received']:,.0f}",
                    f"{(one['received'] - one['sent']) / one['collectives']:.0f}",
                ]
            where = f"{row['ranks']} x {row['tensors']}, {name}"
            cells.append(
                [where, str(one["collectives"]), f"{one['payload']:,}", f"{one['sent']:,.0f}", *seen]
            )
    headings = ["ranks x tensors, call", "collectives", "given to them", "a ring sends", "sockets received"]
    show("Bytes of a call, per rank", [*headings, "more than a ring, per collective"], cells)


def fitted(hop_us, gb_s, worst_miss):
    bandwidth = "bandwidth not measurable" if gb_s is None else f"{gb_s:.2g} GB/s"
    return f"the pair, fitted: {hop_us:.0f} µs a hop, {bandwidth}; the largest miss is {worst_miss:.0%}"


def show_setup(rows):
    cells = [
        [
            f"{row['ranks']:,} = {' x '.join(map(str, row['job'].values()))}",
            f"{row['tensors']:,}",
            str(row["shardings"]),
            size_of(row["member_bytes"]),
            size_of(row["layout_bytes"]),
            *[short(1e3 * seconds) for seconds in row["seconds"].values()],
            size_of(row["peak_bytes"]),
            size_of(row["store_bytes"]),
        ]
        for row in rows
    ]
    headings = ["ranks = stages x replicas x shards x TP", "tensors", "kinds of layout", "members, bytes"]
    headings += ["layouts, bytes", "meet, CPU ms", "agree", "count", "peak memory", "the store sends"]
    show("Set-up, simulated: work and traffic of one rank, once", headings, cells)


def model_rows(all_ranks, all_tensors, hop_us, tcp_gb_s, **network):
    for ranks in all_ranks:
        for tensors in all_tensors:
            payload = sum(cost_model.payload(tensors))
            yield {
                "ranks": ranks,
                "tensors": tensors,
                "payload": payload,
                "sent": cost_model.sent(payload, ranks),
                "of_gradients": payload / (tensors * GRADIENT_BYTES),
                "us": cost_model.pair_us(tensors, ranks, **network),
                "by": cost_model.nccl_us(cost_model.payload(tensors)[0], ranks, **network)[1],
                # one all-reduce of a sum of squares for each tensor, without waiting for the host
                "apart_us": tensors * cost_model.nccl_us(cost_model.DOUBLE, ranks, **network)[0],
                "window_us": cost_model.gloo_pair_us(tensors, ranks, WINDOW, hop_us, tcp_gb_s),
            }


def show_model(rows, args):
    title = f"A step predicted by NCCL's cost model, assuming {args.per_node} GPUs and {args.gb_s:g} GB/s "
    title += f"a node, and for Gloo {args.hop_us:g} µs a hop and {args.tcp_gb_s:g} GB/s"
    cells = [
        [
            f"{row['ranks']:,}",
            f"{row['tensors']:,}",
            size_of(row["payload"]),
            size_of(row["sent"]),
            f"{row['of_gradients']:.2g}",
            row["by"],
            f"{row['us']:.0f}",
            short(row["apart_us"] / 1e3),
            short(row["window_us"] / 1e3),
        ]
        for row in rows
    ]
    headings = ["ranks", "tensors", "the pair", "a rank sends", "of the gradients' bytes", "by", "µs"]
    headings += ["one collective a tensor, ms", f"{WINDOW} steps of a Monitor over Gloo, ms"]
    show(title, headings, cells)


def numbers(text):
    return tuple(int(part) for part in text.split(","))


def main():
    parser = scripts.parser("kernels_bench.distributed.bench", __doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer ranks, tensors and rounds: half a minute")
    parser.add_argument("--processes", type=numbers, help="ranks to measure, such as 2,4")
    parser.add_argument("--ranks", type=numbers, default=RANKS, help="ranks to simulate, such as 8,16384")
    parser.add_argument("--tensors", type=numbers, default=TENSORS, help="such as 100,1000")
    parser.add_argument("--rounds", type=int, help="timed rounds; default 20, with --quick 5")
    parser.add_argument("--per-node", type=int, default=cost_model.PER_NODE, help="GPUs in a node")
    parser.add_argument("--gb-s", type=float, default=cost_model.NODE_GB_S, help="GB/s of a node's network")
    parser.add_argument(
        "--hop-us", type=float, default=cost_model.HOP_US, help="µs for a hop of Gloo over TCP"
    )
    parser.add_argument("--tcp-gb-s", type=float, default=cost_model.TCP_GB_S, help="GB/s of Gloo over TCP")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    parts = args.parts.split(",")
    processes = args.processes or PROCESSES[: 1 if args.quick else None]
    tensors = args.tensors[:2] if args.quick else args.tensors
    rounds = args.rounds or (5 if args.quick else 20)
    for wrong, text in (
        ([part for part in parts if part not in PARTS], f"no such part; there are {', '.join(PARTS)}"),
        ([n for n in processes if n < 2 or SHAPE[0] % n], f"--processes must be >= 2 and divide {SHAPE[0]}"),
        ([n for n in args.ranks if n < 8 or n & (n - 1)], "--ranks must be 8 or more and powers of two"),
        ([n for n in tensors if n < 8], "--tensors must be 8 or more"),
        ([n for n in [rounds] if n < 2], "--rounds must be 2 or more"),
    ):
        if wrong:
            sys.exit(f"distributed.bench: {wrong[0]}: {text}")

    command = scripts.command_line("kernels_bench.distributed.bench")
    figures = {"command": command, "machine": machine.describe(), "rounds": rounds}
    print(machine.one_line(figures["machine"]))
    if "measured" in parts:
        figures["measured"] = [row for size in processes for row in measure(size, tensors, rounds)]
        show_measured(figures["measured"])
        if len(figures["measured"]) > 2:
            figures["fit"] = fit(figures["measured"])
            print(fitted(**figures["fit"]))
    if "setup" in parts:
        pairs = [(ranks, n) for ranks in args.ranks for n in tensors]
        figures["setup"] = [
            {"ranks": ranks, "tensors": n} | cost_model.simulate(ranks, n) for ranks, n in pairs
        ]
        show_setup(figures["setup"])
    if "model" in parts:
        network = {"per_node": args.per_node, "gb_s": args.gb_s}
        figures["model"] = [*model_rows(args.ranks, tensors, args.hop_us, args.tcp_gb_s, **network)]
        show_model(figures["model"], args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
