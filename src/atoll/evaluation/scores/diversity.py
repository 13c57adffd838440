"""How different the images of one prompt are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .estimate import Estimate, jackknifed
from .sets import Sets, score


@score("diversity")
def diversity(sets: Sets) -> Estimate | None:
    """Mean cosine distance of features between two images of the same prompt, over all such pairs.

    With unit vectors u and their sum s in a group, |s|^2 is the sum of |u|^2 and twice the cosines of all pairs. |u| is
    1, but of features that are all 0, as those of a black image.
    """
    if sets.groups is None:
        return None
    unit = F.normalize(sets.features.double(), dim=1)
    groups, place = torch.unique(sets.groups, return_inverse=True)
    sums = torch.zeros(len(groups), unit.shape[1], dtype=unit.dtype, device=unit.device).index_add_(0, place, unit)
    sizes = torch.bincount(place, minlength=len(groups)).double()
    pairs = (sizes * (sizes - 1.0)).sum()
    if pairs == 0:
        return None
    squares = unit.square().sum(1)
    cosines = sums.square().sum() - squares.sum()
    own_cosines = 2.0 * ((unit * sums[place]).sum(1) - squares)  # of the pairs an image is in
    own_pairs = 2.0 * (sizes[place] - 1.0)
    value = 1.0 - (cosines / pairs).item()
    if bool((own_pairs == pairs).any()):  # one pair in all
        return Estimate(value)
    return jackknifed(value, 1.0 - (cosines - own_cosines) / (pairs - own_pairs))
