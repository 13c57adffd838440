"""How near the training images are: copies show as distances far below those between real images."""

from __future__ import annotations

import torch
from torch import Tensor

from .sets import Sets, distances_in_parts, score


@score("nearest")
def nearest(sets: Sets) -> dict[str, float]:
    """Median distance of a generated image to its nearest training image, and that of unseen real ones."""
    if sets.train is None:
        return {}
    return {
        "nearest_median": nearest_distances(sets.features, sets.train).median().item(),
        "nearest_median_real": nearest_distances(sets.real, sets.train).median().item(),
    }


def nearest_distances(points: Tensor, references: Tensor) -> Tensor:
    """Euclidean distance of each point to its nearest reference [N]."""
    return torch.cat([d.min(1).values for _, d in distances_in_parts(points, references)])
