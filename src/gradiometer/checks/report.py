"""What `check_model` returns: a line for each contract of a model."""

from __future__ import annotations

import enum
import html
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradiometer.rules import Finding, Severity
from gradiometer.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class NotApplicable(Exception):  # noqa: N818 it is an answer
    """Raised by a contract that does not apply; its text is the reason."""


class Status(enum.StrEnum):
    """What is known of a contract."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_APPLICABLE = "does not apply"


@dataclass(frozen=True)
class Evidence:
    """One reason why a contract is broken.

    Attributes:
        text: one line: which token, row or module, and how much.
        name: the name of a parameter, buffer or module; None if it is about the whole model.
        value: what was measured.
        threshold: the limit that the value is compared with.
        advice: what to do, one line.
        severity: ``WARNING``, or ``INFO`` for what may be meant so.
    """

    text: str
    name: str | None = None
    value: float = 1.0
    threshold: float = 0.0
    advice: str = ""
    severity: Severity = Severity.WARNING


@dataclass(frozen=True)
class ContractResult:
    """What `check_model` found out about one contract.

    Attributes:
        contract: its name, such as ``"causal"``.
        group: ``"behaviour"``, ``"gradients"``, ``"initialization"`` or ``"configuration"``.
        status: a `Status`, which equals its text: ``"holds"``, ``"broken"`` or ``"does not apply"``.
        text: what was asked if it holds, the first evidence if it is broken, otherwise why it does not apply.
        evidence: all evidence, the most severe first; empty unless the contract is broken.
    """

    contract: str
    group: str
    status: Status
    text: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def severity(self) -> Severity:
        """The severity of the first evidence; ``INFO`` without any."""
        return self.evidence[0].severity if self.evidence else Severity.INFO

    @property
    def is_failure(self) -> bool:
        """Whether the contract is broken, and not only perhaps on purpose."""
        return self.status is Status.BROKEN and self.severity >= Severity.WARNING

    def __str__(self) -> str:
        more = len(self.evidence) - 1
        text = f"{self.text} (and {more} more)" if more > 0 else self.text
        status = "note" if self.status is Status.BROKEN and not self.is_failure else str(self.status)
        return printable(f"{status:14}  {self.contract:19}  {text}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(self)
        evidence = [asdict(each) | {"severity": str(each.severity)} for each in self.evidence]
        return values | {"status": str(self.status), "severity": str(self.severity), "evidence": evidence}


@dataclass(frozen=True, repr=False)
class ModelReport:
    """The results of `check_model`; false if a contract is broken. ``print`` shows a line for each.

    Attributes:
        results: a `ContractResult` for each contract, in a fixed order.
        precision: the dtype in which outputs were compared, such as ``"float64"``.
        rounding: by how much the outputs change if each weight changes by its rounding error, in proportion
            to their root mean square. Differences below 16 times this are not seen.
    """

    results: tuple[ContractResult, ...]
    precision: str
    rounding: float

    def __bool__(self) -> bool:
        return not any(each.is_failure for each in self.results)

    def __getitem__(self, contract: str) -> ContractResult:
        """Return the result of a contract by its name."""
        for each in self.results:
            if each.contract == contract:
                return each
        raise KeyError(contract)

    def __iter__(self) -> Iterator[ContractResult]:
        return iter(self.results)

    @property
    def broken(self) -> list[str]:
        """Names of the contracts that are broken; without those that are only noted."""
        return [each.contract for each in self.results if each.is_failure]

    @property
    def summary(self) -> str:
        """One line: how many contracts hold, are broken, are noted and do not apply."""
        counts = {"hold": 0, "broken": 0, "noted": 0, "do not apply": 0}
        for each in self.results:
            if each.status is Status.BROKEN:
                counts["broken" if each.is_failure else "noted"] += 1
            else:
                counts["hold" if each.status is Status.HOLDS else "do not apply"] += 1
        text = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return f"{len(self.results)} contracts: {text}"

    def __str__(self) -> str:
        lines = [self.summary, *map(str, self.results)]
        for each in self.results:
            advice = ""
            for place, evidence in enumerate(each.evidence[:5] if each.is_failure else ()):
                # the first is in the line above
                text = [evidence.text] if place else []
                text += [evidence.advice] if evidence.advice not in {"", advice} else []
                advice = evidence.advice
                lines.append(printable(f"{each.contract}: {'; '.join(text)}"))
        return "\n".join(lines)

    def __repr__(self) -> str:
        broken = f": {', '.join(self.broken)}" if self.broken else ""
        return f"<ModelReport: {self.summary}{broken}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows = "".join(_row(each) for each in self.results)
        heading = f"<tr><th {_CELL}'>contract</th><th></th><th {_CELL}'>evidence</th></tr>"
        return f"<p>{html.escape(self.summary)}</p><table>{heading}{rows}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        results = [each.to_dict() for each in self.results]
        return {
            "holds": bool(self),
            "precision": self.precision,
            "rounding": self.rounding,
            "results": results,
        }

    def findings(self, step: int = 0) -> list[Finding]:
        """Return the broken contracts as findings of a step; `gradiometer.watch` records them."""
        return [
            Finding(
                f"contract_{each.contract}",
                evidence.severity,
                step,
                step,
                None,
                None,
                evidence.value,
                evidence.threshold,
                f"{each.contract} is {'broken' if each.is_failure else 'noted'}: {evidence.text}",
                evidence.advice or "see the how-to page on gm.check_model",
            )
            for each in self.results
            for evidence in each.evidence[:1]
        ]


_COLORS = {"holds": "#2e7d32", "broken": "#c62828", "note": "#b26a00", "does not apply": "#777"}


_CELL = "style='text-align:left;vertical-align:top"


def _row(result: ContractResult) -> str:
    status = "note" if result.status is Status.BROKEN and not result.is_failure else str(result.status)
    cells = [
        f"<b>{html.escape(printable(each.text))}</b><br>{html.escape(each.advice)}"
        for each in result.evidence[:5]
    ]
    text = "<br>".join(cells) or html.escape(printable(result.text))
    return (
        f"<tr><td {_CELL}'>{result.contract}</td>"
        f"<td {_CELL};color:{_COLORS[status]};white-space:nowrap'>{status}</td><td {_CELL}'>{text}</td></tr>"
    )


def percent(size: float) -> str:
    """Return a difference of outputs, in proportion to their root mean square, as text.

    >>> percent(0.00123), percent(1.234), percent(float("inf"))
    ('0.12 % of the rms of the outputs', '123 % of the rms of the outputs', 'inf % of the rms of the outputs')
    """
    number = f"{100 * size:,.0f}" if size >= 0.1 else f"{100 * size:.2g}"
    return f"{number} % of the rms of the outputs"


def broken(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Return evidence with the most severe first."""
    return sorted(evidence, key=lambda each: -each.severity)
