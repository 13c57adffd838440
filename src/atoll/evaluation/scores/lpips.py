"""How different the images of one prompt look: LPIPS (`atoll evaluate --lpips`)."""

from __future__ import annotations

from .estimate import Estimate, mean_of
from .sets import Sets, score


@score("lpips", title="LPIPS")
def lpips(sets: Sets) -> Estimate | None:
    """Mean LPIPS between two images of the same prompt, over pairs that share no image; more is more varied."""
    if sets.perceptual is None or sets.images is None or sets.groups is None:
        return None
    apart = sets.perceptual.within_groups(sets.images, sets.groups.tolist())  # [N], nan: the partner of another
    return mean_of(apart[~apart.isnan()]) if not bool(apart.isnan().all()) else None
