"""Routes: which experts to run, and how much each counts.

A route turns the router's weights [B, K] at times t [B], for images with these seeds, into weights that are zero for
every expert not to be run and sum to one per row. To add one, write such a callable and pass it in `Request.route` or
to `Mixture` (examples/nucleus_route.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..artifacts import UserError
from ..sampling import Route

CHOICES = "full, top-K, threshold-P or fixed, for example top-2 or threshold-0.2"
MASK = 2**64 - 1


@dataclass(frozen=True)
class Full:
    """Every expert, as the router weighs it. Exact for an exact router."""

    def __call__(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        return renormalized(weights)


@dataclass(frozen=True)
class TopK:
    """The k largest, or all where there are fewer; of equal weights the expert with the lower index."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"a top-k route needs k of at least 1, got {self.k}")

    def __call__(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        largest = weights.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
        return renormalized(torch.zeros_like(weights).scatter(1, largest, weights.gather(1, largest)))


@dataclass(frozen=True)
class Threshold:
    """Every expert with a weight of p or more, else the largest."""

    p: float

    def __post_init__(self) -> None:
        if not 0.0 < self.p <= 1.0:
            raise ValueError(f"a threshold route needs a weight in (0, 1], got {self.p}")

    def __call__(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        chosen = renormalized(weights) >= self.p
        largest = weights.argmax(dim=1, keepdim=True)
        return renormalized(weights * chosen.scatter(1, largest, True))


@dataclass(frozen=True)
class Fixed:
    """One expert per image, drawn with the router's weights at the first step and kept to the end.

    The draw is a pure function of the image's seed and its conditional weights; the unconditional branch follows it.
    """

    once: ClassVar[bool] = True

    def __call__(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        if len(seeds) != len(weights):
            raise ValueError(f"route fixed needs the seeds of the {len(weights)} images, got {len(seeds)}")
        u = torch.tensor([uniform_of(seed) for seed in seeds], dtype=torch.float64).to(weights)
        below = renormalized(weights).cumsum(dim=1) <= u[:, None]
        # rounding may leave the last sum below u: then it is the last expert that has any weight
        last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1)
        expert = torch.minimum(below.sum(dim=1), last)
        return torch.zeros_like(weights).scatter(1, expert[:, None], 1.0)


def parse_route(text: str) -> Route:
    """A route from its name."""
    word, _, number = text.partition("-")
    try:
        match word, number:
            case "full", "":
                return Full()
            case "fixed", "":
                return Fixed()
            case "top", _:
                return TopK(int(number))
            case "threshold", _:
                return Threshold(float(number))
    except ValueError as error:
        raise UserError(f"route {text!r}: use {CHOICES}") from error
    raise UserError(f"unknown route {text!r}: use {CHOICES}")


def renormalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True)


def uniform_of(seed: int) -> float:
    """A number in [0, 1) from a seed: 24 bits of SplitMix64."""
    z = (seed * 0x9E3779B97F4A7C15 + 2**24) & MASK
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
    return (z >> 40) / 2**24
