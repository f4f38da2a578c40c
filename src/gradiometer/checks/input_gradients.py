"""Whether every input token, value or pixel that should matter gets a gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradiometer.checks.contract import contract
from gradiometer.checks.objective import projection, some, trainable
from gradiometer.checks.parameter_gradients import random_for_zeros, without_gradient
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradiometer.checks.batch import Stream
    from gradiometer.checks.probe import Probe

UNSEEN: Final = (
    "look for a slice, a mask or a pooling that leaves them out, and for detach() or no_grad() on their way "
    "to the output"
)
MARGIN: Final = "use a size that is a multiple of the stride of the first layer, or pad the images"
# other inputs with which it is tried again, and tokens that are examined one by one
_LEAST, _MOST, _SINGLE = 3, 16, 8


@contract("gradients", "every input token or pixel that should matter gets a gradient")
def input_gradients(probe: Probe) -> Iterator[Evidence]:
    """Differentiate random projections of the outputs with respect to token embeddings or input values.

    Of a sequence with an output for each position, those at other positions are projected; for a causal
    model, those at later ones.
    """
    reasons = []
    cudnn: Any = torch.backends.cudnn
    # its recurrent layers have no backward in evaluation mode
    without_cudnn = cudnn.flags(enabled=False) if torch.cuda.is_available() else nullcontext()
    # behind a last layer of zeros nothing gets a gradient
    with without_cudnn, probe.differentiated(training=False), random_for_zeros(probe):
        for stream in probe.streams:
            try:
                yield from _examine(probe, stream)
            except NotApplicable as reason:
                reasons.append(str(reason))
    if len(reasons) == len(probe.streams):
        raise NotApplicable(reasons[0] if reasons else "the batch has no tokens and no values")


def _examine(probe: Probe, stream: Stream) -> Iterator[Evidence]:
    mixed = _is_mixed(probe, stream)
    if stream.name not in probe.batch.tensors and not mixed:
        raise NotApplicable(f"{stream.name} is computed from other inputs")
    wanted = _wanted(probe, stream, mixed=mixed)
    if not bool(wanted.any()):
        raise NotApplicable(f"{stream.name} has one token")
    got = _reached(probe, stream, wanted, 0, mixed=mixed)
    for seed in range(1, _MOST):
        if bool((got | ~wanted).all()):
            return
        before = got
        try:
            got = got | _reached(probe, stream, wanted, seed, mixed=mixed)
        except NotApplicable:
            break
        # a model that leaves out patches at random gets to others each time
        if seed >= _LEAST and torch.equal(got, before):
            break
    missing = wanted & ~got
    if not bool(missing.any()):
        return
    if not bool((got & wanted).any()):
        yield from _none(probe, stream, wanted, mixed=mixed)
    elif _is_positions(probe, stream):
        yield _positions(stream, missing, wanted)
    else:
        yield from _pixels(stream, missing, wanted)


def _none(probe: Probe, stream: Stream, wanted: Tensor, *, mixed: bool) -> Iterator[Evidence]:
    """Tell that nothing gets a gradient, unless the layers that read the input are frozen."""
    if not (mixed and bool(_reached(probe, stream, wanted, 0, mixed=False).any())):
        # what an embedding that is trained looks up has a graph
        is_trained = stream.is_tokens and any(not x.is_leaf for x, _ in _run(probe, stream, wanted, 0)[1])
        with probe.differentiated():
            names = trainable(probe)
            if not is_trained and (not names or not without_gradient(probe, names)):
                raise NotApplicable(f"{stream.name} is used without a graph before all trainable layers")
        mixed = False
    where = f" from outputs at {'later' if probe.is_causal else 'other'} positions" if mixed else ""
    what = "token" if stream.is_tokens else "value"
    text = f"no {what} of {stream.name} gets a gradient{where}"
    yield Evidence(text, stream.name, 0.0, 0.0, UNSEEN)


def _positions(stream: Stream, missing: Tensor, wanted: Tensor) -> Evidence:
    count, total = int(missing.sum()), int(wanted.sum())
    rows = (missing.any(1) & ~(wanted & ~missing).any(1)).nonzero().flatten().tolist()
    if rows:
        names = [str(row) for row in rows]
        text = f"no token of example {some(names)} of {stream.name} gets a gradient"
    else:
        row, place = missing.nonzero()[0].tolist()
        text = f"{count} of {total} tokens of {stream.name} get no gradient, such as token {place} of "
        text += f"example {row}"
    return Evidence(text, stream.name, count / total, 0.0, UNSEEN)


def _pixels(stream: Stream, missing: Tensor, wanted: Tensor) -> Iterator[Evidence]:
    """Tell which values ``(B, ...)`` get no gradient."""
    rows = missing.flatten(1).any(1) & ~(wanted & ~missing).flatten(1).any(1)
    if bool(rows.any()):
        names = [str(row) for row in rows.nonzero().flatten().tolist()]
        text = f"example {some(names)} of {stream.name} gets no gradient"
        yield Evidence(text, stream.name, float(rows.double().mean()), 0.0, UNSEEN)
        return
    # a value of one example may lose every maximum
    everywhere = (missing | ~wanted).all(0) & wanted.any(0)
    if not bool(everywhere.any()):
        return
    share = float(everywhere.double().mean())
    channels = everywhere.flatten(1).all(1) if everywhere.dim() > 1 else everywhere[:0]
    if bool(channels.any()):
        names = [str(x) for x in channels.nonzero().flatten().tolist()]
        text = f"channel {some(names)} of {stream.name} gets no gradient in any example"
        yield Evidence(text, stream.name, share, 0.0, UNSEEN)
        return
    place = tuple(everywhere.nonzero()[0].tolist())
    text = f"{int(everywhere.sum())} of {everywhere.numel()} values of an example of {stream.name} get no "
    text += f"gradient, such as that at {place}"
    severity = Severity.INFO if _is_margin(everywhere) else Severity.WARNING
    advice = MARGIN if severity == Severity.INFO else UNSEEN
    yield Evidence(text, stream.name, share, 0.0, advice, severity)


def _is_margin(missing: Tensor) -> bool:
    """Return whether only the last values, rows or columns are missing, as by a stride; ``(C, H, W)``."""
    seen = ~missing
    for dim in range(min(1, missing.dim() - 1), missing.dim()):
        others = [d for d in range(missing.dim()) if d != dim]
        used = seen.sum(others) > 0 if others else seen
        last = int(used.nonzero().max()) + 1
        if (missing.shape[dim] - last) * 4 >= missing.shape[dim]:
            return False
        seen = seen.narrow(dim, 0, last)
    return bool(seen.all())


def _is_positions(probe: Probe, stream: Stream) -> bool:
    """Return whether dimension 1 is that of positions, and not of channels."""
    aligned = probe.aligned
    is_aligned = aligned is not None and aligned.name == stream.name
    return stream.is_tokens or (stream.tensor.dim() == 3 and (is_aligned or stream.mask is not None))


def _is_mixed(probe: Probe, stream: Stream) -> bool:
    """Return whether a token should reach the outputs at other positions."""
    aligned = probe.aligned
    is_known = probe.is_causal is not None and not probe.is_packed
    return aligned is not None and aligned.name == stream.name and is_known


def _wanted(probe: Probe, stream: Stream, *, mixed: bool) -> Tensor:
    """Return which tokens ``(B, T)`` or values should get a gradient."""
    x = stream.tensor
    kept = probe.kept(stream) if x.dim() > 1 else torch.ones(len(x), dtype=torch.bool, device=x.device)
    if not _is_positions(probe, stream):
        return kept.view(kept.shape + (1,) * (x.dim() - kept.dim())).expand(x.shape).clone()
    kept = kept.clone()
    if mixed:
        places = torch.arange(stream.length, device=kept.device)
        # one token has no other positions, and the last one no later ones
        kept &= kept.sum(1, keepdim=True) > 1
        if probe.is_causal:
            kept &= places < torch.where(kept, places, -1).amax(1, keepdim=True)
    return kept


def _reached(probe: Probe, stream: Stream, wanted: Tensor, seed: int, *, mixed: bool) -> Tensor:
    """Return which tokens ``(B, T)`` or values get a gradient, in the shape of ``wanted``."""
    output, sources = _run(probe, stream, wanted, seed)
    if not output.requires_grad:
        return torch.zeros_like(wanted)
    aligned = probe.aligned
    kept = None if aligned is None else probe.kept(aligned)

    def gradients(where: Tensor | None) -> Tensor:
        y = output
        if where is not None:
            y = y * where.view(where.shape + (1,) * (y.dim() - where.dim()))
        by = [source for source, _ in sources]
        found = torch.autograd.grad(projection(y, seed), by, allow_unused=True, retain_graph=True)
        got = torch.zeros_like(wanted).reshape(-1)
        for g, (_, places) in zip(found, sources, strict=True):
            if g is not None:
                got[places[(g != 0).reshape(*places.shape, -1).any(-1)]] = True
        return got.view(wanted.shape)

    if not mixed or kept is None:
        return gradients(kept)
    places = torch.arange(stream.length, device=kept.device)
    got = torch.zeros_like(wanted)
    for parity in (0, 1):
        got |= gradients(kept & (places % 2 == parity)) & (places % 2 != parity)
    left = (wanted & ~got).any(0).nonzero().flatten().tolist()
    for place in left[:_SINGLE]:
        got |= gradients(kept & (places > place if probe.is_causal else places != place)) & (places == place)
    return got


def _run(
    probe: Probe, stream: Stream, wanted: Tensor, seed: int
) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
    """Return the output, and what of the input it can be differentiated by, with the places of the input."""
    x = stream.tensor
    is_given = stream.name in probe.batch.tensors
    if seed and is_given:
        everything = torch.ones(x.shape[: min(x.dim(), 2)], dtype=torch.bool, device=x.device)
        x = probe.changed(stream, probe.kept(stream) if x.dim() > 1 else everything, seed)
        if stream.is_tokens:
            x = _with_end(probe, x, probe.kept(stream), seed)
    if not stream.is_tokens:
        leaf = x.detach().to(probe.dtype).clone().requires_grad_()
        output = probe.output_with_graph({stream.name: leaf}, seed)
        sources = [(leaf, torch.arange(wanted.numel(), device=x.device).view(wanted.shape))]
    else:
        # of its own storage, by which parts of it are known
        x = x.contiguous().clone()
        look_ups = LookUps(x)
        with look_ups:
            output = probe.output_with_graph({stream.name: x}, seed)
        sources = look_ups.found
    if output is None or not sources:
        raise NotApplicable(f"the embedding of the tokens of {stream.name} was not found")
    return output, sources


def _with_end(probe: Probe, x: Tensor, kept: Tensor, seed: int) -> Tensor:
    """Return tokens of which the last is that of the end, or the largest: some models pool there."""
    config: Any = probe.config
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    end = getattr(config, "eos_token_id", None)
    known = x[kept].unique()
    if seed % 2 and isinstance(end, int) and bool((kept.sum(1) > 0).all()):
        other = known[known != end]
    else:
        end, other = int(known.max()), known[:-1]
    places = torch.arange(x.shape[1], device=x.device)
    last = torch.where(kept, places, -1).amax(1, keepdim=True)
    if not len(other):
        return x
    return torch.where(places == last, end, torch.where(kept & (x == end), other[0], x))


class LookUps(TorchFunctionMode):
    """Notes what tokens are looked up as, by an embedding or an index, and starts a graph there.

    Attributes:
        found: floating-point tensors with a vector for each token or for some of them, and the places of
            these tokens, in the order of all tokens.
    """

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self._tokens = tokens
        self._places = torch.arange(tokens.numel(), device=tokens.device)
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        for x in [*args, *(kwargs or {}).values()]:
            for part in x if isinstance(x, tuple) else (x,):
                places = self._places_of(part)
                if places is not None and result.shape[: places.dim()] == places.shape:
                    return self._noted(result, places)
        return result

    def _noted(self, result: Tensor, places: Tensor) -> Tensor:
        with torch.enable_grad():
            source = result if result.requires_grad else result.detach().requires_grad_()
            self.found.append((source, places))
            # what is written in place afterwards is another tensor
            return source.clone()

    def _places_of(self, x: Any) -> Tensor | None:
        """Return the place of each element among the tokens; None for other tensors."""
        if not isinstance(x, Tensor) or x.is_floating_point() or not x.dim() or not x.numel():
            return None
        tokens = self._tokens
        if x.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr() and x.dtype == tokens.dtype:
            return self._places.as_strided(x.shape, x.stride(), x.storage_offset())
        for order, places in ((tokens, self._places), (tokens.T, self._places.view(tokens.shape).T)):
            if x.numel() == tokens.numel() and torch.equal(x.reshape(-1), order.reshape(-1).to(x.dtype)):
                return places.reshape(x.shape)
        return None
