"""Precision and recall by nearest neighbours (Kynkaanniemi et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, halves_of, share_of, within_spread
from .sets import Sets, distances_in_parts, neighbour_radii, score

K = 3  # the neighbour whose distance is a radius
HALVES = 20  # of the images, for the interval of recall
LOOKED_AT = 32  # nearest neighbours; that fewer than three of them are in a half happens once in a million


@score("manifold", written={"precision": ".1%", "recall": ".1%"})
def precision_and_recall(sets: Sets) -> dict[str, float]:
    """precision: share of generated images within the third-neighbour radius of some real one; recall: the reverse.

    Of recall, the share that halves of the images find spreads as much as that of fresh sets does (tested); leaving out
    fewer would make its interval half as wide again, for what one ball loses the next one has.
    """
    near_real = covered(sets.features, sets.real, neighbour_radii(sets.real, K)[None])
    whole, *halves = covered(sets.real, sets.features, radii_in_halves(sets.features)).double().mean(1).tolist()
    recall = within_spread(whole, halves)
    recall = Estimate(whole, max(0.0, recall.low), min(1.0, recall.high))
    return {"precision": share_of(near_real[0]), "recall": recall}


def covered(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    """Which points lie in at least one ball, bool [R, N], for each of R sets of radii [R, M] of the M centres."""
    inside = [torch.stack([(d <= some).any(1) for some in radii]) for _, d in distances_in_parts(points, centres)]
    return torch.cat(inside, 1)


def radii_in_halves(points: Tensor) -> Tensor:
    """The radii of all points, then those within halves of them [1 + HALVES, N]; of a point left out, -1."""
    halves = halves_of(len(points), HALVES).to(points.device)
    found = []
    for rows, distance in distances_in_parts(points, points):
        near = distance.topk(min(LOOKED_AT, len(points)), largest=False)
        radii = []
        for some in (torch.ones_like(halves[0]), *halves):
            rank = some[near.indices].cumsum(1).clamp(max=K + 1)  # a point is its own nearest
            radius = near.values.gather(1, rank.argmax(1, keepdim=True))[:, 0]  # the first that has the highest rank
            radii.append(radius.where(some[rows], -1.0))
        found.append(torch.stack(radii))
    return torch.cat(found, 1)
