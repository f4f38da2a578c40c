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
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["corpus", "main"]

VOCABULARY: Final = 128
CHARACTERS: Final = 2**20
WIDTH: Final = 192
HEADS: Final = 6
LAYERS: Final = 3
CONTEXT: Final = 64
BATCH: Final = 8
LR: Final = 2e-3
LR_JUMP: Final = 1000
CULPRIT: Final = "blocks.1.up.weight"
MIN_STEPS: Final = 10
MAX_STEPS_AFTER_JUMP: Final = 60
MIN_ROUNDS, MAX_ROUNDS, TIMING_SECONDS = 5, 60, 12.0
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
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens) + self.position.weight)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Probe(TorchDispatchMode):
    """Counts operators, and those that wait for the device or copy from it to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.collections = self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split(".")[0].split("::")
        self.operators += 1
        self.collections += namespace == "gradiometer"
        to_host = isinstance(result, Tensor) and result.is_cpu
        from_device = any(isinstance(x, Tensor) and not x.is_cpu for x in args)
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
    """Model, optimizer state and text on one device, and the step with and without collection."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = _Model().to(device)
        self.parameters = list(self.model.parameters())
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.count = torch.zeros((), device=device)
        self.text = corpus().to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        # inputs of the step: nothing is compiled again when their values change
        self.lr = torch.tensor(LR, device=device)
        self.fault = torch.zeros_like(self.model.get_parameter(CULPRIT), requires_grad=False)

    def compile(self, backend: _Backend, *, collect: bool) -> Callable[[], tuple[Tensor, gm.TensorStats | None]]:
        """Return a step that is one graph: forward, backward, statistics, update."""
        culprit = self.model.get_parameter(CULPRIT)

        def step(
            tokens: Tensor, targets: Tensor, lr: Tensor, fault: Tensor
        ) -> tuple[Tensor, gm.TensorStats | None]:
            loss = self.model(tokens, targets)
            loss.backward()
            if culprit.grad is not None:
                culprit.grad = culprit.grad + fault
            stats = gm.collect_grads(self.model) if collect else None
            self._update(lr, None if stats is None else stats.found_inf > 0)
            return loss.detach(), stats

        compiled = torch.compile(step, fullgraph=True, backend=backend)
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

    def state(self) -> list[Tensor]:
        """Return all that a step changes, without gradients."""
        return [*(p.detach() for p in self.parameters), *(m for pair in self.moments for m in pair), self.count]


class _Record(NamedTuple):
    step: int
    report: gm.Report


class _Run:
    """Takes watched steps, shows them, and returns their reports."""

    def __init__(self, step: Callable[[], tuple[Tensor, gm.TensorStats | None]], every: int) -> None:
        self.next = 0
        self._step = step
        self._tty = sys.stdout.isatty()
        self._every = 5 if self._tty else every

    def advance(self, steps: int, *, until_nonfinite: bool = False) -> list[_Record]:
        """Take some steps. Only a step that is shown is waited for."""
        pending: list[tuple[int, gm.Pending]] = []
        records: list[_Record] = []
        since, last_shown = time.perf_counter(), self.next
        for remaining in reversed(range(steps)):
            loss, stats = self._step()
            if stats is not None:
                pending.append((self.next, stats.materialize_async()))
            self.next += 1
            while pending and pending[0][1].ready():
                records.append(_Record(pending[0][0], pending.pop(0)[1].result()))
            last = remaining == 0 or (until_nonfinite and any(r.report.found_inf for r in records))
            if last or self.next % self._every == 0:
                records += [_Record(number, copy.result()) for number, copy in pending]
                pending.clear()
                elapsed = 1e3 * (time.perf_counter() - since) / (self.next - last_shown)
                since, last_shown = time.perf_counter(), self.next
                self._show(loss.item(), records[-1], elapsed, last=last)
            if last:
                break
        return records

    def _show(self, loss: float, record: _Record, milliseconds: float, *, last: bool) -> None:
        norm = record.report.total_norm
        line = f"  step {record.step:4}   loss {loss:8.3f}   grad norm {norm:9.3g}   {milliseconds:7.1f} ms/step"
        start, end = ("\r", "\n" if last else "") if self._tty else ("", "\n")
        print(f"{start}{line}", end=end, flush=True)


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
    checks.add("no false alarm", f"{len(flagged)} of {steps} healthy steps have a flag", ok=not flagged)
    print(f"\nEvery gradient of step {records[-1].step}, worst first:\n\n{records[-1].report}")


def _put_in_an_inf(training: _Training, run: _Run, checks: _Checks) -> None:
    print(f"\nFault 1: at step {run.next} one element of one gradient is made Inf.\n")
    before = [x.clone() for x in training.state()]
    training.fault.view(-1)[-1] = float("inf")
    (bad,) = run.advance(1)
    training.fault.zero_()
    same = all(map(torch.equal, training.state(), before))
    after = run.advance(max(MIN_STEPS, run.next // 3))

    print()
    _name("first non-finite gradient", bad, {*bad.report.inf, *bad.report.nan})
    print("  The compiled step saw it on the device and skipped that update; the host did not have to look.")
    named = bad.report.inf == [CULPRIT] and not bad.report.nan and bad.report[CULPRIT].n_inf == 1
    checks.add("the Inf is named", f"step {bad.step}: {', '.join(bad.report.inf) or 'no name'}", ok=named)
    checks.add("its update is skipped", "weights, moments and count " + ("kept bit for bit" if same else "changed"), ok=same)
    finite = sum(not record.report.found_inf for record in after)
    checks.add("training goes on", f"{finite} of the next {len(after)} steps are finite", ok=finite == len(after))


def _raise_the_learning_rate(training: _Training, run: _Run, checks: _Checks) -> None:
    print(f"\nFault 2: at step {run.next} the learning rate jumps from {LR:g} to {LR * LR_JUMP:g}.\n")
    before, jump = [x.clone() for x in training.state()], run.next
    training.lr.mul_(LR_JUMP)
    records = run.advance(MAX_STEPS_AFTER_JUMP, until_nonfinite=True)
    training.lr.fill_(LR)
    for x, saved in zip(training.state(), before, strict=True):
        x.copy_(saved)

    print()
    exploded = next((r for r in records if r.report.exploding), None)
    nonfinite = next((r for r in records if r.report.found_inf), None)
    found = f"nothing exploded in {len(records)} steps"
    if exploded is not None:
        _name("first exploding gradients", exploded, set(exploded.report.exploding))
        worst = exploded.report.worst_first()[0].name
        found = f"step {exploded.step}, {exploded.step - jump} after the jump, worst in {worst}"
    if nonfinite is not None:
        _name("first non-finite gradients", nonfinite, {*nonfinite.report.inf, *nonfinite.report.nan})
    print(f"  The state of step {jump} is put back.")
    checks.add("the explosion is named", found, ok=exploded is not None)


def _name(what: str, record: _Record, names: set[str]) -> None:
    worst = [row for row in record.report.worst_first() if row.name in names]
    print(f"  step {record.step}: {what}, in {len(worst)} of {len(record.report)} tensors")
    for row in worst[:SHOWN]:
        counts = f"{row.n_nan:,} NaN and {row.n_inf:,} Inf among {row.numel:,} elements"
        print(f"      {row.name:24}  {counts if row.n_nan + row.n_inf else f'norm {row.norm:.3g}'}")
    if len(worst) > SHOWN:
        print(f"      and {len(worst) - SHOWN} more")


def _count_syncs(device: torch.device, run: Callable[[], object]) -> int:
    """Count what CUDA itself calls a synchronization; elsewhere 0."""
    if device.type != "cuda":
        run()
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _check_syncs(device: torch.device, backend: _Backend, step: _Step, checks: _Checks) -> None:
    backend.probe = probe = _Probe()
    syncs = _count_syncs(device, step) + probe.syncs
    backend.probe = None
    # a counter that never counts would pass as well
    with _Probe() as control:
        torch.ones((), device=device).item()
    ok = syncs == 0 and probe.collections == 1 and control.syncs == 1
    found = f"{syncs} among {probe.operators} operators, the collection one of them"
    checks.add("host syncs in the step", found if probe.collections else "the collection was not seen", ok=ok)


def _time(device: torch.device, steps: Sequence[_Step]) -> list[list[float]]:
    """Time steps in turn, to the arrival of their report; milliseconds, a list a step."""
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + TIMING_SECONDS
    for i in range(MAX_ROUNDS):
        # the order alternates, so that neither always follows the other
        for which in range(len(steps))[:: 1 - 2 * (i % 2)]:
            start = time.perf_counter()
            _, stats = steps[which]()
            pending = stats.materialize_async() if stats is not None else None
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            if pending is not None:
                pending.result()
            times[which].append(1e3 * (time.perf_counter() - start))
        if i + 1 >= MIN_ROUNDS and time.perf_counter() > end:
            break
    return times


def _inductor_problem(device: torch.device) -> str | None:
    """Compile something small: whether there is a compiler that works shows only so."""
    try:
        torch.compile(torch.sin, backend="inductor")(torch.ones(8, device=device))
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def _compile(training: _Training, name: str, *, collect: bool) -> tuple[_Backend, _Step]:
    print(f"compiling the step {'with' if collect else 'without'} collection ... ", end="", flush=True)
    start, backend = time.perf_counter(), _Backend(name)
    step = training.compile(backend, collect=collect)
    step()
    print(f"{time.perf_counter() - start:.1f} s")
    return backend, step


def _demo(device: torch.device, backend_name: str, seed: int, steps: int) -> bool:
    training, checks = _Training(device, seed), _Checks()
    backends: list[_Backend] = []
    watched_backend, watched = _compile(training, backend_name, collect=True)
    plain_backend, plain = _compile(training, backend_name, collect=False)
    backends = [watched_backend, plain_backend]
    first_graphs = [backend.graphs for backend in backends]
    ...
    return checks.passed
