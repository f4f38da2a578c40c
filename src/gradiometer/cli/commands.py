"""The commands: their options, and what each prints. A command returns whether it has found a problem."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradiometer.extras import require
from gradiometer.terminal import printable
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from gradiometer.runs import Run

# columns of a table in a file or pipe
_WIDTH = 200
# as in gradiometer.columns, which imports torch
_FORMATS = ("fp16", "bf16", "e4m3", "e5m2")


def _kinds_of_run(context: typer.Context) -> list[str]:
    """Return the kinds that the run has recorded, to complete an option; without torch."""
    return [str(kind["name"]) for kind in _read_kinds(context)]


def _kinds_with_histograms(context: typer.Context) -> list[str]:
    """Return the kinds of tensors of which the run has histograms of exponents, likewise."""
    return [str(kind["of"]) for kind in _read_kinds(context) if kind["schema"] == "exponents"]


def _read_kinds(context: typer.Context) -> list[dict[str, Any]]:
    try:
        # an incomplete command line may leave the argument unparsed
        folder = context.params["run"] or context.args[0]
        kinds = json.loads(Path(folder, "run.json").read_bytes())["catalog"]["kinds"]
        return [{key: kind[key] for key in ("name", "of", "schema")} for kind in kinds]
    except (OSError, ValueError, LookupError, TypeError):
        return []


_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Top = Annotated[int, typer.Option(min=0, help="Number of tensors to show, worst first; 0 for all.")]
_Attempt = Annotated[
    int | None, typer.Option(min=1, help="Read the run as it was after this attempt (default: the last).")
]
_KIND_HELP = "The kind of tensors to show, such as grads or weights, of those that the run has."


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gradiometer {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, like GRADIOMETER_DEBUG=1.")
    ] = False,
) -> None:
    """Declare the options that precede a command; they are handled elsewhere."""


def read_run(path: Path, attempt: int | None = None) -> Run:
    """Do what `gradiometer.read_run` does."""
    from gradiometer import runs  # noqa: PLC0415 with torch

    return runs.read_run(path, attempt=attempt)


def _console() -> Console:
    rich = require("rich.console", "monitor", "The command line")
    console: Console = rich.Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # a file or pipe has no width, and its lines must not be truncated
        console.width = _WIDTH
    return console


def _print(value: dict[str, Any], table: Callable[[Console], Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(value)
        return
    console = _console()
    console.print(table(console))


def _print_json(value: dict[str, Any]) -> None:
    from gradiometer.runs import to_json  # noqa: PLC0415 with torch

    print(to_json(value))


def _pattern(text: str | None, option: str) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{option} {text!r} is not a valid regular expression: {error}") from None


def demo(
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the demo's text goes to stderr.")
    ] = False,
) -> bool:
    """Record a small training run with two faults, and report them. Options: gradiometer demo --help."""
    from gradiometer import demo  # noqa: PLC0415 it imports the compiler

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code = demo.main(context.args, prog=context.command_path)
    if as_json:
        _print_json({"passed": code == 0})
    return code != 0


def _report(
    run: _Run,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER]", help="The folder of another run, to show both on one page."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write (default: RUN/report.html, or RUN/comparison.html for two runs).",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: _Json = False,
) -> None:
    """Write the page of a run, or of two: one HTML file that opens offline."""
    from gradiometer import web  # noqa: PLC0415 only this command needs it

    if output is not None and not output.absolute().parent.is_dir():
        from gradiometer.runs import RunError  # noqa: PLC0415 as above

        msg = f"{output} cannot be written: there is no folder {output.absolute().parent}; create it first"
        raise RunError(msg)
    two = {} if other is None else {"other": read_run(other)}
    page = Path(web.write_page(read_run(run), output, **two)).absolute()
    opened = webbrowser.open(page.as_uri()) if show else False
    size = page.stat().st_size
    if as_json:
        _print_json({"page": str(page), "bytes": size, "opened": opened})
    else:
        print(printable(str(page)))


def _serve(
    run: _Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 selects a free one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Serve the page of a run on this machine only, with new steps as they are written, until Ctrl-C."""
    from gradiometer.web import PageServer  # noqa: PLC0415 only this command needs it

    found = read_run(run)
    try:
        server = PageServer(found, port)
    except OSError as error:
        msg = f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; pass another --port, or none"
        raise OSError(msg) from None
    with server:
        if as_json:
            print(json.dumps({"url": server.url}), flush=True)
        else:
            print(f"{printable(str(run))} at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()


def _watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is being written.")],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep following after the run is closed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per change.")] = False,
) -> None:
    """Follow a run while it is written. It ends when the run is closed, or with Ctrl-C."""
    from gradiometer.cli import watch  # noqa: PLC0415 with rich

    watch.watch(read_run(run), _console(), interval=interval, once=once, follow=follow, as_json=as_json)


def _ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder to search (default: the current folder).")
    ] = Path(),
    as_json: _Json = False,
) -> None:
    """List the runs in and below a folder: state, steps, age, findings."""
    from gradiometer.cli import ls  # noqa: PLC0415 with rich

    found = ls.look(folder)
    values = {"folder": str(folder), "runs": [asdict(x) for x in found]}
    _print(values, lambda _: ls.render(folder, found), as_json=as_json)


def _show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of several.")],
    step: Annotated[
        int | None,
        typer.Option(help="The step's number; -1 is the last (default: the last step with tensors)."),
    ] = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", autocompletion=_kinds_of_run, help=_KIND_HELP)
    ] = "grads",
    top: _Top = 20,
    name: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only tensors whose name matches (re.search).")
    ] = None,
    attempt: _Attempt = None,
    as_json: _Json = False,
) -> None:
    """Show one step of a run: scalars, tensors (worst first), findings."""
    from gradiometer.cli import ls, show, tables  # noqa: PLC0415 with rich

    if run.is_dir() and not (run / "run.json").exists() and ls.look(run):
        _ls(run, as_json)
        return
    shown = show.look(read_run(run, attempt), step, kind=kind, name=_pattern(name, "--name"))
    most = top or None
    _print(shown.to_dict(most), lambda console: tables.shown(shown, most, console), as_json=as_json)


def _precision(
    run: _Run,
    step: Annotated[
        int | None, typer.Option(help="A step with histograms; -1 is the last (default: the last).")
    ] = None,
    kind: Annotated[
        str, typer.Option(metavar="KIND", autocompletion=_kinds_with_histograms, help=_KIND_HELP)
    ] = "grads",
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="|".join(_FORMATS),
            autocompletion=lambda: _FORMATS,
            help="A format, or the name of its torch dtype; may be repeated (default: all).",
        ),
    ] = None,
    top: _Top = 20,
    attempt: _Attempt = None,
    as_json: _Json = False,
) -> None:
    """Show which tensors fit fp16, bf16 and fp8 in a step, and how that changed over the run."""
    from gradiometer.cli import precision  # noqa: PLC0415 with torch
    from gradiometer.columns import format_of  # noqa: PLC0415 likewise

    try:
        chosen = [format_of(name, "--format").name for name in formats] if formats else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = precision.look(read_run(run, attempt), step, kind, chosen)
    if as_json:
        _print_json(found.to_dict())
    else:
        print(precision.render(found, top or None))


def _diff(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The folder of another run.")],
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Relative tolerance; with 0, values must be equal.")
    ] = 0.0,
    ignore: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Ignore tensors and scalars whose name matches (re.search)."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of differences to show; 0 for all.")] = 10,
    as_json: _Json = False,
) -> bool:
    """Find the first step and tensor in which two runs differ, to the bit if both have fingerprints.

    The exit code is 1 if they differ.
    """
    from gradiometer.cli import tables  # noqa: PLC0415 with rich
    from gradiometer.runs import compare_runs  # noqa: PLC0415 only this command needs it

    if not math.isfinite(rtol):
        msg = f"--rtol {rtol:g} is not finite, so it compares nothing: pass a finite number"
        raise typer.BadParameter(msg)
    found = compare_runs(read_run(a), read_run(b), rtol=rtol, ignore=_pattern(ignore, "--ignore"))
    _print(found.to_dict(), lambda _: tables.comparison(found, top or None), as_json=as_json)
    return not found.same


def _verify(run: _Run, as_json: _Json = False) -> bool:
    """Check every file of a run against its digest. The exit code is 1 if one is damaged or missing."""
    from gradiometer.cli import tables  # noqa: PLC0415 with rich
    from gradiometer.runs import verify  # noqa: PLC0415 only this command needs it

    found = verify(run)
    _print(found.to_dict(), lambda _: tables.verification(found), as_json=as_json)
    return not found.whole


def _fingerprint(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .safetensors file, or a file of torch.save (.pt, .pth, .bin, .ckpt)."
        ),
    ],
    saved: Annotated[
        Path | None, typer.Option("--check", metavar="SAVED", help="Compare with a file that --json printed.")
    ] = None,
    as_json: _Json = False,
) -> bool:
    """Print a fingerprint of each tensor of a checkpoint. With --check, the exit code is 1 if one differs."""
    from gradiometer.cli import fingerprint  # noqa: PLC0415 with torch

    if saved is None:
        found = fingerprint.look(file)
        _print(found, lambda _: fingerprint.render(found), as_json=as_json)
        return False
    expected = fingerprint.stored(saved)
    found = fingerprint.look(file)
    checked = fingerprint.check(found, expected)
    _print(
        asdict(checked),
        lambda _: fingerprint.render_check(checked, found, expected, file, saved),
        as_json=as_json,
    )
    return not checked.same


def _doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A folder for runs, to check its free space and permissions."),
    ] = None,
    as_json: _Json = False,
) -> bool:
    """Check this machine: versions, devices, packages. The exit code is 1 if there is a problem."""
    from gradiometer.cli import doctor, tables  # noqa: PLC0415 with rich

    found = doctor.examine(run)
    _print(found.to_dict(), lambda _: tables.doctor(found), as_json=as_json)
    return bool(found.problems)


COMMANDS: dict[str, Callable[..., bool | None]] = {
    "report": _report,
    "serve": _serve,
    "watch": _watch,
    "ls": _ls,
    "show": _show,
    "precision": _precision,
    "diff": _diff,
    "verify": _verify,
    "fingerprint": _fingerprint,
    "doctor": _doctor,
}
