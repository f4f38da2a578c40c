"""Pack the columns of one rank for a sum and a maximum over all ranks, and unpack the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gradiometer.columns import TENSORS
from gradiometer.distributed import calls, collectives
from gradiometer.distributed.replicas import NUM_SUMMED

if TYPE_CHECKING:
    from gradiometer.columns import Schema
    from gradiometer.distributed.agreement import Agreement

# width of the summed matrix after any rank has reduced fingerprints or pairs
_WIDE: Final = TENSORS.num_sums + NUM_SUMMED

# code of a row that a rank has measured and found finite; less than the code of any rank
_MEASURED: Final = 0.5


def is_wide(schema: Schema) -> bool:
    """Whether the summed matrix of a schema is wider than that of tensors."""
    return not is_apart(schema) and schema.num_sums > TENSORS.num_sums


def is_apart(schema: Schema) -> bool:
    """Whether the columns of a schema merge in further collectives, after the calls were compared."""
    num_tops = schema.width - schema.num_sums
    return schema.dtype != torch.float64 or schema.num_sums > _WIDE or num_tops != 1


class Reduced(NamedTuple):
    """The result of `Ranks.reduce`.

    ``columns``: ``(T, C)`` of the schema's dtype. ``origin``: ``(T,) float64``, the first rank, by its index
    in the group, that has a NaN or Inf in its part or copy, whether counted or not; -1: none; -2: no rank
    that counts this row has measured it; -3 in every row: the calls differ; -4 - i: the arguments
    ``ARGUMENTS[i]`` differ.
    ``fingerprints``: ``(T, 3) int64``, of whole tensors; -1 bytes if they cannot be had from those of the
    parts. ``diverged``: ``(T,) bool``, whether ranks that hold the same part or copy have different bits.
    """

    columns: Tensor
    origin: Tensor
    fingerprints: Tensor | None = None
    diverged: Tensor | None = None


def pack(agreement: Agreement, schema: Schema, names: tuple[str, ...], columns: Tensor) -> Tensor:
    """Return this rank's contribution to all rows, ``(T, C + 1) float64``.

    The last column is a code: the maximum over the ranks tells which rank has a NaN or Inf, see `origins`.
    """
    # the first rank's code is the largest; the code of a measured row is above 0
    is_bad = columns.new_zeros(len(columns), dtype=torch.bool)
    if "n_nonfinite" in schema:
        is_bad = schema.value(columns, "n_nonfinite") > 0
    code = torch.where(is_bad.unsqueeze(1), float(agreement.size - agreement.rank), 0.0)
    if is_apart(schema):
        columns = columns.new_zeros((len(columns), TENSORS.width), dtype=torch.float64)
    rows = agreement.to_rows(names, torch.cat([columns, torch.full_like(code, _MEASURED)], dim=1))
    # copies that are not counted report a NaN too: the others may not have it
    code = torch.maximum(rows[:, -1:], agreement.spread(names, code))
    return torch.cat([rows[:, :-1], code], dim=1)


def origins(size: int, code: Tensor) -> Tensor:
    """Return the origins of `Reduced` for the codes of `pack`, merged over ``size`` ranks."""
    return torch.where(code >= 1, size - code, torch.where(code > 0, -1.0, -2.0))


def merge(
    agreement: Agreement,
    checker: calls.CallChecker,
    call: calls.Call,
    schema: Schema,
    rows: Tensor,
    bits: Tensor | None,
    *,
    widened: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns, origins and bits, merged over the ranks by one sum and one maximum.

    ``rows``: the result of `pack`. ``bits``: ``(T, 10) float64``, see `Replicas`. ``widened``: whether
    fingerprints or pairs have been reduced, now or before.
    """
    num_sums = (TENSORS if is_apart(schema) else schema).num_sums
    sums, tops = rows[:, :num_sums], rows[:, num_sums:]
    if bits is not None:
        sums = torch.cat([sums, bits], dim=1)
    if widened:
        # of one size, whatever each rank reduces: Gloo aborts if sizes differ
        sums = torch.cat([sums, sums.new_zeros((len(sums), _WIDE - sums.shape[1]))], dim=1)
    tops = torch.cat([tops, *checker.rows(agreement, call, tops)])
    parts = [(sums, "sum"), (tops, "max")]
    sums, tops = collectives.all_reduce_pair(parts, agreement.group, agreement.timeout)
    # first the call itself, then its arguments
    differ = calls.differ(tops[len(rows) :])
    tops = tops[: len(rows)]
    columns = torch.cat([sums[:, :num_sums], tops[:, :1]], dim=1)
    origin = origins(agreement.size, tops[:, 1])
    if not torch.compiler.is_compiling() and tops.device.type == "cpu":
        if bool(differ.any()):
            raise checker.error(agreement, call) from call.failure
    else:
        columns = torch.where(differ.any(), torch.nan, columns)
        origin = torch.where(differ.any(), -3.0 - differ.to(torch.uint8).argmax(), origin)
    if call.failure is not None:
        raise call.failure
    return columns, origin, sums[:, num_sums:]
