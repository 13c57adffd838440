"""Precision and recall by nearest neighbours (Kynkaanniemi et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .sets import Sets, distances_in_parts, neighbour_radii, score


@score("manifold", written={"precision": ".1%", "recall": ".1%"})
def precision_and_recall(sets: Sets) -> dict[str, float]:
    """precision: share of generated images within the third-neighbour radius of some real one; recall: the reverse."""
    return {
        "precision": share_inside(sets.features, sets.real, neighbour_radii(sets.real)),
        "recall": share_inside(sets.real, sets.features, sets.generated_radii),
    }


def share_inside(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    """Share of points that lie in at least one ball."""
    inside = [(d <= radii).any(1) for _, d in distances_in_parts(points, centres)]
    return torch.cat(inside).float().mean().item()
