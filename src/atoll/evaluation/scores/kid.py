"""Kernel distance (KID, Binkowski et al., 2018): unbiased at any number of images, where a Frechet distance is not."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, jackknifed
from .sets import Sets, rows_at_once, score


@score("kid", title="KID")
def kernel_distance(sets: Sets) -> Estimate:
    """Squared maximum mean discrepancy with the kernel (x.y / D + 1)^3, unbiased; may be below zero by chance.

    What it is without image i follows from that image's own sums of kernels.
    """
    a, b = sets.features.double(), sets.real.some.double()
    n, m = len(a), len(b)
    inside, across = others_sums(a), kernel_sums(a, b)  # [n]
    real, all_inside, all_across = others_sums(b).sum() / (m * (m - 1)), inside.sum(), across.sum()
    value = all_inside / (n * (n - 1)) + real - 2.0 * all_across / (n * m)
    if n < 3:
        return Estimate(value.item())
    without = (all_inside - 2.0 * inside) / ((n - 1) * (n - 2)) + real - 2.0 * (all_across - across) / ((n - 1) * m)
    return jackknifed(value.item(), without)


def kernel_sums(a: Tensor, b: Tensor) -> Tensor:
    """The kernels of each row of a with all rows of b, summed [len(a)]."""
    return torch.cat([kernel(part @ b.T, a.shape[1]).sum(1) for part in a.split(rows_at_once(len(b)))])


def others_sums(a: Tensor) -> Tensor:
    """The kernels of each row with all other rows, summed [len(a)]."""
    return kernel_sums(a, a) - kernel(a.square().sum(1), a.shape[1])


def kernel(product: Tensor, width: int) -> Tensor:
    return (product / width + 1.0) ** 3
