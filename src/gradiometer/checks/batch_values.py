"""What a batch tells of a config: lengths, labels and the padding token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from gradiometer.checks.report import Evidence
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradiometer.checks.probe import Probe

_POSITIONS: Final = ("max_position_embeddings", "n_positions")


def batch_differences(probe: Probe, config: dict[str, Any]) -> Iterator[Evidence]:
    """Compare lengths, labels and padded tokens of the batch with the plain values of a config."""
    key = next((key for key in _POSITIONS if isinstance(config.get(key), int)), None)
    stream = probe.aligned
    if key is not None and stream is not None and stream.is_tokens and 0 < config[key] < stream.length:
        yield Evidence(
            f"{stream.name} has {stream.length} tokens, but config.{key} is {config[key]}",
            value=stream.length,
            threshold=config[key],
            advice="truncate the sequences, or create the model with more positions",
            severity=Severity.INFO if _is_stretched(probe) else Severity.WARNING,
        )
    yield from _labels(probe)
    yield from _padding_rows(probe)
    yield from _padding_token(probe, config.get("pad_token_id"))


def _labels(probe: Probe) -> Iterator[Evidence]:
    name = probe.batch.labels
    labels = None if name is None else probe.batch.tensors[name]
    if labels is None or labels.is_floating_point() or labels.is_complex() or labels.numel() == 0:
        return
    if labels.dtype != torch.bool and bool((labels == -100).all()):
        yield Evidence(f"all {name} are -100, which losses ignore", advice="pass a batch with labels")
        return
    stream = probe.aligned
    if stream is not None and stream.mask is not None and labels.shape == stream.tensor.shape:
        counted = int((labels[~probe.kept(stream)] >= 0).sum())
        if counted:
            yield Evidence(
                f"{counted} padded tokens have labels",
                value=counted,
                advice="set the labels of padded tokens to -100, unless the loss masks them out",
                severity=Severity.INFO,
            )
    shape, classes = probe.reference.shape, probe.reference.shape[-1] if probe.reference.dim() > 1 else 0
    # one class of each output
    if classes > 1 and labels.shape == shape[:-1] and int(labels.max()) >= classes:
        yield Evidence(
            f"the largest of {name} is {int(labels.max())}, but the output has {classes} classes",
            value=int(labels.max()),
            threshold=classes - 1,
            advice="labels are from 0 to the number of classes minus 1: set num_labels or vocab_size",
        )


def _padding_rows(probe: Probe) -> Iterator[Evidence]:
    """Compare the row of an embedding that is not trained with the tokens that the mask leaves out."""
    streams = [x for x in probe.streams if x.is_tokens and x.is_sequence]
    tables = {
        m: name
        for name, m in probe.model.named_modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None
    }
    if not streams or not tables:
        return
    for module, (args, _, _) in probe.captured(tables).items():
        stream = next((x for x in streams if args and _equal(args[0], x.tensor)), None)
        if stream is None or not isinstance(module, nn.Embedding):
            continue
        kept = probe.kept(stream)
        pads, used = stream.tensor[~kept].unique().tolist(), stream.tensor[kept]
        count = int(used.eq(module.padding_idx or 0).sum())
        if pads and module.padding_idx not in pads and count:
            name = tables[module]
            yield Evidence(
                f"{name}: padding_idx is {module.padding_idx}, which {count} tokens of {stream.name} "
                f"have as their id, but padded tokens have {pads[0]}",
                name,
                value=count,
                advice="set padding_idx to the id of the padding token: its row gets no gradient",
            )


def _padding_token(probe: Probe, padding: Any) -> Iterator[Evidence]:
    """Compare the padding token of the config with the tokens that the mask leaves out."""
    for stream in probe.streams:
        if not (stream.is_tokens and stream.is_sequence and isinstance(padding, int)):
            continue
        kept = probe.kept(stream)
        pads, count = stream.tensor[~kept].unique().tolist(), int((stream.tensor[kept] == padding).sum())
        if len(pads) == 1 and padding not in pads and count:
            yield Evidence(
                f"config.pad_token_id is {padding}, which {count} tokens of {stream.name} are, but padded "
                f"tokens are {pads[0]}",
                value=count,
                advice="set pad_token_id to that of the tokenizer",
                severity=Severity.INFO,
            )


def _is_stretched(probe: Probe) -> bool:
    """Return whether rotary positions are scaled for sequences of other lengths."""
    config = getattr(probe.model, "config", None)
    kinds = [getattr(config, key, None) for key in ("rope_parameters", "rope_scaling")]
    names = [x.get("rope_type", x.get("type")) for x in kinds if isinstance(x, Mapping)]
    return any(name not in {None, "default"} for name in names)


def _equal(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.shape == b.shape and bool((a == b).all())
