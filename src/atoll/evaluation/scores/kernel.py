"""Kernel distance (KID, Binkowski et al., 2018): unbiased at any N, where a Frechet distance is not."""

from __future__ import annotations

import torch
from torch import Tensor

from .sets import Sets, rows_at_once, score


@score("kernel")
def kernel_distance(sets: Sets) -> dict[str, float]:
    """Squared maximum mean discrepancy with the kernel (x.y / D + 1)^3, unbiased; may be below zero by chance."""
    a, b = sets.features.double(), sets.real.double()
    n, m = len(a), len(b)
    own = (kernel_sum(a, a) - diagonal_sum(a)) / (n * (n - 1)) + (kernel_sum(b, b) - diagonal_sum(b)) / (m * (m - 1))
    return {"kernel": own - 2.0 * kernel_sum(a, b) / (n * m)}


def kernel_sum(a: Tensor, b: Tensor) -> float:
    parts = [((part @ b.T / a.shape[1] + 1.0) ** 3).sum() for part in torch.split(a, rows_at_once(len(b)))]
    return torch.stack(parts).sum().item()


def diagonal_sum(a: Tensor) -> float:
    return ((a.square().sum(1) / a.shape[1] + 1.0) ** 3).sum().item()
