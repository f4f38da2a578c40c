"""The outputs and gradients of a reference in a file: what a run on many ranks is compared with.

The file is JSON, without tensors. For each gradient it has the norm, k sums of its elements with random signs
(`gradiometer.collect_projections`), and the error that rounding gives it; for each weight the norm and the
sums. Estimates of a distance from these have a relative standard deviation of about ``1 / sqrt(2 k)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from gradiometer.checks.allowed_error import FACTOR, Rounding, limits
from gradiometer.checks.compared_tensors import GradientRow, Tensors, compare_tensors
from gradiometer.checks.fault_kind import factor_of, times
from gradiometer.checks.gradient_report import GradientReport, common_kind
from gradiometer.columns import FIRST_PROJECTION
from gradiometer.stats import collect_projections

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gradiometer.checks.step_run import StepRun
    from gradiometer.stats import ProjectionStats

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
# an estimate is larger than the distance by this many standard deviations in 1 of 30,000 tensors
_DEVIATIONS: Final = 5.0
# equal weights have equal sums up to the rounding of sums
_SAME: Final = 2.0**-20


@dataclass(frozen=True)
class SavedTensor:
    """A gradient or a weight of a saved reference.

    Attributes:
        shape: its shape.
        dtype: its dtype in the reference, such as ``"bfloat16"``.
        norm: its norm over finite elements, in float64 if there is a float64 run.
        n_nonfinite: the number of elements that are NaN or infinite.
        projections: sums of its elements with random signs.
        error: the norm of the reference's error; 0 without a float64 run.
        coarse: the norm of the error with coarse matrix products; None if it was not measured.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    n_nonfinite: int
    projections: tuple[float, ...]
    error: float = 0.0
    coarse: float | None = None

    @property
    def rounding(self) -> Rounding:
        """What is known of its rounding error."""
        return Rounding(self.norm, self.error, math.prod(self.shape), DTYPES[self.dtype], self.coarse)


@dataclass(frozen=True)
class SavedReference:
    """What a file of `save_reference` has.

    Attributes:
        grads: the gradients by parameter name, in the order of the backward pass.
        weights: the parameters by name.
        outputs: scalar outputs by name: the value in the step's precision and in float64, which is None if
            there is no float64 run, and the dtype.
        projections: the number of projections.
        seed: of their signs.
        is_exact: whether there is a float64 run.
        notes: those of the runs.
    """

    grads: dict[str, SavedTensor]
    weights: dict[str, SavedTensor]
    outputs: dict[str, tuple[float, float | None, str]]
    projections: int
    seed: int
    is_exact: bool
    notes: tuple[str, ...] = ()


def reference_of(
    reference: StepRun,
    exact: StepRun | None,
    weights: Mapping[str, Tensor],
    *,
    rounded: StepRun | None = None,
    projections: int = 64,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> SavedReference:
    """Return what is saved of the runs of a reference; see `judge` for the runs."""
    names = [name for name in reference.grads if exact is None or name in exact.grads]
    base = reference.grads if exact is None else exact.grads
    grads = _saved({name: base[name] for name in names}, reference.grads, projections, seed)
    for name, saved in grads.items():
        error, coarse = (_distance(run, exact, name) for run in (reference, rounded))
        grads[name] = replace(saved, error=error or 0.0, coarse=coarse)
    outputs = {
        name: (float(x), None if exact is None else float(exact.outputs[name]), _name(x.dtype))
        for name, x in reference.outputs.items()
        if x.numel() == 1 and x.is_floating_point() and (exact is None or name in exact.outputs)
    }
    more = [note for run in (reference, exact) if run for note in run.notes]
    return SavedReference(
        grads,
        _saved(weights, weights, projections, seed),
        outputs,
        projections,
        seed,
        exact is not None,
        tuple(dict.fromkeys([*notes, *more])),
    )


def _saved(
    tensors: Mapping[str, Tensor], originals: Mapping[str, Tensor], projections: int, seed: int
) -> dict[str, SavedTensor]:
    stats = collect_projections(dict(tensors), projections=projections, seed=seed)
    return {
        name: SavedTensor(
            tuple(tensors[name].shape), _name(originals[name].dtype), norm, n_nonfinite, tuple(sums)
        )
        for name, (norm, n_nonfinite, sums) in _values(stats).items()
    }


def _values(stats: ProjectionStats) -> dict[str, tuple[float, int, list[float]]]:
    """Return norm, number of elements that are not finite, and projections by name."""
    index = stats.schema.index
    return {
        name: (math.sqrt(row[index["sumsq"]]), int(row[index["n_nonfinite"]]), row[FIRST_PROJECTION:])
        for name, row in zip(stats.names, stats.columns.tolist(), strict=True)
    }


def _distance(run: StepRun | None, exact: StepRun | None, name: str) -> float | None:
    if run is None or exact is None or name not in run.grads:
        return None
    found = float((run.grads[name].detach().double() - exact.grads[name].detach().double()).norm())
    return found if math.isfinite(found) else None


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"save_reference: a tensor has the dtype {dtype}, of which no reference can be saved"
        )
    return name


def judge_saved(
    grads: ProjectionStats,
    saved: SavedReference,
    *,
    outputs: Mapping[str, Tensor] | None = None,
    weights: ProjectionStats | None = None,
    modules: Mapping[str, str] | None = None,
    factor: float = FACTOR,
    against: str = "the saved reference",
    notes: Sequence[str] = (),
) -> GradientReport:
    """Return how the gradients of a run compare with those of a saved reference.

    Args:
        grads: the projections of the gradients, of whole tensors: with ``reduce`` if they are sharded. Number
            and seed must be those of the reference.
        saved: the reference.
        outputs: the outputs of the run; those that the reference does not have are left out.
        weights: the projections of the parameters. If they differ, nothing is compared.
        modules: the module of each parameter, as text.
        factor: by how much an error may exceed that of the reference.
        against: the name of the reference.
        notes: more notes for the report.

    Raises:
        ValueError: if the number of projections is another one.
    """
    if len(grads.schema.columns) - FIRST_PROJECTION != saved.projections:
        msg = f"the reference has {saved.projections} projections of each gradient; collect as many"
        raise ValueError(msg)
    modules, found = modules or {}, _values(grads)
    differing = _differing(weights, saved) if weights is not None else ""
    numel = dict(zip(grads.names, grads.columns[:, grads.schema.index["numel"]].tolist(), strict=True))
    rows: dict[str, GradientRow] = {}
    for name in dict.fromkeys([*saved.grads, *found]):
        fails, text = _unusable(found.get(name), numel.get(name), saved.grads.get(name))
        fails, text = (False, differing) if differing else (fails, text)
        rows[name] = GradientRow(name, "gradient", modules.get(name, ""), fails=fails, text=text)
    compared = [name for name, row in rows.items() if not row.text]
    roundings = {name: saved.grads[name].rounding for name in compared}
    errors = {name: _rms(found[name][2], saved.grads[name].projections) for name in compared}
    limit = limits(roundings, errors, factor, is_measured=saved.is_exact)
    factors: dict[str, float | None] = {}
    # an estimate may be larger than the distance
    slack = math.sqrt(1.0 + _DEVIATIONS * math.sqrt(2.0 / saved.projections))
    for name in compared:
        rows[name], factors[name] = _judged(
            rows[name], found[name], saved.grads[name], errors[name], limit.allowed[name] * slack
        )
    known = {name: x for name, x in (outputs or {}).items() if name in saved.outputs and not differing}
    compared_outputs = compare_tensors("output", _outputs(known, saved), factor, {}, like=limit)
    more = [f"distances are estimated from {saved.projections} projections, to {_percent(saved.projections)}"]
    if not saved.is_exact:
        more.append("the reference has no float64 run: what rounding explains is assumed from the dtypes")
    return GradientReport(
        (*compared_outputs.rows, *rows.values()),
        against,
        "float64" if saved.is_exact else "",
        factor,
        common_kind({name: x for name, x in factors.items() if roundings[name].norm > limit.allowed[name]}),
        tuple(dict.fromkeys([*notes, *saved.notes, *more])),
    )


def _percent(projections: int) -> str:
    return f"{100 / math.sqrt(2 * projections):.0f} %"


def _differing(weights: ProjectionStats, saved: SavedReference) -> str:
    """Return which weights differ from those of the reference, ``""`` if none does."""
    found = _values(weights)
    for name, mine in saved.weights.items():
        if name not in found:
            return f"the model has no parameter {name}, but the reference has"
        if (
            not _rms(found[name][2], mine.projections) <= _SAME * mine.norm
            or found[name][1] != mine.n_nonfinite
        ):
            return f"the weights differ from those of the reference, {name} first: load the same ones"
    return ""


def _unusable(
    given: tuple[float, int, list[float]] | None, numel: float | None, saved: SavedTensor | None
) -> tuple[bool, str]:
    """Return whether a gradient is wrong without being compared, and why it can't be; ``""`` if it can."""
    if given is None or saved is None:
        size = given[0] if given else saved.norm if saved else 0.0
        left = "the reference" if given else "the run"
        return size != 0, f"{left} has none, the other one has a norm of {size:.3g}"
    if numel != math.prod(saved.shape):
        return True, f"has {numel:,.0f} elements, in the reference {math.prod(saved.shape):,}"
    if given[1] and saved.n_nonfinite:
        return False, "not finite in both"
    if given[1] or saved.n_nonfinite:
        where = "the reference is finite" if given[1] else "only in the reference"
        return True, f"{given[1] or saved.n_nonfinite:,} elements are NaN or infinite; {where}"
    return False, ""


def _judged(
    row: GradientRow,
    given: tuple[float, int, list[float]],
    saved: SavedTensor,
    error: float,
    allowed: float,
) -> tuple[GradientRow, float | None]:
    """Return the row of a gradient, and the factor by which it differs: 1 if it does not."""
    size, _, mine = given
    sums, others = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (mine, saved.projections))
    fails, factor, text = not error <= allowed, 1.0 if error <= allowed else None, ""
    if fails:
        # the norm of the k sums is that of the tensor times sqrt(k)
        factor = factor_of(sums, others, allowed * math.sqrt(len(sums)))
        is_known = factor is not None and (math.prod(saved.shape) > 2 or factor in {0.0, -1.0, 0.5, 2.0})
        if is_known and factor is not None:
            text = f"all elements are {times(factor)} the reference" if factor else "all elements are 0"
    lengths = float(sums.norm() * others.norm())
    return GradientRow(
        row.name,
        row.what,
        row.module,
        math.prod(saved.shape),
        saved.norm,
        error,
        allowed,
        float(sums @ others) / lengths if lengths else math.nan,
        size / saved.norm if saved.norm else math.nan,
        fails,
        text,
    ), factor


def _rms(a: Sequence[float], b: Sequence[float]) -> float:
    # without overflow
    return math.dist(a, b) / math.sqrt(len(a))


def _outputs(given: Mapping[str, Tensor], saved: SavedReference) -> Tensors:
    reference, exact = {}, {}
    for name in given:
        value, wide, dtype = saved.outputs[name]
        reference[name] = torch.tensor(value, dtype=torch.float64, device="cpu").to(DTYPES[dtype])
        exact[name] = torch.tensor(value if wide is None else wide, dtype=torch.float64, device="cpu")
    mine = {name: x.detach().cpu().reshape(()) for name, x in given.items()}
    return Tensors(mine, reference, exact if saved.is_exact else None)
