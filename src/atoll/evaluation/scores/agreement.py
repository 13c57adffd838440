"""How often a classifier of the real data sees what was asked for."""

from __future__ import annotations

from .estimate import share_of
from .sets import Sets, score


@score("agreement", written={"agreement": ".1%", "agreement_5": ".1%"})
def agreement(sets: Sets) -> dict[str, float]:
    """Share of images whose likeliest class, or one of the five likeliest, is the one asked for."""
    if sets.classifier is None or sets.asked is None:
        return {}
    right = sets.classifier.ranked(sets.features) == sets.asked[:, None]
    return {"agreement": share_of(right[:, 0]), "agreement_5": share_of(right.any(1))}
