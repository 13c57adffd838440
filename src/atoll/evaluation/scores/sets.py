"""What is compared, and the list of what compares it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .estimate import Estimate

PART = 2048  # rows compared at once, if what they are compared with is small
MANY = 1000.0  # a number so large has no use for digits behind its point
CELLS = 2**26  # distances at once, 256 MiB of them: what bounds the memory where it is large


@dataclass(frozen=True, eq=False)
class Sets:
    """Features of one set of generated images and of the real ones it is held against, all on one device.

    features  float32 [N, D]        generated
    real      float32 [M, D]        real images that no training has seen
    train     float32 [T, D]        training images, to look for copies; None: not looked for
    asked     int64 [N]             what each image was asked to show: a class, or the number of its prompt
    apart     float32 [N]           LPIPS from an image to its partner of the same prompt; nan: it has none of its own
    """

    features: Tensor
    real: Tensor
    train: Tensor | None = None
    asked: Tensor | None = None
    apart: Tensor | None = None

    def part(self, generated: Tensor, real: Tensor) -> Sets:
        """Some of the generated and some of the real images, by number; copies are looked for among all training."""
        asked, apart = (None if one is None else one[generated] for one in (self.asked, self.apart))
        return replace(self, features=self.features[generated], real=self.real[real], asked=asked, apart=apart)


Score = Callable[[Sets], dict[str, float]]
SCORES: dict[str, Score] = {}
# how numbers are written that say so; others have three digits. The first stands beside the scores in every result
WRITTEN: dict[str, str] = {"recognised": ".1%"}


def score(name: str, *, written: Mapping[str, str] = MappingProxyType({})) -> Callable[[Score], Score]:
    """Put a score on the list. It answers {} where a set lacks what it needs.

    Numbers that are an `Estimate` have their interval in every result; others are told without.

    `written` has format specs of its numbers, such as {"recall": ".1%"}: what reports and tables write them by.
    """

    def listed(function: Score) -> Score:
        SCORES[name] = function
        WRITTEN.update(written)
        return function

    return listed


def scored(sets: Sets, *, without: Collection[str] = ()) -> dict[str, float]:
    """Every number of every score on the list, but for the scores left out by name; `with_intervals` has their ends."""
    return {number: value for name, one in SCORES.items() if name not in without for number, value in one(sets).items()}


def with_intervals(scores: Mapping[str, float]) -> dict[str, Any]:
    """Numbers as results keep them: `scores`, and beside them `intervals` [low, high] of those that have one."""
    ends = {name: [one.low, one.high] for name, one in scores.items() if isinstance(one, Estimate)}
    return {"scores": {name: float(value) for name, value in scores.items()}, "intervals": ends}


def number_written(name: str, value: float | None, interval: Sequence[float] | None = None) -> str:
    """A number of a score as reports and tables show it, with half the width of its interval if it has one."""
    if value is None:
        return ""
    number = format(value, ",.0f" if abs(value) >= MANY else WRITTEN.get(name, ".3g"))
    if interval is None:
        return number
    half, as_share = (interval[1] - interval[0]) / 2, number.endswith("%")
    width = f"{100 * half:.1f}" if as_share else f"{half:.0f}" if half >= 10 else f"{half:.2g}"
    return f"{number} \u00b1 {width}"


def number_title(name: str) -> str:
    return name.replace("_", " ")


def other_numbers(measured: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all numbers of all scores, but for the one that tables show beside the Frechet distance."""
    found = dict.fromkeys(name for one in measured for name in one["scores"])
    return [name for name in found if not name.startswith("nearest_median")]


def rows_at_once(others: int) -> int:
    """How many rows may be compared with so many others at a time."""
    return max(1, min(PART, CELLS // max(1, others)))


def distances_in_parts(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Euclidean distances of some rows of a to all of b, [n, len(b)], part by part."""
    step = rows_at_once(len(b))
    for start in range(0, len(a), step):
        rows = slice(start, min(start + step, len(a)))
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
