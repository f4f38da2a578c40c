"""The gradient noise scale: how large a batch is useful, from norms of the gradients of parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiometer.control.adaptive_clip import stats_given
from gradiometer.control.grad_scaler import inverse_scale
from gradiometer.control.scale import LARGEST
from gradiometer.distributed import Ranks, all_reduce, register_bucket_hook
from gradiometer.inputs import is_limit, named_parameters
from gradiometer.stats import EMA, Float64Module, collect, first_unfit, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from torch.amp import GradScaler

    from gradiometer.stats import GroupRule, TensorStats


class NoiseScale(Float64Module):
    """The gradient noise scale tr(Σ) / |G|², in examples, from norms that are measured during a step.

    G is the gradient over all data, and Σ the covariance of the gradients of single examples. If the batch is
    much smaller than this, a step with twice the batch makes almost twice the progress; if it is much
    larger, hardly more. It is the "simple noise scale" of McCandlish et al. 2018,
    https://arxiv.org/abs/1812.06162.

    Call `add` with the gradient's statistics after each backward of a step, while gradients accumulate in
    ``p.grad``, and `step` once at the end. With micro-batches of b examples, the squared norm of the sum of k
    gradients is k² |G|² + k tr(Σ) / b on average. So one step gives unbiased estimates of |G|² and tr(Σ), by
    weighted least squares. An `EMA` averages each of them over steps, and the ratio of the averages is the
    noise scale.

    - A NaN or Inf in a gradient leaves the averages of its group unchanged in this step.
    - So does a step with a single norm, which cannot tell the noise from the gradient. The number of
      micro-batches may differ between steps.
    - The value is NaN until there is an estimate. It is inf if the average of |G|² is not positive: then the
      gradient cannot be told from noise. It is 0 if only the average of tr(Σ) is not positive.

    The state is in float64 buffers on the device. Nothing waits for the device, in eager and compiled steps.

    **Several ranks.** With DDP, pass ``ranks=gm.Ranks(model)``. Then the last `add` of a step is for the
    gradient averaged over the ranks, and all others are for this rank's own gradient. Its norms are taken
    after backwards under ``no_sync()``, or by `register_comm_hook` before the gradient is averaged. The value
    is the same on all ranks, bit for bit. Without ``ranks``, every gradient has to be a sum over the
    micro-batches of all ranks, and ``batch_size`` counts the examples of all ranks; this is so with FSDP2,
    and with DDP without ``no_sync()``.

    Args:
        batch_size: the number b of examples in a micro-batch; with ``ranks``, of one rank. The result has the
            same unit: if this is a number of tokens, so is the noise scale.
        groups: rules of G groups of parameters, as for `TensorStats.group`, but without modules: one noise
            scale per group. ``{"all": ""}`` is a group of all parameters. None: one noise scale of all.
        decay: of the averages, see `EMA`; 0.99 averages over about 200 steps.
        reduction: ``"mean"`` if the loss of each micro-batch is divided by their number K, so that gradients
            accumulate to a mean; ``"sum"`` if not. It does not matter for the noise scale if K is constant.
        ranks: under DDP, the agreement of the ranks that average their gradients.
        device: of the state and of the statistics.

    Attributes:
        names: the names of the groups; empty without groups.

    Raises:
        ValueError: for a ``batch_size``, ``decay`` or ``reduction`` out of range, and for names of groups
            that are not unique strings.
        TypeError: for a rule that is a module, and for ``ranks`` that are not `gradiometer.Ranks`.

    >>> import torch, gradiometer as gm
    >>> model = torch.nn.Linear(4, 1)
    >>> noise = gm.NoiseScale(batch_size=8)
    >>> for _ in range(20):
    ...     for _ in range(4):  # micro-batches
    ...         x = torch.randn(8, 4)
    ...         (model(x) - x.sum(1, keepdim=True)).square().mean().div(4).backward()
    ...         noise.add(gm.collect_grads(model))
    ...     scale = noise.step()
    ...     model.zero_grad()
    >>> bool(0 < scale < 100), noise.steps
    (True, tensor(20., dtype=torch.float64))
    """

    sums: Tensor

    def __init__(
        self,
        batch_size: float,
        *,
        groups: Mapping[str, GroupRule] | Iterable[tuple[str, GroupRule]] | None = None,
        decay: float = 0.99,
        reduction: str = "mean",
        ranks: Ranks | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(batch_size, bool) or not is_limit(batch_size) or not 0 < batch_size < math.inf:
            msg = f"NoiseScale(batch_size={batch_size!r}): batch_size must be a positive number of examples"
            raise ValueError(msg)
        if reduction not in {"mean", "sum"}:
            msg = f"NoiseScale(reduction={reduction!r}): reduction must be 'mean', if the loss of each "
            raise ValueError(msg + "micro-batch is divided by their number, or 'sum'")
        if ranks is not None and not isinstance(ranks, Ranks):
            raise TypeError(f"NoiseScale: ranks must be gm.Ranks(model), got {type(ranks).__name__}")
        self.batch_size = float(batch_size)
        self.reduction = reduction
        self.ranks = ranks
        self._groups = None if groups is None else checked_groups(groups, "NoiseScale")
        self.names = tuple([name for name, _ in self._groups or ()])
        self._has_hook = False
        shape = () if self._groups is None else (len(self.names),)
        # The rows, over the squared norms q of the current step: how many; the last but one; the last; of all
        # but the last, ∑ (qₖ - qₖ₋₁) / (2k - 1) and ∑ 1 / (2k - 1); and q of the current backward's buckets.
        self.register_buffer("sums", torch.zeros((6, *shape), dtype=torch.float64, device=device))
        # of |G|² and tr(Σ)
        self.average = EMA((2, *shape), decay=decay, device=device)

    def add(self, stats: TensorStats) -> None:
        """Add the norm of the gradient after a backward.

        Args:
            stats: those of all gradients, unscaled (``inv_scale=``) and before clipping:
                ``gm.collect_grads(model)``. Sharded gradients, as under FSDP2, have to be merged over the
                ranks: ``gm.collect_grads(model, reduce=ranks)``. If they are merged although this module has
                ``ranks``, those of this rank count, ``stats.local``.

        Raises:
            TypeError: if ``stats`` is not TensorStats.
            ValueError: for statistics without a row, of this rank's shards only, or on another device.
        """
        self._add(self._squared_norm(stats))

    def step(self) -> Tensor:
        """End a step: estimate |G|² and tr(Σ) from its norms, and update their averages.

        With ``ranks``, all ranks have to call this. It takes one all-reduce of six numbers per group.

        Returns:
            The noise scale after this step, as `value`.

        Raises:
            RankError: if a rank does not respond.
        """
        number, *others, _ = self.sums.unbind()
        size = 1
        # the sum of squares shows whether all ranks have the same number
        total = torch.stack([number * number, number, *others])
        if self.ranks is not None and self.ranks.size > 1:
            size = self.ranks.size
            total = all_reduce(total, "sum", self.ranks.group, self.ranks.timeout)
        signal, noise, count, is_known = _estimate(total[1:], size, same_last=self._has_hook)
        # the mean of K gradients was accumulated, or their sum
        unit = count.square() if self.reduction == "mean" else 1.0
        estimates = torch.stack([signal, noise * self.batch_size]) * unit
        is_known = is_known & (total[0] * size == total[1].square())
        self.average(torch.where(is_known, estimates, torch.nan))
        self.sums.zero_()
        return self.value

    @property
    def value(self) -> Tensor:
        """The noise scale tr(Σ) / |G|² in examples, 0-d or ``(G,)`` float64.

        NaN without an estimate; inf if `squared_norm` is not positive; 0 if only `trace` is not positive.
        """
        squared_norm, trace = self.average.value.unbind()
        # NaN stays in the numerator
        return trace.clamp(min=0.0) / torch.where(squared_norm > 0, squared_norm, 0.0)

    @property
    def squared_norm(self) -> Tensor:
        """Average of unbiased estimates of |G|², 0-d or ``(G,)`` float64; may be negative; NaN if none."""
        return self.average.value[0]

    @property
    def trace(self) -> Tensor:
        """Average of unbiased estimates of tr(Σ), 0-d or ``(G,)`` float64; may be negative; NaN if none."""
        return self.average.value[1]

    @property
    def steps(self) -> Tensor:
        """The number of steps that gave an estimate, 0-d or ``(G,)`` float64."""
        return self.average.steps[0]

    def reset_(self) -> Self:
        """Forget all steps, and the norms of the current one, in place; the buffers keep their addresses."""
        self.sums.zero_()
        self.average.reset_()
        return self

    def register_comm_hook(
        self,
        model: nn.Module,
        state: Any = None,
        hook: Callable[..., Any] | None = None,
        *,
        scaler: GradScaler | None = None,
    ) -> None:
        """Measure this rank's gradient in each backward of a DDP model, before it is averaged over the ranks.

        With it, a step of one backward has two norms: this one, and that of the `add` after it. It replaces
        ``model.register_comm_hook``, which DDP allows once. The hook runs in each backward outside of
        ``no_sync()``, and reads each gradient once. The loop has to call `step` after each of these, or
        `reset_`.

        Args:
            model: a `DistributedDataParallel` over the same ranks as ``ranks``.
            state: of ``hook``.
            hook: a communication hook that averages a bucket, such as torch's ``bf16_compress_hook``. None:
                the all-reduce that DDP makes without a hook.
            scaler: the GradScaler that scales the loss, if any, so that the norm is of the unscaled gradient.

        Raises:
            TypeError: if ``model`` is not DDP. With FSDP2, no rank has the gradient of its own examples.
            ValueError: if this module has no ``ranks``.
            RuntimeError: from DDP, if it already has a hook.
        """
        if self.ranks is None:
            msg = "register_comm_hook: this NoiseScale has no ranks; create it with ranks=gm.Ranks(model)"
            raise ValueError(msg)
        named = named_parameters(model, "register_comm_hook")
        names = dict(zip(named.tensors, named.names, strict=True))

        def measure(bucket: Any) -> None:
            scale = None if scaler is None else inverse_scale(scaler)
            grads = zip([names[p] for p in bucket.parameters()], bucket.gradients(), strict=True)
            if bucket.index() == 0:
                self.sums[-1].zero_()
            self.sums[-1].add_(self._squared_norm(collect(grads, inv_scale=scale)))
            if bucket.is_last():
                self._add(self.sums[-1])

        register_bucket_hook(model, measure, state, hook)
        self._has_hook = True

    def extra_repr(self) -> str:
        """Return the arguments."""
        groups = f", groups={list(self.names)}" if self.names else ""
        return f"batch_size={self.batch_size:g}{groups}, reduction={self.reduction!r}"

    def _unfit(self, name: str, value: Tensor) -> str:
        """Refuse numbers that no gradients have; squared norms may be NaN or inf, as the gradients were."""
        del name
        number, previous, last, _, weight, buckets = value.unbind()
        squares = torch.stack([previous, last, buckets])
        return (
            first_unfit(number, 0.0, LARGEST, "the number of gradients")
            or first_unfit(squares, 0.0, math.inf, "a squared norm", or_nan=True)
            or first_unfit(weight, 0.0, LARGEST, "a weight")
        )

    def _squared_norm(self, stats: TensorStats) -> Tensor:
        """Return the squared norm of the gradient in each group; NaN if it has a NaN or Inf."""
        self._check(stats)
        if self.ranks is not None and stats.local is not None:
            stats = stats.local
        rows = stats if self._groups is None else stats.group(self._groups)
        bad = rows.n_nonfinite > 0
        if rows.origin is not None:
            # in a copy that does not count; and if no rank has a gradient
            bad = bad | (rows.origin >= 0) | (stats.numel.sum() == 0)
        squares = torch.where(bad, torch.nan, rows.sumsq)
        return squares.sum() if self._groups is None else squares

    def _check(self, stats: TensorStats) -> None:
        stats_given(stats, "NoiseScale")
        if not stats.measured:
            msg = "NoiseScale: no parameter has a gradient; call add after each backward, before zero_grad()"
            raise ValueError(msg)
        own = stats if stats.local is None else stats.local
        if self.ranks is None:
            if stats.is_local:
                msg = "NoiseScale: these are statistics of this rank's shards only; add those of all ranks, "
                raise ValueError(msg + "gm.collect_grads(model, reduce=gm.Ranks(model))")
        elif own.is_local or own.is_reduced:
            msg = "NoiseScale: with ranks=, it needs the norm of the whole gradient of this rank's examples, "
            msg += "which DDP has, but these statistics are of shards or groups; with FSDP2 or tensor "
            msg += "parallelism, create NoiseScale without ranks=, accumulate over micro-batches, and add "
            raise ValueError(msg + "gm.collect_grads(model, reduce=gm.Ranks(model)) after each")
        if stats.columns.device != self.sums.device:
            msg = f"NoiseScale: stats are on {stats.columns.device}, but its state is on {self.sums.device}; "
            msg += f"create it with NoiseScale(device={str(stats.columns.device)!r}), or move it there"
            raise ValueError(msg)

    def _add(self, square: Tensor) -> None:
        number, previous, last, slope, weight, buckets = self.sums.unbind()
        # the last one so far is followed by another, so it now counts among those before
        share = torch.where(number > 0, 1.0 / (2.0 * number - 1.0), 0.0)
        slope = slope + share * (last - previous)
        self.sums.copy_(torch.stack([number + 1.0, last, square, slope, weight + share, buckets]))


def _estimate(sums: Tensor, size: int, *, same_last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Estimate |G|² and tr(Σ) / b from the norms of one step, by weighted least squares.

    On each of R ranks, the first m squared norms qₖ are of running sums of its own gradients, and the last
    one, q, of the running sum's mean over the ranks. The increments from one to the next are on average

        ∑ (qₖ - qₖ₋₁)  =  a |G|² + c tr(Σ) / b    with a = R (2k - 1), c = R
        R² q - ∑ qₘ    =  a |G|² + c tr(Σ) / b    with a = n² - R m², c = n - R m

    summed over the ranks, with K micro-batches per rank and n = R K. If the noise is normal and much larger
    than G, they are uncorrelated, and the variance of each is proportional to its a.

    ``sums``: the first five rows, added up over the ranks. ``size``: R. ``same_last``: whether q is of the
    same micro-batches as qₘ, so that m = K; otherwise m = K - 1.

    Returns |G|² and tr(Σ) / b, in units of the gradient of a micro-batch, not finite if they are not
    determined; K; and whether m > 0.
    """
    number, previous, last, slope, weight = sums.unbind()
    own = number - size
    every = own if same_last else number
    a, c = every.square() - own.square() / size, every - own
    known = a > 0
    slope = slope + torch.where(known, c * (size * last - previous) / a, 0.0)
    weight = weight + torch.where(known, c * c / a, 0.0)
    mean = size * last / every
    noise = (slope - mean) / (weight - 1.0)
    return (mean - noise) / every, noise, every / size, own >= size


def checked_groups(groups: Any, caller: str) -> list[tuple[str, GroupRule]]:
    """Return the rules of groups as pairs; raise an error for a rule that is a module."""
    pairs = pairs_of(groups)
    for name, rule in pairs:
        parts = rule if isinstance(rule, Collection) and not isinstance(rule, nn.Module) else [rule]
        if any([isinstance(part, nn.Module) for part in parts]):
            msg = f"{caller}: the rule of group {name!r} is a module; use a pattern of parameter names"
            raise TypeError(msg)
    return pairs
