"""The tables of the machine-code report, as Markdown and on a terminal."""

from __future__ import annotations

import sys

from kernels_bench.machine_code.roofline import GPUS, REACHABLE

RATES = {
    "processors": "SMs or CUs",
    "clock": "clock, Hz",
    "bandwidth": "bytes/s",
    "lanes": "lanes issued",
    "fp64": "fp64 operations",
    "conversions": "conversions to fp64",
}
CODE_HEAD = [
    *("target", "kernel", "dtype", "variant", "instr. / element", "NOPs", "fp64", "to fp64"),
    *("loads", "registers", "spills", "stack", "shared", "all instr."),
]
BOUND_HEAD = [
    *("GPU", "kernel", "dtype", "memory", "issue", "fp64", "conversion"),
    *("bound", "GB/s", "of spec", "MHz needed", "blocks / SM", "KiB in flight", "latency model"),
]
RATE_HEAD = ["GPU", "rate", "value", "source"]
RATES_OF = "Rates, per clock of one SM or CU unless a unit is given"

PREDICTED = f"""\
**Predicted**, not measured: the least ms that each resource needs for 10⁹ elements, with memory at
{REACHABLE:.0%} of the specified bandwidth; the longest is the bound. *MHz needed* is the lowest clock at
which memory is the bound. *latency model* is the share of the reachable bandwidth that the loads in flight on
an SM give, by `kernels_bench/machine_code/latency.py`.
"""


def code_table(rows: list[dict]) -> list[list[str]]:
    return [
        [row["target"], row["kernel"], row["dtype"], row["variant"]]
        + (
            [f"not compiled: {row['error']}", *[""] * (len(CODE_HEAD) - 5)]
            if "error" in row
            else [
                f"{row['instructions']:.2f}",
                f"{row['nops']:.2f}",
                f"{row['fp64']:.2f}",
                f"{row['conversions']:.2f}",
                " + ".join(f"{number} x {size} B" for size, number in row["loads"].items()),
                *(str(row[name]) for name in ("registers", "spills", "stack", "shared", "code")),
            ]
        )
        for row in rows
    ]


def bound_table(bounds: list[dict]) -> list[list[str]]:
    return [
        [row["gpu"], row["kernel"], row["dtype"]]
        + [f"{value:.3f}" for value in row["milliseconds"].values()]
        + [row["bound"], f"{row['bytes_per_second'] / 1e9:.0f}", f"{row['share']:.0%}"]
        + [f"{row['clock_needed'] / 1e6:.0f}" if row["bound"] == "memory" else "-"]
        + flight_cells(row["flight"])
        for row in bounds
    ]


def flight_cells(flight: dict | None) -> list[str]:
    if flight is None:
        return ["-"] * 3
    return [str(flight["blocks"]), f"{flight['loads'] / 1024:.0f}", f"{flight['share']:.0%}"]


def rate_table(bounds: list[dict]) -> list[list[str]]:
    named = {row["gpu"] for row in bounds}
    return [
        [gpu.name, meaning, f"{getattr(gpu, name):,.0f}", gpu.sources[name]]
        for gpu in GPUS
        if gpu.name in named
        for name, meaning in RATES.items()
    ]


def pipe_table(head: list[str], cells: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def markdown(report: dict) -> str:
    compiled = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            f"Compiled with {compiled}.\n",
            "The main loop, per element read; registers, spills, stack and shared memory of the kernel:\n",
            pipe_table(CODE_HEAD, code_table(report["code"])),
            PREDICTED,
            pipe_table(BOUND_HEAD, bound_table(report["bounds"])),
            f"{RATES_OF}:\n",
            pipe_table(RATE_HEAD, rate_table(report["bounds"])),
        ]
    )


def joined(reports: list[dict]) -> str:
    """Return a table of the moments kernel with a column for each compiler."""
    heads = [f"triton {report['versions']['triton']}" for report in reports]
    if len({*heads}) < len(heads):
        heads = [f"{i}: {head}" for i, head in enumerate(heads, 1)]
    cells: dict[tuple[str, str], list[str]] = {}
    for place, report in enumerate(reports):
        for row in report["code"]:
            if row["kernel"] == "moments" and not row["variant"]:
                line = cells.setdefault((row["target"], row["dtype"]), ["-"] * len(reports))
                line[place] = "not compiled" if "error" in row else code_cell(row)
    assembled = [
        [target, *(report["versions"].get(target, "-") for report in reports)]
        for target in dict.fromkeys(target for target, _ in cells)
    ]
    return "\n".join(
        [
            pipe_table(["assembler", *heads], assembled),
            "Instructions per element, registers, and spills if any:\n",
            pipe_table(["target", "dtype", *heads], [[*names, *line] for names, line in cells.items()]),
        ]
    )


def code_cell(row: dict) -> str:
    spills = f", {row['spills']} spills" if row["spills"] else ""
    return f"{row['instructions']:.2f} ({row['registers']}{spills})"


def show(report: dict) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(report))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    for title, head, cells in (
        ("Main loop, per element read", CODE_HEAD, code_table(report["code"])),
        ("Predicted: least ms for 1e9 elements", BOUND_HEAD, bound_table(report["bounds"])),
        (RATES_OF, RATE_HEAD, rate_table(report["bounds"])),
    ):
        table = Table(title=title)
        for name in head:
            table.add_column(name, no_wrap=name in {"target", "dtype", "GPU"})
        for row in cells:
            table.add_row(*row)
        console.print(table)
