"""The contract of buffers: their values, dtypes and devices, and those of the parameters."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gradiometer.checks.contract import contract
from gradiometer.checks.report import Evidence, NotApplicable
from gradiometer.checks.siblings import odd_one, siblings
from gradiometer.rules import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradiometer.checks.probe import Probe

_MASK: Final = re.compile(r"mask|causal|tril|triu|^bias$|alibi", re.IGNORECASE)
_FREQUENCIES: Final = re.compile(r"inv_freq|freqs")
_INVERSE: Final = re.compile(r"inv_freq$")
_VALUES: Final = "recompute it, or reload the checkpoint"


@contract("configuration", "buffers and parameters are finite, with the right dtype and device")
def buffers(probe: Probe) -> Iterator[Evidence]:
    """Look at the values, dtypes and devices of all buffers and parameters as they were given."""
    parameters = {n: p for n, p in probe.model.named_parameters() if not p.is_meta}
    found = dict(probe.model.named_buffers())
    if not parameters and not found:
        raise NotApplicable("the model has neither parameters nor buffers")
    for name, p in parameters.items():
        yield from _finite(name, p)
    yield from _devices(parameters)
    yield from _mixed(probe)
    dtypes = {p.dtype for p in parameters.values() if _is_usual(p)}
    devices = {p.device for p in parameters.values()}
    for name, x in found.items():
        yield from _buffer(name, x, dtypes, devices)


def _buffer(name: str, x: Tensor, dtypes: set[torch.dtype], devices: set[torch.device]) -> Iterator[Evidence]:
    own = name.rpartition(".")[2]
    if x.requires_grad:
        yield Evidence(
            f"{name} is a buffer that requires a gradient, but parameters() does not return it",
            name,
            advice="make it a Parameter, or register it detached",
        )
    if x.numel() == 0:
        yield Evidence(f"{name} is an empty buffer", name, 0.0, 1.0, "fill it before training")
        return
    if devices and x.device not in devices:
        yield Evidence(
            f"{name} is on {x.device}, but the parameters are on {min(map(str, devices))}",
            name,
            advice="register it with register_buffer, so that model.to moves it, and materialize it",
        )
    if x.is_meta:
        return
    if _is_usual(x):
        narrow = [d for d in dtypes if d.itemsize > x.dtype.itemsize]
        if _FREQUENCIES.search(own) and "original" not in own and x.dtype.itemsize < 4:
            yield Evidence(
                f"{name} is {_dtype(x)}: the angles of later positions are rounded",
                name,
                x.dtype.itemsize,
                4,
                "keep it in float32: compute it again after model.to(dtype), or load the model with dtype=",
                # model.to(dtype) does so
                Severity.WARNING if narrow else Severity.INFO,
            )
        elif narrow and len(narrow) == len(dtypes):
            yield Evidence(
                f"{name} is {_dtype(x)}, narrower than the parameters ({narrow[0].itemsize} bytes)",
                name,
                x.dtype.itemsize,
                narrow[0].itemsize,
                "keep buffers in the dtype of the parameters or in float32",
                # a constant of Gemma's embeddings
                Severity.INFO if x.numel() == 1 else Severity.WARNING,
            )
    yield from _finite(name, x)
    yield from _running(name, own, x)
    if _INVERSE.search(own) and x.dim() == 1 and len(x) > 1:
        rises = bool((x.diff() > 0).any()) or float(x.min()) < 0
        if rises or float(x[0]) == float(x[-1]):
            advice = "the frequencies are 1 / theta ** (2 i / d), from 1 down"
            yield Evidence(f"{name} does not decrease from its first value on", name, advice=advice)
    if _MASK.search(own):
        yield from _causal_mask(name, x)


def _running(name: str, own: str, x: Tensor) -> Iterator[Evidence]:
    """Look at the running statistics of BatchNorm."""
    if own == "running_var":
        least = float(x.min())
        dead = bool((x == 0).all())
        if least < 0 or dead:
            what = "is 0 everywhere" if dead else f"is as low as {least:.3g}"
            yield Evidence(
                f"{name} {what}", name, least, 0.0, "a variance must be positive: call reset_running_stats()"
            )
    if own == "num_batches_tracked" and (x.dtype != torch.int64 or int(x.min()) < 0):
        yield Evidence(
            f"{name} is {x.flatten()[0].item()} of {_dtype(x)}", name, advice="it must be an int64 count"
        )


def _finite(name: str, x: Tensor) -> Iterator[Evidence]:
    if not _is_usual(x) or x.numel() == 0 or x.layout != torch.strided:
        return
    bad = ~x.detach().isfinite()
    if not bool(bad.any()):
        return
    values = x.detach()[bad]
    if isinstance(x, torch.nn.Parameter) is False and bool((values == -torch.inf).all()):
        # a mask keeps something of each row
        rows = bad.all(-1) if x.dim() > 1 else bad.all()
        named = bool(_MASK.search(name.rpartition(".")[2]))
        if not bool(rows.any()) and (named or bool((x[~bad] == 0).all())):
            return
    words = {"nan": int(values.isnan().sum()), "inf": int((values.abs() == torch.inf).sum())}
    counts = " and ".join(f"{count} {word}" for word, count in words.items() if count)
    yield Evidence(f"{name} has {counts} of {x.numel()} values", name, len(values), 0.0, _VALUES)


def _causal_mask(name: str, x: Tensor) -> Iterator[Evidence]:
    """Find masks of later positions that let one in, or that leave nothing of a row."""
    size = x.shape[-1]
    if x.dim() < 2 or x.shape[-2] != size or size < 2 or x.numel() != size * size or x.is_complex():
        return
    mask = x.detach().view(size, size)
    lowest = mask.min()
    if bool((mask == lowest).all()) or len(mask.unique()) != 2:
        return
    kept = mask > lowest
    if x.dtype != torch.bool and float(lowest) == 0 and float(mask.max()) < 0.5:
        return
    later = torch.ones_like(kept).triu(1)
    lower, upper = float(kept[~later].double().mean()), float(kept[later].double().mean())
    if lower < upper:
        # True, or 1, for what is left out
        kept, lower, upper = ~kept, 1 - lower, 1 - upper
    if torch.equal(kept, kept.mT) or upper >= 0.5 or lower <= 0.5:
        leaves_none = bool((~kept).all(1).any()) and upper == 0
        if not leaves_none:
            return
    if upper > 0:
        row, column = (kept & later).nonzero()[0].tolist()
        yield Evidence(
            f"{name} lets position {row} attend to position {column}, but masks most later ones",
            name,
            upper,
            0.0,
            "a causal mask is torch.ones(T, T).tril()",
        )
    elif bool((~kept).all(1).any()):
        row = int((~kept).all(1).nonzero()[0])
        yield Evidence(
            f"{name} masks all positions for position {row}", name, advice="a causal mask keeps its diagonal"
        )


def _devices(parameters: Mapping[str, Tensor]) -> Iterator[Evidence]:
    devices = Counter(str(p.device) for p in parameters.values())
    if len(devices) > 1:
        yield Evidence(
            f"parameters are on {', '.join(devices)}",
            value=len(devices),
            threshold=1.0,
            advice="move the model to one device, unless its layers are split on purpose",
            severity=Severity.INFO,
        )


def _mixed(probe: Probe) -> Iterator[Evidence]:
    """Find parameters of another dtype than the same ones of sibling layers."""
    for group in siblings(probe.model):
        tables = [dict(layer.named_parameters()) for layer in group.layers]
        for key in [key for key in tables[0] if all(key in table for table in tables)]:
            kinds = [_dtype(table[key]) for table in tables]
            index = odd_one(kinds)
            if index is not None:
                name, other = group.name(index, key), 0 if index else 1
                yield Evidence(
                    f"{name} is {kinds[index]}, but {group.name(other, key)} is {kinds[other]}",
                    name,
                    advice="use the same dtype in all layers",
                )


def _is_usual(x: Tensor) -> bool:
    """Return whether this is a floating-point tensor of two or more bytes, not a quantized one."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
