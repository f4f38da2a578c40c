"""The contract of the KV cache: tokens one by one give what all of them at once give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.checks.batch import output_of
from gradiometer.checks.contract import contract
from gradiometer.checks.precision import cast
from gradiometer.checks.report import Evidence, NotApplicable, percent
from gradiometer.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.batch import Stream
    from gradiometer.checks.probe import Probe

# of transformers' versions, and of models whose state has one size
_NAMES: Final = ("past_key_values", "cache", "cache_params", "state")
_ADVICE: Final = (
    "with a cache, positions start at its length, masks cover its keys, and each layer appends to its "
    "own entry (layer_idx)"
)
_STATES: Final = ("cache_params", "state")
# matrix products of other shapes sum in another order, in each layer
_MARGIN: Final = 4.0
# tokens that are passed one by one
_MOST: Final = 6


@contract("behaviour", "a forward pass with the KV cache equals the full one")
def cache(probe: Probe) -> Iterator[Evidence]:
    """Pass a third of the tokens, then the rest one by one, then at once; compare with one forward pass."""
    stream, arguments = _inputs(probe)
    kept, first = probe.kept(stream), max(1, stream.length // 3)
    singles = [*range(first, min(stream.length, first + _MOST))]
    plans = [[0, *singles, stream.length], [0, first, stream.length]]
    if _is_recurrent(probe, stream, arguments, first):
        # a state that is updated has taken in padded tokens, and takes one token at a time
        whole = kept.all(1)
        if not bool(whole.any()):
            raise NotApplicable("the cache is a state, and each example has padded tokens")
        arguments, kept = {stream.name: stream.tensor[whole]}, kept[whole]
        plans = [[0, *singles]]
    for edges in plans:
        found = list(_compare(probe, stream, arguments, kept, list(dict.fromkeys(edges))))
        yield from found
        if found:
            return


def _compare(
    probe: Probe, stream: Stream, arguments: dict[str, Any], kept: Tensor, edges: list[int]
) -> Iterator[Evidence]:
    """Compare the outputs of chunks of tokens between positions with those of all tokens."""
    full = _output(_call(probe, arguments | {"use_cache": False}))
    if full.shape[:2] != kept.shape:
        raise NotApplicable("the output has no dimension that is the length of the input")
    tolerance = _MARGIN * probe.tolerance
    past: Any = None
    for start, end in pairwise(edges):
        try:
            output, past = _chunk(probe, stream, arguments, start, end, past)
        except NotApplicable:
            raise
        except Exception as error:
            if start and end - start > 1:
                # several tokens after cached ones, which not all models take
                return
            if isinstance(error, TypeError):
                raise NotApplicable(f"the model fails with a cache: {one_line(error)}") from error
            what = f"token {start} after {start} cached ones" if start else f"use_cache=True and {end} tokens"
            yield Evidence(f"the model fails for {what}: {one_line(error)}", advice=_ADVICE)
            return
        if output.shape[:2] != (len(kept), end - start):
            raise NotApplicable("with a cache, the output and the input differ in length")
        change = probe.differences(output, full[:, start:end]).flatten(2).amax(2)
        change = torch.where(kept[:, start:end], change, 0.0)
        size = float(change.max())
        if size > tolerance and not start:
            given = {name: _slice(probe, stream, name, x, 0, end) for name, x in arguments.items()}
            alone = _output(_call(probe, given | {"use_cache": False}))
            if probe.distance(alone[kept[:, :end]], full[:, :end][kept[:, :end]]) > tolerance:
                raise NotApplicable("earlier outputs depend on later tokens, even without a cache")
        if size > tolerance:
            place = start + int(change.amax(0).argmax())
            how = f"after {start} cached tokens" if start else "with use_cache=True"
            how += f" in a chunk of {end - start}" if start and end - start > 1 else ""
            yield Evidence(
                f"{how}, the output of token {place} differs by {percent(size)} from that of a full forward",
                value=size,
                threshold=tolerance,
                advice=_ADVICE,
            )
            return


def _chunk(
    probe: Probe, stream: Stream, arguments: dict[str, Any], start: int, end: int, past: Any
) -> tuple[Tensor, Any]:
    """Return the output of some tokens after those in the cache, and the new cache."""
    key = _name(probe) or ""
    given = {name: _slice(probe, stream, name, x, start, end) for name, x in arguments.items()}
    result = _call(probe, given | {"use_cache": True} | ({key: past} if start else {}))
    past = result.get(key) if isinstance(result, Mapping) else getattr(result, key, None)
    if past is None:
        raise NotApplicable(f"the model returns no {key}")
    return _output(result), past


def _is_recurrent(probe: Probe, stream: Stream, arguments: dict[str, Any], first: int) -> bool:
    """Return whether the cache has states that tokens update, instead of keys and values of each token."""
    try:
        _, past = _chunk(probe, stream, arguments, 0, first, None)
    except NotApplicable:
        raise
    except Exception:  # noqa: BLE001 it is told where it is compared
        return False
    layers = getattr(past, "layers", None)
    names = [key for layer in layers or [] for key in getattr(layer, "__dict__", {})]
    return _name(probe) in _STATES or any("conv_states" in key or "recurrent" in key for key in names)


def _inputs(probe: Probe) -> tuple[Stream, dict[str, Any]]:
    """Return the tokens that the cache is for, and all arguments without labels."""
    if _name(probe) is None or not probe.batch.takes("use_cache"):
        raise NotApplicable("the model takes no cache, such as past_key_values")
    if probe.is_causal is False:
        raise NotApplicable("the model is not causal")
    stream = probe.aligned
    if stream is None or not stream.is_tokens:
        raise NotApplicable("the output has no dimension that is the length of input tokens")
    if probe.is_packed:
        raise NotApplicable("the batch has a mask of pairs of tokens, or several texts in a row")
    if stream.length < 3:
        raise NotApplicable("the sequences have fewer than three tokens")
    arguments = probe.batch.arguments | probe._defaults  # noqa: SLF001
    others = [x.name for x in probe.streams if x.name != stream.name]
    if others and not probe.is_encoder_decoder:
        raise NotApplicable(f"the batch has inputs other than tokens: {', '.join(others)}")
    labels = probe.batch.labels
    return stream, {name: x for name, x in arguments.items() if name != labels and probe.batch.takes(name)}


def _name(probe: Probe) -> str | None:
    return next((name for name in _NAMES if probe.batch.takes(name)), None)


def _slice(probe: Probe, stream: Stream, name: str, x: Any, start: int, end: int) -> Any:
    """Return what belongs to a chunk of tokens: of masks, all up to its end."""
    is_of_stream = not probe.is_encoder_decoder or "decoder" in name or name == stream.name
    if not isinstance(x, Tensor) or x.shape[1:2] != stream.tensor.shape[1:] or not is_of_stream:
        return x
    return x[:, :end] if name in probe.batch.tensors and probe.batch.is_mask(name) else x[:, start:end]


def _call(probe: Probe, arguments: dict[str, Any]) -> Any:
    """Return what the model returns for arguments by name, in evaluation mode and without a graph."""
    with probe.in_evaluation():
        return probe.model(**cast(arguments, probe.dtype))


def _output(result: Any) -> Tensor:
    found = output_of(result)
    if found is None:
        raise NotApplicable("the model returns no tensor")
    return found
