"""Numbers that know how far chance may have moved them.

An interval says where the number would lie, 19 times of 20, had other images been painted, from other noise and for
other prompts of the same kind, and held against the same real images. A Frechet distance is resampled for it with
replacement. Where images are compared with each other some are left out instead: one drawn twice would be its own
neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 1.96  # standard errors either side: 95 % of a normal distribution


class Estimate(float):
    """A number with the ends of its interval; a number like any other to whoever does not ask for them."""

    low: float
    high: float

    def __new__(cls, value: float, low: float, high: float) -> Estimate:
        estimate = super().__new__(cls, value)
        estimate.low, estimate.high = low, high
        return estimate


def share_of(outcomes: Tensor) -> Estimate:
    """The share of images [N] that are so, with Wilson's interval: it is honest near nothing and near all, too."""
    n, share, z2 = len(outcomes), outcomes.double().mean().item(), WIDTH**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = WIDTH / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Estimate(share, min(share, middle - half), max(share, middle + half))


def mean_of(values: Tensor) -> Estimate | float:
    """The mean over images [N], with 1.96 standard errors either side; of one alone without."""
    mean, n = values.double().mean().item(), len(values)
    if n < 2:
        return mean
    half = WIDTH * values.double().std().item() / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def median_of(values: Tensor) -> Estimate:
    """The median over images [N] (of two in the middle the lower), between the values whose ranks hold it."""
    ordered, n = values.sort().values, len(values)
    reach = WIDTH * math.sqrt(n) / 2  # the number of values below the true median is binomial
    low, high = max(0, math.floor((n - 1) / 2 - reach)), min(n - 1, math.ceil((n - 1) / 2 + reach))
    return Estimate(values.median().item(), ordered[low].item(), ordered[high].item())


def jackknifed(value: float, without: Tensor) -> Estimate:
    """A number, and what it is without each image in turn [N].

    Its variance is (N - 1) / N times the sum of their squared differences from their mean (Quenouille, Tukey).
    """
    spread = (len(without) - 1) ** 0.5 * without.double().std(correction=0).item()
    return Estimate(value, value - WIDTH * spread, value + WIDTH * spread)


def within_spread(value: float, resampled: Sequence[float]) -> Estimate:
    """A number, and what it is of resamples: sets drawn with replacement, or halves of the set.

    Those are larger or smaller alike, so that only their spread counts.
    """
    half = WIDTH * torch.tensor(resampled, dtype=torch.float64).std().item()
    return Estimate(value, value - half, value + half)


def halves_of(count: int, many: int) -> Tensor:
    """So many halves of `count` images, drawn by chance, always the same: bool [many, count]."""
    numbers = torch.Generator().manual_seed(count)
    return torch.stack([torch.randperm(count, generator=numbers) >= count // 2 for _ in range(many)])
