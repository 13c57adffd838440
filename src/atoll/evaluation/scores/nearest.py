"""How near the training images are: copies show as distances far below those between real images."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, median_of
from .sets import Sets, distances_in_parts, score


@score("nearest")
def nearest(sets: Sets) -> Estimate:
    """Median feature distance of an image to its nearest training image. Good images (by FD) that are far nearer than
    real ones are copies; blurred images are near to everything.
    """
    return median_of(nearest_distances(sets.features, sets.real.train))


def nearest_distances(points: Tensor, references: Tensor) -> Tensor:
    """Euclidean distance of each point to its nearest reference [N]."""
    # which is nearest is found fast, how near it is exactly: squares that cancel would leave noise of a copy's zero
    parts = distances_in_parts(points, references)
    return torch.cat([(points[rows] - references[distance.argmin(1)]).norm(dim=1) for rows, distance in parts])
