"""coord_check: train models of several widths for a few steps, and fit how activations scale with width."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradiometer.control.coord_report import CoordCheck, row_of
from gradiometer.control.random_state import random_state, restore_random_state
from gradiometer.inputs import describe, modules_by_name, unwrapped
from gradiometer.stats import Taps, compare, outside_of_a_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradiometer.stats import GroupRule

_WHAT: Final = "coord_check"
_LEAST_WIDTHS: Final = 3
# the forward passes' random numbers differ from those of the initialization
_FORWARD: Final = 2**32


def coord_check(
    make_model: Callable[[int], tuple[nn.Module, Optimizer]],
    widths: Iterable[int],
    loss: Callable[[nn.Module], Tensor],
    *,
    modules: GroupRule | type[nn.Module] | None = None,
    names: Iterable[str] = (),
    steps: int = 4,
    seeds: int = 5,
    tolerance: float = 0.25,
) -> CoordCheck:
    """Check a parametrization such as μP: train models of several widths, and fit activations against width.

    In the maximal update parametrization (μP), an activation x_t after t steps, and its change x_t - x_0,
    have coordinates whose size does not depend on the width of the model. So the slopes of log2(rms(x_t)) and
    log2(rms(x_t - x_0)) against log2(width) are near 0. See Yang et al. 2022, Tensor Programs V,
    https://arxiv.org/abs/2203.03466, whose figure 5 plots x_t - x_0, and the coordinate check of its package,
    https://github.com/microsoft/mup#coord-check. That plots the mean magnitude of x_t by default; the rms has
    the same slope.

    An activation fails if, by more than two standard errors over the seeds,

    - its change grows after any step: slope > ``tolerance``.
    - its change vanishes after the last step: slope < ``-tolerance``. Such a layer learns nothing in a wide
      model.
    - it grows itself, at initialization or after any step.
    - it vanishes itself, and has more elements in a wider model.

    Activations that have as many elements in a wider model, the outputs of the network and attention logits,
    may begin as width**-0.5 in μP, and approach their final slope slowly. They may vanish themselves, and
    their changes fail only below ``-0.5 - tolerance``.

    In the limit of wide models, exponents are multiples of 1/2 in the usual parametrizations. The default
    tolerance is halfway between 0 and the smallest other one.

    Every model makes ``steps`` steps with the loss that the function returns: compute it from one fixed
    batch. The function is called under the same random state each time, so dropout has the same masks.
    Activations are measured by `Taps`; compiled models run eagerly. Waits for the device. It needs memory for
    two more copies of the measured activations.

    Args:
        make_model: returns a new model of a width, initialized with the random numbers of torch, and its
            optimizer, with the learning rates for that width.
        widths: at least 3, increasing, such as ``[64, 128, 256, 512]``. Wider is more exact: in small models,
            slopes deviate.
        loss: calls a model with a batch and returns the loss.
        modules: a rule for the modules whose outputs are measured, as in `Taps`. By default all that hold
            parameters themselves.
        names: the names of calls of `tap` in the model, such as those of attention logits.
        steps: the number of steps. It takes 3 until everything moves if the readout and the queries are
            initialized with 0.
        seeds: the number of models per width, with the seeds 0, 1, ...
        tolerance: the largest slope that passes.

    Returns:
        A `CoordCheck`: false if an activation fails; ``print`` shows the slopes, ``save_svg`` draws them.

    Raises:
        TypeError: if ``make_model`` does not return a module and an optimizer, or ``loss`` not a scalar.
        ValueError: for less than 3 widths, or not increasing ones; for ``steps``, ``seeds`` or ``tolerance``
            that are not positive; if models of two widths do not have the same activations.
        RuntimeError: if a loss is not finite; inside a compiled function.

    >>> import torch, gradiometer as gm
    >>> x, y = torch.randn(16, 8), torch.randn(16, 1)
    >>> def make_model(width):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    ...     return model, torch.optim.Adam(model.parameters(), lr=0.01)
    >>> loss = lambda model: torch.nn.functional.mse_loss(model(x), y)
    >>> result = gm.coord_check(make_model, [64, 128, 256, 512], loss, steps=1)
    >>> result.failed  # its learning rate has to be divided by the width
    ('1.out',)
    """
    outside_of_a_graph(_WHAT)
    widths = _checked_widths(widths)
    for name, count in (("steps", steps), ("seeds", seeds)):
        if type(count) is not int or count < 1:
            raise ValueError(f"{_WHAT}({name}={describe(count)}): {name} must be an integer, at least 1")
    if not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf):
        raise ValueError(f"{_WHAT}(tolerance={describe(tolerance)}): the tolerance must be a positive number")
    names = [names] if isinstance(names, str) else list(names)
    before = random_state(_devices())
    runs = []
    try:
        with torch.compiler.set_stance("force_eager"):
            for seed in range(seeds):
                same = [_train(make_model, width, loss, seed, steps, modules, names) for width in widths]
                _check_alike(widths, same)
                runs.append(same)
    finally:
        restore_random_state(before)
    rows = []
    for name in runs[0][0].numel:
        numel = [run.numel[name] for run in runs[0]]
        rms, changes = [
            [[[getattr(run, what)[t][name] for run in same] for same in runs] for t in range(steps + 1)]
            for what in ("rms", "changes")
        ]
        rows.append(row_of(name, widths, numel, rms, changes, tolerance))
    # by t, then by width
    each = zip(*[zip(*[run.losses for run in same], strict=True) for same in runs], strict=True)
    losses = tuple([tuple([sum(x) / seeds for x in zip(*at, strict=True)]) for at in each])
    return CoordCheck(widths, steps, seeds, float(tolerance), tuple(rows), losses)


class _Run(NamedTuple):
    """Measurements of one model: by the name of the activation, and for each t."""

    numel: dict[str, int]
    rms: list[dict[str, float]]
    changes: list[dict[str, float]]
    losses: list[float]


class _KeepingTaps(Taps):
    """Taps that keep copies of what they measure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_keeping = False
        # by name, the values of all calls in a forward pass
        self.kept: dict[str, list[Tensor]] = {}

    def measure(self, x: Tensor, row: int, channel_dim: int) -> Tensor:
        """Return ``x``, measured, and keep a copy."""
        x = super().measure(x, row, channel_dim)
        if self.is_keeping:
            # later operations may change it in place
            self.kept.setdefault(self.names[row], []).append(x.detach().clone())
        return x


def _train(
    make_model: Callable[[int], tuple[nn.Module, Optimizer]],
    width: int,
    loss: Callable[[nn.Module], Tensor],
    seed: int,
    steps: int,
    modules: GroupRule | type[nn.Module] | None,
    names: Sequence[str],
) -> _Run:
    torch.manual_seed(seed)
    model, optimizer = _checked_model(make_model(width), width)
    model.train()
    options: dict[str, Any] = {"modules": modules}
    if modules is None:
        parts = modules_by_name(unwrapped(model))
        has_own = {
            name: any([True for x in same for _ in x.parameters(recurse=False)])
            for name, same in parts.items()
        }
        own = [name for name, is_own in has_own.items() if name and is_own]
        if not own and not names:
            msg = f"{_WHAT}: the model of width {width} has no modules with parameters, but its own; put it "
            raise ValueError(msg + "into torch.nn.Sequential, or pass modules= or names=")
        options = {"modules": own} if own else {}
    taps = _KeepingTaps(model, options, names=names)
    run = _Run({}, [], [], [])
    first: dict[str, list[Tensor]] = {}
    try:
        for step in range(steps + 1):
            torch.manual_seed(_FORWARD + seed)
            taps.kept, taps.is_keeping = {}, True
            with torch.set_grad_enabled(step < steps):
                value = loss(model)
            # activation checkpointing calls modules again in the backward
            taps.is_keeping = False
            run.losses.append(_checked_loss(value, width, step, seed))
            found = {name: row for name, row in taps.stats().materialize().items() if name in taps.names}
            first = first or taps.kept
            run.rms.append({name: row.rms for name, row in found.items()})
            run.changes.append(_changes(taps.kept, first))
            if not run.numel:
                run.numel.update({name: row.numel for name, row in found.items()})
                for name in names:
                    if name not in found:
                        msg = f"{_WHAT}(names=): no call of gm.tap in the model has the name {name!r}; "
                        raise ValueError(f"{msg}measured are {', '.join(found) or 'none'}")
            elif run.numel.keys() != found.keys():
                name = _first_difference(run.numel, found)
                msg = f"{_WHAT}: {name!r} is not computed in every step, at width {width}; "
                raise ValueError(msg + "leave it out by modules= or names=")
            if step < steps:
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
            taps.advance()
    finally:
        taps.remove()
    return run


def _changes(kept: dict[str, list[Tensor]], first: dict[str, list[Tensor]]) -> dict[str, float]:
    """Return rms(x_t - x_0) by name, of all calls together; NaN if their shapes differ."""
    same = [name for name in kept if [x.shape for x in kept[name]] == [x.shape for x in first.get(name, [])]]
    # a row per call
    rows = {name: [f"{call} {name}" for call in range(len(kept[name]))] for name in same}
    a, b = [
        {row: x for name in same for row, x in zip(rows[name], source[name], strict=True)}
        for source in (kept, first)
    ]
    rms = compare(a, b).group(rows).rms_u.tolist() if rows else []
    return dict.fromkeys(kept, math.nan) | dict(zip(rows, rms, strict=True))


# check the arguments, and what functions return


def _checked_widths(widths: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(widths, Iterable):
        msg = f"{_WHAT}: widths must be several integers, such as [64, 128, 256, 512], got {describe(widths)}"
        raise TypeError(msg)
    found = tuple(widths)
    bad = [width for width in found if type(width) is not int or width < 1]
    if bad:
        raise ValueError(f"{_WHAT}: widths must be positive integers, got {describe(bad[0])}")
    if len(found) < _LEAST_WIDTHS:
        msg = f"{_WHAT}: a slope needs at least {_LEAST_WIDTHS} widths, got {list(found)}; "
        raise ValueError(msg + "pass for example [64, 128, 256, 512]")
    for a, b in pairwise(found):
        if a >= b:
            raise ValueError(f"{_WHAT}: the widths must increase, but {b} comes after {a}; sort them")
    return found


def _checked_model(made: object, width: int) -> tuple[nn.Module, Optimizer]:
    if isinstance(made, tuple) and len(made) == 2:
        model, optimizer = made
        if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
            return model, optimizer
    types = ", ".join([type(x).__name__ for x in (made if isinstance(made, tuple) else [made])])
    shown = f"({types})" if isinstance(made, tuple) else types
    msg = f"{_WHAT}: make_model({width}) must return (model, optimizer), a torch.nn.Module and its optimizer "
    raise TypeError(msg + f"with the learning rates for this width, got {shown}")


def _checked_loss(value: object, width: int, step: int, seed: int) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        msg = f"{_WHAT}: loss(model) must return a tensor with one element, the loss, got {describe(value)}"
        raise TypeError(msg)
    number = float(value.detach())
    if not math.isfinite(number):
        after = f"after {step} step{'s' * (step != 1)}" if step else "at initialization"
        msg = f"{_WHAT}: the loss is {number} at width {width} {after}, with seed {seed}; lower the learning "
        raise RuntimeError(msg + "rate, or see gm.locate_nonfinite")
    return number


def _check_alike(widths: Sequence[int], runs: Sequence[_Run]) -> None:
    """Raise a ValueError if the activations of two widths differ."""
    for width, run in zip(widths, runs, strict=True):
        if run.numel.keys() != runs[0].numel.keys():
            name = _first_difference(runs[0].numel, run.numel)
            there, other = (widths[0], width) if name in runs[0].numel else (width, widths[0])
            msg = f"{_WHAT}: the model of width {there} has {name!r}, but that of width {other} has not; "
            raise ValueError(msg + "only the width may differ, or pass modules= or names= that all have")


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    return next(name for name in a | b if (name in a) != (name in b))


def _devices() -> list[torch.device]:
    """Return the devices whose random numbers `torch.manual_seed` changes."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    if kind.type == "mps":
        return [kind]
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
