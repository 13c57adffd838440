"""What is compared, and the list of what compares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .classifier import Classifier

PART = 2048  # rows compared at once


@dataclass(frozen=True, eq=False)
class Sets:
    """Features of one set of generated images and of the real ones it is held against, all on one device.

    features  float32 [N, D]        generated
    real      float32 [M, D]        real images that no training has seen
    train     float32 [T, D]        training images, to look for copies; None: not looked for
    asked     int64 [N]             what each image was asked to show: a class, or the number of its prompt
    classifier                      of the real classes, where `asked` are classes
    """

    features: Tensor
    real: Tensor
    train: Tensor | None = None
    asked: Tensor | None = None
    classifier: Classifier | None = None

    @cached_property
    def generated_radii(self) -> Tensor:
        return neighbour_radii(self.features)


Score = Callable[[Sets], dict[str, float]]
SCORES: dict[str, Score] = {}


def score(name: str) -> Callable[[Score], Score]:
    """Put a score on the list. It answers {} where a set lacks what it needs."""

    def listed(function: Score) -> Score:
        SCORES[name] = function
        return function

    return listed


def distances_in_parts(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Euclidean distances of some rows of a to all of b, [n, len(b)], part by part."""
    for start in range(0, len(a), PART):
        rows = slice(start, min(start + PART, len(a)))
        yield (
            rows,
            torch.cdist(
                a[rows], b, compute_mode="donot_use_mm_for_euclid_dist" if len(b) < 64 else "use_mm_for_euclid_dist"
            ),
        )


def neighbour_radii(points: Tensor, k: int = 3) -> Tensor:
    """Distance of each point to its k-th nearest other one [N]."""
    found = [
        d.topk(min(k + 1, len(points)), largest=False).values[:, -1] for _, d in distances_in_parts(points, points)
    ]
    return torch.cat(found)
