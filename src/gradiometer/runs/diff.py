"""Compare two runs: find the first step that differs, and its tensors in the order they are computed.

If both have fingerprints, these tell whether the tensors are equal to the bit; statistics cannot.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gradiometer.recorder import KINDS, TAP_KINDS, Kind, label
from gradiometer.runs import step_diff
from gradiometer.runs.comparison import NO_BITS, Comparison, Difference, Side
from gradiometer.runs.files import RunError
from gradiometer.runs.reader import Run, read_run
from gradiometer.runs.step_diff import RunTensors
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from gradiometer.recorder import Roster

# the order of computation: activations from the weights, the loss from these, gradients from the loss,
# updates from gradients
_ORDER: Final[tuple[Kind | None, ...]] = (
    "weights",
    "activations",
    None,
    "activation_grads",
    "grads",
    "updates",
)


def compare_runs(
    a: Run | Path | str,
    b: Run | Path | str,
    *,
    rtol: float = 0.0,
    ignore: re.Pattern[str] | str | None = None,
) -> Comparison:
    """Compare two runs in the steps that both have: to the bit, if both have recorded fingerprints.

    ``result.identical`` tells whether all bits are equal, and ``result.bits`` names the first step and tensor
    that differ. Statistics and scalars are compared too. Without ``Monitor(fingerprint=True)`` in both runs
    they are all that is compared, and equal statistics do not prove equal tensors.

    Args:
        a: one run, or its folder.
        b: the other.
        rtol: the relative tolerance of statistics and scalars, and 0 to compare fingerprints. With 0, values
            must be equal; two NaNs are equal. Otherwise norms, magnitudes and scalars are compared relative
            to the larger one, ``sum`` relative to ``sqrt(numel * sumsq)``, which it cannot exceed, and
            ``n_zero`` relative to ``numel``. Counts of elements, NaN and Inf must be equal.
        ignore: tensors and scalars whose name matches this expression (`re.search`) are left out.

    Returns:
        a frozen dataclass with `same`, `identical`, `bits`, `verdict`, the steps and tensors that one run
        lacks, and the statistics that differ first.

    Raises:
        RunError: if a folder has no run, or if the runs have no step or no tensor in common.

    >>> import tempfile, torch, gradiometer as gm
    >>> def train(folder, factor):
    ...     model = torch.nn.Linear(2, 1)
    ...     with gm.Monitor(model, run_dir=folder, rules=(), fingerprint=True) as monitor:
    ...         for step in range(4):
    ...             model.zero_grad()
    ...             loss = model(torch.tensor([[3.0, 4.0]])).sum() * (factor if step == 2 else 1.0)
    ...             loss.backward()
    ...             monitor.record()
    ...             monitor.advance()
    >>> with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
    ...     train(a, factor=1.0)
    ...     train(b, factor=1.0000001)
    ...     gm.compare_runs(a, a).identical, gm.compare_runs(a, b).verdict
    (True, 'bits differ first at step 2: bias.grad (gradient), 2 tensors')
    """
    runs = [run if isinstance(run, Run) else read_run(run) for run in (a, b)]
    pattern = None if ignore is None else re.compile(ignore)
    found = compared(runs[0], runs[1], rtol=rtol, ignore=pattern)
    names = f"{found.a.path} and {found.b.path}"
    if not found.common:
        has = [
            "no steps yet" if x.first is None else f"{x.steps} from {x.first} to {x.last}"
            for x in (found.a, found.b)
        ]
        msg = f"{names} have no step in common: A has {has[0]}, and B {has[1]}; pass runs of the same steps"
        raise RunError(msg)
    if not found.tensors and (found.only_a or found.only_b):
        has = [shortened(only) or "none" for only in (found.only_a, found.only_b)]
        msg = f"{names} have no tensor in common: A has {has[0]}, and B {has[1]}; pass runs of one model"
        raise RunError(msg)
    return found


def compared(a: Run, b: Run, *, rtol: float = 0.0, ignore: re.Pattern[str] | None = None) -> Comparison:
    """Do what `compare_runs` does, also for runs without a step or tensor in common."""
    kinds = set(a.roster.kinds) & set(b.roster.kinds)
    here, there = (RunTensors(run, _labels(run.roster, kinds, ignore)) for run in (a, b))
    shared = [name for name in here.rows if name in there.rows]
    shapes = {}
    for name in shared:
        forms = here.form(name), there.form(name)
        if forms[0] != forms[1]:
            shapes[name] = forms
    steps = [_steps(run) for run in (a, b)]
    common = sorted(steps[0].keys() & steps[1].keys())
    recorded = [s for s in common if steps[0][s] and steps[1][s]]
    scalars = step_diff.scalars(a, b, common, rtol, ignore)
    # scalars are cheap to read, so no tensor is read after the first step where a scalar differs
    stop = min((d.step for d in scalars), default=None)
    upto = [s for s in recorded if stop is None or s <= stop]
    bits, fingerprinted = None, 0
    unknown: tuple[str, ...] = ()
    if rtol == 0 and a.has_fingerprints and b.has_fingerprints:
        # in the order of `KINDS`
        alike = [
            name
            for kind in KINDS
            if kind not in TAP_KINDS
            for name in shared
            if here.rows[name][0] == kind and name not in shapes
        ]
        bits, fingerprinted, unknown = step_diff.bits(here, there, recorded, alike)
    if bits is None and fingerprinted == len(recorded) and not shapes and not unknown:
        # of equal bits, statistics are equal up to rounding
        found: list[Difference] = []
        compared = len(upto)
        without_bits = [name for name in shared if here.rows[name][0] in NO_BITS]
        if without_bits:
            columns = step_diff.UNROUNDED
            found, compared = step_diff.tensors(here, there, upto, without_bits, rtol, columns=columns)
    else:
        found, compared = step_diff.tensors(here, there, upto, shared, rtol)
    step = min((d.step for d in (*found, *scalars)), default=None)
    first = [d for d in found if d.step == step] + [d for d in scalars if d.step == step]
    # `skipped` is decided after the gradients
    first.sort(key=lambda d: _ORDER.index(d.kind) + 2.5 * (d.kind is None and d.name == "skipped"))
    return Comparison(
        a=_side(a, steps[0]),
        b=_side(b, steps[1]),
        rtol=rtol,
        common=len(common),
        recorded=len(recorded),
        compared=compared,
        fingerprinted=fingerprinted,
        bits=bits,
        unknown=unknown,
        tensors=len(shared),
        kinds=(_beyond(a.roster, kinds), _beyond(b.roster, kinds)),
        only_a=tuple(name for name in here.rows if name not in there.rows),
        only_b=tuple(name for name in there.rows if name not in here.rows),
        shapes=shapes,
        missing=(_missing(steps[0], steps[1], common), _missing(steps[1], steps[0], common)),
        first=tuple(first),
        scalars=tuple(scalars),
        total_norm=_totals(a, b, recorded),
    )


# whether a step has tensors
_Steps = dict[int, bool]


def _beyond(roster: Roster, kinds: Collection[Kind]) -> tuple[Kind, ...]:
    return tuple(kind for kind in roster.kinds if kind not in kinds)


def _labels(
    roster: Roster, kinds: Collection[Kind], ignore: re.Pattern[str] | None
) -> dict[str, tuple[Kind, int]]:
    """Return the kind and row of each tensor by label, in the order of computation."""
    rows: dict[str, tuple[Kind, int]] = {}
    for kind in _ORDER:
        if kind is None or kind not in kinds:
            continue
        indices = range(len(roster.names))
        for i in reversed(indices) if kind in {"grads", "activation_grads"} else indices:
            name = label(kind, roster.names[i])
            if roster.has(kind, i) and (ignore is None or not ignore.search(name)):
                rows[name] = (kind, i)
    return rows


def _steps(run: Run) -> _Steps:
    return dict(zip(run.steps["step"].to_pylist(), run.steps["recorded"].to_pylist(), strict=True))


def _side(run: Run, steps: _Steps) -> Side:
    first, last = min(steps, default=None), max(steps, default=None)
    return Side(str(run.path), first, last, len(steps), sum(steps.values()), run.has_fingerprints)


def _missing(here: _Steps, there: _Steps, common: list[int]) -> tuple[int, ...]:
    """Return the steps in ``here`` but not in ``there``, between the first and the last common step."""
    if not common:
        return ()
    return tuple(s for s in sorted(here.keys() - there.keys()) if common[0] < s < common[-1])


def _totals(a: Run, b: Run, recorded: list[int]) -> tuple[int, float, float] | None:
    if not recorded:
        return None
    step = recorded[-1]
    one, other = (run.record(step).total("norm") for run in (a, b))
    return step, one, other
