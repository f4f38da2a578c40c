"""Do the micro-batches of a step, and the ranks, agree: cosines between gradients, from projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from gradiometer.columns import FIRST_PROJECTION, PROJECTIONS, rows
from gradiometer.control.gradient_cosines import GradientCosines, cosines_of, differing_of
from gradiometer.control.noise_scale import checked_groups
from gradiometer.distributed import Ranks, all_reduce, register_bucket_hook
from gradiometer.inputs import named_parameters
from gradiometer.stats import (
    Float64Module,
    ProjectionStats,
    check_projections,
    collect_projections,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from gradiometer.stats import GroupRule

# micro-batches that are told apart; those after them count as one
_MOST: Final = 64
# projections of each averaged gradient that ranks compare
_COMPARED: Final = min(PROJECTIONS)


class GradientAgreement(Float64Module):
    """Cosines between the gradients of the micro-batches of a step, and between those of ranks.

    Call `add` after each backward of a step, while gradients accumulate in ``p.grad``, and `step` once at
    the end. Projections are linear: those of one micro-batch are the difference of two that were added. Only
    ``k`` numbers are kept, and exchanged between ranks, in place of a gradient. The loss scale of a
    GradScaler cancels, and so does the number that losses are divided by.

    A pair with a NaN, an Inf or a zero gradient is left out. Without a pair, as with one micro-batch, the
    result is NaN. The number of micro-batches may differ between steps; from the 64th on they count as one.
    The state of the step is in buffers on the device. Nothing waits for the device, in eager and compiled
    steps, except for the collective of `step` on the CPU.

    **Several ranks.** With DDP, pass ``ranks=gm.Ranks(model)`` and call `register_comm_hook`, which measures
    this rank's gradient before it is averaged, in the first synchronized backward of a step. Without the
    hook, call `add` after backwards under ``no_sync()`` only. `add_averaged` measures the gradients after the
    average, so that `step` can tell which were not averaged. With FSDP2 or tensor parallelism no rank has
    the gradient of its own examples: leave ``ranks`` out, and add merged projections,
    ``gm.collect_projections(model, projections=64, reduce=gm.Ranks(model))``; its micro-batches are those of
    all ranks together.

    With ``gm.Monitor(..., agreement=agreement)`` or ``gm.watch(..., agreement=agreement)``, the monitor calls
    `add_averaged` and `step`, records the mean cosines, and three rules use them: `same_data`,
    `disagreeing_rank` and `not_averaged` in ``gradiometer.rules``.

    Args:
        model: a module, or any input of `gradiometer.collect_grads`.
        projections: their number k: 8, 16, 32, 64, 128 or 256. The standard deviation of an estimated cosine
            c is about ``(1 - c²) / sqrt(k)``, also if it is of many tensors together.
        groups: rules of G groups of parameters, as for `TensorStats.group`, but without modules: the result
            has cosines for each, after those of the total.
        ranks: under DDP, the agreement of the ranks that average their gradients.
        every: of the steps, measure those divisible by this; not in compiled code. Projections take time.
        accumulates: whether `add` gets running sums of gradients, as in ``p.grad``; False for the gradients
            of each micro-batch alone.
        seed: of the signs.
        device: of the state; None: that of the first parameter.

    Raises:
        ValueError, TypeError: for arguments that cannot be used.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(4, 1)
    >>> agreement = gm.GradientAgreement(model)
    >>> x = torch.randn(8, 4)
    >>> for batch in (x, x, -x):
    ...     model(batch).sum().backward()
    ...     agreement.add()
    >>> found = agreement.step()
    >>> found.twins[:3], found.micro_batches  # the second batch is the first one again
    (tensor([0, 0, 2]), tensor(3., dtype=torch.float64))
    """

    sums: Tensor
    bucket: Tensor
    averaged: Tensor
    counts: Tensor

    def __init__(
        self,
        model: Any,
        *,
        projections: int = 64,
        groups: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]] | None = None,
        ranks: Ranks | None = None,
        every: int = 1,
        accumulates: bool = True,
        seed: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        check_projections("GradientAgreement", projections, seed)
        if ranks is not None and not isinstance(ranks, Ranks):
            raise TypeError(f"GradientAgreement: ranks must be gm.Ranks(model), got {type(ranks).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"GradientAgreement(every={every!r}): every must be a positive integer")
        self._groups = [] if groups is None else checked_groups(groups, "GradientAgreement")
        # a rule that cannot be used raises here, not in a backward
        collect_projections({}).group(self._groups)
        named = named_parameters(model, "GradientAgreement")
        self.names = ("total", *[name for name, _ in self._groups])
        self.tensors = named.names
        self.projections, self.seed, self.ranks, self.every = projections, seed, ranks, every
        self.accumulates = bool(accumulates)
        # in a tuple: not a submodule
        self._model = (model,)
        self._steps, self._has_added = 0, False
        if device is None:
            device = next((x.device for x in named.tensors), None)
        shape = len(self.names), projections
        tensors = 0 if ranks is None else len(self.tensors)
        # projections of the gradient after each backward, of the current backward's buckets, and of the
        # averaged gradients; how many gradients were added, and how often ranks have averaged
        for name, size in {
            "sums": (_MOST + 1, *shape),
            "bucket": shape,
            "averaged": (tensors, _COMPARED),
            "counts": (2,),
        }.items():
            buffer = torch.zeros(size, dtype=torch.float64, device=device)
            self.register_buffer(name, buffer, persistent=False)

    @property
    def is_due(self) -> bool:
        """Whether the current step is measured, see ``every``."""
        return torch.compiler.is_compiling() or self._steps % self.every == 0

    def add(self, stats: ProjectionStats | None = None) -> None:
        """Add the gradient after a backward; after a synchronized backward with the hook, the averaged one.

        Args:
            stats: ``gm.collect_projections(model, projections=...)``; None: the model is measured.

        Raises:
            TypeError: if ``stats`` is not ProjectionStats.
            ValueError: if there is no gradient, for another number of projections, for statistics of this
                rank's shards only, or on another device.
        """
        if not self.is_due:
            return
        if not torch.compiler.is_compiling():
            self._has_added = True
        stats = self._checked(stats, self.projections)
        synced = self.counts[1] > 0
        row = self._rows(stats)
        if not self.accumulates:
            row = row + self._last()
        self._put(row, ~synced)
        if self.ranks is not None:
            self.averaged.copy_(torch.where(synced, self._compared(stats), self.averaged))

    def add_averaged(self, stats: ProjectionStats | None = None) -> None:
        """Add the gradients as they are after ranks have averaged them; call it before clipping.

        Args:
            stats: as for `add`, with any number of projections.

        Raises:
            TypeError, ValueError: as for `add`.
        """
        if self.ranks is not None and self.is_due:
            self.averaged.copy_(self._compared(self._checked(stats, None)))

    def step(self) -> GradientCosines:
        """End a step, and return the cosines of its gradients, on the device.

        With ``ranks``, all ranks have to call this. It takes one all-reduce of R x (1 + G) x k + 16 T
        numbers, for R ranks and T tensors.

        Raises:
            RankError: if a rank does not respond.
        """
        is_due = self.is_due
        number = self.counts[0].clone()
        places = torch.arange(_MOST, device=self.sums.device, dtype=torch.float64).view(-1, 1, 1)
        gradients = torch.where(places < number, self.sums[1:] - self.sums[:-1], torch.nan)
        own = torch.where(number > 0, self._last(), torch.nan).unsqueeze(0)
        differing = torch.zeros(len(self.averaged), dtype=torch.bool, device=own.device)
        if self.ranks is not None and self.ranks.size > 1 and is_due:
            own, differing = self._exchanged(own, self.ranks)
        found = cosines_of(self.names, number, gradients, own, differing)
        self.reset_()
        if not torch.compiler.is_compiling():
            self._steps += 1
        return found

    def scalars(self, found: GradientCosines) -> dict[str, Tensor]:
        """Return mean cosines by name: ``micro_batch_cosine``, ``rank_cosine``, and ``rank_cosine.group``."""
        named = {}
        if self.ranks is None or self._has_added:
            named["micro_batch_cosine"] = found.cosine
        if self.ranks is not None:
            named["rank_cosine"] = found.rank_cosine
        return {
            name if i == 0 else f"{name}.{row}": values[i]
            for name, values in named.items()
            for i, row in enumerate(self.names)
        }

    def reset_(self) -> Self:
        """Forget the gradients of the current step, in place; the buffers keep their addresses."""
        for buffer in (self.sums, self.bucket, self.averaged, self.counts):
            buffer.zero_()
        return self

    def register_comm_hook(
        self, model: nn.Module, state: Any = None, hook: Callable[..., Any] | None = None
    ) -> None:
        """Measure this rank's gradient in a backward of a DDP model, before it is averaged over the ranks.

        It replaces ``model.register_comm_hook``, which DDP allows once. The hook runs in each backward
        outside of ``no_sync()``; the first one in a step counts.

        Args:
            model: a `DistributedDataParallel` over the same ranks as ``ranks``.
            state: of ``hook``.
            hook: a communication hook that averages a bucket, such as torch's ``bf16_compress_hook``. None:
                the all-reduce that DDP makes without a hook.

        Raises:
            TypeError: if ``model`` is not DDP. With FSDP2, no rank has the gradient of its own examples.
            ValueError: without ``ranks``.
            RuntimeError: from DDP, if it already has a hook.
        """
        if self.ranks is None:
            msg = "register_comm_hook: this GradientAgreement has no ranks; create it with "
            raise ValueError(msg + "ranks=gm.Ranks(model)")
        named = named_parameters(model, "register_comm_hook")
        names = dict(zip(named.tensors, named.names, strict=True))

        def measure(bucket: Any) -> None:
            if not self.is_due:
                return
            grads = zip([names[p] for p in bucket.parameters()], bucket.gradients(), strict=True)
            stats = collect_projections(grads, projections=self.projections, seed=self.seed)
            if bucket.index() == 0:
                self.bucket.zero_()
            self.bucket.add_(self._rows(stats))
            if bucket.is_last():
                self._put(self.bucket, self.counts[1] == 0)
                self.counts[1] += 1.0

        register_bucket_hook(model, measure, state, hook)

    def extra_repr(self) -> str:
        """Return the arguments."""
        groups = f", groups={list(self.names[1:])}" if self._groups else ""
        every = f", every={self.every}" if self.every > 1 else ""
        return f"{len(self.tensors)} tensors, projections={self.projections}{groups}{every}"

    def _checked(self, stats: ProjectionStats | None, count: int | None) -> ProjectionStats:
        if stats is None:
            stats = collect_projections(self._model[0], projections=count or _COMPARED, seed=self.seed)
        if not isinstance(stats, ProjectionStats):
            msg = f"GradientAgreement: expected gm.collect_projections(model), got {type(stats).__name__}"
            raise TypeError(msg)
        if not stats.measured:
            msg = "GradientAgreement: no parameter has a gradient; call add after each backward, before "
            raise ValueError(msg + "zero_grad()")
        given = stats.schema.width - FIRST_PROJECTION
        if count is not None and given != count:
            msg = f"GradientAgreement: these are {given} projections, but it was created with {count}; "
            raise ValueError(msg + f"use gm.collect_projections(model, projections={count})")
        if self.ranks is not None and stats.local is not None:
            stats = stats.local
        if stats.is_local:
            msg = "GradientAgreement: these are projections of this rank's shards only, as under FSDP2; "
            msg += "leave ranks= out, and add those of all ranks, gm.collect_projections(model, projections="
            raise ValueError(msg + f"{self.projections}, reduce=gm.Ranks(model))")
        if stats.columns.device != self.sums.device:
            msg = f"GradientAgreement: stats are on {stats.columns.device}, but its state is on "
            msg += f"{self.sums.device}; create it with device={str(stats.columns.device)!r}, or "
            raise ValueError(msg + "move it there")
        return stats

    def _rows(self, stats: ProjectionStats) -> Tensor:
        """Return the projections of the total and the groups, ``(1 + G, k)``; NaN if one has NaN or Inf."""
        found = stats.columns.sum(dim=0, keepdim=True)
        if self._groups:
            found = torch.cat([found, stats.group(self._groups).columns])
        bad = found[:, stats.schema.index["n_nonfinite"]] > 0.0
        return torch.where(bad.unsqueeze(1), torch.nan, found[:, FIRST_PROJECTION:])

    def _compared(self, stats: ProjectionStats) -> Tensor:
        """Return a few projections of each tensor, ``(T, 8)``; 0 without a gradient."""
        found = stats.projections[:, :_COMPARED]
        if stats.names == self.tensors:
            return found
        places = {name: i for i, name in enumerate(self.tensors)}
        return rows.spread(found, [places[name] for name in stats.names], len(self.tensors))

    def _last(self) -> Tensor:
        return self.sums.index_select(0, self.counts[:1].clamp(max=float(_MOST)).long()).squeeze(0)

    def _put(self, row: Tensor, gate: Tensor) -> None:
        """Add a gradient, unless ``gate`` is false."""
        place = (self.counts[0] + 1.0).clamp(max=float(_MOST))
        places = torch.arange(_MOST + 1, device=row.device, dtype=torch.float64)
        self.sums.copy_(torch.where(((places == place) & gate).view(-1, 1, 1), row, self.sums))
        self.counts.copy_(torch.stack([self.counts[0] + gate, self.counts[1]]))

    def _exchanged(self, own: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Return the projections of all ranks, ``(R, 1 + G, k)``, and which tensors differ, ``(T,)``."""
        # a maximum; the marks are no projections, and NaN would not be defined
        here = torch.arange(ranks.size, device=own.device).view(-1, 1, 1) == ranks.rank
        sent = torch.where(here, torch.where(own.isfinite(), own, torch.inf), -torch.inf)
        averaged = torch.nan_to_num(self.averaged)
        flat = torch.cat([sent.flatten(), averaged.flatten(), -averaged.flatten()])
        flat = all_reduce(flat, "max", ranks.group, ranks.timeout)
        sizes = [sent.numel(), averaged.numel(), averaged.numel()]
        found, most, least = flat.split(sizes)
        found = found.view_as(sent)
        found = torch.where(found.isfinite(), found, torch.nan)
        return found, differing_of(most.view_as(averaged), -least.view_as(averaged))
