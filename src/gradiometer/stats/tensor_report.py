"""One tensor's statistics on the host, as a row of plain Python values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import torch

from gradiometer.columns import Fingerprint, Flag, derived

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd
    from torch import Tensor

__all__ = ["TensorReport", "dicts", "frame", "row_to_dict", "rows"]

_COUNTS: Final = frozenset({"numel", "n_zero", "n_nan", "n_posinf", "n_neginf", "n_inf", "n_nonfinite"})


@dataclass(frozen=True)
class TensorReport:
    """One tensor's statistics. Means, norms and extremes are those of its finite elements.

    Only ``norm`` is as torch defines it: NaN with any NaN, inf with any Inf. ``std`` is the population
    standard deviation. ``fingerprint`` is None unless it was asked for.
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
    fingerprint: Fingerprint | None = None


_OTHERS: Final = {"name", "flags", "fingerprint"}
# the fields of a row that come from its columns, in the order of the row
_VALUES: Final = tuple([field.name for field in fields(TensorReport) if field.name not in _OTHERS])

# a report has few distinct flags, and creating or decomposing an IntFlag takes microseconds
_flag = lru_cache(maxsize=64)(Flag)


@lru_cache(maxsize=64)
def _flag_names(bits: int) -> tuple[str | None, ...]:
    return tuple([flag.name for flag in Flag(bits)])


def rows(
    names: tuple[str, ...], columns: Tensor, flags: list[int], fingerprints: Tensor | None = None
) -> Iterator[TensorReport]:
    """Return a row per name.

    Args:
        names: T names.
        columns: ``(T, C) float64`` on the host.
        flags: the flags of each row.
        fingerprints: ``(T, 3) int64`` on the host.
    """
    bits = repeat(None) if fingerprints is None else map(Fingerprint.of_row, fingerprints.tolist())
    return map(TensorReport, names, *_values(columns), map(_flag, flags), bits)


def dicts(
    names: tuple[str, ...], columns: Tensor, flags: list[int], fingerprints: Tensor | None = None
) -> dict[str, dict[str, Any]]:
    """Return `row_to_dict` of each row, by name; the arguments are those of `rows`."""
    # new lists, since callers may change them
    values = [*_values(columns), [[*_flag_names(bits)] for bits in flags]]
    keys = [*_VALUES, "flags"]
    if fingerprints is not None:
        keys.append("fingerprint")
        values.append([_text(Fingerprint.of_row(row)) for row in fingerprints.tolist()])
    found = zip(*values, strict=True)
    return {name: dict(zip(keys, each, strict=True)) for name, each in zip(names, found, strict=True)}


def _text(fingerprint: Fingerprint | None) -> str | None:
    return None if fingerprint is None else str(fingerprint)


def row_to_dict(row: TensorReport) -> dict[str, Any]:
    """Return a row as plain Python values, with its flags as names, and its fingerprint if it has one."""
    values = dict(vars(row))
    del values["name"]
    values["flags"] = list(_flag_names(int(row.flags)))
    fingerprint = values.pop("fingerprint")
    return values if fingerprint is None else values | {"fingerprint": str(fingerprint)}


def _values(columns: Tensor) -> list[list[Any]]:
    """Return the values of all rows, field by field; one call per element would take most of the time."""
    values = [derived.value(columns, name) for name in _VALUES]
    return [
        (x.to(torch.int64) if name in _COUNTS else x).tolist()
        for name, x in zip(_VALUES, values, strict=True)
    ]


def frame(rows: Mapping[str, Mapping[str, Any]], index: str, names: list[str]) -> pd.DataFrame:
    """Return rows by label as a pandas DataFrame; an ImportError says how to install pandas."""
    try:
        import pandas as pd  # optional, and slow to import
    except ImportError as error:
        msg = "to_frame needs pandas: pip install 'gradiometer[frame]'"
        raise ImportError(msg) from error
    labels = pd.Index(list(rows), name=index, dtype="object")
    return pd.DataFrame(list(rows.values()), index=labels, columns=names)
