"""By how much attention scales its scores, and whether that is meant."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.checks.report import Evidence
from gradiometer.checks.trace import UnknownError
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from gradiometer.checks.attention_parts import Attention
    from gradiometer.checks.probe import Probe

SCALE: Final = "divide the scores by sqrt(d) once, where d is the head size"
# models whose attention leaves the scale out: their initialization has it
_UNSCALED: Final = re.compile(
    r"T5|GPT_?Neo(?!_?X)|Switch_?Transformers|Pix2Struct|Pop2Piano|Udop", re.IGNORECASE
)
_MUP: Final = re.compile(r"mup", re.IGNORECASE)
_NEAR: Final = 5e-3


def scale_faults(
    probe: Probe, every: list[Attention]
) -> tuple[list[tuple[Attention | None, str, Evidence]], bool]:
    """Return scales that are known mistakes, or differ between layers, and whether any scale is known."""
    known = []
    for each in every:
        try:
            known.append((each, *_measured(each)))
        except UnknownError:
            continue
    found: list[tuple[Attention | None, str, Evidence]] = []
    odd = _odd(probe, known)
    for each, scale, sizes in known:
        size = sizes["d"]
        ratio = scale * size**0.5
        if _same(ratio, 1.0) or _is_meant(probe, each, scale):
            continue
        text, severity = _told(scale, sizes), Severity.WARNING
        if text is None:
            if each not in odd and (each.has_other_terms() or getattr(probe.config, "rope_scaling", None)):
                continue
            text, severity = f"scores are scaled by {scale:.4g}", Severity.INFO
        if each in odd:
            text, severity = f"{text}, unlike in other layers", Severity.WARNING
        text = f"{text}; 1/sqrt(d) is {size**-0.5:.4g} for heads of size {size}"
        evidence = Evidence(text, None, ratio, 1.0, SCALE, severity)
        found.append((each, f"scale {scale:.3g}", evidence))
    return found, bool(known)


def _measured(each: Attention) -> tuple[float, dict[str, int]]:
    """Return the factor of the plain products of queries and keys, and sizes by name.

    Raises:
        UnknownError: if queries or keys are normalized, or scores are not a multiple of the products.
    """
    if len(each.scores) != 1 or each.is_sigmoid or each.softmaxes > 1:
        raise UnknownError("scores")
    trace, index = each.trace, each.scores[0]
    node = trace.nodes[index]
    scale = 1.0
    operands = each.operands()
    for what in ("queries", "keys"):
        if what not in operands or operands[what].is_normed(trace):
            raise UnknownError(what)
        gains = [x.gain for x in operands[what].landings(trace)]
        if gains[0] is None or any(g is None or not _same(g / gains[0], 1.0) for g in gains):
            raise UnknownError(what)
        scale *= gains[0]
    size = trace.argument(node, node.operands[0]).shape[-1]
    landing = operands["queries"].landings(trace)[0]
    keys = operands["keys"].rows(trace.argument(node, operands["keys"].position)).shape[-2]
    heads = max(len(landing.groups), 1)
    sizes = {"d": size, "heads": heads, "keys": keys, "width": heads * size}
    return scale * _factor(each), sizes


def _factor(each: Attention) -> float:
    """Return the factor between products and scores."""
    trace, index = each.trace, each.scores[0]
    product = trace.value((index, 0))
    into = trace.nodes[each.softmax].inputs[0]
    places = trace.places((index, 0), into)
    scores = trace.value(into)
    size = float(product.double().square().mean().sqrt()) or 1.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    change = size * (1 + torch.rand(product.shape, generator=generator, device="cpu")).to(product)
    after = trace.again({(index, 0): product + change}, into)
    # where a mask was added, the difference is lost to rounding
    used = (places >= 0) & scores.isfinite() & (scores.abs() < 1e3 * (size + 1)) & after.isfinite()
    ratios = ((after - scores).double() / change.flatten()[places.clamp(min=0)])[used]
    ratios = ratios[ratios != 0]
    if ratios.numel() == 0:
        raise UnknownError("scores")
    middle = float(ratios.median())
    if middle <= 0 or float((ratios - middle).abs().max()) > 1e-3 * middle:
        raise UnknownError("scores")
    node = trace.nodes[index]
    return middle * float(_alpha(node)) if node.name in {"baddbmm", "addmm"} else middle


def _alpha(node: Any) -> float:
    _, kwargs = torch.utils._pytree.tree_unflatten(node.leaves, node.spec)  # noqa: SLF001
    alpha: float = kwargs.get("alpha", 1.0)
    return alpha


def _odd(probe: Probe, known: list[tuple[Attention, float, dict[str, int]]]) -> list[Attention]:
    """Return attentions that scale otherwise than most of the same class of modules."""
    groups: dict[str, list[tuple[Attention, float]]] = defaultdict(list)
    for each, scale, sizes in known:
        module = each.trace.nodes[each.use].module
        groups[type(module).__name__].append((each, round(scale * sizes["d"] ** 0.5, 3)))
    odd = []
    for group in groups.values():
        (most, count), *rest = Counter([ratio for _, ratio in group]).most_common()
        if rest and count >= 2 and not getattr(probe.config, "scale_attn_by_inverse_layer_idx", False):
            odd += [each for each, ratio in group if not _same(ratio / most, 1.0)]
    return odd


def _is_meant(probe: Probe, each: Attention, scale: float) -> bool:
    """Return whether a config, or the name of the model or module, says that the scale is another one."""
    config = probe.config
    scalar = getattr(config, "query_pre_attn_scalar", None)
    meant = [scalar**-0.5] if isinstance(scalar, int | float) and scalar > 0 else []
    meant += [x for name in _MULTIPLIERS if isinstance(x := getattr(config, name, None), float) and x > 0]
    if getattr(config, "scale_attn_weights", True) is False:
        meant.append(1.0)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return True
    if any(_same(scale / x, 1.0) for x in meant):
        return True
    module = each.trace.nodes[each.use].module
    names = [type(module).__name__, type(probe.model).__name__, str(getattr(config, "model_type", ""))]
    if _same(scale, 1.0) and any(_UNSCALED.search(name) for name in names):
        return True
    return any(_MUP.search(name) for name in [*names, *(vars(config) if config is not None else ())])


_MULTIPLIERS: Final = ("attention_multiplier", "attn_scale", "softmax_scale", "attention_scale", "attn_mult")


def _told(scale: float, sizes: dict[str, int]) -> str | None:
    """Return what a wrong scale is."""
    size, width = sizes["d"], sizes["width"]
    wrong = {
        "scores are not scaled": 1.0,
        "scores are scaled by 1/d, as if the square root were missing or the scale applied twice": 1 / size,
        "scores are multiplied by sqrt(d)": size**0.5,
        "scores are multiplied by d": float(size),
        f"scores are scaled by 1/sqrt({width}), the width of all heads together": width**-0.5,
        f"scores are scaled by 1/{width}, the width of all heads together": 1 / width,
        f"scores are scaled by 1/sqrt({sizes['heads']}), the number of heads": sizes["heads"] ** -0.5,
        f"scores are scaled by 1/sqrt({sizes['keys']}), the number of keys": sizes["keys"] ** -0.5,
        "scores are scaled by d**-0.25, as if only queries or keys were scaled": size**-0.25,
        "scores are scaled by d**-1.5": size**-1.5,
    }
    return next((text for text, value in wrong.items() if _same(scale / value, 1.0)), None)


def _same(a: float, b: float) -> bool:
    return abs(a - b) < _NEAR
