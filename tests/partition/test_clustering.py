"""Two-level k-means: it finds what is there, keeps its bound, and does the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from atoll.artifacts import UserError
from atoll.partition.clustering import cells_for, cluster, rebalance, squared_distances, unit_length


def blobs(sizes: list[int], width: int = 16, spread: float = 0.15, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points around well-separated directions, and which direction each belongs to."""
    generator = np.random.default_rng(seed)
    centres = np.linalg.qr(generator.standard_normal((width, width)))[0][: len(sizes)]
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = centres[truth] + spread * generator.standard_normal((len(truth), width))
    order = generator.permutation(len(truth))
    return points[order].astype(np.float32), truth[order]


def fit(points: np.ndarray, k: int, balance: float | None = None, seed: int = 0) -> np.ndarray:
    made = cluster(points, k, cells=cells_for(len(points), k, 1024), seed=seed, balance=balance, threads=1)
    return made.assign(points, 1)[0]


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_separate_groups_as_sklearn_does(seed: int) -> None:
    points, truth = blobs([300, 200, 250, 150], seed=seed)
    found = fit(points, 4, seed=seed)
    assert adjusted_rand_score(truth, found) > 0.99
    plain = KMeans(4, n_init=4, random_state=seed).fit_predict(unit_length(points))
    assert adjusted_rand_score(plain, found) > 0.99


def test_clusters_are_numbered_by_size() -> None:
    points, _ = blobs([100, 300, 200])
    sizes = np.bincount(fit(points, 3))
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)


@pytest.mark.parametrize("bound", [1.2, 1.5, 2.0, 4.0])
def test_the_bound_on_balance_holds(bound: float) -> None:
    points, truth = blobs([900, 60, 60, 60], spread=0.3)
    free, kept = fit(points, 4), fit(points, 4, balance=bound)
    sizes = np.bincount(kept, minlength=4)
    assert np.bincount(free).max() > 4 * np.bincount(free).min(), "the data must be unbalanced for this to mean much"
    assert sizes.max() <= bound * sizes.min()
    # a loose bound moves less than a tight one
    assert adjusted_rand_score(truth, fit(points, 4, balance=8.0)) >= adjusted_rand_score(truth, kept) - 1e-9


def test_a_bound_that_is_met_changes_nothing() -> None:
    points, _ = blobs([100, 100, 100])
    np.testing.assert_array_equal(fit(points, 3), fit(points, 3, balance=2.0))


def test_rebalancing_takes_the_cheapest_cell() -> None:
    # cells on a line, all in cluster 0 but the last; the one nearest to cluster 1 must go first
    fine = np.array([[0.0], [1.0], [2.0], [3.0], [10.0]], dtype=np.float32)
    moved = rebalance(fine, np.ones(5), np.array([0, 0, 0, 0, 1]), 2, bound=1.5)
    assert moved.tolist() == [0, 0, 0, 1, 1]


def test_one_heavy_cell_cannot_be_balanced() -> None:
    fine = np.eye(3, dtype=np.float32)
    with pytest.raises(UserError, match=r"--balance 2: cannot be reached, the best is 50"):
        rebalance(fine, np.array([100.0, 1.0, 1.0]), np.array([0, 1, 1]), 2, bound=2.0)
    # an aim nobody insisted on: the best there is
    best = rebalance(fine, np.array([100.0, 1.0, 1.0]), np.array([0, 1, 1]), 2, bound=2.0, strict=False)
    assert sorted(np.bincount(best, weights=[100.0, 1.0, 1.0]).tolist()) == [2.0, 100.0]


def test_it_is_the_same_every_time_and_another_with_another_seed() -> None:
    points = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    first, second = (cluster(points, 4, cells=32, seed=1, balance=2.0, threads=1) for _ in range(2))
    np.testing.assert_array_equal(first.fine, second.fine)
    np.testing.assert_array_equal(first.coarse, second.coarse)
    other = cluster(points, 4, cells=32, seed=2, balance=2.0, threads=1)
    assert not np.array_equal(first.fine, other.fine)


def test_a_stranger_goes_to_its_nearest_cell() -> None:
    points, _ = blobs([200, 200, 200])
    made = cluster(points, 3, cells=30, seed=0, balance=None, threads=1)
    strangers = np.random.default_rng(7).standard_normal((50, 16)).astype(np.float32)
    nearest = squared_distances(unit_length(strangers), made.fine).argmin(1)
    np.testing.assert_array_equal(made.assign(strangers, 1)[0], made.coarse[nearest])


@pytest.mark.parametrize(("points", "k"), [(np.ones((50, 4)), 2), (np.eye(4).repeat(10, 0), 5), (np.zeros((9, 3)), 2)])
def test_more_clusters_than_different_samples(points: np.ndarray, k: int) -> None:
    with pytest.raises(UserError, match=rf"-k {k}: there are only \d different training samples"):
        fit(points.astype(np.float32), k)


def test_as_many_clusters_as_samples() -> None:
    assert sorted(fit(np.eye(6, dtype=np.float32), 6).tolist()) == list(range(6))
