"""The demo: a small training run whose gradients are watched, and two faults that are named.

``python -m gradiometer.demo`` trains a character-level transformer on the sources of Python's own
standard library. Forward, backward, gradient statistics and AdamW are one compiled graph. Then an Inf
is put into one gradient, later the learning rate is raised a thousandfold, and the tensors where it
shows are named with their step. Every figure is measured in the run; a failed check exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # returns the loss, and what was collected
    Step = Callable[[], tuple[Tensor, gm.TensorStats | None]]

__all__ = ["corpus", "main"]

VOCABULARY, CHARACTERS = 128, 2**20
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 3, 192, 6, 64, 16
LR, LR_JUMP = 1e-3, 1000
CULPRIT: Final = "blocks.1.up.weight"
MAX_THREADS: Final = 4
MIN_STEPS, MAX_STEPS_AFTER_JUMP = 10, 60
MIN_ROUNDS, MAX_ROUNDS, TIMING_SECONDS = 5, 60, 10.0
SHOWN: Final = 3
# operators that make the host wait for a value on the device
SYNCS: Final = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}


def corpus(characters: int = CHARACTERS) -> Tensor:
    """Return the text of Python's standard library, ``(characters,) uint8`` below 128.

    The top-level modules in the order of their names; what is not ASCII reads as 127.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    # names that begin with an underscore differ from build to build
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("[a-z]*.py")))[:characters]
    if len(text) < characters:
        raise FileNotFoundError(
            f"the demo reads {characters:,} characters of Python's own sources, and {folder} holds "
            f"{len(text):,}: run it with a Python that has its .py files"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=VOCABULARY - 1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(gelu(self.up(self.norm2(x)))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[_Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens) + self.position.weight)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class _Probe(TorchDispatchMode):
    """Counts operators, and those that wait for the device or copy from it to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.collections = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split(".")[0].split("::")
        to_host = isinstance(result, Tensor) and result.is_cpu
        from_device = any(isinstance(x, Tensor) and not x.is_cpu for x in args)
        self.operators += 1
        self.collections += namespace == "gradiometer"
        self.syncs += name in SYNCS or (to_host and from_device)
        return result


class _Backend:
    """A backend of torch.compile that counts the graphs it is given, and can run them under a probe."""

    def __init__(self, name: str) -> None:
        self.graphs = 0
        self.probe: _Probe | None = None
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)  # noqa: SLF001 no public way

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        compiled = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            # in here, since torch.compile itself does not run under a dispatch mode
            with self.probe or nullcontext():
                return compiled(*args)

        return run


class _Training:
    """Model, optimizer state and text on one device, and the compiled step."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = _Model().to(device)
        self.parameters = list(self.model.parameters())
        self.moments = [(torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in self.parameters]
        self.count = torch.zeros((), device=device)
        self.text = corpus().to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        # inputs of the step: nothing is compiled again when their values change
        self.lr = torch.tensor(LR, device=device)
        self.fault = torch.zeros_like(self.model.get_parameter(CULPRIT).data)

    def compile(self, backend: _Backend, *, collect: bool) -> Step:
        """Compile the step and take it once: forward, backward, statistics and update in one graph."""
        culprit = self.model.get_parameter(CULPRIT)

        def step(
            tokens: Tensor, targets: Tensor, lr: Tensor, fault: Tensor
        ) -> tuple[Tensor, gm.TensorStats | None]:
            loss = self.model(tokens, targets)
            loss.backward()
            culprit.grad = fault if culprit.grad is None else culprit.grad + fault
            stats = gm.collect_grads(self.model) if collect else None
            self._update(lr, None if stats is None else stats.found_inf > 0)
            return loss.detach(), stats

        print(f"compiling the step {'with' if collect else 'without'} collection ... ", end="", flush=True)
        start, compiled = time.perf_counter(), torch.compile(step, fullgraph=True, backend=backend)
        compiled(*self._batch(), self.lr, self.fault)
        print(f"{time.perf_counter() - start:.0f} s")
        return lambda: compiled(*self._batch(), self.lr, self.fault)

    def _batch(self) -> tuple[Tensor, Tensor]:
        last = len(self.text) - CONTEXT
        start = torch.randint(last, (BATCH, 1), generator=self.generator, device=self.device)
        piece = self.text[start + torch.arange(CONTEXT + 1, device=self.device)].long()
        return piece[:, :-1], piece[:, 1:]

    @torch.no_grad()
    def _update(self, lr: Tensor, skip: Tensor | None) -> None:
        """AdamW, written out. Where ``skip`` is true nothing changes, and the host need not know."""
        count = self.count + 1
        new = [(self.count, count)]
        for p, (first, second) in zip(self.parameters, self.moments, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            mean, square = first.lerp(grad, 0.1), second.lerp(grad * grad, 0.01)
            change = mean / (1 - 0.9**count) / ((square / (1 - 0.99**count)).sqrt() + 1e-8)
            new += [(p, p * (1 - 0.01 * lr) - lr * change), (first, mean), (second, square)]
            p.grad = None
        for old, value in new:
            old.copy_(value if skip is None else torch.where(skip, old, value))

    def wait(self) -> None:
        """Wait until the device has done what it was told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def state(self) -> list[Tensor]:
        """Return all that a step changes."""
        return [self.count, *(p.data for p in self.parameters), *(m for pair in self.moments for m in pair)]


class _Record(NamedTuple):
    step: int
    report: gm.Report


class _Run:
    """Takes watched steps, shows them, and returns their reports."""

    def __init__(self, step: Step, every: int) -> None:
        self.next = 0
        self._step = step
        self._tty = sys.stdout.isatty()
        self._every = 5 if self._tty else every

    def advance(self, steps: int, *, until_nonfinite: bool = False) -> list[_Record]:
        """Take some steps. Only a step that is shown is waited for."""
        pending: list[tuple[int, gm.Pending[gm.Report]]] = []
        records: list[_Record] = []
        start, first = time.perf_counter(), self.next
        for remaining in reversed(range(steps)):
            loss, stats = self._step()
            if stats is not None:
                pending.append((self.next, stats.materialize_async()))
            while pending and pending[0][1].ready():
                records.append(_Record(pending[0][0], pending.pop(0)[1].result()))
            last = remaining == 0 or (until_nonfinite and any(r.report.found_inf for r in records))
            if last or self.next % self._every == 0:
                records += [_Record(number, copy.result()) for number, copy in pending]
                pending.clear()
                milliseconds = 1e3 * (time.perf_counter() - start) / (self.next + 1 - first)
                self._show(loss.item(), records[-1].report.total_norm, milliseconds, last=last)
                start, first = time.perf_counter(), self.next + 1
            self.next += 1
            if last:
                break
        return records

    def _show(self, loss: float, norm: float, milliseconds: float, *, last: bool) -> None:
        line = (
            f"  step {self.next:4}   loss {loss:8.3f}   grad norm {norm:9.3g}   {milliseconds:7.1f} ms/step"
        )
        # a terminal sees one line, rewritten
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


def _train(run: _Run, steps: int, checks: _Checks) -> None:
    records = run.advance(steps)
    flagged = [r for r in records if r.report.exploding or r.report.vanishing or r.report.dead]
    print(f"\nEvery gradient of step {records[-1].step}, worst first:\n\n{records[-1].report}")
    checks.add(
        "no false alarm", f"{len(flagged)} of {len(records)} healthy steps have a flag", ok=not flagged
    )


def _put_in_an_inf(training: _Training, run: _Run, checks: _Checks) -> None:
    print(f"\nFault 1: at step {run.next} one element of one gradient is made Inf.\n")
    before = [x.clone() for x in training.state()]
    training.fault.view(-1)[-1] = float("inf")
    (bad,) = run.advance(1)
    training.fault.zero_()
    same = all(map(torch.equal, training.state(), before))
    after = run.advance(max(MIN_STEPS, run.next // 3))

    _name("first non-finite gradient", bad, bad.report.inf + bad.report.nan)
    print("  The compiled step saw it on the device and skipped this update; the host was not asked.")
    named = bad.report.inf == [CULPRIT] and not bad.report.nan and bad.report[CULPRIT].n_inf == 1
    checks.add("the Inf is named", f"step {bad.step}: {', '.join(bad.report.inf) or 'nothing'}", ok=named)
    found = f"weights and moments are {'the same bits' if same else 'NOT what they were'}"
    checks.add("its update is skipped", found, ok=same)
    finite = sum(not r.report.found_inf for r in after)
    checks.add(
        "training goes on", f"{finite} of the next {len(after)} steps are finite", ok=finite == len(after)
    )


def _raise_the_learning_rate(training: _Training, run: _Run, checks: _Checks) -> None:
    jump = run.next
    print(f"\nFault 2: at step {jump} the learning rate jumps from {LR:g} to {LR * LR_JUMP:g}.\n")
    before = [x.clone() for x in training.state()]
    training.lr.mul_(LR_JUMP)
    records = run.advance(MAX_STEPS_AFTER_JUMP, until_nonfinite=True)
    training.lr.fill_(LR)
    torch._foreach_copy_(training.state(), before)

    exploded = next((r for r in records if r.report.exploding), None)
    nonfinite = next((r for r in records if r.report.found_inf), None)
    found = f"nothing exploded in {len(records)} steps"
    if exploded is not None:
        _name("first exploding gradients", exploded, exploded.report.exploding)
        worst = exploded.report.worst_first()[0].name
        found = f"step {exploded.step}, {exploded.step - jump} after the jump, worst in {worst}"
    if nonfinite is not None:
        _name("first non-finite gradients", nonfinite, nonfinite.report.nan + nonfinite.report.inf)
    print(f"  The weights of step {jump} are put back.")
    checks.add("the explosion is named", found, ok=exploded is not None)


def _name(what: str, record: _Record, names: list[str]) -> None:
    worst = [row for row in record.report.worst_first() if row.name in names]
    print(f"\n  step {record.step}: {what}, in {len(worst)} of {len(record.report)} tensors")
    for row in worst[:SHOWN]:
        kinds = [f"{n:,} {kind}" for n, kind in ((row.n_nan, "NaN"), (row.n_inf, "Inf")) if n]
        found = f"{' and '.join(kinds)} of {row.numel:,} elements" if kinds else f"norm {row.norm:.3g}"
        print(f"      {row.name:24}  {found}")
    if len(worst) > SHOWN:
        print(f"      and {len(worst) - SHOWN} more")


def _check_syncs(training: _Training, backend: _Backend, step: Step, checks: _Checks) -> None:
    backend.probe = probe = _Probe()
    step()
    backend.probe = None
    syncs = probe.syncs
    if training.device.type == "cuda":
        # what CUDA itself calls one, below the operators
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        syncs += sum("called a synchronizing" in str(warning.message) for warning in caught)
    # a counter that never counts would find nothing too
    with _Probe() as control:
        training.lr.item()
    found = f"{syncs} among {probe.operators} operators, the collection one of them"
    ok = syncs == 0 and probe.collections == 1 and control.syncs == 1
    checks.add("host syncs in the step", found if ok or syncs else "the counter does not work", ok=ok)


def _show_times(training: _Training, watched: Step, plain: Step) -> int:
    """Time the two steps in turn, each to its end on the device; show medians, return how many turns."""
    times: dict[Step, list[float]] = {watched: [], plain: []}
    reading: list[float] = []
    deadline = time.perf_counter() + TIMING_SECONDS
    while len(reading) < MIN_ROUNDS or (len(reading) < MAX_ROUNDS and time.perf_counter() < deadline):
        # the order alternates, so that neither always follows the other
        for step in (watched, plain) if len(reading) % 2 else (plain, watched):
            start = time.perf_counter()
            _, stats = step()
            training.wait()
            stop = time.perf_counter()
            times[step].append(1e3 * (stop - start))
            if stats is not None:
                # every row: a report makes its values when they are asked for
                list(stats.materialize())
                reading.append(1e3 * (time.perf_counter() - stop))
    before, after = median(times[plain]), median(times[watched])
    low, _, high = quantiles([a - b for a, b in zip(times[watched], times[plain], strict=True)])
    print(
        f"\nTime per step, medians of {len(reading)} in turn\n\n"
        f"  {before:8.2f} ms  without collection\n"
        f"  {after:8.2f} ms  with collection and guarded update: {after - before:+.1f} ms,"
        f" {100 * (after / before - 1):+.1f} % (middle half {low:+.1f} to {high:+.1f})\n"
        f"  {median(reading):8.2f} ms  to read a report on the host, when one is wanted"
    )
    return len(reading)


def _demo(training: _Training, name: str, steps: int) -> bool:
    checks = _Checks()
    backends = _Backend(name), _Backend(name)
    watched = training.compile(backends[0], collect=True)
    plain = training.compile(backends[1], collect=False)
    graphs = [backend.graphs for backend in backends]
    print()
    run = _Run(watched, every=max(1, steps // 5))
    _train(run, steps, checks)
    _put_in_an_inf(training, run, checks)
    _raise_the_learning_rate(training, run, checks)
    _check_syncs(training, backends[0], watched, checks)
    calls = run.next + 2 * _show_times(training, watched, plain)
    breaks, again = sum(graphs) - 2, sum(backend.graphs for backend in backends) - sum(graphs)
    checks.add("graph breaks", f"{breaks} in the 2 compiled steps", ok=graphs == [1, 1])
    checks.add("recompiles", f"{again} in {calls} calls after the first", ok=again == 0)
    print(f"\nWhat was checked\n\n{checks}")
    return checks.passed


def _inductor_problem(device: torch.device) -> str | None:
    """Compile something small: only so does it show whether there is a compiler that works."""
    try:
        torch.compile(torch.sin, backend="inductor")(torch.ones(8, device=device))
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def _parse(argv: Sequence[str] | None) -> tuple[torch.device, str, int, int]:
    parser = argparse.ArgumentParser(
        prog="python -m gradiometer.demo", description="Watch a small training run."
    )
    parser.add_argument("--steps", type=int, default=100, help="steps before the first fault (default: 100)")
    parser.add_argument("--device", help="cpu, cuda or xpu (default: a GPU if there is one, else cpu)")
    parser.add_argument(
        "--backend", choices=["inductor", "aot_eager"], help="default: inductor if it works here"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    options = parser.parse_args(argv)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}, got {options.steps}")
    gpus = [name for name in ("cuda", "xpu") if torch.get_device_module(name).is_available()]
    wanted = options.device or (gpus[0] if gpus else "cpu")
    if wanted.split(":")[0] not in {*gpus, "cpu"}:
        parser.error(f"--device {wanted}: not available here; there is {', '.join([*gpus, 'cpu'])}")
    device, backend = torch.device(wanted), options.backend
    problem = None if backend == "aot_eager" else _inductor_problem(device)
    if problem and backend:
        parser.error(f"--backend {backend} does not work here: {problem}; aot_eager needs no compiler")
    if problem:
        backend = "aot_eager"
        print(f"Inductor does not work here, so the backend is aot_eager:\n  {problem}\n")
    return device, backend or "inductor", options.steps, options.seed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0, or 1 if a check failed."""
    # One core stays free: a step of short parallel loops takes ten times as long where a thread must
    # wait for a core that something else is using. More threads than a few gain nothing at this size.
    torch.set_num_threads(max(1, min(MAX_THREADS, torch.get_num_threads() - 1)))
    device, backend, steps, seed = _parse(argv)
    if device.type == "cuda":
        # what Inductor otherwise advises in a warning
        torch.set_float32_matmul_precision("high")
    training = _Training(device, seed)
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    print(
        f"gradiometer {gm.__version__}, torch {torch.__version__}, {device}{threads}, {backend}\n\n"
        f"A transformer of {sum(p.numel() for p in training.parameters):,} parameters in"
        f" {len(training.parameters)} tensors learns {len(training.text):,} characters of Python's own\n"
        "library. Forward, backward, gradient statistics and AdamW are one compiled graph.\n"
    )
    # off by default up to torch 2.15
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # noqa: SLF001
        return 0 if _demo(training, backend, steps) else 1


if __name__ == "__main__":
    sys.exit(main())
