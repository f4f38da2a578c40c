"""Merge the statistics of each rank into those of the whole model, by one sum and one maximum."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import Counter
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import (
    COLUMN_INDEX,
    NUM_COLUMNS,
    NUM_EXPONENT_COLUMNS,
    NUM_FINGERPRINT_COLUMNS,
    NUM_PAIR_SUMS,
    NUM_SUM_COLUMNS,
    derived,
    pair_value,
)
from gradiometer.distributed import calls, collectives, process_groups, replicas
from gradiometer.distributed.rendezvous import RankError
from gradiometer.distributed.replicas import Replicas
from gradiometer.distributed.shard_patterns import check_matches, check_patterns, with_shards
from gradiometer.distributed.sharding import Sharding, ShardSpec, sharding_of
from gradiometer.distributed.sharding_exchange import exchange_shardings
from gradiometer.inputs import (
    check_names,
    has_float64,
    named_parameters,
    on_device,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed.process_groups import Group
    from gradiometer.inputs import Parameters

__all__ = ["Ranks", "divergence_text", "minority"]

# columns of the sum over ranks once fingerprints or pairs were reduced
_WIDE = NUM_SUM_COLUMNS + replicas.NUM_SUMMED

# code of a row that a rank has measured and found finite; less than the code of any rank
_MEASURED = 0.5

# seconds
_TIMEOUT = 60.0

# number of distinct kinds of calls: together with a 32-bit hash they fit exactly into a float64
_KINDS = 1 << 20
# seconds for ranks to report their calls, once these differ
_MOMENT = 10.0
# seconds
_LONGEST = 1e6
_NOTHING: Mapping[str, Any] = {}


class Reduced(NamedTuple):
    """The result of `Ranks.reduce`.

    ``columns``: ``(T, C) float64``. ``origin``: ``(T,) float64``, the first rank, by its place in the group,
    that has a NaN or Inf in its part or copy, whether counted or not; -1: none; -2: no rank that counts this
    row has measured it; -3 in every row: the calls differ; -4 - i: the arguments ``ARGUMENTS[i]`` differ.
    ``fingerprints``: ``(T, 3) int64``, of whole tensors; -1 bytes if they cannot be had from those of the
    parts. ``diverged``: ``(T,) bool``, whether ranks that hold the same part or copy have different bits.
    """

    columns: Tensor
    origin: Tensor
    fingerprints: Tensor | None = None
    diverged: Tensor | None = None


class Ranks:
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
            msg += "create it outside, on all ranks"
            raise RuntimeError(msg)
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
        self.sharding = sharding
        self.local_names = sharding.names
        self.timeout = float(timeout)
        # a weak reference: the group ends when torch.distributed destroys it
        self._group: Any = _no_group
        self.rank, self.global_ranks = 0, [0]
        if group is not None or process_groups.is_active():
            live = process_groups.group_of(group)
            self._group = weakref.ref(live)
            self.rank, self.global_ranks = process_groups.ranks_of(live)
        self.size = len(self.global_ranks)
        self.plan, kinds = exchange_shardings(sharding, home, self.group, self.size, self.timeout)
        if home is None and kinds:
            # the others reduce on such a device, so a rank without tensors there has to use one too
            home = torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
        self.names = self.plan.names
        rows = {name: row for row, name in enumerate(self.names)}
        # the rows of this rank's tensors
        self._rows = [rows[name] for name in self.local_names]
        self._is_whole = self.local_names == self.names
        self._places = {name: place for place, name in enumerate(self.local_names)}
        counted = self.plan.counts(self.rank)
        self._counts_all = all(counted)
        self.counted = frozenset(compress(self.local_names, counted))
        own = set(compress(self._rows, counted))
        mask = [row in own for row in range(len(self.names))]
        self._counted = torch.tensor(mask, dtype=torch.bool, device=home or "cpu").unsqueeze(1)
        self._replicas = Replicas(self.plan, self.rank, sharding, self._counted.device)
        self._calls = 0
        self._is_wide = self._has_histograms = False
        self._checked: Sharding | None = sharding
        # the same on all ranks
        self._hash = zlib.crc32(b"".join(self.plan.shardings))

    @property
    def device(self) -> torch.device:
        """The device of merged columns: that of this rank's model, or the CPU."""
        return self._counted.device

    @property
    def group(self) -> Group:
        """The process group; None if there is one rank and no group.

        Raises:
            RankError: if it was destroyed.
        """
        group = self._group()
        if group is None and self._group is not _no_group:
            msg = "the process group of these gm.Ranks was destroyed; create gm.Ranks again"
            raise RankError(msg)
        return group

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

    def where(self, name: str, rank: int) -> str:
        """Return a rank's position in the mesh of a tensor: ``rank 5, dp_shard 1 of 4, tp 0 of 2``.

        ``rank`` is its place in the group.
        """
        return self.plan.where(self.names.index(name), rank)

    def to_rows(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        """Return this rank's contribution to all rows: ``(len(names), ...) -> (T, ...)``; 0 adds nothing.

        Raises:
            ValueError: if a name is not one of this rank's.
        """
        columns = self._spread(names, columns)
        if not self._counts_all:
            counted = on_device(self._counted, columns.device)
            # do not multiply by 0: a sum of squares may be inf
            columns = torch.where(counted, columns, columns.new_zeros(()))
        return columns

    def _spread(self, names: tuple[str, ...], columns: Tensor) -> Tensor:
        same = names == self.local_names
        if not (same and self._is_whole):
            rows = self._rows if same else self._rows_of(names)
            if columns.device.type == "cpu" and not torch.compiler.is_compiling():
                # on other devices the index would have to be copied there
                spread = columns.new_zeros((len(self.names), *columns.shape[1:]))
                columns = spread.index_copy_(0, torch.tensor(rows, dtype=torch.int64, device="cpu"), columns)
            else:
                columns = derived.spread(columns, rows, len(self.names))
        return columns

    def _rows_of(self, names: tuple[str, ...]) -> list[int]:
        unknown = [name for name in names if name not in self._places]
        if unknown:
            msg = f"reduce: {unknown[0]!r} is not among the tensors that gm.Ranks was created with; "
            msg += "pass the model or mapping that it was created with (model.parameters() has no names), "
            raise ValueError(msg + "or create gm.Ranks again on all ranks")
        return [self._rows[self._places[name]] for name in names]

    def fail(self, error: Exception, *, is_wide: bool = False, is_histogram: bool = False) -> None:
        """Tell the other ranks, which wait for this one in `reduce`, that it has failed.

        ``is_wide``: whether they reduce fingerprints or pairs. ``is_histogram``: whether they wait in
        `reduce_histograms`.
        """
        if self.size > 1 and not torch.compiler.is_compiling():
            if is_histogram:
                size = 0, NUM_EXPONENT_COLUMNS
                none = torch.zeros(size, dtype=torch.int64, device=self._counted.device)
                with suppress(Exception):
                    self.reduce_histograms((), none, failure=error)
                return
            nothing = torch.zeros((0, NUM_COLUMNS), dtype=torch.float64, device=self._counted.device)
            bits = nothing.new_zeros((0, NUM_FINGERPRINT_COLUMNS), dtype=torch.int64) if is_wide else None
            with suppress(Exception):
                self.reduce((), nothing, bits, failure=error)

    def reduce(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        fingerprints: Tensor | None = None,
        *,
        pairs: bool = False,
        failure: Exception | None = None,
        what: str = "reduce",
        arguments: Mapping[str, Any] = _NOTHING,
    ) -> Reduced:
        """Return the columns of all rows, merged over the ranks, and where a non-finite value was found.

        It makes at most two collectives. Every rank has to call it, in the same order, with the same
        arguments. If one calls something else, it is an error on every rank: at once in eager mode on the
        CPU; in compiled functions and on other devices, where nothing waits, the columns are NaN, and
        ``materialize`` raises.

        Args:
            names: the names of the rows of ``columns``; this rank's other tensors add nothing.
            columns: their ``(len(names), C) float64``.
            fingerprints: their ``(len(names), 3) int64``, on all ranks or on none.
            pairs: whether the columns are those of pairs, ``(len(names), P) float64``.
            failure: the error because of which this rank has no columns.
            what: the name of the call, the same on all ranks; not checked in compiled functions.
            arguments: those of its arguments that are among `calls.ARGUMENTS`.

        Returns:
            the merged columns, origins and fingerprints, see `Reduced`.

        Raises:
            RankError: if a rank makes a different call, or does not respond.
            ValueError: if a name is not one of this rank's.
        """
        if fingerprints is not None:
            what = f"{what} with fingerprint=True"
        home = self._counted.device
        if home.type != "cpu":
            # otherwise a rank whose gradients are all on its second device would use that one, unlike the
            # others
            columns = columns.to(home, non_blocking=True)
            if fingerprints is not None:
                fingerprints = fingerprints.to(home, non_blocking=True)
        # the sums come first
        num_sums = NUM_PAIR_SUMS if pairs else NUM_SUM_COLUMNS
        num_columns = columns.shape[1]
        bad = (pair_value if pairs else derived.value)(columns, "n_nonfinite") > 0
        # the first rank's code is the largest; the code of a measured row is above 0
        code = torch.where(bad, float(self.size - self.rank), 0.0).unsqueeze(1)
        try:
            mine = self.to_rows(names, torch.cat([columns, torch.full_like(code, _MEASURED)], dim=1))
            bits = None if fingerprints is None else self.bits_of(names, fingerprints)
            # copies that are not counted report a NaN too: the others may not have it
            code = self._spread(names, code)
        except ValueError as error:
            if torch.compiler.is_compiling() or self.size == 1:
                raise
            # the others wait for this rank
            failure = error
            mine = columns.new_zeros((len(self.names), num_columns + 1))
            code = mine[:, num_columns:]
            bits = None if fingerprints is None else mine.new_zeros((len(self.names), replicas.NUM_SUMMED))
        mine = torch.cat([mine[:, :num_columns], torch.maximum(mine[:, num_columns:], code)], dim=1)
        if self.size == 1:
            found = (None, None) if bits is None else self.merged_bits(bits)
            return Reduced(mine[:, :num_columns], self._origin(mine[:, num_columns]), *found)
        sums, tops = mine[:, :num_sums], mine[:, num_sums:]
        more = pairs or bits is not None
        if more:
            self._meet_wide()
        if bits is not None:
            sums = torch.cat([sums, bits], dim=1)
        if more or self._is_wide:
            # of one size, whatever each rank reduces: Gloo aborts if sizes differ
            sums = torch.cat([sums, sums.new_zeros((len(sums), _WIDE - sums.shape[1]))], dim=1)
        low, high = self._marks(what, failure)
        # created on the device, without a copy
        check = [tops.new_full((1, 1), low), tops.new_full((1, 1), -high)]
        tops = torch.cat([tops, torch.cat(check, dim=1), calls.told(arguments, tops)])
        sums, tops = collectives.all_reduce_pair([(sums, "sum"), (tops, "max")], self.group, self.timeout)
        found = (None, None) if bits is None else self.merged_bits(sums[:, num_sums:])
        merged, origin = self._merged(sums[:, :num_sums], tops, failure, what, arguments)
        return Reduced(merged, origin, *found)

    def reduce_histograms(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        *,
        failure: Exception | None = None,
        what: str = "reduce",
    ) -> tuple[Tensor, Tensor]:
        """Return the histograms of exponents of all rows, summed over the ranks, and origins, as `reduce`.

        Calls are compared by the two small collectives of `reduce`; a SUM of int64 follows. On devices other
        than the CPU, where nothing waits, a rank that makes a different call may leave the others to the
        timeout of the group; in the first call they meet, so that it is an error on every rank.

        Args:
            names: as for `reduce`.
            columns: their ``(len(names), C) int64``, see `gradiometer.columns.exponents`.
            failure: as for `reduce`.
            what: as for `reduce`.

        Returns:
            ``(T, C) int64`` and ``(T,) float64``.

        Raises:
            RankError, ValueError: as for `reduce`.
        """
        home = self._counted.device
        if home.type != "cpu":
            columns = columns.to(home, non_blocking=True)
            self._meet_histograms()
        # the columns that tell where a NaN or Inf is
        counts = columns.to(torch.float64)
        told = counts.new_zeros((len(counts), NUM_COLUMNS))
        told[:, COLUMN_INDEX["n_posinf"]], told[:, COLUMN_INDEX["n_nan"]] = counts[:, -2], counts[:, -1]
        try:
            origin = self.reduce(names, told, failure=failure, what=f"{what} of histograms").origin
        except Exception:
            if home.type != "cpu" and self.size > 1 and not torch.compiler.is_compiling():
                # the others do not know yet, and go on
                size = len(self.names), NUM_EXPONENT_COLUMNS
                none = torch.zeros(size, dtype=torch.int64, device=home)
                with suppress(Exception):
                    collectives.all_reduce(none, "sum", self.group, self.timeout)
            raise
        merged = self.to_rows(names, columns)
        if self.size > 1:
            merged = collectives.all_reduce(merged, "sum", self.group, self.timeout)
        return merged, origin

    def _meet_histograms(self) -> None:
        """Wait for all ranks' first call with histograms."""
        if not self._has_histograms and self.size > 1 and not torch.compiler.is_compiling():
            collectives.rendezvous(self.group, self.timeout, "reduce of histograms")
            self._has_histograms = True

    def merged_bits(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return fingerprints and whether copies differ, from the results of `bits_of` of all ranks.

        ``(..., T, 10) float64 -> (..., T, 3) int64, (..., T) bool``.
        """
        return self._replicas.merged(sums)

    def _meet_wide(self) -> None:
        """Wait for all ranks' first call with fingerprints or pairs; sizes are the same from then on."""
        if not self._is_wide and not torch.compiler.is_compiling():
            collectives.rendezvous(self.group, self.timeout, "reduce with fingerprint=True, or of pairs")
            self._is_wide = True

    def bits_of(self, names: tuple[str, ...], fingerprints: Tensor) -> Tensor:
        """Return what this rank adds to the fingerprints of all rows, ``(T, 10) float64``; see `Replicas`.

        ``fingerprints``: ``(len(names), 3) int64``; a row with -1 bytes adds nothing.
        """
        places = None if names == self.local_names else [self._places[name] for name in names]
        whole, copies = self._replicas.parts(places, fingerprints)
        return torch.cat([self.to_rows(names, whole), self._spread(names, copies)], dim=1)

    def _merged(
        self, sums: Tensor, tops: Tensor, failure: Exception | None, what: str, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the merged columns and origins; raise if the calls differ."""
        rows = len(self.names)
        # first the call itself, then its arguments
        differ = calls.differ(tops[rows:])
        merged, origin = torch.cat([sums, tops[:rows, :1]], dim=1), self._origin(tops[:rows, 1])
        if not torch.compiler.is_compiling() and tops.device.type == "cpu":
            if bool(differ.any()):
                raise self._difference(what, arguments, failure) from failure
        else:
            merged = torch.where(differ.any(), torch.nan, merged)
            origin = torch.where(differ.any(), -3.0 - differ.to(torch.uint8).argmax(), origin)
        if failure is not None:
            raise failure
        return merged, origin

    def _origin(self, code: Tensor) -> Tensor:
        return torch.where(code >= 1, self.size - code, torch.where(code > 0, -1.0, -2.0))

    def _marks(self, what: str, failure: Exception | None) -> tuple[float, float]:
        """Return a range of integers, exact in float64; it overlaps those of ranks that make the same call.

        In a compiled function calls are not distinguished: its range overlaps that of any call in eager
        mode.
        """
        first = self._hash * _KINDS
        if failure is not None:
            # empty: it overlaps no other range
            return float(first + _KINDS), -1.0
        if torch.compiler.is_compiling():
            return float(first), float(first + _KINDS - 1)
        self._calls += 1
        mark = float(first + zlib.crc32(f"{self._calls} {what}".encode()) % _KINDS)
        return mark, mark

    def _difference(self, what: str, arguments: Mapping[str, Any], failure: Exception | None) -> Exception:
        """Return an error that names the differing calls. All eager ranks call it: all see the same marks."""
        number, self._calls = self._calls, 0
        failed = None if failure is None else str(failure)
        mine = calls.Call(number, what, self._hash, calls.values_of(arguments), failed)
        try:
            told = collectives.share(mine, self.group, min(self.timeout, _MOMENT), "reduce")
        except RankError as error:
            # for example, ranks in compiled functions do not come here: nothing is raised there
            return failure or RankError(
                f"reduce: the ranks made different calls, and some did not report theirs; {error}"
            )
        said = calls.difference([calls.Call(*each) for each in told], self.global_ranks)
        return failure or RankError(f"reduce: {said}")

    def check(self, sharding: Sharding | None, what: str) -> None:
        """Reject tensors that differ from the agreement, such as one that was whole and is now sharded.

        Raises:
            ValueError: for the first of them.
        """
        if sharding is None or sharding is self._checked:
            return
        for name, spec in zip(sharding.names, sharding.specs, strict=True):
            place = self._places.get(name)
            if place is None:
                continue
            then = self.sharding.specs[place]
            if then.shape is not None and _kind(sharding, spec) != _kind(self.sharding, then):
                msg = f"{what}: {name!r} is {spec}, but was {then} when gm.Ranks was created"
                raise ValueError(msg + "; create gm.Ranks again on all ranks")
        self._checked = sharding

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


def minority(ranks: Ranks, name: str, texts: Sequence[str | None]) -> tuple[int, ...]:
    """Return the global ranks whose copy of a tensor differs from that of most ranks with the same part.

    Args:
        ranks: the agreement.
        name: of the tensor.
        texts: what each rank, by its place in the group, tells of its copy; None: it has none.
    """
    pattern = ranks.plan.patterns[ranks.plan.rows[name]]
    odd: set[int] = set()
    for rank in range(ranks.size):
        held = {
            other: texts[other] for other in ranks.plan.holders(rank, pattern) if texts[other] is not None
        }
        if held and rank == min(held):
            # of versions that are equally common, the one of the lowest rank
            (most, _), *_ = Counter(held.values()).most_common()
            odd.update([other for other, text in held.items() if text != most])
    return tuple([ranks.global_ranks[rank] for rank in sorted(odd)])


def divergence_text(ranks: Ranks, name: str, texts: Sequence[str | None]) -> str:
    """Return a text that names the ranks of `minority`, such as ``rank 5 differs from 7 others``."""
    odd = minority(ranks, name, texts)
    if not odd:
        return "copies differ between ranks"
    pattern = ranks.plan.patterns[ranks.plan.rows[name]]
    holders = ranks.plan.holders(ranks.global_ranks.index(odd[0]), pattern)
    others = len([rank for rank in holders if ranks.global_ranks[rank] not in odd])
    listed = process_groups.listed(odd)
    verb = "rank {} differs" if len(odd) == 1 else "ranks {} differ"
    return f"{verb.format(listed)} from {others} other{'s' * (others != 1)}"


def _no_group() -> None:
    return None


def _kind(sharding: Sharding, spec: ShardSpec) -> tuple[object, ...]:
    """Return the properties that decide how a tensor is merged; not its dtype, which may change."""
    mesh = None if spec.mesh < 0 else sharding.meshes[spec.mesh].shape
    return spec.shape, mesh, spec.placements
