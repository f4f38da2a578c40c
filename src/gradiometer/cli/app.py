"""The command line, ``gradiometer`` or ``python -m gradiometer``; ``docs/reference/cli.md`` is its manual.

A command prints its result on stdout, as tables or, with ``--json``, as JSON alone. An error is one line on
stderr and an exit code of `Exit`. Help and shell completion run without torch, so each command imports what
it needs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from gradiometer.extras import require
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    """Run the command of these arguments, by default of ``sys.argv[1:]``, and return its exit code."""
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
        return _closed_stdout()
    except SystemExit as end:
        # rich and typer exit with 1 if the reader of stdout has closed it; for a command, 1 means a finding
        if end.code != 1:
            raise
        return _closed_stdout()
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
        message = error.format_message().removeprefix("Invalid value: ").rstrip(".")
        return _fail(Exit.USAGE, f"{message}; see {where} --help")
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


def _safely(function: Callable[..., bool | None]) -> Callable[..., int]:
    """Turn the result of a command, or its error as one line on stderr, into an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> int:
        try:
            found = function(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return Exit.INTERRUPTED
        except BrokenPipeError:
            return _closed_stdout()
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
        return Exit.FOUND if found else Exit.OK

    return run


def _closed_stdout() -> int:
    """Return the exit code for a command whose stdout was closed by its reader."""
    # the interpreter flushes stdout at exit, and would print an error
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.PIPE


def _app() -> Any:
    """Return the typer command that contains all commands."""
    typer = require("typer", "monitor", "The command line")
    from gradiometer.cli import commands  # noqa: PLC0415 it needs typer

    app = typer.Typer(
        name="gradiometer",
        help="Inspect recorded PyTorch training runs.",
        epilog="Exit codes: 0 success, 1 differences or problems found, 2 usage error, "
        "3 a file cannot be read or written, 4 missing package, 5 unexpected error.",
        pretty_exceptions_enable=False,
        # with rich, the help takes twice the time
        rich_markup_mode=None,
    )
    app.callback()(commands.options)
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("demo", context_settings=passed_on)(_safely(commands.demo))
    for name, function in commands.COMMANDS.items():
        app.command(name)(_safely(function))
    return typer.main.get_command(app)
