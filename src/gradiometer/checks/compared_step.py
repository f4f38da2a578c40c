"""Compare a step with its reference: all runs from one state, and the judgement of what they gave."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gradiometer.checks.compared_tensors import GradientRow
from gradiometer.checks.compiled_random import compare_random
from gradiometer.checks.gradient_report import GradientReport, judge
from gradiometer.checks.gradient_runs import copied
from gradiometer.checks.reference_runs import Runs, has_same_numbers
from gradiometer.checks.saved_reference import SavedReference, judge_saved
from gradiometer.checks.update_check import compare_updates, not_compared, plain_optimizer
from gradiometer.distributed import is_active
from gradiometer.inputs import unwrapped, without_wrappers
from gradiometer.stats import collect_projections
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradiometer.checks.reference_runs import References
    from gradiometer.checks.step_run import StepRun

# the largest relative error that is taken as usual; bfloat16 leads to 0.02
_LARGE: Final = 0.05


def compared_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    model: nn.Module,
    against: Any,
    optimizer: Optimizer | None,
    factor: float,
) -> GradientReport:
    """Return how a step compares with its reference, see `check_gradients`."""
    saved = isinstance(against, SavedReference)
    runs = Runs(step, args, kwargs, model=model, others=(against, optimizer), clears=saved)
    modules = _modules(model)
    compare = partial(_compare, factor=factor, against=against, modules=modules)
    called: list[Optimizer] = []
    eagerly_called: list[Optimizer] = []
    with runs.quietly():
        given = runs.run(step, called=called)
        random = runs.random
        if saved:
            _check_gradients_exist(given, runs)
            report = _compare_saved(given, runs, against, modules=modules, factor=factor)
        elif callable(against):
            found = runs.references(against, is_other=True)
            _check_gradients_exist(given, runs, found.eager)
            report = compare(*_with_common_outputs(given, found))
        else:
            found = runs.references(step, called=eagerly_called)
            _check_gradients_exist(given, runs, found.eager)
            report = compare(given, found)
            has_others = not found.is_recorded
            is_known = True
            if found.backends:
                has_drawn_as_much = has_same_numbers(random, found.random)
                has_others |= not (has_drawn_as_much and _numbers_agree(report))
                is_known = bool(given.outputs) or not has_drawn_as_much
            if found.is_random and has_others:
                report = compare_random(runs, step, given, found, compare, modules, is_known=is_known)
        more = [] if optimizer is None else [plain_optimizer(optimizer)]
        for each in dict.fromkeys([*called, *eagerly_called, *more]):
            own = runs.compiled_steps.get(each)
            if own is None and each in eagerly_called and each not in called:
                updates = not_compared(
                    f"{type(each).__name__} is compiled within the step, and can't be called alone"
                )
            else:
                updates = compare_updates(each, given.grads, model, step=own, modules=modules, factor=factor)
            report = report.joined(updates)
    return report


def _compare_saved(given: StepRun, runs: Runs, saved: SavedReference, **options: Any) -> GradientReport:
    signs: dict[str, Any] = {"projections": saved.projections, "seed": saved.seed}
    weights = {name: copied(p) for p, name in runs.names.items()}
    options |= {"outputs": {} if is_active() else given.outputs, "notes": given.notes}
    return judge_saved(
        collect_projections(dict(given.grads), **signs),
        saved,
        weights=collect_projections(weights, **signs),
        **options,
    )


def _compare(
    given: StepRun, found: References, *, factor: float, against: Any, modules: Mapping[str, str]
) -> GradientReport:
    eager, exact, notes = found.eager, found.exact, found.notes
    name = against if isinstance(against, str) else getattr(against, "__name__", "the reference")
    judged = partial(judge, modules=modules, factor=factor, against=name, rounded=found.rounded)
    if against != "float64":
        return judged(given, eager, exact, notes=notes, is_smooth=found.is_smooth)
    if exact is None:
        text = "there is no float64 run"
        rows = [GradientRow(each, "gradient", modules.get(each, ""), text=text) for each in eager.grads]
        return GradientReport(tuple(rows), name, "", factor, notes=notes)
    usual = _as_usual(exact, eager)
    report = judged(given, usual, exact, notes=notes)
    same = [row.name for row in judged(eager, usual, exact).failures if report[row.name].fails]
    note = f"in eager mode, too, {shortened(same)} differ from float64"
    return replace(report, notes=(*report.notes, note)) if same and given is not eager else report


def _as_usual(exact: StepRun, eager: StepRun) -> StepRun:
    """Return a float64 run in the dtypes of an eager step, with the error that this usually has."""
    errors = []
    for name, x in exact.grads.items():
        norm = float(x.norm())
        if name in eager.grads and norm:
            errors.append(float((eager.grads[name].double() - x).norm()) / norm)
    errors.sort()
    error = min(errors[len(errors) // 4], _LARGE) if errors else 0.0

    def narrow(wide: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        order = dict.fromkeys([*(name for name in like if name in wide), *wide])
        return {name: (wide[name] * (1 + error)).to(like.get(name, wide[name]).dtype) for name in order}

    return replace(
        eager, outputs=narrow(exact.outputs, eager.outputs), grads=narrow(exact.grads, eager.grads)
    )


def _with_common_outputs(given: StepRun, found: References) -> tuple[StepRun, References]:
    """Return runs with the outputs that both have; of several ranks, each has those of its own batch."""
    both = set() if is_active() else given.outputs.keys() & found.eager.outputs.keys()
    given, eager = (
        replace(run, outputs={name: run.outputs[name] for name in both}) for run in (given, found.eager)
    )
    return given, replace(found, eager=eager)


def _numbers_agree(report: GradientReport) -> bool:
    """Return whether the outputs agree, or all gradients if there are none: they depend on random numbers."""
    outputs = [row for row in report.rows if row.what == "output"]
    return bool(report) if not outputs else not any(row.fails for row in outputs)


def _modules(model: nn.Module) -> dict[str, str]:
    """Return the class of the module that has each parameter."""
    root = unwrapped(model)
    pairs = [
        (f"{path}.{name}" if path else name, type(module).__name__)
        for path, module in root.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]
    names = without_wrappers(root, [name for name, _ in pairs])
    return dict(zip(names, [kind for _, kind in pairs], strict=True))


def _check_gradients_exist(given: StepRun, runs: Runs, reference: StepRun | None = None) -> None:
    if given.grads:
        return
    if not any(p.requires_grad for p in runs.names):
        raise ValueError("check_gradients: no parameter of the model requires a gradient; set requires_grad")
    msg = "check_gradients: the step leaves no gradient of the model's parameters that could be read"
    if reference is not None and reference.grads:
        msg += ", although it does in eager mode"
    raise ValueError(
        f"{msg}; call backward() in the step, and clear gradients at its start instead of its end, "
        "or outside of the compiled function; or return them as a mapping from the names of the parameters"
    )
