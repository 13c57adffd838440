"""Scores against brute force, scipy, closed forms and sets whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from scipy.stats import binomtest
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.evaluation import scores
from atoll.evaluation.scores import SCORES, Sets, manifold, number_written, scored, with_intervals
from atoll.evaluation.scores import sets as parts
from atoll.evaluation.scores.estimate import Estimate, halves_of, share_of
from atoll.evaluation.scores.frechet import FrechetReference
from atoll.evaluation.scores.nearest import nearest_distances

RNG = np.random.default_rng(0)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 37)  # so that several parts are compared here, too


@pytest.fixture(scope="module")
def two() -> tuple[np.ndarray, np.ndarray]:
    turn = RNG.normal(size=(6, 6))
    return RNG.normal(size=(130, 6)) @ turn + 0.4, RNG.normal(size=(110, 6)) @ turn


def test_every_file_of_the_folder_is_on_the_list() -> None:
    folder = Path(scores.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "sets", "estimate"}
    assert set(SCORES) == files, "one file, one score of that name"


def test_frechet_agrees_with_scipys_matrix_root(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * sqrtm(cov_a @ cov_b).real)
    assert FrechetReference.of(b).distance(a) == pytest.approx(expected, rel=1e-9)
    assert SCORES["frechet"](Sets(tensor(a), tensor(b)))["frechet"] == pytest.approx(expected, rel=1e-4)


def test_a_resample_is_the_set_with_repeated_rows(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    reference = FrechetReference.of(b)
    again = np.repeat(a, np.random.default_rng(5).multinomial(len(a), np.full(len(a), 1 / len(a))), axis=0)
    assert reference.distances(a, 1, seed=5)[1] == pytest.approx(reference.distance(again), rel=1e-9)


def test_the_spread_of_resamples_is_that_of_fresh_sets() -> None:
    reference = FrechetReference.of(RNG.normal(size=(4000, 4)))
    fresh = [reference.distance(RNG.normal(size=(400, 4)) + 0.5) for _ in range(60)]
    found = reference.distances(RNG.normal(size=(400, 4)) + 0.5, 60, seed=1)[1:]
    assert np.std(found) == pytest.approx(np.std(fresh), rel=0.35)


def test_the_kernel_distance_is_the_unbiased_sum_over_pairs(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return (x @ y / len(x) + 1.0) ** 3

    within = [np.mean([kernel(s[i], s[j]) for i in range(60) for j in range(60) if i != j]) for s in (a[:60], b[:60])]
    across = np.mean([kernel(x, y) for x in a[:60] for y in b[:60]])
    found = SCORES["kernel"](Sets(tensor(a[:60]), tensor(b[:60])))["kernel"]
    assert found == pytest.approx(sum(within) - 2 * across, rel=1e-4)


def test_precision_and_recall_agree_with_brute_force(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    radii_a, radii_b = (np.sort(cdist(s, s), axis=1)[:, 3] for s in (a, b))
    across = cdist(a, b)
    found = SCORES["manifold"](Sets(tensor(a), tensor(b)))
    assert found["precision"] == pytest.approx((across <= radii_b[None]).any(1).mean(), abs=0.01)
    assert found["recall"] == pytest.approx((across <= radii_a[:, None]).any(0).mean(), abs=0.01)
    one_point = SCORES["manifold"](Sets(tensor(np.repeat(b[:1], 50, 0)), tensor(b)))
    assert (one_point["precision"], one_point["recall"]) == (1.0, pytest.approx(1 / len(b))), "right, and nothing else"


def test_diversity_is_the_mean_cosine_distance_within_prompts(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    asked = np.arange(len(a)) % 7
    distance = cdist(a, a, "cosine")
    same = (asked[:, None] == asked[None]) & ~np.eye(len(a), dtype=bool)
    found = SCORES["diversity"](Sets(tensor(a), tensor(b), asked=torch.from_numpy(asked)))["diversity"]
    assert found == pytest.approx(distance[same].mean(), rel=1e-5)
    assert SCORES["diversity"](Sets(tensor(a), tensor(b))) == {}
    alone = torch.arange(len(a))
    assert SCORES["diversity"](Sets(tensor(a), tensor(b), asked=alone)) == {}, "one image of each has nothing to differ"


def test_nearest_agrees_with_brute_force(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    torch.testing.assert_close(
        nearest_distances(tensor(a), tensor(b)), tensor(cdist(a, b).min(1)), rtol=1e-3, atol=1e-3
    )
    found = SCORES["nearest"](Sets(tensor(b[:20]), tensor(a), train=tensor(b)))
    assert found["nearest_median"] < 0.01 < found["nearest_median_real"], "copies lie on their originals"


def test_nearest_agrees_with_a_tree_and_a_copy_lies_on_its_original(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = (torch.from_numpy(one) for one in two)
    np.testing.assert_allclose(nearest_distances(a, b), cKDTree(b).query(a)[0], rtol=1e-9)
    np.testing.assert_allclose(
        nearest_distances(b[:50], b, leave_one_out=True), cKDTree(b).query(b[:50], k=2)[0][:, 1], rtol=1e-9
    )
    far = tensor(two[1]) + 1000.0  # where squares of float32 cancel
    assert nearest_distances(far[:5], far).tolist() == [0.0] * 5


def test_nothing_is_compared_with_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 2048)
    monkeypatch.setattr(parts, "CELLS", 1000)
    points = torch.randn(300, 2)
    assert {len(d) for _, d in parts.distances_in_parts(points, points)} == {3}
    assert [len(d) for _, d in parts.distances_in_parts(points[:4], torch.randn(5000, 2))] == [1, 1, 1, 1]


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had that was made meanwhile."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            self.most = max(self.most, one.numel() if isinstance(one, torch.Tensor) else 0)
        return made


def test_no_score_makes_a_matrix_of_all_against_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CELLS", 8000)
    monkeypatch.setattr(parts, "PART", 2048)
    numbers = torch.Generator().manual_seed(0)
    ours, real, train = (torch.randn(400, 4, generator=numbers) for _ in range(3))
    asked = torch.arange(400) % 9
    sets = Sets(ours, real, train, asked, apart=torch.rand(400))
    for name, one in SCORES.items():
        with Largest() as largest:
            assert one(sets), name
        assert largest.most <= 8400, f"{name} made {largest.most} numbers at once; all against all are 160,000"


def without_each(sets: Sets, name: str, number: str) -> list[float]:
    """A number of a score without each generated image in turn, by brute force."""
    everyone = torch.arange(len(sets.features))
    return [SCORES[name](sets.part(everyone[everyone != i], torch.arange(len(sets.real))))[number] for i in everyone]


@pytest.mark.parametrize(("name", "number"), [("kernel", "kernel"), ("diversity", "diversity")])
def test_intervals_are_those_of_leaving_out_each_image(
    two: tuple[np.ndarray, np.ndarray], name: str, number: str
) -> None:
    a, b = two
    sets = Sets(tensor(a[:40]), tensor(b[:50]), asked=torch.arange(40) % 7)
    found, without = SCORES[name](sets)[number], without_each(sets, name, number)
    spread = np.sqrt(39 / 40 * np.sum((np.array(without) - np.mean(without)) ** 2))  # as textbooks have the jackknife
    assert isinstance(found, Estimate)
    assert (found.low, found.high) == pytest.approx((found - 1.96 * spread, found + 1.96 * spread), rel=1e-6)
    assert SCORES[name](sets.part(torch.tensor([0, 7]), torch.arange(50)))[number], "two images have no interval"


def test_recall_of_halves_is_that_of_the_images_in_them(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    halves = halves_of(len(a), manifold.HALVES).numpy()
    assert halves.sum(1).tolist() == [65] * 20
    radii = manifold.radii_in_halves(tensor(a))
    inside = manifold.covered(tensor(b), tensor(a), radii)
    for number in (0, 7, 19):
        some = a[halves[number]]
        reach = np.sort(cdist(some, some), axis=1)[:, 3]
        np.testing.assert_allclose(radii[1 + number][halves[number]], reach, rtol=1e-3)
        assert (inside[1 + number].numpy() == (cdist(b, some) <= reach[None]).any(1)).mean() > 0.98  # bar rounding


def test_intervals_are_as_wide_as_fresh_images_spread() -> None:
    """Sets of the same kind, painted again and again: 95 % of their numbers lie within 1.96 standard deviations."""
    numbers = torch.Generator().manual_seed(3)
    real, train = torch.randn(300, 5, generator=numbers), torch.randn(100, 5, generator=numbers)
    centres = torch.randn(10, 5, generator=numbers)
    found = []
    for _ in range(40):
        asked = torch.randint(0, 10, (200,), generator=numbers)
        features = 0.8 * centres[asked] + 0.7 * torch.randn(200, 5, generator=numbers)
        found.append(scored(Sets(features, real, train, asked), without=["frechet"]))
    for name in ("kernel", "precision", "recall", "diversity", "nearest_median"):
        half = np.mean([(one[name].high - one[name].low) / 2 for one in found])
        assert half == pytest.approx(1.96 * np.std([one[name] for one in found], ddof=1), rel=0.35), name


def test_the_interval_of_a_share_is_wilsons() -> None:
    for right, n in ((0, 12), (5, 12), (120, 120), (480, 1000)):
        found = share_of(torch.arange(n) < right)
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        assert (found, found.low, found.high) == pytest.approx((right / n, low, high), abs=1e-4)


def test_a_number_with_an_interval_is_a_number_and_is_kept_with_its_ends() -> None:
    found = with_intervals({"recall": share_of(torch.arange(10) < 4), "plain": 2.0})
    assert json.loads(json.dumps(found)) == found
    assert found["scores"] == {"recall": pytest.approx(0.4), "plain": 2.0}
    assert list(found["intervals"]) == ["recall"]
    low, high = found["intervals"]["recall"]
    assert number_written("recall", 0.4, [low, high]) == f"40.0% \u00b1 {50 * (high - low):.1f}"
    assert number_written("kernel", 0.1234, [0.12, 0.13]) == "0.123 \u00b1 0.005"
    assert number_written("kernel", 0.1234) == "0.123"
    assert number_written("frechet", 12345.6, [12000, 12700]) == "12,346 \u00b1 350"
