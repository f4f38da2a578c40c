"""Run the whole suite on every supported pair of torch and triton, and print a table.

Each pair gets a fresh virtual environment with the package and the test tools, and the runs that
`make test` makes: plain, on interpreted kernels, and those of many
ranks. A CUDA build of torch takes about 5 GB, so
an environment is removed when its runs are over, unless it is to be kept.

    python3 tests/matrix.py                                     all pairs, fresh environments
    python3 tests/matrix.py --only 2.15 --keep                  one pair, its environment stays
    python3 tests/matrix.py --reuse                             what an earlier --keep left
    python3 tests/matrix.py --python ~/torch215/bin/python      that environment for its pair
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# torch and the triton it is released with; the middle one is the Makefile's default
PAIRS = (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.15.0", "3.9.0"))
RUNS = ("plain", "interpreted", "ranks")
OUTCOMES = ("passed", "failed", "skipped")

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = "import torch, triton; print(torch.__version__, triton.__version__)"
# pytest's last line: "=== 3 failed, 120 passed, 2 skipped, 1 error in 61.20s (0:01:01) ==="
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s")


@dataclass
class Run:
    """One run of pytest: what became of its tests."""

    torch: str
    triton: str
    name: str
    ok: bool = False
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def row(self) -> tuple[str, ...]:
        counts = (str(self.counts.get(outcome, 0)) if self.counts else "-" for outcome in OUTCOMES)
        result = "ok" if self.ok else f"FAILED {self.note}".strip()
        return (self.torch, self.triton, self.name, *counts, f"{self.seconds:.0f}", result)


def versions(python: Path) -> tuple[str, str] | None:
    """Return the exact versions of torch and triton in an environment, None where they don't import."""
    if not python.exists():
        return None
    asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    torch, triton = asked.stdout.split()
    return torch, triton


def release(version: str) -> str:
    """Return a version without its build: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def matches(python: Path, pair: tuple[str, str]) -> bool:
    found = versions(python)
    return found is not None and (release(found[0]), release(found[1])) == pair


def install(env: Path, pair: tuple[str, str], *, reuse: bool) -> Path:
    """Return the interpreter of an environment with exactly this pair and the package as it is now."""
    python = env / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = [f"torch=={pair[0]}", f"triton=={pair[1]}"]
    if not (reuse and matches(python, pair)):
        print(f"installing {' '.join(pins)} into {env}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", env], check=True)
    subprocess.run([*pip, *pins, f"{ROOT}[test]"], check=True)
    # the version says nothing about a source tree that changed
    subprocess.run([*pip, "--force-reinstall", "--no-deps", ROOT], check=True)
    return python


def pytest(python: Path, run: Run, extra: dict[str, str]) -> Run:
    """Make one of the Makefile's runs with this interpreter; show and count what it prints."""
    command = ["make", "--no-print-directory", "-C", ROOT, f"PY={python}", f"run-{run.name}"]
    start = time.monotonic()
    with subprocess.Popen(
        command, env=os.environ | extra, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if closing := CLOSING.match(line):
                run.counts = outcomes(closing[1])
    run.seconds = time.monotonic() - start
    run.ok = process.returncode == 0 and run.counts.get("passed", 0) > 0
    if process.returncode == 0 and not run.ok:
        run.note = "no test ran"
    return run


def outcomes(closing: str) -> dict[str, int]:
    """Return pytest's counts by outcome. An error in a fixture or a file is a failure."""
    counts = {"failed": 0}
    for part in closing.split(", "):
        number, name = part.split()
        outcome = "failed" if name in ("error", "errors") else name
        counts[outcome] = counts.get(outcome, 0) + int(number)
    return counts


def measure(pair: tuple[str, str], given: Path | None, args: argparse.Namespace) -> list[Run]:
    """Make both runs on one pair."""
    env = args.env_dir.resolve() / f"torch-{pair[0]}"
    extra = {}
    try:
        if given:
            # that environment is not ours to change: the package comes from the source tree
            python = given
            extra["PYTHONPATH"] = str(ROOT / "src")
        else:
            python = install(env, pair, reuse=args.reuse)
            if not matches(python, pair):
                return [Run(*pair, name, note=f"found {versions(python)}") for name in RUNS]
        torch, triton = versions(python) or pair
        runs = []
        for name in RUNS:
            print(f"\ntorch {torch}, triton {triton}, {name}", flush=True)
            runs.append(pytest(python, Run(torch, triton, name), extra))
    except subprocess.CalledProcessError as error:
        return [Run(*pair, name, note=f"exit {error.returncode} of {error.cmd[1:4]}") for name in RUNS]
    finally:
        if not (given or args.keep or args.reuse):
            shutil.rmtree(env, ignore_errors=True)
    return runs


def table(runs: list[Run]) -> str:
    rows = [("torch", "triton", "run", *OUTCOMES, "seconds", "result"), *(run.row() for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", metavar="TORCH", help="a pair by its torch, 2.15 say")
    parser.add_argument("--env-dir", type=Path, default=ROOT / ".matrix", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    parser.add_argument("--reuse", action="store_true", help="use what was kept, and keep it")
    parser.add_argument(
        "--python", action="append", type=Path, default=[], metavar="PATH", help="an environment to use"
    )
    args = parser.parse_args()
    args.pairs = [pair for pair in PAIRS if not args.only or any(pair[0].startswith(o) for o in args.only)]
    if not args.pairs:
        parser.error(f"--only: there are {', '.join(torch for torch, _ in PAIRS)}")
    args.given = {}
    for python in args.python:
        # absolute, but not resolved: a virtual environment is known by the link to its interpreter
        path = Path(os.path.abspath(python.expanduser()))  # noqa: PTH100
        pair = next((pair for pair in args.pairs if matches(path, pair)), None)
        if pair is None:
            parser.error(f"--python {python}: found {versions(path)}, want one of {args.pairs}")
        args.given[pair] = path
    return args


def main() -> int:
    args = arguments()
    runs: list[Run] = []
    for pair in args.pairs:
        runs += measure(pair, args.given.get(pair), args)
    print(f"\n{table(runs)}")
    return 0 if all(run.ok for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
