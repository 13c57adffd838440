"""Routes: which experts to run, and how much each counts.

A route turns the router's weights [B, K] into weights that are zero for every expert not to be run and sum to one
per row. `Sampled`, `Fixed` and `Oracle` need to know which images a batch holds; `bind` tells them, once per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..artifacts import UserError

CHOICES = "full, top-K, threshold-P, nucleus-P, sampled, fixed or oracle, for example top-2 or threshold-0.2"


class Route(Protocol):
    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        """Router weights [B, K] at times t [B] -> weights of the experts to run [B, K]."""
        ...


@runtime_checkable
class PerImageRoute(Route, Protocol):
    """A route that depends on which image a row is."""

    def bind(self, rows: slice | Tensor, seeds: Sequence[int]) -> Route:
        """The route for a batch that holds `rows` of the images of a call, whose seeds are `seeds`."""
        ...


@dataclass(frozen=True)
class Full:
    """Every expert, as the router weighs it. Exact for an exact router."""

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        return _renormalized(weights)


@dataclass(frozen=True)
class TopK:
    """The k largest, or all where there are fewer; of equal weights the expert with the lower index."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"a top-k route needs k of at least 1, got {self.k}")

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        ranked = weights.sort(dim=1, descending=True, stable=True).indices
        return _only(weights, ranked[:, : self.k])


@dataclass(frozen=True)
class Threshold:
    """Every expert with a weight of p or more, else the largest."""

    p: float

    def __post_init__(self) -> None:
        _check_share("threshold", self.p)

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        chosen = _renormalized(weights) >= self.p
        largest = weights.argmax(dim=1, keepdim=True)
        return _renormalized(weights * chosen.scatter(1, largest, True))


@dataclass(frozen=True)
class Nucleus:
    """The fewest experts whose weights reach p together, mixed."""

    p: float

    def __post_init__(self) -> None:
        _check_share("nucleus", self.p)

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        ranked, order = _renormalized(weights).sort(dim=1, descending=True, stable=True)
        larger = ranked.cumsum(dim=1) - ranked  # what the experts before this one hold together
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, order, larger < self.p)
        return _renormalized(weights * chosen)


@dataclass(frozen=True, eq=False)
class Sampled:
    """One expert per image and step, drawn with the router's weights: a pure function of (image seed, t)."""

    seeds: Tensor | None = None

    def bind(self, rows: slice | Tensor, seeds: Sequence[int]) -> Sampled:
        return Sampled(torch.tensor([_signed(seed) for seed in seeds]))

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        return _drawn("sampled", self.seeds, weights, t)


@dataclass(frozen=True, eq=False)
class Fixed:
    """One expert per image, drawn with the router's weights at the first step and kept to the end.

    A bound route is asked about the conditional half first (`Mixture.guided`): that decides, the other half follows.
    What it keeps belongs to the batch it is bound to; the choice depends on the image's seed and its own weights only.
    """

    seeds: Tensor | None = None
    _kept: list[Tensor] = field(default_factory=list)  # empty before the first call, then one tensor [B, K]

    def bind(self, rows: slice | Tensor, seeds: Sequence[int]) -> Fixed:
        return Fixed(torch.tensor([_signed(seed) for seed in seeds]))

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        if not self._kept:
            self._kept.append(_drawn("fixed", self.seeds, weights, t))
        return self._kept[0].to(weights.dtype)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The expert of the image's true cluster, whatever the router says: `clusters` holds one index per image."""

    clusters: Tensor | None = None

    def bind(self, rows: slice | Tensor, seeds: Sequence[int]) -> Oracle:
        return Oracle(None if self.clusters is None else self.clusters[rows])

    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        if self.clusters is None or len(self.clusters) != len(weights):
            known = "none" if self.clusters is None else str(len(self.clusters))
            raise ValueError(f"route oracle needs the true cluster of each of {len(weights)} images, got {known}")
        if not 0 <= int(self.clusters.min()) <= int(self.clusters.max()) < weights.shape[1]:
            raise ValueError(f"route oracle: clusters must lie in 0 .. {weights.shape[1] - 1}")
        return _one_hot(self.clusters.to(weights.device), weights)


def parse_route(text: str, clusters: Sequence[int] | None = None) -> Route:
    """A route from its name; `oracle` also needs the true cluster of every image."""
    if text == "full":
        return Full()
    if text == "sampled":
        return Sampled()
    if text == "fixed":
        return Fixed()
    if text == "oracle":
        if clusters is None:
            raise UserError("route 'oracle' needs the true cluster of every image, not known here; use top-1")
        return Oracle(torch.as_tensor(clusters, dtype=torch.int64))
    word, _, number = text.partition("-")
    try:
        if word == "top":
            return TopK(int(number))
        if word == "threshold":
            return Threshold(float(number))
        if word == "nucleus":
            return Nucleus(float(number))
    except ValueError as error:
        raise UserError(f"route {text!r}: use {CHOICES}") from error
    raise UserError(f"unknown route {text!r}: use {CHOICES}")


def _check_share(name: str, p: float) -> None:
    if not 0.0 < p <= 1.0:
        raise ValueError(f"a {name} route needs a share in (0, 1], got {p}")


def _renormalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True)


def _only(weights: Tensor, experts: Tensor) -> Tensor:
    """The weights of some experts per row [B, k], the rest zero, renormalized."""
    kept = torch.zeros_like(weights).scatter(1, experts, weights.gather(1, experts))
    return _renormalized(kept)


def _drawn(name: str, seeds: Tensor | None, weights: Tensor, t: Tensor) -> Tensor:
    """One expert per row, drawn with the weights: a pure function of (seed, t, the row's own weights)."""
    if seeds is None or len(seeds) != len(weights):
        raise ValueError(f"route {name} needs one seed per row ({len(weights)}): bind it to the batch's images")
    u = _uniform(seeds.to(weights.device), t).to(weights.dtype)
    below = _renormalized(weights).cumsum(dim=1) <= u[:, None]
    # rounding may leave the last sum below u: then it is the last expert that has any weight
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1)
    return _one_hot(torch.minimum(below.sum(dim=1), last), weights)


def _one_hot(expert: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter(1, expert[:, None], 1.0)


def _signed(seed: int) -> int:
    """A seed of 64 bits as torch's int64 holds it."""
    return ((seed + 2**63) % 2**64) - 2**63


def _uniform(seeds: Tensor, t: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float32 or wider, from seeds int64 [B] and times [B]: SplitMix64 of the two.

    Times are told apart to 2^-24. All integer arithmetic wraps at 64 bits.
    """
    z = _mixed(seeds * _GOLDEN + (t * 2**24).round().long())
    return (_mixed(z) >> 40 & 0xFFFFFF).to(t.dtype) / 2**24


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; masks make the shifts of signed numbers logical."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1)
