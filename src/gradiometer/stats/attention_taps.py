"""Taps of attention and of routers: logits and weights of heads, the load of experts, entropies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.stats.attention_weights import attention_columns
from gradiometer.stats.running_taps import taps_of

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.stats.running_taps import Taps

# what follows the name of a call in the names of its rows
MAX_LOGIT: Final = ".max_logit"
MAX_LOGIT_BOUND: Final = ".max_logit_bound"
EXPERT_LOAD: Final = ".expert_load"
ROUTER_ENTROPY: Final = ".router_entropy"
FIRST_HEAD: Final = ".head0"


def tap_attention(
    q: Tensor,
    k: Tensor,
    name: str,
    *,
    scale: float | Tensor | None = None,
    max_scores: Tensor | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> None:
    """Have the attention logits and weights of each head measured.

    Call it beside the attention, compiled or not. Fused attention does not return its logits, so the row
    ``<name>.max_logit_bound`` has the bound ``max ‖q‖ · max ‖k‖ · |scale|`` of each sample and head, before
    any mask. With ``max_scores``, as `flex_attention` returns it, the row ``<name>.max_logit`` has the logits
    themselves, and 0 for a head whose logits are all negative. ``abs_max`` of the row is the largest of all.

    The bound is computed in fp64 and then multiplied by ``1 + (d + 32) * 2**-52``, which is more than its
    rounding errors, so no exact logit is larger in magnitude. Of fp64 inputs, a norm or a product of norms
    above 1.8e308 becomes Inf, and one below 2.2e-308 loses digits.

    With ``weights``, each head has a row ``<name>.head<i>``, if a `Taps` has the name and the number of heads
    in its ``attention``. These rows are a table of their own, the kind ``attention`` of a run:

    - ``masked_mass``, ``future_mass``: the mean over queries of the weights on keys that ``mask`` excludes,
      and with ``is_causal`` on keys after the query. Both are exactly 0 if the model applies the mask.
    - ``row_sum``, ``unnormalized_fraction``: the mean sum of a query's weights, and the share of queries
      whose weights do not sum to 1 within ``max(1e-3, 16 eps)`` of their dtype.
    - ``entropy``: the mean entropy, divided by that of equal weights on the allowed keys: 1 for equal
      weights, 0 if one key has all.
    - ``logit_scale``: the factor between q·k and the logits, divided by the expected one, ``scale``. It is
      found from the weights of the last query of the first sample, and only if they are a softmax of q·k
      times a number: not with a bias that is not in ``mask``, nor while all logits are nearly equal.

    A query that may attend to no key, such as padding, is left out, and so is one with a weight that is not
    finite. Sums are in fp64. Eager code on a CPU computes them in steps that are due, and reads the weights
    several times; a compiler fuses these reads, but does them in each step.

    It does nothing unless a `Taps` of that model lists the name of the row in its ``names``, or the call in
    its ``attention``, and the model is in training mode. There is no row of a gradient.

    Args:
        q: queries, ``(..., heads, queries, d)`` floating-point, as for
            ``torch.nn.functional.scaled_dot_product_attention``.
        k: keys, ``(..., heads, keys, d)``; each head of keys may belong to several of queries.
        name: the beginning of the row's name, such as ``blocks.3.attn``.
        scale: the factor of the logits; ``1 / sqrt(d)`` by default. A tensor is broadcast against the logits,
            ``(..., heads, queries, keys)``.
        max_scores: the largest logit of each query, ``(..., heads, queries)``, after scale and mask: the
            auxiliary output of `flex_attention`, or ``scores.amax(-1)``. A query without a key may have -inf
            or any other negative value of a mask.
        weights: the attention weights, ``(..., heads, queries, keys)``: what the softmax returns, before
            dropout.
        mask: of these weights, broadcastable to them, as ``attn_mask`` of
            ``torch.nn.functional.scaled_dot_product_attention``: bool, where True lets a query attend to a
            key, or floating-point and added to the logits, where -5000 and below exclude a key.
        is_causal: whether a query may attend only to keys up to its own position. With more keys than
            queries, as with a cache, the last query is at the last key.

    Raises:
        TypeError: if a tensor is not floating-point, or is on another device than the model's first
            parameter.
        ValueError: if the shapes do not fit, if the names of `Taps` have ``name``, or the other of the two
            rows, instead of the row that this call measures, or if its ``attention`` has the call, but
            ``weights`` are missing or have another number of heads.

    >>> import torch, gradiometer as gm
    >>> class Attention(torch.nn.Linear):
    ...     def forward(self, x):
    ...         q, k, v = super().forward(x).chunk(3, dim=-1)
    ...         gm.tap_attention(q, k, "attn")
    ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> model = Attention(4, 12)
    >>> taps = gm.Taps(model, names=["attn.max_logit_bound"])
    >>> _ = model(torch.randn(2, 5, 4))
    >>> taps.stats().materialize()["attn.max_logit_bound"].abs_max > 0.0
    True

    With weights:

    >>> class Attention(torch.nn.Linear):
    ...     def forward(self, x):
    ...         heads = super().forward(x).unflatten(-1, (2, 12)).transpose(1, 2)
    ...         q, k, v = heads.chunk(3, dim=-1)
    ...         weights = (q @ k.mT / 4**0.5).softmax(-1)
    ...         gm.tap_attention(q, k, "attn", weights=weights, is_causal=True)
    ...         return weights @ v
    >>> model = Attention(8, 24)
    >>> taps = gm.Taps(model, attention={"attn": 2})
    >>> _ = model(torch.randn(2, 5, 8))
    >>> report = taps.attention_stats().materialize()
    >>> report.names, report["attn.head0"].future_mass > 0.1
    (('attn.head0', 'attn.head1'), True)
    """
    if weights is not None:
        _tap_weights(q, k, name, scale, weights, mask, is_causal=is_causal)
    elif any([name in taps.heads and taps.is_due() for taps, _ in taps_of(name + FIRST_HEAD)]):
        msg = f"tap_attention: attention= of Taps has {name!r}, but this call has no weights; pass weights="
        raise ValueError(msg)
    row, other = (MAX_LOGIT_BOUND, MAX_LOGIT) if max_scores is None else (MAX_LOGIT, MAX_LOGIT_BOUND)
    found = _due("tap_attention", name, row, (name, name + other))
    if not found:
        return
    taps, _ = found[0]
    if max_scores is not None:
        _check(taps, max_scores, f"tap_attention: max_scores of {name!r}", least=1)
        if not max_scores.numel():
            return
        # a head without any key has only values of the mask, such as -inf
        top = max_scores.detach().amax(dim=-1).clamp(min=0.0)
    else:
        _check(taps, q, f"tap_attention: q of {name!r}", least=2)
        _check(taps, k, f"tap_attention: k of {name!r}", least=2)
        _check_heads(q, k, name)
        if not q.numel() or not k.numel():
            return
        top = _bound(q.detach(), k.detach(), scale)
    for each, place in found:
        each.measure(top, place, -1)


def _tap_weights(
    q: Tensor,
    k: Tensor,
    name: str,
    scale: float | Tensor | None,
    weights: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> None:
    """Measure the weights of each head."""
    found = [(taps, row) for taps, row in taps_of(name + FIRST_HEAD) if name in taps.heads and taps.is_due()]
    if not found:
        return
    taps, _ = found[0]
    for what, x in (("q", q), ("k", k), ("weights", weights)):
        _check(taps, x, f"tap_attention: {what} of {name!r}", least=2)
    _check_heads(q, k, name)
    shape = tuple(weights.shape)
    heads = int(shape[-3]) if len(shape) > 2 else 1
    if len(shape) != q.dim() or shape[-3:] != (*q.shape[-3:-1], k.shape[-2]):
        msg = f"tap_attention: weights of {name!r} have the shape {shape}, but queries {tuple(q.shape)} and "
        msg += f"keys {tuple(k.shape)}; pass (..., heads, queries, keys), not averaged over the heads"
        raise ValueError(msg)
    if any([each.heads[name] != heads for each, _ in found]):
        msg = (
            f"tap_attention: {name!r} has {heads} heads; pass that number as attention={{{name!r}: {heads}}} "
        )
        raise ValueError(msg + "to gm.Taps")
    if mask is not None:
        _check_mask(mask, weights, name)
    if not weights.numel():
        return
    columns = attention_columns(q, k, weights, mask, scale, is_causal=is_causal)
    for each, row in found:
        each.measure_rows(columns, row)


def _check_mask(mask: Tensor, weights: Tensor, name: str) -> None:
    what = f"tap_attention: mask of {name!r}"
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"{what} is {kind}; pass a bool tensor, True to attend, or a float tensor to add")
    if mask.device != weights.device:
        raise TypeError(f"{what} is on {mask.device}, but the weights on {weights.device}")
    sizes = zip(mask.shape[::-1], weights.shape[::-1], strict=False)
    if mask.dim() > weights.dim() or not all([a in {1, b} for a, b in sizes]):
        msg = f"{what} has the shape {tuple(mask.shape)}, which does not broadcast to that of the weights, "
        raise ValueError(msg + f"{tuple(weights.shape)}")


def tap_router(probs: Tensor, name: str, *, selected: Tensor | None = None) -> None:
    """Have a router's load of experts and its entropy measured.

    Call it in a mixture-of-experts layer, compiled or not. It writes two rows; neither has a gradient:

    - ``<name>.expert_load``: for each expert the share of the tokens that it gets. ``abs_max`` is that of the
      busiest, ``mean`` that of balanced experts, and ``zero_fraction`` the share of experts without a token.
      ``abs_max / mean - 1`` is known as MaxVio.
    - ``<name>.router_entropy``: for each token the entropy of its probabilities, divided by that of equal
      probabilities: 1 if the router does not prefer an expert, 0 if it is certain of one. ``mean`` is the
      mean over the tokens.

    It does nothing unless a `Taps` of that model lists both rows in its ``names``, and the model is in
    training mode.

    Args:
        probs: the probabilities of each token, ``(..., E)`` floating-point, before the selection; other
            scores of at least 0, such as sigmoids, are divided by their sum.
        name: the beginning of the rows' names, such as ``blocks.3.moe``.
        selected: the indices of the experts that each token is sent to, ``(...)`` or ``(..., k)`` of an
            integer dtype. An index outside of 0 to E - 1, as of a dropped token, does not count. By default,
            the load is the mean probability of each expert.

    Raises:
        TypeError: if a tensor has another dtype, or ``probs`` is on another device than the model's first
            parameter.
        ValueError: if the shapes do not fit, or if the names of `Taps` have ``name``, or one of the two rows
            alone.

    >>> import torch, gradiometer as gm
    >>> class Router(torch.nn.Linear):
    ...     def forward(self, x):
    ...         probs = super().forward(x).softmax(dim=-1)
    ...         weights, selected = probs.topk(2)
    ...         gm.tap_router(probs, "moe", selected=selected)
    ...         return weights, selected
    >>> model = Router(8, 4)
    >>> taps = gm.Taps(model, names=["moe.expert_load", "moe.router_entropy"])
    >>> _ = model(torch.randn(16, 8))
    >>> report = taps.stats().materialize()
    >>> report["moe.expert_load"].mean, report["moe.router_entropy"].numel
    (0.5, 16)
    """
    load_row, entropy_row = name + EXPERT_LOAD, name + ROUTER_ENTROPY
    for_load = _due("tap_router", name, EXPERT_LOAD, (name, entropy_row))
    for_entropy = _due("tap_router", name, ROUTER_ENTROPY, (load_row,))
    if not for_load or not for_entropy:
        return
    _check(for_load[0][0], probs, f"tap_router: probs of {name!r}", least=1)
    if not probs.numel():
        return
    # a number of the model: a graph is compiled for it
    experts = int(probs.shape[-1])
    tokens = probs.numel() // experts
    wide = probs.detach() if probs.dtype == torch.float64 else probs.detach().float()
    shares = wide / wide.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    entropy = torch.special.entr(shares).sum(dim=-1) / math.log(max(experts, 2))
    if selected is None:
        load = shares.reshape(-1, experts).mean(dim=0)
    else:
        _check_selected(selected, probs, name)
        chosen = selected.flatten().long()
        chosen = torch.where((chosen >= 0) & (chosen < experts), chosen, experts)
        counts = shares.new_zeros(experts + 1)
        load = counts.scatter_add(0, chosen, torch.ones_like(chosen, dtype=shares.dtype))[:experts] / tokens
    for found, values in ((for_load, load), (for_entropy, entropy)):
        for taps, place in found:
            taps.measure(values, place, -1)


def _due(call: str, name: str, row: str, wrong: tuple[str, ...]) -> list[tuple[Taps, int]]:
    """Return the taps that list a row of a call and may measure it now, and its place in each."""
    found = taps_of(name + row)
    if not found:
        for other in wrong:
            if any([taps.is_due() for taps, _ in taps_of(other)]):
                msg = f"{call}: the names of Taps have {other!r}, but this call measures {name + row!r}; "
                raise ValueError(msg + "add that name")
    return [(taps, place) for taps, place in found if taps.is_due()]


def _check(taps: Taps, x: object, what: str, *, least: int) -> None:
    taps.check(x, what)
    tensor: Tensor = x  # type: ignore[assignment]
    if tensor.is_complex():
        raise TypeError(f"{what} has the dtype {tensor.dtype}; pass floating-point numbers")
    if tensor.dim() < least:
        raise ValueError(f"{what} has the shape {tuple(tensor.shape)}; it needs at least {least} dimensions")


def _check_heads(q: Tensor, k: Tensor, name: str) -> None:
    fits = q.dim() == k.dim() and q.shape[-1] == k.shape[-1]
    if fits and q.dim() > 2:
        fits = k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] == 0
        fits = fits and all([a == b or 1 in {a, b} for a, b in zip(q.shape[:-3], k.shape[:-3], strict=True)])
    if not fits:
        msg = f"tap_attention: {name!r} has queries {tuple(q.shape)} and keys {tuple(k.shape)}; pass "
        raise ValueError(msg + "(..., heads, length, d) with the same d, and heads of q in multiples of k's")


def _check_selected(selected: object, probs: Tensor, name: str) -> None:
    what = f"tap_router: selected of {name!r}"
    if not isinstance(selected, torch.Tensor) or selected.dtype not in _INTEGERS:
        kind = selected.dtype if isinstance(selected, torch.Tensor) else type(selected).__name__
        raise TypeError(f"{what} is {kind}; pass the indices of experts as an integer tensor")
    tokens = probs.dim() - 1
    if selected.shape[:tokens] != probs.shape[:-1] or selected.dim() > probs.dim():
        msg = f"{what} has the shape {tuple(selected.shape)}, but probs {tuple(probs.shape)}; "
        raise ValueError(msg + "pass the indices of each token, (...) or (..., k) for probs of (..., E)")


# elements that eager code converts to fp64 at a time: 32 MiB
_MOST_CONVERTED: Final = 2**22

_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _bound(q: Tensor, k: Tensor, scale: float | Tensor | None) -> Tensor:
    """Return an upper bound of the magnitudes of logits of each head, ``(..., heads) float64``."""
    d = q.shape[-1]
    longest_q, longest_k = (_longest(x) for x in (q, k))
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        longest_k = longest_k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-1)
    if isinstance(scale, torch.Tensor):
        largest = scale.detach().double().abs()
        for _ in range(min(scale.dim(), 2)):
            largest = largest.amax(dim=-1)
        factor: float | Tensor = largest
    else:
        factor = abs(d**-0.5 if scale is None else scale)
    # Round up. With u = 2**-53, a sum of d squares loses at most (d - 1) u of its value in any order, and a
    # norm half of that and at most 4 u in its root: (d + 7) u for both norms. The squares are exact, or lose
    # 6 u with the scaling in fp64; three products lose 3 u, and 1 / sqrt(d) 2 u. That is (d + 18) u in all; a
    # factor of 1 + 2 n u makes up for n u.
    return longest_q * longest_k * factor * (1.0 + (d + 32) * 2.0**-52)


def _longest(x: Tensor) -> Tensor:
    """Return the largest norm of the vectors of each head. ``(..., length, d) -> (...) float64``."""
    pieces = [x]
    if not torch.compiler.is_compiling():
        # an eager conversion to fp64 takes memory, so convert a part at a time; a compiler fuses it
        pieces = list(x.split(max(1, _MOST_CONVERTED * x.shape[-2] // x.numel()), dim=-2))
    tops = [_norms(piece).amax(dim=-1) for piece in pieces]
    return tops[0] if len(tops) == 1 else torch.stack(tops).amax(dim=0)


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each vector, without overflow or underflow. ``(..., d) -> (...) float64``."""
    if x.dtype != torch.float64:
        # fp64 has the squares of all values of narrower dtypes
        x = x.float() if x.itemsize == 1 else x
        return _norm(x, dim=-1, dtype=torch.float64)
    top = _norm(x, math.inf, dim=-1, keepdim=True)
    top = torch.where((top > 0) & (top < math.inf), top, 1.0)
    return _norm(x / top, dim=-1) * top.squeeze(-1)


def _norm(x: Tensor, ord: float = 2, **options: Any) -> Tensor:  # noqa: A002 as in torch
    return torch.linalg.vector_norm(x, ord, **options)  # type: ignore[no-any-return]
