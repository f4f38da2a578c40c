"""Count what taps add to a step on a GPU: kernels, and bytes that they read and write. Needs no GPU.

    python -m kernels_bench.monitoring.tap_kernels
    python -m kernels_bench.monitoring.tap_kernels --tokens 8192 --width 4096

Forward and backward of a transformer's MLP (layer norm, linear, GELU, linear, residual) are traced as one
graph, Inductor compiles that for an H100, and its scheduler tells what each kernel reads and writes. The op
is one launch, which reads the activation. The op of a fused tap is two: one reads the partial sums that
Inductor's own kernels have written, and the other returns at once, in the case that is counted: the values
are finite, and no channel is zero. For the first of them, it also prints how many programs read the partial
sums, and how many reads follow one another in each.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

import gradiometer as gm
from gradiometer.ops import tap_partials
from kernels_bench import scripts

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


class Compiled(BaseException):
    """Ends the compilation, when the kernels are known."""


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


TAPPED = {
    "linear layers": nn.Linear,
    "activation function": nn.GELU,
    "layer norm": nn.LayerNorm,
    "all three": lambda _: True,
}


@contextlib.contextmanager
def a_gpu():
    """Let Inductor generate code for an H100 that is not there."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering
    from torch.utils import _triton

    def count(graph):
        graph.codegen()
        found.append(counted(graph))
        raise Compiled

    found = []
    interface = device_interface.CudaInterface
    replaced = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: H100,
            "get_device_capability": lambda *_: (9, 0),
            "get_rng_state": lambda *_: torch.zeros(1),
            "set_rng_state": lambda *_: None,
            "synchronize": lambda *_: None,
            "_exchange_device": lambda *_: 0,
            "_maybe_exchange_device": lambda *_: 0,
        },
        interface: {
            "current_device": staticmethod(lambda: 0),
            "device_count": staticmethod(lambda: 1),
            "get_device_properties": staticmethod(lambda *_: H100),
            "raise_if_triton_unavailable": staticmethod(lambda *_: None),
            "synchronize": staticmethod(lambda *_: None),
        },
        interface.Worker: {
            "get_device_properties": staticmethod(lambda *_: H100),
            "current_device": staticmethod(lambda: 0),
        },
        scheduler: {"has_triton": lambda *_: True},
        _triton: {"triton_hash_with_backend": lambda *_: "none"},
        # patterns are traced with tensors that are not fake
        joint_graph: {"lazy_init": lambda *_: None},
        post_grad: {"lazy_init": lambda *_: None},
        GraphLowering: {"_compile_to_module": count},
    }
    with contextlib.ExitStack() as stack:
        for owner, values in replaced.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        yield found


def moved(graph, inputs):
    """Move a graph that was traced on the CPU to the GPU; return its inputs there."""

    def there(x):
        if not isinstance(x, torch.Tensor):
            return x
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    mode = next(x.fake_mode for x in inputs if isinstance(x, torch._subclasses.FakeTensor))
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map(there, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
    return [there(x) for x in inputs]


def counted(graph):
    """Return the kernels of a compiled graph, and the bytes that they read and write."""
    from torch._inductor import ir

    kernels = read = 0
    for node in graph.scheduler.nodes:
        name = str(getattr(node.node, "op_overload", ""))
        if name == "gradiometer.tap_.default":
            x = node.node.inputs[0]
            kernels, read = kernels + 1, read + bytes_of(x)
        elif name == "gradiometer.tap_partials_.default":
            partials = node.node.inputs[1:6]
            kernels, read = kernels + 2, read + sum(bytes_of(x) for x in partials)
        elif isinstance(node.node, (ir.MultiOutput, ir.MutationOutput)) or node.is_template():
            continue
        else:
            size = node.get_read_write_buffers_sizes()
            kernels, read = kernels + (size > 0), read + size
    return kernels, read


def bytes_of(x):
    return math.prod(map(int, x.get_size())) * x.get_dtype().itemsize


def count(tokens, width, dtype, pattern=None, *, fused=False):
    """Return the kernels of a step and their bytes, with taps on the modules of a pattern."""
    from torch._inductor import compile_fx

    def inner_compile(graph, inputs, **options):
        with a_gpu() as found:
            try:
                compile_fx.compile_fx_inner(graph, moved(graph, inputs), **options)
            except Compiled:
                results.extend(found)
        raise Compiled

    def step(x):
        model(x).float().square().mean().backward()

    results = []
    torch._dynamo.reset()
    model = MLP(width).to(dtype)
    if pattern is not None:
        gm.Taps(model, {"tapped": pattern}, fused=fused)
    x = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
    backend = partial(compile_fx.compile_fx, inner_compile=inner_compile)
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        mock.patch.object(tap_partials, "_is_on_cpu", return_value=False),
        contextlib.suppress(Compiled),
    ):
        torch.compile(step, fullgraph=True, backend=backend)(x)
    (result,) = results
    return result


def merge_of(tokens, width):
    """Return the partial sums of an activation, the programs that merge them, and the reads in turn."""
    from gradiometer import kernels
    from gradiometer.kernels import tuning
    from kernels_bench.machine_code.compile import recorded_launches

    with mock.patch.object(tap_partials, "_is_on_cpu", return_value=False):
        partials = tap_partials.fusible(torch.empty(tokens, width, device="meta"))[..., 0]
    one = torch.empty(1, device="meta")
    with recorded_launches() as launches:
        kernels.merge_partials([partials] * 5, one, 0, one, one, one, one, tokens * width, width, 1)
    (launch,) = launches
    work = dict(zip(launch.kernel.arg_names, launch.args, strict=False))["work"]
    return partials.numel(), launch.grid[0], work + -(-launch.grid[0] // tuning.MERGED_PROGRAMS)


def main():
    parser = scripts.parser("kernels_bench.monitoring.tap_kernels", __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    print(f"an MLP of width {options.width}, {options.tokens} tokens, for an H100; torch {torch.__version__}")
    print("| dtype | tapped | kernels: none | op | fused | MB: none | added by the op | by fused taps |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype, (name, pattern) in itertools.product([torch.bfloat16, torch.float32], TAPPED.items()):
        size = options.tokens, options.width, dtype
        plain = count(*size)
        op, fused = count(*size, pattern), count(*size, pattern, fused=True)
        more = [f"{(x[1] - plain[1]) / 1e6:+.1f}" for x in (op, fused)]
        row = [
            str(dtype).removeprefix("torch."),
            name,
            plain[0],
            op[0],
            fused[0],
            f"{plain[1] / 1e6:.1f}",
            *more,
        ]
        print("|", " | ".join(map(str, row)), "|", flush=True)
    print("\n| activation | partial sums | programs that merge them | reads in turn |\n|---|---|---|---|")
    for size in ((options.tokens, options.width), (options.tokens, 4 * options.width), (2**15, 768)):
        print("|", " | ".join([f"{size[0]} x {size[1]}", *map(str, merge_of(*size))]), "|")


if __name__ == "__main__":
    main()
