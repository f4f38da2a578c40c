"""Programs that `torch.export` and AOTInductor save, in a process that only imports gradiometer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradiometer as gm
from kernels_bench import scripts
from support.activations import agree, columns_of
from support.compiling import needs_compiler

# AOTInductor warns about its own pytrees
pytestmark = [
    pytest.mark.usefixtures("_dynamo"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]

ROOT = Path(gm.__file__).parent.parent


class Step(nn.Module):
    """A model with its telemetry, which measures every second call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 70)
        self.taps = gm.Taps(self, {"layer": nn.Linear}, every=2)
        self.ema = gm.EMA(decay=0.5)
        self.recorder = gm.Recorder(self.layer, capacity=2)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        stats = gm.collect({"x": x, "y": y}, fingerprint=True)
        updates, taps = gm.compare({"x": 2 * x}, {"x": x}), self.taps.stats()
        self.taps.advance()
        # in place of gradients
        self.recorder.record(gm.collect({name: 2 * p for name, p in self.layer.named_parameters()}))
        self.recorder.advance()
        ring = self.recorder.ring.clone()
        return y, stats, updates, taps, gm.collect_weights(self.layer), self.ema(stats.total_norm), ring


# `gradiometer` registers the ops and the types of results
LOAD = """
import sys
import torch
{imports}
folder, kind = sys.argv[1:]
if kind == "export":
    program = torch.export.load(folder + "/step.pt2").module()
else:
    program = torch._inductor.aoti_load_package(folder + "/compiled.pt2")
results = []
for x in torch.load(folder + "/inputs.pt"):
    y, stats, updates, taps, weights, ema, ring = program(x)
    of_stats = [stats.columns, stats.flags, stats.fingerprints]
    others = [updates.columns, taps.columns, weights.columns, ema.drift, ring]
    results.append([x.detach().clone() for x in (y, *of_stats, *others)])
torch.save(results, folder + "/results.pt")
"""


def load(folder: Path, kind: str, imports: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", LOAD.format(imports=imports), str(folder), kind]
    env = scripts.environment(ROOT)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor], Any]:
    """Return the folder of a saved program, inputs for it, and the program."""
    folder = tmp_path_factory.mktemp("saved")
    xs = list(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)))
    # with gradients enabled, as in a training loop
    program = torch.export.export(Step(), (xs[0],))
    torch.export.save(program, folder / "step.pt2")
    torch.save(xs, folder / "inputs.pt")
    return folder, xs, program


def check(folder: Path, xs: list[Tensor]) -> None:
    # the second for the updates of its average alone
    eager, twin = Step(), Step()
    for i, (x, found) in enumerate(zip(xs, torch.load(folder / "results.pt"), strict=True)):
        y, columns, flags, fingerprints, updates, taps, weights, drift, ring = found
        torch.testing.assert_close(y, eager.layer(x))
        # of the values that this program has computed
        expected = gm.collect({"x": x, "y": y}, fingerprint=True)
        assert torch.equal(columns, expected.columns)
        assert torch.equal(flags, expected.flags)
        assert torch.equal(fingerprints, expected.fingerprints)
        assert torch.equal(updates, gm.compare({"x": 2 * x}, {"x": x}).columns)
        assert torch.equal(weights, gm.collect_weights(eager.layer).columns)
        torch.testing.assert_close(drift, twin.ema(expected.total_norm).drift)
        assert torch.equal(ring, eager(x)[-1])
        if i % 2:
            assert not taps.any()
        else:
            agree(taps[0], columns_of(y))


def test_a_saved_program_needs_only_the_package(saved):
    folder, xs, _ = saved
    done = load(folder, "export", "import gradiometer")
    assert done.returncode == 0, done.stderr
    check(folder, xs)


@needs_compiler
def test_a_package_of_aotinductor_needs_only_the_package(saved):
    folder, xs, program = saved
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "compiled.pt2"))
    done = load(folder, "aoti", "import gradiometer")
    assert done.returncode == 0, done.stderr
    check(folder, xs)
    done = load(folder, "aoti", "")
    assert done.returncode == 1
    assert "Could not find schema for gradiometer::" in done.stderr


def test_a_process_without_the_package_is_told_to_import_it(saved):
    folder, _, _ = saved
    done = load(folder, "export", "")
    assert done.returncode == 1
    assert "failed to resolve torch.ops.gradiometer." in done.stderr
    assert "import the custom op" in done.stderr
