"""The contract of normalization: a norm layer normalizes each token by itself."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.checks.trace import unfused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradiometer.checks.probe import Probe

TOKEN: Final = "normalize over the last dimension alone, the channels of one token"  # noqa: S105 of a text
DIVIDE: Final = "return weight * x / sqrt(mean(x**2) + eps), for LayerNorm of x - mean(x), and + bias"
EPS: Final = "use an eps much smaller than the mean square of the inputs, such as 1e-6"
# not AdaLayerNorm, ConditionalLayerNorm, RMSNormGated or LayerNormAct, which do something else as well
_NAME: Final = re.compile(
    r"(?!Ada|Cond|Gated|Partial|Group)\w*(Layer|RMS)_?Norm(alization)?(\dd)?", re.IGNORECASE
)
_OWN_NAME: Final = re.compile(r"^ln(_|\d|$)|layer_?norm|^rms_?norm|_ln$", re.IGNORECASE)
# also of layers called layer_norm: in wav2vec2 one is a GroupNorm, in MobileBERT all only scale and shift
_OTHER: Final = re.compile(
    r"No_?Norm|Identity|Affine|Ada|Cond|Gated|Group|Partial|Dynamic|DyT|Sequential|List|Dict|Linear",
    re.IGNORECASE,
)
# inputs are made so large that eps does not matter
_LARGE: Final = 1e3
# by how much the rms of tokens may differ afterwards
_UNEVEN: Final = 0.05
# by how much eps may shrink a typical token, and the least eps that is not a usual one
_SHRUNK, _LEAST_EPS = 0.7, 3e-5


@contract("behaviour", "norm layers normalize each token separately")
def normalization(probe: Probe) -> Iterator[Evidence]:
    """Call each norm layer again with its input changed in one element, in sign and in scale."""
    norms = {name: x for name, x in probe.model.named_modules() if _is_norm(name, x)}
    if not norms:
        raise NotApplicable("the model has no LayerNorm or RMSNorm")
    with unfused():
        captured = probe.captured(norms.values())
    found: dict[str, list[tuple[str, Evidence]]] = {}
    shifts: dict[str, bool] = {}
    examined = 0
    for name, module in norms.items():
        call = _call_of(module, *captured[module]) if module in captured else None
        if call is None:
            continue
        examined += 1
        with probe.in_evaluation():
            fault = next(_faults(probe, module, *call), None)
            if (shifted := _is_shifted(*call)) is not None:
                shifts[name] = shifted
        if fault is not None:
            found.setdefault(fault[0], []).append((name, fault[1]))
    if not examined:
        raise NotApplicable("no norm layer was called with one floating-point tensor of tokens")
    for several in found.values():
        name, evidence = several[0]
        more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
        text = f"{name}{more} {evidence.text}"
        yield Evidence(text, name, evidence.value, evidence.threshold, evidence.advice)
    if not found:
        yield from _unlike(norms, shifts)


def _is_norm(path: str, module: nn.Module) -> bool:
    """Return whether a module is a layer norm by its class, or by its own name if that does not say more."""
    kind = type(module).__name__
    is_named = bool(_OWN_NAME.search(path.rpartition(".")[2])) and not _OTHER.search(kind)
    has_groups = any(getattr(module, name, None) not in {None, 1} for name in ("group_size", "num_groups"))
    return (is_named or bool(_NAME.fullmatch(kind))) and not has_groups


def _call_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Return the input of a call, and the layer as a function of it; None if it has other tensors."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if len(tensors) != 1 or not isinstance(output, Tensor):
        return None
    x = tensors[0]
    # what was normalized in place is gone
    # squares of large values overflow in float16
    if (
        x.dtype not in {torch.bfloat16, torch.float32, torch.float64}
        or x.shape != output.shape
        or x.dim() < 2
        or x.shape[-1] < 2
    ):
        return None
    if x.data_ptr() == output.data_ptr() or not bool(x.isfinite().all()):
        return None

    def again(changed: Tensor) -> Tensor:
        one = changed.clone()
        result = module(
            *[one if each is x else each for each in args],
            **{name: one if each is x else each for name, each in kwargs.items()},
        )
        assert isinstance(result, Tensor)  # noqa: S101 it was one before
        return result.double()

    return x.detach(), again


def _faults(
    probe: Probe, module: nn.Module, x: Tensor, again: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Evidence]]:
    """Yield what is wrong with a layer, the worst first."""
    size = float(x.double().square().mean().sqrt())
    if size == 0:
        return
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64)
    large = (noise * _LARGE).to(x.device, x.dtype)
    before = again(large)
    if all(not bool(p.any()) for p in module.parameters()) and not bool(before.any()):
        # a weight that starts at 0 is meant
        return
    scale = float(before.square().mean().sqrt())
    if scale == 0 or bool((before == before.flatten()[0]).all()):
        yield "zero", Evidence("returns the same number everywhere", advice=DIVIDE)
        return
    # one element: what changes with it is normalized with it
    place = tuple([n // 2 for n in x.shape])
    one = large.clone()
    one[place] += _LARGE * max(x.shape) ** 0.5
    moved = (again(one) - before).abs() > 1e-9 * scale
    moved[place] = False
    axes = _axes(moved, place)
    if not axes:
        yield "identity", Evidence("does not normalize: elements do not affect each other", advice=DIVIDE)
        return
    wrong = _wrong_axes(probe, module, x, axes)
    if wrong is not None:
        yield "axes", Evidence(wrong, advice=TOKEN)
        return
    # the antisymmetric part, without the bias
    odd = (before - again(-large)) / 2
    power = float(((again(2 * large) - again(-2 * large)) / 2).square().mean().sqrt())
    power = power / max(float(odd.square().mean().sqrt()), 1e-300)
    if abs(power - 1) > 0.02:
        yield "power", Evidence(_power(power), value=power, threshold=1.0, advice=DIVIDE)
        return
    yield from _size(module, x, again, odd, axes)
    yield from _even(module, large, again, axes)


def _size(
    module: nn.Module, x: Tensor, again: Callable[[Tensor], Tensor], odd: Tensor, axes: set[int]
) -> Iterator[tuple[str, Evidence]]:
    """Look at the size of normalized tokens, and at what eps makes of those of the batch."""
    count = torch.Size([x.shape[d] for d in axes]).numel()
    rms = float(odd.square().mean().sqrt())
    weights = [p.double() for p in module.parameters() if p.numel() > 1]
    constant = weights[0].flatten()[0].item() if weights else 1.0
    if not weights or bool((weights[0] == constant).all()):
        sizes = {abs(constant), abs(1 + constant)} if weights else {1.0}
        for factor, what in ((count**-0.5, "the sum"), (count**0.5, "the mean, twice,")):
            if count > 4 and any(abs(rms / (each * factor) - 1) < 0.02 for each in sizes if each):
                text = f"returns tokens with an rms of {rms:.3g}: it divides by the root of {what} of squares"
                yield "size", Evidence(text, value=rms, threshold=1.0, advice=DIVIDE)
                return
    # of the batch: how much larger tokens become if the input is enlarged until eps does not matter
    dims = sorted(axes)
    centered = x.double() - (x.double().mean(dims, keepdim=True) if _is_shifted(x, again) else 0)
    squares = centered.square().mean(dims)
    factor = _LARGE / max(float(squares.mean().sqrt()), 1e-30)

    def sizes_of(y: Tensor) -> Tensor:
        return ((again(y) - again(-y)) / 2).square().mean(dims).sqrt()

    used = squares > 0
    if not bool(used.any()) or factor > 1e30:
        return
    shrunk = (sizes_of(x) / sizes_of(x * factor).clamp(min=1e-300))[used]
    ratio, square = float(shrunk.median()), float(squares[used].median())
    eps = square * (1 / max(ratio, 1e-6) ** 2 - 1)
    if ratio < _SHRUNK and eps > _LEAST_EPS:
        text = (
            f"returns typical tokens at {ratio:.2g} times their normalized size: eps is about {eps:.2g}, "
            f"the mean square of the input {square:.2g}"
        )
        yield "eps", Evidence(text, value=eps, threshold=square, advice=EPS)


def _even(
    module: nn.Module, large: Tensor, again: Callable[[Tensor], Tensor], axes: set[int]
) -> Iterator[tuple[str, Evidence]]:
    """Look at whether tokens of different means and spreads all have one rms afterwards."""
    if len(axes) != 1:
        return
    x = large.movedim(next(iter(axes)), -1).clone(memory_format=torch.contiguous_format)
    tokens = x[..., :1]
    # means that differ, and another distribution in half of the tokens
    x += 2 * tokens
    flat = x.view(-1, x.shape[-1])
    flat[::2] = _LARGE * (flat[::2] / _LARGE) ** 3
    given = x.movedim(-1, next(iter(axes)))
    odd = ((again(given) - again(-given)) / 2).movedim(next(iter(axes)), -1)
    weights = [p.double().flatten() for p in module.parameters() if p.numel() == odd.shape[-1]]
    spreads = []
    for weight in [weights[0], 1 + weights[0]] if weights else [torch.ones(1, device=odd.device)]:
        if bool((weight != 0).all()):
            rms = (odd / weight).square().mean(-1).sqrt()
            spreads.append((float((rms.max() - rms.min()) / rms.mean()), float(rms.min()), float(rms.max())))
    if spreads and (worst := min(spreads))[0] > _UNEVEN:
        text = f"returns tokens with an rms of {worst[1]:.3g} to {worst[2]:.3g}: it divides by another value"
        yield "uneven", Evidence(text, value=worst[0], threshold=_UNEVEN, advice=DIVIDE)


def _wrong_axes(probe: Probe, module: nn.Module, x: Tensor, axes: set[int]) -> str | None:
    """Return what is wrong with the dimensions that are normalized."""
    last = x.dim() - 1
    first = next((p for p in module.parameters() if p.dim() >= 1), None)
    channels = None if first is None else first.numel()
    lengths = {stream.length for stream in probe.streams if stream.is_sequence}
    shape = f"of its input {tuple(x.shape)}"
    normalized = sorted(axes)
    if axes == {last}:
        # (B, C, T) with as many weights as channels
        if x.dim() == 3 and channels == x.shape[1] != x.shape[2] and x.shape[2] in lengths:
            return f"normalizes over the tokens, dimension 2 {shape}"
        is_time = x.dim() == 3 and x.shape[2] in lengths and x.shape[1] not in lengths
        if is_time and all(stream.is_tokens for stream in probe.streams):
            return f"normalizes over the tokens, dimension 2 {shape}"
        return None
    if 0 in axes:
        what = "over examples" if x.dim() > 2 else "over tokens"
        return f"normalizes {what}, dimension{'s' * (len(axes) > 1)} {_list(normalized)} {shape}"
    if axes == {1} and (x.dim() == 4 or channels == x.shape[1] != x.shape[2]):
        # channels come first
        return None
    if x.dim() == 4 and not any(x.shape[d] in lengths for d in axes if d != last):
        return None
    if x.dim() > 4 or (x.dim() == 3 and axes == {1} and x.shape[1] == x.shape[2]):
        return None
    if x.dim() == 3 and channels == x.shape[2] and 1 in axes:
        return f"normalizes over tokens, dimension{'s' * (len(axes) > 1)} {_list(normalized)} {shape}"
    if x.dim() == 3 and not (lengths & {x.shape[d] for d in axes}):
        return None
    return f"normalizes over tokens, dimension{'s' * (len(axes) > 1)} {_list(normalized)} {shape}"


def _axes(moved: Tensor, place: tuple[int, ...]) -> set[int]:
    """Return the dimensions in which elements differ that have changed."""
    places = moved.nonzero()
    return {d for d in range(moved.dim()) if bool((places[:, d] != place[d]).any())}


def _is_shifted(x: Tensor, again: Callable[[Tensor], Tensor]) -> bool | None:
    """Return whether the layer subtracts the mean; None if all of its output is 0."""
    size = float(x.double().square().mean().sqrt()) or 1.0
    before, after = again(x), again(x + 3 * size)
    if not bool(before.any()):
        return None
    return float((after - before).abs().max()) < 1e-2 * float(before.abs().max())


def _unlike(norms: dict[str, nn.Module], shifts: dict[str, bool]) -> Iterator[Evidence]:
    """Compare what subtracts the mean with the class, or with most layers of the class."""
    kinds: dict[str, Counter[bool]] = {}
    for name, shifted in shifts.items():
        kinds.setdefault(type(norms[name]).__name__, Counter())[shifted] += 1
    for name, shifted in shifts.items():
        module = norms[name]
        known = {nn.LayerNorm: True, nn.RMSNorm: False}.get(type(module))
        counts = kinds[type(module).__name__]
        usual = known if known is not None else counts[True] > counts[False]
        if shifted != usual and (known is not None or counts[usual] > 2 * counts[shifted]):
            what = "subtracts the mean" if shifted else "does not subtract the mean"
            kind = "a " + type(module).__name__ if known is not None else "most other layers of its class"
            yield Evidence(f"{name} {what}, unlike {kind}", name, advice=DIVIDE)
            return


def _power(power: float) -> str:
    if abs(power - 2) < 0.1:
        return "does not divide: doubling the input doubles the output"
    if abs(power - 0.5) < 0.05:
        return "divides by the variance, not by its square root: doubling the input halves the output"
    return f"does not normalize: doubling the input multiplies the output by {power:.3g}"


def _list(axes: list[int]) -> str:
    return " and ".join(map(str, axes))
