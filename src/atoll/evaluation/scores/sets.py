"""What is compared, and the list of the scores that compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .estimate import Estimate

COMPARED = 10_000  # real images whose pairs are looked at; a mean and a covariance are of all
FITTED = 5000  # real images a classifier is fitted on; a support vector machine takes the square of it
ROWS = 16_384  # of a set that are taken at a time for its covariance
PART = 2048  # rows compared at once, if what they are compared with is small
CELLS = 2**26  # distances at once, 256 MiB of them: what bounds the memory where it is large


@dataclass(frozen=True, eq=False)
class Real:
    """Features of real images, in random order; those that no training has seen come first.

    features  float32 [M, D]    all
    train     float32 [T, D]    training images, among which copies are looked for
    labels    int64 [M]         classes; -1 where there is none
    """

    features: Tensor
    train: Tensor
    labels: Tensor

    @property
    def some(self) -> Tensor:
        """As many as can be compared pair by pair."""
        return self.features[:COMPARED]

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        return moments(self.features)

    @cached_property
    def classifier(self) -> Any:
        """A support vector machine that tells classes by features; None where most images have no label."""
        from sklearn.svm import SVC  # slow to import

        labelled = self.labels >= 0
        features, labels = self.features[labelled][:FITTED], self.labels[labelled][:FITTED]
        if 2 * int(labelled.sum()) <= len(self.labels) or len(labels.unique()) < 2:
            return None
        # features as they are: standardizing would amplify the faint noise of a pixel that is always black
        return SVC(C=10.0).fit(features.cpu().numpy(), labels.cpu().numpy())


@dataclass(frozen=True, eq=False)
class Sets:
    """One set of generated images, and the real ones it is compared with. Tensors are on one device.

    features    float32 [N, D]        of the generated images
    images      uint8 [N, C, H, W]    the images themselves, read when a score asks for some; None: features only
    groups      int64 [N]             which prompt an image has, by number
    labels      int64 [N]             which class it is to show; -1 where the prompt names none
    perceptual  models.lpips.LPIPS, where it is wanted
    """

    features: Tensor
    real: Real
    images: Any = None
    groups: Tensor | None = None
    labels: Tensor | None = None
    perceptual: Any = None


@dataclass(frozen=True)
class Score:
    function: Callable[[Sets], Estimate | float | None]
    title: str
    format: str

    @property
    def explanation(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())


SCORES: dict[str, Score] = {}


def score(name: str, *, title: str | None = None, format: str = ".3g") -> Callable[..., Any]:
    """Put a function of `Sets` on the list of scores, under the name that results have for its number.

    It returns a number, an `Estimate` if the number has an interval, or None where a set lacks what it needs. Tables
    write the number by `format` below `title`, and explain it by the docstring.
    """

    def listed(function: Callable[[Sets], Estimate | float | None]) -> Callable[[Sets], Estimate | float | None]:
        SCORES[name] = Score(function, title or name.replace("_", " "), format)
        return function

    return listed


def scored(sets: Sets) -> dict[str, Estimate]:
    """The number of every score that has one for these sets."""
    found = {name: one.function(sets) for name, one in SCORES.items()}
    return {
        name: value if isinstance(value, Estimate) else Estimate(value)
        for name, value in found.items()
        if value is not None
    }


def as_json(scores: dict[str, Estimate]) -> dict[str, dict[str, float | None]]:
    """Numbers as evaluation.json keeps them: {"value", "low", "high"}, the ends None where there is no interval."""
    return {name: asdict(one) for name, one in scores.items()}


def number_written(name: str, number: dict[str, float | None] | None, *, interval: bool = True) -> str:
    """A number of evaluation.json as tables show it, with half the width of its interval if it has one."""
    if number is None or number["value"] is None:
        return ""
    text = format(number["value"], SCORES[name].format if name in SCORES else ".3g")
    if not interval or number["low"] is None or number["high"] is None:
        return text
    half = (number["high"] - number["low"]) / 2
    return f"{text} \u00b1 {f'{100 * half:.1f}' if text.endswith('%') else f'{half:.2g}'}"


def score_table(
    rows: Sequence[dict[str, Any]], names: Iterable[str] | None = None, *, intervals: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Titles of the numbers, of all or by name, that some row has; and the numbers of each row as text."""
    found = [name for name in names or SCORES if any(name in row for row in rows)]
    cells = [[number_written(name, row.get(name), interval=intervals) for name in found] for row in rows]
    return [SCORES[name].title for name in found], cells


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and unbiased covariance [D, D] of features [N, D], float64."""
    parts = features.split(ROWS)
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(features)
    covariance = sum((centered.T @ centered for centered in (part.double() - mean for part in parts)), torch.zeros(()))
    return mean, covariance / (len(features) - 1)


def rows_at_once(others: int) -> int:
    """How many rows may be compared with so many others at a time."""
    return max(1, min(PART, CELLS // max(1, others)))


def distances_in_parts(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Euclidean distances of some rows of a to all of b, [n, len(b)], part by part."""
    step = rows_at_once(len(b))
    mode = "donot_use_mm_for_euclid_dist" if len(b) < 64 else "use_mm_for_euclid_dist"
    for start in range(0, len(a), step):
        rows = slice(start, min(start + step, len(a)))
        yield rows, torch.cdist(a[rows], b, compute_mode=mode)
