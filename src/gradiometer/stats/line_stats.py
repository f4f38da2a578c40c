"""What the rows and columns of weights have in common: which are zero, and which are equal.

`weights_of` finds the weights of a model and what each is for. `measure_weights` reads them once, and
finds repeated lines on the device, for all weights together. The result is small, whatever the model's size.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gradiometer.columns import LINES
from gradiometer.ops import line_counts, measure_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# parameters with a structure of their own: state-space models, decays, rotations, logarithms of scales
_STRUCTURED: Final = re.compile(
    r"(^|[._])(A_logs?|A_(real|imag)|D|D?[BC]_log|dt(_\w+)?|\w*(decay|freqs?|lambda|mask|theta|angle)\w*)($|[._])"
)
_POSITIONS: Final = re.compile(r"pos(ition)?(al)?(_|$|s$|\.)|position|wpe|pos_?embed", re.IGNORECASE)
_SCALES: Final = re.compile(r"norm|scale|gamma|gain|(^|\.)ls\d*(\.|$)|temperature", re.IGNORECASE)
_HEADS: Final = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads")
# of a stack of matrices, such as those of experts
_STACK: Final = 64
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Weight:
    """A parameter, and what it is for.

    Attributes:
        name: the name of the parameter, followed by ``[i]`` for matrix i of a stack.
        parameter: the name of the parameter.
        kind: ``"linear"``, ``"conv"``, ``"depthwise"``, ``"embedding"``, ``"raw"`` for other matrices;
            ``"norm"`` or ``"bias"`` for vectors, and ``"vector"`` for others.
        shape: the shape as a matrix: rows and columns.
        is_transposed: whether columns are outputs.
        padding: the row of an embedding that is 0 on purpose; -1 if there is none.
        heads: the number of attention heads; 0 if the module is not one of an attention.
        is_trained: whether it requires a gradient.
        digits: the binary digits of an element.
        may_be_copied: whether a layer may start as a copy of another one, as in
            `torch.nn.TransformerEncoder`; models with a config initialize each layer.
    """

    name: str
    parameter: str
    kind: str
    shape: tuple[int, int]
    is_transposed: bool = False
    padding: int = -1
    heads: int = 0
    is_trained: bool = True
    digits: int = 24
    may_be_copied: bool = True

    @property
    def is_matrix(self) -> bool:
        """Whether rows and columns are compared."""
        return self.kind in {"linear", "conv", "embedding", "raw"}

    @property
    def is_position(self) -> bool:
        """Whether this is a table of positions, by its name."""
        return bool(_POSITIONS.search(self.name)) and self.kind in {"embedding", "raw"}

    @property
    def fan_in(self) -> int:
        """The number of inputs of an output."""
        return self.shape[0] if self.is_transposed else self.shape[1]

    @property
    def fan_out(self) -> int:
        """The number of outputs, without the size of a kernel."""
        return self.shape[1] if self.is_transposed else self.shape[0]


class Lines(NamedTuple):
    """What the rows of a weight have in common, or its columns.

    Attributes:
        zeros: how many are 0, and
        zero: the first of these.
        repeats: how many are equal to an earlier one, and not 0;
        repeated: the first of these, and
        source: the one that it is equal to.
        constant: how many have elements that are all equal, and not 0.
    """

    zeros: int
    zero: int
    repeats: int
    repeated: int
    source: int
    constant: int


class WeightValues(NamedTuple):
    """The statistics of a weight, and its repeated lines.

    Attributes:
        weight: the weight.
        total: the sum of its elements; and so on as in `gradiometer.columns.TENSORS`.
        sumsq: the sum of squares.
        abs_max: the largest magnitude.
        n_nonfinite: the number of elements that are not finite.
        key: a number that depends on all elements and their places.
        share_of_zeros: the share of elements that are 0.
        rows: what its rows have in common.
        columns: what its columns have in common.
    """

    weight: Weight
    total: float
    sumsq: float
    abs_max: float
    n_nonfinite: float
    key: float
    share_of_zeros: float
    rows: Lines
    columns: Lines

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.weight.shape[0] * self.weight.shape[1]

    @property
    def rms(self) -> float:
        """The root mean square."""
        return float((self.sumsq / max(self.numel, 1)) ** 0.5)

    @property
    def mean(self) -> float:
        """The mean."""
        return self.total / max(self.numel, 1)

    @property
    def std(self) -> float:
        """The standard deviation; 0 if rounding explains it."""
        variance = self.sumsq / max(self.numel, 1) - self.mean**2
        return float(variance**0.5) if variance > 1e-12 * self.rms**2 else 0.0


def weights_of(
    modules: Mapping[str, nn.Module], *, device: torch.device | None = None
) -> list[tuple[Weight, Tensor]]:
    """Return the weights of models by the prefix of their names, and what each is for.

    Tied weights count once. Parameters of other dtypes and devices, and sharded ones, are left out.

    >>> [weight.kind for weight, _ in weights_of({"": torch.nn.Linear(3, 2)})]
    ['linear', 'bias']
    """
    found: list[tuple[Weight, Tensor]] = []
    seen: set[int] = set()
    for prefix, model in modules.items():
        config = getattr(model, "config", None)
        padding = getattr(config, "pad_token_id", None)
        parents: dict[str, nn.Module] = dict(model.named_modules())
        for path, module in parents.items():
            for name, p in module.named_parameters(recurse=False):
                if id(p) in seen or not _is_readable(p, device):
                    continue
                seen.add(id(p))
                full = prefix + (f"{path}." if path else "") + name
                weight = replace(
                    _weight(full, name, p, module), may_be_copied=not hasattr(config, "model_type")
                )
                ancestors = _ancestors(path, parents)
                if weight.kind == "embedding":
                    row = getattr(module, "padding_idx", None)
                    row = padding if row is None and not weight.is_position else row
                    weight = replace(weight, padding=-1 if not isinstance(row, int) else row % p.shape[0])
                elif weight.kind == "linear":
                    weight = replace(weight, heads=_head_count(module, ancestors, config))
                found += _matrices(weight, p.detach())
    return found


def measure_weights(
    weights: Sequence[tuple[Weight, Tensor]], *, lines: int = 2**20
) -> tuple[list[Weight], Tensor]:
    """Read weights once, and return those that were read and a row of values for each, on the device.

    Args:
        weights: of one device.
        lines: at most this number of rows and columns is looked at; later weights are left out.

    Returns:
        The weights, and ``(T, 18) float64``, which `values_of` reads.
    """
    taken: list[tuple[Weight, Tensor]] = []
    for weight, x in weights:
        lines -= sum(weight.shape)
        if lines < 0:
            break
        taken.append((weight, x.reshape(weight.shape)))
    if not taken:
        return [], torch.zeros(0, 18, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        tensors = [x for _, x in taken]
        table = measure_lines(tensors)
        zeros = torch.stack([(x == 0).sum() for x in tensors]).double()
        return [weight for weight, _ in taken], _summary(table, [line_counts(x) for x in tensors], zeros)


def values_of(weights: Sequence[Weight], values: Tensor) -> list[WeightValues]:
    """Return what `measure_weights` has found, from a copy on the host."""
    found = []
    for weight, row in zip(weights, values.tolist(), strict=True):
        rows, columns = (Lines(*[int(x) for x in part]) for part in (row[6:12], row[12:18]))
        total, sumsq, abs_max, n_nonfinite, key, zeros = row[:6]
        found.append(WeightValues(weight, total, sumsq, abs_max, n_nonfinite, key, zeros, rows, columns))
    return found


# details


def _is_readable(p: Tensor, device: torch.device | None) -> bool:
    return (
        type(p) in {Tensor, nn.Parameter}
        and p.layout == torch.strided
        and p.dtype in _DTYPES
        and p.numel() > 0
        and (device is None or p.device == device)
        and not p.is_meta
    )


def _ancestors(path: str, parents: Mapping[str, nn.Module]) -> list[nn.Module]:
    parts = path.split(".") if path else []
    return [parents[".".join(parts[:i])] for i in range(len(parts) - 1, -1, -1)]


def _head_count(module: nn.Module, ancestors: Iterable[nn.Module], config: Any) -> int:
    for owner in [module, *list(ancestors)[:2]]:
        for name in _HEADS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
        if "attention" in type(owner).__name__.lower():
            count = getattr(config, "num_attention_heads", None)
            return count if isinstance(count, int) else 0
    return 0


def _weight(full: str, name: str, p: Tensor, module: nn.Module) -> Weight:
    kind = type(module).__name__
    rows, columns = line_counts(p)
    digits = round(1 - math.log2(torch.finfo(p.dtype).eps))
    weight = Weight(full, full, "raw", (rows, columns), is_trained=p.requires_grad, digits=digits)
    if sum(size > 1 for size in p.shape) < 2:
        is_norm = "norm" in kind.lower()
        owns = any(x.dim() > 1 for x in module._parameters.values() if x is not None)  # noqa: SLF001
        of = "norm" if is_norm and not owns else "bias" if "bias" in name and owns else "vector"
        return replace(weight, kind=of, shape=(1, p.numel()))
    if _STRUCTURED.search(name) or _SCALES.search(full.rpartition(".")[2]):
        return replace(weight, kind="vector", shape=(1, p.numel()))
    if "norm" in kind.lower():
        return replace(weight, kind="norm", shape=(1, p.numel()))
    if "embedding" in kind.lower() and name == "weight" and p.dim() == 2:
        return replace(weight, kind="embedding")
    if isinstance(module, nn.modules.conv._ConvNd):  # noqa: SLF001
        is_depthwise = module.groups > 1 and module.groups == module.in_channels
        kind = "depthwise" if is_depthwise else "conv"
        return replace(weight, kind=kind, is_transposed=bool(module.transposed))
    if p.dim() == 2 and (name == "weight" or isinstance(module, nn.RNNBase | nn.MultiheadAttention)):
        # transformers' Conv1D
        return replace(weight, kind="linear", is_transposed=getattr(module, "nf", None) == p.shape[1])
    return weight


def _matrices(weight: Weight, p: Tensor) -> Iterator[tuple[Weight, Tensor]]:
    """Return a parameter, or each matrix of a stack."""
    if weight.kind != "raw" or p.dim() < 3:
        yield weight, p
        return
    # (1, N, C), as of positions
    while p.dim() > 2 and p.shape[0] == 1:
        p = p[0]
    shape = line_counts(p)
    if p.dim() == 3 and p.shape[0] <= _STACK and min(p.shape[1:]) > 1:
        for i, x in enumerate(p):
            yield replace(weight, name=f"{weight.parameter}[{i}]", shape=line_counts(x)), x
    else:
        yield replace(weight, shape=shape), p


def _summary(table: Tensor, counts: Sequence[tuple[int, int]], zeros: Tensor) -> Tensor:
    """Return a row of values for each weight, by a few operations on the lines of all of them."""
    device, sizes = table.device, [size for pair in counts for size in pair]
    segments = len(sizes)
    sized = torch.tensor(sizes, device="cpu")
    start = (sized.cumsum(0) - sized).to(device)
    segment = torch.repeat_interleave(torch.arange(segments, device="cpu"), sized).to(device)
    place = torch.arange(len(table), device=device) - start[segment]
    projection, square, total, top, numel, nonfinite = (
        LINES.value(table, name) for name in ("projection", "sumsq", "sum", "abs_max", "numel", "n_nonfinite")
    )
    # by segment, and in it by projection; equal lines in the order of their places
    order = projection.sort(stable=True).indices
    order = order[segment[order].sort(stable=True).indices]
    after, before = order[1:], order[:-1]
    is_equal = (segment[after] == segment[before]) & (table[after] == table[before]).all(1)
    is_zero = (top == 0) & (nonfinite == 0)
    repeats = torch.zeros_like(is_zero).index_put((after,), is_equal)
    source = torch.zeros_like(place).index_put((after,), place[before])
    repeats = repeats & ~is_zero & (numel > 1) & (nonfinite == 0)
    is_constant = (total * total >= square * numel * (1 - 1e-12)) & ~is_zero & (numel > 1)

    def first(where: Tensor) -> Tensor:
        found = torch.full((segments,), len(table), dtype=torch.int64, device=device)
        return found.scatter_reduce(0, segment, torch.where(where, place, len(table)), "amin")

    def count(where: Tensor) -> Tensor:
        return torch.zeros(segments, dtype=torch.float64, device=device).index_add(0, segment, where.double())

    repeated = first(repeats)
    of_first = source[(start + repeated).clamp(max=len(table) - 1)]
    lines = torch.stack(
        [
            count(is_zero),
            first(is_zero).double(),
            count(repeats),
            repeated.double(),
            of_first.double(),
            count(is_constant),
        ],
        1,
    )
    rows = segment % 2 == 0

    def summed(x: Tensor) -> Tensor:
        return torch.zeros(segments, dtype=torch.float64, device=device).index_add(0, segment, x)[::2]

    largest = torch.zeros(segments, dtype=torch.float64, device=device)
    largest = largest.scatter_reduce(0, segment, torch.where(rows, top, 0.0), "amax")[::2]
    # tells matrices with the same rows in another order apart
    key = summed(projection * (1 + (place * 0.6180339887498949) % 1.0))
    elements = (sized[::2] * sized[1::2]).to(device, torch.float64)
    head = torch.stack([summed(total), summed(square), largest, summed(nonfinite), key, zeros / elements], 1)
    return torch.cat([head, lines[::2], lines[1::2]], 1)
