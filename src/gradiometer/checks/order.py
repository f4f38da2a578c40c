"""The contract of positions: whether a model, and each of its layers, sees the order of its inputs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradiometer.checks.contract import contract
from gradiometer.checks.report import Evidence, NotApplicable, percent
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradiometer.checks.batch import Stream
    from gradiometer.checks.probe import Probe

ADD: Final = (
    "add the positions to the embedding of the tokens, or rotate queries and keys by them, in every layer"
)
ROTATE: Final = (
    "rotate queries and keys by the same angles, those of the positions along dimension T, with one "
    "convention for the pairs: halves or neighbors"
)
_POSITIONS: Final = re.compile(
    r"(^|[._])(pos|position\w*|pos_?emb\w*|wpe|rotary\w*|rope|alibi|relative\w*)($|[._])"
)
_ROTARY: Final = re.compile(r"rotary|rope", re.IGNORECASE)
_LEARNED: Final = re.compile(r"(^|\.)(wpe|pos\w*emb\w*|emb\w*pos\w*|positions?)($|\.)")
# the share of the effect of other positions that a shift of all may have, as angles are rounded
_SHIFT: Final = 1e-3


@contract("behaviour", "the order of the inputs matters")
def order(probe: Probe) -> Iterator[Evidence]:
    """Swap two inputs, and compare the outputs of the model and of each layer; then shift all positions."""
    streams = [x for x in probe.streams if x.is_sequence or x.tensor.dim() == 4]
    asked = [x for x in streams if _swap(probe, x) is not None]
    if not asked:
        raise NotApplicable("the batch has no sequence with two different tokens")
    known = _known_positions(probe)
    for stream in asked:
        swapped, after = _swap(probe, stream) or ((), Tensor())
        if _is_blind(probe, stream, swapped, after):
            text = f"swapping two inputs of {stream.name} does not change the outputs"
            severity = Severity.WARNING if known else Severity.INFO
            text += f", although the model has {known}" if known else ": the model has no positions"
            yield Evidence(text, advice=ADD, severity=severity)
            return
    stream = asked[-1]
    yield from _blind_layers(probe, stream)
    yield from _not_relative(probe, stream)


def _swap(probe: Probe, stream: Stream) -> tuple[tuple[int, int], Tensor] | None:
    """Return two places whose inputs differ, kept in all examples, and the inputs exchanged; None without.

    Of pictures they are the numbers of patches.
    """
    x = stream.tensor
    if stream.is_sequence:
        kept = probe.kept(stream).all(0).nonzero().flatten().tolist()
        # the nearest to the last one, so that a window has both
        pairs = [(i, j) for j in reversed(kept[:-1]) for i in reversed([k for k in kept if k < j])]
        for i, j in pairs[:8]:
            if not torch.equal(x[:, i], x[:, j]):
                places = torch.arange(x.shape[1], device=x.device)
                places[i], places[j] = j, i
                return (i, j), x[:, places]
        return None
    size = _patch(probe, x)
    if size is None or x.shape[2] // size < 2 or x.shape[3] // size < 2:
        return None
    swapped = x.clone()
    swapped[..., :size, :size], swapped[..., -size:, -size:] = x[..., -size:, -size:], x[..., :size, :size]
    return (0, -1), swapped


def _patch(probe: Probe, x: Tensor) -> int | None:
    """Return the size of the patches of a model that begins with a convolution of them."""
    for module in probe.model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == x.shape[1]:
            side = module.kernel_size[0]
            fits = module.kernel_size == module.stride == (side, side) and x.shape[2] % side == 0
            return side if fits and side > 1 and x.shape[3] % side == 0 else None
    return None


def _is_blind(probe: Probe, stream: Stream, places: Sequence[int], swapped: Tensor) -> bool:
    output = probe.output({stream.name: swapped})
    aligned = probe.aligned
    if aligned is None or aligned.name != stream.name:
        return probe.distance(output, probe.reference) <= probe.tolerance
    if not probe.is_causal:
        expected = _exchanged(probe.reference, *places)
        return probe.distance(output, expected) <= probe.tolerance
    # deeper layers see the order by the causal mask alone: how many tokens are before each
    layers = _layers(probe, stream)
    if not layers:
        return False
    first = layers[0]
    outputs = [
        _hidden(probe.captured([first], changes)[first][2])[:, places[1] + 1 :]
        for changes in ({}, {stream.name: swapped})
    ]
    return outputs[0].numel() > 0 and _apart(*outputs) <= probe.tolerance


def _blind_layers(probe: Probe, stream: Stream) -> Iterator[Evidence]:
    """Call each layer with two of its inputs exchanged: all or none should see it."""
    layers = _layers(probe, stream)
    found = _swap(probe, stream)
    # with positions in their input, layers need not see the order
    if len(layers) < 2 or found is None or not stream.is_sequence or _learned(probe):
        return
    (i, j), _ = found
    blind: list[str] = []
    seeing: list[str] = []
    calls = probe.captured(layers)
    for layer in layers:
        if layer not in calls:
            continue
        args, kwargs, output = calls[layer]
        expected = _hidden(output)
        after = _hidden(probe.call(layer, (_exchanged(args[0], i, j), *args[1:]), kwargs))
        if after.shape != expected.shape:
            return
        if probe.is_causal:
            same = _apart(after[:, j + 1 :], expected[:, j + 1 :]) <= probe.tolerance
        else:
            same = _apart(after, _exchanged(expected, i, j)) <= probe.tolerance
        (blind if same else seeing).append(probe.names[layer])
    config = probe.config
    is_meant = config is not None and any("no_rope" in name or "nope" in name for name in vars(config))
    if blind and seeing and len(blind) <= len(seeing) and not is_meant:
        text = f"{', '.join(blind[:3])} ignores the order of its inputs, but {seeing[0]} does not"
        yield Evidence(text, name=blind[0], advice=ADD)


def _not_relative(probe: Probe, stream: Stream) -> Iterator[Evidence]:
    """Shift all positions: rotary ones are relative, so nothing should change."""
    if (
        not _rotary(probe)
        or _learned(probe)
        or not stream.is_tokens
        or probe.aligned != stream
        or stream.length < 3
        or probe.is_packed
    ):
        return
    count = 3
    shifted, other = _shifted(probe, stream, count)
    if shifted is None or other is None:
        size = _not_toeplitz(probe, stream)
        if size > max(probe.tolerance, _SHIFT):
            text = "rotary positions are not relative: for equal tokens, scores at equal distances differ by "
            text += f"{100 * size:.2g} %"
            yield Evidence(text, value=size, threshold=_SHIFT, advice=ROTATE)
        return
    kept = probe.kept(stream)
    size = float(probe.differences(shifted, probe.reference)[kept].max())
    effect = float(probe.differences(other, probe.reference)[kept].max())
    if size > max(probe.tolerance, _SHIFT * effect):
        text = f"rotary positions are not relative: shifting all by {count} changes the outputs by "
        text += percent(size)
        yield Evidence(text, value=size, threshold=_SHIFT * effect, advice=ROTATE)


def _shifted(probe: Probe, stream: Stream, count: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the outputs for positions that are all larger, and for some that are not in order."""
    places = torch.arange(stream.length, device=stream.tensor.device).expand(stream.tensor.shape)
    try:
        if probe.batch.takes("position_ids"):
            return tuple([probe.output({"position_ids": x}) for x in (places + count, places.flip(1))])  # type: ignore[return-value]
        if stream.mask is None:
            return None, None
        x = torch.cat([stream.tensor[:, :count], stream.tensor], 1)
        kept = torch.cat([torch.zeros_like(places[:, :count], dtype=torch.bool), probe.kept(stream)], 1)
        output = probe.output({stream.name: x, stream.mask: probe.batch.as_mask(stream.mask, kept)})
        _, swapped = _swap(probe, stream) or ((), stream.tensor)
        return output[:, count:], probe.output({stream.name: swapped})
    except NotApplicable:
        return None, None


def _not_toeplitz(probe: Probe, stream: Stream) -> float:
    """Return by how much attention scores at one distance differ if all tokens are equal; 0 if not known.

    Equal tokens have equal vectors in each layer, and relative positions give scores of the distance alone.
    """
    scores = _Scores(stream.length)
    first = stream.tensor[probe.kept(stream)][:1]
    with scores:
        probe.output({stream.name: first.expand(stream.tensor.shape).contiguous()})
    worst = 0.0
    for x in scores.found:
        scale = float(x.abs().amax())
        if scale and scale < float("inf"):
            worst = max(worst, float((x[:, 1:, 1:] - x[:, :-1, :-1]).abs().max()) / scale)
    return worst


class _Scores(TorchDispatchMode):
    """Keeps the products of queries and keys, ``(N, T, T)``."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.found = length, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, square = func._schema.name, (self.length, self.length)  # noqa: SLF001
        # weights times values have a sum over positions
        if name == "aten::bmm" and result.shape[1:] == square and args[0].shape[2] != self.length:
            self.found.append(result)
        elif "scaled_dot_product" in name:
            q, k = args[0].flatten(0, -3), args[1].flatten(0, -3)
            if q.shape == k.shape and q.shape[1] == self.length:
                self.found.append(q @ k.mT)
        return result


# details


def _known_positions(probe: Probe) -> str:
    """Return what tells that a model has positions, as text; empty if nothing does."""
    names = [*(name for name, _ in probe.model.named_parameters()), *probe.names.values()]
    found = next((name for name in names if _POSITIONS.search(name)), "") or _rotary(probe)
    if found:
        return found
    attribute = "max_position_embeddings"
    return f"config.{attribute}" if getattr(probe.config, attribute, None) else ""


def _learned(probe: Probe) -> bool:
    """Return whether there is a table of positions, of parameters."""
    return any(_LEARNED.search(name) for name, _ in probe.model.named_parameters())


def _rotary(probe: Probe) -> str:
    """Return the name of a module or the attribute that says that positions are rotary; empty without."""
    for module, name in probe.names.items():
        if _ROTARY.search(name) or _ROTARY.search(type(module).__name__):
            return name or type(module).__name__
        switch = next(
            (key for key, value in vars(module).items() if value is True and _ROTARY.search(key)), ""
        )
        if switch:
            return f"{name}.{switch}"
    return ""


def _layers(probe: Probe, stream: Stream) -> list[nn.Module]:
    """Return the layers of the last list of modules that are called with vectors of all positions."""
    lists = [x for x in probe.model.modules() if isinstance(x, nn.ModuleList) and len(x)]
    calls = probe.captured([layer for layers in lists for layer in layers])
    shape = stream.tensor.shape[:2]
    for layers in reversed(lists):
        known = [calls[x] for x in layers if x in calls]
        fits = [
            args and _is_hidden(args[0], shape) and _is_hidden(_hidden(output), shape)
            for args, _, output in known
        ]
        if fits and all(fits) and len(known) == len(layers) and any(_has_parts(x) for x in layers):
            return list(layers)
    return []


def _has_parts(module: nn.Module) -> bool:
    # a block of attention and other layers, not a linear layer
    return sum(1 for x in module.modules() if isinstance(x, nn.Linear) or type(x).__name__ == "Conv1D") > 1


def _is_hidden(x: Any, shape: Sequence[int]) -> bool:
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.shape[:2] == tuple(shape)


def _hidden(output: Any) -> Tensor:
    found = output[0] if isinstance(output, list | tuple) and output else output
    return found if isinstance(found, Tensor) else torch.empty(0, device="cpu")  # no module returns this


def _exchanged(x: Tensor, i: int, j: int) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    places[i], places[j] = j, i
    return x[:, places]


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference in proportion to the root mean square."""
    scale = float(b.double().square().mean().sqrt())
    return float((a.double() - b.double()).abs().max()) / (scale or 1.0) if b.numel() else 0.0
