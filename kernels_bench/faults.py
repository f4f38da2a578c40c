"""Inject faults into tensors, and count those that fingerprints and other checks miss, and false alarms.

    python -m kernels_bench.faults                    # a million faults: the table
    python -m kernels_bench.faults --faults 3000
    python -m kernels_bench.faults --check            # exit code 1 if fingerprints miss one or raise an alarm

Each fault is a kind of silent corruption or of a bug; one that changes no bit is not counted. Fingerprints
and statistics are those of ``gm.collect(..., fingerprint=True)``. A fault is missed by the statistics if no
raw column changes, to the bit. `torch.hash_tensor` is an XOR of the elements as float64. Linear weights are
the sums of w and of (i + 1) w modulo 2**64 over the elements' bits w. All seeds are fixed.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

import gradiometer as gm
from kernels_bench import machine, scripts

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SHAPES = ((6, 4), (16, 24), (33, 7), (24, 64))
# faulty versions of one tensor, in one call
BATCH = 500
CHECKS = ("fingerprint", "hash_tensor", "statistics", "linear weights")


# tensors


def normal(shape, g):
    return 0.02 * torch.randn(shape, generator=g)


def sparse(shape, g):
    return torch.randn(shape, generator=g) * (torch.rand(shape, generator=g) < 0.1)


def constant(shape, _):
    return torch.ones(shape)


def ternary(shape, g):
    return 0.125 * torch.randint(-1, 2, shape, generator=g)


DATA = {"weights": normal, "sparse gradients": sparse, "initial values": constant, "ternary": ternary}


class Batch(NamedTuple):
    """Copies of one tensor as integers, to be changed in place, and how its values were a step earlier.

    ``x``: ``(B, rows, columns)``; ``earlier``: ``(rows, columns)``; ``bits``: of an element.
    """

    x: torch.Tensor
    earlier: torch.Tensor
    bits: int
    g: torch.Generator

    @property
    def flat(self):
        return self.x.view(len(self.x), -1)

    def draw(self, low, high):
        """Return an integer for each copy, ``(B, 1)``."""
        return torch.randint(low, high, (len(self.x), 1), generator=self.g)

    def draw_two(self):
        """Return the places of two different elements of each copy."""
        n = self.flat.shape[1]
        first = self.draw(0, n)
        return first, (first + self.draw(1, n)) % n

    def draw_bit(self):
        """Return an integer with one bit set for each copy."""
        return (1 << self.draw(0, self.bits)).to(self.x.dtype)

    def stretch(self):
        """Return a mask of some adjacent elements of each copy."""
        n = self.flat.shape[1]
        start, place = self.draw(0, n - 1), torch.arange(n)
        return (place >= start) & (place < start + self.draw(2, n))


def batch_of(shape, data, dtype, count, g):
    """Return a tensor and its copies."""
    values = DATA[data](shape, g)
    earlier = values - 0.01 * (values + torch.randn(shape, generator=g) * (values != 0))
    x, earlier = [y.to(dtype).view(INTEGERS[dtype]) for y in (values, earlier)]
    return x, Batch(x.repeat(count, 1, 1), earlier, 8 * dtype.itemsize, g)


# faults


def bit_flip(batch):
    place = batch.draw(0, batch.flat.shape[1])
    batch.flat.scatter_(1, place, batch.flat.gather(1, place) ^ batch.draw_bit())


def stuck_bit(batch):
    bit, x = batch.draw_bit(), batch.flat
    stuck = torch.where(batch.draw(0, 2) == 0, x | bit, x & ~bit)
    x.copy_(torch.where(batch.stretch(), stuck, x))


def swap(batch):
    i, j = batch.draw_two()
    a, b = batch.flat.gather(1, i), batch.flat.gather(1, j)
    batch.flat.scatter_(1, i, b).scatter_(1, j, a)


def equal_flips(batch):
    bit = batch.draw_bit()
    for place in batch.draw_two():
        batch.flat.scatter_(1, place, batch.flat.gather(1, place) ^ bit)


def opposite_flips(batch):
    bit, (i, j) = batch.draw_bit(), batch.draw_two()
    a, b = batch.flat.gather(1, i), batch.flat.gather(1, j)
    # where both elements have this bit or neither, nothing is changed
    bit = torch.where((a ^ b) & bit != 0, bit, 0)
    batch.flat.scatter_(1, i, a ^ bit).scatter_(1, j, b ^ bit)


def of_a_row(batch, change):
    """Replace a row of each copy by ``change`` of it, ``(B, columns) -> (B, columns)``."""
    copies, row = torch.arange(len(batch.x)), batch.draw(0, batch.x.shape[1])[:, 0]
    batch.x[copies, row] = change(batch.x[copies, row])


def shifted_row(batch):
    columns = batch.x.shape[2]
    places = (torch.arange(columns) + batch.draw(1, columns)) % columns
    of_a_row(batch, lambda row: row.gather(1, places))


def transposed_block(batch):
    rows, columns = batch.x.shape[1:]
    size = int(torch.randint(2, min(rows, columns) + 1, (), generator=batch.g))
    offsets = torch.arange(size)
    down = batch.draw(0, rows - size + 1)[:, :, None] + offsets[:, None]
    across = batch.draw(0, columns - size + 1)[:, :, None] + offsets
    copies = torch.arange(len(batch.x))[:, None, None]
    batch.x[copies, down, across] = batch.x[copies, down, across].transpose(1, 2)


def sign_flips(batch):
    sign = torch.tensor(-1 << batch.bits - 1, dtype=batch.x.dtype)
    of_a_row(batch, lambda row: row ^ sign)


def stale_copy(batch):
    batch.flat.copy_(torch.where(batch.stretch(), batch.earlier.view(-1), batch.flat))


def zeroed(batch):
    batch.flat.masked_fill_(batch.stretch(), 0)


FAULTS = {
    "bit flip": bit_flip,
    "stuck bit in a stretch": stuck_bit,
    "swap of two elements": swap,
    "same bit of two elements": equal_flips,
    "same bit, opposite directions": opposite_flips,
    "row shifted": shifted_row,
    "block transposed": transposed_block,
    "signs of a row": sign_flips,
    "stale copy of a stretch": stale_copy,
    "stretch set to zero": zeroed,
}


# checks


def checks_of(x, dtype):
    """Return for each check its values of tensors given as integers, ``(B, rows, columns) -> (B, k)``."""
    tensors = x.view(dtype)
    stats = gm.collect(list(tensors.unbind()), fingerprint=True)
    words = x.view(len(x), -1).to(torch.int64) & (2 ** (8 * dtype.itemsize) - 1)
    weights = torch.arange(1, words.shape[1] + 1)
    found = {
        "fingerprint": stats.fingerprints,
        "statistics": stats.columns.view(torch.int64),
        "linear weights": torch.stack([words.sum(1), (words * weights).sum(1)], 1),
    }
    # new in torch 2.10
    if hasattr(torch, "hash_tensor"):
        found["hash_tensor"] = torch.hash_tensor(tensors.flatten(1), 1).view(torch.int64)[:, None]
    return found


def inject(kind, dtype, wanted, seed):
    """Inject ``wanted`` faults; return how many each check missed."""
    g = torch.Generator().manual_seed(seed)
    cases = [(shape, data) for shape in SHAPES for data in DATA]
    missed, injected = dict.fromkeys(CHECKS, 0), 0
    count = min(BATCH, math.ceil(wanted / len(cases)))
    while injected < wanted:
        for shape, data in cases:
            x, batch = batch_of(shape, data, dtype, count, g)
            FAULTS[kind](batch)
            changed = batch.x[(batch.flat != x.view(-1)).any(1)][: wanted - injected]
            if not len(changed):
                continue
            injected += len(changed)
            before = checks_of(x[None], dtype)
            for name, values in checks_of(changed, dtype).items():
                missed[name] += int((values == before[name]).all(1).sum())
    return missed


def false_alarms(wanted, dtype, seed):
    """Return how many fingerprints differ, of ``wanted`` tensors with unchanged bits."""
    g = torch.Generator().manual_seed(seed)
    alarms, compared = 0, 0
    while compared < wanted:
        for shape in SHAPES:
            x = torch.stack([make(shape, g) for make in DATA.values() for _ in range(64)]).to(dtype)
            x = x[: max(1, -(-(wanted - compared) // 4))]
            expected = gm.collect(list(x), fingerprint=True).fingerprints
            order = torch.randperm(len(x), generator=g)
            # columns next to each other in memory; a view that begins in the middle of a word
            turned = [y.t().contiguous().t() for y in x]
            moved = [torch.cat([y.new_zeros(1), y.view(-1)])[1:].view(shape) for y in x]
            cut = 4 * int(torch.randint(0, x[0].numel() // 4, (), generator=g))
            parts = [
                gm.collect(list(part), fingerprint=True)
                for part in x.flatten(1).split([cut, x[0].numel() - cut], 1)
            ]
            for found in (
                gm.collect(turned, fingerprint=True).fingerprints,
                gm.collect(moved, fingerprint=True).fingerprints,
                gm.collect([x[i] for i in order], fingerprint=True).fingerprints[order.argsort()],
                parts[0].merge(parts[1]).fingerprints,
            ):
                alarms += int((found != expected).any(1).sum())
                compared += len(x)
            if compared >= wanted:
                break
    return alarms, compared


def main(argv=None):
    parser = scripts.parser("kernels_bench.faults", __doc__)
    parser.add_argument("--faults", type=int, default=1_000_000, help="number of faults (default: a million)")
    parser.add_argument(
        "--unchanged", type=int, default=100_000, help="number of unchanged tensors (default: 100000)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if fingerprints miss a fault or raise an alarm"
    )
    args = parser.parse_args(argv)
    cells = [(kind, dtype) for kind in FAULTS for dtype in INTEGERS]
    if args.faults < len(cells) or args.unchanged < 0:
        parser.error(f"--faults must be {len(cells)} or more, and --unchanged 0 or more")

    start = time.perf_counter()
    command = scripts.command_line("kernels_bench.faults", argv)
    print(f"    {command}\n\n{machine.one_line(machine.describe())}\n")
    names = [name for name in CHECKS if name != "hash_tensor" or hasattr(torch, "hash_tensor")]
    print(line("fault", "dtype", "injected", f"missed by {names[0]}", *[f"by {name}" for name in names[1:]]))
    print(line("---", "---", "---:", *["---:"] * len(names)))
    total = dict.fromkeys(names, 0)
    for i, (kind, dtype) in enumerate(cells):
        wanted = args.faults // len(cells) + (i < args.faults % len(cells))
        missed = inject(kind, dtype, wanted, seed=i)
        print(
            line(kind, str(dtype).removeprefix("torch."), wanted, *[missed[name] for name in names]),
            flush=True,
        )
        for name in names:
            total[name] += missed[name]
    print(line("all", "", args.faults, *total.values()))
    alarms, compared = 0, 0
    for i, dtype in enumerate(INTEGERS):
        found = false_alarms(math.ceil(args.unchanged / len(INTEGERS)), dtype, seed=i)
        alarms, compared = alarms + found[0], compared + found[1]
    print(f"\n{alarms} false alarms in {compared:,} unchanged tensors; {time.perf_counter() - start:.0f} s.")
    return int(args.check and bool(total["fingerprint"] or alarms))


def line(*values):
    return f"| {' | '.join(f'{value:,}' if isinstance(value, int) else value for value in values)} |"


if __name__ == "__main__":
    raise SystemExit(main())
