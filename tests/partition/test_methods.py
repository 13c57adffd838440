"""Two-level k-means finds what is there, keeps its bound, and does the same every time; the baselines are baselines."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.metrics import adjusted_rand_score

from atoll.artifacts import UserError
from atoll.partition.kmeans import KMeans, rebalance, squared_distances, unit_length
from atoll.partition.methods import Label, Random

NONE = np.zeros(0, dtype=np.int64)


def blobs(sizes: list[int], width: int = 16, spread: float = 0.15, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points around well-separated directions, and which direction each belongs to."""
    generator = np.random.default_rng(seed)
    centers = np.linalg.qr(generator.standard_normal((width, width)))[0][: len(sizes)]
    truth = np.repeat(np.arange(len(sizes)), sizes)
    points = centers[truth] + spread * generator.standard_normal((len(truth), width))
    order = generator.permutation(len(truth))
    return points[order].astype(np.float32), truth[order]


def clusters_of(points: np.ndarray, k: int, seed: int = 0, **options: object) -> np.ndarray:
    method = KMeans.model_validate({"balance": None, **options})
    return method.assign(method.fit(points, NONE, [], k, seed), points, NONE, [])


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_separate_groups_as_sklearn_does(seed: int) -> None:
    points, truth = blobs([300, 200, 250, 150], seed=seed)
    found = clusters_of(points, 4, seed=seed)
    assert adjusted_rand_score(truth, found) > 0.99
    plain = SklearnKMeans(4, n_init=4, random_state=seed).fit_predict(unit_length(points))
    assert adjusted_rand_score(plain, found) > 0.99
    sizes = np.bincount(found)
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True), "clusters are numbered by size"


@pytest.mark.parametrize("bound", [1.2, 1.5, 2.0, 4.0])
def test_the_bound_on_balance_holds(bound: float) -> None:
    points, truth = blobs([900, 60, 60, 60], spread=0.3)
    free, kept = clusters_of(points, 4), clusters_of(points, 4, balance=bound)
    sizes = np.bincount(kept, minlength=4)
    assert np.bincount(free).max() > 4 * np.bincount(free).min(), "the data must be unbalanced for this to mean much"
    assert sizes.max() <= bound * sizes.min()
    # a loose bound moves less than a tight one
    assert adjusted_rand_score(truth, clusters_of(points, 4, balance=8.0)) >= adjusted_rand_score(truth, kept) - 1e-9


def test_a_bound_that_is_met_changes_nothing() -> None:
    points, _ = blobs([100, 100, 100])
    np.testing.assert_array_equal(clusters_of(points, 3), clusters_of(points, 3, balance=2.0))


def test_rebalancing_takes_the_cheapest_cell() -> None:
    # cells on a line, all in cluster 0 but the last; the one nearest to cluster 1 must go first
    cells = np.array([[0.0], [1.0], [2.0], [3.0], [10.0]], dtype=np.float32)
    moved = rebalance(cells, np.ones(5), np.array([0, 0, 0, 0, 1]), 2, bound=1.5)
    assert moved.tolist() == [0, 0, 0, 1, 1]


def test_one_heavy_cell_cannot_be_balanced() -> None:
    cells, sizes, cluster_of = np.eye(3, dtype=np.float32), np.array([100.0, 1.0, 1.0]), np.array([0, 1, 1])
    best = rebalance(cells, sizes, cluster_of, 2, bound=2.0)
    assert sorted(np.bincount(best, weights=sizes).tolist()) == [2.0, 100.0]


def test_it_is_the_same_every_time_and_another_with_another_seed() -> None:
    points = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    first, second, other = (KMeans(cells=32).fit(points, NONE, [], 4, seed) for seed in (1, 1, 2))
    for name in ("cells", "cluster_of"):
        np.testing.assert_array_equal(first[name], second[name])
    assert not np.array_equal(first["cells"], other["cells"])


def test_a_new_sample_goes_to_its_nearest_cell() -> None:
    points, _ = blobs([200, 200, 200])
    method = KMeans(cells=30, balance=None)
    state = method.fit(points, NONE, [], 3, 0)
    new = np.random.default_rng(7).standard_normal((50, 16)).astype(np.float32)
    cell = squared_distances(unit_length(new), state["cells"]).argmin(1)
    np.testing.assert_array_equal(method.assign(state, new, NONE, []), state["cluster_of"][cell])


@pytest.mark.parametrize(("points", "k"), [(np.ones((50, 4)), 2), (np.eye(4).repeat(10, 0), 5), (np.zeros((9, 3)), 2)])
def test_more_clusters_than_groups(points: np.ndarray, k: int) -> None:
    with pytest.raises(UserError, match=rf"-k {k}: k-means found only \d separate groups"):
        clusters_of(points.astype(np.float32), k)


def test_as_many_clusters_as_samples() -> None:
    assert sorted(clusters_of(np.eye(6, dtype=np.float32), 6).tolist()) == list(range(6))


def test_the_baselines_are_whole_classes_and_a_hash_of_the_id() -> None:
    labels = np.repeat([0, 1, 2, 3], [50, 40, 30, 20])
    ids, features = [f"{i:064x}" for i in range(len(labels))], np.zeros((len(labels), 1), np.float32)
    table = Label().fit(features, labels, ids, 2, 5)
    found = Label().assign(table, features, labels, ids)
    assert [set(found[labels == label].tolist()) for label in range(4)] == [{0}, {1}, {1}, {0}]
    assert Label().assign(table, features[:2], np.array([-1, 9]), ids[:2]).tolist() == [-1, -1]
    with pytest.raises(UserError, match="-k 5: there are only 4 labels for --method label"):
        Label().fit(features, labels, ids, 5, 0)
    state = Random().fit(features, labels, ids, 2, 5)
    found = Random().assign(state, features, labels, ids)
    assert 46 < found.sum() < 94, "half of 140, within four standard deviations"
    np.testing.assert_array_equal(Random().assign(state, features[7:9], NONE, ids[7:9]), found[7:9])
