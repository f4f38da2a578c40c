"""Train a model twice, flip one bit of one weight in one of the runs, and find it.

    python docs/fingerprints_demo.py

Both runs record fingerprints. `gm.compare_runs` names the step and the tensor in which they part.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import gradiometer as gm

STEPS = 60
STEP, TENSOR, BIT = 50, "blocks.1.weight", 0


def train(folder: Path, *, flip: bool) -> None:
    """Record a run of a small model; ``flip``: whether to flip the last bit of a weight in one step."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Linear(16, 64),
            "blocks": nn.Sequential(nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()),
            "head": nn.Linear(64, 1),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with gm.Monitor(model, run_dir=folder, weights=True, fingerprint=True, rules=()) as monitor:
        for step in range(STEPS):
            x = torch.randn(32, 16)
            y = model["head"](model["blocks"](model["embed"](x)))
            loss = nn.functional.mse_loss(y, x.sum(1, keepdim=True))
            loss.backward()
            if flip and step == STEP:
                model.get_parameter(TENSOR).data.view(torch.int32)[7, 3] ^= 1 << BIT
            monitor.record()
            optimizer.step()
            optimizer.zero_grad()
            monitor.advance(loss=loss.detach())


def main() -> None:
    """Compare two equal runs, and one of them with the run of the flipped bit."""
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = [Path(folder) / name for name in ("a", "b", "c")]
        train(a, flip=False)
        train(b, flip=False)
        train(c, flip=True)
        same, parted = gm.compare_runs(a, b), gm.compare_runs(a, c)
    sys.stdout.write(f"the same run twice: {same.verdict}\n")
    sys.stdout.write(f"one bit of {64 * 64 * 32:,} flipped in {TENSOR} at step {STEP}: {parted.verdict}\n")
    found = parted.bits
    if not same.identical or found is None or (found.step, found.name, found.tensors) != (STEP, TENSOR, 1):
        sys.exit("the flipped bit was not found")


if __name__ == "__main__":
    main()
