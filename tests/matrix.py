"""Run the whole suite on every supported pair of torch and triton, and print a table.

Each pair gets a fresh virtual environment with the package and the test tools, and runs the parts of
`make test`: plain, on interpreted and on compiled kernels, and many ranks. A CUDA build of torch takes
about 5 GB, so an environment is removed after its parts, unless --keep is given.

If pip's settings on this machine refuse a pair, for example by a constraints file, the table lists it as
refused, with pip's reason, and the other pairs run. The exit code is 1 if a part failed, or if no pair

    python3 tests/matrix.py                                     all pairs, fresh environments
    python3 tests/matrix.py --only 2.15 --keep                  one pair, its environment stays
    python3 tests/matrix.py --reuse                             environments that an earlier --keep left
    python3 tests/matrix.py --python ~/torch215/bin/python      use that environment for its pair
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parts import HEADER, ROOT, Part, make, table

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch and the triton released with it; 2.13.0 is the Makefile's default
PAIRS = (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.14.1", "3.8.0"), ("2.15.0", "3.9.0"))
PARTS = ("plain", "interpreted", "ranks")

VERSIONS = "import torch, triton; print(torch.__version__, triton.__version__)"
# pip's message about a conflict with the machine's own constraints, and about nothing else
CONSTRAINT = re.compile(r"^ *(The user requested \(constraint\) .*\S)", re.MULTILINE)


class RefusedError(Exception):
    """The machine's package settings refuse to install this pair."""


@dataclass
class Run:
    """One part on one pair."""

    pair: tuple[str, str]
    part: Part
    refused: str = ""

    def row(self) -> tuple[str, ...]:
        row = self.part.row()
        return (*self.pair, *row[:-1], f"REFUSED by pip: {self.refused}" if self.refused else row[-1])


def versions(python: Path) -> tuple[str, str] | None:
    """Return the exact versions of torch and triton in an environment, None if they cannot be imported."""
    if not python.exists():
        return None
    asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    torch, triton = asked.stdout.split()
    return torch, triton


def release(version: str) -> str:
    """Return a version without its build tag: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def matches(python: Path, pair: tuple[str, str]) -> bool:
    found = versions(python)
    return found is not None and (release(found[0]), release(found[1])) == pair


def install(env: Path, pair: tuple[str, str], *, reuse: bool) -> Path:
    """Return the Python of an environment with exactly this pair and the current package."""
    python = env / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    pins = [f"torch=={pair[0]}", f"triton=={pair[1]}"]
    if not (reuse and matches(python, pair)):
        print(f"installing {' '.join(pins)} into {env}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", env], check=True)
    _pip([*pip, *pins, f"{ROOT}[test]"])
    # the version alone does not show that the sources have changed
    _pip([*pip, "--force-reinstall", "--no-deps", ROOT])
    return python


def _pip(command: Sequence[str | Path]) -> None:
    # without --quiet, which would hide pip's reason
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return
    print(done.stdout, flush=True)
    if reason := CONSTRAINT.search(done.stdout):
        raise RefusedError(reason[1])
    done.check_returncode()


def measure(pair: tuple[str, str], given: Path | None, args: argparse.Namespace) -> list[Run]:
    """Run all parts on one pair."""
    env = args.env_dir.resolve() / f"torch-{pair[0]}"
    extra = {}
    try:
        if given:
            # do not change a given environment: the package comes from the source tree
            python = given
            extra["PYTHONPATH"] = str(ROOT / "src")
        else:
            python = install(env, pair, reuse=args.reuse)
            if not matches(python, pair):
                return [Run(pair, Part(name, note=f"found {versions(python)}")) for name in PARTS]
        found = versions(python) or pair
        runs = []
        for name in PARTS:
            print(f"\ntorch {found[0]}, triton {found[1]}, {name}", flush=True)
            runs.append(Run(found, make(name, [f"PY={python}"], extra)))
    except RefusedError as refused:
        return [Run(pair, Part("all"), refused=str(refused))]
    except subprocess.CalledProcessError as error:
        return [Run(pair, Part(name, note=f"exit {error.returncode} of {error.cmd[1:4]}")) for name in PARTS]
    finally:
        if not (given or args.keep or args.reuse):
            shutil.rmtree(env, ignore_errors=True)
    return runs


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", metavar="TORCH", help="a torch version, such as 2.15")
    parser.add_argument("--env-dir", type=Path, default=ROOT / ".matrix", metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--reuse", action="store_true", help="use kept environments, and keep them")
    parser.add_argument(
        "--python", action="append", type=Path, default=[], metavar="PATH", help="a Python to use"
    )
    args = parser.parse_args(given)
    args.pairs = [pair for pair in PAIRS if not args.only or any(pair[0].startswith(o) for o in args.only)]
    if not args.pairs:
        parser.error(f"--only: the versions are {', '.join(torch for torch, _ in PAIRS)}")
    args.given = {}
    for python in args.python:
        # absolute, but not resolved: a virtual environment is identified by its symlink to the interpreter
        path = Path(os.path.abspath(python.expanduser()))  # noqa: PTH100
        pair = next((pair for pair in args.pairs if matches(path, pair)), None)
        if pair is None:
            parser.error(f"--python {python}: found {versions(path)}, want one of {args.pairs}")
        args.given[pair] = path
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    runs: list[Run] = []
    for pair in args.pairs:
        runs += measure(pair, args.given.get(pair), args)
    print(f"\n{table([('torch', 'triton', *HEADER), *(run.row() for run in runs)])}")
    refused = [run for run in runs if run.refused]
    if refused:
        names = ", ".join(f"torch {run.pair[0]} with triton {run.pair[1]}" for run in refused)
        print(f"\nnot tested, refused by this machine's package settings: {names}")
    made = [run for run in runs if not run.refused]
    return 0 if made and all(run.part.ok for run in made) else 1


if __name__ == "__main__":
    sys.exit(main())
