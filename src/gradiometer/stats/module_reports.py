"""Reports of the modules of a model, as a mapping that prints as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from gradiometer.stats import text_table
from gradiometer.stats.tensor_report import frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from gradiometer.stats.report import Report

__all__ = ["ModuleReports"]


class ModuleReports(Mapping[str, "Report"]):
    """Reports of the modules of a model, in its order: a mapping module -> `Report` of its tensors.

    ``print`` shows a table, a row per module; `to_frame` and `to_dict` have the same values.
    """

    def __init__(self, reports: Mapping[str, Report]) -> None:
        """``reports``: module -> report of the tensors below it."""
        self._reports = dict(reports)

    def __getitem__(self, module: str) -> Report:
        """Return one module's report."""
        try:
            return self._reports[module]
        except KeyError:
            msg = f"no module {module!r} among these {len(self)}: {', '.join(map(repr, self)) or 'none'}"
            raise KeyError(msg) from None

    def __iter__(self) -> Iterator[str]:
        """Go over the modules' names."""
        return iter(self._reports)

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._reports)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return module -> plain Python values. Norms may be NaN or inf."""
        return {module: _module_row(report) for module, report in self.items()}

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas DataFrame, a row per module, indexed by module.

        Raises:
            ImportError: without pandas; ``pip install 'gradiometer[frame]'`` brings it.
        """
        return frame(self.to_dict(), "module", list(_MODULE_FIELDS))

    def __str__(self) -> str:
        """Return a table, a row per module."""
        return text_table.render_modules(self)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<ModuleReports: {len(self)} {'module' if len(self) == 1 else 'modules'}>"


# field -> where it is found in a module's report
_MODULE_FIELDS: Final[dict[str, Callable[[Report], Any]]] = {
    "tensors": len,
    "numel": attrgetter("total.numel"),
    "norm": attrgetter("total.norm"),
    "min_norm": attrgetter("min_norm"),
    "max_norm": attrgetter("max_norm"),
    "norm_ratio": attrgetter("norm_ratio"),
    "rms": attrgetter("total.rms"),
    "mean": attrgetter("total.mean"),
    "std": attrgetter("total.std"),
    "abs_max": attrgetter("total.abs_max"),
    "zero_fraction": attrgetter("zero_fraction"),
    "n_nan": attrgetter("n_nan"),
    "n_inf": attrgetter("n_inf"),
    # shares of its tensors that are too small, and too large
    "vanishing_fraction": lambda report: len(report.vanishing) / len(report),
    "exploding_fraction": lambda report: len(report.exploding) / len(report),
    "dead_fraction": lambda report: len(report.dead) / len(report),
    "health": attrgetter("health"),
}


def _module_row(report: Report) -> dict[str, Any]:
    return {field: get(report) for field, get in _MODULE_FIELDS.items()}
