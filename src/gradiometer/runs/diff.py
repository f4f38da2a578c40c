"""Compare two runs: find the first step that differs, and its tensors in the order they are computed.

If both have fingerprints, these tell whether the tensors are equal to the bit; statistics cannot.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gradiometer.recorder import LOSS_ORDER
from gradiometer.runs import step_diff
from gradiometer.runs.comparison import Comparison, Difference, Side
from gradiometer.runs.distances import PROJECTED, distances_of, projections_of
from gradiometer.runs.files import RunError
from gradiometer.runs.reader import Run, read_run
from gradiometer.runs.step_diff import RunTensors
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gradiometer.recorder import Catalog, Kind


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

    Where bits differ, and both have recorded projections by ``Monitor(projections=16, weights=True)``,
    ``result.distances`` has the relative distances of gradients and weights, and ``result.apart`` tells until
    which step they are the same up to rounding, and which tensor leaves it first.

    Args:
        a: one run, or its folder.
        b: the other.
        rtol: the relative tolerance of statistics and scalars, and 0 to compare fingerprints. With 0, values
            must be equal; two NaNs are equal. Otherwise norms, magnitudes and scalars are compared relative
            to the larger one, ``sum`` relative to ``sqrt(numel * sumsq)``, which it cannot exceed, and
            ``n_zero`` relative to ``numel``; other columns likewise. Counts of elements, NaN and Inf must be
            equal.
        ignore: tensors and scalars whose name matches this expression (`re.search`) are left out.

    Returns:
        a frozen dataclass with `same`, `identical`, `bits`, `verdict`, `distances`, `apart`, the steps and
        tensors that one run lacks, and the statistics that differ first.

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
    if not found.common:
        has = [
            "no steps yet" if x.first is None else f"{x.steps} steps from {x.first} to {x.last}"
            for x in (found.a, found.b)
        ]
        msg = f"no step in common: {found.a.path} has {has[0]}, and {found.b.path} {has[1]}"
        msg += "; pass runs of the same steps"
        raise RunError(msg)
    if not found.tensors and (found.only_a or found.only_b):
        has = [shortened(only) or "none" for only in (found.only_a, found.only_b)]
        msg = f"no tensor in common: {found.a.path} has {has[0]}, and {found.b.path} {has[1]}"
        msg += "; pass runs of one model"
        raise RunError(msg)
    return found


def compared(a: Run, b: Run, *, rtol: float = 0.0, ignore: re.Pattern[str] | None = None) -> Comparison:
    """Do what `compare_runs` does, also for runs without a step or tensor in common."""
    both = _common_kinds(a.catalog, b.catalog)
    # projections tell distances; that they differ is seen from the tensors' own statistics
    kinds = {name: kind for name, kind in both.items() if name not in PROJECTED}
    here, there = (RunTensors(run, _rows(run.catalog, kinds, ignore)) for run in (a, b))
    shared = [key for key in here.rows if key in there.rows]
    forms = {key: (here.form(key), there.form(key)) for key in shared}
    shapes = {key: pair for key, pair in forms.items() if pair[0] != pair[1]}
    steps = [_steps(run) for run in (a, b)]
    common = sorted(steps[0].keys() & steps[1].keys())
    recorded = [s for s in common if steps[0][s] and steps[1][s]]
    # histograms may be recorded in other steps
    measured = sorted(here.steps & there.steps)
    scalars = step_diff.scalars(a, b, common, rtol, ignore)
    # scalars are cheap to read, so no tensor is read after the first step where a scalar differs
    stop = min((d.step for d in scalars), default=None)
    upto = [s for s in measured if stop is None or s <= stop]
    bits, fingerprinted = None, 0
    unknown: tuple[str, ...] = ()
    if rtol == 0 and a.has_fingerprints and b.has_fingerprints:
        alike = [key for key in shared if key not in shapes and a.catalog.kinds[key[0]].has_fingerprints]
        alike.sort(key=lambda key: list(a.catalog.kinds).index(key[0]))
        bits, fingerprinted, unknown = step_diff.bits(here, there, recorded, alike)
    if bits is None and fingerprinted == len(recorded) and not shapes and not unknown:
        # of equal bits, statistics are equal up to rounding
        found: list[Difference] = []
        num_steps = len(upto)
        without_bits = [key for key in shared if not a.catalog.kinds[key[0]].has_fingerprints]
        if without_bits:
            found, num_steps = step_diff.tensors(here, there, upto, without_bits, rtol, is_unrounded=True)
    else:
        found, num_steps = step_diff.tensors(here, there, upto, shared, rtol)
    step = min((d.step for d in (*found, *scalars)), default=None)
    first = [d for d in found if d.step == step] + [d for d in scalars if d.step == step]
    first.sort(key=lambda difference: _order(difference, kinds))
    result = Comparison(
        a=_side(a, steps[0]),
        b=_side(b, steps[1]),
        rtol=rtol,
        common=len(common),
        recorded=len(recorded),
        compared=len({*upto[:num_steps]} & {*recorded}),
        fingerprinted=fingerprinted,
        bits=bits,
        unknown=unknown,
        tensors=len(_labels(kinds, shared)),
        kinds=(
            tuple([name for name in a.catalog.kinds if name not in both]),
            tuple([name for name in b.catalog.kinds if name not in both]),
        ),
        only_a=_labels(kinds, [key for key in here.rows if key not in there.rows]),
        only_b=_labels(kinds, [key for key in there.rows if key not in here.rows]),
        shapes={kinds[kind].label(name): pair for (kind, name), pair in shapes.items()},
        missing=(_missing(steps[0], steps[1], common), _missing(steps[1], steps[0], common)),
        first=tuple(first),
        scalars=tuple(scalars),
        total_norm=_totals(a, b, recorded),
    )
    return result if result.identical else replace(result, distances=distances_of(a, b, ignore))


# whether a step has tensors
_Steps = dict[int, bool]


def _common_kinds(a: Catalog, b: Catalog) -> dict[str, Kind]:
    """Return the kinds with the same columns in both, in the order of computation."""
    found = [
        kind
        for name, kind in a.kinds.items()
        if name in b.kinds and kind.schema.columns == b.kinds[name].schema.columns
    ]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.order)}


def _rows(
    catalog: Catalog, kinds: dict[str, Kind], ignore: re.Pattern[str] | None
) -> dict[tuple[str, str], int]:
    """Return the row of each tensor by its kind and name, in the order of computation."""
    rows: dict[tuple[str, str], int] = {}
    for name, kind in kinds.items():
        own = list(enumerate(catalog.names_of(name)))
        for i, tensor in reversed(own) if kind.is_backward else own:
            if ignore is None or not ignore.search(kind.label(tensor)):
                rows[name, tensor] = i
    return rows


def _labels(kinds: dict[str, Kind], keys: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the display names of tensors; those of two kinds may have the same."""
    return tuple(dict.fromkeys([kinds[kind].label(name) for kind, name in keys]))


def _order(difference: Difference, kinds: dict[str, Kind]) -> float:
    """Return the place in the order of computation."""
    if difference.kind is not None:
        return kinds[difference.kind].order
    if difference.name != "skipped":
        return LOSS_ORDER
    # decided after the gradients
    return max([kind.order for kind in kinds.values() if kind.is_backward], default=LOSS_ORDER) + 0.5


def _steps(run: Run) -> _Steps:
    return dict(zip(run.steps["step"].to_pylist(), run.steps["recorded"].to_pylist(), strict=True))


def _side(run: Run, steps: _Steps) -> Side:
    first, last = min(steps, default=None), max(steps, default=None)
    recorded, projections = sum(steps.values()), projections_of(run.catalog)
    return Side(str(run.path), first, last, len(steps), recorded, run.has_fingerprints, projections)


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
