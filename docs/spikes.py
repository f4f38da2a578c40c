"""Raise the learning rate late in training: which signal moves first, and does adaptive clipping help?

    python docs/spikes.py [--seeds 5] [--out docs/explanation/spikes.svg]

Trains a small character transformer on the text of Python's standard library, with AdamW. At step 400 the
learning rate becomes eight times as high, and stays there. Prints tables, and draws the first seed's run;
matplotlib is one of the development tools. It takes about seven minutes on one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import gradiometer as gm
from gradiometer.demo.training import corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS, RAISED, WARMUP = 600, 400, 50
LR, TIMES = 2e-3, 8
VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 64, 4, 2, 64, 16
# a signal departs if two values in a row are this many standard deviations above those of the steps before
BASELINE, DEVIATIONS = 100, 6.0


class Block(nn.Module):
    """Attention and a feed-forward layer, both with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, context, width)``."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.norm(self.blocks(self.embed(tokens) + self.position.weight))
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Step(NamedTuple):
    """What was measured in a step; norms are those of all tensors together."""

    loss: float
    # before clipping
    grad_norm: float
    update_norm: float
    # the largest of any tensor
    update_ratio: float
    # of the update and the negative gradient
    cosine: float
    # the update's norm divided by the learning rate
    normalized_update: float
    # share of the tensors that were clipped
    clipped: float


# what `collect_and_clip_` gets as max_norm; inf clips nothing
CLIPS: dict[str, Callable[[nn.Module], float | nn.Module]] = {
    "none": lambda _: float("inf"),
    "max_norm=1.0": lambda _: 1.0,
    "ZScoreClip": lambda _: gm.ZScoreClip(),
    "PerTensorClip": gm.PerTensorClip,
    "WeightNormClip": gm.WeightNormClip,
}


def train(seed: int, clip: str, text: Tensor) -> list[Step]:
    """Train, and return what was measured in each step."""
    torch.manual_seed(seed)
    model, generator = Transformer(), torch.Generator().manual_seed(seed)
    max_norm = CLIPS[clip](model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.01)
    snapshot = gm.Snapshot(model)
    steps = []
    for step in range(STEPS):
        lr = LR * min(1.0, (step + 1) / WARMUP) * (TIMES if step >= RAISED else 1)
        optimizer.param_groups[0]["lr"] = lr
        start = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        piece = text[start + torch.arange(CONTEXT + 1)].long()
        loss = model(piece[:, :-1], piece[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        grads = gm.collect_and_clip_(model, max_norm)
        snapshot.update_(model)
        optimizer.step()
        updates = gm.collect_updates(model, snapshot)
        norm = float(updates.total_value("norm_u"))
        # biases are 0 in the first step, and so their ratio is infinite
        ratio = float(updates.update_ratio.nan_to_num(posinf=0.0).max())
        cosine = float(updates.total_value("descent_cosine"))
        if isinstance(max_norm, nn.Module):
            clipped = float((max_norm.factor < 1).double().mean())
        else:
            clipped = float(grads.total_norm > max_norm)
        steps.append(Step(loss.item(), float(grads.total_norm), norm, ratio, cosine, norm / lr, clipped))
    return steps


def departure(values: Sequence[float]) -> int | None:
    """Return how many steps after the change a signal departs from its past; None if it does not."""
    past = values[RAISED - BASELINE : RAISED]
    limit = statistics.mean(past) + DEVIATIONS * statistics.stdev(past)
    for step in range(RAISED, len(values) - 1):
        if min(values[step : step + 2]) > limit:
            return step - RAISED
    return None


SIGNALS = {
    "update norm": "update_norm",
    "largest update ratio": "update_ratio",
    "update norm / lr": "normalized_update",
    "gradient norm": "grad_norm",
    "loss": "loss",
}


def tell(runs: dict[str, list[list[Step]]]) -> None:
    """Print both tables, in Markdown."""
    write = sys.stdout.write
    write("| steps after the change until the signal departs | " + " | ".join(runs) + " |\n")
    write("|---|" + "---|" * len(runs) + "\n")
    for signal, field in SIGNALS.items():
        cells = []
        for seeds in runs.values():
            found = [departure([getattr(step, field) for step in steps]) for steps in seeds]
            cells.append(", ".join("-" if x is None else str(x) for x in found))
        write(f"| {signal} | " + " | ".join(cells) + " |\n")
    write("\n| loss | " + " | ".join(runs) + " |\n|---|" + "---|" * len(runs) + "\n")
    windows = {
        "mean of the 50 steps before": lambda x: statistics.mean(x[RAISED - 50 : RAISED]),
        "largest after": lambda x: max(x[RAISED:]),
        "mean of the last 50 steps": lambda x: statistics.mean(x[-50:]),
    }
    for name, of in windows.items():
        cells = []
        for seeds in runs.values():
            values = [of([step.loss for step in steps]) for steps in seeds]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.2f} ± {spread:.2f}")
        write(f"| {name} | " + " | ".join(cells) + " |\n")
    before = [[step.clipped for steps in seeds for step in steps[:RAISED]] for seeds in runs.values()]
    cells = [f"{100 * statistics.mean(shares):.0f} %" for shares in before]
    write("| share of tensors clipped before the change | " + " | ".join(cells) + " |\n")


def draw(runs: dict[str, list[list[Step]]], out: Path) -> None:
    """Draw the first seed: signals without clipping, and the loss with each kind of clipping."""
    import matplotlib as mpl  # noqa: PLC0415 needed only here
    from matplotlib.figure import Figure  # noqa: PLC0415 as above

    mpl.rcParams |= {"svg.hashsalt": "spikes", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1)
    first, last, start = max(0, RAISED - 20), min(STEPS, RAISED + 60), max(0, RAISED - 50)
    for signal, field in SIGNALS.items():
        values = [getattr(step, field) for step in runs["none"][0]]
        past = statistics.mean(values[RAISED - BASELINE : RAISED])
        above.plot(range(first, last), [x / past for x in values[first:last]], label=signal)
    above.set(yscale="log", ylabel="relative to the 100 steps before", xlim=(first, last - 1))
    above.set_title("Without clipping", fontsize="medium")
    for clip, seeds in runs.items():
        loss = [statistics.mean([steps[i].loss for steps in seeds]) for i in range(STEPS)]
        smooth = [statistics.mean(loss[max(0, i - 4) : i + 1]) for i in range(STEPS)]
        below.plot(range(start, STEPS), smooth[start:], label=clip)
    below.set(xlabel="step", ylabel="loss, mean of 5 steps", xlim=(start, STEPS - 1))
    below.set_title(f"Mean of {len(runs['none'])} seeds, by clipping", fontsize="medium")
    for axes in (above, below):
        axes.axvline(RAISED, color="gray", linewidth=1, linestyle=":")
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Run all kinds of clipping with all seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--out", type=Path, help="picture to write")
    args = parser.parse_args()
    text, runs = corpus(2**18), {}
    for clip in CLIPS:
        runs[clip] = [train(seed, clip, text) for seed in range(args.seeds)]
        sys.stderr.write(f"{clip}: {args.seeds} runs are done\n")
    tell(runs)
    if args.out:
        draw(runs, args.out)


if __name__ == "__main__":
    main()
