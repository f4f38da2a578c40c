"""Compare two runs: find the first step that differs, and its tensors in the order they are computed.

If both have fingerprints, these tell whether the tensors are equal to the bit; statistics cannot.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import COLUMN_INDEX, COLUMN_NAMES, NUM_COLUMNS, derived
from gradiometer.extras import require
from gradiometer.recorder import KINDS, TAP_KINDS, Kind, Roster, label
from gradiometer.runs.files import RunError
from gradiometer.runs.format import pyarrow
from gradiometer.runs.reader import Run, read_run
from gradiometer.runs.steps_table import scalars_of
from gradiometer.terminal import shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from torch import Tensor

    from gradiometer.recorder import StepRecord

__all__ = ["BitDifference", "Comparison", "Difference", "Side", "compare_runs", "compared"]

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
# kinds without fingerprints
_NO_BITS: Final[tuple[Kind, ...]] = ("updates", *TAP_KINDS)

# columns that do not depend on the order of summation
_UNROUNDED: Final = [i for name, i in COLUMN_INDEX.items() if name not in {"sumsq", "sum"}]

# rows of the two runs that are compared at once
_BLOCK: Final = 1000


@dataclass(frozen=True)
class Difference:
    """One tensor, or one scalar, that differs between two runs.

    Attributes:
        step: the first step where it differs.
        name: such as ``blocks.3.w.grad`` or ``loss``; ``skipped`` is 1 where the update was skipped.
        kind: the tensor's kind; None for a scalar.
        values: the raw columns that differ, in A and in B; ``"value"`` for a scalar. None where missing.
    """

    step: int
    name: str
    kind: Kind | None
    values: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class BitDifference:
    """The first step in which the bits of a tensor differ between two runs.

    Attributes:
        step: the step.
        name: the first tensor that differs, such as ``blocks.3.w.grad``: gradients from the model's last to
            its first, then weights, then updates.
        kind: its kind.
        tensors: the number of tensors whose bits differ in this step.
    """

    step: int
    name: str
    kind: Kind
    tensors: int


@dataclass(frozen=True)
class Side:
    """One run: its folder, first and last step, its numbers of steps and of steps with tensors.

    ``fingerprints`` tells whether it has recorded fingerprints.
    """

    path: str
    first: int | None
    last: int | None
    steps: int
    recorded: int
    fingerprints: bool


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs, A and B, step by step.

    Attributes:
        a, b: the runs.
        rtol: the relative tolerance, see `compared`.
        common: the number of steps that both have.
        recorded: the number of common steps with tensors in both.
        compared: of those, the number up to the first whose statistics or scalars differ.
        fingerprinted: of those, the number with fingerprints of all tensors in both, up to the first whose
            bits differ; 0 if fingerprints were not compared.
        bits: the first tensor whose bits differ; None if there is none, or if fingerprints were not compared.
        unknown: names of tensors without fingerprints, such as those of which the parts on several ranks do
            not merge, but not of updates; the fingerprints of the others are compared.
        tensors: the number of tensors that both have.
        kinds: the kinds that only A, and only B, has recorded.
        only_a, only_b: names of tensors that the other run lacks, of kinds that both have recorded.
        shapes: the shape and dtype in A and in B where they differ; the statistics of such tensors are still
            compared, their bits are not.
        missing: steps that only A, and only B, has, between the first and the last common step.
        first: the differences in the first step that differs, in the order of computation: weights,
            scalars, gradients from the model's last to its first, ``skipped``, and updates.
        scalars: the first difference of each scalar.
        total_norm: the last step with tensors in both, and its total gradient norm in A and in B.
    """

    a: Side
    b: Side
    rtol: float
    common: int
    recorded: int
    compared: int
    fingerprinted: int
    bits: BitDifference | None
    unknown: tuple[str, ...]
    tensors: int
    kinds: tuple[tuple[Kind, ...], tuple[Kind, ...]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: Mapping[str, tuple[str, str]]
    missing: tuple[tuple[int, ...], tuple[int, ...]]
    first: tuple[Difference, ...]
    scalars: tuple[Difference, ...]
    total_norm: tuple[int, float, float] | None

    @property
    def identical(self) -> bool:
        """Whether the bits of all tensors are equal in all common steps with tensors.

        The tensors of the kinds in both must be the same, and have fingerprints. Updates and activations
        have none; their counts of elements and their largest magnitudes must be equal. Scalars do not count.
        """
        differ = self.bits or self._others or self.unknown or self._without_bits
        return not differ and 0 < self.recorded == self.fingerprinted

    @property
    def same(self) -> bool:
        """Whether the runs are `identical`; if that is not known, whether nothing that was compared differs.

        In the latter case the tensors of the kinds in both must be the same, and the statistics and scalars
        of at least one step equal.
        """
        differ = self.bits or self.first or self._others
        return self.identical or (not differ and self.compared > 0)

    @property
    def _without_bits(self) -> list[str]:
        """The kinds without fingerprints that differ, in words."""
        kinds = {difference.kind for difference in self.first}
        return [kind.replace("_grads", "s' gradients") for kind in _NO_BITS if kind in kinds]

    @property
    def _others(self) -> bool:
        """Whether the runs do not have the same tensors."""
        return bool(self.only_a or self.only_b or self.shapes)

    @property
    def step(self) -> int | None:
        """The first step whose statistics or scalars differ; None if none does."""
        return self.first[0].step if self.first else None

    @property
    def not_compared(self) -> str:
        """Why no fingerprints were compared; empty if they were."""
        if self.fingerprinted or self.bits:
            return ""
        without = [name for name, side in (("A", self.a), ("B", self.b)) if not side.fingerprints]
        if without:
            return f"{' and '.join(without)} ha{'ve' if len(without) > 1 else 's'} no fingerprints"
        if self.rtol:
            return "a relative tolerance leaves fingerprints out"
        if not self.recorded:
            return "no step has tensors in both runs"
        if self.tensors == len(self.shapes):
            return "no tensor has the same name, shape and dtype in both runs"
        return "these tensors have no fingerprints, as parts on several ranks that do not merge"

    @property
    def verdict(self) -> str:
        """What the fingerprints tell, in one line."""
        bits = self.bits
        if bits is not None:
            noun = "tensor" if bits.tensors == 1 else "tensors"
            kind = {"grads": "gradient", "weights": "weight", "updates": "update"}[bits.kind]
            return f"bits differ first at step {bits.step}: {bits.name} ({kind}), {bits.tensors} {noun}"
        if not self.fingerprinted:
            return f"bits: not compared, because {self.not_compared}"
        noun = "step" if self.fingerprinted == 1 else "steps"
        said = f"bits: identical for {self.fingerprinted:,} {noun}"
        if self.shapes:
            said += " in the tensors of the same shape and dtype"
        elif self._others:
            said += " in the tensors that both runs have"
        if self.unknown:
            noun = "tensor has" if len(self.unknown) == 1 else "tensors have"
            said += f"; {len(self.unknown):,} {noun} no fingerprint"
        if self._without_bits:
            said += f"; {' and '.join(self._without_bits)} differ first at step {self.step}"
        if left := self.recorded - self.fingerprinted:
            said += f"; {left:,} have no fingerprints in both runs, so only their statistics are compared"
        if left := self.common - self.recorded:
            said += f"; {left:,} {'was' if left == 1 else 'were'} not recorded"
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        found = {"same": self.same, "identical": self.identical, "verdict": self.verdict, "step": self.step}
        return found | asdict(self)


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
    rows = [_labels(run.roster, kinds, ignore) for run in (a, b)]
    shared = [name for name in rows[0] if name in rows[1]]
    shapes = {}
    for name in shared:
        here, there = (_form(run.roster, own[name][1]) for run, own in zip((a, b), rows, strict=True))
        if here != there:
            shapes[name] = (here, there)
    steps = [_steps(run) for run in (a, b)]
    common = sorted(steps[0].keys() & steps[1].keys())
    recorded = [s for s in common if steps[0][s] and steps[1][s]]
    scalars = _scalars(a, b, common, rtol, ignore)
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
            if rows[0][name][0] == kind and name not in shapes
        ]
        bits, fingerprinted, unknown = _bits(a, b, recorded, (rows[0], rows[1]), alike)
    if bits is None and fingerprinted == len(recorded) and not shapes and not unknown:
        # of equal bits, statistics are equal up to rounding
        found: list[Difference] = []
        compared = len(upto)
        updates = [name for name in shared if rows[0][name][0] in _NO_BITS]
        if updates:
            # they have no fingerprints
            found, compared = _tensors(a, b, upto, (rows[0], rows[1]), updates, rtol, columns=_UNROUNDED)
    else:
        found, compared = _tensors(a, b, upto, (rows[0], rows[1]), shared, rtol)
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
        only_a=tuple(name for name in rows[0] if name not in rows[1]),
        only_b=tuple(name for name in rows[1] if name not in rows[0]),
        shapes=shapes,
        missing=(_missing(steps[0], steps[1], common), _missing(steps[1], steps[0], common)),
        first=tuple(first),
        scalars=tuple(scalars),
        total_norm=_totals(a, b, recorded),
    )


# whether a step has tensors
_Steps = dict[int, bool]
_Rows = dict[str, tuple[Kind, int]]


def _beyond(roster: Roster, kinds: Collection[Kind]) -> tuple[Kind, ...]:
    return tuple(kind for kind in roster.kinds if kind not in kinds)


def _labels(roster: Roster, kinds: Collection[Kind], ignore: re.Pattern[str] | None) -> _Rows:
    """Return the kind and row of each tensor by label, in the order of computation."""
    rows: _Rows = {}
    for kind in _ORDER:
        if kind is None or kind not in kinds:
            continue
        places = range(len(roster.names))
        for i in reversed(places) if kind in {"grads", "activation_grads"} else places:
            name = label(kind, roster.names[i])
            if roster.has(kind, i) and (ignore is None or not ignore.search(name)):
                rows[name] = (kind, i)
    return rows


def _form(roster: Roster, place: int) -> str:
    return f"{roster.dtypes[place]} {list(roster.shapes[place])}"


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


def _scalars(
    a: Run, b: Run, common: list[int], rtol: float, ignore: re.Pattern[str] | None
) -> list[Difference]:
    """Return the first difference of each scalar."""
    found: dict[str, Difference] = {}
    tables = [_rows_of(run, common) for run in (a, b)]
    for start in range(0, len(common), _BLOCK):
        here, there = (table.slice(start, _BLOCK) for table in tables)
        # most blocks are equal, and Arrow detects that a hundred times faster
        if here.equals(there):
            continue
        for step, one, other in zip(common[start:], _given(here), _given(there), strict=False):
            for name in {**one, **other}:
                pair = one.get(name), other.get(name)
                if name in found or _is_close(*pair, rtol) or (ignore is not None and ignore.search(name)):
                    continue
                found[name] = Difference(step, name, None, {"value": pair})
    return list(found.values())


def _rows_of(run: Run, steps: list[int]) -> pa.Table:
    """Return the scalars of steps that are in the run."""
    compute = require("pyarrow.compute", "monitor", "A run record")
    rows = run.steps.select(["step", "lr", "loss", "scalars", "skipped"])
    if len(rows) != len(steps):
        kept = compute.index_in(pyarrow().array(steps, pyarrow().int64()), rows["step"])
        rows = rows.take(kept)
    return rows.drop_columns(["step"]).combine_chunks()


def _given(rows: pa.Table) -> list[dict[str, float]]:
    skipped = rows["skipped"].to_pylist()
    return [x | {"skipped": float(y)} for x, y in zip(scalars_of(rows), skipped, strict=True)]


def _is_close(x: float | None, y: float | None, rtol: float) -> bool:
    if x is None or y is None:
        return x is y
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    return x == y or (math.isfinite(x - y) and abs(x - y) <= rtol * max(abs(x), abs(y)))


def _tensors(
    a: Run,
    b: Run,
    steps: list[int],
    rows: tuple[_Rows, _Rows],
    shared: list[str],
    rtol: float,
    *,
    columns: Sequence[int] = range(NUM_COLUMNS),
) -> tuple[list[Difference], int]:
    """Return the tensors that differ in the first step where any does, and the number of compared steps.

    ``columns``: those that are compared.
    """
    if not steps or not shared:
        return [], 0
    compared, places = 0, _places(a, b, rows, shared)
    for pair in _pairs(a, b, steps):
        compared += 1
        here, there = (_columns(record)[place] for record, place in zip(pair, places, strict=True))
        differ = _differ(here, there, rtol)
        differ[:, [i for i in range(NUM_COLUMNS) if i not in columns]] = False
        if differ.any():
            return [
                Difference(
                    pair[0].step, shared[i], rows[0][shared[i]][0], _values(here[i], there[i], differ[i])
                )
                for i in differ.any(dim=1).nonzero().flatten().tolist()
            ], compared
    return [], compared


def _bits(
    a: Run, b: Run, steps: list[int], rows: tuple[_Rows, _Rows], names: list[str]
) -> tuple[BitDifference | None, int, tuple[str, ...]]:
    """Compare the fingerprints of all steps.

    Returns the first tensor whose bits differ, the number of steps with all fingerprints until then, and the
    tensors that have none in the last step: these are left out.
    """
    if not steps or not names:
        return None, 0, ()
    whole, places = 0, _places(a, b, rows, names)
    needed: Tensor | None = None
    for pair in itertools.chain(_pairs(a, b, steps[-1:]), _pairs(a, b, steps)):
        found = [_fingerprints(record) for record in pair]
        if found[0] is None or found[1] is None:
            needed = torch.ones(len(names), dtype=torch.bool, device="cpu") if needed is None else needed
            continue
        here, there = found[0][places[0]], found[1][places[1]]
        known = (here[:, 0] >= 0) & (there[:, 0] >= 0)
        if needed is None:
            needed = known if known.any() else known.logical_not()
            continue
        whole += bool((known | ~needed).all())
        differ = (here != there).any(dim=1) & known
        if differ.any():
            name = names[int(differ.nonzero()[0])]
            return BitDifference(pair[0].step, name, rows[0][name][0], int(differ.sum())), whole, ()
    unknown = () if needed is None else tuple(itertools.compress(names, needed.logical_not().tolist()))
    unknown = tuple([name for name in unknown if rows[0][name][0] != "updates"])
    return None, whole, unknown if whole else ()


def _fingerprints(record: StepRecord) -> Tensor | None:
    """Return the fingerprints of all kinds, ``(K * N, 3) int64``; -1 bytes in a kind that is not measured."""
    found = []
    for kind in record.roster.kinds:
        bits = record.fingerprints(kind)
        if bits is None:
            return None
        # weights may be recorded only since the run was resumed
        found.append(bits if record.measured(kind).any() else torch.full_like(bits, -1))
    return torch.cat(found)


def _pairs(a: Run, b: Run, steps: list[int]) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Iterate over some steps that both runs have, ascending."""
    wanted = set(steps)
    streams = [run.records(steps[0], steps[-1]) for run in (a, b)]
    return zip(*((r for r in stream if r.step in wanted) for stream in streams), strict=True)


def _places(a: Run, b: Run, rows: tuple[_Rows, _Rows], names: list[str]) -> list[Tensor]:
    """Return the indices of tensors among the rows of all kinds, in A and in B."""
    flat = [_flat(run.roster, own, names) for run, own in zip((a, b), rows, strict=True)]
    return [torch.tensor(x, device="cpu") for x in flat]


def _flat(roster: Roster, rows: _Rows, shared: list[str]) -> list[int]:
    return [roster.place(kind) * len(roster.names) + i for kind, i in (rows[name] for name in shared)]


def _columns(record: StepRecord) -> Tensor:
    """Return the raw columns of all kinds, ``(K * N, C)``."""
    return torch.cat([record.columns(kind) for kind in record.roster.kinds])


def _values(here: Tensor, there: Tensor, differ: Tensor) -> dict[str, tuple[float | None, float | None]]:
    pairs = zip(COLUMN_NAMES, here.tolist(), there.tolist(), differ.tolist(), strict=True)
    return {name: (x, y) for name, x, y, differs in pairs if differs}


def _differ(a: Tensor, b: Tensor, rtol: float) -> Tensor:
    """Return which values differ by more than the tolerance. ``(M, C), (M, C) -> (M, C) bool``."""
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    if rtol == 0:
        return unequal
    larger = torch.maximum(a.abs(), b.abs())
    numel, sumsq = larger[:, COLUMN_INDEX["numel"]], larger[:, COLUMN_INDEX["sumsq"]]
    allowed = torch.zeros_like(larger)
    # a norm with a relative error of rtol has a square with a relative error of 2 * rtol
    allowed[:, COLUMN_INDEX["sumsq"]] = 2 * rtol * sumsq
    allowed[:, COLUMN_INDEX["abs_max"]] = rtol * larger[:, COLUMN_INDEX["abs_max"]]
    # terms cancel in a sum, so the sum may be small where its terms are not
    allowed[:, COLUMN_INDEX["sum"]] = rtol * derived.sqrt(numel * sumsq)
    allowed[:, COLUMN_INDEX["n_zero"]] = rtol * numel
    return unequal & ~((a - b).abs() <= allowed.nan_to_num(posinf=0.0))


def _totals(a: Run, b: Run, recorded: list[int]) -> tuple[int, float, float] | None:
    if not recorded:
        return None
    step = recorded[-1]
    one, other = (run.record(step).total("norm") for run in (a, b))
    return step, one, other
