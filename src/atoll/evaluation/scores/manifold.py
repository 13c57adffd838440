"""Precision and recall by nearest neighbors (Kynkaanniemi et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, fraction_of, from_resamples
from .sets import Sets, distances_in_parts, score

K = 3  # the neighbor whose distance is a radius
HALVES = 20  # of the images, for the interval of recall
NEAREST = 32  # neighbors looked at; that fewer than three of them are in a half happens once in a million


@score("precision", format=".1%")
def precision(sets: Sets) -> Estimate:
    """Fraction of generated images within the third-neighbor radius of some real one."""
    real = sets.real.some
    whole = torch.ones(1, len(real), dtype=torch.bool)
    return fraction_of(covered(sets.features, real, radii_within(real, whole))[0])


@score("recall", format=".1%")
def recall(sets: Sets) -> Estimate:
    """Fraction of real images within the third-neighbor radius of some generated one.

    What halves of the images find spreads as much as what fresh sets find (tested). Leaving out fewer would make the
    interval half as wide again, for what one ball loses the next one has.
    """
    radii = radii_within(sets.features, whole_and_halves(len(sets.features)))
    whole, *halves = covered(sets.real.some, sets.features, radii).double().mean(1).tolist()
    return from_resamples(whole, halves, most=1.0)


def covered(points: Tensor, centers: Tensor, radii: Tensor) -> Tensor:
    """Which points lie in at least one ball, bool [R, N], for each of R sets of radii [R, M] of the M centers."""
    inside = [torch.stack([(d <= some).any(1) for some in radii]) for _, d in distances_in_parts(points, centers)]
    return torch.cat(inside, 1)


def whole_and_halves(count: int) -> Tensor:
    """All of `count` images, then random halves of them, always the same: bool [1 + HALVES, count]."""
    numbers = torch.Generator().manual_seed(count)
    halves = [torch.randperm(count, generator=numbers) >= count // 2 for _ in range(HALVES)]
    return torch.stack([torch.ones(count, dtype=torch.bool), *halves])


def radii_within(points: Tensor, subsets: Tensor) -> Tensor:
    """The distance of each point to its K-th nearest other one within each subset bool [S, N]; -1 of one left out."""
    found = []
    for rows, distance in distances_in_parts(points, points):
        near = distance.topk(min(NEAREST, len(points)), largest=False)
        radii = []
        for some in subsets.to(points.device):
            rank = some[near.indices].cumsum(1).clamp(max=K + 1)  # a point is its own nearest
            radius = near.values.gather(1, rank.argmax(1, keepdim=True))[:, 0]  # the first that has the highest rank
            radii.append(radius.where(some[rows], -1.0))
        found.append(torch.stack(radii))
    return torch.cat(found, 1)
