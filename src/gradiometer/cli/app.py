"""The command line, ``gradiometer`` or ``python -m gradiometer``; ``docs/reference/cli.md`` is its manual.

A command prints its result on stdout, as tables or, with ``--json``, as JSON alone. An error is one line on
stderr and an exit code of `Exit`. Help and shell completion run without torch, so each command imports what
it needs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gradiometer.extras import require
from gradiometer.terminal import one_line, printable
from gradiometer.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import typer  # noqa: TC004 see _app
    from rich.console import Console

    from gradiometer.runs import Run

__all__ = ["Exit", "main"]

_WIDE = 200
# as in gradiometer.recorder, which imports torch
_KINDS = ("grads", "weights", "updates", "activations", "activation_grads")
_OF_PARAMETERS = _KINDS[:2]
# as in gradiometer.columns
_FORMATS = ("fp16", "bf16", "e4m3", "e5m2")


class Exit(enum.IntEnum):
    """Exit codes."""

    OK = 0
    FOUND = 1  # the runs differ, a file is damaged, a check failed, or there is a problem
    USAGE = 2
    UNREADABLE = 3  # a run or file cannot be read or written, or a run lacks the requested step
    MISSING = 4  # a package is not installed
    FAILED = 5  # an unexpected error
    INTERRUPTED = 130
    PIPE = 141  # the reader of stdout has closed it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the arguments; None for ``sys.argv[1:]``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments.remove("--debug")
        os.environ["GRADIOMETER_DEBUG"] = "1"
    if sys.stdout is None:
        return _fail(
            Exit.UNREADABLE,
            "stdout is closed, so nothing can be printed: redirect it to a file or a terminal",
        )
    try:
        result = _app().main(args=arguments or ["--help"], prog_name="gradiometer", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        return _left()
    except SystemExit as end:
        # rich and typer exit with 1 if the reader of stdout has closed it; for a command, 1 means a finding
        if end.code != 1:
            raise
        return _left()
    except Exception as error:
        if _debugs():
            raise
        # typer converts Ctrl-C to Abort
        if type(error).__name__ == "Abort":
            return Exit.INTERRUPTED
        if isinstance(error, ImportError):
            return _fail(Exit.MISSING, error)
        # a usage error of typer, whose class is in another module in every version
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "gradiometer"
        said = error.format_message().removeprefix("Invalid value: ").rstrip(".")
        return _fail(Exit.USAGE, f"{said}; see {where} --help")
    return int(result or 0)


def _debugs() -> bool:
    return os.environ.get("GRADIOMETER_DEBUG", "") not in {"", "0"}


def _fail(code: Exit, error: object) -> int:
    line = one_line(error) or type(error).__name__
    # print(file=None) would print to stdout
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"gradiometer: {line}", file=sys.stderr)
    return code


def _safely(function: Callable[..., int]) -> Callable[..., int]:
    """Turn an error in a command into one line on stderr and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return Exit.INTERRUPTED
        except BrokenPipeError:
            return _left()
        except Exception as error:
            if _debugs() or hasattr(error, "format_message"):
                raise
            # a package is missing, not a name within this package
            if isinstance(error, ModuleNotFoundError) or "gradiometer[" in str(error):
                return _fail(Exit.MISSING, error)
            from gradiometer.runs import RunError  # noqa: PLC0415 not for a completion

            if isinstance(error, RunError | OSError):
                return _fail(Exit.UNREADABLE, error)
            name = type(error).__name__
            return _fail(Exit.FAILED, f"{name}: {error} (gradiometer --debug ... shows the traceback)")
        return code

    return run


def _left() -> int:
    """Return the exit code for a command whose stdout was closed by its reader."""
    # the interpreter flushes stdout at exit, and would print an error
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.PIPE


def _app() -> Any:
    """Return the typer command that contains all commands."""
    # the annotations below are strings until typer evaluates them, which needs this global
    global typer  # noqa: PLW0603
    typer = require("typer", "monitor", "The command line")
    app = typer.Typer(
        name="gradiometer",
        help="Inspect recorded PyTorch training runs.",
        epilog="Exit codes: 0 success, 1 differences or problems found, 2 usage error, "
        "3 a file cannot be read or written, 4 missing package, 5 unexpected error.",
        pretty_exceptions_enable=False,
        # with rich, the help takes twice the time
        rich_markup_mode=None,
    )
    app.callback()(_options)
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("demo", context_settings=passed_on)(_safely(_demo))
    for name, function in _COMMANDS.items():
        app.command(name)(_safely(function))
    return typer.main.get_command(app)


def read_run(path: Path, attempt: int | None = None) -> Run:
    """Do what `gradiometer.read_run` does."""
    from gradiometer import runs  # noqa: PLC0415 with torch

    return runs.read_run(path, attempt=attempt)


def _console() -> Console:
    rich = require("rich.console", "monitor", "The command line")
    console: Console = rich.Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # a file or pipe has no width, and its lines must not be truncated
        console.width = _WIDE
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


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gradiometer {__version__}")
        raise typer.Exit


def _pattern(text: str | None, option: str) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{option} {text!r} is not a valid regular expression: {error}") from None


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, like GRADIOMETER_DEBUG=1.")
    ] = False,
) -> None:
    """Declare the options that precede a command; they are handled elsewhere."""


def _demo(
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the demo's text goes to stderr.")
    ] = False,
) -> int:
    """Record a small training run with two faults, and report them. Options: gradiometer demo --help."""
    from gradiometer import demo  # noqa: PLC0415 it imports the compiler

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code = demo.main(context.args, prog=context.command_path)
    if as_json:
        _print_json({"passed": code == 0})
    return Exit.FOUND if code else Exit.OK


def _report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Write the page of a run, or of two: one HTML file that opens offline."""
    from gradiometer import web  # noqa: PLC0415 only this command needs it

    if output is not None and not output.absolute().parent.is_dir():
        from gradiometer.runs import RunError  # noqa: PLC0415 as above

        raise RunError(
            f"{output} cannot be written: there is no folder {output.absolute().parent}; create it first"
        )
    two = {} if other is None else {"other": read_run(other)}
    page = Path(web.write_page(read_run(run), output, **two)).absolute()
    opened = webbrowser.open(page.as_uri()) if show else False
    size = page.stat().st_size
    if as_json:
        _print_json({"page": str(page), "bytes": size, "opened": opened})
    else:
        print(printable(str(page)))
    return Exit.OK


def _serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 selects a free one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> int:
    """Serve the page of a run on this machine only, with new steps as they are written, until Ctrl-C."""
    from gradiometer.cli import serve  # noqa: PLC0415 only this command needs it

    serve.serve(read_run(run), port=port, as_json=as_json)
    return Exit.OK


def _watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is being written.")],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep following after the run is closed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per change.")] = False,
) -> int:
    """Follow a run while it is written. It ends when the run is closed, or with Ctrl-C."""
    from gradiometer.cli import watch  # noqa: PLC0415 with rich

    watch.watch(read_run(run), _console(), interval=interval, once=once, follow=follow, as_json=as_json)
    return Exit.OK


def _ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder to search (default: the current folder).")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the runs in and below a folder: state, steps, age, findings."""
    from gradiometer.cli import ls  # noqa: PLC0415 with rich

    found = ls.look(folder)
    _print(ls.to_dict(folder, found), lambda _: ls.render(folder, found), as_json=as_json)
    return Exit.OK


def _show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of several.")],
    step: Annotated[
        int | None,
        typer.Option(help="The step's number; -1 is the last (default: the last step with tensors)."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            metavar="|".join(_KINDS), autocompletion=lambda: _KINDS, help="The kind of tensors to show."
        ),
    ] = "grads",
    top: Annotated[int, typer.Option(min=0, help="Number of tensors to show, worst first; 0 for all.")] = 20,
    name: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only tensors whose name matches (re.search).")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, help="Show the run as it was after this attempt (default: the last)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show one step of a run: scalars, tensors (worst first), findings."""
    if kind not in _KINDS:
        known = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
        raise typer.BadParameter(f"--kind {kind!r} is not a kind of tensors: pass {known}")
    from gradiometer.cli import ls, show, tables  # noqa: PLC0415 with rich

    if run.is_dir() and not (run / "run.json").exists() and ls.look(run):
        return _ls(run, as_json)
    shown = show.look(read_run(run, attempt), step, kind=kind, name=_pattern(name, "--name"))  # type: ignore[arg-type]
    most = top or None
    _print(shown.to_dict(most), lambda console: tables.shown(shown, most, console), as_json=as_json)
    return Exit.OK


def _precision(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[
        int | None,
        typer.Option(help="A step with histograms; -1 is the last (default: the last)."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            metavar="|".join(_OF_PARAMETERS),
            autocompletion=lambda: _OF_PARAMETERS,
            help="The kind of tensors to show.",
        ),
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
    top: Annotated[int, typer.Option(min=0, help="Number of tensors to show, worst first; 0 for all.")] = 20,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, help="Read the run as it was after this attempt (default: the last)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show which tensors fit fp16, bf16 and fp8 in a step, and how that changed over the run."""
    if kind not in _OF_PARAMETERS:
        raise typer.BadParameter(f"--kind {kind!r} has no histograms: pass {' or '.join(_OF_PARAMETERS)}")
    from gradiometer.cli import precision  # noqa: PLC0415 with torch
    from gradiometer.columns import format_of  # noqa: PLC0415 likewise

    try:
        chosen = [format_of(name, "--format").name for name in formats] if formats else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = precision.look(read_run(run, attempt), step, kind, chosen)  # type: ignore[arg-type]
    if as_json:
        _print_json(found.to_dict())
    else:
        print(precision.render(found, top or None))
    return Exit.OK


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Find the first step and tensor in which two runs differ, to the bit if both have fingerprints.

    The exit code is 1 if they differ.
    """
    from gradiometer.cli import tables  # noqa: PLC0415 with rich
    from gradiometer.runs import compare_runs  # noqa: PLC0415 only this command needs it

    if not math.isfinite(rtol):
        raise typer.BadParameter(
            f"--rtol {rtol:g} is not finite, so it compares nothing: pass a finite number"
        )
    found = compare_runs(read_run(a), read_run(b), rtol=rtol, ignore=_pattern(ignore, "--ignore"))
    _print(found.to_dict(), lambda _: tables.comparison(found, top or None), as_json=as_json)
    return Exit.OK if found.same else Exit.FOUND


def _verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check every file of a run against its digest. The exit code is 1 if one is damaged or missing."""
    from gradiometer.cli import tables  # noqa: PLC0415 with rich
    from gradiometer.runs import verify  # noqa: PLC0415 only this command needs it

    found = verify(run)
    _print(found.to_dict(), lambda _: tables.verification(found), as_json=as_json)
    return Exit.OK if found.whole else Exit.FOUND


def _fingerprint(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .safetensors file, or a file of torch.save (.pt, .pth, .bin, .ckpt)."
        ),
    ],
    saved: Annotated[
        Path | None,
        typer.Option("--check", metavar="SAVED", help="Compare with a file that --json printed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print a fingerprint of each tensor of a checkpoint. With --check, the exit code is 1 if one differs."""
    from gradiometer.cli import fingerprint  # noqa: PLC0415 with torch

    if saved is None:
        found = fingerprint.look(file)
        _print(found, lambda _: fingerprint.render(found), as_json=as_json)
        return Exit.OK
    expected = fingerprint.stored(saved)
    found = fingerprint.look(file)
    checked = fingerprint.check(found, expected)
    _print(
        checked.to_dict(),
        lambda _: fingerprint.render_check(checked, found, expected, file, saved),
        as_json=as_json,
    )
    return Exit.OK if checked.same else Exit.FOUND


def _doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A folder for runs, to check its free space and permissions."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check this machine: versions, devices, packages. The exit code is 1 if there is a problem."""
    from gradiometer.cli import doctor, tables  # noqa: PLC0415 with rich

    found = doctor.examine(run)
    _print(found.to_dict(), lambda _: tables.doctor(found), as_json=as_json)
    return Exit.FOUND if found.problems else Exit.OK


_COMMANDS: dict[str, Callable[..., int]] = {
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
