"""The demo: a small recorded training run with two faults, and its report page.

``python -m gradiometer.demo`` trains a character-level transformer on the sources of Python's own
standard library. Forward, backward, recording and AdamW are one compiled graph. Then one gradient gets an
Inf, and later the learning rate is multiplied by 1000. The rules name the affected tensors and steps, and
the run is written to disk with a page. Every figure is measured in the run; if a check fails, the exit
status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import sys
import textwrap
import time
import warnings
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Final

import torch
import torch._dynamo.config

import gradiometer as gm
from gradiometer.demo.progress import progress
from gradiometer.demo.training import FAULTY, LR, Backend, Probe, Training
from gradiometer.rules import headlines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradiometer.demo.training import Step

LR_JUMP = 1000
MAX_THREADS: Final = 4
MIN_STEPS, MAX_STEPS_AFTER_JUMP = 10, 60
MIN_ROUNDS, MAX_ROUNDS, TIMING_SECONDS = 5, 60, 10.0
# findings of one fault, and rows of the table
SHOWN: Final = 2
ROWS: Final = 4
# characters per line of text
WIDTH: Final = 96


class _Run:
    """Runs watched steps, prints them, and returns their records."""

    def __init__(self, step: Step, monitor: gm.Monitor, records: list[gm.StepRecord]) -> None:
        self._step, self._monitor, self._records = step, monitor, records
        self._tty = sys.stdout.isatty()

    @property
    def next(self) -> int:
        """The number of the next step."""
        return self._monitor.step

    def advance(
        self, steps: int, *, every: int | None = None, until_nonfinite: bool = False
    ) -> list[gm.StepRecord]:
        """Run some steps. Print, and wait for, one in ``every`` (on a terminal one in 5) and the last."""
        every = 5 if self._tty else every or steps
        first, start = self.next, time.perf_counter()
        shown = first
        for remaining in reversed(range(steps)):
            self._step()
            seen = [record for record in self._records if record.step >= first]
            last = remaining == 0 or (until_nonfinite and any(r.total("n_nonfinite") for r in seen))
            if last or (self.next - first) % every == 1:
                self._monitor.flush()
                milliseconds = 1e3 * (time.perf_counter() - start) / (self.next - shown)
                self._show(self._records[-1], milliseconds, last=last)
                shown, start = self.next, time.perf_counter()
            if last:
                break
        return [record for record in self._records if record.step >= first]

    def _show(self, record: gm.StepRecord, milliseconds: float, *, last: bool) -> None:
        line = (
            f"  step {record.step:4}   loss {record.scalars['loss']:8.3f}   grad norm {record.total():9.3g}"
            f"   {milliseconds:7.1f} ms/step"
        )
        # on a terminal, rewrite one line
        print(f"\r{line:76}" if self._tty else line, end="" if self._tty and not last else "\n", flush=True)


class _Checks:
    def __init__(self) -> None:
        self.passed = True
        self._lines: list[str] = []

    def add(self, what: str, found: str, *, ok: bool) -> None:
        self.passed &= ok
        self._lines.append(f"  {'ok' if ok else 'FAILED':6}  {what:24}  {found}")

    def __str__(self) -> str:
        return "\n".join(self._lines)


def _alarms(monitor: gm.Monitor, first: int) -> list[gm.Finding]:
    return [f for f in monitor.findings if f.severity > gm.Severity.INFO and f.first_step >= first]


def _tell(findings: list[gm.Finding]) -> None:
    found = headlines(findings)
    for place, headline in enumerate(found[:SHOWN]):
        print(textwrap.fill(str(headline), WIDTH, initial_indent="  ", subsequent_indent=" " * 11))
        if place == 0:
            print(textwrap.fill(headline.advice, WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11))
    if len(found) > SHOWN:
        print(f"  and {len(found) - SHOWN} more causes")


def _train(run: _Run, monitor: gm.Monitor, steps: int, checks: _Checks) -> None:
    records = run.advance(steps, every=max(2, steps // 2))
    false = _alarms(monitor, 0)
    print(f"\nThe gradients of step {records[-1].step}:\n{records[-1].report().to_string(ROWS)}")
    checks.add("every step is recorded", f"{len(records)} of {steps}", ok=len(records) == steps)
    found = f"{len(false)} findings in {len(records)} healthy steps"
    checks.add("no false alarm", found + "".join(f"; {x.message}" for x in false[:1]), ok=not false)


def _put_in_an_inf(training: Training, run: _Run, monitor: gm.Monitor, checks: _Checks) -> None:
    number = run.next
    print(f"\nFault 1: at step {number} one element of a gradient is set to Inf.")
    before = [x.clone() for x in training.state()]
    training.fault.view(-1)[-1] = float("inf")
    run.advance(1)
    training.fault.zero_()
    same = all(map(torch.equal, training.state(), before))
    alarms = _alarms(monitor, number)
    after = run.advance(max(MIN_STEPS, number // 3))

    _tell(alarms)
    print("  The compiled step skipped this update on the device, without a host sync.")
    nonfinite = [f for f in alarms if f.rule == "nonfinite"]
    named = [(f.first_step, f.tensor) for f in nonfinite] == [(number, FAULTY)]
    found = ", ".join(f"step {f.first_step}: {f.tensor}" for f in nonfinite)
    checks.add("the Inf is found", found or "nothing", ok=named)
    found = f"weights and moments are {'unchanged, bit by bit' if same else 'CHANGED'}"
    checks.add("its update is skipped", found, ok=same)
    finite = sum(not r.total("n_nonfinite") for r in after)
    found = f"{finite} of the next {len(after)} steps are finite"
    checks.add("training continues", found, ok=finite == len(after))


def _raise_the_learning_rate(training: Training, run: _Run, monitor: gm.Monitor, checks: _Checks) -> None:
    jump = run.next
    print(f"\nFault 2: at step {jump} the learning rate jumps from {LR:g} to {LR * LR_JUMP:g}.")
    before = [x.clone() for x in training.state()]
    training.lr.mul_(LR_JUMP)
    records = run.advance(MAX_STEPS_AFTER_JUMP, until_nonfinite=True)
    training.lr.fill_(LR)
    torch._foreach_copy_(training.state(), before)

    alarms = _alarms(monitor, jump)
    _tell(alarms)
    found = f"nothing in {len(records)} steps"
    exploded = [f for f in alarms if f.rule in {"exploding", "norm_spike", "loss_spike"}]
    if exploded:
        first = exploded[0]
        found = f"step {first.first_step}, {first.first_step - jump} after the jump: {first.rule}"
    checks.add("the explosion is found", found, ok=bool(exploded))


def _check_syncs(training: Training, backend: Backend, step: Step, checks: _Checks) -> None:
    backend.probe = probe = Probe()
    step()
    backend.probe = None
    syncs = probe.syncs
    if training.device.type == "cuda":
        # count the syncs that CUDA itself reports, below the operators
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        syncs += sum("called a synchronizing" in str(warning.message) for warning in caught)
    # check the counter itself: a broken one would find no sync either
    with Probe() as control:
        training.lr.item()
    found = f"{syncs} among {probe.operators} operators, including the recording"
    ok = syncs == 0 and probe.recordings == 1 and control.syncs == 1
    checks.add("host syncs in the step", found if ok or syncs else "the counter does not work", ok=ok)


def _show_times(training: Training, watched: Step, plain: Step) -> int:
    """Time the two steps alternately, waiting for the device; print medians, return the number of rounds."""
    times: dict[Step, list[float]] = {watched: [], plain: []}
    deadline = time.perf_counter() + TIMING_SECONDS
    rounds = 0
    print()
    with progress(f"timing the steps with and without the monitor in turns, about {TIMING_SECONDS:.0f} s"):
        while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < deadline):
            # the order alternates, so that neither always follows the other
            for step in (watched, plain) if rounds % 2 else (plain, watched):
                start = time.perf_counter()
                step()
                training.wait()
                times[step].append(1e3 * (time.perf_counter() - start))
            rounds += 1
    before, after = median(times[plain]), median(times[watched])
    low, _, high = quantiles([a - b for a, b in zip(times[watched], times[plain], strict=True)])
    print(
        f"Time per step, median of {rounds}: {before:.1f} ms without the monitor, {after:.1f} ms with it,\n"
        f"  {after - before:+.1f} ms, {100 * (after / before - 1):+.1f} %"
        f" (middle half {low:+.1f} to {high:+.1f})"
    )
    return rounds


def _write_page(folder: Path, steps: int, checks: _Checks) -> Path:
    """Check the run record on disk, write the page of the run, and return its path."""
    from gradiometer.runs import read_run  # noqa: PLC0415 needs optional packages
    from gradiometer.web import write_page  # noqa: PLC0415 likewise

    run = read_run(folder)
    found = run.steps.num_rows
    on_disk = f"{found} of {steps} steps, {len(run.findings)} findings"
    checks.add("the run is on disk", on_disk, ok=found == steps)
    return write_page(run)


def _demo(training: Training, name: str, steps: int, folder: Path | None) -> bool:
    checks = _Checks()
    backends = Backend(name), Backend(name)
    records: list[gm.StepRecord] = []
    with gm.Monitor(training.model, run_dir=folder, sinks=[records.append]) as monitor:
        # the demo prints the findings itself
        monitor.logger = logging.getLogger("gradiometer.demo")
        monitor.logger.setLevel(logging.CRITICAL)
        watched = training.compile(backends[0], monitor)
        plain = training.compile(backends[1], None)
        graphs = [backend.graphs for backend in backends]
        run = _Run(watched, monitor, records)
        _train(run, monitor, steps, checks)
        _put_in_an_inf(training, run, monitor, checks)
        _raise_the_learning_rate(training, run, monitor, checks)
        _check_syncs(training, backends[0], watched, checks)
        calls = run.next + 2 * _show_times(training, watched, plain)
    breaks, again = sum(graphs) - 2, sum(backend.graphs for backend in backends) - sum(graphs)
    checks.add("graph breaks", f"{breaks} in the 2 compiled steps", ok=graphs == [1, 1])
    checks.add("recompiles", f"{again} in {calls} calls after the first", ok=again == 0)
    lost = f"{monitor.dropped} steps, {sum(monitor.failures.values())} failures"
    checks.add("lost by the monitor", lost, ok=not monitor.dropped and not monitor.failures)
    page = None if folder is None else _write_page(folder, monitor.step, checks)
    print(f"\nWhat was checked\n{checks}")
    if page is not None:
        is_on_path = shutil.which("gradiometer")
        command = "gradiometer" if is_on_path else f"{os.path.relpath(sys.executable)} -m gradiometer"
        print(f"\nRead the run record with: {command} show {folder}")
        print(f"Open its page in a browser: {page.resolve()}")
    return checks.passed


def _inductor_problem(device: torch.device) -> str | None:
    """Return why Inductor does not work on this machine, or None; only a compilation shows it."""
    try:
        torch.compile(torch.sin, backend="inductor")(torch.ones(8, device=device))
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def _parse(
    argv: Sequence[str] | None, prog: str = "python -m gradiometer.demo"
) -> tuple[torch.device, str, argparse.Namespace]:
    """Return the device, the backend and the options; print what there is, and what takes long."""
    parser = argparse.ArgumentParser(prog=prog, description="Record a small training run with two faults.")
    parser.add_argument("--steps", type=int, default=100, help="steps before the first fault (default: 100)")
    parser.add_argument("--device", help="cpu, cuda or xpu (default: a GPU if there is one, else cpu)")
    parser.add_argument(
        "--backend",
        choices=["inductor", "aot_eager"],
        help="backend of torch.compile (default: inductor if it works here, else aot_eager)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and batches (default: 0)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("gradiometer-demo"),
        help="folder for the run record and its page (default: gradiometer-demo)",
    )
    options = parser.parse_args(argv)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}, got {options.steps}")
    gpus = [name for name in ("cuda", "xpu") if torch.get_device_module(name).is_available()]
    wanted = options.device or (gpus[0] if gpus else "cpu")
    if wanted.split(":")[0] not in {*gpus, "cpu"}:
        parser.error(f"--device {wanted} is not available here; choose from {', '.join([*gpus, 'cpu'])}")
    device, backend = torch.device(wanted), options.backend
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    print(f"gradiometer {gm.__version__}, torch {torch.__version__}, {device}{threads}; about 2 minutes")
    problem = None
    if backend != "aot_eager":
        with progress("compiling a function, to see whether Inductor works here"):
            problem = _inductor_problem(device)
    if problem and backend:
        msg = f"--backend {backend} does not work here: {problem}; use aot_eager, which needs no compiler"
        parser.error(msg)
    if problem:
        backend = "aot_eager"
        print(f"Inductor does not work here, so the backend is aot_eager:\n  {problem}\n")
    return device, backend or "inductor", options


def main(argv: Sequence[str] | None = None, prog: str = "python -m gradiometer.demo") -> int:
    """Run the demo under the name ``prog``; return 0, or 1 if a check failed."""
    # Leave one core free: a step of short parallel loops takes ten times as long if a thread must wait
    # for a core that another process is using. At this size, more than a few threads gain nothing.
    torch.set_num_threads(max(1, min(MAX_THREADS, torch.get_num_threads() - 1)))
    device, backend, options = _parse(argv, prog)
    can_write = importlib.util.find_spec("pyarrow") is not None
    if not can_write:
        print("The demo writes no run record and no page: pyarrow not installed")
        print("  (pip install 'gradiometer[monitor]').\n")
    if device.type == "cuda":
        # otherwise Inductor recommends it in a warning
        torch.set_float32_matmul_precision("high")
    training = Training(device, options.seed)
    print(
        f"{training}\nForward, backward, recording of every gradient and AdamW are one compiled graph, "
        f"by {backend}.\n"
    )
    # off by default up to torch 2.15
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # noqa: SLF001
        passed = _demo(training, backend, options.steps, options.run_dir if can_write else None)
    return 0 if passed else 1
