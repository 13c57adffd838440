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


def nearest_distances(points: Tensor, references: Tensor, *, leave_one_out: bool = False) -> Tensor:
    """Euclidean distance of each point to its nearest reference [N].

    With `leave_one_out` the two sets are the same one, and a point is not its own neighbour: what the distance
    would be for fresh samples of the data. Far smaller distances of generated samples mean copies.
    """
    assert not leave_one_out or points.shape == references.shape, "leave-one-out compares a set with itself"
    found = []
    for rows, distance in distances_in_parts(points, references):
        if leave_one_out:
            own = torch.arange(rows.start, rows.stop, device=distance.device)
            distance[own - rows.start, own] = torch.inf
        found.append(distance.min(1).values)
    return torch.cat(found)
