"""Compare a step that draws other random numbers than its reference, as compiled code does."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.checks.compared_tensors import GradientRow
from gradiometer.checks.gradient_runs import eagerly
from gradiometer.checks.recompiled import WithoutDropout, recompiled
from gradiometer.checks.reference_runs import has_same_numbers
from gradiometer.checks.slope import slope_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gradiometer.checks.gradient_report import GradientReport
    from gradiometer.checks.reference_runs import References, Runs
    from gradiometer.checks.step_run import StepRun

_OTHER: Final = "the compiled step draws other random numbers than eager mode"
_UNKNOWN: Final = (
    "cannot tell whether the compiled step draws other random numbers than eager mode or differs: "
    "return the loss"
)
_INSIDE: Final = "the step draws random numbers inside of a kernel, where they can't be recorded"


def compare_random(
    runs: Runs,
    step: Callable[..., Any],
    given: StepRun,
    found: References,
    compare: Callable[[StepRun, References], GradientReport],
    modules: Mapping[str, str],
    *,
    is_known: bool = True,
) -> GradientReport:
    """Compare a step with eager mode in three ways, none of which needs the random numbers of the step.

    It is compiled again with the random numbers of eager mode; runs without dropout, for which it is compiled
    again, too; and as it is, by the slope of its loss along its gradients. It passes only if the first or the
    last, which cover the random numbers, is possible. ``is_known``: whether the outputs or the random states
    show that it draws others.
    """
    other = (_OTHER if is_known else _UNKNOWN) if found.backends else _INSIDE
    notes = [other]
    reports = []
    is_covered = False
    again = _run(runs, step, found, notes, dropout=True) if found.backends else None
    if again is not None:
        has_drawn_as_much = has_same_numbers(runs.random, found.random)
        report = compare(again, found)
        # a backward pass that draws once more is wrong, if the outputs show that the forward pass draws the
        # same numbers: they agree, and depend on these
        if not (
            has_drawn_as_much or (not _outputs_differ(report) and _outputs_are_random(runs, step, found))
        ):
            notes.append("compiled again with fallback_random, it draws others, too: not compared")
        elif report.failures and (_outputs_differ(report) or not again.outputs):
            notes.append(
                "compiled again with fallback_random, it may draw them in another order: not compared"
            )
        else:
            reports.append(report)
            is_covered = True
            what = "differs" if report.failures else "agrees"
            notes.append(f"compiled again with fallback_random, which is another program, it {what}")
    plain = runs.references(step, dropout=False)
    if plain.is_random:
        notes.append("not compared without dropout: it draws other random numbers, too")
    else:
        again = _run(runs, step, plain, notes, dropout=False)
        if again is not None:
            report = compare(again, plain)
            what = "differs" if report.failures else "agrees"
            how = "compiled again without dropout, which is another program," if found.backends else ""
            notes.append(f"{how or 'without dropout'} it {what}")
            reports.append(report)
    rows, reason = slope_rows(runs, step, given, found.unrecorded or found.eager, modules)
    if reason:
        notes.append(f"as it trains, its loss was not compared with its gradients: {reason}")
    elif rows[-1].fails:
        notes.append("as it trains, its gradients are not those of its loss")
    else:
        notes.append("as it trains, its gradients are those of its loss along their direction")
    # the first that fails
    reports.sort(key=lambda report: not report.failures)
    if not reports:
        others = tuple(
            [GradientRow(name, "gradient", modules.get(name, ""), text=other) for name in given.grads]
        )
        reports = [replace(compare(found.eager, found), rows=others)]
    incomplete = "" if is_covered or rows else "its random numbers could not be compared in any way"
    return replace(
        reports[0],
        rows=(*rows, *reports[0].rows),
        notes=tuple(dict.fromkeys([*notes, *reports[0].notes])),
        incomplete=incomplete,
    )


def _outputs_differ(report: GradientReport) -> bool:
    return any(row.what == "output" for row in report.failures)


def _outputs_are_random(runs: Runs, step: Callable[..., Any], found: References) -> bool:
    """Return whether the outputs of eager mode are others if it draws other random numbers."""
    other = runs.run(step, eagerly(), _other_numbers()).outputs
    return any(name in other and not torch.equal(x, other[name]) for name, x in found.eager.outputs.items())


@contextmanager
def _other_numbers() -> Iterator[None]:
    """Draw other random numbers; the state around it is restored by the caller."""
    torch.manual_seed(torch.initial_seed() + 1)
    yield


def _run(
    runs: Runs, step: Callable[..., Any], found: References, notes: list[str], *, dropout: bool
) -> StepRun | None:
    try:
        if not found.backends:
            return runs.run(step, WithoutDropout())
        return runs.run(step, recompiled(found.backends[0], dropout=dropout))
    except Exception as error:  # noqa: BLE001 whatever a backend raises
        what = "with fallback_random" if dropout else "without dropout"
        notes.append(f"not compared {what}: it raises {type(error).__name__}: {error}")
        return None
