"""Metrics on feature vectors [N, D]. Each is a plain function of two sets; no state, no sampling, no files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float64]


def frechet_distance(a: Features, b: Features) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)): the distance of the Gaussians fitted to two sets.

    tr (C_a C_b)^(1/2) is the sum of the square roots of the eigenvalues of C_a^(1/2) C_b C_a^(1/2), which is
    symmetric, so that singular covariances (pixels that are always black) need no special care.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"a Frechet distance needs at least two samples in each set, got {len(a)} and {len(b)}")
    mean_a, mean_b = a.mean(0), b.mean(0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(np.atleast_2d(cov_a))
    root_a = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root_a @ np.atleast_2d(cov_b) @ root_a).clip(0)).sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(np.atleast_2d(cov_a + cov_b)) - 2.0 * cross)


def nearest_distances(samples: Features, references: Features, *, leave_one_out: bool = False) -> Features:
    """Euclidean distance of each sample to its nearest reference [N].

    With `leave_one_out` the two sets are the same one, and a point is not its own neighbour: what the distance
    would be for fresh samples of the data. Far smaller distances of generated samples mean copies.
    """
    squares = (samples**2).sum(1)[:, None] + (references**2).sum(1)[None] - 2.0 * samples @ references.T
    if leave_one_out:
        assert samples.shape == references.shape, "leave-one-out compares a set with itself"
        np.fill_diagonal(squares, np.inf)
    nearest: Features = np.sqrt(squares.min(1).clip(0))
    return nearest


@dataclass(frozen=True)
class Recogniser:
    """A classifier fitted on real features, and how often it is right on real ones it has not seen."""

    model: object
    accuracy: float

    @staticmethod
    def fitted(features: Features, labels: NDArray[np.int64]) -> Recogniser:
        from sklearn.model_selection import cross_val_score  # slow to import
        from sklearn.svm import SVC

        # features as they are: standardising would blow up the faintest noise in a pixel that is always black
        model = SVC(C=10.0)
        accuracy = float(cross_val_score(model, features, labels, cv=5).mean())
        return Recogniser(model.fit(features, labels), accuracy)

    def share_right(self, features: Features, wanted: NDArray[np.int64]) -> float:
        """Share of samples recognised as what was asked for."""
        return float((self.model.predict(features) == wanted).mean())  # type: ignore[attr-defined]
