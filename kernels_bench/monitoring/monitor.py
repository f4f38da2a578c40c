"""Measure the cost of a monitor in a training step, compared with no monitor and with other telemetry.

    python -m kernels_bench.monitoring.monitor            # eager steps of four models
    python -m kernels_bench.monitoring.monitor --modes eager,compiled --models gpt --json PATH

Every contender trains its own model, from the same weights on the same batches. In each round every contender
runs some steps, its turn, and turns of one round are compared. A turn of the monitor lasts until its
background threads are done, so their work counts too; the work of wandb's own process does not count. By
default wandb logs gradients every 1000 steps, so this contender shows what its hooks cost in between. All
contenders must end with the same weights and the same norm, or the run fails.

On a CPU one core is left free: threads that share theirs with other work take many times as long.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gradiometer.demo.training import VOCABULARY
from gradiometer.monitor.monitor import Monitor
from kernels_bench import machine, scripts
from kernels_bench.measure import reason_of

LR = 3e-4
WARM_UP = 2
QUIET_SECONDS = 0.05  # after a turn, for the remaining work of other processes


class Gpt(nn.Module):
    """A language model of 1.8 M parameters in 53 tensors."""

    width, context, batch = 192, 64, 16

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, self.width)
        self.position = nn.Parameter(torch.randn(self.context, self.width) / 50)
        kinds = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(self.width, 6, 4 * self.width, **kinds) for _ in range(4)]
        )
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.context))

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def sample(self, generator):
        tokens = torch.randint(VOCABULARY, (self.batch, self.context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


class Residual(nn.Module):
    """Residual layers of one width."""

    def __init__(self, depth, width, batch, *, bias):
        super().__init__()
        self.width, self.batch = width, batch
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=bias) for _ in range(depth)])

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers) ** 0.5
        return nn.functional.mse_loss(x, y)

    def sample(self, generator):
        x = torch.randn(self.batch, self.width, generator=generator)
        return x, x.flip(1)


MODELS = {
    "gpt": ("1.8 M parameters in 53 tensors", Gpt),
    "tiny": ("202 tensors of at most 1024 elements", lambda: Residual(101, 32, 64, bias=True)),
    "middle": ("53 tensors of 16,384 elements", lambda: Residual(53, 128, 256, bias=False)),
    "large": ("8 tensors of 1 M elements", lambda: Residual(8, 1024, 64, bias=False)),
}


class Plain:
    """No telemetry, and the base class of the others."""

    inside = staticmethod(lambda: None)  # runs in the step after backward, and may be compiled

    def __init__(self, model, _folder):
        self.model = model
        self.norm = None  # the last total norm

    def outside(self, loss):
        """Called after the optimizer's step."""

    def before_update(self):
        """Called between backward and the optimizer's step, outside of the compiled step."""

    def finish_turn(self):
        """Wait until all work is done."""

    def close(self):
        pass


class Watched(Plain):
    def __init__(self, model, folder, *, has_run_dir=False, **options):
        self.monitor = Monitor(model, run_dir=folder / "run" if has_run_dir else None, **options)
        self.inside = self.monitor.record

    def outside(self, loss):
        self.monitor.advance(loss=loss, lr=LR)

    def finish_turn(self):
        self.monitor.flush()

    def close(self):
        self.monitor.close()
        if self.monitor.failures or self.monitor.dropped:
            raise RuntimeError(f"failures {self.monitor.failures}, dropped {self.monitor.dropped}")

    @property
    def norm(self):
        return self.monitor.last.total() if self.monitor.last.step == self.monitor.step else None


class WandbWatch(Plain):
    def __init__(self, model, folder, log_freq):
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        settings = wandb.Settings(console="off")
        self.norm, self.logs_each_step = None, log_freq == 1
        # watch logs to the active run
        self.run = wandb.init(mode="offline", dir=folder, project="monitor", settings=settings)
        self.run.watch(model, log="gradients", log_freq=log_freq)

    def outside(self, loss):
        self.run.log({"loss": loss.item()})

    def close(self):
        seen = [key for key in dict(self.run.summary) if key.startswith("gradients/")]
        self.run.finish()
        if self.logs_each_step and not seen:
            raise RuntimeError("nothing was logged")


class Lightning(Plain):
    def before_update(self):
        from pytorch_lightning.utilities import grad_norm

        self.seen = {name: norm.item() for name, norm in grad_norm(self.model, 2).items()}

    @property
    def norm(self):
        return self.seen["grad_2.0_norm_total"]

    @norm.setter
    def norm(self, value):
        pass


class Loop(Plain):
    def before_update(self):
        norms = [p.grad.norm().item() for p in self.model.parameters() if p.grad is not None]
        self.norm = math.hypot(*norms)


CONTENDERS = {
    "no monitor": Plain,
    "Monitor": Watched,
    "Monitor(run_dir=)": partial(Watched, has_run_dir=True),
    "the same with updates=True": partial(Watched, has_run_dir=True, updates=True),
    "the same with every=10": partial(Watched, has_run_dir=True, updates=True, every=10),
    "p.grad.norm().item()": Loop,
    "Lightning grad_norm": Lightning,
    "wandb.watch(log_freq=1)": partial(WandbWatch, log_freq=1),
    "wandb.watch()": partial(WandbWatch, log_freq=1000),
}
PLAIN = "no monitor"


class Training:
    """One contender's model, optimizer and step."""

    def __init__(self, model_name, contender, mode, device, folder):
        _, make = MODELS[model_name]
        torch.manual_seed(0)
        self.device, self.generator = device, torch.Generator().manual_seed(0)
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        folder.mkdir(parents=True)
        self.telemetry = CONTENDERS[contender](self.model, folder)
        model, inside = self.model, self.telemetry.inside

        def step(x, y):
            loss = model(x, y)
            loss.backward()
            inside()
            return loss.detach()

        self.step = torch.compile(step, fullgraph=True) if mode == "compiled" else step

    def turn(self, steps):
        """Run some steps; return ms a step: wall time, and CPU time of all threads of this process."""
        samples = [self.model.sample(self.generator) for _ in range(steps)]
        batches = [[x.to(self.device) for x in sample] for sample in samples]
        self.wait()
        start, cpu = time.perf_counter(), time.process_time()
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = self.step(x, y)
            self.telemetry.before_update()
            self.optimizer.step()
            self.telemetry.outside(loss)
        self.telemetry.finish_turn()
        self.wait()
        taken = time.perf_counter() - start, time.process_time() - cpu
        time.sleep(QUIET_SECONDS)
        return [seconds * 1e3 / steps for seconds in taken]

    def wait(self):
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def measure(model_name, mode, names, args, folder):
    """Return each contender's turns, and the reasons of those that failed."""
    trainings, failed = {}, {}
    for name in names:
        print(f"{model_name}, {mode}: {name}", file=sys.stderr)
        try:
            place = folder / f"{model_name}-{mode}-{names.index(name)}"
            trainings[name] = Training(model_name, name, mode, args.device, place)
            trainings[name].turn(WARM_UP)  # compiles
        except Exception as failure:  # noqa: BLE001 the run goes on, whatever a peer raises
            trainings.pop(name, None)
            failed[name] = reason_of(failure)
    times = {name: [] for name in trainings}
    for i in range(args.rounds + 1):
        # the order rotates, so that no contender always follows the same one
        order = [*trainings][i % len(trainings) :] + [*trainings][: i % len(trainings)]
        for name in order:
            times[name].append(trainings[name].turn(args.steps))
    check(trainings)
    for name, training in trainings.items():
        try:
            training.telemetry.close()
        except RuntimeError as failure:  # telemetry that failed to log is not compared
            times.pop(name)
            failed[name] = reason_of(failure)
    return {name: values[1:] for name, values in times.items()}, failed


def check(trainings):
    """Check that all have the same weights, and the same norm if they have one."""
    weights = trainings[PLAIN].weights()
    norms = {}
    for name, training in trainings.items():
        if not torch.allclose(training.weights(), weights, rtol=1e-4, atol=1e-6):
            sys.exit(f"monitoring.monitor: the weights of {name!r} differ from those of {PLAIN!r}")
        if training.telemetry.norm is not None:
            norms[name] = training.telemetry.norm
    if norms and max(norms.values()) > min(norms.values()) * (1 + 1e-4):
        sys.exit(f"monitoring.monitor: the norms of the last step differ: {norms}")


def rows_of(model_name, mode, times):
    for name, turns in times.items():
        row = {"model": model_name, "mode": mode, "contender": name}
        # on a busy machine CPU time is the better figure
        for i, what in enumerate(("wall", "cpu")):
            pairs = [(turn[i], base[i]) for turn, base in zip(turns, times[PLAIN], strict=True)]
            parts = [value / base - 1 for value, base in pairs]
            row[what] = {
                "ms": statistics.median(value for value, _ in pairs),
                "extra_ms": statistics.median(value - base for value, base in pairs),
                "extra": statistics.median(parts),
                "quartiles": statistics.quantiles(parts),
            }
        yield row


def show(rows, failed, device):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"a training step with telemetry; {device}, torch {torch.__version__}; medians")
    left = {"step", "watched by"}
    headings = ("step", "watched by", "ms", "extra", "middle half", "CPU ms", "extra", "middle half")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row in rows:
        cells = [f"{row['model']}, {row['mode']}", row["contender"]]
        for figures in (row["wall"], row["cpu"]):
            low, _, high = figures["quartiles"]
            cells += [f"{figures['ms']:.2f}"]
            cells += (
                ["", ""]
                if row["contender"] == PLAIN
                else [f"{figures['extra_ms']:+.2f} {figures['extra']:+.1%}", f"{low:+.1%} to {high:+.1%}"]
            )
        table.add_row(*cells, end_section=row["contender"] == [*CONTENDERS][-1])
    console = Console(width=140)
    console.print(table)
    for what, reason in failed.items():
        console.print(f"{what}: {reason}", markup=False)


def main():
    parser = scripts.parser("kernels_bench.monitoring.monitor", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", default="eager", help="of eager, compiled")
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of torch")
    parser.add_argument("--contenders", help=f"besides {PLAIN!r}, of {', '.join(map(repr, CONTENDERS))}")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("monitoring.monitor: --device cuda: torch sees no GPU here; leave it out")
    asked = args.contenders.split(",") if args.contenders else [*CONTENDERS]
    for what, given, known in (
        ("model", args.models.split(","), [*MODELS]),
        ("mode", args.modes.split(","), ["eager", "compiled"]),
        ("contender", asked, [*CONTENDERS]),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            sys.exit(f"monitoring.monitor: no {what} {unknown[0]!r}; there are {', '.join(known)}")
    if args.rounds < 2 or args.steps < 1:
        sys.exit("monitoring.monitor: --rounds must be 2 or more and --steps 1 or more")

    names = [name for name in CONTENDERS if name == PLAIN or name in asked]
    rows, failed = [], {}
    # off by default up to torch 2.15
    with torch._dynamo.config.patch(trace_autograd_ops=True), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for model_name in args.models.split(","):
            for mode in args.modes.split(","):
                times, reasons = measure(model_name, mode, names, args, folder)
                rows += rows_of(model_name, mode, times)
                failed |= {f"{model_name}, {mode}, {name}": reason for name, reason in reasons.items()}
                torch.compiler.reset()
    show(rows, failed, args.device)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine.describe(), "rounds": args.rounds, "steps": args.steps}
        args.json.write_text(json.dumps(figures | {"rows": rows, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
