"""Numbers with intervals.

An interval holds the number 19 times of 20, had other images been generated, from other noise and for other prompts of
the same kind, and compared with the same real images. A Frechet distance is resampled for it with replacement. Where
images are compared with each other some are left out instead: one drawn twice would be its own neighbor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 1.96  # standard errors either side: 95 % of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """A number and the ends of its interval, None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None


def around(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def fraction_of(outcomes: Tensor) -> Estimate:
    """The fraction of images bool [N] that are so, with Wilson's interval: it is honest near none and near all, too."""
    n, fraction, z2 = len(outcomes), outcomes.double().mean().item(), WIDTH**2
    middle = (fraction + z2 / (2 * n)) / (1 + z2 / n)
    half = WIDTH / (1 + z2 / n) * math.sqrt(fraction * (1 - fraction) / n + z2 / (4 * n * n))
    return Estimate(fraction, min(fraction, middle - half), max(fraction, middle + half))


def mean_of(values: Tensor) -> Estimate:
    """The mean over images [N], with 1.96 standard errors either side; of one alone without."""
    mean, n = values.double().mean().item(), len(values)
    return Estimate(mean) if n < 2 else around(mean, WIDTH * values.double().std().item() / math.sqrt(n))


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
    return around(value, WIDTH * (len(without) - 1) ** 0.5 * without.double().std(correction=0).item())


def from_resamples(value: float, resampled: Sequence[float]) -> Estimate:
    """A number that is not negative, and what it is of sets drawn with replacement: only their spread counts."""
    half = WIDTH * torch.tensor(resampled, dtype=torch.float64).std().item()
    return Estimate(value, max(0.0, value - half), value + half)


def mean_over_seeds(found: Sequence[Estimate]) -> Estimate:
    """The mean over sets of images from different seeds, with Student's interval; of one set its own."""
    if len(found) == 1:
        return found[0]
    from scipy.stats import t as student  # slow to import

    values = torch.tensor([one.value for one in found], dtype=torch.float64)
    half = float(student.ppf(0.975, len(found) - 1)) * values.std().item() / math.sqrt(len(found))
    return around(values.mean().item(), half)
