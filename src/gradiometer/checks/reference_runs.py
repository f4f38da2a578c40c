"""The runs of a step and of its references, all from one state."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from gradiometer.checks.float64_step import Float64Error, float64_step
from gradiometer.checks.gradient_runs import eagerly, run_step
from gradiometer.checks.random_replay import Draws, ReplayError, recording
from gradiometer.checks.recompiled import WithoutDropout
from gradiometer.checks.rounded_products import RoundedProducts
from gradiometer.checks.step_run import StepRun
from gradiometer.checks.step_state import StepState
from gradiometer.distributed import all_reduce, group_of, ranks_of
from gradiometer.inputs import is_dtensor, named_parameters
from gradiometer.stats import repeating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

# seconds
_TIMEOUT: Final = 60.0
# of the norm of all gradients: more than the order of atomic additions changes
_REPEATED: Final = 2.0**-6


@dataclass(frozen=True, eq=False)
class References:
    """What a step gave without compilation and checkpoints.

    Attributes:
        eager: in its own precision, with its gradients in the order of the backward pass.
        rounded: the same with coarse matrix products; None if it was not run.
        is_smooth: whether its gradients are known not to jump, see `RoundedProducts`.
        exact: in float64; None if that is not possible.
        notes: why not.
        backends: those of the compiled code that ran eagerly.
        is_random: whether it drew random numbers.
        unrecorded: the eager step where its random numbers are not recorded; None if it drew none.
        is_recorded: whether these are the same numbers.
        random: the random states at its end.
    """

    eager: StepRun
    rounded: StepRun | None = None
    is_smooth: bool = False
    exact: StepRun | None = None
    notes: tuple[str, ...] = ()
    backends: tuple[Any, ...] = ()
    is_random: bool = False
    unrecorded: StepRun | None = None
    is_recorded: bool = True
    random: Mapping[str, Any] = field(default_factory=dict)


def has_same_numbers(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two random states are equal: then both runs have drawn as much."""
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) if isinstance(x, torch.Tensor) else x == b[name] for name, x in a.items()
    )


def _in_order(run: StepRun, order: Iterable[str]) -> StepRun:
    """Return a run with its gradients in an order; without that, the last is probably the first."""
    grads = {name: run.grads[name] for name in order if name in run.grads}
    grads |= {name: run.grads[name] for name in reversed(list(run.grads)) if name not in grads}
    return replace(run, grads=grads)


def _check_repeats(first: StepRun, second: StepRun) -> None:
    """Raise a ValueError if two runs of a step from one state have different gradients."""
    total = distance = 0.0
    for name, a in first.grads.items():
        b = second.grads.get(name)
        if b is None or a.shape != b.shape:
            continue
        # NaN and infinity have rows of their own
        size, error = float(a.abs().double().norm()) ** 2, float((a - b).abs().double().norm()) ** 2
        if size + error < float("inf"):
            total, distance = total + size, distance + error
    if distance > _REPEATED**2 * total:
        share = 100.0 * (distance / total) ** 0.5 if total else 100.0
        raise ValueError(
            "check_gradients: in two runs of the step in eager mode, from one state, the gradients differ by "
            f"{share:.2g} % of their norm: the step depends on something that can't be restored, such as "
            "an iterator, the time, a file or a counter in a class; pass it as an argument of the step"
        )


class Runs:
    """Runs steps with the same arguments from the same state, which is restored after each run.

    Args:
        step: the step that is checked.
        args: its arguments.
        kwargs: its keyword arguments.
        model: the model whose gradients are read.
        others: further objects that refer to what is to be restored.
        clears: whether the runs begin without gradients.

    Attributes:
        names: the parameters, and their names.
        random: the random states at the end of the last run.
        compiled_steps: the compiled steps of optimizers that the step can reach.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        model: nn.Module,
        others: Any = (),
        clears: bool = False,
    ) -> None:
        self.names = {p: name for name, p in zip(*named_parameters(model, "check_gradients"), strict=True)}
        self.random: Mapping[str, Any] = {}
        self._state = StepState(step, args, kwargs, model, others)
        self.compiled_steps = self._state.compiled_steps
        self._args, self._kwargs, self._model, self._clears = args, kwargs, model, clears

    def quietly(self) -> AbstractContextManager[None]:
        """Return a context for the runs, which monitors do not record."""
        return repeating(self._state.parameters, self._state.parts.values())

    @contextmanager
    def _restored(self, contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._state.restored())
            for p in self.names if self._clears else ():
                p.grad = None
            for each in contexts:
                stack.enter_context(each)
            yield

    def run(
        self,
        step: Callable[..., Any],
        *contexts: AbstractContextManager[Any],
        order: dict[str, None] | None = None,
        called: list[Optimizer] | None = None,
    ) -> StepRun:
        """Run a step in these contexts; for the rest see `run_step`."""
        call = partial(step, *self._args, **self._kwargs)
        with self._restored(contexts):
            found = run_step(call, self.names, self._state.optimizers, order, called)
            self.random = self._state.random()
        return self._with_returned_gradients(found)

    def references(
        self,
        step: Callable[..., Any],
        *,
        dropout: bool = True,
        is_other: bool = False,
        called: list[Optimizer] | None = None,
    ) -> References:
        """Run a step in eager mode: in its own precision, with coarse products, and in float64.

        ``is_other``: whether it is another one than that which is checked, so that it may have whole tensors
        where the model has DTensors, and does not average over ranks. ``called`` gets the optimizers that it
        calls.
        """

        def more() -> list[AbstractContextManager[Any]]:
            return [] if dropout else [WithoutDropout()]

        order: dict[str, None] = {}
        backends: list[Any] = []
        with recording() as draws:
            eager = self.run(step, eagerly(backends), *more(), order=order, called=called)
        random = self.random
        products = RoundedProducts()
        rounded = self.run(step, eagerly(), products, *more())
        again = self.run(step, eagerly(), *more())
        unrecorded, is_recorded = None, True
        if draws.drawn:
            # a kernel that draws inside, such as attention on a GPU, is exchanged to record its numbers
            unrecorded = _in_order(again, order)
            is_recorded = has_same_numbers(self.random, random)
        if is_recorded:
            _check_repeats(eager, again)
        exact, notes = self._exact(step, draws, more(), is_other=is_other)
        return References(
            _in_order(eager, order),
            rounded,
            products.is_smooth,
            exact,
            notes,
            tuple(backends),
            bool(draws.drawn),
            unrecorded,
            is_recorded,
            random,
        )

    def _exact(
        self, step: Any, draws: Draws, contexts: Any, *, is_other: bool
    ) -> tuple[StepRun | None, tuple[str, ...]]:
        if not is_other and any(is_dtensor(type(p)) for p in self.names):
            return None, ("no float64 run: parameters are DTensors",)
        try:
            with self._restored(contexts):
                exact = float64_step(
                    step, self._args, self._kwargs, self._model, draws, self._state.all_optimizers
                )
        except (Float64Error, ReplayError) as error:
            return None, (f"no float64 run: {error}",)
        if exact.narrow:
            # these round as the reference does
            return None, exact.notes
        found = self._with_returned_gradients(exact)
        return (found if is_other else self._averaged(found)), ()

    def _averaged(self, run: StepRun) -> StepRun:
        """Return a float64 run with its gradients averaged over the ranks, if the step's model does that."""
        grads = dict(run.grads)
        for part in self._state.parts.values():
            if isinstance(part, nn.parallel.DistributedDataParallel):
                group = group_of(part.process_group)
                own = set(part.parameters())
                for p, name in self.names.items():
                    if p in own and p.requires_grad:
                        grad = grads.get(name, torch.zeros_like(p, dtype=torch.float64))
                        total = all_reduce(grad, "sum", group, _TIMEOUT)
                        grads[name] = total / len(ranks_of(group)[1])
        return replace(run, grads=grads)

    def _with_returned_gradients(self, run: StepRun) -> StepRun:
        """Return a run with the gradients that its step has returned, as a mapping from names."""
        returned = {name.removeprefix("output."): x for name, x in run.outputs.items()}
        if not returned or not set(returned) <= set(self.names.values()):
            return run
        return StepRun({}, returned, run.notes)
