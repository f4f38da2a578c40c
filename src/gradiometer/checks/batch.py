"""The tensors of a batch, and what each of them is: tokens, values, a mask or labels."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_MASK: Final = re.compile(r"mask|allowed|valid|^pad(ding)?s?$", re.IGNORECASE)
# masks that are True, or 1, where a token is left out, as in torch.nn.MultiheadAttention
_INVERTED: Final = re.compile(r"padding_mask|ignore|^pad(ding)?s?$", re.IGNORECASE)
_LABELS: Final = re.compile(r"label|target(?!_ids)|^y$|answer", re.IGNORECASE)
_NO_TOKENS: Final = re.compile(r"position|token_type|segment|length|index|indices|step|time", re.IGNORECASE)
# the names of elements of a tuple that the model does not take
_LEFT: Final = "element "
# the name of an argument that is a whole tuple
_BATCH: Final = re.compile(r"(mini_?)?batch(_data)?")
_OF_DECODER: Final = re.compile(r"decoder|tgt|target", re.IGNORECASE)


@dataclass(frozen=True)
class Stream:
    """A sequence that goes into the model.

    Attributes:
        name: the name in the batch.
        tensor: ``(B, T)`` integer tokens, or floating-point values ``(B, ...)``.
        mask: the name of the mask ``(B, T)`` of these tokens; None without.
    """

    name: str
    tensor: Tensor
    mask: str | None = None

    @property
    def is_tokens(self) -> bool:
        """Whether these are numbers of tokens."""
        return not self.tensor.is_floating_point()

    @property
    def length(self) -> int:
        """The number of positions: the size of dimension 1."""
        return self.tensor.shape[1] if self.tensor.dim() > 1 else 1

    @property
    def is_sequence(self) -> bool:
        """Whether dimension 1 is that of positions: tokens, or vectors ``(B, T, C)``."""
        return self.length > 1 and (self.is_tokens or self.tensor.dim() == 3)


class Batch:
    """A batch by the names of its tensors, and the arguments that a model takes of it.

    Args:
        model: the model.
        batch: a mapping of arguments by name, a tuple of arguments by position which may end with labels, or
            one argument.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.given = batch
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):
            self._signature = None
        self.arguments = self._named(batch)
        self.tensors = {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}
        self.labels = next((name for name in self.tensors if _LABELS.search(name)), None)

    def takes(self, name: str) -> bool:
        """Return whether the model has an argument of this name."""
        return self._signature is not None and name in self._signature.parameters

    def is_taken(self, name: str) -> bool:
        """Return whether `call` passes an entry to the model."""
        if self.is_whole:
            return True
        if self._signature is None or not isinstance(self.given, Mapping):
            return not name.startswith(_LEFT)
        kinds = [p.kind for p in self._signature.parameters.values()]
        return inspect.Parameter.VAR_KEYWORD in kinds or name in self._signature.parameters

    def streams(self) -> list[Stream]:
        """Return the sequences that go into the model; that of a decoder is the last."""
        masks = [name for name in self.tensors if self.is_mask(name)]
        found = []
        for name, x in self.tensors.items():
            if name in masks or name == self.labels or x.dim() < 2 or _NO_TOKENS.search(name):
                continue
            if x.dtype == torch.bool or x.is_complex() or (not x.is_floating_point() and x.dim() != 2):
                continue
            found.append(Stream(name, x, self._mask_of(name, x, masks)))
        return sorted(found, key=lambda each: bool(_OF_DECODER.search(each.name)))

    def is_mask(self, name: str) -> bool:
        """Return whether a tensor ``(B, T)`` tells which tokens are none, by its name and its values."""
        x = self.tensors[name]
        if x.dim() != 2 or (self.labels == name):
            return False
        return x.dtype == torch.bool or (bool(_MASK.search(name)) and bool(((x == 0) | (x == 1)).all()))

    def kept(self, name: str) -> Tensor:
        """Return where a mask lets a token in, bool."""
        mask = self.tensors[name] != 0
        return ~mask if _INVERTED.search(name) else mask

    def as_mask(self, name: str, kept: Tensor) -> Tensor:
        """Return a mask of the dtype and meaning of that name."""
        values = ~kept if _INVERTED.search(name) else kept
        return values.to(self.tensors[name].dtype) if name in self.tensors else values.long()

    def changed(self, changes: Mapping[str, Any], *, labels: bool = True) -> Any:
        """Return a batch like the one that was given, with other values of some arguments."""
        # a model may write to them, and take entries out of containers
        values = {name: copied(x) for name, x in self.arguments.items() if name not in changes}
        values = {name: changes.get(name, values.get(name)) for name in [*self.arguments, *changes]}
        if isinstance(self.given, Mapping):
            kept = {name: x for name, x in values.items() if labels or name != self.labels}
            return like(self.given, kept)
        if isinstance(self.given, list | tuple):
            return like(self.given, [values[name] for name in self._named(self.given)])
        return values[next(iter(self._named(self.given)))]

    @property
    def is_whole(self) -> bool:
        """Whether the model takes the batch as one argument, the only one that it needs."""
        if self._signature is None or not isinstance(self.given, Mapping | list | tuple):
            return False
        needed = [name for name, p in self._signature.parameters.items() if p.default is p.empty]
        is_plain = len(needed) == 1 and needed[0] in self._names()
        if isinstance(self.given, Mapping):
            return is_plain and not self.given.keys() & self._signature.parameters.keys()
        return is_plain and bool(_BATCH.fullmatch(needed[0]))

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Call a model with what it takes of a batch."""
        if self.is_whole:
            return model(batch)
        if isinstance(batch, Mapping):
            known = None if self._signature is None else self._signature.parameters
            if known is None or any(p.kind is p.VAR_KEYWORD for p in known.values()):
                return model(**batch)
            return model(**{name: x for name, x in batch.items() if name in known})
        if isinstance(batch, list | tuple):
            return model(*batch[: self._positional(len(batch))])
        return model(batch)

    def _mask_of(self, name: str, x: Tensor, masks: list[str]) -> str | None:
        if x.dim() > 3:
            return None
        fitting = [mask for mask in masks if self.tensors[mask].shape == x.shape[:2]]
        is_decoder = bool(_OF_DECODER.search(name))
        return next((mask for mask in fitting if bool(_OF_DECODER.search(mask)) == is_decoder), None)

    def _named(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return {str(name): x for name, x in batch.items()}
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        if self.is_whole:
            names = list(getattr(batch, "_fields", [f"{_LEFT}{i}" for i in range(len(values))]))
            if len(names) > 1 and not hasattr(batch, "_fields"):
                names[-1] = "labels"
            return dict(zip(names, values, strict=True))
        names = self._names()
        taken = self._positional(len(values))
        names = [names[i] if i < len(names) else f"argument {i}" for i in range(taken)]
        names += [f"{_LEFT}{i}" for i in range(taken, len(values))]
        if isinstance(batch, list | tuple) and taken == len(values) - 1:
            names[-1] = "labels"
        return dict(zip(names, values, strict=True))

    def _names(self) -> list[str]:
        if self._signature is None:
            return []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [name for name, p in self._signature.parameters.items() if p.kind in kinds]

    def _positional(self, count: int) -> int:
        """Return how many elements of a tuple the model takes: those that it needs, if there are more."""
        if self._signature is None:
            return count
        needed = [
            p
            for name, p in self._signature.parameters.items()
            if name in self._names() and p.default is p.empty
        ]
        return min(count, max(len(needed), 1)) if count > 1 else count


def like(given: Any, parts: Any) -> Any:
    """Return a container of the kind of another one, with other parts: a dict, or a list."""
    if isinstance(given, Mapping):
        # other mappings may have attributes, too
        with suppress(Exception):
            found = copy.copy(given)
            if type(given) is not dict and isinstance(found, MutableMapping) and found is not given:
                found.clear()
                found.update(parts)
                return found
        return dict(parts)
    if hasattr(given, "_fields"):
        return type(given)(*parts)
    return list(parts) if isinstance(given, list) else tuple(parts)


def copied(value: Any) -> Any:
    """Return copies of tensors and of the containers that they are in; other objects as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return like(value, {key: copied(x) for key, x in value.items()})
    if isinstance(value, list | tuple):
        return like(value, [copied(x) for x in value])
    return value


def output_of(result: Any) -> Tensor | None:
    """Return the logits or the last hidden state of a result; otherwise its first such tensor."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, Tensor):
            return found
    floating = [x for x in tensors_of(result) if x.is_floating_point() and x.dim() > 0]
    return floating[0] if floating else None


def tensors_of(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in what a model returned: also in objects, as a dataclass or a distribution."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part, depth - 1)
    elif (
        depth
        and not isinstance(value, nn.Module | type)
        and isinstance(getattr(value, "__dict__", None), dict)
    ):
        for part in list(vars(value).values()):
            yield from tensors_of(part, depth - 1)


def loss_of(result: Any) -> Tensor | None:
    """Return the loss in what a model returned, if it has one."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found if isinstance(found, Tensor) and found.numel() == 1 else None
