"""What the host knows of a model beside the values of its tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from gradiometer.recorder.agreement_look import AgreementLook
    from gradiometer.recorder.batch_look import BatchLook
    from gradiometer.stats.line_stats import WeightValues


class StepOrder(NamedTuple):
    """The order of a step: backward passes, clearing of gradients and clips, as hooks on the host saw it.

    It is about one parameter of each param group. Without hooks, or if they do not run, as in a compiled
    backward pass, the values are those of a step without mistakes.

    Attributes:
        passes: how many backward passes wrote the gradients since the step before; 0 if that is not known.
        lost: how many of them were cleared, and not changed otherwise, before the next one.
        cleared: whether all gradients were cleared between the last of them and ``optimizer.step()``.
        stale: parameters whose gradient contains that of an earlier step, which was not cleared.
        idle_clip: if clips changed nothing that a step used, what they found: ``"none"`` for no gradients,
            ``"used"`` for those of the step before; empty otherwise.
        scaled_clip: whether gradients were clipped while they had the scale of a GradScaler.
        backoff: by what the GradScaler multiplies its scale after a skipped step; 0 without one.
        first_scale: its scale before the first step; 0 if that is not known.
        is_unfinished: whether the loop ended without an ``optimizer.step()`` after these passes.
        others: what optimizers that are not watched have updated since the step before.
    """

    passes: int = 0
    lost: int = 0
    cleared: bool = False
    stale: tuple[str, ...] = ()
    idle_clip: str = ""
    scaled_clip: bool = False
    backoff: float = 0.0
    first_scale: float = 0.0
    is_unfinished: bool = False
    others: tuple[str, ...] = ()


_UNKNOWN: Final = StepOrder()


@dataclass(eq=False)
class LoopFacts:
    """What `gradiometer.watch` has seen of the training loop in the current step.

    Attributes:
        changed_gradients: whether something that was not observed has changed gradients between the end of
            ``backward()`` and ``optimizer.step()``.
        has_master_updates: whether the updates of some parameters are those of their master weights.
        order: see `StepOrder`.
    """

    changed_gradients: bool = False
    has_master_updates: bool = False
    order: StepOrder = _UNKNOWN


@dataclass(frozen=True)
class Driver:
    """Who calls a monitor, and the optimizers that update the model.

    Attributes:
        name: ``"loop"`` for `gradiometer.Monitor.record` and `gradiometer.Monitor.advance` in your own loop,
            ``"watch"`` for the hooks of `gradiometer.watch`, ``"trainer"`` for the callback of a trainer.
        optimizers: the optimizers; empty if they are not known.
        facts: what it sees of the loop; it writes them before each step ends.
        model: the module, if the monitor watches other tensors of the same names, such as this rank's parts
            of its parameters.
    """

    name: Literal["loop", "watch", "trainer"] = "loop"
    optimizers: tuple[Optimizer, ...] = ()
    facts: LoopFacts = field(default_factory=LoopFacts)
    model: Module | None = None


OPTION: Final = "optimizer/"
"""How the names of scalars begin that are hyperparameters of param groups, recorded when they change."""
_OPTIONS: Final = re.compile(r"weight_decay|eps|beta\d+|momentum|alpha|rho")
# param groups whose hyperparameters are recorded, at most
_GROUPS: Final = 64


@dataclass(frozen=True)
class OptimizerState:
    """Which parameters the known optimizers hold, and with which learning rates.

    Attributes:
        groups: for each parameter of the catalog, its param group, counted over all optimizers; -1 if none of
            them holds it.
        rates: the learning rate of each param group; None if it is on a device, or not a number.
        owners: the number of the optimizer of each param group.
        rounded_well: for each parameter, whether an update that is too small for its dtype is kept: by a copy
            in a wider dtype that an optimizer holds, by stochastic rounding or by Kahan summation.
        copied: for each parameter, whether such a copy, its master weights, is what keeps it.
        writes_back: whether parameters that have master weights were seen to be written in place.
        options: the other hyperparameters of each param group that are numbers, by name: ``weight_decay``,
            ``eps``, ``momentum``, and ``beta1``, ``beta2``, … of ``betas``.
        updates: how often each parameter was updated, by the optimizer's own counters; NaN where they are not
            on the host. Empty in steps in which no states of optimizers were measured.
        dtypes: of the states of each parameter, as ``"float32"``; ``""`` if it has none. Empty likewise.
        has_others: whether an optimizer holds other tensors, such as copies of the parameters in one buffer.
        methods: for each param group, the optimizer of `torch.optim` whose formula updates it, such as
            ``"AdamW"``; empty if it is another one, or has an option that changes the formula.
        scheduled: for each param group, whether a scheduler of `torch.optim` was created with it.

    >>> state = OptimizerState((0, 1, -1), (0.1, 0.0), (0, 0), (False,) * 3, (False,) * 3)
    >>> state.held.tolist(), state.is_frozen.tolist()
    ([True, True, False], [False, True, False])
    """

    groups: tuple[int, ...]
    rates: tuple[float | None, ...]
    owners: tuple[int, ...]
    rounded_well: tuple[bool, ...]
    copied: tuple[bool, ...]
    has_others: bool = False
    writes_back: bool = False
    options: tuple[Mapping[str, float], ...] = ()
    methods: tuple[str, ...] = ()
    scheduled: tuple[bool, ...] = ()
    updates: tuple[float, ...] = ()
    dtypes: tuple[str, ...] = ()

    @cached_property
    def held(self) -> Tensor:
        """Which parameters an optimizer holds, ``(N,) bool``."""
        return torch.tensor([group >= 0 for group in self.groups], dtype=torch.bool, device="cpu")

    @cached_property
    def is_frozen(self) -> Tensor:
        """Which parameters are in a group whose learning rate is 0, ``(N,) bool``."""
        frozen = [group >= 0 and self.rates[group] == 0.0 for group in self.groups]
        return torch.tensor(frozen, dtype=torch.bool, device="cpu")

    def first_rates(self) -> dict[str, float]:
        """Return the learning rate of each optimizer's first group: ``lr``, ``lr_1`` and so on."""
        found = [(owner, self.rates[self.owners.index(owner)]) for owner in sorted(set(self.owners))]
        return {f"lr_{owner}" if owner else "lr": rate for owner, rate in found if rate is not None}

    def scalars(self) -> dict[str, float]:
        """Return hyperparameters by name: ``optimizer/eps``, or ``optimizer/eps/group_1`` if groups differ.

        Learning rates are those of groups that differ from the first one of their optimizer.

        >>> options = {"eps": 1e-8, "weight_decay": 0.1}, {"eps": 1e-8, "weight_decay": 0.0}
        >>> state = OptimizerState((0, 1), (0.1, 0.2), (0, 0), (False,) * 2, (False,) * 2, options=options)
        >>> for name in state.scalars():
        ...     print(name)
        optimizer/eps
        optimizer/lr/group_1
        optimizer/weight_decay/group_0
        optimizer/weight_decay/group_1
        """
        found = {}
        rates = self.rates[:_GROUPS]
        for group, (owner, rate) in enumerate(zip(self.owners, rates, strict=False)):
            if rate is not None and rate != rates[self.owners.index(owner)]:
                found[f"{OPTION}lr/group_{group}"] = rate
        names = {name for options in self.options for name in options if _OPTIONS.fullmatch(name)}
        for name in names:
            values = [options.get(name) for options in self.options[:_GROUPS]]
            is_same = len({*values}) == 1
            of_groups = {"" if is_same else f"/group_{i}": x for i, x in enumerate(values)}
            found |= {f"{OPTION}{name}{group}": x for group, x in of_groups.items() if x is not None}
        return dict(sorted(found.items()))

    def idle(self, measured: Tensor) -> Tensor:
        """Return which parameters belong to an optimizer of which none was measured, ``(N,) bool``.

        Several optimizers record a step each for its own parameters, so such an optimizer need not have
        stepped. With one optimizer, there is no such parameter.
        """
        owner = torch.tensor([self.owners[x] if x >= 0 else -1 for x in self.groups], device="cpu")
        several = len(set(self.owners)) > 1
        return (owner >= 0) & several & ~torch.isin(owner, owner[measured])

    @cached_property
    def keeps_small_updates(self) -> Tensor:
        """`rounded_well` as a tensor, ``(N,) bool``."""
        return torch.tensor(self.rounded_well, dtype=torch.bool, device="cpu")

    @cached_property
    def has_masters(self) -> Tensor:
        """`copied` as a tensor, ``(N,) bool``."""
        return torch.tensor(self.copied, dtype=torch.bool, device="cpu")

    @property
    def unwritten(self) -> Tensor:
        """Which parameters have master weights, but were not seen to be written, ``(N,) bool``."""
        return self.has_masters & (not self.writes_back)

    @property
    def highest_rate(self) -> float | None:
        """The highest learning rate; None if one is not known."""
        known = [rate for rate in self.rates if rate is not None and math.isfinite(rate)]
        return max(known) if known and len(known) == len(self.rates) else None


@dataclass(frozen=True)
class ModelValues:
    """Values of a model that no table has, as they were in one step.

    Attributes:
        step: the step at whose end they were read.
        nonfinite: the buffers with a NaN or Inf: name, ``"NaN"`` or ``"Inf"``, and the step in which it was
            first seen.
        least: the least element of each parameter that should stay positive, from its name, if it began so:
            name, at the start, and now.
    """

    step: int = 0
    nonfinite: tuple[tuple[str, str, int], ...] = ()
    least: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class NormValues:
    """What normalization layers returned in one step, compared with their input.

    Attributes:
        step: the step.
        layers: name, class, and what `gradiometer.monitor.norm_reader.compare` returns for it.
    """

    step: int = 0
    layers: tuple[tuple[str, str, float, float], ...] = ()


@dataclass(frozen=True)
class InitialValues:
    """The weights as they were when the monitor was created, by rows and columns.

    Attributes:
        weights: what is known of each; empty until it has arrived.
        is_pretrained: whether they have been trained before, as a config, frozen parameters or norms tell.
    """

    weights: tuple[WeightValues, ...] = ()
    is_pretrained: bool = False


@dataclass(frozen=True, eq=False)
class ModelState:
    """The state of a model at the end of a step, which costs no wait for the device.

    Attributes:
        requires_grad: for each parameter of the catalog, whether it requires a gradient.
        reached: whether the autograd graph of the loss leads to any of these parameters; None if the loss was
            given without its graph.
        unregistered: the parameters that the graph of the loss leads to and that are in a container of a
            module, but are not registered: a text for each, such as ``"4 parameters with 10 elements in the
            list hidden"``.
        foreign: the number of other parameters that the graph leads to, which neither the model nor a known
            optimizer has.
        is_foreign_gone: whether these were gone some steps later, so that they belong to no other model.
        bounded: the loss and what it is computed from in place of logits, such as ``"log_softmax of
            softmax"``, from the graph of the loss; empty if there is nothing like that.
        batches: what was seen of the batches of a few steps, in their order.
        agreements: what micro-batches and ranks have in common in the last steps that were looked at.
        initial: the weights at the start.
        evaluating: the layers that behave differently in evaluation mode, if the model is in that mode, such
            as ``"2 BatchNorm2d, 1 Dropout"``; empty in training mode.
        untied: pairs of names that were one parameter when the monitor was created, and are two now.
        tied: all such pairs, the name in the catalog first.
        grad_writes: how often the first gradient was written in place since the end of the step before: once,
            if one ``backward()`` has added to it and nothing has cleared it. 0 if it is another tensor now.
        has_loss_scale: whether gradients have a loss scale: ``record`` was called with ``inv_scale``.
        driver: the name of the `Driver`.
        optimizers: what its optimizers hold; None if they are not known.
        changed_gradients: see `LoopFacts`.
        has_master_updates: see `LoopFacts`.
        order: see `StepOrder`.
        framework: whose buffers have the gradients, see `gradient_framework`; empty if ``p.grad`` has them.
        values: values of buffers and parameters that no table has.
        norms: the output of normalization layers.
        dropouts: the names of Dropout layers in training mode with a high probability, and that.
    """

    requires_grad: tuple[bool, ...]
    reached: bool | None = None
    evaluating: str = ""
    untied: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    grad_writes: int = 0
    has_loss_scale: bool = False
    driver: str = "loop"
    optimizers: OptimizerState | None = None
    changed_gradients: bool = False
    has_master_updates: bool = False
    order: StepOrder = _UNKNOWN
    framework: str = ""
    values: ModelValues = field(default_factory=ModelValues)
    norms: NormValues = field(default_factory=NormValues)
    dropouts: tuple[tuple[str, float], ...] = ()
    unregistered: tuple[str, ...] = ()
    foreign: int = 0
    is_foreign_gone: bool = False
    bounded: str = ""
    batches: tuple[BatchLook, ...] = ()
    agreements: tuple[AgreementLook, ...] = ()
    initial: InitialValues = field(default_factory=InitialValues)


# attributes that a framework adds to parameters whose gradients are in its own buffers
_MARKS: Final = {"_hp_mapping": "DeepSpeed", "ds_id": "DeepSpeed", "main_grad": "Megatron-LM"}


def gradient_framework(parameters: Iterable[Tensor]) -> str:
    """Return the framework that keeps the gradients of parameters in its own buffers; empty for none.

    >>> import torch
    >>> gradient_framework(torch.nn.Linear(2, 1).parameters())
    ''
    """
    found = (name for p in parameters for mark, name in _MARKS.items() if hasattr(p, mark))
    return next(found, "")
