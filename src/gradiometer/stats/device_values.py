"""The values of stats as tensors on the device of their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gradiometer.columns import Schema


class DeviceValue:
    """A read-only attribute of stats: a column or derived value of each row, described by the schema."""

    def __init__(self, schema: Schema, name: str) -> None:
        self._name = name
        dtype = str(schema.dtype).removeprefix("torch.")
        self.__doc__ = f"{schema[name].meaning}, ``(T,) {dtype}``."

    def __get__(self, stats: Any, owner: type) -> Any:
        return self if stats is None else stats.schema.value(stats.columns, self._name)


class TensorValues:
    """The types of the values of tensors; `NamedStats` makes an attribute of each name of a schema."""

    numel: Tensor
    sumsq: Tensor
    sum: Tensor
    n_zero: Tensor
    n_nan: Tensor
    n_posinf: Tensor
    n_neginf: Tensor
    abs_max: Tensor
    n_inf: Tensor
    n_nonfinite: Tensor
    finite_norm: Tensor
    norm: Tensor
    rms: Tensor
    mean: Tensor
    std: Tensor
    zero_fraction: Tensor


class ActivationValues(TensorValues):
    """The types of the values of activations."""

    sum4: Tensor
    n_channels: Tensor
    n_zero_channels: Tensor
    n_calls: Tensor
    outlier_ratio: Tensor
    kurtosis: Tensor
    zero_channel_fraction: Tensor


class PairValues:
    """The types of the values of pairs."""

    numel: Tensor
    sumsq_a: Tensor
    sumsq_b: Tensor
    dot_ab: Tensor
    sumsq_u: Tensor
    sum_u: Tensor
    n_unchanged: Tensor
    sumsq_g: Tensor
    dot_ug: Tensor
    n_nonzero_g: Tensor
    n_stuck: Tensor
    n_nan: Tensor
    n_posinf: Tensor
    n_neginf: Tensor
    n_inf: Tensor
    n_nonfinite: Tensor
    abs_max_u: Tensor
    norm_a: Tensor
    norm_b: Tensor
    norm_u: Tensor
    norm_g: Tensor
    rms_u: Tensor
    update_ratio: Tensor
    cosine: Tensor
    descent_cosine: Tensor
    unchanged_fraction: Tensor
    stuck_fraction: Tensor


class ExponentValues:
    """The types of the values of histograms."""

    numel: Tensor
    n_zero: Tensor
    n_inf: Tensor
    n_nan: Tensor
    n_nonfinite: Tensor
    min_exponent: Tensor
    max_exponent: Tensor
