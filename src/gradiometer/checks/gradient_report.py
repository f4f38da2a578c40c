"""The verdict on a step's outputs and gradients: each compared with a reference, by measured rounding."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.checks.allowed_error import FACTOR, unit_of
from gradiometer.checks.compared_tensors import GradientRow, Tensors, compare_tensors
from gradiometer.checks.fault_kind import common_factor, common_sentence, times
from gradiometer.stats import text_table
from gradiometer.stats.text_table import TextTable, number
from gradiometer.terminal import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradiometer.checks.step_run import StepRun

# the most rows that are shown: a screen
_MOST_ROWS: Final = 12
# of those the most that agree, if others fill the screen
_MOST_RIGHT: Final = 3
# of a line
_WIDTH: Final = 110
# the most characters about a tensor in the table
_LONGEST: Final = 48
# some of the parts of a tensor, in what is said of its fault
_ELEMENTS: Final = r"[^;]*elements?\b.* differs?, and the others agree"
_ROWS: Final = r"[^;]*(row|column)s?\b.* differs?, and the others agree"


@dataclass(frozen=True, repr=False)
class GradientReport:
    """The result of `check_gradients`; false if a tensor is wrong or none could be compared.

    ``print`` shows the first wrong tensor, a table that begins with wrong ones, and the notes.

    Attributes:
        rows: a `GradientRow` for each tensor: outputs, then gradients in the order of the backward pass, then
            updates of the optimizer.
        against: what the step was compared with, such as ``"eager"``.
        precision: ``"float64"`` if errors are distances from a float64 run, otherwise ``""``: then they are
            distances from the reference, and what rounding explains is assumed from the dtypes.
        factor: by how much an error may exceed that of the reference.
        kind: the fault in one sentence if all gradients tell of the same one, otherwise ``""``.
        notes: what else a reader must know.
        incomplete: why too little could be compared for the step to pass, otherwise ``""``.
    """

    rows: tuple[GradientRow, ...]
    against: str
    precision: str = "float64"
    factor: float = FACTOR
    kind: str = ""
    notes: tuple[str, ...] = ()
    incomplete: str = ""

    def __bool__(self) -> bool:
        return self.is_comparable and not self.failures and not self.incomplete

    def __getitem__(self, name: str) -> GradientRow:
        """Return the first row of a name: that of a gradient, if there is one of an update too."""
        for each in self.rows:
            if each.name == name:
                return each
        raise KeyError(name)

    def __iter__(self) -> Iterator[GradientRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_comparable(self) -> bool:
        """Whether any gradient could be compared; of a report without gradients, any update."""
        rows = [each for each in self.rows if each.what not in {"output", "update"}]
        updates = [each for each in self.rows if each.what == "update"]
        return any(each.is_compared for each in rows or updates)

    @property
    def failures(self) -> tuple[GradientRow, ...]:
        """The rows of wrong tensors: outputs first, then in the order of the backward pass."""
        return tuple([each for each in self.rows if each.fails])

    @property
    def first(self) -> GradientRow | None:
        """The first wrong tensor, which is the nearest to the cause; None if none is wrong."""
        return next(iter(self.failures), None)

    def joined(self, other: GradientReport) -> GradientReport:
        """Return a report with the rows and notes of both; the rest is that of this one."""
        notes = tuple(dict.fromkeys([*self.notes, *other.notes]))
        return replace(self, rows=self.rows + other.rows, kind=self.kind or other.kind, notes=notes)

    @property
    def summary(self) -> str:
        """One line: how many tensors are wrong, agree and were not compared."""
        compared = sum(each.is_compared for each in self.rows)
        failed = len(self.failures)
        against = "eager mode" if self.against == "eager" else self.against
        how = "" if against == self.precision else ", judged by float64"
        how = how if self.precision else ", without a float64 run"
        how += f"; {len(self.rows) - compared} not compared" if compared < len(self.rows) else ""
        if failed:
            verb = "is" if failed == 1 else "are"
            text = f"differs from {against}: {failed} of {_tensors(compared)} {verb} wrong{how}"
        elif not self.is_comparable:
            text = f"not compared with {against}: no gradient could be compared"
        elif self.incomplete:
            text = f"not compared with {against} as it trains: {self.incomplete}"
        else:
            text = f"agrees with {against}{'' if self.precision else ' alone'}: {_tensors(compared)}{how}"
        return printable(text)

    def __str__(self) -> str:
        lines = [line for each in [self.summary, *self._first] for line in _wrapped(each)]
        notes = [line for each in self._notes for line in _wrapped(each)]
        if not any(each.is_compared for each in self.rows):
            return "\n".join([*lines, *notes])
        return text_table.text(self._table._replace(headline="\n".join(lines), notes=notes))

    def __repr__(self) -> str:
        first = f": {self.first.name}" if self.first else ""
        return printable(f"<GradientReport: {self.summary}{first}>")

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        head = f"<p><b>{html.escape(self.summary)}</b></p>"
        head += "".join([f"<p>{html.escape(each)}</p>" for each in self._first])
        table = text_table.html(self._table._replace(notes=self._notes))
        return head + re.sub(">wrong(?=[:<])", '><b style="color:#c62828">wrong</b>', table)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; numbers that are not finite are None."""
        rows = [
            {
                key: None if isinstance(x, float) and not math.isfinite(x) else x
                for key, x in asdict(each).items()
            }
            for each in self.rows
        ]
        return {
            "agrees": bool(self),
            "is_comparable": self.is_comparable,
            "against": self.against,
            "precision": self.precision,
            "factor": self.factor,
            "kind": self.kind,
            "incomplete": self.incomplete,
            "first": self.first.name if self.first else None,
            "rows": rows,
            "notes": list(self.notes),
        }

    @property
    def _first(self) -> list[str]:
        """The first wrong tensor, and what kind of fault the numbers tell of."""
        lines = []
        if self.first:
            lines.append(f"first: {self._with_rows(self.first).short()}")
            gradient = next((each for each in self.failures if each.what == "gradient"), None)
            if self.first.what == "output" and gradient:
                text = self._with_rows(gradient).short()
                lines.append(f"gradients differ since an output does; the first of them: {text}")
        lines += [self.kind] if self.kind else []
        return [printable(each) for each in lines]

    def _with_rows(self, first: GradientRow) -> GradientRow:
        """Return the first wrong row, which tells the rows of another tensor instead of its own elements."""
        if first.what == "output" or (first.text and not re.match(_ELEMENTS, first.text)):
            return first
        found = (x for x in self.failures if x.what == first.what and re.match(_ROWS, x.text))
        other = next(found, None)
        return replace(first, text=f"in {other.name}, {other.text}") if other else first

    @property
    def _notes(self) -> list[str]:
        lines = []
        if hidden := [each.name for each in self.rows if each.is_rounding]:
            lines.append(
                f"rounding alone is as large as {shortened(hidden)}: only larger faults can be seen there"
            )
        left = [each for each in self.rows if not each.is_compared]
        lines += [f"not compared: {each}" for each in left[:3]]
        return [printable(each) for each in [*lines, *self.notes]]

    @property
    def _table(self) -> TextTable:
        # wrong rows in order, and those that agree nearest to the first; or the nearest to failing
        wrong = self.failures
        start = self.rows.index(wrong[0]) if wrong else 0
        rest = [
            x for x in (*reversed(self.rows[:start]), *self.rows[start:]) if x.is_compared and not x.fails
        ]
        if not wrong:
            rest.sort(key=lambda each: each.error / each.allowed if each.allowed else 0.0, reverse=True)
        shown = [*wrong[: _MOST_ROWS - min(_MOST_RIGHT, len(rest))], *rest]
        shown = shown[: _MOST_ROWS if wrong else 2 * _MOST_RIGHT]
        hidden = len(wrong) + len(rest) - len(shown)
        failed = len(wrong) - sum(each.fails for each in shown)
        counts = f": {failed} wrong, {hidden - failed} agree" if failed else ""
        # rows that have no numbers are told of in the notes
        counts = counts if wrong else f"; agree: {_by_kind(rest)}"
        more = f"and {hidden} more{counts}" if hidden else ""
        header = ("tensor", "what", "error", "allowed", "cosine", "norm ratio", "")
        # what is wrong with all of them, and with the first, is said above
        said = {"", self._with_rows(wrong[0]).text, wrong[0].text} if wrong else {""}
        texts = ["" if self.kind or each.text in said else printable(each.text) for each in shown]
        rows = [_cells(each, text) for each, text in zip(shown, texts, strict=True)]
        return TextTable("", header, rows, more)


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def _by_kind(rows: Sequence[GradientRow]) -> str:
    """Return how many rows there are of each kind."""
    counts = Counter(row.what for row in rows)
    kinds = sorted(counts, key=["gradient", "update", "output", "slope"].index)
    return ", ".join([f"{counts[kind]} {kind}{'s' * (counts[kind] != 1)}" for kind in kinds])


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cells(row: GradientRow, text: str) -> tuple[str, ...]:
    size = row.norm or 1.0
    numbers = (
        ("-",) * 4
        if math.isnan(row.error)
        else (
            number(row.error / size),
            number(row.allowed / size),
            "-" if math.isnan(row.cosine) else f"{row.cosine:.4f}",
            "-" if math.isnan(row.norm_ratio) else number(row.norm_ratio, 4),
        )
    )
    state = ("wrong" if row.fails else "agrees") if row.is_compared else "not compared"
    if text:
        state += f": {text if len(text) <= _LONGEST else text[: _LONGEST - 1] + '…'}"
    return (printable(row.name), row.what, *numbers, state)


def judge(
    given: StepRun,
    reference: StepRun,
    exact: StepRun | None,
    *,
    modules: Mapping[str, str],
    factor: float = FACTOR,
    against: str,
    notes: Sequence[str] = (),
    rounded: StepRun | None = None,
    is_smooth: bool = False,
) -> GradientReport:
    """Return how the outputs and gradients of a step compare with those of its reference.

    A tensor is wrong if its error against float64 is more than `allowed_errors` allows for the error that the
    reference has.

    Args:
        given: the step as given.
        reference: the reference, in the precision of the step, such as the eager step. The order of its
            gradients is that of the report.
        exact: the reference in float64; None if that is not possible. Then the step is compared with the
            reference alone, and the report says so.
        modules: the module of each parameter, as text.
        factor: by how much an error may exceed that of the reference.
        against: the name of the reference.
        notes: more notes for the report; those of the runs are added.
        rounded: the reference within `RoundedProducts`, which measures how far coarse rounding leads. It is
            used for a step that rounds as TF32 does while its reference does not. Without it the errors of
            the reference are scaled, which can't know about activations such as ReLU, whose gradient jumps.
        is_smooth: whether the gradients are known not to jump, see `RoundedProducts.is_smooth`.
    """
    others = [run.grads if run else None for run in (exact, rounded)]
    tensors = Tensors(given.grads, reference.grads, *others)
    grads = compare_tensors("gradient", tensors, factor, modules, is_smooth=is_smooth)
    others = [run.outputs if run else None for run in (exact, rounded)]
    tensors = Tensors(given.outputs, reference.outputs, *others)
    # one output alone does not tell what rounding usually does
    outputs = compare_tensors("output", tensors, factor, {}, like=grads.limits)
    more = [note for run in (given, reference, exact) if run for note in run.notes]
    wrong = [row for row in (*outputs.rows, *grads.rows) if row.fails]
    small = factor * unit_of(torch.float32)
    if wrong and grads.limits.is_fine and not any(x.text or not x.error < small * x.norm for x in wrong):
        more.append(
            "the errors are as small as those of TF32, but not all gradients have them: they are rounding if "
            "the step uses TF32 or 16 bits in its backward pass only"
        )
    if exact and grads.limits.is_coarse and not wrong:
        more.append(
            "all gradients are farther from float64 than those of the reference, as with TF32: judged by the "
            "errors of matrix products in 8 bits"
        )
    shared = grads.shared
    kind = common_kind(grads.factors)
    if shared != 1.0 and not wrong:
        more.append(
            f"all gradients are about {times(float(f'{shared:.3g}'))} the reference, with little difference "
            "between them: a factor rather than rounding, look for a count or a scale"
        )
    elif shared != 1.0 and any(row.fails for row in grads.rows) and None not in grads.factors.values():
        # those that agree have it as well, but more rounding
        factor_of_all = next((x for x in grads.factors.values() if x not in {None, 1.0}), shared)
        kind = common_kind(dict.fromkeys(grads.factors, factor_of_all))
    if exact is None:
        more.append(
            f"compared with {against} alone, without a float64 run: what rounding explains is assumed from "
            "the dtypes, and faults that both have are not seen"
        )
    return GradientReport(
        (*outputs.rows, *grads.rows),
        against,
        "float64" if exact else "",
        factor,
        kind,
        tuple(dict.fromkeys([*notes, *more])),
    )


def common_kind(factors: Mapping[str, float | None]) -> str:
    """Return the sentence about a factor of all gradients, or of all from one on; ``""`` if there is none."""
    found = common_factor(list(factors.values()))
    if found is None:
        return ""
    factor, start = found
    return common_sentence(factor, list(factors)[start], is_all=start == 0)
