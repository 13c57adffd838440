"""Frechet distance of Gaussians fitted to features, with bootstrap intervals.

|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), where tr (C_a C_b)^(1/2) is the sum of the square roots of the
eigenvalues of R C_a R with R = C_b^(1/2): symmetric, so that singular covariances need no special care. R belongs to
the reference and is made once; R C_a R is the covariance of the features times R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sets import Sets, score

Array = NDArray[np.floating]
ROWS = 16384  # of a set that are taken at a time for its covariance


@dataclass(frozen=True, eq=False)
class FrechetReference:
    """The real side: mean [D], trace of the covariance, and its root [D, D]."""

    mean: Array
    trace: float
    root: Array

    @staticmethod
    def of(features: Array) -> FrechetReference:
        if len(features) < 2:
            raise ValueError(f"a Frechet distance needs at least two samples in each set, got {len(features)}")
        mean, covariance = moments(features)
        values, vectors = np.linalg.eigh(covariance)
        root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        return FrechetReference(mean, float(np.trace(covariance)), root)

    def distance(self, features: Array) -> float:
        return self.distances(features, 0, 0)[0]

    def distances(self, features: Array, resamples: int, seed: int, device: str = "cpu") -> list[float]:
        """The distance, then that of `resamples` sets drawn from the features with replacement; float64 on `device`.

        The draws depend on (seed, number of samples) only: two arms of images from equal noise, resampled alike, give a
        paired interval of their ratio. A set drawn with replacement has a larger distance than the set itself, in every
        arm alike: use their spread, not their mean.
        """
        if len(features) < 2:
            raise ValueError(f"a Frechet distance needs at least two samples in each set, got {len(features)}")
        x, root, mean = (torch.from_numpy(part).to(device, torch.float64) for part in (features, self.root, self.mean))
        turned = x @ root
        numbers = np.random.default_rng(seed)
        weights = [np.full(len(x), 1.0 / len(x))]
        weights += [numbers.multinomial(len(x), weights[0]) / len(x) for _ in range(resamples)]
        return [self._weighted(x, turned, mean, torch.from_numpy(w).to(device)) for w in weights]

    def _weighted(self, x: Tensor, turned: Tensor, real_mean: Tensor, weights: Tensor) -> float:
        """Of a set in which row i counts weights[i]; covariances as of len(x) samples, unbiased."""
        unbiased = len(x) / (len(x) - 1.0)
        mean, turned_mean = weights @ x, weights @ turned
        trace = unbiased * (weights @ x.square().sum(1) - mean @ mean)
        second = (turned * weights[:, None]).T @ turned
        covariance = unbiased * (second - torch.outer(turned_mean, turned_mean))
        cross = torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum()
        return float((mean - real_mean).square().sum() + trace + self.trace - 2.0 * cross)


def moments(features: Array) -> tuple[Array, Array]:
    """Mean [D] and unbiased covariance [D, D] of features [N, D] in float64, of which no copy in float64 is made."""
    parts = [features[start : start + ROWS] for start in range(0, len(features), ROWS)]
    mean = np.sum([part.sum(0, dtype=np.float64) for part in parts], axis=0) / len(features)
    covariance = np.zeros((len(mean), len(mean)))
    for part in parts:
        centred = part.astype(np.float64) - mean
        covariance += centred.T @ centred
    return mean, covariance / (len(features) - 1)


@score("frechet", written={"frechet": ".4g"})
def frechet(sets: Sets) -> dict[str, float]:
    """Distance of the Gaussians fitted to generated and to real features; zero for equal ones."""
    reference = FrechetReference.of(sets.real.cpu().numpy())
    return {"frechet": reference.distance(sets.features.cpu().numpy())}
