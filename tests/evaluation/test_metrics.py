"""Metrics against scipy and against sets whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm

from atoll.evaluation.evaluate import against_monolith
from atoll.evaluation.metrics import Classifier, frechet_distance

RNG = np.random.default_rng(0)


def test_frechet_agrees_with_scipys_matrix_root() -> None:
    a, b = RNG.normal(size=(500, 8)) @ RNG.normal(size=(8, 8)), RNG.normal(size=(400, 8)) + 0.3
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * sqrtm(cov_a @ cov_b).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_frechet_of_shifted_and_scaled_gaussians_is_the_closed_form() -> None:
    a = RNG.normal(size=(100_000, 3))
    assert frechet_distance(a, 2.0 * a + 1.0) == pytest.approx(
        ((a.mean(0) + 1.0) ** 2).sum() + np.trace(np.cov(a.T)), rel=1e-6
    )
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-9)


def test_frechet_takes_pixels_that_are_always_black() -> None:
    a, b = RNG.normal(size=(50, 6)), RNG.normal(size=(50, 6))
    black = np.zeros((50, 3))
    assert frechet_distance(np.hstack([a, black]), np.hstack([b, black])) == pytest.approx(frechet_distance(a, b))


def test_frechet_refuses_one_sample() -> None:
    with pytest.raises(ValueError, match="at least two"):
        frechet_distance(np.zeros((1, 2)), np.zeros((5, 2)))


def test_the_classifier_separates_separate_blobs_and_its_own_limits() -> None:
    labels = np.repeat(np.arange(3), 40)
    features = RNG.normal(size=(120, 2)) + 20.0 * labels[:, None]
    classifier = Classifier.fitted(features, labels)
    assert classifier.accuracy == 1.0
    assert classifier.share_right(features, labels) == 1.0
    assert classifier.share_right(features, (labels + 1) % 3) == 0.0
    noise = Classifier.fitted(RNG.normal(size=(120, 2)), RNG.permutation(labels))
    assert noise.accuracy < 0.6


def test_the_headline_compares_the_first_route_of_the_plan_with_the_monolith() -> None:
    def arm(model: str, route: str | None, frechet: float, router: str | None = None, guidance: float = 1.0) -> dict:
        return {"model": model, "route": route, "frechet": frechet, "router": router, "guidance": guidance}

    arms = [
        arm("ensemble", "top-1", 30.0),
        arm("ensemble", "top-2", 20.0),
        arm("ensemble", "full", 10.0),
        arm("ensemble", "top-2", 5.0, router="router-blind"),
        arm("ensemble", "top-2", 1.0, guidance=2.0),
        arm("monolith", None, 25.0),
    ]
    table = against_monolith(arms)
    assert table == {"guidance 1": {"monolith": 25.0, "ensemble": 30.0, "route": "top-1", "ratio": 1.2}}
    assert against_monolith(arms[:-1]) is None
