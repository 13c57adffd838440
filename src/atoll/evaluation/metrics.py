"""Metrics on feature vectors [N, D]. Each is a plain function of two sets; no state, no sampling, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .scores.estimate import Estimate, share_of
from .scores.frechet import FrechetReference

MOST_FITTED = 5000  # samples; a support vector machine takes the square of it
Features = NDArray[np.floating]


def frechet_distance(a: Features, b: Features) -> float:
    """The distance of the Gaussians fitted to two sets: scores/frechet.py has the formula."""
    return FrechetReference.of(b).distance(a)


@dataclass(frozen=True)
class Classifier:
    """A support vector machine fitted on real features, and its accuracy on real ones it was not fitted on."""

    model: Any
    accuracy: float

    @staticmethod
    def fitted(features: Features, labels: NDArray[np.int64]) -> Classifier:
        """On at most 5,000 samples, drawn with a fixed seed; accuracy by 5-fold cross-validation."""
        from sklearn.model_selection import cross_val_score  # slow to import
        from sklearn.svm import SVC

        rows = np.random.default_rng(0).permutation(len(features))[:MOST_FITTED]
        # features as they are: standardizing would amplify the faint noise of a pixel that is always black
        model = SVC(C=10.0)
        accuracy = float(cross_val_score(model, features[rows], labels[rows], cv=5).mean())
        return Classifier(model.fit(features[rows], labels[rows]), accuracy)

    def share_right(self, features: Features, wanted: NDArray[np.int64]) -> Estimate:
        """Class accuracy: share of samples classified as the class of their prompt."""
        return share_of(torch.from_numpy(self.model.predict(features) == wanted))
