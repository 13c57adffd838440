"""Scores against brute force, scipy, closed forms and sets whose answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist
from scipy.stats import binomtest
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.evaluation import scores
from atoll.evaluation.scores import SCORES, Estimate, Real, Sets, as_json, number_written, scored
from atoll.evaluation.scores import sets as parts
from atoll.evaluation.scores.estimate import fraction_of, mean_over_seeds
from atoll.evaluation.scores.fd import RESAMPLES, draws
from atoll.evaluation.scores.nearest import nearest_distances

RNG = np.random.default_rng(0)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


def sets_of(a: np.ndarray, b: np.ndarray, groups: np.ndarray | None = None) -> Sets:
    """Generated and real features; the real ones are the training images, too."""
    real = Real(tensor(b), tensor(b), torch.full((len(b),), -1))
    return Sets(tensor(a), real, groups=None if groups is None else torch.from_numpy(groups))


def number(name: str, sets: Sets) -> Estimate:
    found = SCORES[name].function(sets)
    assert found is not None
    return found if isinstance(found, Estimate) else Estimate(found)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 37)  # so that several parts are compared here, too


@pytest.fixture(scope="module")
def two() -> tuple[np.ndarray, np.ndarray]:
    turn = RNG.normal(size=(6, 6))
    return RNG.normal(size=(130, 6)) @ turn + 0.4, RNG.normal(size=(110, 6)) @ turn


def test_every_file_of_the_folder_is_on_the_list() -> None:
    files = {path.stem for path in Path(scores.__file__).parent.glob("*.py")} - {"__init__", "sets", "estimate"}
    assert {one.function.__module__.rpartition(".")[2] for one in SCORES.values()} == files
    assert list(SCORES)[:3] == ["class_accuracy", "fd", "kid"], "which tables begin with"
    assert all(one.explanation for one in SCORES.values())


@pytest.mark.parametrize("width", [6, 200])
def test_frechet_agrees_with_scipys_matrix_root(width: int) -> None:
    """With more samples than features and with fewer; pixels that are always black change nothing."""
    a, b = RNG.normal(size=(130, width)) * RNG.uniform(size=width) + 0.3, RNG.normal(size=(300, width))
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * sqrtm(cov_a @ cov_b).real)
    assert number("fd", sets_of(a, b)).value == pytest.approx(expected, rel=1e-4)
    black = [np.hstack([one, np.zeros((len(one), 3))]) for one in (a, b)]
    assert number("fd", sets_of(*black)).value == pytest.approx(expected, rel=1e-4)


def test_frechet_of_shifted_and_scaled_gaussians_is_the_closed_form() -> None:
    a = RNG.normal(size=(100_000, 3))
    expected = ((a.mean(0) + 1.0) ** 2).sum() + np.trace(np.cov(a.T))
    assert number("fd", sets_of(a, 2.0 * a + 1.0)).value == pytest.approx(expected, rel=1e-4)
    assert number("fd", sets_of(a, a)).value == pytest.approx(0.0, abs=1e-6)


def test_the_interval_of_frechet_is_the_spread_of_sets_with_repeated_rows(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    weights = draws(len(a))
    assert weights.shape == (1 + RESAMPLES, len(a))
    torch.testing.assert_close(weights.sum(1), torch.ones(1 + RESAMPLES, dtype=torch.float64))
    again = [np.repeat(a, (row * len(a)).round().int().numpy(), axis=0) for row in weights[1:]]
    spread = np.std([number("fd", sets_of(one, b)).value for one in again], ddof=1)
    found = number("fd", sets_of(a, b))
    assert found.high - found.value == pytest.approx(1.96 * spread, rel=1e-3)


def test_the_spread_of_resamples_is_that_of_fresh_sets() -> None:
    real = RNG.normal(size=(4000, 4))
    found = [number("fd", sets_of(RNG.normal(size=(400, 4)) + 0.5, real)) for _ in range(40)]
    half = np.mean([one.high - one.value for one in found])
    assert half == pytest.approx(1.96 * np.std([one.value for one in found]), rel=0.35)


def test_the_classifier_separates_separate_blobs_and_its_own_limits() -> None:
    labels = torch.arange(3).repeat_interleave(40)
    features = tensor(RNG.normal(size=(120, 2))) + 20.0 * labels[:, None]
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))

    def accuracy(real: torch.Tensor, classes: torch.Tensor, wanted: torch.Tensor) -> float:
        return number("class_accuracy", Sets(features, Real(real, real, classes), labels=wanted)).value

    assert accuracy(features, labels, labels) == 1.0
    assert accuracy(features, labels, (labels + 1) % 3) == 0.0
    assert accuracy(tensor(RNG.normal(size=(120, 2))), labels[order], labels) < 0.6
    nothing = Sets(features, Real(features, features, labels), labels=torch.full((120,), -1))
    assert SCORES["class_accuracy"].function(nothing) is None


def test_the_kernel_distance_is_the_unbiased_sum_over_pairs(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return (x @ y / len(x) + 1.0) ** 3

    within = [np.mean([kernel(s[i], s[j]) for i in range(60) for j in range(60) if i != j]) for s in (a[:60], b[:60])]
    across = np.mean([kernel(x, y) for x in a[:60] for y in b[:60]])
    assert number("kid", sets_of(a[:60], b[:60])).value == pytest.approx(sum(within) - 2 * across, rel=1e-4)


def test_precision_and_recall_agree_with_brute_force(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    radii_a, radii_b = (np.sort(cdist(s, s), axis=1)[:, 3] for s in (a, b))
    across, sets = cdist(a, b), sets_of(a, b)
    assert number("precision", sets).value == pytest.approx((across <= radii_b[None]).any(1).mean(), abs=0.01)
    assert number("recall", sets).value == pytest.approx((across <= radii_a[:, None]).any(0).mean(), abs=0.01)
    one_point = sets_of(np.repeat(b[:1], 50, 0), b)
    assert (number("precision", one_point).value, number("recall", one_point).value) == (1.0, pytest.approx(1 / len(b)))


def test_diversity_is_the_mean_cosine_distance_within_prompts(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    groups = np.arange(len(a)) % 7
    distance = cdist(a, a, "cosine")
    same = (groups[:, None] == groups[None]) & ~np.eye(len(a), dtype=bool)
    assert number("diversity", sets_of(a, b, groups)).value == pytest.approx(distance[same].mean(), rel=1e-5)
    diversity = SCORES["diversity"].function
    assert diversity(sets_of(a, b)) is None
    assert diversity(sets_of(a, b, np.arange(len(a)))) is None, "one image of each has nothing to differ"


def test_nearest_agrees_with_brute_force_and_a_copy_lies_on_its_original(two: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = two
    expected = tensor(cdist(a, b).min(1))
    torch.testing.assert_close(nearest_distances(tensor(a), tensor(b)), expected, rtol=1e-3, atol=1e-3)
    assert number("nearest", sets_of(b[:20], b)).value == 0.0
    far = tensor(b) + 1000.0  # where squares of float32 cancel
    assert nearest_distances(far[:5], far).tolist() == [0.0] * 5


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
    groups = torch.arange(400) % 9
    sets = Sets(ours, Real(real, train, groups), groups=groups, labels=groups)
    for name, one in SCORES.items():
        if name != "lpips":
            with Largest() as largest:
                assert one.function(sets), name
            assert largest.most <= 8400, f"{name} made {largest.most} numbers at once; all against all are 160,000"


@pytest.mark.parametrize("name", ["kid", "diversity"])
def test_intervals_are_those_of_leaving_out_each_image(two: tuple[np.ndarray, np.ndarray], name: str) -> None:
    a, b = two[0][:40], two[1][:50]
    groups, everyone = np.arange(40) % 7, np.arange(40)
    without = [number(name, sets_of(a[everyone != i], b, groups[everyone != i])).value for i in everyone]
    spread = np.sqrt(39 / 40 * np.sum((np.array(without) - np.mean(without)) ** 2))  # as textbooks have the jackknife
    found = number(name, sets_of(a, b, groups))
    assert (found.low, found.high) == pytest.approx(
        (found.value - 1.96 * spread, found.value + 1.96 * spread), rel=1e-5
    )
    few = number(name, sets_of(a[[0, 7]], b, groups[[0, 7]]))
    assert few.low is None, "two images have no interval"


def test_intervals_are_as_wide_as_fresh_images_spread() -> None:
    """Sets of the same kind, generated again and again: 95 % of their numbers lie within 1.96 standard deviations."""
    numbers = torch.Generator().manual_seed(3)
    real, train = torch.randn(300, 5, generator=numbers), torch.randn(100, 5, generator=numbers)
    centers = torch.randn(10, 5, generator=numbers)
    found = []
    for _ in range(40):
        asked = torch.randint(0, 10, (200,), generator=numbers)
        features = 0.8 * centers[asked] + 0.7 * torch.randn(200, 5, generator=numbers)
        found.append(scored(Sets(features, Real(real, train, torch.full((300,), -1)), groups=asked)))
    for name in ("kid", "precision", "diversity", "nearest"):
        half = np.mean([(one[name].high - one[name].low) / 2 for one in found])
        assert half == pytest.approx(1.96 * np.std([one[name].value for one in found], ddof=1), rel=0.35), name


def test_the_interval_of_a_fraction_is_wilsons() -> None:
    for right, n in ((0, 12), (5, 12), (120, 120), (480, 1000)):
        found = fraction_of(torch.arange(n) < right)
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        assert (found.value, found.low, found.high) == pytest.approx((right / n, low, high), abs=1e-4)


def test_numbers_are_written_with_half_of_their_interval() -> None:
    found = as_json({"recall": Estimate(0.4, 0.3, 0.48), "kid": Estimate(0.1234)})
    assert found["kid"] == {"value": 0.1234, "low": None, "high": None}
    assert number_written("recall", found["recall"]) == "40.0% \u00b1 9.0"
    assert number_written("kid", found["kid"]) == "0.123"
    assert number_written("fd", {"value": 12.3456, "low": 12.0, "high": 12.7}) == "12.35 \u00b1 0.35"
    assert number_written("fd", None) == ""
    assert mean_over_seeds([Estimate(1.0, 0.5, 1.5)]) == Estimate(1.0, 0.5, 1.5)
    assert mean_over_seeds([Estimate(1.0), Estimate(3.0)]).value == 2.0
