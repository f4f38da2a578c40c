"""The report of `check_finite`: non-finite tensors by name, causes before effects, and a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.stats import preformatted
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradiometer.stats import Report, TensorReport


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FiniteReport:
    """The result of `check_finite`, on the host; ``print(report)`` shows non-finite tensors and a diagnosis.

    Attributes:
        loss: the loss; the mean of several elements, with NaN and inf propagated; None if not given.
        loss_is_finite: whether every element of the loss is finite; True if not given.
        weights: the `Report` of all weights, for values such as ``report.weights["0.bias"].n_nan``.
        grads: the `Report` of all gradients.
        buffers: the `Report` of all buffers; None unless asked for.
        loss_report: the `TensorReport` of the loss; None unless it was a tensor.
    """

    loss: float | None
    loss_is_finite: bool
    weights: Report
    grads: Report
    buffers: Report | None = None
    loss_report: TensorReport | None = None

    @property
    def nan_weights(self) -> list[str]:
        """Names of weights that hold a NaN, in the order of the model."""
        return self.weights.nan

    @property
    def inf_weights(self) -> list[str]:
        """Names of weights that hold +Inf or -Inf."""
        return self.weights.inf

    @property
    def nan_grads(self) -> list[str]:
        """Names of parameters whose gradient holds a NaN."""
        return self.grads.nan

    @property
    def inf_grads(self) -> list[str]:
        """Names of parameters whose gradient holds +Inf or -Inf."""
        return self.grads.inf

    @property
    def nan_buffers(self) -> list[str]:
        """Names of buffers that hold a NaN; empty unless buffers were asked for."""
        return self.buffers.nan if self.buffers else []

    @property
    def inf_buffers(self) -> list[str]:
        """Names of buffers that hold +Inf or -Inf; empty unless buffers were asked for."""
        return self.buffers.inf if self.buffers else []

    @property
    def max_weight(self) -> float:
        """Largest finite magnitude of a weight; 0.0 with none."""
        return self.weights.total.abs_max

    @property
    def max_grad(self) -> float:
        """Largest finite magnitude in a gradient; 0.0 with none."""
        return self.grads.total.abs_max

    @property
    def has_issues(self) -> bool:
        """Whether any checked value is not finite."""
        reports = (self.weights, self.grads, self.buffers)
        return not self.loss_is_finite or any(x is not None and x.found_inf for x in reports)

    def __bool__(self) -> bool:
        """Raise a TypeError, since the truth value would be ambiguous."""
        raise TypeError("the truth value of a FiniteReport is ambiguous; use report.has_issues")

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values: the loss, the maxima, and the lists of names."""
        fields = ("has_issues", "loss", "loss_is_finite", "max_weight", "max_grad")
        lists = [f"{what}_{kind}" for kind in ("weights", "grads", "buffers") for what in ("nan", "inf")]
        return {name: getattr(self, name) for name in (*fields, *lists)}

    def to_string(self, max_rows: int | None = 8) -> str:
        """Return the text that ``print`` shows, with ``max_rows`` tensors of a kind at most; None: all."""
        if not self.has_issues:
            return "; ".join(_summary(self, with_largest=True))
        lines: list[tuple[str, str, str]] = []
        if not self.loss_is_finite:
            row = self.loss_report
            lines.append(("loss", f"{self.loss}", _counts(row) if row and row.numel > 1 else ""))
        for name, kind in _kinds(self):
            rows = _met(name, kind)
            if lines and max_rows is not None and len(rows) == len(kind) > 1:
                # an effect of a cause above: the names of these tensors add nothing
                lines.append((name, f"all {len(kind)}", _counts(kind.total)))
                continue
            shown = rows if max_rows is None else rows[: max(0, max_rows)]
            for row in shown:
                where = f", first on rank {kind.ranks[row.name]}" if row.name in kind.ranks else ""
                lines.append((name, printable(row.name), _counts(row) + where))
            if len(shown) < len(rows):
                lines.append(("", f"… {len(rows) - len(shown)} more", ""))
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        table = [f"  {x:{widths[0]}}  {name:{widths[1]}}  {counts}".rstrip() for x, name, counts in lines]
        return "\n".join([_headline(self), *table, _advice(self)])

    def __str__(self) -> str:
        """Return one line if all is finite; else the loss and tensors that are not finite, and advice."""
        return self.to_string()

    def _repr_html_(self) -> str:
        """Return the same text for a notebook."""
        return preformatted(str(self))

    def __repr__(self) -> str:
        return f"<FiniteReport: {_headline(self)}>"


def _headline(report: FiniteReport) -> str:
    """Return the most important facts in one line."""
    if not report.has_issues:
        return "; ".join(_summary(report, with_largest=False))
    loss = [] if report.loss_is_finite else ["loss"]
    found = [(name, len(_bad(kind)), len(kind)) for name, kind in _kinds(report)]
    return "not finite: " + ", ".join(loss + [_share(*counts) for counts in found if counts[1]])


def _kinds(report: FiniteReport) -> Iterable[tuple[str, Report]]:
    """Return the checked kinds, causes before effects."""
    buffers = [] if report.buffers is None else [("buffer", report.buffers)]
    return [("weight", report.weights), *buffers, ("gradient", report.grads)]


def _bad(report: Report) -> list[TensorReport]:
    return [row for row in report.rows() if row.n_nonfinite or row.name in report.ranks]


def _met(name: str, kind: Report) -> list[TensorReport]:
    # in the order of a step: the backward pass begins with the last layers
    return _bad(kind)[::-1] if name == "gradient" else _bad(kind)


def _summary(report: FiniteReport, *, with_largest: bool) -> list[str]:
    """Return a phrase for the loss and for each kind of tensor."""
    phrases = [] if report.loss is None else [f"loss {report.loss:.4g}"]
    for name, kind in _kinds(report):
        phrases.append(f"1 {name}" if len(kind) == 1 else f"{len(kind) or 'no'} {name}s")
        if with_largest and kind.total.numel:
            largest = max(kind.rows(), key=lambda row: row.abs_max)
            phrases[-1] += f", largest {largest.abs_max:.3g} in {printable(largest.name)}"
    return ["all finite: " + phrases[0], *phrases[1:]]


def _share(name: str, bad: int, count: int) -> str:
    if count == 1:
        return f"the only {name}"
    return f"all {count} {name}s" if bad == count else f"{bad} of {count} {name}s"


def _counts(row: TensorReport) -> str:
    kinds = ((row.n_nan, "NaN"), (row.n_posinf, "+Inf"), (row.n_neginf, "-Inf"))
    counts = [f"{count:,} {what}" for count, what in kinds if count]
    # the replicas disagree, and the one that is counted is finite
    return (", ".join(counts) or "NaN or Inf in a copy") + f" of {row.numel:,}"


def _advice(report: FiniteReport) -> str:
    """Return one line of advice: the probable first cause, and a remedy."""
    grads = _met("gradient", report.grads)
    grads_are_fine = report.grads.measured and not grads
    if _bad(report.weights) and report.loss_is_finite and grads_are_fine:
        if not all(row.name in report.grads for row in _bad(report.weights)):
            return (
                "The gradients are finite, but some of these weights have no gradient (frozen, or unused in "
                "this step), so they were non-finite before this step: load an earlier checkpoint."
            )
        return (
            "The gradients are finite, so an optimizer step probably caused this: load an earlier "
            "checkpoint, and check the optimizer's learning rate and state."
        )
    if _bad(report.weights):
        return (
            "The weights are already non-finite, and so is everything computed from them: load an earlier "
            "checkpoint."
        )
    if report.nan_buffers:
        return "The weights are finite, but a buffer contains NaN: reset or reload it, and skip the update."
    if not report.loss_is_finite and grads_are_fine:
        return (
            "The gradients are finite, so they come from another loss, or the loss overflowed after its "
            "backward pass."
        )
    if not report.loss_is_finite:
        return (
            "The weights are finite, so the forward pass of this step caused this (the batch, an overflow, "
            "log(0), 0/0): skip the update."
        )
    if not grads:
        return "Only buffers contain Inf, as attention masks do on purpose: if these are masks, ignore this."
    finite, made = ("The weights are", "this step")
    if report.loss is not None:
        finite, made = ("Weights and loss are", "the backward pass of this step")
    where = "" if len(grads) == len(report.grads) else f", near {printable(grads[0].name)}"
    overflow = "" if report.nan_grads else " Inf without NaN is an overflow: lower the loss scale, if any."
    return f"{finite} finite, so {made} caused this{where}: skip the update.{overflow}"
