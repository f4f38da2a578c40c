"""The best linear estimates of the gradient noise scale's two parts, as a general least-squares problem."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def least_squares(squares: Tensor, own: int, size: int, micro_batches: int) -> Tensor:
    """Return the best linear unbiased estimates of |G|² and tr(Σ) / b for normal noise and G = 0.

    ``squares``: the means over ``size`` ranks of the squared norms of ``own`` running sums, then that of the
    sum over all ranks. The covariance of |x|² and |y|² is proportional to the square of that of x and y.
    """
    k = torch.arange(1, own + 1, dtype=F64)
    n = size * micro_batches
    means = torch.stack([torch.cat([k, k.new_tensor([n])]) ** 2, torch.cat([k, k.new_tensor([n])])], dim=1)
    covariance = torch.empty(own + 1, own + 1, dtype=F64)
    covariance[:own, :own] = torch.minimum(k[:, None], k[None]) ** 2 / size
    covariance[own, :own] = covariance[:own, own] = k**2
    covariance[own, own] = n**2
    weighted = torch.linalg.solve(covariance, means).T
    return torch.linalg.solve(weighted @ means, weighted @ squares)
