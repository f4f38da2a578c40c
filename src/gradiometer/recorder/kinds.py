"""What a step records: a kind for each table of a step, and the registry of these kinds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from gradiometer.columns import (
    ACTIVATIONS,
    ATTENTION,
    DEFAULT_PROJECTIONS,
    EXPONENTS,
    PAIRS,
    PROJECTIONS,
    RESIDUAL,
    TENSORS,
    Flag,
    Schema,
    Thresholds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

RowSpace = Literal["parameter", "tap"]
Source = Literal["grads", "weights", "states"]

LOSS_ORDER: Final = 2.0
"""The place of the loss in the order in which a step computes its kinds."""

# names of states that are names of kinds, too: those of a Python identifier
_STATE: Final = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)


@dataclass(frozen=True)
class Kind:
    """One table of a recorded step: what it measures, and of which tensors.

    Attributes:
        name: such as ``"grads"``.
        schema: the columns of a row.
        noun: of one tensor, such as ``"gradient"``.
        suffix: of a tensor's display name, such as ``".grad"``.
        rows: ``"parameter"``: a row for each parameter; ``"tap"``: for each tap.
        order: the place in the order in which a step computes its kinds; that of the loss is `LOSS_ORDER`.
        is_backward: whether the tensors are computed from the model's last to its first.
        has_fingerprints: whether fingerprints of the same tensors can be recorded.
        option: the argument that makes a Monitor or Recorder record it, such as ``"weights=True"``.
        of: the kind whose tensors ``measure`` gets, ``"grads"`` or ``"weights"``; ``"states"``: it is a state
            of an optimizer, which a Monitor measures after the update, and which is not in the ring.
        measure: of a kind of your own: a function from T tensors on one device to their raw columns,
            ``(T, C)`` on that device. It runs in each `gradiometer.Recorder.record`, also in compiled steps.

    >>> KINDS["updates"].label("blocks.3.w")
    'blocks.3.w.update'
    """

    name: str
    schema: Schema
    noun: str
    suffix: str = ""
    rows: RowSpace = "parameter"
    order: float = 6.0
    is_backward: bool = False
    has_fingerprints: bool = False
    option: str = "kinds=[...]"
    of: Source = "grads"
    measure: Callable[[Sequence[Tensor]], Tensor] | None = field(default=None, compare=False, repr=False)

    def label(self, name: str) -> str:
        """Return a tensor's display name."""
        return name + self.suffix

    def flags_of(self, columns: Tensor, thresholds: Thresholds) -> Tensor:
        """Return the flags of rows, ``(..., C) -> (...) int32``; those of a state only tell NaN and Inf.

        A second moment is the square of a gradient, so the limits of norms of gradients do not fit it.
        """
        if self.of == "states":
            thresholds = replace(thresholds, vanishing=0.0, exploding=math.inf, dead=math.inf)
            finite = Flag.NAN | Flag.INF
            return self.schema.flags_of(columns, thresholds) & int(finite)
        return self.schema.flags_of(columns, thresholds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the name of the schema only."""
        values = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "measure"}
        return values | {"schema": self.schema.name}

    @classmethod
    def from_dict(cls, values: Any, schemas: Mapping[str, Schema]) -> Kind:
        """Return the registered kind of this name and schema, or one without functions.

        Raises:
            ValueError, TypeError, KeyError: for anything but what `to_dict` returns.
        """
        found = cls(**{**values, "schema": schemas[values["schema"]]})
        texts = (found.name, found.noun, found.suffix, found.option)
        if (
            not all([isinstance(text, str) for text in texts])
            or found.rows not in get_args(RowSpace)
            or found.of not in get_args(Source)
            or not isinstance(found.order, (int, float))
            or found.measure is not None
            or not {found.is_backward, found.has_fingerprints} <= {True, False}
        ):
            msg = f"kind {found.name!r:.40}"
            raise ValueError(msg)
        known = KINDS.get(found.name)
        return known if known is not None and known.schema == found.schema else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        # functions of schemas cannot be pickled
        is_registered = KINDS.get(self.name) is self
        return (kind_named, (self.name,)) if is_registered else super().__reduce_ex__(protocol)


GRADS: Final = Kind("grads", TENSORS, "gradient", ".grad", order=4.0, is_backward=True, has_fingerprints=True)
WEIGHTS: Final = Kind("weights", TENSORS, "weight", order=0.0, has_fingerprints=True, option="weights=True")
UPDATES: Final = Kind("updates", PAIRS, "update", ".update", option="updates=True")
ACTIVATION_VALUES: Final = Kind(
    "activations", ACTIVATIONS, "activation", rows="tap", order=1.0, option="taps=..."
)
ACTIVATION_GRADS: Final = Kind(
    "activation_grads",
    ACTIVATIONS,
    "activation's gradient",
    ".grad",
    rows="tap",
    order=3.0,
    is_backward=True,
    option="taps=...",
)
ATTENTION_HEADS: Final = Kind(
    "attention", ATTENTION, "attention head", rows="tap", order=1.0, option="gm.Taps(model, attention=...)"
)
RESIDUALS: Final = Kind(
    "residual", RESIDUAL, "block", rows="tap", order=1.0, option="gm.Taps(model, residual=...)"
)
GRAD_EXPONENTS: Final = Kind("grad_exponents", EXPONENTS, "gradient", ".grad", option="precision=100")
WEIGHT_EXPONENTS: Final = Kind("weight_exponents", EXPONENTS, "weight", option="precision=100", of="weights")
GRAD_PROJECTIONS: Final = Kind(
    "grad_projections", PROJECTIONS[DEFAULT_PROJECTIONS], "gradient", ".grad", option="projections=16"
)
WEIGHT_PROJECTIONS: Final = Kind(
    "weight_projections",
    PROJECTIONS[DEFAULT_PROJECTIONS],
    "weight",
    option="projections=16, weights=True",
    of="weights",
)


def _of_state(name: str) -> Kind:
    # computed from the gradients, before the updates
    return Kind(name, TENSORS, name, f".{name}", order=5.0, option="optimizer=..., states=10", of="states")


KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        *(GRADS, WEIGHTS, UPDATES, ACTIVATION_VALUES, ACTIVATION_GRADS),
        *(ATTENTION_HEADS, RESIDUALS),
        *(GRAD_EXPONENTS, WEIGHT_EXPONENTS),
        *(GRAD_PROJECTIONS, WEIGHT_PROJECTIONS),
        *map(_of_state, ("exp_avg", "exp_avg_sq", "momentum_buffer")),
    )
}
"""The kinds by name, in the order of a record's tables; `register` adds others."""


def is_alike(kind: Kind, known: Kind) -> bool:
    """Return whether two kinds are equal, up to the number of projections."""
    schemas = tuple(PROJECTIONS.values())
    if kind.schema in schemas and known.schema in schemas:
        kind = replace(kind, schema=known.schema)
    return kind == known


def described(kinds: Kind | Iterable[Kind]) -> list[Any]:
    """Return plain values of kinds of your own, which are equal on all ranks; no function is in them."""
    own = (kinds,) if isinstance(kinds, Kind) else kinds
    return [
        [kind.to_dict(), kind.schema.to_dict()] if isinstance(kind, Kind) else f"{kind!r:.80}" for kind in own
    ]


def requested(
    *,
    weights: bool,
    updates: bool,
    taps: bool,
    precision: bool,
    projections: int | None = None,
    kinds: Kind | Iterable[Kind] = (),
) -> list[Kind]:
    """Return the kinds that a recorder with these arguments records; those of your own are registered."""
    own = (kinds,) if isinstance(kinds, Kind) else tuple(kinds)
    for kind in own:
        if not isinstance(kind, Kind) or kind.measure is None or kind.rows != "parameter":
            given = f"the kind {kind.name!r} without them" if isinstance(kind, Kind) else f"{kind!r:.80}"
            msg = "kinds: expected gm.recorder.Kind(..., measure=...) with rows of parameters, got "
            raise TypeError(msg + given)
        register(kind)
    asked = {
        GRADS: True,
        WEIGHTS: weights,
        UPDATES: updates,
        ACTIVATION_VALUES: taps,
        ACTIVATION_GRADS: taps,
        GRAD_EXPONENTS: precision,
        WEIGHT_EXPONENTS: precision and weights,
    }
    found = [kind for kind, is_asked in asked.items() if is_asked]
    if projections is not None:
        projected = (GRAD_PROJECTIONS, WEIGHT_PROJECTIONS)[: 1 + weights]
        found += [replace(kind, schema=PROJECTIONS[projections]) for kind in projected]
    return [*found, *own]


def register(kind: Kind) -> Kind:
    """Add a kind of your own to `KINDS`, and return it.

    Sinks then know its statistics, and its derived values are known wherever a run is read in this process. A
    kind that is registered again, as by a notebook's cell, replaces the one before.

    Raises:
        ValueError: if there is another kind of this name.
    """
    known = KINDS.get(kind.name, kind)
    if known is not kind and (known.measure is None or described(known) != described(kind)):
        msg = f"there is another kind {kind.name!r} of schema {known.schema.name}; rename one"
        raise ValueError(msg)
    KINDS[kind.name] = kind
    return kind


def state_kind(name: str) -> Kind:
    """Return the kind of a state of an optimizer, such as ``"exp_avg_sq"``, and register it.

    Raises:
        ValueError: for a name that a kind cannot have.
    """
    if not isinstance(name, str) or not _STATE.fullmatch(name) or name in {"total", "finite"}:
        msg = f"states: {name!r:.40} cannot be the name of a state of an optimizer; pass such as 'exp_avg_sq'"
        raise ValueError(msg)
    kind = _of_state(name)
    return KINDS[name] if KINDS.get(name) == kind else register(kind)


def kind_named(name: str) -> Kind:
    """Return a registered kind; raise KeyError if there is none."""
    if name not in KINDS:
        msg = f"there is no kind {name!r}; choose from {', '.join(KINDS)}"
        raise KeyError(msg)
    return KINDS[name]


def kinds_of(names: Iterable[str | Kind]) -> dict[str, Kind]:
    """Return kinds by name, in the order of the registry."""
    found = [kind_named(kind) if isinstance(kind, str) else kind for kind in names]
    order = list(KINDS)
    found.sort(key=lambda kind: order.index(kind.name) if kind.name in KINDS else len(order))
    # the same on all ranks, whatever each has registered before
    found.sort(key=lambda kind: (kind.of == "states", kind.name if kind.of == "states" else ""))
    return {kind.name: kind for kind in found}


def label(kind: str, name: str) -> str:
    """Return a tensor's display name.

    ``blocks.3.w.grad``, ``blocks.3.w`` and ``blocks.3.w.update`` of a parameter; ``blocks.3.mlp.out`` and
    ``blocks.3.mlp.out.grad`` of a tap.
    """
    return KINDS[kind].label(name) if kind in KINDS else f"{name}.{kind}"
