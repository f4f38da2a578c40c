"""Merge the statistics of each rank into those of the whole model, by one sum and one maximum."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiometer.columns import NUM_FINGERPRINT_COLUMNS, TENSORS
from gradiometer.distributed import collectives, reduction
from gradiometer.distributed.agreement import Agreement
from gradiometer.distributed.calls import Call, CallChecker
from gradiometer.distributed.reduction import Reduced
from gradiometer.distributed.replicas import Replicas
from gradiometer.distributed.sharding import Sharding, check_matches, check_patterns, sharding_of, with_shards
from gradiometer.inputs import check_names, has_float64, named_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradiometer.columns import Schema
    from gradiometer.inputs import Parameters

# seconds
_TIMEOUT = 60.0
_LONGEST = 1e6
_NOTHING: Mapping[str, Any] = {}


class Ranks(Agreement):
    """The agreement of a job's ranks on the rows of all tensors, and on which rank counts which tensor.

    All ranks create it at the same point, once, outside of a compiled step: they compare their tensors, and
    agree on one order of all names. Then ``collect_grads(model, reduce=ranks)``, or ``stats.reduce(ranks)``,
    merges the measurements of all ranks with one sum and one maximum over the group, ``(T, 7)`` and
    ``(T + 8, 2)`` float64 for any model. A rank that does not have a tensor, or its gradient, adds nothing;
    this needs no further communication.

    Raw columns merge over the mesh dimensions in which a tensor is sharded. If ranks have copies, as in
    replicated dimensions or with plain tensors, only the first rank's copy counts.

    Args:
        model: this rank's part of the model, as for `gradiometer.collect_grads`.
        group: the ranks, a process group or a device mesh; None: all.
        shards: tensors whose parts differ between ranks, although no placement shows it: a mapping from a
            regular expression, searched in the name, to the process group of these ranks (None: all).
            Examples are plain shards, and experts, plain or DTensors, that have the same names on each rank.
        timeout: seconds to wait for other ranks: here, and in each reduction on the CPU; a rank that arrives
            later does not break later calls. On other devices the group's own timeout applies.

    Attributes:
        names: the names of the T rows, the same on each rank.
        local_names: the names of this rank's L tensors, in its model's order.
        counted: those of ``local_names`` that this rank counts, because no earlier rank has a copy.
        rank, size: this rank's place in the group, and the number of ranks.

    Raises:
        RankError: on every rank, if they disagree, naming the first difference, or if one does not come.
        ValueError, TypeError: for invalid arguments; for ``shards`` that match no tensor of any rank.

    >>> import torch, gradiometer as gm
    >>> gm.Ranks(torch.nn.Linear(2, 1))  # in a process of its own
    <Ranks: rank 0 of 1, 2 tensors, 2 of them here>
    """

    def __init__(
        self,
        model: Parameters,
        *,
        group: Any = None,
        shards: Mapping[str, Any] | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        if torch.compiler.is_compiling():
            msg = "gm.Ranks: it sets up communication between ranks, which a compiled function cannot do; "
            raise RuntimeError(msg + "create it outside, on all ranks")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < _LONGEST:
            msg = f"Ranks(timeout={timeout!r}): timeout must be a number of seconds, above 0 and below "
            raise ValueError(msg + f"{_LONGEST:g}")
        shards = {} if shards is None else shards
        check_patterns(shards)
        names, tensors = named_parameters(model, "Ranks")
        check_names(names, "Ranks")
        home = next((t.device for t in tensors if has_float64(t.device) and t.device.type != "cpu"), None)
        self._agree(with_shards(sharding_of(names, tensors), shards), group, timeout, home)
        for pattern in shards:
            check_matches(pattern, self.names)

    @classmethod
    def of_sharding(cls, sharding: Sharding, home: torch.device | None, *, group: Any = None) -> Ranks:
        """Agree on tensors with a known sharding, whose columns are on the device ``home``."""
        self = cls.__new__(cls)
        self._agree(sharding, group, _TIMEOUT, None if home is None or home.type == "cpu" else home)
        return self

    def _agree(self, sharding: Sharding, group: Any, timeout: float, home: torch.device | None) -> None:
        super().__init__(sharding, group, timeout, home)
        self._replicas = Replicas(self)
        self._calls = CallChecker()
        # whether all ranks have made their first call with fingerprints or pairs; the same of other schemas
        self._is_wide = False
        self._met_apart: set[str] = set()

    def __copy__(self) -> Ranks:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        # a process group cannot be copied, and all users have to share the number of calls
        return self

    def __reduce__(self) -> Any:
        msg = "gm.Ranks belongs to a process group and cannot be pickled; "
        raise TypeError(msg + "create gm.Ranks(model) in the process that loads it")

    def __repr__(self) -> str:
        """Return one line."""
        here = len(self.local_names)
        return f"<Ranks: rank {self.rank} of {self.size}, {len(self.names)} tensors, {here} of them here>"

    def fail(self, error: Exception, *, schema: Schema = TENSORS, fingerprint: bool = False) -> None:
        """Tell the other ranks, which wait for this one in `reduce`, that it has failed.

        ``schema``, ``fingerprint``: the schema that they reduce, and whether with fingerprints.
        """
        if self.size > 1 and not torch.compiler.is_compiling():
            none = torch.zeros((0, schema.width), dtype=schema.dtype, device=self.device)
            bits = none.new_zeros((0, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64) if fingerprint else None
            with suppress(Exception):
                self.reduce((), none, bits, schema=schema, failure=error)

    def reduce(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        fingerprints: Tensor | None = None,
        *,
        schema: Schema = TENSORS,
        failure: Exception | None = None,
        caller: str = "reduce",
        arguments: Mapping[str, Any] = _NOTHING,
    ) -> Reduced:
        """Return the columns of all rows, merged over the ranks, and where a non-finite value was found.

        It makes at most two collectives, and more for schemas such as that of exponents. Every rank has to
        call it, in the same order, with the same arguments. If one calls something else, it is an error on
        every rank: at once in eager mode on the CPU; in compiled functions and on other devices, where
        nothing waits, the columns are NaN, and ``materialize`` raises.

        Args:
            names: the names of the rows of ``columns``; this rank's other tensors add nothing.
            columns: their ``(len(names), C)``, of the schema's dtype.
            fingerprints: their ``(len(names), 3) int64``, on all ranks or on none.
            schema: how the columns merge. Columns of another dtype than float64, or with more sums or maxima
                than those of fingerprints and pairs, merge after the calls were compared. On devices other
                than the CPU, a rank that makes a different call may leave the others to the timeout of the
                group then.
            failure: the error because of which this rank has no columns.
            caller: the name of the call, the same on all ranks; not checked in compiled functions.
            arguments: those of its arguments that are among `calls.ARGUMENTS`.

        Returns:
            the merged columns, origins and fingerprints, see `Reduced`.

        Raises:
            RankError: if a rank makes a different call, or does not respond.
            ValueError: if a name is not one of this rank's.
        """
        if schema is not TENSORS:
            caller = f"{caller} of {schema.name}"
        if fingerprints is not None:
            caller = f"{caller} with fingerprint=True"
        if self.device.type != "cpu":
            # otherwise a rank whose gradients are all on its second device would use that one, unlike the
            # others
            columns = columns.to(self.device, non_blocking=True)
            if fingerprints is not None:
                fingerprints = fingerprints.to(self.device, non_blocking=True)
        call = Call(caller, arguments, failure)
        if not reduction.is_apart(schema):
            return self._reduced(call, schema, names, columns, fingerprints)
        # nothing waits in the reduction, whose result another call would leave to the timeout of the group
        is_async = self.device.type != "cpu" and self.size > 1 and not torch.compiler.is_compiling()
        if is_async and schema.name not in self._met_apart:
            collectives.rendezvous(self.group, self.timeout, f"reduce of {schema.name}")
            self._met_apart.add(schema.name)
        try:
            origin = self._reduced(call, schema, names, columns, None).origin
        except Exception:
            if is_async:
                # the others do not know yet, and go on
                with suppress(Exception):
                    self._merged_apart(schema, columns.new_zeros((len(self.names), schema.width)))
            raise
        merged = self.to_rows(names, columns)
        return Reduced(merged if self.size == 1 else self._merged_apart(schema, merged), origin)

    def _merged_apart(self, schema: Schema, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, merged in collectives of their own."""
        pairs = zip(schema.by_merge(rows), ("sum", "max"), strict=True)
        parts = [collectives.all_reduce(x, how, self.group, self.timeout) for x, how in pairs if x.shape[1]]
        return torch.cat(parts, dim=1)

    def _reduced(
        self, call: Call, schema: Schema, names: tuple[str, ...], columns: Tensor, fingerprints: Tensor | None
    ) -> Reduced:
        try:
            rows = reduction.pack(self, schema, names, columns)
            bits = None if fingerprints is None else self.bits_of(names, fingerprints)
        except ValueError as error:
            if torch.compiler.is_compiling() or self.size == 1:
                raise
            # the others wait for this rank
            call = call._replace(failure=error)
            rows = reduction.pack(self, schema, (), columns[:0])
            bits = None if fingerprints is None else self.bits_of((), fingerprints[:0])
        if self.size == 1:
            found = (None, None) if bits is None else self.merged_bits(bits)
            return Reduced(rows[:, :-1], reduction.origins(1, rows[:, -1]), *found)
        widened = reduction.is_wide(schema) or bits is not None
        if widened and not self._is_wide and not torch.compiler.is_compiling():
            # sizes are the same from then on
            collectives.rendezvous(self.group, self.timeout, "reduce with fingerprint=True, or of pairs")
            self._is_wide = True
        widened |= self._is_wide
        merged, origin, summed = reduction.merge(self, self._calls, call, schema, rows, bits, widened=widened)
        found = (None, None) if bits is None else self.merged_bits(summed)
        return Reduced(merged, origin, *found)

    def merged_bits(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return fingerprints and whether copies differ, from the results of `bits_of` of all ranks.

        ``(..., T, 10) float64 -> (..., T, 3) int64, (..., T) bool``.
        """
        return self._replicas.merged(sums)

    def bits_of(self, names: tuple[str, ...], fingerprints: Tensor) -> Tensor:
        """Return what this rank adds to the fingerprints of all rows, ``(T, 10) float64``; see `Replicas`.

        ``fingerprints``: ``(len(names), 3) int64``; a row with -1 bytes adds nothing.
        """
        indices = None if names == self.local_names else [self._indices[name] for name in names]
        whole, copies = self._replicas.parts(indices, fingerprints)
        return torch.cat([self.to_rows(names, whole), self.spread(names, copies)], dim=1)

    def norm_of(self, norm: Tensor, order: float) -> Tensor:
        """Return the norm of all ranks' norms, 0-d float64, of any order but 0.

        ``norm``: this rank's, not NaN; if it has none, the identity: 0, or inf for a negative order. It
        makes at most two collectives of one number.
        """
        if self.size == 1:
            return norm
        if order > 0:
            norm = norm.clamp(max=torch.finfo(torch.float64).max)
        # the norm that dominates: the largest, or the smallest for a negative order
        sign = 1.0 if order > 0 else -1.0
        most = sign * collectives.all_reduce(sign * norm, "max", self.group, self.timeout)
        if math.inf in {order, -order}:
            return most
        # in this unit no power overflows
        unit = torch.where((most > 0.0) & (most < math.inf), most, 1.0)
        powers = collectives.all_reduce((norm / unit) ** order, "sum", self.group, self.timeout)
        return powers ** (1.0 / order) * unit
