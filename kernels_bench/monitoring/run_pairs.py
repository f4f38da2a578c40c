"""Count false and true departures in pairs of runs: rounding that differs, and faults from a step on.

    python -m kernels_bench.monitoring.run_pairs --seeds 3 4

Pairs of small runs (an MLP with ReLU, a convolutional network with batch normalization, a GPT) with four
optimizers. The healthy ones differ only by rounding. The faulty ones differ by rounding too, and in one of
them gradients are wrong from step 0 or 30 on, for 30 steps. What `gm.compare_runs` says of each pair is
counted, recorded every step and every tenth, with and without projected weights, with 16 and 64 projections:
a departure that lasts, a remark on one that does not, that nothing can be told from some step on, or nothing.
"""

from __future__ import annotations

import collections
import copy
import itertools

import torch
from torch import nn
from torch.nn import functional

import gradiometer as gm
from gradiometer.columns import FIRST_PROJECTION
from gradiometer.runs.distances import PROJECTED, Sums
from gradiometer.runs.verdict import verdict
from kernels_bench import scripts

PROJECTIONS = 64
STARTS, FAULTY_STEPS = (0, 30), 30
OPTIMIZERS = {
    "SGD 0.05, momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "SGD 0.3": lambda p: torch.optim.SGD(p, 0.3),
    "AdamW 1e-3": lambda p: torch.optim.AdamW(p, 1e-3),
    "Adam 1e-2": lambda p: torch.optim.Adam(p, 1e-2),
}
FAULTS = {"2 times": 2.0, "1.1 times": 1.1, "sign": -1.0, "a quarter of rows 0": None}
# ways of computing, compared with "plain"
ROUNDINGS = ("order", "TF32", "bfloat16", "halves", "compiled")
# projections, cadence, and whether weights are projected
COLUMNS = [(k, every, w) for k in (16, 64) for w in (True, False) for every in (1, 10)]
OUTCOMES = ("lasts", "remark", "too far", "nothing")
# models by kind, each compiled once
COMPILED = {}


class Round(torch.autograd.Function):
    """Rounds to the 10 bits of TF32."""

    @staticmethod
    def forward(_, x):
        return (x.detach().contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(_, grad):
        return Round.forward(None, grad)


def product(how, f, x, weight, bias):
    """Return ``f(x, weight, bias)``, linear in the second dimension of weights, as `how` computes it."""
    if how != "order":
        return f(*map(Round.apply, (x, weight)), bias) if how == "TF32" else f(x, weight, bias)
    dim = -1 if f is functional.linear else 1
    x1, x2 = x.split((1, x.shape[dim] - 1), dim)
    return f(x2, weight[:, 1:], bias) + f(x1, weight[:, :1], None)


def linear(how, layer, x):
    return product(how, functional.linear, x, layer.weight, layer.bias)


class MLP(nn.Module):
    dropped, middle = [(48,)] * 4, "layers.2.weight"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((20, 48), *[(48, 48)] * 3, (48, 10)))

    def forward(self, x, masks, how):
        for layer, mask in zip(self.layers, [*masks, None], strict=True):
            x = linear(how, layer, x) if mask is None else linear(how, layer, x).relu() * mask
        return x


class Conv(nn.Module):
    dropped, middle = [(12, 12, 12), (16, 6, 6), (16, 3, 3)], "convs.1.weight"

    def __init__(self):
        super().__init__()
        sizes = ((3, 12, 1), (12, 16, 2), (16, 16, 2))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, s, padding=1) for i, o, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in sizes)
        self.head = nn.Linear(144, 10)

    def forward(self, x, masks, how):
        for conv, norm, mask in zip(self.convs, self.norms, masks, strict=True):
            x = norm(product(how, conv._conv_forward, x, conv.weight, conv.bias)).relu() * mask
        return linear(how, self.head, x.flatten(1))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask, how):
        q, k, v = linear(how, self.qkv, self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if how in {"plain", "TF32"}:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf")).softmax(-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(how, self.out, y.transpose(1, 2).flatten(2)) * mask
        return x + linear(how, self.down, functional.gelu(linear(how, self.up, self.norm2(x))))


class GPT(nn.Module):
    dropped, middle = [(16, 32)] * 3, "blocks.1.out.weight"

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(37, 32), nn.LayerNorm(32)
        self.position = nn.Parameter(torch.randn(16, 32) * 0.02)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 37, bias=False)

    def forward(self, x, masks, how):
        x = self.embedding(x) + self.position
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block(x, mask, how)
        return linear(how, self.head, self.norm(x))


MODELS = {"mlp": MLP, "conv": Conv, "gpt": GPT}


def batch(kind, seed, step):
    """Return inputs, targets and dropout masks, the same in both runs."""
    g = torch.Generator().manual_seed(seed * 100_003 + step)
    if kind == "gpt":
        tokens = [torch.randint(37, (8,), generator=g)]
        for _ in range(16):
            tokens.append((tokens[-1] * 5 + 3 + torch.randint(3, (8,), generator=g)) % 37)
        x, y = torch.stack(tokens[:-1], 1), torch.stack(tokens[1:], 1)
    else:
        x = torch.randn((24, 20) if kind == "mlp" else (12, 3, 12, 12), generator=g)
        y = x.flatten(1)[:, :10].argmax(1)
    masks = [(torch.rand(len(x), *s, generator=g) >= 0.1) / 0.9 for s in MODELS[kind].dropped]
    return x, y, masks


class Training:
    """A run; ``projected`` has the projections of each step, ``(T, 3 + k)``, of gradients and of weights."""

    def __init__(self, kind, optimizer, seed, how):
        torch.manual_seed(seed)
        self.kind, self.seed, self.how = kind, seed, how
        self.call = self.model = MODELS[kind]()
        if how == "compiled":
            model, call = COMPILED.setdefault(kind, (self.model, torch.compile(self.model)))
            model.load_state_dict(self.model.state_dict())
            self.model, self.call = model, call
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.projected = ([], [])

    def run(self, steps, wrong=None, factor=None):
        """Train on. Gradients of the ``wrong`` tensor or "all" have a factor; None: a quarter is 0."""
        how = {"halves": "plain", "bfloat16": "order", "bfloat16 plain": "plain"}.get(self.how, self.how)
        for _ in range(steps):
            x, y, masks = batch(self.kind, self.seed, len(self.projected[0]))
            half = len(x) // 2
            for part in (slice(half, None), slice(half)) if self.how == "halves" else (slice(None),):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.how.startswith("bfloat16")):
                    out = self.call(x[part], [m[part] for m in masks], how).float()
                loss = functional.cross_entropy(out.flatten(0, -2), y[part].flatten(), reduction="sum")
                (loss / y.numel()).backward()
            parameters = dict(self.model.named_parameters())
            for name, p in parameters.items():
                if wrong in {name, "all"}:
                    p.grad[: -(-len(p) // 4) if factor is None else None] *= factor or 0.0
            for found, tensors in zip(self.projected, (self.model, parameters), strict=True):
                found.append(gm.collect_projections(tensors, projections=PROJECTIONS).columns)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [torch.stack(found) for found in self.projected] if steps else None


def pairs(kind, optimizer, seed, steps, roundings):
    """Yield (rounding, fault, where it is, from which step on, names, projections of a run, of the other)."""
    base = {how: Training(kind, optimizer, seed, how).run(steps) for how in ("plain", "bfloat16 plain")}
    names = [name for name, _ in MODELS[kind]().named_parameters()]
    for how in roundings:
        if kind == "conv" and how in {"halves", "compiled"}:
            continue  # halves have other batch statistics
        other = Training(kind, optimizer, seed, how)
        a = base["bfloat16 plain" if how == "bfloat16" else "plain"]
        for start in STARTS if how == "order" else ():
            other.run(start - len(other.projected[0]))
            for fault, where in itertools.product(FAULTS, (MODELS[kind].middle, "all")):
                faulty = copy.deepcopy(other).run(FAULTY_STEPS, where, FAULTS[fault])
                yield how, fault, where, start, names, a, faulty
        yield how, None, None, None, names, a, other.run(steps - len(other.projected[0]))


def judged(names, a, b, k, every, has_weights):
    """Return the distances between two runs, as they are found from their records."""
    sums = Sums(names[::-1], has_weights=has_weights)
    for kind, *runs in list(zip(PROJECTED, a, b, strict=True))[: 1 + has_weights]:
        # from the last parameter to the first, and no more projections than k
        sums.add(kind, *[x[: len(b[0]) : every, :, : FIRST_PROJECTION + k].flip(1) for x in runs])
    return sums.found(range(0, len(b[0]), every), 2.0**-24)


def outcome(found, where, start):
    """Return which of `OUTCOMES` it is; in a faulty pair, only the right step and tensor count as found."""
    one = found.departure
    if one is None:
        return "too far" if "too far apart" in verdict(found) else "nothing"
    if start is not None and (one.step != start or where not in {"all", one.name.removesuffix(".grad")}):
        return "nothing"
    return "lasts" if one.lasts else "remark"


def main(argv=None):
    options = scripts.parser("kernels_bench.monitoring.run_pairs", __doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[3, 4])
    options.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    options.add_argument("--steps", type=int, default=60, help="of a healthy run, at least 60")
    options.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=ROUNDINGS)
    options = options.parse_args(argv)
    torch.set_num_threads(1)
    counts = collections.defaultdict(collections.Counter)
    for kind, optimizer, seed in itertools.product(options.models, OPTIMIZERS, options.seeds):
        made = pairs(kind, optimizer, seed, options.steps, options.roundings)
        for how, fault, where, start, names, a, b in made:
            row = f"{kind}, {how}" if fault is None else f"{fault}, {'all' if where == 'all' else 'one'}"
            for column in COLUMNS:
                counts[row, column][outcome(judged(names, a, b, *column), where, start)] += 1
    print(" / ".join(OUTCOMES), end="\n\n")
    heads = [f"k = {k}, {'weights' if w else 'no weights'}, every {n}" for k, n, w in COLUMNS]
    print("|", " | ".join(["pairs", "", *heads]), "|\n|---|---:|" + "---|" * len(heads))
    for row in dict.fromkeys(row for row, _ in counts):
        cells = [" / ".join(str(counts[row, c][o]) for o in OUTCOMES) for c in COLUMNS]
        print("|", " | ".join([row, str(counts[row, COLUMNS[0]].total()), *cells]), "|")


if __name__ == "__main__":
    main()
