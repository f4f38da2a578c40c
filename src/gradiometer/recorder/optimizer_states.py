"""States of optimizers, such as Adam's moments: which of them there are, and what is measured of them."""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.inputs import Named, is_dtensor
from gradiometer.recorder.kinds import state_kind
from gradiometer.recorder.table import Table
from gradiometer.stats import Pending, measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradiometer.columns import Thresholds
    from gradiometer.recorder.catalog import Rows

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


def _is_state(x: Any, parameter: Tensor) -> bool:
    return (
        (type(x) is Tensor or type(x) is nn.Parameter or is_dtensor(type(x)))
        and x.dtype in _DTYPES
        and x.shape == parameter.shape
        and x.layout == torch.strided
        and not x.is_meta
    )


def _count(value: object) -> float:
    """Return a counter of updates; NaN if it is on another device, or not a number."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        return math.nan
    return float(value) if isinstance(value, (int, float, Tensor)) else math.nan


class Measured(NamedTuple):
    """What is known of the states after a step.

    Attributes:
        tables: by kind, on their way.
        updates: how often each parameter was updated, by counters on the host; NaN where there is none.
        dtypes: of the states of each parameter, as ``"float32"``; ``""`` where there are none.
    """

    tables: Pending[dict[str, Table]]
    updates: tuple[float, ...]
    dtypes: tuple[str, ...]


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

    def start(
        self, rows: Rows, parameters: Sequence[Tensor], thresholds: Thresholds, home: torch.device
    ) -> Measured:
        """Measure the states of parameters, and start to copy the statistics from a device to the host.

        Raises:
            TypeError: for a state that cannot be measured; the message names it.
        """
        self._measured += 1
        places: list[tuple[int, int]] = []
        labels: list[str] = []
        tensors: list[Any] = []
        updates, dtypes = [math.nan] * len(rows), [""] * len(rows)
        numbered = list(enumerate(self.names))
        for optimizer in self._alive():
            states = optimizer.state
            for place, (name, p) in enumerate(zip(rows.names, parameters, strict=True)):
                held = self.masters.get(name, p)
                state = states.get(held)
                if not state:
                    continue
                updates[place] = _count(state.get("step"))
                for number, of in numbered:
                    x = state.get(of)
                    if x is not None and _is_state(x, held):
                        places.append((number, place))
                        labels.append(f"{name}.{of}")
                        tensors.append(x)
                        dtypes[place] = dtypes[place] or str(x.dtype).removeprefix("torch.")
        facts = tuple(updates), tuple(dtypes)
        if not tensors:
            return Measured(Pending([], lambda _: {}), *facts)
        stats = measure(Named(tuple(labels), tensors), "Monitor(states=...)", home=home)
        build = partial(self._tables, rows, thresholds, places)
        return Measured(Pending([stats.columns], build), *facts)

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
