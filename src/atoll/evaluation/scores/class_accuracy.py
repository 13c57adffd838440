"""Whether images show the class that was asked for."""

from __future__ import annotations

import torch

from .estimate import Estimate, fraction_of
from .sets import Sets, score


@score("class_accuracy", format=".1%")
def class_accuracy(sets: Sets) -> Estimate | None:
    """Fraction of images that a classifier of the real features takes for the class of their prompt."""
    if sets.labels is None or sets.real.classifier is None or not bool((named := sets.labels >= 0).any()):
        return None
    predicted = torch.from_numpy(sets.real.classifier.predict(sets.features[named].cpu().numpy()))
    return fraction_of(predicted == sets.labels[named].cpu())
