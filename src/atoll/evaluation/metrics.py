"""Metrics on feature vectors [N, D]. Each is a plain function of two sets; no state, no sampling, no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .scores.classifier import Classifier
from .scores.estimate import Estimate, share_of
from .scores.frechet import FrechetReference

MOST_FOR_KERNELS = 5000  # samples; a support vector machine takes the square of it
Features = NDArray[np.floating]


def frechet_distance(a: Features, b: Features) -> float:
    """The distance of the Gaussians fitted to two sets: scores/frechet.py has the formula."""
    return FrechetReference.of(b).distance(a)


@dataclass(frozen=True)
class Recogniser:
    """A classifier fitted on real features, and how often it is right on real ones it has not seen."""

    model: object
    accuracy: float

    @staticmethod
    def fitted(features: Features, labels: NDArray[np.int64]) -> Recogniser:
        if len(features) > MOST_FOR_KERNELS:
            rows = np.arange(len(features))
            unseen = rows % 5 == 0  # rows are in the order of hashes: any slice is a random sample
            part = LinearModel.fitted(features[~unseen], labels[~unseen])
            accuracy = float((part.predict(features[unseen]) == labels[unseen]).mean())
            return Recogniser(LinearModel.fitted(features, labels), accuracy)
        from sklearn.model_selection import cross_val_score  # slow to import
        from sklearn.svm import SVC

        # features as they are: standardising would blow up the faintest noise in a pixel that is always black
        model = SVC(C=10.0)
        accuracy = float(cross_val_score(model, features, labels, cv=5).mean())
        return Recogniser(model.fit(features, labels), accuracy)

    def share_right(self, features: Features, wanted: NDArray[np.int64]) -> Estimate:
        """Share of samples recognised as what was asked for."""
        return share_of(torch.from_numpy(self.model.predict(features) == wanted))  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A linear classifier with scikit-learn's manner, for sets that are too large for its kernels."""

    classifier: Classifier
    classes: NDArray[np.int64]

    @staticmethod
    def fitted(features: Features, labels: NDArray[np.int64]) -> LinearModel:
        classes, place = np.unique(labels, return_inverse=True)
        return LinearModel(
            Classifier.fitted(torch.from_numpy(features).float(), torch.from_numpy(place), len(classes)), classes
        )

    def predict(self, features: Features) -> NDArray[np.int64]:
        ranked = self.classifier.ranked(torch.from_numpy(features).float(), 1)
        found: NDArray[np.int64] = self.classes[ranked[:, 0].numpy()]
        return found
