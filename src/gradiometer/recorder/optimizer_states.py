"""States of optimizers, such as Adam's moments: which of them there are, and what is measured of them."""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.inputs import Named, is_dtensor, layout
from gradiometer.recorder.kinds import state_kind
from gradiometer.recorder.table import Table
from gradiometer.stats import Pending, measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.catalog import Rows
    from gradiometer.recorder.step_ring import StepRing

# classes of torch.optim -> their states that have the shape of the parameter -> the option that makes them
_OF_CLASS: Final[Mapping[str, Mapping[str, str]]] = {
    "Adadelta": {"square_avg": "", "acc_delta": ""},
    "Adafactor": {},
    "Adagrad": {"sum": ""},
    "Adam": {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"},
    "Adamax": {"exp_avg": "", "exp_inf": ""},
    "ASGD": {"ax": ""},
    "LBFGS": {},
    "Muon": {"momentum_buffer": "momentum"},
    "NAdam": {"exp_avg": "", "exp_avg_sq": ""},
    "RAdam": {"exp_avg": "", "exp_avg_sq": ""},
    "RMSprop": {"square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
    "Rprop": {"prev": "", "step_size": ""},
    "SGD": {"momentum_buffer": "momentum"},
    "SparseAdam": {"exp_avg": "", "exp_avg_sq": ""},
}
# of an optimizer that derives from none of these
_USUAL: Final = {"exp_avg": "", "exp_avg_sq": "", "momentum_buffer": ""}
_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# recorded steps after a start or a resume that are due whatever the cadence is
_FIRST: Final = 2


def state_names(optimizer: Optimizer) -> list[str]:
    """Return the names of the states of an optimizer that have, or will have, the shape of the parameter.

    Before the first step there are none yet: those of the classes of ``torch.optim`` are known.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
    >>> state_names(torch.optim.AdamW([weight])), state_names(torch.optim.SGD([weight], lr=0.1))
    (['exp_avg', 'exp_avg_sq'], [])
    """
    inner: Any = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer):
        inner = inner.optimizer
    of_torch = (kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim"))
    known = next((_OF_CLASS[name] for name in of_torch if name in _OF_CLASS), _USUAL)
    groups = optimizer.param_groups
    names = [
        name for name, option in known.items() if not option or any(group.get(option) for group in groups)
    ]
    # a scalar parameter does not tell which of its states have the shape of a parameter
    held = ((p, optimizer.state.get(p)) for group in groups for p in group["params"] if p.dim())
    present = [name for p, state in held if state for name, x in state.items() if _is_state(x, p)]
    return list(dict.fromkeys([*names, *present]))


def _is_state(x: object, parameter: Tensor) -> bool:
    is_plain = type(x) is Tensor or type(x) is nn.Parameter or is_dtensor(type(x))
    return (
        is_plain
        and isinstance(x, Tensor)
        and x.dtype in _DTYPES
        and x.shape == parameter.shape
        and not x.is_meta
        and layout(x) == torch.strided
    )


class OptimizerStates:
    """Measures the states of optimizers in the steps that are due, without a wait.

    It keeps no optimizer alive. A step is due if it is divisible by ``every`` and is recorded; so are the
    first two recorded steps after a start or a resume, in which states begin, or are found lost.

    Args:
        optimizers: the optimizers.
        names: of their states.
        every: the cadence.

    Attributes:
        kinds: a kind for each name.
        masters: by the names of parameters, the tensors that the optimizers hold in their place.
        record_every: the cadence of the recorder.
    """

    def __init__(self, optimizers: Iterable[Optimizer], names: Iterable[str], every: int) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.names = tuple(names)
        self.kinds = tuple([state_kind(name) for name in self.names])
        self.masters: Mapping[str, Tensor] = {}
        self.every, self.record_every = every, 1
        self.restart()

    def restart(self) -> None:
        """Begin again, at a step whose number was set."""
        self._measured = 0

    def is_due(self, step: int) -> bool:
        """Return whether the states of a step are measured."""
        return step % self.record_every == 0 and (step % self.every == 0 or self._measured < _FIRST)

    def start(self, recorder: StepRing) -> Pending[dict[str, Table]]:
        """Measure the states, and start to copy the result to the host: the tables by kind.

        Raises:
            TypeError: for a state that cannot be measured; the message names it.
        """
        self._measured += 1
        rows = recorder.catalog.parameters
        places: list[tuple[int, int]] = []
        labels: list[str] = []
        tensors: list[Any] = []
        for place, name, held, state in self._each(recorder):
            for number, kind in enumerate(self.kinds):
                x = state.get(kind.name)
                if _is_state(x, held):
                    places.append((number, place))
                    labels.append(kind.label(name))
                    tensors.append(x)
        if not tensors:
            return Pending([], lambda _: {})
        with recorder.in_order():
            named = Named(tuple(labels), tensors)
            stats = measure(named, "Monitor(states=...)", home=recorder.ring.device)
            build = partial(self._tables, rows, recorder.thresholds, places)
            return Pending([stats.columns], build)

    def facts(self, recorder: StepRing) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return how often each parameter was updated, by counters on the host, and the dtype of its states.

        NaN and ``""`` where these are not known.
        """
        size = len(recorder.parameters_tracked)
        counts, dtypes = [math.nan] * size, [""] * size
        for place, _, held, state in self._each(recorder):
            count = state.get("step")
            is_away = isinstance(count, Tensor) and (count.device.type != "cpu" or count.numel() != 1)
            if isinstance(count, (int, float, Tensor)) and not is_away and not is_dtensor(type(count)):
                counts[place] = float(count)
            own = [state[name] for name in self.names if _is_state(state.get(name), held)]
            dtypes[place] = str(own[0].dtype).removeprefix("torch.") if own else ""
        return tuple(counts), tuple(dtypes)

    def _each(self, recorder: StepRing) -> Iterator[tuple[int, str, Tensor, Mapping[str, Any]]]:
        """Yield place and name of each parameter that has a state, the tensor that has it, and the state."""
        for optimizer in self._alive():
            for place, (name, p) in enumerate(
                zip(recorder.catalog.names, recorder.parameters_tracked, strict=True)
            ):
                held = self.masters.get(name, p)
                state = optimizer.state.get(held)
                if state:
                    yield place, name, held, state

    def _alive(self) -> list[Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _tables(
        self, rows: Rows, thresholds: Thresholds, places: Sequence[tuple[int, int]], host: list[Tensor]
    ) -> dict[str, Table]:
        (columns,) = host
        found = {}
        for number, kind in enumerate(self.kinds):
            own = [(i, place) for i, (of, place) in enumerate(places) if of == number]
            if own:
                values = torch.zeros((len(rows), kind.schema.width), dtype=torch.float64, device="cpu")
                values[[place for _, place in own]] = columns[[i for i, _ in own]]
                flags = kind.flags_of(values, thresholds)
                found[kind.name] = Table(kind, rows, values, flags, thresholds=thresholds)
        return found
