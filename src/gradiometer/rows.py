"""One tensor's statistics on the host, as a row of plain Python values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from gradiometer import derived
from gradiometer.schema import COLUMN_NAMES, Flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd
    from torch import Tensor

__all__ = ["TensorReport", "frame", "row_to_dict", "rows"]

_COUNTS: Final = frozenset({"numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "n_inf", "n_nonfinite"})


@dataclass(frozen=True)
class TensorReport:
    """One tensor's statistics. Means, norms and extremes are those of its finite elements.

    ``norm`` alone is as torch would say it: NaN with any NaN, inf with any Inf. ``std`` is of the
    population.
    """

    name: str
    numel: int
    norm: float
    finite_norm: float
    rms: float
    mean: float
    std: float
    abs_max: float
    zero_fraction: float
    n_zero: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_inf: int
    n_nonfinite: int
    sum: float
    sumsq: float
    flags: Flag


def rows(names: tuple[str, ...], columns: Tensor, flags: list[int]) -> Iterator[TensorReport]:
    """Return a row for each name. ``columns (T, C) float64`` on the host, and the flags of each row."""
    fields = [*COLUMN_NAMES, *derived.DERIVED]
    values = [derived.value(columns, field).tolist() for field in fields]
    for i, name in enumerate(names):
        row: dict[str, Any] = {
            field: int(value[i]) if field in _COUNTS else value[i]
            for field, value in zip(fields, values, strict=True)
        }
        yield TensorReport(name=name, flags=Flag(flags[i]), **row)


def row_to_dict(row: TensorReport) -> dict[str, Any]:
    """Return plain Python values, the flags by their names."""
    values = asdict(row)
    del values["name"]
    return values | {"flags": [flag.name for flag in row.flags]}


def frame(rows: Mapping[str, Mapping[str, Any]], index: str, fields: list[str]) -> pd.DataFrame:
    """Return a pandas DataFrame of rows by their labels; an ImportError says how to get pandas."""
    try:
        import pandas as pd  # optional, and slow to import
    except ImportError as error:
        msg = "to_frame needs pandas: pip install 'gradiometer[frame]'"
        raise ImportError(msg) from error
    labels = pd.Index(list(rows), name=index, dtype="object")
    return pd.DataFrame(list(rows.values()), index=labels, columns=fields)
