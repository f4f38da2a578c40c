"""Run all kernels on tensors of odd sizes, each with its own allocation, for a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \\
        python -m kernels_bench.gpu.odd_sizes

A checker then detects a read beyond the end of a tensor. The sizes are close to the tile and chunk sizes, in
every dtype; some tensors are empty, misaligned or contain NaN. The results are compared with those of the
CPU's functions, section by section. The exit code is 3 if one differs.
"""

from __future__ import annotations

import copy
import math

import torch

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, DEFAULT_THRESHOLDS, PAIR_COLUMNS, Cursor
from gradiometer.ops import (
    activation_reference,
    exponent_reference,
    line_reference,
    pair_reference,
    projection_reference,
    reference,
    tap_partials,
)
from gradiometer.recorder import Recorder
from kernels_bench import scripts

SIZES = (0, 1, 3, 17, 1023, 2049, 2**15 - 1, 2**15 + 1, 70_001)
FEW_SIZES = (0, 17, 2049)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# of activations; one has more channels than the scratch of a store
SHAPES = ((0, 4), (1,), (3,), (5, 7), (17, 1023), (2, 3, 2049), (5, 33, 3, 3), (2, 70_001))
# of those that partial sums can measure
PIECES = ((3, 64), (17, 768), (5, 2049), (33, 3, 70))
STARTS = (0, 1, 3)
# 1 is the exit code of an exception
WRONG = 3
EXACT = ("numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "abs_max")


def main(argv=None) -> int:
    parser = scripts.parser("kernels_bench.gpu.odd_sizes", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="fewer and smaller tensors")
    options = parser.parse_args(argv)
    device = options.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no GPU here; use --device cpu for the same comparison")
    torch.manual_seed(0)
    all_wrong = []
    for section in (statistics, exponents, lines, projections, pairs, activations, partial_sums, clipping):
        count, wrong = section(device, small=options.small)
        # a checker is slow, and may be cut off
        print(f"{section.__name__}: {count} tensors, wrong: {wrong or 'none'}", flush=True)
        all_wrong += wrong
    return WRONG if all_wrong else 0


def placed(x, device, start=0):
    """Return a copy whose last byte is that of its own allocation, ``start`` elements after the first."""
    memory = torch.empty(x.numel() + start, dtype=x.dtype, device=device)
    memory[start:].copy_(x.flatten())
    return memory[start:].view(x.shape)


def tensors_of(device, *, small):
    """Return tensors of all sizes and dtypes, on the host and on the device, by name."""
    host = {}
    for dtype in DTYPES:
        for size in FEW_SIZES if small else SIZES:
            x = torch.randn(size).to(dtype)
            for start in STARTS[: 2 if small else None]:
                host[f"{dtype} {size} from {start}"] = x
            if size == 2049:
                x = x.clone()
                x[[5, -1]] = math.nan
                host[f"{dtype} {size} with NaN from 1"] = x
    return host, {name: placed(x, device, int(name[-1])) for name, x in host.items()}


# moments, finalize, finalize_fingerprints, append


def statistics(device, *, small):
    host, there = tensors_of(device, small=small)
    *measured, fingerprints = reference.tensor_stats(
        list(host.values()), DEFAULT_THRESHOLDS, fingerprint=True
    )
    expected = gm.TensorStats(tuple(host), *measured, DEFAULT_THRESHOLDS)
    found = gm.collect(there)
    wrong = differences(found, expected)
    with_bits = gm.collect(there, fingerprint=True)
    if not torch.equal(with_bits.fingerprints.cpu(), fingerprints):
        wrong.append("fingerprints")
    # one decides whether to skip a step, the other one reads a gate; words of 8 bytes begin elsewhere
    gated = {"skip_nonfinite": False, "fingerprint": True}
    for options, same in (({}, found), (gated, with_bits)):
        recorder = Recorder(with_grads(there), capacity=2, **options)
        recorder.record()
        (record,) = recorder.read()
        if not torch.equal(record.columns(), same.columns.cpu()):
            wrong.append(f"record {options}")
    return len(host), wrong


def with_grads(tensors):
    """Return parameters whose gradients are these tensors."""
    parameters = {name: torch.nn.Parameter(torch.empty_like(x)) for name, x in tensors.items()}
    for name, x in tensors.items():
        parameters[name].grad = x
    return parameters


def differences(found, expected):
    """Return the names of columns that differ from those of the CPU."""
    wrong = [name for name in EXACT if not torch.equal(getattr(found, name).cpu(), getattr(expected, name))]
    off = (found.finite_norm.cpu() - expected.finite_norm).abs() > 1e-12 * expected.finite_norm
    return wrong + ["norm"] * bool(off.any())


# exponents, begin_exponents


def exponents(device, *, small):
    host, there = tensors_of(device, small=small)
    expected = exponent_reference.exponent_stats(list(host.values()))
    found = torch.ops.gradiometer.exponent_stats(list(there.values()))
    wrong = [] if torch.equal(found.cpu(), expected) else ["exponents"]
    # a recorder has no rows for empty gradients
    expected = expected[[i for i, x in enumerate(host.values()) if x.numel()]]
    recorder = Recorder(with_grads(there), capacity=2, precision=2)
    for due in (True, False, True):
        recorder.record()
        step = int(recorder.cursor[Cursor.STEP])
        kept = recorder.read_exponents(step)
        if bool(kept) != due or (due and not torch.equal(kept["grad_exponents"].stats().columns, expected)):
            wrong.append(f"record in step {step}")
        recorder.advance()
    return len(host), wrong


# lines, merge_lines


def lines(device, *, small):
    wrong, count = [], 0
    for dtype in DTYPES:
        for shape in ((5, 7), (300, 5), (17, 1023), (2, 3, 2049))[: 2 if small else None]:
            x = torch.randn(shape).to(dtype)
            x.view(-1)[5] = math.nan
            for start in STARTS[: 2 if small else None]:
                there = placed(x, device, start)
                for here, other in ((x, there), (x.mT, there.mT)):
                    count += 1
                    found, expected = ops.measure_lines([other]).cpu(), line_reference.line_stats([here])
                    # normal numbers, summed in another order
                    if not torch.allclose(found, expected, rtol=1e-12, atol=1e-11):
                        wrong.append(f"{dtype} {tuple(here.shape)} from {start}")
    return count, wrong


# project, merge_projections


def projections(device, *, small):
    host, there = [], []
    for dtype in DTYPES:
        for size in FEW_SIZES if small else SIZES:
            for start in STARTS[: 2 if small else None]:
                host.append(torch.randn(size).to(dtype))
                there.append(placed(host[-1], device, start))
        host.append(torch.randn(9, 33).to(dtype).t())
        there.append(host[-1].to(device))
    names, wrong = [str(i) for i in range(len(host))], []
    for count in (16, 64):
        found = ops.measure_projections(there, names, count).cpu()
        expected = projection_reference.project(host, names, count, 0, [None] * len(host))
        # sums in another order, of numbers that may cancel
        near = torch.isclose(found, expected, rtol=1e-12, atol=1e-10).all(dim=1)
        wrong += [
            f"{host[i].dtype} of {host[i].numel()}, {count}" for i in (~near).nonzero().flatten().tolist()
        ]
    return len(host), wrong


# pairs, finalize_pairs


def pairs(device, *, small):
    sides = [], [], []
    for i, dtype in enumerate(DTYPES):
        for size in FEW_SIZES if small else SIZES:
            x = torch.randn(size)
            y = x.clone()
            y[::3] += 1.0
            # of one dtype, and of three
            for others in ((dtype, dtype), (DTYPES[i - 1], DTYPES[i - 2])):
                for side, values, kind in zip(
                    sides, (x, y, torch.randn(size)), (dtype, *others), strict=True
                ):
                    side.append(values.to(kind))
    wrong = []
    counts = [i for i, column in enumerate(PAIR_COLUMNS) if column.name.startswith(("n_", "numel"))]
    placements = ((1, 0, 3), (0, 0, 0), (3, 1, 1))[: 1 if small else None]
    for starts in placements:
        there = [[placed(x, device, start) for x in side] for side, start in zip(sides, starts, strict=True)]
        for number in (2, 3):
            expected = pair_reference.pair_stats(*sides[:2], sides[2] if number == 3 else None)
            found = torch.ops.gradiometer.pair_stats(*there[:number]).cpu()
            # products of normal numbers, summed in another order
            bound = 1e-12 * 100 * expected[:, :1]
            exact = torch.equal(found[:, counts], expected[:, counts])
            if not exact or not ((found - expected).abs() <= bound).all():
                wrong.append(f"{number} sides from {starts}")
    return 3 * len(placements) * len(sides[0]), wrong


# activation, merge_partials, contiguous


def due_store(device):
    """Return a store for one row, its grads, and a cursor of a step that is due."""
    cursor = torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=device)
    cursor[Cursor.EVERY] = 1
    return *[ops.new_store(1, torch.device(device)) for _ in range(2)], cursor


def is_row(found, expected):
    """Return whether columns of an activation are the expected ones, up to the order of summation."""
    names = [column.name for column in gm.ACTIVATION_COLUMNS]
    found, expected = (dict(zip(names, row, strict=True)) for row in (found.tolist(), expected))
    scales = {name: expected[name] for name in ("sumsq", "sum4")}
    scales["sum"] = math.sqrt(expected["numel"] * expected["sumsq"])
    return all(abs(found[x] - expected[x]) <= 1e-12 * scales.get(x, 0.0) for x in names)


def activations(device, *, small):
    values, grads, cursor = due_store(device)
    wrong, count = [], 0
    for dtype in DTYPES:
        for shape in SHAPES[: 4 if small else None]:
            x = torch.randn(shape).to(dtype)
            dim = 1 if len(shape) > 2 else -1
            x.movedim(dim, 0)[1::2] = 0.0
            for start in STARTS[: 2 if small else None]:
                if start and x.numel():
                    x = x.clone()
                    x.view(-1)[-1] = (math.nan, -math.inf)[start // 2]
                there = placed(x, device, start)
                # the second is copied first
                for view, what in ((slice(None), ""), (slice(None, None, 2), ", every second column")):
                    count += 1
                    values[0].zero_()
                    here = x[..., view]
                    torch.ops.gradiometer.tap(there[..., view], values, grads, cursor, 0, dim, fused=False)
                    expected = activation_reference.activation_stats(here, dim) if x.numel() else [0.0] * 12
                    if not is_row(values[0], expected):
                        wrong.append(f"{dtype} {shape} from {start}{what}")
    return count, wrong


def partial_sums(device, *, small):
    values, grads, cursor = due_store(device)
    wrong, count = [], 0
    for dtype in DTYPES[:3]:
        for shape in PIECES[: 1 if small else None]:
            # partial sums are enough; a channel of zeros and a NaN have to be read
            x = torch.randn(shape).abs().add(1.0).to(dtype)
            dead, bad = x.index_fill(-1, torch.tensor([3]), 0.0), x.clone()
            bad.view(-1)[-1] = math.nan
            for each in (x, dead, bad):
                for start in STARTS[: 2 if small else None]:
                    count += 1
                    values[0].zero_()
                    there = placed(each, device, start)
                    if tap_partials.fusible(there) is None:
                        wrong.append(f"{dtype} {shape} has no partial sums")
                    torch.ops.gradiometer.tap(there, values, grads, cursor, 0, -1, fused=True)
                    if not is_row(values[0], activation_reference.activation_stats(each, -1)):
                        wrong.append(f"{dtype} {shape} from {start}")
    return count, wrong


# scale, clip_factors


def clipping(device, *, small):
    host, there = tensors_of(device, small=small)
    wrong = []
    gm.clip_grads_with_norm_(with_grads(there).values(), 1.0, 3.0)
    factor = 1.0 / (3.0 + 1e-6)
    for name, x in host.items():
        expected = x * factor if x.dtype == torch.float64 else (x.float() * factor).to(x.dtype)
        if not torch.equal(there[name].cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
            wrong.append(f"scaled {name}")
    finite = {name: x for name, x in host.items() if "NaN" not in name and x.numel()}
    grads = {name: placed(x, device, int(name[-1])) for name, x in finite.items()}
    before = {name: x.clone() for name, x in grads.items()}
    here, parameters = with_grads({name: x.clone() for name, x in finite.items()}), with_grads(grads)
    for model in (here, parameters):
        for p in model.values():
            p.data.fill_(0.5)
    for clip in (
        gm.ZScoreClip(warmup_steps=1, z_threshold=0.5),
        gm.PerTensorClip(here, warmup_steps=1),
        gm.WeightNormClip(here, max_ratio=0.1),
    ):
        twin = copy.deepcopy(clip).to(device)
        for size in (1.0, 1.0, 3.0):
            for name, p in parameters.items():
                p.grad.copy_(before[name]).mul_(size)
                here[name].grad.copy_(p.grad)
            gm.collect_and_clip_(parameters, twin)
            gm.collect_and_clip_(here, clip)
        pairs_of_state = zip(twin.buffers(), clip.buffers(), strict=True)
        same = all(torch.allclose(x.cpu(), y, rtol=1e-11, atol=1e-15) for x, y in pairs_of_state)
        close = all(
            torch.allclose(p.grad.cpu(), here[name].grad, rtol=2**-6 if p.itemsize == 2 else 2**-21)
            for name, p in parameters.items()
        )
        if not same or not close:
            wrong.append(type(clip).__name__)
    return len(host), wrong


if __name__ == "__main__":
    raise SystemExit(main())
