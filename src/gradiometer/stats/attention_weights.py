"""The columns of attention weights: the mass on excluded keys, sums, entropy and the scale of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor


# A float mask excludes a key from here down: exp of it is 0 in every dtype, whatever is added to logits of a
# few thousands. The -10,000 of BERT is -9,984 in bf16.
EXCLUDED: Final = -5000.0
# A sum of weights may differ from 1 by this, and by this multiple of the dtype's eps: rounded weights that
# sum to 1 are off by eps / 2 at most, and a softmax of the user's own by some times that
_OFF, _OFF_EPS = 1e-3, 16.0
# the least standard deviation of logits from which their scale is found, likewise; and the share of the
# variance of the logarithms of weights that it has to explain
_SPREAD, _SPREAD_EPS, _EXPLAINED = 1e-2, 16.0, 0.99
# the least number of allowed weights on later keys, and the share of it that as many weights on earlier keys
# reach under a causal mask: as many without dropout. Weights that underflow to 0, as in float16, leave about
# one key to a query.
_LATER, _EARLIER = 8, 0.5


def attention_columns(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    scale: float | Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    """Return the raw columns of each head, ``(heads, C) float64`` in the order of `ATTENTION`.

    The shapes are those of `gradiometer.tap_attention`, where they were checked.
    """
    w = weights.detach()
    w = w.unsqueeze(0) if w.dim() == 2 else w
    eps = torch.finfo(w.dtype).eps
    w = w.float() if w.itemsize < 4 else w
    heads, queries, keys = w.shape[-3:]
    masked, (earlier, later) = _masked(mask), _sides(queries, keys, w.device)
    future = later if is_causal else None
    excluded = masked if future is None else future if masked is None else masked | future
    total = _sum(w)
    if excluded is None:
        kept, allowed = w, torch.full((1, 1), keys, dtype=torch.float64, device=w.device)
    else:
        kept = torch.where(excluded, 0.0, w)
        # a mask may be (..., 1) or a number
        allowed = excluded.expand(torch.broadcast_shapes(excluded.shape, (1, keys))).logical_not()
        allowed = allowed.sum(-1, dtype=torch.float64)
    kept = kept.clamp(min=0.0)
    counted = (allowed > 0) & (total.abs() < torch.inf)
    has_choice = counted & (allowed > 1)
    sums = _sum(kept)
    # -Σ p log p of p = w / s is log s - Σ w log w / s
    entropy = sums.log() - _sum(torch.xlogy(kept, kept)) / sums
    # no weight at all is no choice of a key
    has_choice = has_choice & (sums > 0)
    share = (entropy / allowed.clamp(min=2.0).log()).clamp(0.0, 1.0)
    nothing = torch.zeros_like(total)
    leaks = [nothing if x is None else _sum(torch.where(x, w.abs(), 0.0)) for x in (masked, future)]
    zeros = w == 0 if excluded is None else (w == 0) & excluded.logical_not()
    found, ratio, expected = _scale(q, k, weights, mask, excluded, scale, eps)
    if is_causal:
        sides = [nothing] * 3
    else:
        open_keys = later if masked is None else later & masked.logical_not()
        used = w != 0 if masked is None else (w != 0) & masked.logical_not()
        sides = [_sum(open_keys), _sum(used & later), _sum(used & earlier)]
    is_off = (total - 1.0).abs() > max(_OFF, _OFF_EPS * eps)
    per_query = [
        counted,
        counted & is_off,
        has_choice,
        torch.where(counted, _sum(zeros), 0.0),
        torch.where(counted, total, 0.0),
        *[torch.where(counted, x, 0.0) for x in leaks],
        torch.where(has_choice, share, 0.0),
        *[torch.where(counted, x, 0.0) for x in sides],
    ]
    # of all heads, queries last
    by_head = [x.double().expand_as(total).movedim(-2, 0).reshape(heads, -1) for x in per_query]
    n_queries, n_off, n_choices, n_zero, total, *rest = [x.sum(dim=1) for x in by_head]
    *leaked, share, n_open, n_later, n_earlier = rest
    two_way = n_open >= _LATER
    one_way = two_way & (n_later == 0) & (n_earlier >= _EARLIER * n_open)
    # a mask of padding alone, with one row for all queries, does not tell that later keys are meant
    has_rows = mask is not None and mask.dim() > 1 and mask.shape[-2] == queries
    directions = [x.double() for x in (two_way, one_way, one_way & has_rows)]
    numel = torch.full_like(n_queries, w.numel() // heads)
    # of masked and later keys, and of the sum
    tops = [by_head[i].amax(dim=1) for i in (5, 6, 4)]
    counts = numel, n_queries, n_off, n_choices, n_zero, found.double(), *directions
    return torch.stack(
        [*counts, total, *leaked, share, ratio, *tops[:2], tops[2].clamp(min=0.0), expected], dim=1
    )


def _masked(mask: Tensor | None) -> Tensor | None:
    """Return which keys a mask excludes, of its shape."""
    if mask is None:
        return None
    mask = mask.detach()
    return mask.logical_not() if mask.dtype == torch.bool else mask <= EXCLUDED


def _sides(queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which keys come before and after each query, ``(queries, keys)``; the last is at the end."""
    places = (torch.arange(queries, device=device) + max(keys - queries, 0)).unsqueeze(1)
    of_keys = torch.arange(keys, device=device)
    return of_keys < places, of_keys > places


def _sum(x: Tensor) -> Tensor:
    return x.sum(dim=-1, dtype=torch.float64)


def _scale(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    excluded: Tensor | None,
    scale: float | Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for which heads the scale of the logits was found, its ratio to the expected one, and that.

    ``(heads,)`` each, with 0 where it was not found. In one query of each head, the last of the first sample,
    the logarithms of the weights are a constant plus the logits, which are q·k times the scale plus the mask.
    The ratio is the slope of a line through the first against q·k times the expected scale, by least squares
    with the weights as weights. A head whose logits are nearly equal, or on no line because of a bias that is
    not in the mask, has none.
    """
    shape = weights.shape

    def of_query(x: Tensor, *, wide: bool = True) -> Tensor:
        # (heads, keys) of what broadcasts against the weights
        found = x.detach().expand(shape)[(0,) * max(len(shape) - 3, 0)][..., -1, :]
        found = found if len(shape) > 2 else found.unsqueeze(0)
        return found.double() if wide else found

    first = (0,) * max(q.dim() - 3, 0)
    query, key = (x.detach()[first] if x.dim() > 2 else x.detach().unsqueeze(0) for x in (q, k))
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).double()
    x = (query[:, -1:].double() * key).sum(dim=-1)
    if isinstance(scale, torch.Tensor):
        factor = of_query(scale) if scale.dim() else scale.detach().to(x.device, torch.float64)
    else:
        factor = torch.ones_like(x) * (q.shape[-1] ** -0.5 if scale is None else scale)
    x = x * factor
    p = of_query(weights)
    y = p.log()
    if mask is not None and mask.dtype != torch.bool:
        y = y - of_query(mask)
    valid = (p > 0) & (x.abs() < torch.inf) & (y.abs() < torch.inf)
    if excluded is not None:
        valid = valid & of_query(excluded, wide=False).logical_not()
    p, x, y = (torch.where(valid, part, 0.0) for part in (p, x, y))
    p = p / p.sum(dim=1, keepdim=True)
    x, y = ((part - (p * part).sum(dim=1, keepdim=True)) for part in (x, y))
    xx, xy, yy = ((p * part).sum(dim=1) for part in (x * x, x * y, y * y))
    least = max(_SPREAD, _SPREAD_EPS * eps) ** 2
    # at least three keys: a line goes through any two
    found = (xx > least) & (yy > least) & (xy * xy > _EXPLAINED * xx * yy) & (valid.sum(dim=1) > 2)
    expected = factor.abs().expand_as(p).amax(dim=1)
    return found, torch.where(found, xy / xx, 0.0), torch.where(found, expected, 0.0)
