"""The recorder: a ring of the last steps on the device, written inside the step."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer import ops
from gradiometer.columns import DEFAULT_THRESHOLDS, PAIRS, PROJECTIONS, Cursor, Thresholds, rows
from gradiometer.inputs import (
    Named,
    check,
    check_names,
    describe,
    is_dtensor,
    local_shards,
    on_device,
    present,
    tracked_parameters,
)
from gradiometer.recorder.catalog import Catalog
from gradiometer.recorder.exponent_stores import ExponentStores
from gradiometer.recorder.kinds import GRADS, UPDATES, WEIGHTS, Kind, requested
from gradiometer.recorder.projector import Projections, Projector
from gradiometer.recorder.settings import check_integer, is_ordinary, is_scale, of_this_rank
from gradiometer.recorder.skip_consensus import SkipConsensus
from gradiometer.recorder.step_ring import StepRing
from gradiometer.recorder.tap_tables import OWNERS, append_taps, kinds_of_taps, names_of_taps
from gradiometer.stats import (
    PairStats,
    Taps,
    TensorStats,
    keep_in_repeats,
    measure,
    plain,
    redistributed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradiometer.distributed import Ranks
    from gradiometer.inputs import Parameters
    from gradiometer.recorder.optimizer_states import OptimizerStates


class Recorder(StepRing):
    """A flight recorder: the statistics of the last ``capacity`` recorded steps, on the device.

    `record` measures the gradients, inside or outside of a compiled step, and writes them into the
    slot of the current step; `advance` moves on to the next step. Neither involves the host: there is no
    wait and no graph break, all addresses stay the same, and both work in a CUDA graph. The device reads
    which steps to record (``every``) and which to skip, so changing these recompiles nothing.

    A second `record` in one step overwrites the rows that it measures. So a step with several backward
    passes, models or optimizers fills one slot, and with accumulated gradients the last `record` counts.

    For a DTensor the local shard is recorded: each ring holds the data of its own rank. With ``ranks`` the
    ranks agree on which steps to skip; nothing else of the ring is exchanged.

    Args:
        model: a model as for `gradiometer.collect_grads`, or a mapping of names to modules.
        weights: whether to measure the parameters themselves too.
        updates: whether to reserve rows for updates, which `record_updates` measures.
        capacity: number of steps that are kept; each takes 72 bytes for a gradient or weight, 128 for an
            update, and 104 for an activation or its gradient.
        every: record the steps that are multiples of ``every``. A step with a NaN, an Inf or a norm above
            ``skip_above`` is recorded whenever it is measured.
        skip_nonfinite: whether a NaN or Inf in a gradient makes `skip_step` true.
        skip_above: a total gradient norm above it makes `skip_step` true, too.
        thresholds: limits of the flags.
        fingerprint: whether to record the fingerprints of gradients and weights too, in the same read; they
            take 24 bytes more for each.
        taps: taps of the model, whose activations and gradients of activations are recorded, too. `advance`
            then advances them, and their steps have the recorder's numbers; in a step that ``taps.every``
            leaves out, their rows are not measured.
        precision: in steps divisible by this, also count the elements of gradients, and of weights with
            ``weights=True``, by magnitude; None: in none. A store on the device keeps the histograms of the
            last such step, 7.5 KiB for each tensor, see `read_exponents`. They are of gradients as they are
            in memory, so ``inv_scale`` does not apply; with ``stats``, gradients are read for them.
        projections: also project gradients, and weights with ``weights=True``, on this number of random
            signs, see `gradiometer.ProjectionStats`: 16 estimate distances within 35 %.
        projections_every: of the recorded steps, project those divisible by this; by default all.
        kinds: kinds of your own, `gradiometer.recorder.Kind`, which `record` measures with their ``measure``
            function, also in compiled steps.
        states: the states of optimizers whose kinds the catalog then has; a Monitor measures them.
        ranks: the ranks' agreement for the same model. `skip_step` is then the same on all of them, and
            gradients that are still partial sums are added up before they are measured.

    Attributes:
        catalog: the tables of a recorded step; shapes are those of whole tensors.
        is_released: whether `release` was called.
        layout: where the tables of a step are in the ring.
        ring, cursor: the buffers, see `gradiometer.ops.ring`.

    Raises:
        TypeError: for a parameter that cannot be measured; the message names it.
        ValueError: without parameters, for a duplicate name, also of a tap and a parameter, for taps that
            another recorder records, for a number out of range, for a ring that cannot be allocated, or for
            ranks of another model.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(2, 1)
    >>> recorder = gm.Recorder(model, capacity=4)
    >>> for _ in range(6):
    ...     model.zero_grad()
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     recorder.record()
    ...     recorder.advance()
    >>> [(record.step, record.total()) for record in recorder.read()][-1]
    (5, 5.0990195135927845)
    """

    def __init__(
        self,
        model: Parameters | Mapping[str, nn.Module],
        *,
        weights: bool = False,
        updates: bool = False,
        capacity: int = 64,
        every: int = 1,
        skip_nonfinite: bool = True,
        skip_above: float = math.inf,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        fingerprint: bool = False,
        ranks: Ranks | None = None,
        taps: Taps | None = None,
        precision: int | None = None,
        projections: int | None = None,
        projections_every: int | None = None,
        kinds: Kind | Sequence[Kind] = (),
        states: OptimizerStates | None = None,
    ) -> None:
        if precision is not None:
            check_integer("Recorder", "precision", precision, 1)
        projected = Projections.of(projections, projections_every)
        names, parameters = tracked_parameters(model)
        if not parameters:
            raise ValueError("Recorder: the model has no parameters to record")
        check_names(names, "Recorder")
        if type(capacity) is not int or capacity < 1:
            raise ValueError(
                f"Recorder(capacity={describe(capacity)}): capacity must be an integer, at least 1"
            )
        if not isinstance(thresholds, Thresholds):
            raise TypeError(f"Recorder: thresholds must be gm.Thresholds(...), got {thresholds!r}")
        devices = check(Named(names, parameters), "Recorder").devices
        asked = requested(
            weights=weights,
            updates=updates,
            taps=taps is not None,
            precision=precision is not None,
            projections=projections,
            kinds=kinds,
        )
        asked += states.kinds if states is not None else ()
        asked += kinds_of_taps(taps)
        shapes = [tuple(p.shape) for p in parameters]
        dtypes = [str(p.dtype).removeprefix("torch.") for p in parameters]
        catalog = Catalog.of(names, shapes, dtypes, asked, names_of_taps(taps, names))
        home = next((device for device in devices if device.type != "cpu"), devices[0])
        super().__init__(catalog, thresholds, capacity, home, list(parameters), fingerprint=bool(fingerprint))
        # Dynamo cannot trace the lock of a cached property
        self._index = catalog.parameters.index
        self._own = [kind for kind in catalog.dense if kind.measure is not None]
        self._has_weights = WEIGHTS.name in catalog.kinds
        # gradients and weights are measured together
        self._section = self.layout.adjacent(GRADS.name, 1 + self._has_weights)
        self._ranks = ranks
        if ranks is not None and ranks.size > 1:
            self._consensus = SkipConsensus(names, ranks, home)
        if taps is not None:
            self._taps.append(taps)
            OWNERS[taps] = weakref.ref(self)
        self._has_dtensors = any([is_dtensor(type(p)) for p in parameters])
        if precision is not None:
            self.exponents = ExponentStores(catalog.parameters, parameters, catalog.sparse, precision)
        self._projector = None
        if projected is not None:
            projected.set_on(self.cursor)
            self._projector = Projector(names, parameters, projected.number)
            self._projected = [kind for kind in catalog.dense if kind.schema is PROJECTIONS[projected.number]]
        self.states = states
        self.configure_(step=0, every=every, skip_nonfinite=skip_nonfinite, skip_above=skip_above)
        # what was measured before belongs to no step
        self._clear_taps(0.0)
        self._gated = not skip_nonfinite and skip_above == math.inf
        self._one_device = len(devices) == 1
        keep_in_repeats(self)

    def record(self, stats: TensorStats | None = None, *, inv_scale: Tensor | float | None = None) -> None:
        """Measure the gradients, and the weights if asked, and write them into the current step's slot.

        What taps have measured since the last `advance` is written, too.

        Args:
            stats: of gradients that were measured already, named as in the model; the gradients are not read
                again. For stats merged over ranks, ``stats.local`` is recorded.
            inv_scale: as for `gradiometer.collect_grads`; it applies to gradients only, also to those of
                activations, and not to ``stats``.

        Raises:
            ValueError: for stats of other tensors, and for groups of stats merged over ranks.
            TypeError: for a gradient that cannot be measured; the message names it.
        """
        with self.in_order():
            grads = self._record(stats, inv_scale)
            for taps in self._taps:
                append_taps(taps, inv_scale, self.ring, self.cursor, self.layout, self.thresholds)
            projects = self._projector is not None and ops.may_project(self.cursor)
            if self.exponents is None and not self._own and not projects:
                return
            tensors = {"grads": self._tensors("grads") if grads is None else grads}
            if self._has_weights or any([kind.of == WEIGHTS.name for kind in self._own]):
                tensors["weights"] = self._tensors("weights")
            for kind in self._projected if projects else ():
                scale = inv_scale if kind.of == "grads" else None
                self._append_projections(kind, tensors[kind.of], scale)
            for kind in self._own:
                self._append_own(kind, tensors[kind.of])
            if self.exponents is not None:
                self.exponents.record([x for kind in self.catalog.sparse for x in tensors[kind.of]])

    def _record(
        self, stats: TensorStats | None, inv_scale: Tensor | float | None
    ) -> list[Tensor | None] | None:
        """Record the statistics; return this rank's gradients, if they were read."""
        if self._consensus is not None:
            self._consensus.begin()
        if stats is not None:
            self._append_all(of_this_rank(stats, TensorStats, "collect_grads"))
            return None
        ring, parameters = self.ring, self._tracked[0]
        # the scale applies to gradients only
        plain_scale = inv_scale is None or ("weights" not in self.catalog.kinds and is_scale(inv_scale, ring))
        grads = self._tensors("grads")
        if plain_scale and self._one_device and not (self._consensus is not None and self._consensus.adds_up):
            nothing = ring.new_empty(0)
            tensors = [nothing if grad is None else grad for grad in grads]
            if self._has_weights:
                tensors += self._tensors("weights")  # type: ignore[arg-type] # none is missing
            # recognized: the list is like one that was measured before, so it is not checked again
            plan = ops.recognize(tensors)
            if plan is not None or all([is_ordinary(tensor, ring) for tensor in tensors]):
                ops.record_(
                    tensors,
                    self.thresholds,
                    inv_scale,  # type: ignore[arg-type] # a tensor, if it is not None
                    len(parameters),
                    ring,
                    self.cursor,
                    self._section,
                    plan,
                    gated=self._gated,
                    fingerprint=self.fingerprint,
                )
                return grads
        self._append_all(self._collect(GRADS, grads, inv_scale))
        return grads

    def _append_all(self, grads: TensorStats) -> None:
        self._append(GRADS, grads)
        if self._has_weights:
            self._append(WEIGHTS, self._collect(WEIGHTS, self._tensors("weights")))

    def _append_projections(
        self, kind: Kind, tensors: list[Tensor | None], scale: Tensor | float | None
    ) -> None:
        names, columns = self._projector.columns(kind, tensors, scale, self.cursor)  # type: ignore[union-attr]
        self._write(kind, names, columns, kind.schema.flags_of(columns, self.thresholds))

    def _append_own(self, kind: Kind, tensors: list[Tensor | None]) -> None:
        """Measure a kind of the user's own."""
        found = present(self.catalog.names, tensors)
        measured = plain(Named(tuple([kind.label(name) for name in found.names]), found.tensors), "Recorder")
        schema, home = kind.schema, self.ring.device
        columns = torch.zeros((len(measured), schema.width), dtype=schema.dtype, device=home)
        for device in dict.fromkeys([x.device for x in measured]):
            places = [i for i, x in enumerate(measured) if x.device == device]
            own = kind.measure([measured[i] for i in places])  # type: ignore[misc] # checked by `requested`
            if not isinstance(own, Tensor) or own.shape != (len(places), schema.width):
                shape = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
                msg = f"Recorder: measure of kind {kind.name!r} must return columns of shape "
                raise ValueError(msg + f"{(len(places), schema.width)}, got {shape}")
            own = on_device(own.detach(), home).to(schema.dtype)
            is_all = len(places) == len(measured)
            columns = own if is_all else columns + rows.spread(own, places, len(measured))
        self._write(kind, found.names, columns, schema.flags_of(columns, self.thresholds))

    def record_updates(self, stats: PairStats) -> None:
        """Write measured updates into the current step's slot; inside or outside of a compiled step.

        Args:
            stats: from `gradiometer.collect_updates`, named as in the model. For stats merged over ranks,
                ``stats.local`` is recorded.

        Raises:
            KeyError: if the recorder was created without ``updates=True``.
            TypeError: for anything but `PairStats`.
            ValueError: for stats of other tensors, and for groups of stats merged over ranks.

        >>> import torch, gradiometer as gm
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> recorder, snapshot = gm.Recorder(model, updates=True), gm.Snapshot(model)
        >>> with torch.no_grad():
        ...     _ = model.weight.mul_(1.25)
        >>> recorder.record_updates(gm.collect_updates(model, snapshot))
        >>> round(recorder.read()[0].total("update_ratio", "updates"), 4)
        0.25
        """
        with self.in_order():
            found = of_this_rank(stats, PairStats, "collect_updates")
            self.catalog.kind(UPDATES.name)
            flags = PAIRS.flags_of(found.columns, self.thresholds)
            self._write(UPDATES, found.names, found.columns, flags)

    @property
    def skip_step(self) -> Tensor:
        """Whether to skip the current step, 0-d bool on the device, decided by `record`.

        With ``ranks`` it is the same on all of them: a NaN or Inf on any rank counts, and ``skip_above`` is
        compared with the norm of all ranks' gradients. The first read after each `record` takes one
        collective of two numbers, which the step waits for; every rank has to read it then.
        """
        if self._consensus is None or self._gated or self.is_released:
            return self.cursor[Cursor.SKIP] > 0
        return self._consensus.decide(self.ring, self.cursor, self.layout)

    def _tensors(self, kind: str) -> list[Tensor | None]:
        """Return this rank's part of the gradients or weights, in the order of the catalog."""
        parameters = self._tracked[0]
        tensors = [p.grad if kind == "grads" else p for p in parameters]
        if not self._has_dtensors:
            return tensors
        found = present(self.catalog.names, tensors)
        if kind == "grads":
            found = redistributed(found, Named(self.catalog.names, parameters), self._ranks, "Recorder")
        shards = iter(local_shards(found, "Recorder").tensors)
        return [None if tensor is None else next(shards) for tensor in tensors]

    def _collect(
        self, kind: Kind, tensors: list[Tensor | None], inv_scale: Tensor | float | None = None
    ) -> TensorStats:
        found = present(self.catalog.names, tensors)
        named = Named(tuple([kind.label(name) for name in found.names]), found.tensors)
        options: dict[str, Any] = {"home": self.ring.device, "fingerprint": self.fingerprint}
        stats = measure(named, "Recorder", self.thresholds, inv_scale, **options)
        return replace(stats, names=found.names)

    def _append(self, kind: Kind, stats: TensorStats) -> None:
        """Write statistics into the rows of their names; the other rows of the step do not change."""
        if self.fingerprint and stats.fingerprints is None:
            msg = "Recorder: it records fingerprints, but these stats have none; pass fingerprint=True to "
            raise ValueError(msg + "collect_grads")
        bits = stats.fingerprints if self.fingerprint else None
        # only gradients decide about skipping
        self._write(kind, stats.names, stats.columns, stats.flags, bits, decides=kind is GRADS)

    def _write(
        self,
        kind: Kind,
        names: tuple[str, ...],
        columns: Tensor,
        flags: Tensor,
        fingerprints: Tensor | None = None,
        *,
        decides: bool = False,
    ) -> None:
        """Write rows of a table into the current step's slot."""
        home, size = self.ring.device, len(self.catalog.names)
        columns, flags = on_device(columns, home), on_device(flags, home)
        bits = None if fingerprints is None else on_device(fingerprints, home)
        if names != self.catalog.names:
            for name in names:
                if name not in self._index:
                    msg = f"Recorder: {name!r} is not among the parameters it was created with; pass stats "
                    raise ValueError(msg + "of those")
            places = [self._index[name] for name in names]
            columns, flags = rows.spread(columns, places, size), rows.spread(flags, places, size)
            bits = None if bits is None else rows.spread(bits, places, size)
        if decides and self._consensus is not None:
            self._consensus.observe(columns)
        section = self.layout.sections[kind.name]
        ops.append_(columns, flags, size if decides else 0, self.ring, self.cursor, section, bits)
