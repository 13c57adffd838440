"""How different the images of one prompt are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .sets import Sets, score


@score("diversity")
def diversity(sets: Sets) -> dict[str, float]:
    """Mean cosine distance of features between two images of the same prompt or class, over all such pairs.

    From the sum of a group's unit vectors: |sum|^2 = n + 2 sum over pairs of cosines.
    """
    if sets.asked is None:
        return {}
    unit = F.normalize(sets.features.double(), dim=1)
    groups, place = torch.unique(sets.asked, return_inverse=True)
    sums = torch.zeros(len(groups), unit.shape[1], dtype=unit.dtype, device=unit.device).index_add_(0, place, unit)
    sizes = torch.bincount(place, minlength=len(groups)).double()
    pairs = sizes * (sizes - 1.0)
    if not bool((pairs > 0).any()):
        return {}
    cosines = sums.square().sum(1) - sizes
    return {"diversity": 1.0 - (cosines.sum() / pairs.sum()).item()}
