"""Try what is most likely to break on a GPU: memory of captured graphs, and a whole monitored training run.

    python -m kernels_bench.gpu.probe captures
    python -m kernels_bench.gpu.probe monitor --out build/gpu

``captures`` replays graphs after attacks on the memory that they could wrongly share: device memory that is
allocated, filled and freed, pinned memory, and lists that replace the kept ones. ``monitor`` trains with a
compiled step, a DataLoader that pins memory, and a Monitor with a run record, while every wait for the
device is an error. The exit code is 3 if a number is wrong.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo.config
from torch import nn

import gradiometer as gm
from gradiometer.ops import launch_plans
from kernels_bench import scripts
from kernels_bench.gpu.odd_sizes import WRONG, differences

SIZES = (1, 7, 1025, 2**15 + 1, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# steps before waits are errors: Inductor compiles, warms up and captures
WARM_UP = 6


# captures


def capture(function, device):
    """Return the result of a function, and a function that computes it again, by a replay on a GPU."""
    if device == "cpu":
        result = function()
        return result, lambda: result.columns.copy_(function().columns)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph.replay


def fill_device(device):
    sizes = (8, 100, 5000, 2**18, 2**22) * (1 if device == "cpu" else 40)
    blocks = [torch.full((size,), math.nan, device=device) for size in sizes]
    blocks += [torch.full((size,), -1, dtype=torch.int64, device=device) for size in range(1, 400)]
    del blocks


def empty_cache(device):
    fill_device(device)
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    fill_device(device)


def fill_pinned(device):
    pin = device != "cpu"
    # twice: blocks of the first round are free for others in the second
    for _ in range(2):
        blocks = [torch.empty(2**i, dtype=torch.int64, pin_memory=pin).fill_(-1) for i in range(20)] * 4
        del blocks
        if pin:
            torch.cuda.synchronize()
            if hasattr(torch._C, "_host_emptyCache"):
                torch._C._host_emptyCache()


def evict(device):
    for i in range(2 * launch_plans.LISTS_KEPT):
        gm.collect([torch.ones(i + 1, device=device), torch.ones(3, device=device)])
    launch_plans.clear()
    gc.collect()


ATTACKS = (fill_device, empty_cache, fill_pinned, evict)


def captures(device):
    """Return descriptions of wrong results."""
    lists = [
        {f"{dtype} {size}": torch.randn(size).to(dtype).to(device) for size in SIZES for dtype in some}
        for some in (DTYPES[:1], DTYPES[1:], DTYPES)
    ]
    graphs = [capture(lambda tensors=tensors: gm.collect(tensors), device) for tensors in lists]
    wrong = []
    for turn in range(3):
        for attack in ATTACKS:
            attack(device)
            for i, (tensors, (found, replay)) in enumerate(zip(lists, graphs, strict=True)):
                for x in tensors.values():
                    x.copy_(torch.randn(x.shape))
                replay()
                expected = gm.collect({name: x.cpu() for name, x in tensors.items()})
                wrong += [f"{attack.__name__}, list {i}, {x}" for x in differences(found, expected)]
        # graphs that come and go leave the others alone
        capture(lambda turn=turn: gm.collect([torch.ones(turn + 1, device=device)]), device)
    print(f"{len(lists)} graphs, {3 * len(ATTACKS)} attacks, wrong: {wrong or 'none'}")
    return wrong


# a monitored run


@contextmanager
def no_waits(device):
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def monitor(device, out, steps):
    """Return descriptions of wrong results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    data = torch.utils.data.TensorDataset(torch.randn(32 * steps, 64), torch.randn(32 * steps, 8))
    on_gpu = device != "cpu"
    loader = torch.utils.data.DataLoader(data, 32, num_workers=int(on_gpu), pin_memory=on_gpu)
    seen, norms = [], []
    has_arrow = importlib.util.find_spec("pyarrow") is not None
    record = out / "run" if has_arrow else None
    print("with a run record" if has_arrow else "pyarrow is missing: without a run record")
    compiled = {"mode": "reduce-overhead"} if on_gpu else {"backend": "aot_eager"}
    with gm.Monitor(model, run_dir=record, rules=(), sinks=[seen.append]) as watched:

        @torch.compile(fullgraph=True, **compiled)
        def step(x, y):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            watched.record()
            norm = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01 * p.grad)
                    p.grad = None
            return loss.detach(), norm

        def run(batches):
            for x, y in batches:
                there = [part.to(device, non_blocking=True) for part in (x, y)]
                torch.compiler.cudagraph_mark_step_begin()
                loss, norm = step(*there)
                norms.append(norm.clone())
                watched.advance(loss=loss)

        batches = iter(loader)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            run(next(batches) for _ in range(WARM_UP))
            with no_waits(device):
                run(batches)
        watched.flush()
    wrong = [f"{watched.failures}, {watched.dropped} dropped"] if watched.failures or watched.dropped else []
    expected = torch.stack(norms).tolist()
    found = [step.total() for step in seen]
    if has_arrow:
        found_there = [step.total() for step in gm.read_run(record).records()]
        wrong += ["the run record differs from the sink"] if found_there != found else []
    if len(found) != len(expected):
        wrong.append(f"{len(found)} steps of {len(expected)}")
    pairs = enumerate(zip(found, expected, strict=False))
    wrong += [f"step {i}: {a} instead of {b}" for i, (a, b) in pairs if not math.isclose(a, b, rel_tol=1e-10)]
    print(f"{len(found)} steps, wrong: {wrong[:5] or 'none'}")
    return wrong


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.probe", __doc__)
    parser.add_argument("what", choices=("captures", "monitor"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=scripts.ROOT / "build" / "gpu")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu runs the same code")
    if options.what == "captures":
        return WRONG if captures(options.device) else 0
    return WRONG if monitor(options.device, options.out, options.steps) else 0


if __name__ == "__main__":
    raise SystemExit(main())
