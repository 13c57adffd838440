"""Errors of an expert on the holdout, which no island has seen.

There are two measurements. The recorded validation loss is taken at fixed times and noise, so that anyone who has the
data can repeat it. The judged errors are taken at rows, times and noise that follow from a seed made for one admission,
which are unknown before. They are taken with the condition and without it, and equally often in every band of t, the
last of which is t = 1: an expert that is good on average may return garbage where few times lie.
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
DRAWS = 320  # (sample, t, noise) in each band of t
FEWER_DRAWS = 80  # outside the cluster, or compared with a neighbor
BATCH = 256
EDGES = (0.001, 0.03, 0.25, 0.5, 0.75, 0.9, 0.975, 1.0, 1.0)  # of the bands of t
# of the bands in the mean over t; the first does not count, since a velocity's error is one of x0 divided by t^2
WEIGHTS = torch.tensor([0.0, *(high - low for low, high in pairwise(EDGES[1:]))], dtype=torch.float64) / 0.97

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
        rows, train = (torch.from_numpy(index.rows(split)) for split in ("holdout", "train"))
        return Holdout(LatentDataset.of(data), rows, cluster[rows], train, cluster[train])

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


@dataclass(frozen=True)
class Draws:
    """(sample, t, noise) to measure at.

    rows       int64 [n], samples
    t          float64 [n]
    caption    float64 [n] in [0, 1), which of a sample's captions
    seed       of the noise
    """

    rows: Tensor
    t: Tensor
    caption: Tensor
    seed: int

    @staticmethod
    def random(rows: Tensor, seed: int, what: str, each: int = DRAWS) -> Draws:
        """`each` stratified times in every band of t, band by band."""
        numbers, edges = generator(seed, what), torch.tensor(EDGES, dtype=torch.float64)
        count = each * len(WEIGHTS)
        chosen = rows[torch.randint(len(rows), (count,), generator=numbers)]
        uniform, caption = torch.rand(2, count, generator=numbers, dtype=torch.float64)
        strata = (torch.arange(each) + uniform.view(-1, each)) / each
        return Draws(chosen, (edges[:-1, None] + edges.diff()[:, None] * strata).flatten(), caption, seed)

    @staticmethod
    def fixed(rows: Tensor, times: int) -> Draws:
        """Every row at the same `times` times, with its first caption and the same noise each time."""
        chosen, number = torch.cartesian_prod(rows, torch.arange(times)).T
        return Draws(chosen, fixed_times(times)[number], torch.zeros(len(chosen)), seed_from("holdout"))

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
    """The velocity error of each draw, float64 [n]."""
    batches = draws.batches(samples, branch, device)
    return torch.cat([velocity_error(denoiser, *batch).double().cpu() for batch in batches])


def band_errors(
    denoiser: Denoiser, samples: LatentDataset, draws: Draws, branch: Branch = BRANCHES[0], device: str = "cpu"
) -> Tensor:
    """The mean error in each band of t, float64 [bands]. In the first it is that of x0, as a velocity's at EDGES[2]."""
    bands = errors(denoiser, samples, draws, branch, device).view(len(WEIGHTS), -1)
    bands[0] *= (draws.t[: bands.shape[1]] / EDGES[2]).square()
    return bands.mean(1)


@torch.no_grad()
def difference(one: Denoiser, other: Denoiser, samples: LatentDataset, draws: Draws, device: str = "cpu") -> float:
    """Mean squared difference of two experts' velocities with the condition, over t.

    Experts that were trained apart differ even where they are equally good; a copy disturbed a little does not.
    """
    found = []
    for x0, eps, t, condition in draws.batches(samples, BRANCHES[0], device):
        x = noisy(LinearFlow(), x0, eps, t)
        found.append(squared_error(*(denoiser(x, t, condition).value for denoiser in (one, other))).double().cpu())
    return float(torch.cat(found).view(len(WEIGHTS), -1).mean(1) @ WEIGHTS)


def validation_loss(expert: Expert, order: Order, holdout: Holdout, device: str = "cpu") -> ValidationLoss:
    """The recorded validation loss: inside and outside the expert's cluster, and that of its cluster's Gaussian."""
    assert order.cluster is not None, "a monolith has no cluster to be measured on"
    bridge, gaussian = expert.denoiser(LinearFlow()), holdout.gaussian(order.cluster)

    def mean(denoiser: Denoiser, rows: Tensor) -> float:
        draws = Draws.fixed(rows, order.acceptance.times)
        return float(errors(denoiser, holdout.samples, draws, device=device).mean())

    inside, outside = holdout.inside(order.cluster), holdout.outside(order.cluster)
    return ValidationLoss(
        inside=mean(bridge, inside),
        outside=mean(bridge, outside) if len(outside) else None,
        gaussian=mean(gaussian, inside),
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
