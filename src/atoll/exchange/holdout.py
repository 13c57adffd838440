"""Errors of an expert on the holdout, which no island has seen.

There are two measurements. The recorded validation loss is taken at fixed times and noise, so that anyone who has the
data can repeat it. The judged errors are taken at rows, times and noise that follow from a seed made for one admission,
which are unknown before. They are taken with the condition and without it, up to t = 1 and in every band of t by
itself: an expert that is good on average may return garbage where few times lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..diffusion import (
    Condition,
    Denoiser,
    Kind,
    LinearFlow,
    Prediction,
    combine,
    fixed_times,
    noisy,
    per_sample,
    squared_error,
    velocity_error,
    widen,
)
from ..islands.expert import Expert
from ..islands.order import Order
from ..partition.assignment import clusters_of
from ..registry.versions import ValidationLoss
from ..training.seeds import generator, seed_from

MOST_ROWS = 2000  # of the holdout, inside the cluster and outside it
MOST_TRAINING_ROWS = 20_000  # that a Gaussian is fitted to
PAIRS = 2048  # (sample, t, noise) that count for the mean
EDGE_PAIRS = 256  # more near data, and as many near noise
AT_NOISE = 32  # of the latter, at t = 1 itself
NEIGHBOR_PAIRS = 512  # outside the cluster, or compared with a neighbor
BATCH = 256
NEAR_DATA, NEAR_NOISE = 0.03, 0.975
# edges of the bands of t; the first is measured as an error of x0, since a velocity's is divided by t there
EDGES = (0.001, NEAR_DATA, 0.25, 0.5, 0.75, 0.9, NEAR_NOISE, 1.0)

Branch = Literal["with the condition", "without it"]
BRANCHES: tuple[Branch, Branch] = ("with the condition", "without it")


@dataclass(frozen=True)
class Holdout:
    """Rows to measure on, by cluster, and the training rows that a Gaussian is fitted to."""

    samples: LatentDataset
    rows: Tensor  # int64 [n], the holdout
    clusters: Tensor  # int64 [n], of these rows
    train: Tensor  # int64 [m]
    train_clusters: Tensor  # int64 [m]
    gaussians: dict[int, GaussianDenoiser] = field(default_factory=dict)

    @staticmethod
    def of(data: Artifact, partition: Artifact) -> Holdout:
        index = Index.of(data)
        cluster = clusters_of(index, partition)
        samples = LatentDataset.of(data)
        rows, train = (torch.from_numpy(index.rows(split)) for split in ("holdout", "train"))
        return Holdout(samples, rows, cluster[rows], train, cluster[train])

    def inside(self, cluster: int) -> Tensor:
        """Rows of a cluster, at most MOST_ROWS of them, the same each time."""
        rows = some_of(self.rows[self.clusters == cluster], MOST_ROWS, "inside", cluster)
        if len(rows) == 0:
            raise UserError(f"cluster {cluster} has no holdout samples to measure on; partition with fewer clusters")
        return rows

    def outside(self, cluster: int) -> Tensor:
        """Rows of all other clusters, at most MOST_ROWS; there may be none."""
        return some_of(self.rows[self.clusters != cluster], MOST_ROWS, "outside", cluster)

    def training_rows(self, cluster: int) -> Tensor:
        return some_of(self.train[self.train_clusters == cluster], MOST_TRAINING_ROWS, "training", cluster)

    def gaussian(self, cluster: int) -> GaussianDenoiser:
        """Fitted to the training data of a cluster, once."""
        if cluster not in self.gaussians:
            self.gaussians[cluster] = GaussianDenoiser.fitted(self.samples.latents(self.training_rows(cluster)))
        return self.gaussians[cluster]

    def neighbors(self, cluster: int, count: int = 3) -> list[int]:
        """The clusters whose mean latents lie nearest, of those that have a holdout."""
        others = [k for k in self.clusters.unique().tolist() if k != cluster]
        own = self.gaussian(cluster).mean
        return sorted(others, key=lambda k: float((self.gaussian(k).mean - own).square().sum()))[:count]


def some_of(rows: Tensor, most: int, *key: str | int) -> Tensor:
    """All rows, or `most` of them by a permutation seeded with this key, in their order."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator(*key))[:most].sort().values]


def cluster_of(order: Order) -> int:
    assert order.cluster is not None, "a monolith has no cluster to be measured on"
    return order.cluster


@dataclass(frozen=True)
class Draws:
    """(sample, t, noise) to measure at.

    rows       int64 [n], samples
    t          float64 [n]
    caption    float64 [n] in [0, 1), which of a sample's captions
    in_mean    bool [n], whether it counts for the mean; the bands count all
    seed       of the noise
    """

    rows: Tensor
    t: Tensor
    caption: Tensor
    in_mean: Tensor
    seed: int

    @staticmethod
    def random(rows: Tensor, seed: int, what: str, pairs: int = PAIRS, edge: int = EDGE_PAIRS) -> Draws:
        """`pairs` stratified times, which count for the mean, and `edge` more near data and near noise each."""
        numbers = generator(seed, what)
        uniform, low, high = torch.rand(pairs + 2 * edge, generator=numbers, dtype=torch.float64).split(
            [pairs, edge, edge]
        )
        strata = (torch.arange(pairs) + uniform) / pairs
        near_noise = NEAR_NOISE + (1.0 - NEAR_NOISE) * high
        near_noise[:AT_NOISE] = 1.0
        near_data = EDGES[0] + (NEAR_DATA - EDGES[0]) * low
        t = torch.cat([NEAR_DATA + (1.0 - NEAR_DATA) * strata, near_data, near_noise])
        chosen = rows[torch.randint(len(rows), (len(t),), generator=numbers)]
        caption = torch.rand(len(t), generator=numbers, dtype=torch.float64)
        return Draws(chosen, t, caption, torch.arange(len(t)) < pairs, seed)

    @staticmethod
    def fixed(rows: Tensor, times: int) -> Draws:
        """Every row at the same `times` times, with its first caption and the same noise each time."""
        chosen, number = torch.cartesian_prod(rows, torch.arange(times)).T
        first = torch.zeros(len(chosen), dtype=torch.float64)
        return Draws(chosen, fixed_times(times)[number], first, first == 0, seed_from("holdout"))

    def batches(
        self, samples: LatentDataset, branch: Branch, device: str
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Condition]]:
        """x0 and noise [b, C, H, W], t [b] and the condition, on the device."""
        for number, part in enumerate(torch.split(torch.arange(len(self.t)), BATCH)):
            x0 = samples.latents(self.rows[part])
            eps = torch.randn(x0.shape, generator=generator(self.seed, "noise", number))
            condition = samples.condition(self.rows[part], self.caption[part]).to(device)
            if branch == "without it":
                condition = condition.null()
            yield x0.to(device), eps.to(device), widen(self.t[part], torch.device(device)), condition


@torch.no_grad()
def errors(
    denoiser: Denoiser, samples: LatentDataset, draws: Draws, branch: Branch = BRANCHES[0], device: str = "cpu"
) -> Tensor:
    """The velocity error of each draw, float32 [n]."""
    batches = draws.batches(samples, branch, device)
    return torch.cat([velocity_error(denoiser, *batch).float().cpu() for batch in batches])


@dataclass(frozen=True)
class Scores:
    """Errors of one branch: the mean, and that of every band of t; the first band's is an error of x0."""

    mean: float
    bands: tuple[float, ...]

    @staticmethod
    def of(error: Tensor, draws: Draws) -> Scores:
        x0_error = error * draws.t.float().square()  # x0 = x - t v on the linear path
        bands = []
        for number, (low, high) in enumerate(pairwise(EDGES)):
            within = (draws.t >= low) & ((draws.t < high) | (high == 1.0))
            bands.append(float((x0_error if number == 0 else error)[within].mean()))
        return Scores(float(error[draws.in_mean].mean()), tuple(bands))


def score(denoiser: Denoiser, samples: LatentDataset, draws: Draws, device: str = "cpu") -> dict[Branch, Scores]:
    """Both branches of an expert on the same draws."""
    return {branch: Scores.of(errors(denoiser, samples, draws, branch, device), draws) for branch in BRANCHES}


@torch.no_grad()
def compare(
    one: Denoiser, other: Denoiser, samples: LatentDataset, draws: Draws, device: str = "cpu"
) -> tuple[float, float, float]:
    """Mean squared difference of two experts' velocities with the condition, and the error of the one and the other.

    Experts that were trained apart differ even where they are equally good; a copy disturbed a little does not.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for x0, eps, t, condition in draws.batches(samples, BRANCHES[0], device):
        x = noisy(LinearFlow(), x0, eps, t)
        mine, theirs = (denoiser(x, t, condition).value for denoiser in (one, other))
        target = combine(Kind.VELOCITY, LinearFlow(), t, x0, eps).value
        pairs = ((mine, theirs), (mine, target), (theirs, target))
        total += torch.stack([squared_error(*pair).sum().double().cpu() for pair in pairs])
    difference, ours, others = (total / len(draws.t)).tolist()
    return difference, ours, others


def validation_loss(expert: Expert, order: Order, holdout: Holdout, device: str = "cpu") -> ValidationLoss:
    """The recorded validation loss: inside and outside the expert's cluster, and that of its cluster's Gaussian."""
    cluster, samples = cluster_of(order), holdout.samples
    bridge = expert.denoiser(LinearFlow())

    def mean(denoiser: Denoiser, rows: Tensor) -> float:
        draws = Draws.fixed(rows, order.acceptance.times)
        return errors(denoiser, samples, draws, device=device).double().mean().item()

    inside, outside = holdout.inside(cluster), holdout.outside(cluster)
    return ValidationLoss(
        inside=mean(bridge, inside),
        outside=mean(bridge, outside) if len(outside) else None,
        gaussian=mean(holdout.gaussian(cluster), inside),
    )


@dataclass(frozen=True)
class GaussianDenoiser:
    """The best denoiser for a Gaussian with the mean m and variance s^2 of each latent value:
    x0 = m + alpha s^2 / (alpha^2 s^2 + sigma^2) (x - alpha m)."""

    mean: Tensor
    variance: Tensor
    schedule: LinearFlow = LinearFlow()
    kind: Kind = Kind.X0

    @staticmethod
    def fitted(x0: Tensor) -> GaussianDenoiser:
        return GaussianDenoiser(x0.mean(0), x0.var(0, correction=0))

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        alpha, sigma = (per_sample(c, x).to(x.dtype) for c in (self.schedule.alpha(t), self.schedule.sigma(t)))
        mean, variance = self.mean.to(x.device), self.variance.to(x.device)
        gain = alpha * variance / (alpha**2 * variance + sigma**2)
        return Prediction(self.kind, mean + gain * (x - alpha * mean))

    def draw(self, count: int, numbers: torch.Generator) -> Tensor:
        """Samples [count, C, H, W] of that Gaussian."""
        noise = torch.randn(count, *self.mean.shape, generator=numbers, dtype=self.mean.dtype)
        return self.mean + self.variance.sqrt() * noise
