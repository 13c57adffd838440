"""Precision and recall by nearest neighbors (Kynkaanniemi et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, fraction_of
from .sets import Sets, distances_in_parts, score

K = 3  # the neighbor whose distance is a radius


@score("precision", format=".1%")
def precision(sets: Sets) -> Estimate:
    """Fraction of generated images within the third-neighbor radius of some real one."""
    return fraction_of(covered(sets.features, sets.real.some))


@score("recall", format=".1%")
def recall(sets: Sets) -> float:
    """Fraction of real images within the third-neighbor radius of some generated one. It has no interval of its own:
    what one generated image loses its neighbor has.
    """
    return covered(sets.real.some, sets.features).double().mean().item()


def covered(points: Tensor, centers: Tensor) -> Tensor:
    """Which points are within the radius of at least one center, bool [N]."""
    nearest = min(K + 1, len(centers))  # a center is its own nearest
    own = [d.topk(nearest, largest=False).values[:, -1] for _, d in distances_in_parts(centers, centers)]
    radii = torch.cat(own)
    return torch.cat([(d <= radii).any(1) for _, d in distances_in_parts(points, centers)])
