"""How near the training images are: copies show as distances far below those between real images."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import median_of
from .sets import Sets, distances_in_parts, score


@score("nearest", written={"nearest_median": ".2f", "nearest_median_real": ".2f"})
def nearest(sets: Sets) -> dict[str, float]:
    """Median distance of a generated image to its nearest training image, and that of unseen real ones."""
    if sets.train is None:
        return {}
    return {
        "nearest_median": median_of(nearest_distances(sets.features, sets.train)),
        "nearest_median_real": nearest_distances(sets.real, sets.train).median().item(),
    }


def nearest_distances(points: Tensor, references: Tensor, *, leave_one_out: bool = False) -> Tensor:
    """Euclidean distance of each point to its nearest reference [N].

    With `leave_one_out` the points are the first of the references, and a point is not its own neighbour: what the
    distance would be for fresh samples of the data. Far smaller distances of generated samples mean copies.
    """
    found = []
    for rows, distance in distances_in_parts(points, references):
        if leave_one_out:
            own = torch.arange(rows.start, rows.stop, device=distance.device)
            distance[own - rows.start, own] = torch.inf
        # which is nearest is found fast, how near it is exactly: squares that cancel would leave noise of a copy's zero
        found.append((points[rows] - references[distance.argmin(1)]).norm(dim=1))
    return torch.cat(found)
