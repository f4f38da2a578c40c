"""One table of a recorded step: what was measured of the tensors of a kind."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from gradiometer.columns import DEFAULT_THRESHOLDS, Fingerprint
from gradiometer.stats import report_of, stats_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.catalog import Rows
    from gradiometer.recorder.kinds import Kind
    from gradiometer.stats import TableReport


class Table:
    """What was measured of N tensors of a kind; a snapshot on the host, which `Table.report` shows by name.

    Args:
        kind: the kind.
        rows: the N rows.
        values: ``(N, C)``, the raw columns in the order of ``kind.schema.columns``, with 0 elements in rows
            that were not measured; or a function that returns it, called by the first thread that needs it.
        flags: ``(N,) int32``, bits of `gradiometer.Flag`; None: computed from the columns.
        thresholds: the limits of the flags.
        fingerprints: ``(N, 3) int64``, as in `gradiometer.TensorStats`, if they were recorded.
        origin: ``(N,) int64``, for a step merged over several ranks: the first rank, by its index in the
            group, whose part has a NaN or Inf; -1 if none has.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> recorder = gm.Recorder(model)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> recorder.record()
    >>> table = recorder.read()[0].tables["grads"]
    >>> table.rows.names, table.value("norm"), table.total("norm")
    (('weight', 'bias'), tensor([5., 1.], dtype=torch.float64), 5.0990195135927845)
    """

    def __init__(
        self,
        kind: Kind,
        rows: Rows,
        values: Tensor | Callable[[], Tensor],
        flags: Tensor | None = None,
        *,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        fingerprints: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        self.kind, self.rows, self.thresholds = kind, rows, thresholds
        self.fingerprints, self.origin = fingerprints, origin
        # dense values, a function that returns them, or what `sparse` returns
        self._values: Tensor | Callable[[], Tensor] | tuple[Tensor, Tensor] = values
        self._flags = flags
        self._cache: dict[str, Any] = {}

    @classmethod
    def of_sparse(cls, kind: Kind, rows: Rows, positions: Tensor, counts: Tensor) -> Table:
        """Return a table from what `sparse` returns."""
        return cls(kind, rows, (positions, counts))  # type: ignore[arg-type] # as `sparse` keeps it

    def __repr__(self) -> str:
        return f"<Table: {self.kind.name} of {len(self.rows)} tensors>"

    @property
    def values(self) -> Tensor:
        """The raw columns, ``(N, C)``."""
        kept = self._values
        if isinstance(kept, torch.Tensor):
            return kept
        if isinstance(kept, tuple):
            schema, (positions, counts) = self.kind.schema, kept
            flat = torch.zeros(len(self.rows) * schema.width, dtype=schema.dtype, device="cpu")
            return flat.index_copy_(0, positions, counts).view(len(self.rows), schema.width)
        values = kept()
        if self.kind.schema.storage == "columns":
            self._values = values
        return values

    def sparse(self) -> tuple[Tensor, Tensor]:
        """Return where values other than 0 are in ``(N, C)``, flat, ascending, and these; ``(M,)`` each.

        For a kind with ``storage="sparse"`` only these are kept from then on.
        """
        # read once: another thread may do the same
        kept = self._values
        if isinstance(kept, tuple):
            return kept
        flat = self.values.reshape(-1)
        positions = flat.nonzero().view(-1)
        found = positions, flat[positions]
        if self.kind.schema.storage == "sparse":
            self._values = found
        return found

    @property
    def flags(self) -> Tensor:
        """The flags, ``(N,) int32``, bits of `gradiometer.Flag`."""
        if self._flags is None:
            self._flags = self.kind.flags_of(self.values, self.thresholds)
        return self._flags

    @cached_property
    def measured(self) -> Tensor:
        """Which rows were measured, ``(N,) bool``."""
        # a run has sparse schemas without their derived values, such as the number of elements
        return (self.value("numel") if "numel" in self.kind.schema else self.values.count_nonzero(dim=1)) > 0

    def value(self, name: str) -> Tensor:
        """Return a raw column or derived value by name, ``(N,)``; of 0 columns where nothing was measured.

        Raises:
            KeyError: for an unknown name.
        """
        found: Tensor = self._cached(f"value {name}", lambda: self.kind.schema.value(self.values, name))
        return found

    @cached_property
    def merged(self) -> Tensor:
        """The raw columns of all rows together, ``(C,)``."""
        return self.kind.schema.merge_rows(self.values)

    def total(self, name: str = "norm") -> float:
        """Return a raw column or derived value, by name, of all rows together."""
        if name == "finite_norm":
            return math.sqrt(self.total("sumsq"))
        found: float = self._cached(f"total {name}", lambda: float(self.kind.schema.value(self.merged, name)))
        return found

    def _cached(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    def fingerprints_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the fingerprints of those of these rows that have one, as text."""
        if self.fingerprints is None:
            return {}
        index, measured = self.rows.index, self.measured
        found = {
            name: Fingerprint.of_row(self.fingerprints[index[name]].tolist())
            for name in names
            if name in index and measured[index[name]]
        }
        return {name: str(bits) for name, bits in found.items() if bits is not None}

    def report(self, names: Iterable[str] | None = None) -> TableReport[Any]:
        """Return the report of the measured rows, or of those among ``names``."""
        keep = self.measured
        if names is not None:
            chosen = {*names}
            keep = keep & torch.tensor([x in chosen for x in self.rows.names], dtype=torch.bool, device="cpu")
        return report_of(
            self.kind.schema,
            tuple(itertools.compress(self.rows.names, keep.tolist())),
            self.values[keep],
            flags=self.flags[keep] if self.kind.schema.flags else None,
            thresholds=self.thresholds,
            fingerprints=None if self.fingerprints is None else self.fingerprints[keep],
        )

    def stats(self) -> Any:
        """Return the measured rows as stats on the CPU, such as `gradiometer.ExponentStats`."""
        names = tuple(itertools.compress(self.rows.names, self.measured.tolist()))
        return stats_of(self.kind.schema, names, self.values[self.measured])
