"""Contracts of the weights of a model that has not been trained: repeats, scales and spreads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.first_loss import is_pretrained
from gradiometer.checks.probe import BATCH_NORMS
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity
from gradiometer.stats import initial_weights as judged
from gradiometer.stats.line_stats import measure_weights, values_of, weights_of
from gradiometer.stats.repeated_lines import is_type, repeated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradiometer.checks.probe import Probe
    from gradiometer.stats.line_stats import Weight, WeightValues
    from gradiometer.stats.repeated_lines import Anomaly

DROWNED: Final = "initialize both tables with a similar spread: the smaller one is ignored until it has grown"
CLIPPED: Final = "draw from a wider range, or truncate less: many elements are equal"
PRETRAINED: Final = "the model is pretrained"
# of the norm's weights from 1. DCGAN starts with N(1, 0.02)
_NORM: Final = 0.15
# the ratio of positions to tokens, or the reverse, in their sum
_DROWNED, _NOTED = 70.0, 30.0


@contract("initialization", "no rows, columns, heads or matrices are zero or identical")
def repeated_weights(probe: Probe) -> Iterator[Evidence]:
    """Compare all rows and columns of each weight, and weights of one shape."""
    values = _values(probe)
    if not any(x.weight.is_matrix for x in values):
        raise NotApplicable("the model has no matrices")
    yield from _evidence(repeated(values, is_pretrained=is_pretrained(probe)))


@contract("initialization", "norm layers start at scale 1, and biases at 0 or small values")
def initial_scales(probe: Probe) -> Iterator[Evidence]:
    """Run each norm layer on random values, and check its output and its bias; then check other biases."""
    if is_pretrained(probe):
        raise NotApplicable(PRETRAINED)
    values = _values(probe)
    told: set[str] = set()
    for each in [*_norms(probe), *_evidence(judged.odd_vectors(values)), *_biases(probe, values)]:
        if each.name not in told:
            told.add(str(each.name))
            yield each


@contract("initialization", "the spread of weights suits their fan-in and matches that of similar layers")
def initial_spread(probe: Probe) -> Iterator[Evidence]:
    """Compare the spread of each weight with its fan-in and siblings, and embedding tables that are added."""
    if is_pretrained(probe):
        raise NotApplicable(PRETRAINED)
    values = _values(probe)
    if not any(x.weight.is_matrix for x in values):
        raise NotApplicable("the model has no matrices")
    found = [*_evidence(judged.unusual_spread(values)), *_clipped(probe), *_drowned(probe, values)]
    yield from found


# details

_known: WeakKeyDictionary[Probe, list[WeightValues]] = WeakKeyDictionary()


def _weights(probe: Probe) -> list[tuple[Weight, Tensor]]:
    return weights_of({"": probe.model})


def _values(probe: Probe) -> list[WeightValues]:
    """Return what is known of all weights, which are read once."""
    if probe not in _known:
        groups: dict[torch.device, list[tuple[Weight, Tensor]]] = {}
        for weight, x in _weights(probe):
            groups.setdefault(x.device, []).append((weight, x))
        _known[probe] = [x for group in groups.values() for x in values_of(*measure_weights(group))]
    return _known[probe]


def _evidence(anomalies: Iterable[Anomaly]) -> Iterator[Evidence]:
    for each in anomalies:
        severity = Severity.WARNING if each.is_sure else Severity.INFO
        yield Evidence(each.text, each.name, each.value, each.threshold, each.advice, severity)


# norm layers


def _norms(probe: Probe) -> Iterator[Evidence]:
    candidates = {
        module: name
        for name, module in probe.model.named_modules()
        if next(module.children(), None) is None and _is_vectors(module)
    }
    linear = [x for x in probe.model.modules() if any(p.dim() > 1 for p in x.parameters(recurse=False))]
    with probe.in_own_dtype():
        calls, dtype = probe.captured([*candidates, *linear]), probe.dtype
    # what zero weights of a norm layer do: their branch starts at 0, or a layer gets zeros
    starved = any(
        isinstance(args[0], Tensor) and args[0].numel() and not bool(args[0].any())
        for module, (args, _, _) in calls.items()
        if module not in candidates and args
    )
    for module, name in candidates.items():
        scale, biases = _parts(module)
        affine = _affine(module, scale, biases, calls.get(module), dtype)
        if affine is None:
            continue
        constant, factor = affine
        prefix = f"{name}." if name else ""
        for key, bias in biases.items():
            size = float(bias.detach().double().square().mean().sqrt())
            if size > 0.005:
                text = f"{prefix}{key}, the bias of a norm layer, starts with rms {size:.3g} instead of 0"
                yield Evidence(text, prefix + key, size, 0.005, judged.SCALE)
        if scale is None:
            continue
        key, weight = scale
        effective = constant + factor * weight.detach().double()
        distance = float((effective - 1).square().mean().sqrt())
        if distance <= _NORM:
            continue
        rms = float(effective.square().mean().sqrt())
        is_constant = weight.numel() > 1 and bool((weight == weight.flatten()[0]).all())
        about = f"{float(weight.detach().flatten()[0]):.3g}" if is_constant else f"rms {_rms(weight):.3g}"
        text = f"{prefix}{key} starts with {about}: the norm layer returns rms {rms:.3g} instead of 1"
        if not math.isfinite(distance):
            continue
        # a branch that starts at 0 on purpose
        if rms > 0 or starved:
            yield Evidence(text, prefix + key, distance, _NORM, judged.SCALE)


def _is_vectors(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    if not own:
        return False
    if "norm" in type(module).__name__.lower():
        return True
    return all(sum(size > 1 for size in p.shape) == 1 and p.is_floating_point() for p in own)


def _parts(module: nn.Module) -> tuple[tuple[str, Tensor] | None, dict[str, Tensor]]:
    own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    biases = {name: p for name, p in own.items() if any(x in name for x in ("bias", "beta", "shift"))}
    scales = [(name, p) for name, p in own.items() if name not in biases]
    return (scales[0] if len(scales) == 1 else None), biases


def _affine(
    module: nn.Module,
    scale: tuple[str, Tensor] | None,
    biases: dict[str, Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any], Any] | None,
    dtype: torch.dtype,
) -> tuple[float, float] | None:
    """Return a and b, where a layer scales what it has normalized by a + b * weight; None for other layers.

    A layer normalizes if its output does not grow with its input.
    """
    if isinstance(module, BATCH_NORMS):
        return 0.0, 1.0
    if call is None or not call[0] or not isinstance(call[0][0], Tensor) or scale is None:
        is_known = isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm)
        return (0.0, 1.0) if is_known else None
    args, kwargs, output = call
    if not isinstance(output, Tensor) or not args[0].is_floating_point():
        return None
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(args[0].shape, generator=generator, device="cpu").to(args[0].device, dtype)
    parameters = [scale[1], *biases.values()]
    before = [p.data for p in parameters]

    def run(weight: float, factor: float) -> Tensor:
        scale[1].data = torch.full_like(before[0], weight)
        for p in biases.values():
            p.data = torch.zeros_like(p)
        with torch.no_grad():
            result: Tensor = module(factor * x, *args[1:], **kwargs)
        return result.double()

    try:
        none, one, larger = run(0.0, 1.0), run(1.0, 1.0), run(1.0, 4.0)
    except Exception:  # noqa: BLE001 a layer that takes no other values
        return None
    finally:
        for p, data in zip(parameters, before, strict=True):
            p.data = data
    size = _rms(one)
    if not size or one.shape != x.shape or _rms(larger - one) > 0.1 * size:
        return None
    return _rms(none), _rms(one - none)


def _rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


# biases


def _biases(probe: Probe, values: Sequence[WeightValues]) -> Iterator[Evidence]:
    by_name = {x.weight.parameter: x for x in values}
    owners = [
        (name, module)
        for name, module in probe.model.named_modules()
        if not isinstance(module, nn.RNNBase | nn.RNNCellBase)
    ]
    linear = [x for x in values if x.weight.kind in {"linear", "conv"}]
    last = linear[-1].weight.parameter.rpartition(".")[0] if linear else None
    for name, module in owners:
        own = dict(module.named_parameters(recurse=False))
        matrices = [p for p in own.values() if sum(size > 1 for size in p.shape) > 1]
        if not matrices or "norm" in type(module).__name__.lower():
            continue
        fan_in = min(matrices[0].shape[0], matrices[0][0].numel())
        for key in own:
            full = f"{name}.{key}" if name else key
            each = by_name.get(full)
            if each is None or each.weight.kind != "bias" or not judged.is_large_bias(each, fan_in):
                continue
            # a prior of classes, or a layer that starts as a fixed function
            is_meant = (not each.std and (name == last or judged.is_head(full))) or not any(
                bool(p.any()) for p in matrices
            )
            if is_meant:
                continue
            text = f"{full} starts with rms {each.rms:.3g} instead of 0, or 1 / sqrt(fan-in) = "
            text += f"{1 / math.sqrt(fan_in):.2g} at most"
            yield Evidence(text, full, each.rms, 5 / math.sqrt(fan_in), judged.SCALE)


# spreads


def _clipped(probe: Probe) -> Iterator[Evidence]:
    for weight, x in _weights(probe):
        if weight.kind not in {"linear", "conv", "embedding"} or x.numel() < 256 or not weight.is_trained:
            continue
        top = x.abs().max()
        share = float((x.abs() == top).double().mean())
        if 0.05 < share < 1 and float(top) > 0 and weight.digits > 8:
            text = f"{weight.name}: {share:.0%} of the elements are {float(top):.3g} or -{float(top):.3g}"
            yield Evidence(text, weight.parameter, share, 0.05, CLIPPED)


def _drowned(probe: Probe, values: Sequence[WeightValues]) -> Iterator[Evidence]:
    """Compare tables of positions with those of tokens where their sum goes into the next module."""
    tokens = [
        x.weight.parameter
        for x in values
        if x.weight.kind == "embedding" and not x.weight.is_position and not is_type(x.weight.name)
    ]
    tables = [x.weight.parameter for x in values if x.weight.is_position and x.sumsq]
    positions = [name for name in tables if "bias" not in name]
    if not tokens or not positions:
        return
    parameters = dict(probe.model.named_parameters())
    before = _inputs(probe)
    of_tokens = _changes(before, _inputs(probe, [parameters[name] for name in tokens]))
    for name in positions:
        of_positions = _changes(before, _inputs(probe, [parameters[name]]))
        # the first module that sees the positions, if these were added to tokens; otherwise they are far away
        first = next((pair for pair in zip(of_tokens, of_positions, strict=False) if pair[1]), (0.0, 0.0))
        token, position = first
        if not token:
            continue
        ratio = max(position / token, token / position)
        if ratio > _NOTED:
            text = f"{name} is {position / token:.3g} times as large as {tokens[0]}, to which it is added"
            severity = Severity.WARNING if ratio > _DROWNED or position > token else Severity.INFO
            yield Evidence(text, name, ratio, _NOTED, DROWNED, severity)


def _inputs(probe: Probe, scaled: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the first sequence of vectors that each call gets, with some parameters times 1.5."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        every = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
        vectors = [x for x in every if x.is_floating_point() and x.dim() == 3]
        if vectors and len(found) < 64:
            found.append(vectors[0].detach().clone())

    before = [p.data for p in scaled]
    handles = [x.register_forward_pre_hook(note, with_kwargs=True) for x in probe.model.modules()]
    try:
        for p in scaled:
            p.data = p.data * 1.5
        with probe.in_own_dtype():
            probe.output()
    finally:
        for p, data in zip(scaled, before, strict=True):
            p.data = data
        for handle in handles:
            handle.remove()
    return found


def _changes(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[float]:
    return [_rms(a - b) if a.shape == b.shape else 0.0 for a, b in zip(after, before, strict=False)]
