"""How different the images of one prompt are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .estimate import jackknifed
from .sets import Sets, score


@score("diversity")
def diversity(sets: Sets) -> dict[str, float]:
    """Mean cosine distance of features between two images of the same prompt or class, over all such pairs.

    From the sum s of a group's unit vectors: |s|^2 = n + 2 times the sum over pairs of cosines. Without the image u it
    is |s - u|^2 of n - 1.
    """
    if sets.asked is None:
        return {}
    unit = F.normalize(sets.features.double(), dim=1)
    groups, place = torch.unique(sets.asked, return_inverse=True)
    sums = torch.zeros(len(groups), unit.shape[1], dtype=unit.dtype, device=unit.device).index_add_(0, place, unit)
    sizes = torch.bincount(place, minlength=len(groups)).double()
    pairs = (sizes * (sizes - 1.0)).sum()
    if pairs == 0:
        return {}
    cosines = (sums.square().sum(1) - sizes).sum()
    own_cosines = 2.0 * ((unit * sums[place]).sum(1) - 1.0)  # of the pairs an image is in
    own_pairs = 2.0 * (sizes[place] - 1.0)
    value = 1.0 - (cosines / pairs).item()
    if bool((own_pairs == pairs).any()):  # one pair in all
        return {"diversity": value}
    return {"diversity": jackknifed(value, 1.0 - (cosines - own_cosines) / (pairs - own_pairs))}
