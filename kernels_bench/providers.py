"""The providers: gradiometer by level, the read ceiling, and other implementations of such statistics.

A provider's ``build`` takes Data and returns one call for each copy of the inputs. ``read`` converts the
result of a call into the values to check: L2 norms, the total norm, largest magnitudes, or
found_inf.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

import gradiometer as gm
from gradiometer import ops
from gradiometer.columns import CURSOR_SIZE, Cursor

if TYPE_CHECKING:
    from collections.abc import Callable

# functions that compute all columns are compiled for lists up to this length: longer ones take minutes
COMPILED_TENSORS = 16
MIB = 2**20
# only public names, so that it works with other commits, whose modules may differ (git_base.py)
THRESHOLDS = gm.Thresholds()
SUMSQ = [column.name for column in gm.COLUMNS].index("sumsq")


@dataclass(frozen=True)
class Provider:
    """``full``: gives all columns. ``gives``, ``precise``: the checked values, and how closely they must fit.

    ``needs``: takes Data and returns the reason why the provider does not run there, or None.
    """

    name: str
    family: Literal["ceiling", "ours", "peer"]
    what: str
    build: Callable
    full: bool = False
    level: Literal["eager", "op", "compiled", "graph"] = "eager"
    gives: Literal["norms", "total", "max", "found", ""] = "norms"
    read: Callable = torch.stack
    precise: bool = False
    needs: Callable = lambda data: None  # noqa: ARG005


def tolerance(provider, dtype):
    """Return the largest relative error that a correct result may have."""
    if provider.family == "ours":
        return 1e-12  # documented: 1e-13; the reference is itself a sum of fp64 sums
    if provider.precise:
        return 1e-10  # sequential fp64 sums of squares
    # fp32 sums of long runs drift by about 1e-4; half-precision results are rounded once or twice
    return 1e-3 if dtype.itemsize >= 4 else 2.0**-6


def each(function):
    """Return a build that calls a function on each copy of the list."""
    return lambda data: [partial(function, tensors) for tensors in data.sets]


# all columns by PyTorch's operators


def all_columns(tensors):
    """Return ``(T, 7) float64``: norm, sum, zeros, NaN, +Inf, -Inf, largest magnitude."""
    rows = []
    for x in tensors:
        if x.numel() == 0:  # there is no largest element
            rows.append(torch.zeros(7, dtype=torch.float64, device=x.device))
            continue
        finite = torch.where(x.isfinite(), x, 0)
        row = (
            torch.linalg.vector_norm(finite, dtype=torch.float64),
            finite.sum(dtype=torch.float64),
            (x == 0).sum(),
            x.isnan().sum(),
            (x == math.inf).sum(),
            (x == -math.inf).sum(),
            finite.abs().amax(),
        )
        rows.append(torch.stack([value.to(torch.float64) for value in row]))
    return torch.stack(rows)


def flatten(tensors):
    """Copy everything into one tensor and read it once for each statistic; norms are per tensor."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    zeros = (flat == 0).to(torch.float64).mean()
    nans, infs = flat.isnan().sum(), flat.isinf().sum()
    norms = torch.stack([x.double().norm() for x in tensors])
    return norms, zeros, nans, infs, flat.abs().max(), flat.double().norm()


def compiled(function, **options):
    def build(data):
        # torch.compile imports the compiler, so it is called late
        return each(torch.compile(function, fullgraph=True, dynamic=False, options=options))(data)

    return build


def _cuda(data):
    return None if data.flats[0].is_cuda else "on a GPU only"


def _short(data):
    case, count = data.case, len(data.sets[0])
    cuda = data.flats[0].is_cuda
    if count <= COMPILED_TENSORS or (case.compiled and cuda):
        return None
    return f"{count} tensors compile for minutes (at most {COMPILED_TENSORS})"


def _short_on_cuda(data):
    return _cuda(data) or _short(data)


# CUDA graphs


@dataclass(frozen=True)
class Replay:
    """A captured call. ``extra_mib``: the memory that its capture allocated."""

    graph: torch.cuda.CUDAGraph
    result: object
    extra_mib: float

    def __call__(self):
        self.graph.replay()
        return self.result


def captured(build):
    """Return a build whose calls replay graphs, one for each copy, all in one memory pool."""

    def capture(call, pool):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = call()
        return Replay(graph, result, (torch.cuda.max_memory_allocated() - before) / MIB)

    def build_graphs(data):
        calls = build(data)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are compiled and loaded before a capture
                calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        return [capture(call, pool) for call in calls]

    return build_graphs


# peers that take parameters, or are in other packages


def parameters(tensors):
    """Return parameters whose gradients are the tensors; their values share the memory and are never read."""
    params = [torch.nn.Parameter(x) for x in tensors]
    for param, x in zip(params, tensors, strict=True):
        param.grad = x
    return params


def _clip(data):
    # an infinite max_norm multiplies every gradient by 1
    clip = torch.nn.utils.clip_grad_norm_
    return [partial(clip, parameters(tensors), math.inf) for tensors in data.sets]


def _unscale(data):
    found, scale = (torch.full((), value, device=data.flats[0].device) for value in (0.0, 1.0))
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    def call(tensors):
        unscale(tensors, found, scale)
        return found

    return each(call)(data)


LIGHTNING = ("lightning.pytorch.utilities", "pytorch_lightning.utilities")


def _lightning(data):
    grad_norm = importlib.import_module(_first(LIGHTNING)).grad_norm
    return [partial(grad_norm, torch.nn.ParameterList(parameters(s)), 2) for s in data.sets]


def _lightning_total(norms):
    return torch.as_tensor(next(value for name, value in norms.items() if name.endswith("_total")))


def multi_tensor(module):
    """Return a build for apex's operator and its derivatives: per-tensor norms, 64Ki elements a block."""

    def build(data):
        l2norm = importlib.import_module(module).multi_tensor_l2norm
        unused = torch.zeros(1, dtype=torch.int32, device=data.flats[0].device)
        return [partial(l2norm, 2**16, unused, [tensors], True) for tensors in data.sets]

    return build


def _first(modules):
    for module in modules:
        try:
            if importlib.util.find_spec(module) is not None:
                return module
        except (ImportError, ValueError):  # its parent package is not installed
            continue
    return None


def installed(*modules, cuda=False):
    def needs(data):
        if _first(modules) is None:
            return "not installed"
        return _cuda(data) if cuda else None

    return needs


ALL = "columns"
_ours = partial(Provider, family="ours", what=f"{ALL}, flags", full=True)
_peer = partial(Provider, family="peer")
_stats = {"read": lambda stats: stats.norm}
_op = {"read": lambda result: result[0][:, SUMSQ].sqrt()}
_total = {"gives": "total", "read": torch.as_tensor}
_column = {"full": True, "precise": True, "read": lambda columns: columns[:, 0]}


def _measure(tensors):
    return ops.tensor_stats(tensors, THRESHOLDS)


def _foreach(tensors, order=2, dtype=None):
    return torch._foreach_norm(tensors, order, dtype=dtype)


_foreach64 = partial(_foreach, dtype=torch.float64)
_get_total_norm = torch.nn.utils.get_total_norm

_PEERS = (
    _peer("foreach", what="norms", build=each(_foreach)),
    _peer("foreach64", what="fp64 norms", build=each(_foreach64), precise=True),
    _peer("foreach-inf", what="max norms", build=each(partial(_foreach, order=math.inf)), gives="max"),
    _peer("total-norm", what="total norm", build=each(partial(_get_total_norm, foreach=True)), **_total),
    _peer(
        "total-norm-loop", what="total norm", build=each(partial(_get_total_norm, foreach=False)), **_total
    ),
    _peer("clip-grad-norm", what="norm, scaling", build=_clip, **_total),
    _peer("amp-unscale", what="flag, scaling", build=_unscale, gives="found", read=torch.as_tensor),
    _peer("loop", what=ALL, build=each(all_columns), **_column),
    _peer("inductor", what=ALL, build=compiled(all_columns), level="compiled", needs=_short, **_column),
    _peer(
        "inductor-combo",
        what=ALL,
        build=compiled(all_columns, combo_kernels=True),
        level="compiled",
        needs=_short_on_cuda,
        **_column,
    ),
    _peer("flatten", what="norms, counts", build=each(flatten), precise=True, read=lambda r: r[0]),
    _peer(
        "lightning",
        what="norms on host",
        build=_lightning,
        gives="total",
        read=_lightning_total,
        needs=installed(*LIGHTNING),
    ),
    _peer(
        "apex",
        what="norms",
        build=multi_tensor("amp_C"),
        read=lambda r: r[1],
        needs=installed("amp_C", cuda=True),
    ),
    _peer(
        "te",
        what="norms",
        build=multi_tensor("transformer_engine.pytorch.optimizers"),
        read=lambda r: r[1],
        needs=installed("transformer_engine.pytorch.optimizers", cuda=True),
    ),
)


def _replayed(provider):
    name = f"{provider.name.removesuffix('-eager')}-graph"

    def needs(data):
        return _cuda(data) or provider.needs(data)

    return replace(provider, name=name, level="graph", build=captured(provider.build), needs=needs)


_CEILING = Provider(
    "ceiling",
    family="ceiling",
    what="one flat sum",
    build=lambda data: [partial(torch.sum, flat) for flat in data.flats],
    gives="",
)


def _pairs(data, sides=2):
    """Compare the halves of each tensor, or its first two thirds, with the last one as gradient.

    The parts begin at 16-byte boundaries of the tensor.
    """

    def parts(tensors):
        for x in tensors:
            size = x.numel() // (8 * sides) * 8
            yield [x.view(-1)[i * size : (i + 1) * size] for i in range(sides)]

    return [
        partial(ops.measure_pairs, *map(list, zip(*parts(tensors), strict=True))) for tensors in data.sets
    ]


def _tapped(data):
    """Measure each tensor as an activation, whose last dimension is the channels."""
    device = data.flats[0].device
    count = len(data.sets[0])
    store, cursor = ops.new_store(count, device), torch.zeros(CURSOR_SIZE, dtype=torch.float64, device=device)
    cursor[Cursor.EVERY] = 1

    def call(tensors):
        for row, x in enumerate(tensors):
            torch.ops.gradiometer.tap_(x, store, cursor, row, -1, True)
        return store

    return each(call)(data)


def _clipped(data):
    """Measure gradients and decide on a factor for each; all are 1, so nothing is written."""
    params = [parameters(tensors) for tensors in data.sets]
    return [partial(gm.collect_and_clip_, each, gm.PerTensorClip(each, warmup_steps=0)) for each in params]


def _once(build):
    """Return a build that calls for one copy of the inputs, so that the host prepares one call."""
    return lambda data: build(data._replace(sets=data.sets[:1], flats=data.flats[:1]))


_KINDS = tuple(
    Provider(f"ours-{name}", family="ours", what=what, build=build, gives="")
    for name, what, build in (
        ("pairs", "pairs", _pairs),
        ("updates", "pairs with gradients", partial(_pairs, sides=3)),
        ("exponents", "histograms", each(gm.collect_exponents)),
        ("taps", "activations", _tapped),
        ("clip", f"{ALL}, clip factors", _clipped),
    )
)
_EAGER = _ours("ours-eager", build=each(gm.collect), **_stats)
_OURS = (
    _EAGER,
    _ours("ours-op", level="op", build=each(_measure), **_op),
    _ours("ours-fingerprint", build=each(partial(gm.collect, fingerprint=True)), **_stats),
    _ours("ours-compiled", level="compiled", build=compiled(gm.collect), **_stats),
    _replayed(_EAGER),
    _replayed(replace(_EAGER, name="ours-once", what=f"{ALL}, flags; one copy", build=_once(_EAGER.build))),
    _replayed(replace(_EAGER, name="ours-fingerprint", build=each(partial(gm.collect, fingerprint=True)))),
    *(kind for eager in _KINDS for kind in (eager, _replayed(eager))),
)
_IN_GRAPHS = {"foreach", "foreach64", "total-norm", "loop", "inductor", "inductor-combo"}
_GRAPHS = tuple(_replayed(p) for p in _PEERS if p.name in _IN_GRAPHS)
PROVIDERS = {p.name: p for p in (_CEILING, _replayed(_CEILING), *_OURS, *_PEERS, *_GRAPHS)}
GROUPS = {"ours": [p.name for p in _OURS], "peers": [p.name for p in (*_PEERS, *_GRAPHS)]}
