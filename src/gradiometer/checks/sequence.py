"""Contracts of sequences: what a position, a masked token or another example may change."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from gradiometer.checks.contract import contract
from gradiometer.checks.report import Evidence, NotApplicable, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeGuard

    from gradiometer.checks.batch import Stream
    from gradiometer.checks.probe import Probe

CAUSAL: Final = (
    "set the scores of later positions to -inf before the softmax in every layer, and do not normalize "
    "or mix over positions"
)
ENCODER: Final = "attend to all tokens except padding: do not use a causal mask in an encoder"
MASK: Final = (
    "set the scores of masked keys (not queries) to -inf, pass the mask to every layer, and check "
    "whether 1 or True means kept or masked"
)
EXAMPLES: Final = (
    "check batch_first, reshapes that mix the first two dimensions, and norms or softmaxes over dimension 0"
)
WHOLE: Final = "let each position of the decoder attend to the whole output of the encoder"
# positions that are tried
_MOST: Final = 6


@contract("behaviour", "later tokens do not change earlier outputs")
def causal(probe: Probe) -> Iterator[Evidence]:
    """Change all tokens after a position, and compare the outputs up to it, at several positions."""
    stream = _aligned(probe)
    if not probe.is_causal:
        raise NotApplicable(
            "the model is not known to be causal; pass causal=True if it is"
            if probe.is_causal is None
            else "the model is not causal"
        )
    kept = probe.kept(stream)
    # without padding a layer may be told to mask later positions itself
    masks: list[dict[str, Tensor]] = [{}]
    if stream.mask is not None and not bool(kept.all()):
        masks.append({stream.mask: probe.batch.as_mask(stream.mask, torch.ones_like(kept))})
    for mask, cut in itertools.product(masks, _places(stream.length - 1)):
        later = torch.arange(stream.length, device=kept.device) > cut
        before = probe.output(mask) if mask else probe.reference
        output = probe.output(mask | {stream.name: probe.changed(stream, later.expand_as(kept))})
        change = _by_token(probe, output, kept & ~later, before)
        if float(change.max()) > probe.tolerance:
            row, place = _argmax(change)
            source, size = _cause(probe, stream, mask, row, place, cut)
            text = f"token {source} changes the output of token {place} by {percent(size)}"
            yield Evidence(text, value=size, threshold=probe.tolerance, advice=CAUSAL)
            return


@contract("behaviour", "outputs depend on later tokens as well as on earlier ones")
def bidirectional(probe: Probe) -> Iterator[Evidence]:
    """Change the last token, and look at earlier outputs; then the first one, and later outputs."""
    if probe.is_encoder_decoder and probe.is_causal:
        yield from _reads_source(probe)
        return
    stream = _aligned(probe)
    if probe.is_causal is not False:
        raise NotApplicable(
            "the model is causal" if probe.is_causal else "pass causal=False if the model is an encoder"
        )
    kept = probe.kept(stream)
    last = torch.arange(stream.length, device=kept.device) == (kept.sum(1, keepdim=True) - 1)
    if int(kept.sum(1).max()) < 2:
        raise NotApplicable("no example has two tokens")
    for where, word, others in (
        (last, "last", "earlier"),
        (last.flip(1) & False | _first(kept), "first", "later"),
    ):
        output = probe.output({stream.name: probe.changed(stream, where)})
        change = _by_token(probe, output, kept & ~where)
        if float(change.max()) <= probe.least:
            yield Evidence(
                f"the {word} token changes no output of {others} tokens",
                value=float(change.max()),
                threshold=probe.least,
                advice=ENCODER,
            )


def _reads_source(probe: Probe) -> Iterator[Evidence]:
    sources = [x for x in probe.streams[:-1] if x.is_sequence or not x.is_tokens]
    if not sources or probe.aligned is None:
        raise NotApplicable("the inputs of the encoder are not known")
    for stream in sources:
        kept = probe.kept(stream)
        last = torch.arange(kept.shape[1], device=kept.device) == (kept.sum(1, keepdim=True) - 1)
        where = last if stream.is_sequence else torch.ones(len(kept), dtype=torch.bool, device=kept.device)
        output = probe.output({stream.name: probe.changed(stream, where)})
        change = probe.differences(output, probe.reference)[:, 0].flatten(1).amax(1)
        if float(change.max()) <= probe.least:
            what = f"the last token of {stream.name}" if stream.is_sequence else stream.name
            yield Evidence(
                f"{what} does not change the first output of the decoder",
                value=float(change.max()),
                threshold=probe.least,
                advice=WHOLE,
            )
            return
        yield from _reads_memory(probe, stream)


def _reads_memory(probe: Probe, stream: Stream) -> Iterator[Evidence]:
    """Call each layer that has two inputs with another last vector of the encoder's output."""
    aligned = probe.aligned
    assert aligned is not None  # noqa: S101 the caller looks
    for module, (args, kwargs, output) in probe.captured(probe.names).items():
        first = output[0] if isinstance(output, tuple) and output else output
        inputs = [v for v in [*args, *kwargs.values()] if isinstance(v, Tensor)]
        x = next((v for v in inputs if _is_vectors(v, aligned.tensor.shape)), None)
        memory = next((v for v in inputs if v is not x and _is_memory(v, stream)), None)
        if x is None or memory is None or torch.equal(x, memory) or not _is_vectors(first, x.shape[:2]):
            continue
        kept = probe.kept(stream) if stream.is_tokens else memory.new_ones(memory.shape[:2], dtype=torch.bool)
        last = torch.arange(kept.shape[1], device=kept.device) == (kept.sum(1, keepdim=True) - 1)
        found = list(_encodes(probe, stream, module, memory, kept & ~last))
        if found:
            yield from found
            return
        other = torch.where(last[..., None], -memory + memory.std(), memory)
        swapped = [other if v is memory else v for v in args]
        named = {key: other if v is memory else v for key, v in kwargs.items()}
        after = probe.call(module, tuple(swapped), named)
        after = after[0] if isinstance(after, tuple) else after
        if not _is_vectors(after, first.shape):
            continue
        change = float((after - first)[:, 0].abs().max())
        if change <= probe.least * float(first.abs().max()):
            text = f"{probe.names[module]}: the last output of the encoder does not change the first position"
            yield Evidence(text, name=probe.names[module], value=change, advice=WHOLE)
            return


def _encodes(
    probe: Probe, stream: Stream, module: nn.Module, memory: Tensor, earlier: Tensor
) -> Iterator[Evidence]:
    """Change the last token of the source, and then the first, and look at the outputs of the encoder."""
    x = stream.tensor
    kept = probe.kept(stream) if stream.is_tokens else None
    # frames are the dimension that the encoder reads, by a stride
    frames = 1 if x.shape[1] % memory.shape[1] == 0 and x.shape[1] > x.shape[-1] else 2
    # a convolution mixes neighbors
    count = int(earlier.sum(1).min()) // 2
    changes = []
    for is_last in (True, False):
        if kept is not None:
            end = (
                kept.sum(1, keepdim=True) - 1 if is_last else torch.zeros_like(kept[:, :1], dtype=torch.long)
            )
            changed = probe.changed(stream, torch.arange(kept.shape[1], device=kept.device) == end)
        else:
            changed = x.clone()
            part = changed.narrow(frames, x.shape[frames] - 1 if is_last else 0, 1)
            part.copy_(-part + x.std())
        args, kwargs, _ = probe.captured([module], {stream.name: changed})[module]
        after = next(
            v for v in [*args, *kwargs.values()] if isinstance(v, Tensor) and v.shape == memory.shape
        )
        change = (after - memory).abs()
        rest = change[:, :count] if is_last else change[:, -count:]
        changes.append(float(rest.max()) / float(memory.abs().max()) if count else 0.0)
    # one that mixes no tokens sees neither
    if changes[0] <= probe.least < changes[1]:
        text = f"the last token of {stream.name} does not change the first {count} outputs of the encoder"
        yield Evidence(text, value=changes[0], threshold=probe.least, advice=ENCODER)


@contract("behaviour", "masked and padded tokens do not change other outputs")
def padding(probe: Probe) -> Iterator[Evidence]:
    """Change masked tokens, also with a mask that hides the first tokens; then append masked tokens."""
    streams = [x for x in probe.streams if x.is_sequence and x.mask]
    if not streams:
        raise NotApplicable("the batch has no mask of tokens, such as attention_mask")
    for stream in streams:
        name = stream.mask
        assert name is not None  # noqa: S101 chosen above
        kept = probe.kept(stream)
        tried = []
        aligned = probe.aligned
        places = torch.arange(stream.length, device=kept.device)
        count = max(1, stream.length // 4)
        if not probe.is_encoder_decoder and aligned is None:
            # the output may be that of the first token or of the last one that is not padding
            middle = int(kept.sum(1).min()) // 2
            # with more outputs than tokens, as behind a prompt that is trained, one is that of the token
            has_more = probe.reference.dim() > 2 and probe.reference.shape[1] > stream.length
            if 0 < middle < stream.length - 1 and not has_more:
                tried.append((f"token {middle}, masked,", kept & (places != middle)))
        elif not bool(kept.all()):
            tried.append(("masked tokens", kept))
        if stream.length > 2 and aligned is not None:
            # the other side, too: behind a causal mask, later tokens tell nothing
            tried += [(f"the first {count} tokens, masked,", kept & (places >= count))]
            if bool(kept.all()):
                tried += [(f"the last {count} tokens, masked,", kept & (places < stream.length - count))]
        for what, mask in tried:
            if not bool(mask.any(1).all()):
                continue
            yield from _ignores(probe, stream, name, mask, what)
        yield from _ignores_more(probe, stream, name)


def _ignores(probe: Probe, stream: Stream, name: str, kept: Tensor, what: str) -> Iterator[Evidence]:
    mask = {name: probe.batch.as_mask(name, kept)}
    other = mask | {stream.name: probe.changed(stream, ~kept)}
    before, after, tolerance = _outputs(probe, mask, other)
    change = _where_kept(probe, stream, probe.differences(after, before), kept)
    size = float(change.max()) if change.numel() else 0.0
    if size > tolerance:
        text = f"{what} of {stream.name} change other outputs by {percent(size)}"
        yield Evidence(text, value=size, threshold=tolerance, advice=MASK)


def _outputs(
    probe: Probe, first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, same_shapes: bool = True
) -> tuple[Tensor, Tensor, float]:
    """Return the outputs for two batches, and by how much they may differ."""
    before, after = probe.output(first), probe.output(second)
    tolerance = probe.tolerance if same_shapes else probe.tolerance_of_shapes
    if not bool(after.isfinite().all()):
        # where a model takes the least number of one dtype for -inf in another
        with probe.in_own_dtype():
            before, after = probe.output(first), probe.output(second)
            tolerance = max(tolerance, 100 * torch.finfo(probe.dtype).eps)
    return before, after, tolerance


def _ignores_more(probe: Probe, stream: Stream, name: str) -> Iterator[Evidence]:
    """Append masked tokens."""
    kept = probe.kept(stream)
    aligned = probe.aligned
    # other inputs of these positions would have to grow, too
    fixed = [n for n, x in probe.batch.tensors.items() if n not in {stream.name, name, probe.batch.labels}]
    if any(probe.batch.tensors[n].shape[1:2] == kept.shape[1:] for n in fixed) or not stream.is_tokens:
        return
    more = 2
    x = torch.cat([stream.tensor, stream.tensor[:, :more]], 1)
    wider = torch.cat([kept, torch.zeros_like(kept[:, :more])], 1)
    changes = {stream.name: x, name: probe.batch.as_mask(name, wider)}
    if probe.batch.labels is not None and aligned is not None and aligned.name == stream.name:
        labels = probe.batch.tensors[probe.batch.labels]
        if labels.shape[:2] == kept.shape:
            changes[probe.batch.labels] = torch.cat([labels, labels[:, :more]], 1)
    try:
        before, output, tolerance = _outputs(probe, {}, changes, same_shapes=False)
    except NotApplicable:
        # a model for sequences of one length
        return
    if aligned is not None and aligned.name == stream.name:
        output = output[:, : stream.length]
    if output.shape != before.shape:
        return
    change = _where_kept(probe, stream, probe.differences(output, before), kept)
    size = float(change.max()) if change.numel() else 0.0
    if size > tolerance:
        text = (
            f"{more} more masked tokens at the end of {stream.name} change other outputs by {percent(size)}"
        )
        yield Evidence(text, value=size, threshold=tolerance, advice=MASK)


@contract("behaviour", "examples in a batch do not affect each other")
def examples(probe: Probe) -> Iterator[Evidence]:
    """Change all examples but the first, or the last, in both modes; BatchNorm stays in evaluation mode."""
    streams = [x for x in probe.streams if len(x.tensor) > 1]
    if not streams or probe.reference.dim() == 0 or len(streams[-1].tensor) != len(probe.reference):
        raise NotApplicable("the batch has one example, or the output has no dimension of examples")
    if any(".quantized." in type(x).__module__ for x in probe.names):
        raise NotApplicable("quantized layers may have one scale for all examples")
    rows = len(probe.reference)
    if probe.reference.shape[1:] == (rows,):
        raise NotApplicable("the output may be a matrix of pairs of examples")
    others = [x for x in probe.batch.tensors.values() if x.dim() > 0 and not _is_of_examples(x, rows)]
    if others:
        raise NotApplicable("dimension 0 of the inputs may be that of nodes of a graph, not of examples")
    for training in (False, True):
        before = probe.output(training=training) if training else probe.reference
        if training and probe.distance(probe.output(training=True), before) > probe.tolerance:
            # random numbers that are not torch's, or a state that each forward changes
            return
        # behind a causal mask over examples, the first one does not see the others
        for row in (0, rows - 1):
            rest = torch.arange(rows, device="cpu") != row
            changes = {
                x.name: probe.changed(x, rest.view(-1, 1).expand(x.tensor.shape[:2]) if x.is_tokens else rest)
                for x in streams
                if len(x.tensor) == rows
            }
            change = probe.differences(probe.output(changes, training=training)[row], before[row])
            size = float(change.max()) if change.numel() else 0.0
            if size > probe.tolerance:
                mode = "training" if training else "evaluation"
                text = f"in {mode} mode, other examples change the output of example {row} by {percent(size)}"
                yield Evidence(text, value=size, threshold=probe.tolerance, advice=EXAMPLES)
                return


# details


def _aligned(probe: Probe) -> Stream:
    stream = probe.aligned
    if stream is None:
        raise NotApplicable("the output has no dimension that is the length of an input")
    return stream


def _is_of_examples(x: Tensor, rows: int) -> bool:
    """Return whether a tensor has a row for each example, and is no matrix of pairs of them."""
    return len(x) == rows and not (x.is_floating_point() and x.shape[1:] == (rows,))


def _is_vectors(x: object, shape: Sequence[int]) -> TypeGuard[Tensor]:
    return (
        isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.shape[:2] == tuple(shape[:2])
    )


def _is_memory(x: Tensor, stream: Stream) -> bool:
    """Return whether a tensor may be the output of an encoder of this input."""
    shape = stream.tensor.shape
    if stream.is_tokens:
        return _is_vectors(x, shape)
    return (
        _is_vectors(x, x.shape) and len(x) == shape[0] and any(size % x.shape[1] == 0 for size in shape[1:])
    )


def _places(count: int) -> list[int]:
    """Return up to `_MOST` positions below ``count``, evenly spaced, with the first and the last."""
    most = min(count, _MOST)
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def _first(kept: Tensor) -> Tensor:
    return kept & (kept.cumsum(1) == 1)


def _by_token(probe: Probe, output: Tensor, where: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the largest change of the output of each token, ``(B, T)``; 0 elsewhere."""
    change = probe.differences(output, probe.reference if before is None else before).flatten(2).amax(2)
    return torch.where(where, change, 0.0)


def _where_kept(probe: Probe, stream: Stream, change: Tensor, kept: Tensor) -> Tensor:
    """Return the changes at the tokens that are kept, if the output has positions; otherwise all."""
    aligned = probe.aligned
    if aligned is None:
        return change
    if aligned.name == stream.name:
        return change[kept]
    return change[probe.kept(aligned)]


def _cause(
    probe: Probe, stream: Stream, mask: Mapping[str, Tensor], row: int, place: int, cut: int
) -> tuple[int, float]:
    """Return the first later token that alone changes an output, and by how much."""
    kept = probe.kept(stream)
    best = (cut + 1, 0.0)
    for source in range(place + 1, min(stream.length, place + 1 + 2 * _MOST)):
        where = torch.zeros_like(kept)
        where[row, source] = True
        output = probe.output({**mask, stream.name: probe.changed(stream, where)})
        size = float(_by_token(probe, output, kept, probe.output(mask))[row, place])
        if size > probe.tolerance:
            return source, size
        best = max(best, (source, size), key=lambda pair: pair[1])
    return best


def _argmax(x: Tensor) -> tuple[int, int]:
    place = int(x.argmax())
    return place // x.shape[1], place % x.shape[1]
