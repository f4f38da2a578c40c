"""The cases: lists of tensors as they occur in models, and the bounds of the CPU path.

A case is made on a device when it is needed: random normal values from a fixed seed. If it does not fit on
the machine, every tensor's first dimension is divided by a power of two; the row shows it: "llama-1b / 16".
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# tensors begin where a caching allocator would put them: multiples of this many bytes
ALIGNMENT = 512
# largest inputs on a CPU, in bytes: a few cores read them in milliseconds, and they exceed the caches
CPU_LIMIT = 40 * 2**20
# largest share of a GPU's memory for the inputs: the provider `flatten` takes about six times as much again
GPU_SHARE = 1 / 8
MOST_COPIES = 256


class Case(NamedTuple):
    """A list of tensors of one dtype.

    ``blocks``: pairs of (shape, count). ``misaligned``: tensor i begins 1 + i mod k elements after a 16-byte
    boundary, never on one. ``zeros``: the share of elements that are 0. ``only``: "cpu" is for a CPU, at full
    size; "cuda" is for a GPU; "memory" is for the memory check. ``compiled``: on a GPU, compile the functions
    that compute all columns although the list is long.
    """

    name: str
    meaning: str
    dtype: torch.dtype
    blocks: tuple[tuple[tuple[int, ...], int], ...]
    misaligned: bool = False
    zeros: float = 0.0
    only: Literal["", "cpu", "cuda", "memory"] = ""
    compiled: bool = False


class Data(NamedTuple):
    """A case on a device.

    ``sets``: copies of the list, to rotate through; ``flats``: for each copy, one flat tensor of equal size.
    """

    case: Case
    scale: int
    sets: list[list[Tensor]]
    flats: list[Tensor]


def _gpt2():
    """GPT-2 124M as in its config: the head is tied to wte, and every linear layer has a bias."""
    d, layers, vocabulary, context = 768, 12, 50257, 1024
    norm = (((d,), 1), ((d,), 1))
    layer = (*norm, ((d, 3 * d), 1), ((3 * d,), 1), ((d, d), 1), ((d,), 1))
    layer += (*norm, ((d, 4 * d), 1), ((4 * d,), 1), ((4 * d, d), 1), ((d,), 1))
    return (((vocabulary, d), 1), ((context, d), 1), *layer * layers, *norm)


def _llama_1b():
    """Llama 3.2 1B as in its config: grouped queries, a gated MLP, no biases, a tied head."""
    d, hidden, layers, keys, vocabulary = 2048, 8192, 16, 512, 128256
    attention = (((d, d), 1), ((keys, d), 2), ((d, d), 1))
    mlp = (((hidden, d), 2), ((d, hidden), 1))
    return (((vocabulary, d), 1), *(*attention, *mlp, ((d,), 2)) * layers, ((d,), 1))


def _moe():
    """Eight layers of 128 experts, a row for each routed token: a few experts get most, some get none."""
    d, layers, experts, tokens = 2048, 8, 128, 2**14
    rows = [int(tokens / (i + 1) ** 1.5) for i in range(experts)]
    return tuple(((n if n >= 16 else 0, d), 1) for n in rows) * layers


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    case.name: case
    for case in (
        Case("gpt2", "GPT-2 124M's parameters", FP32, _gpt2(), compiled=True),
        Case("llama-1b", "a Llama-like 1B's parameters", BF16, _llama_1b()),
        Case("moe", "a ragged mixture of experts, some empty", BF16, _moe()),
        Case("2000x1k", "2000 tensors of 1 KiB", FP32, (((256,), 2000),)),
        Case("2000x1m", "2000 matrices of 1024 x 1024", FP32, (((1024, 1024), 2000),)),
        Case("one-1.5e9", "one tensor of 1.5e9 elements", BF16, (((1_500_000_000,), 1),)),
        Case("misaligned", "256 views off 16-byte boundaries", BF16, (((2**20,), 256),), misaligned=True),
        Case("beyond-2^31", "one tensor of more than 2^31 elements", BF16, (((2**31 + 2**20 + 3,), 1),)),
        *(
            Case(f"{name}-{short}", f"{meaning} in {short}", dtype, blocks, only="cuda")
            for name, meaning, blocks in (
                ("gpt2", "GPT-2 124M's parameters", _gpt2()),
                ("activation", "one activation of 8192 tokens", (((8192, 4096), 1),)),
            )
            for short, dtype in (("fp32", FP32), ("bf16", BF16), ("fp16", FP16))
            if (name, short) != ("gpt2", "fp32")
        ),
        Case("64m-fp32", "64M elements in 16 tensors", FP32, (((2**22,), 16),), only="cpu"),
        Case("64m-bf16", "64M elements in 16 tensors", BF16, (((2**22,), 16),), only="cpu"),
        Case("64m-zeros", "the same, 1 % zeros", FP32, (((2**22,), 16),), zeros=0.01, only="cpu"),
        Case("1000x1000-fp32", "1000 tensors of 1000 elements", FP32, (((1000,), 1000),), only="cpu"),
        Case("1000x1000-bf16", "1000 tensors of 1000 elements", BF16, (((1000,), 1000),), only="cpu"),
        Case("100m-fp32", "100M elements in 100 tensors", FP32, (((10**6,), 100),), only="memory"),
    )
}

# (case, peer, bound) on a CPU: ours-eager may take at most this multiple of the peer's time
BOUNDS = (
    ("64m-fp32", "foreach64", 2.0),
    ("64m-fp32", "flatten", 1 / 8),
    ("64m-bf16", "foreach64", 2.0),
    ("64m-bf16", "flatten", 1 / 8),
    ("64m-zeros", "foreach64", 2.0),
    ("1000x1000-fp32", "foreach64", 2.0),
    ("1000x1000-bf16", "foreach64", 2.0),
)
# the bound on the peak resident growth of one collection, in MiB, and the cases to check
BOUND_MEMORY = 4.0
MEMORY_CASES = ("64m-fp32", "64m-bf16", "100m-fp32", "1000x1000-fp32")


def shapes(case, scale=1):
    """Return every tensor's shape, first dimensions divided by ``scale``; an empty tensor stays empty."""
    return [
        (-(-shape[0] // scale), *shape[1:]) for shape, count in case.blocks for _ in range(count)
    ]  # rounded up: no tensor vanishes


def elements(case, scale=1):
    return sum(math.prod(shape) for shape in shapes(case, scale))


def nbytes(case, scale=1):
    return elements(case, scale) * case.dtype.itemsize


def scale_for(case, limit):
    """Return the smallest power of two that brings a case's inputs to at most ``limit`` bytes."""
    scale = 1
    while nbytes(case, scale) > limit and scale < 2**30:
        scale *= 2
    return scale


def title(case, scale):
    return case.name if scale == 1 else f"{case.name} / {scale}"


def make(case, device, scale=1, copies=1, seed=0):
    """Make ``copies`` equal lists of tensors, each in its own flat buffer. Returns Data."""
    unit = ALIGNMENT // case.dtype.itemsize
    per_16_bytes = 16 // case.dtype.itemsize
    wanted, places, end = shapes(case, scale), [], 0
    for i, shape in enumerate(wanted):
        start = -(-end // unit) * unit + (1 + i % (per_16_bytes - 1) if case.misaligned else 0)
        end = start + math.prod(shape)
        places.append((start, end))

    generator = torch.Generator(device).manual_seed(seed)
    flat = torch.empty(end, dtype=case.dtype, device=device)
    for part in flat.split(2**26):  # in parts, so that indices stay within 32 bits and temporaries small
        part.normal_(generator=generator)
        if case.zeros:
            part[torch.rand(part.shape, generator=generator, device=device) < case.zeros] = 0
    flats = [flat, *(flat.clone() for _ in range(copies - 1))]
    sets = [[x[a:b].view(shape) for (a, b), shape in zip(places, wanted, strict=True)] for x in flats]
    size = sum(b - a for a, b in places)
    return Data(case, scale, sets, [x[:size] for x in flats])
