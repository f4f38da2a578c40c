"""All contracts: the modules that fill the table. `check_model` imports them when it is first called."""

from gradiometer.checks import (  # noqa: F401 they fill the table
    attention,
    buffers,
    cache,
    configuration,
    dropout,
    first_loss,
    initialization,
    input_gradients,
    modes,
    normalization,
    optimizer,
    order,
    parameter_gradients,
    registered,
    sequence,
    tied_weights,
)
from gradiometer.checks.contract import CONTRACTS

__all__ = ["CONTRACTS"]
