"""Frechet distance of Gaussians fitted to features: FID where the features are Inception's.

|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), where tr (C_a C_b)^(1/2) is the sum of the square roots of the
eigenvalues of R C_a R with R = C_b^(1/2): symmetric, so that singular covariances need no special care.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .estimate import Estimate, from_resamples
from .sets import Sets, score

RESAMPLES = 20  # sets drawn with replacement


@score("fd", title="FD", format=".4g")
def frechet_distance(sets: Sets) -> Estimate:
    """Frechet distance of the Gaussians fitted to the features of generated and of all real images. Biased upward
    where images are few: compare equal numbers only.

    The draws depend on the number of images only, so that two configurations are resampled alike. A resample has a
    larger distance than the set itself: only the spread of resamples counts.
    """
    mean, covariance = sets.real.moments
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    features = sets.features.double()
    turned, squares = features @ root, features.square().sum(1)
    counts = draws(len(features))

    def distance(weights: Tensor) -> float:
        """Of a set in which row i counts weights[i]."""
        unbiased = len(features) / (len(features) - 1.0)
        own_mean = weights @ features
        own_trace = unbiased * (weights @ squares - own_mean @ own_mean)
        centered = (turned - weights @ turned) * (unbiased * weights).sqrt()[:, None]
        product = centered @ centered.T if len(features) < features.shape[1] else centered.T @ centered
        shared = torch.linalg.eigvalsh(product).clamp(min=0).sqrt().sum()
        return float((own_mean - mean).square().sum() + own_trace + covariance.trace() - 2.0 * shared)

    whole, *resampled = (distance(weights.to(features)) for weights in counts)
    return from_resamples(whole, resampled)


def draws(count: int) -> Tensor:
    """Weights of `count` images, summing to 1: of the set itself, then of resamples. float64 [1 + RESAMPLES, count]."""
    numbers = torch.Generator().manual_seed(count)
    picked = torch.randint(count, (RESAMPLES, count), generator=numbers)
    resampled = torch.zeros(RESAMPLES, count, dtype=torch.float64).scatter_add_(
        1, picked, torch.ones(picked.shape, dtype=torch.float64)
    )
    return torch.cat([torch.ones(1, count, dtype=torch.float64), resampled]) / count
