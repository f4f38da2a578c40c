"""PrecisionReport: which tensors fit which narrow format, on the host, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from gradiometer.columns import (
    EXPONENTS,
    FORMATS,
    LOWEST_BINADE,
    best_scales,
    format_of,
    losses,
    of_binades,
)
from gradiometer.stats import text_table
from gradiometer.stats.table_report import TableReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from gradiometer.stats.text_table import TextTable

_NOTES: Final = (
    "lost %: elements that a cast flushes to zero and, where it says so, that overflow; in brackets: with",
    "the best scale, a power of two that the tensor is multiplied by before the cast",
)


@dataclass(frozen=True)
class FormatFit:
    """What a cast to one format would lose of a tensor: counts, and a better scale.

    ``n_flushed``: nonzero elements that become 0. ``n_subnormal``: elements below the smallest normal number
    that do not. ``n_overflowed``: finite elements that overflow. The same after multiplication by
    ``best_scale``, a power of two, are in ``n_flushed_scaled`` and ``n_overflowed_scaled``.
    """

    n_flushed: int
    n_subnormal: int
    n_overflowed: int
    best_scale: float
    n_flushed_scaled: int
    n_overflowed_scaled: int

    @property
    def fits(self) -> bool:
        """Whether a cast loses nothing but precision."""
        return self.n_flushed == self.n_overflowed == 0


@dataclass(frozen=True)
class PrecisionRow:
    """One tensor's elements by kind, its exponents, and how it fits each format.

    ``min_exponent``, ``max_exponent``: floor(log2 |x|) of the smallest and largest finite nonzero element;
    None if there is none.
    """

    name: str
    numel: int
    n_zero: int
    n_inf: int
    n_nan: int
    min_exponent: int | None
    max_exponent: int | None
    formats: dict[str, FormatFit]


class PrecisionReport(TableReport[PrecisionRow]):
    """Which tensors fit which format: a mapping from names to `PrecisionRow`.

    ``print(report)`` shows a table, the tensors that lose most first.

    Attributes:
        names: the tensors' names.
        formats: the names of the formats.
        total: a `PrecisionRow` of all tensors together, with one scale for all.

    >>> import torch, gradiometer as gm
    >>> report = gm.collect_exponents({"w": torch.tensor([1e-9, 0.5, 1.0])}).report(["float16"])
    >>> fit = report["w"].formats["float16"]
    >>> fit.n_flushed, fit.best_scale, fit.n_flushed_scaled
    (1, 32.0, 0)
    """

    schema = EXPONENTS
    _row_class = PrecisionRow
    _noun = "tensor"
    _nothing = "nothing measured: no tensors"

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Tensor,
        formats: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        """Create a report of columns on the host; ``options`` are those of `TableReport`."""
        super().__init__(names, columns, **options)
        given = FORMATS if formats is None else formats
        given = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
        self._formats = list(dict.fromkeys([format_of(x, "precision_report") for x in given]))
        self.formats = tuple([form.name for form in self._formats])

    def in_formats(self, formats: Iterable[Any] | None) -> PrecisionReport:
        """Return this report with other formats; None: all.

        Raises:
            ValueError: for another format.
        """
        ranks = self.ranks if self.is_reduced else None
        return PrecisionReport(self.names, self._columns, formats, ranks=ranks, is_local=self.is_local)

    def _make_rows(
        self, names: Sequence[str], columns: Tensor, flags: Tensor | None, fingerprints: Tensor | None
    ) -> Iterator[PrecisionRow]:
        del flags, fingerprints
        fits: list[list[tuple[str, FormatFit]]] = [[] for _ in names]
        for form in self._formats:
            plain = [x.tolist() for x in losses(columns, form)]
            logs = best_scales(columns, form).tolist()
            scaled = [losses(row, form, log2) for row, log2 in zip(columns, logs, strict=True)]
            for i, log2 in enumerate(logs):
                flushed, _, over = [int(x) for x in scaled[i]]
                found = FormatFit(plain[0][i], plain[1][i], plain[2][i], 2.0**log2, flushed, over)
                fits[i].append((form.name, found))
        binades = of_binades(columns)
        for i, name in enumerate(names):
            present = binades[i].nonzero().view(-1).tolist()
            ends = (present[0], present[-1]) if present else None
            low, high = (None, None) if ends is None else [x + LOWEST_BINADE - 1 for x in ends]
            zeros, inf, nan = columns[i, [0, -2, -1]].tolist()
            numel = int(columns[i].sum())
            yield PrecisionRow(name, numel, zeros, inf, nan, low, high, dict(fits[i]))

    def _dicts(
        self, names: Sequence[str], columns: Tensor, flags: Tensor | None, fingerprints: Tensor | None
    ) -> dict[str, dict[str, Any]]:
        found = {}
        for row in self._make_rows(names, columns, flags, fingerprints):
            values = asdict(row)
            found[values.pop("name")] = values
        return found

    def _flat(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        # a value of a format is named ``float16.n_flushed``
        found = {}
        for name, values in self._own_dicts().items():
            formats = values.pop("formats").items()
            found[name] = values | {f"{form}.{key}": x for form, fit in formats for key, x in fit.items()}
        own = [field.name for field in fields(PrecisionRow) if field.name not in {"name", "formats"}]
        return found, own + [f"{form}.{field.name}" for form in self.formats for field in fields(FormatFit)]

    def to_string(self, max_rows: int | None = 40) -> str:
        """Return the table that ``print`` shows: ``max_rows`` tensors that lose most at their best scale."""
        return super().to_string(max_rows)

    def _drawable(self) -> dict[str, tuple[str, bool]]:
        return {form.name: (f"{form.short} lost %", False) for form in self._formats}

    def _drawn(self, row: PrecisionRow, name: str) -> float:
        fit = row.formats[name]
        return 100 * (fit.n_flushed + fit.n_overflowed) / max(1, row.numel)

    def ordered(self) -> list[PrecisionRow]:
        """Return the rows in the order of the printed table: those that lose most first."""
        return sorted(self.rows(), key=_worst, reverse=True)

    def table(self, max_rows: int | None = 20) -> TextTable:
        """Return the printed table as text cells."""
        table = super().table(max_rows)
        header, *cells, total = _left_aligned([table.header, *table.rows, table.total], first=4)
        return table._replace(header=header, rows=cells, total=total, notes=_NOTES)

    def _header(self) -> list[str]:
        return ["elements", "zero %", "log2 |x|", *[f"{form.short} lost %" for form in self._formats]]

    def _cells(self, row: PrecisionRow) -> list[str]:
        exponents = "-" if row.min_exponent is None else f"{row.min_exponent} … {row.max_exponent}"
        for count, kind in ((row.n_nan, "NaN"), (row.n_inf, "Inf")):
            if count:
                exponents += f", {text_table.count(count)} {kind}"
        return [
            text_table.count(row.numel),
            text_table.percent(row.n_zero / max(1, row.numel)),
            exponents,
            *[_fit(fit, row.numel) if _has_finite(row) else "-" for fit in row.formats.values()],
        ]

    def _headline(self) -> str:
        headline = super()._headline()
        if not self.names:
            return headline
        found = [row for row in self.rows() if _has_finite(row)]
        whole = [sum(row.formats[form.name].fits for row in found) for form in self._formats]
        fits = ", ".join(f"{form.short} {n}" for form, n in zip(self._formats, whole, strict=True))
        return f"{headline}; tensors without loss: {fits}"

    def _subject(self) -> str:
        nonfinite = sum(row.n_nan + row.n_inf > 0 for row in self.rows())
        more = f", {nonfinite} of them with NaN or Inf" if nonfinite else ""
        return super()._subject() + more


def _worst(row: PrecisionRow) -> tuple[float, float]:
    """Return the shares that are lost at the best scale, and as it is, of the worst format."""
    of = max(1, row.numel)
    scaled = [fit.n_flushed_scaled + fit.n_overflowed_scaled for fit in row.formats.values()]
    plain = [fit.n_flushed + fit.n_overflowed for fit in row.formats.values()]
    return max(scaled, default=0) / of, max(plain, default=0) / of


def _has_finite(row: PrecisionRow) -> bool:
    """Return whether a cast could lose something; there is nothing to lose of no elements, either."""
    return row.numel == 0 or row.n_nan + row.n_inf < row.numel


def _fit(fit: FormatFit, numel: int) -> str:
    if fit.fits:
        return "0"
    lost = text_table.percent((fit.n_flushed + fit.n_overflowed) / numel)
    if fit.n_overflowed:
        lost += " overflow"
    if fit.best_scale == 1:
        return lost
    after = text_table.percent((fit.n_flushed_scaled + fit.n_overflowed_scaled) / numel)
    return f"{lost} ({after} at 2^{round(math.log2(fit.best_scale))})"


def _left_aligned(cells: list[Sequence[str]], first: int) -> list[tuple[str, ...]]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        (*row[:first], *[cell.ljust(width) for cell, width in zip(row[first:], widths[first:], strict=True)])
        for row in cells
    ]
