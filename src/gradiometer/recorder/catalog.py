"""The tables of a recorded step: which kinds there are, and the rows of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradiometer.columns import PROJECTIONS, Schema
from gradiometer.recorder.kinds import KINDS, Kind, kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Rows:
    """The rows of a table.

    Attributes:
        names: the names of N parameters or taps.
        shapes: of the parameters; empty for taps.
        dtypes: of the parameters, as ``"float32"``; empty for taps.
    """

    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The index of each name."""
        return {name: i for i, name in enumerate(self.names)}


@dataclass(frozen=True)
class Catalog:
    """The tables of a run's steps.

    Attributes:
        parameters: the rows of kinds with ``rows="parameter"``.
        kinds: the kinds by name.
        taps: the rows of kinds with ``rows="tap"``.

    >>> catalog = Catalog.of(("w",), ((2, 3),), ("float32",), ("grads", "activations"), taps=("mlp.out",))
    >>> list(catalog.kinds), catalog.names_of("activations")
    (['grads', 'activations'], ('mlp.out',))
    """

    parameters: Rows
    kinds: Mapping[str, Kind]
    taps: Rows = field(default=Rows())

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        shapes: Iterable[tuple[int, ...]],
        dtypes: Iterable[str],
        kinds: Iterable[str | Kind] = ("grads",),
        taps: Iterable[str] = (),
    ) -> Catalog:
        """Return the catalog of parameters and taps with these kinds, names of registered ones or others."""
        return cls(Rows(tuple(names), tuple(shapes), tuple(dtypes)), kinds_of(kinds), Rows(tuple(taps)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return self.parameters.names

    @cached_property
    def num_tensors(self) -> int:
        """The number of tensors that the ring holds of a step."""
        return sum([len(self.rows(kind.name)) for kind in self.in_ring])

    @cached_property
    def dense(self) -> tuple[Kind, ...]:
        """The kinds that are stored as columns."""
        return tuple([kind for kind in self.kinds.values() if kind.schema.storage == "columns"])

    @cached_property
    def in_ring(self) -> tuple[Kind, ...]:
        """Those of `dense` that are written to the ring of a recorder."""
        return tuple([kind for kind in self.dense if kind.of != "states"])

    @cached_property
    def sparse(self) -> tuple[Kind, ...]:
        """The other kinds."""
        return tuple([kind for kind in self.kinds.values() if kind.schema.storage == "sparse"])

    def kind(self, name: str) -> Kind:
        """Return a kind by name; its KeyError says how to record it."""
        if name not in self.kinds:
            recorded = ", ".join(self.kinds)
            msg = f"{name} were not recorded, only {recorded}; create the Monitor or Recorder with "
            raise KeyError(msg + kinds_of([name])[name].option)
        return self.kinds[name]

    def rows(self, kind: str) -> Rows:
        """Return the rows of a kind's table; raise KeyError if it is not recorded."""
        return self.taps if self.kind(kind).rows == "tap" else self.parameters

    def names_of(self, kind: str) -> tuple[str, ...]:
        """Return the names of a kind's rows; raise KeyError if it is not recorded."""
        return self.rows(kind).names

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the schemas."""
        schemas = {kind.schema.name: kind.schema for kind in self.kinds.values()}
        return {
            "names": list(self.names),
            "shapes": [list(shape) for shape in self.parameters.shapes],
            "dtypes": list(self.parameters.dtypes),
            "taps": list(self.taps.names),
            "kinds": [kind.to_dict() for kind in self.kinds.values()],
            "schemas": [schema.to_dict() for schema in schemas.values()],
        }

    @classmethod
    def from_dict(cls, values: Any) -> Catalog:
        """Return a catalog from what `to_dict` returns.

        Raises:
            ValueError, TypeError, KeyError: for anything else.
        """
        lists = [values[name] for name in ("names", "shapes", "dtypes", "taps", "kinds", "schemas")]
        if not all([isinstance(x, list) for x in [*lists, *values["shapes"]]]):
            msg = "lists"
            raise ValueError(msg)
        schemas = {schema.name: schema for schema in map(Schema.from_dict, values["schemas"])}
        # with derived values, where they are known
        for known in [*[kind.schema for kind in KINDS.values()], *PROJECTIONS.values()]:
            if known.name in schemas and known.stores_the_same(schemas[known.name]):
                schemas[known.name] = known
        kinds = [Kind.from_dict(kind, schemas) for kind in values["kinds"]]
        shapes = tuple([tuple(shape) for shape in values["shapes"]])
        rows = Rows(tuple(values["names"]), shapes, tuple(values["dtypes"]))
        found = cls(rows, {kind.name: kind for kind in kinds}, Rows(tuple(values["taps"])))
        names = (*found.names, *found.taps.names)
        fits = {
            "names": all([isinstance(x, str) for x in names]) and len({*names}) == len(names),
            "shapes": all([isinstance(x, int) and x >= 0 for shape in shapes for x in shape]),
            "dtypes": all([isinstance(x, str) for x in rows.dtypes]),
            "kinds": len(found.kinds) == len(kinds) > 0,
            "lengths": len(found.names) == len(shapes) == len(rows.dtypes),
        }
        for name, fit in fits.items():
            if not fit:
                raise ValueError(name)
        return found
