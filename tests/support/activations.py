"""The columns of activations by their definitions, and a model that taps its input."""

import torch
from torch import nn

import gradiometer as gm
from gradiometer.columns import ACTIVATION_COLUMNS, ACTIVATIONS


def columns_of(x, channel_dim=-1):
    """Return the columns of one call, by the definitions."""
    x = x.detach()
    wide = (torch.view_as_real(x) if x.is_complex() else x).double().flatten()
    finite = wide[wide.isfinite()]
    channels = x.movedim(channel_dim, 0).reshape(x.shape[channel_dim], -1) if x.dim() else x.view(1, 1)
    return {
        "numel": wide.numel(),
        "sumsq": float((finite**2).sum()),
        "sum": float(finite.sum()),
        "n_zero": int((wide == 0).sum()),
        "n_nan": int(wide.isnan().sum()),
        "n_posinf": int((wide == torch.inf).sum()),
        "n_neginf": int((wide == -torch.inf).sum()),
        "sum4": float((finite**4).sum()),
        "n_channels": len(channels),
        "n_zero_channels": int((channels == 0).all(dim=1).sum()),
        "n_calls": 1,
        "abs_max": float(finite.abs().max()) if len(finite) else 0.0,
    }


def merged(calls):
    """Return the columns of several calls."""
    return {
        column.name: (sum if column.merge == "sum" else max)([call[column.name] for call in calls])
        for column in ACTIVATION_COLUMNS
    }


def agree(row, expected, tolerance=1e-12):
    assert set(expected) == set(ACTIVATIONS.index)
    for name, value in expected.items():
        # a sum of n numbers of either sign loses at most n ulp of the sum of magnitudes
        scale = (expected["numel"] * expected["sumsq"]) ** 0.5 if name == "sum" else abs(value)
        assert abs(float(row[ACTIVATIONS.index[name]]) - value) <= tolerance * scale, name


class Calls(nn.Module):
    """Taps its input under each name."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def forward(self, x, **options):
        for name in self.names:
            x = gm.tap(x, name, **options)
        return x


class CallsFunction(nn.Module):
    """A model whose forward pass is a function of its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args):
        self.function(*args)
        return self.weight * 1.0
