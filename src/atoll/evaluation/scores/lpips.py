"""How different the images of one prompt look: LPIPS, where its weights can be had (`atoll evaluate --lpips`)."""

from __future__ import annotations

from .estimate import mean_of
from .sets import Sets, score


@score("lpips")
def lpips(sets: Sets) -> dict[str, float]:
    """Mean LPIPS between two images of the same prompt, over pairs that share no image; more is more varied."""
    if sets.apart is None or not bool((paired := ~sets.apart.isnan()).any()):
        return {}
    return {"lpips": mean_of(sets.apart[paired])}
