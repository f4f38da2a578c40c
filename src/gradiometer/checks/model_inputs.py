"""What is known of the inputs of a model: its sequences, their masks, and whether it is causal."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gradiometer.checks.batch import Batch, Stream
from gradiometer.checks.report import NotApplicable

if TYPE_CHECKING:
    from torch import nn


# masks, and what tells where packed texts start
_PAIRS: Final = re.compile(r"mask|cu_seq|seq_idx")


class ModelInputs:
    """A model and a batch.

    Attributes:
        model: the model, without wrappers of data parallelism and compilation.
        batch: the `Batch`.
        reference: the output for the batch as it was given, in evaluation mode.
    """

    reference: Tensor

    def __init__(self, model: nn.Module, batch: Any, *, causal: bool | None, has_forward: bool) -> None:
        self.model, self.batch, self._causal = model, Batch(model, batch), causal
        self._has_forward = has_forward
        # what is used instead of the batch's own tensors, such as the inputs of a decoder
        self._defaults: dict[str, Any] = {}

    @property
    def config(self) -> Any:
        """The config of a Hugging Face model; None without."""
        found = getattr(self.model, "config", None)
        return found if hasattr(found, "model_type") else None

    @cached_property
    def streams(self) -> list[Stream]:
        """The sequences that go into the model; that of a decoder is the last."""
        known = [x for x in self.batch.streams() if self._has_forward or self.batch.is_taken(x.name)]
        for name, x in self._defaults.items():
            if isinstance(x, Tensor) and name not in self.batch.tensors:
                known.append(Stream(name, x))
        return known

    @property
    def aligned(self) -> Stream | None:
        """The sequence for each of whose positions the model has an output ``(B, T, ...)``; None without."""
        shape = self.reference.shape
        for stream in reversed(self.streams):
            if stream.is_sequence and len(shape) >= 2 and stream.tensor.shape[:2] == shape[:2]:
                # one number for each example, such as a class, is not an output of positions
                return stream if len(shape) > 2 else None
        return None

    @cached_property
    def is_causal(self) -> bool | None:
        """Whether no output may depend on later tokens: as passed, or by the config, or by the labels.

        None if that is not known. Labels that are the tokens one position later are those of a causal model;
        labels of tokens that are hidden in the input are those of an encoder.
        """
        if self._causal is not None:
            return self._causal
        config = self.config
        if config is not None:
            name = type(self.model).__name__
            if getattr(config, "is_encoder_decoder", False):
                return True
            if "CausalLM" in name or "LMHead" in name or getattr(config, "is_decoder", False):
                # XLM's and XLNet's may be encoders
                return bool(getattr(config, "causal", True)) and getattr(config, "attn_type", "uni") != "bi"
            return False if "MaskedLM" in name or "Image" in name else None
        stream, labels = self.aligned, self.batch.labels
        if stream is None or labels is None or not stream.is_tokens:
            return None
        x, y = stream.tensor, self.batch.tensors[labels]
        if y.is_floating_point() or y.shape != x.shape:
            return None
        used = y >= 0
        shifted = used[:, :-1]
        if stream.mask is not None:
            shifted = shifted & self.batch.kept(stream.mask)[:, 1:]
        if int(shifted.sum()) and float((y[:, :-1] == x[:, 1:])[shifted].double().mean()) > 0.9:
            return True
        hidden = float((x[used] == x[used].mode().values).double().mean()) if bool(used.any()) else 0.0
        return False if hidden > 0.9 and not bool(used.all()) else None

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, as its config or its inputs say."""
        if self.config is not None:
            return bool(getattr(self.config, "is_encoder_decoder", False))
        return len([x for x in self.streams if x.is_sequence]) > 1

    @cached_property
    def is_packed(self) -> bool:
        """Whether the batch tells which tokens see which: several texts in a row, or a mask of pairs."""
        for name, x in self.batch.tensors.items():
            if _PAIRS.search(name) and (x.dim() > 2 or "mask" not in name):
                return True
            # positions that start again
            if "position" in name and x.dim() == 2 and bool((x[:, 1:] <= x[:, :-1]).any()):
                return True
        return False

    def kept(self, stream: Stream) -> Tensor:
        """Return which tokens of a sequence are not padding, ``(B, T)`` bool."""
        if stream.mask is None:
            return torch.ones(stream.tensor.shape[:2], dtype=torch.bool, device=stream.tensor.device)
        return self.batch.kept(stream.mask)

    def other_inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """Return other values of all sequences, by name; without those that have no others."""
        found = {}
        for stream in self.streams:
            with suppress(NotApplicable):
                found[stream.name] = self.changed(stream, self.kept(stream), seed)
        return found

    def changed(self, stream: Stream, where: Tensor, seed: int = 0) -> Tensor:
        """Return a sequence with other values at some positions, ``(B, T)`` bool or ``(B,)`` bool.

        Tokens are replaced by others of the batch, values by random ones of the same spread.

        Raises:
            NotApplicable: if all tokens of the batch are equal.
        """
        x = stream.tensor
        generator = torch.Generator(device="cpu").manual_seed(seed)
        if stream.is_tokens:
            known = x[self.kept(stream)].unique()
            # those of all rows, such as the end of a text, may be looked for
            rare = known[[not bool((x == y).any(1).all()) for y in known]] if len(x) > 1 else known
            known = rare if len(rare) > 1 else known
            if len(known) < 2:
                raise NotApplicable(f"all tokens in {stream.name} are equal; pass a batch of real data")
            # another one of those that are known
            place = torch.searchsorted(known, x.contiguous()).clamp(max=len(known) - 1)
            step = torch.randint(1, len(known), x.shape, generator=generator, device="cpu").to(x.device)
            other = known[(place + step) % len(known)]
        else:
            noise = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float64)
            spread = float(x.double().std()) if x.numel() > 1 else 1.0
            other = x + ((spread or 1.0) * noise).to(x.device, x.dtype)
        where = where.to(x.device)
        return torch.where(where.view(where.shape + (1,) * (x.dim() - where.dim())), other, x)
