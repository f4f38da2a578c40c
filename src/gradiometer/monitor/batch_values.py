"""Reduce the inputs, logits and gradients of a batch to a few scalars on their device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# elements of the gradient of logits that are read, of whole examples; at least one example
_READ: Final = 2**26
# elements of logits that are copied, of inputs that are hashed, and of examples that are compared
_SOME: Final = 2**18
_HASHED: Final = 2**16
_COMPARED: Final = 2**12
# elements of the gradient that are read across its rows, which takes longer
_STRIDED: Final = 2**18
# integers that a float64 holds exactly
_EXACT: Final = 2**52
# at least this share of a row's magnitude is that of the label; 0.5 for a cross entropy
_DOMINATES: Final = 0.45
# the magnitude of a row, of the largest one, from which on its label must be clear
_CLEAR: Final = 1e-3
# the share of padding that is at the ends of rows
_AT_ENDS: Final = 0.9
# input tokens are followed by labels in the position after, if so many are
_IS_NEXT: Final = 0.9
# an input is the labels, if so many are equal
_IS_SAME: Final = 0.98
_INTEGERS: Final = {torch.int64, torch.int32}
# names of inputs that are no tokens, that may be labels or inputs of a decoder, and that are of an encoder
_NO_TOKENS: Final = re.compile(r"label|mask|allow|posi|segment|type|len|cache")
_TARGETS: Final = re.compile(r"target|tgt|trg|answer|gold|^ys?$")
_SOURCES: Final = re.compile(r"src|source|enc")
_MASKS: Final = re.compile(r"mask|allow|attend|pad")


def tensors_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors among arguments, and in the mappings and sequences among them, by name."""
    for name, value in values.items():
        if type(value) is Tensor:
            yield name, value
        elif isinstance(value, dict):
            yield from ((str(key), x) for key, x in value.items() if type(x) is Tensor)
        elif isinstance(value, (list, tuple)):
            yield from ((name, x) for x in value if type(x) is Tensor)


@dataclass(eq=False)
class Batch:
    """The inputs of a forward pass and some of its logits, until their gradient is there.

    Attributes:
        shape: of the logits: ``(rows, length, C)`` with tokens, otherwise ``(rows, C)``.
        tokens: the inputs that have a token for each position, ``(rows, length)``; at most two.
        target: another one, from its name the labels or the input of a decoder; None without.
        is_translation: whether there is an encoder, from the names of its inputs.
        masked: another such input, of the encoder, and the mask of either, ``(rows, positions) bool``, True
            where attention is allowed; None without.
        padding: the tokens that embeddings take for padding.
        hashed: a hash of the inputs.
        equal: the share of examples that are equal to the first one.
        places: the positions of `some`, among all of them.
        some: the logits there, ``(K, C) float32``.
    """

    shape: tuple[int, ...]
    tokens: list[Tensor]
    target: Tensor | None
    is_translation: bool
    masked: tuple[Tensor, Tensor] | None
    padding: int | None
    hashed: Tensor
    equal: Tensor
    places: Tensor
    some: Tensor
    versions: list[int]

    def is_as_it_was(self) -> bool:
        """Return whether nothing has written the tokens since the forward pass."""
        return [x._version for x in _kept(self.tokens, self.target)] == self.versions  # noqa: SLF001


def batch_of(inputs: Mapping[str, Any], logits: Tensor, padding: int | None, prefix: str = "") -> Batch:
    """Return what is needed of a forward pass, without references to large tensors.

    ``prefix``: how the names begin of inputs that the labels may be compared with.
    """
    named = [
        (name, x)
        for name, x in tensors_in(inputs)
        if x.device == logits.device and x.layout == torch.strided and not x.is_nested
    ]
    integers = [
        (name, x)
        for name, x in named
        if x.dtype in _INTEGERS and x.dim() == 2 and x.shape[1] > 1 and not _NO_TOKENS.search(name)
    ]
    shape = tuple(logits.shape)
    count, classes = logits.shape[:-1].numel(), shape[-1]
    fit = [
        (name, x)
        for name, x in integers
        if x.numel() == count and (len(shape) == 2 or x.shape == shape[:-1]) and name.startswith(prefix)
    ]
    tokens = [x for name, x in fit if not _TARGETS.search(name)][-2:]
    targets = [x for name, x in fit if _TARGETS.search(name)]
    is_translation = not tokens or any(_SOURCES.search(name) for name, _ in integers)
    tokens, target = tokens or targets[-1:], targets[-1] if targets else None
    if tokens:
        shape = (*tokens[-1].shape, classes)
        tokens = [x for x in tokens if x.shape == shape[:-1]]
        target = target if target is not None and target.shape == shape[:-1] else None
    keep = kept_rows(shape)
    read = logits.detach()[: keep * (shape[1] if len(shape) > logits.dim() else 1)]
    rows = read.shape[:-1].numel()
    k = min(rows, max(8, _SOME // classes))
    places = torch.arange(k, device=logits.device) * rows // k
    return Batch(
        shape,
        tokens,
        target,
        is_translation,
        _masked([x for _, x in integers], named),
        padding,
        _hash([x for _, x in named], logits.device),
        _equal_rows(
            tokens[-1:] or [x for _, x in named if x.dim() > 1 and len(x) == shape[0]], logits.device
        ),
        places,
        read.reshape(-1, classes).index_select(0, places).float(),
        [x._version for x in _kept(tokens, target)],  # noqa: SLF001
    )


def _kept(tokens: list[Tensor], target: Tensor | None) -> list[Tensor]:
    return tokens if target is None else [*tokens, target]


def kept_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows of a gradient are read."""
    return max(1, _READ // max(1, torch.Size(shape[1:]).numel()))


def measured(batch: Batch, grad: Tensor) -> Tensor:
    """Return the values of a `BatchLook` from ``positions`` on, ``(K,) float64``."""
    shape, tokens = batch.shape, batch.tokens
    grad = grad.detach()
    if grad.dim() < len(shape):
        grad = grad.unflatten(0, shape[:-1])
    grad = grad[: kept_rows(shape)]
    least, labels = grad.min(-1)
    size = _sizes(grad, -1)
    counted = size > 0
    known = counted & (least < 0) & (-least.float() >= _DOMINATES * size)
    n = known.sum()
    nan = torch.full((), torch.nan, device=grad.device)
    # where the model is certain, rounding decides about the rest
    is_clear = size >= _CLEAR * size.max()
    labelled = (known & is_clear).sum() / is_clear.sum()
    found = [torch.full_like(nan, counted.numel()), counted.sum(), labelled, batch.hashed]
    found += [_mixed(torch.where(known, labels + 1, 0)), batch.equal, _untransposed(grad)]
    if tokens:
        found += [
            *_offsets(batch, labels, known),
            *_of_tokens(tokens[-1][: len(labels)], labels, known, batch),
        ]
    else:
        count, label, _ = _mode(labels, known)
        padded = [nan] * 3 if labels.dim() == 1 else _of_padding(labels, known, batch, None)
        found += [nan] * 4 + padded + [nan] * 5 + [label, count / n]
    found += [nan] * 3 if batch.masked is None else _of_mask(*batch.masked)
    found += _of_logits(batch, grad, labels, known)
    return torch.stack([x.double() for x in found])


def _offsets(batch: Batch, labels: Tensor, known: Tensor) -> Tensor:
    """Return the shares of labels that are the tokens at the offsets -1, 0, 1 and 2."""

    def of(ids: Tensor) -> Tensor:
        ids = ids[: len(labels)]
        shares = torch.stack([_at(ids, labels, known, k) for k in (-1, 0, 1, 2)])
        # positions may be the first dimension
        shares[2] = shares[2].fmax(_at(ids.T, labels.T, known.T, 1))
        return shares

    found = of(batch.tokens[-1])
    if len(batch.tokens) > 1:
        # that of a decoder is the last one, unless it is the labels
        other = of(batch.tokens[0])
        found = torch.where(other[2] >= _IS_NEXT, other, found)
    if batch.target is not None:
        target, unseen = of(batch.target), found.clone()
        if batch.is_translation:
            # a model may shift them itself, and an autoencoder has them in its encoder
            unseen[:2] = torch.nan
        found = torch.where(target[1] >= _IS_SAME, unseen, target)
    return found


def _of_tokens(ids: Tensor, labels: Tensor, known: Tensor, batch: Batch) -> list[Tensor]:
    n = known.sum()
    ends = _ends(ids == ids[:, -1:], from_end=True) | _ends(ids == ids[:, :1], from_end=False)
    count, token, distinct = _mode(ids, ~ends)
    largest = torch.where(ends | (ids == token), -1, ids).max()
    label_count, label, _ = _mode(labels, known)
    inner = (~ends).sum()
    as_label = (known & (labels == token)).sum() / n
    return [
        *_of_padding(labels, known, batch, ids),
        token, count / inner, as_label, distinct, largest, label, label_count / n,
    ]  # fmt: skip


def _of_padding(labels: Tensor, known: Tensor, batch: Batch, ids: Tensor | None) -> list[Tensor]:
    """Return whether padding is known, its share of the counted positions, and the token."""
    n = known.sum()
    pad = torch.full_like(n, -1 if batch.padding is None else batch.padding)
    if batch.padding is None and batch.masked is not None:
        pad = _only(*batch.masked)
    both = is_pad = known & (labels == pad)
    if ids is None:
        # without its input, a token is padding after padding: the first one may end a text
        run, both = is_pad | ~known, is_pad.clone()
        both[:, 1:] &= is_pad[:, :-1]
        both[:, 0] = False
    else:
        run = is_pad = ids == pad
        both = both & is_pad
    at_end = _ends(run, from_end=True, least=1) | _ends(run, from_end=False, least=1)
    # a token that is mostly inside of rows is no padding
    is_at_ends = (is_pad & at_end).sum() >= _AT_ENDS * is_pad.sum()
    return [pad >= 0, (both & at_end & is_at_ends).sum() / n, pad]


def _at(ids: Tensor, labels: Tensor, known: Tensor, offset: int) -> Tensor:
    """Return the share of labels that are the token at an offset."""
    length = ids.shape[1]
    here = slice(max(0, -offset), length - max(0, offset))
    there = slice(max(0, offset), length - max(0, -offset))
    is_known = known[:, here]
    return ((labels[:, here] == ids[:, there]) & is_known).sum() / is_known.sum()


def _ends(is_run: Tensor, *, from_end: bool, least: int = 2) -> Tensor:
    """Return where rows of a mask are True up to their ends, for at least so many positions."""
    run = (is_run.flip(1) if from_end else is_run).to(torch.uint8).cummin(1).values
    run = run.flip(1) if from_end else run
    return run.bool() & (run.sum(1, keepdim=True) >= least)


def _mode(values: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count of the most frequent of some integers, that one, and how many different ones are."""
    ordered = torch.where(which, values.long(), -1).flatten().sort().values
    place = torch.arange(len(ordered), device=ordered.device)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    run = place - torch.where(is_new, place, 0).cummax(0).values + 1
    count, at = torch.where(ordered >= 0, run, 0).max(0)
    return count, ordered.index_select(0, at.reshape(1)).reshape(()), (is_new & (ordered >= 0)).sum()


def _masked(integers: list[Tensor], named: list[tuple[str, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Return tokens and the mask of them that the model gets, True for tokens that it may see."""
    for name, mask in named:
        is_mask = mask.dtype == torch.bool or _MASKS.search(name) is not None
        ids = next((x for x in integers if x.shape == mask.shape), None)
        if is_mask and ids is not None:
            seen = mask != 0 if mask.dtype == torch.bool or not mask.is_floating_point() else mask > 0
            # torch.nn.Transformer has True for padding
            return ids, ~seen if "key_padding" in name else seen
    return None


def _only(ids: Tensor, seen: Tensor) -> Tensor:
    """Return the token that all masked positions have; -1 if there is none, or if others have it, too."""
    token = torch.where(seen, -1, ids).max()
    is_only = (~seen & (ids != token)).any().logical_not() & (token >= 0) & ((ids == token) == ~seen).all()
    return torch.where(is_only, token, -1)


def _of_mask(ids: Tensor, seen: Tensor) -> list[Tensor]:
    token = _only(ids, seen)
    at_ends = _ends(~seen, from_end=True, least=1) | _ends(~seen, from_end=False, least=1)
    inside = (~seen & ~at_ends).sum() / (~seen).sum()
    run = _ends((ids == ids[:, -1:]) & seen, from_end=True)
    which, last = run[:, -1], ids[:, -1]
    lowest = torch.where(which, last, torch.iinfo(ids.dtype).max).min()
    is_one = lowest == torch.where(which, last, -1).max()
    return [torch.where(token >= 0, inside, 0.0), token, torch.where(is_one, which.double().mean(), 0.0)]


def _of_logits(batch: Batch, grad: Tensor, labels: Tensor, known: Tensor) -> list[Tensor]:
    """Return the loss of some logits, that of random labels, the residual, and which are probabilities."""
    places, z = batch.places, batch.some
    label = labels.reshape(-1).index_select(0, places)[:, None]
    is_known = known.reshape(-1).index_select(0, places)
    g = grad.reshape(-1, grad.shape[-1]).index_select(0, places).float()
    total = z.logsumexp(-1)
    p = (z - total[:, None]).exp()
    p_label, g_label, z_label = p.gather(1, label)[:, 0], g.gather(1, label)[:, 0], z.gather(1, label)[:, 0]
    # the gradient of a cross entropy is a multiple of p, minus 1 at the label
    left = (1 - p_label).clamp(min=1e-6)
    g = g * (left / -g_label)[:, None]
    away = (g - p).abs().sum(1) - (p_label + left).abs() + (1 - p_label - left).abs()
    count = is_known.sum()
    sums = [torch.where(is_known, x, 0.0).sum() for x in (total - z_label, total - z.mean(1), away, 2 * left)]
    are = (z.min(1).values >= 0) & ((z.sum(1) - 1).abs() < 0.01)
    return [sums[0] / count, sums[1] / count, sums[2] / sums[3], are.double().mean()]


def _untransposed(grad: Tensor) -> Tensor:
    """Return the share of columns with one dominating negative element, in the shape of the transposed."""
    keep = _STRIDED // max(1, torch.Size(grad.shape[1:]).numel())
    if grad.dim() < 3 or grad.shape[1] == 1 or not keep:
        return torch.zeros((), device=grad.device)
    grad = grad[:keep]
    columns = grad.reshape(len(grad), grad.shape[2], grad.shape[1])
    least = columns.amin(1).float()
    size = _sizes(columns, 1)
    is_label = (least < 0) & (-least >= _DOMINATES * size)
    share: Tensor = is_label.sum() / (size > 0).sum()
    return share


def _sizes(grad: Tensor, dim: int) -> Tensor:
    """Return the sums of magnitudes along a dimension, at least in float32."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    sizes: Tensor = torch.linalg.vector_norm(grad, 1, dim, dtype=dtype)
    return sizes


def _equal_rows(inputs: list[Tensor], device: torch.device) -> Tensor:
    """Return the share of rows of an input that are equal to the first one, from some of their elements."""
    if not inputs or len(inputs[0]) < 2:
        return torch.zeros((), device=device)
    flat = inputs[0].detach().flatten(1)
    some = flat[:, :: -(-flat.shape[1] // _COMPARED) or 1]
    return (some[1:] == some[:1]).all(1).double().mean()


def _hash(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return a hash of the contents of tensors, an exact integer."""
    parts = []
    for x in tensors:
        flat = x.detach().reshape(-1)[:: -(-x.numel() // _HASHED) or 1]
        if flat.is_floating_point():
            flat = flat.float().view(torch.int32)
        elif flat.is_complex():
            continue
        parts.append(_mixed(flat))
    return torch.stack(parts).sum(0) if parts else torch.zeros((), device=device)


def _mixed(values: Tensor) -> Tensor:
    """Return a hash of integers in their order."""
    x = values.reshape(-1).long()
    # a product with odd numbers that differ by place; it wraps around
    place = torch.arange(len(x), device=x.device) * 2654435761 + 97
    x = (x + 0x9E3779B9) * (place * 2 + 1)
    x = (x ^ (x >> 29)) * 0xBF58476D
    return (x.sum() & (_EXACT // 8 - 1)).double()
