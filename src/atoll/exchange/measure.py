"""How good an expert is on data no island has seen, in units of a Gaussian's error.

Two measurements. The recorded one is of fixed times and noise, so that equal work has equal digests and anybody who has
the data can repeat it. The judging one is of draws that nobody can know before: rows, times and noise come from a seed
made for this one admission. It asks both branches, with the condition and without, up to t = 1, and looks at every band
of time by itself: an expert that is good on average may still be garbage where few times lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..artifacts import Artifact, UserError
from ..data.dataset import LatentDataset
from ..data.index import Index
from ..ensemble.versions import ValidationLoss
from ..islands.expert import Expert
from ..islands.order import Order
from ..partition.assignment import clusters_of
from ..process import (
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
from ..training.seeds import generator

MOST_ROWS = 2000  # of the holdout, inside the cluster and outside it
PAIRS = 2048  # (sample, t, noise) over the times that count for the mean
EDGE_PAIRS = 256  # more of them near data, and near noise
AT_NOISE = 32  # of the latter, at t = 1 itself
NEIGHBOUR_PAIRS = 512
BATCH = 256
NEAR_DATA, NEAR_NOISE = 0.03, 0.975
# edges of the bands of t; the first is judged as an error of x0, since a velocity's is divided by t there
EDGES = (0.001, NEAR_DATA, 0.25, 0.5, 0.75, 0.9, NEAR_NOISE, 1.0)

Branch = Literal["with the condition", "without it"]
BRANCHES: tuple[Branch, Branch] = ("with the condition", "without it")


@dataclass(frozen=True)
class Holdout:
    """What an expert is measured on: rows no island has seen, by cluster, and what training rows tell a Gaussian."""

    samples: LatentDataset
    rows: Tensor  # int64 [n], the holdout
    clusters: Tensor  # int64 [n], of these rows
    train: Tensor  # int64 [m]
    train_clusters: Tensor  # int64 [m]

    @staticmethod
    def of(data: Artifact, partition: Artifact, order: Order) -> Holdout:
        index = Index.of(data)
        cluster = clusters_of(index, partition)
        samples = LatentDataset.of(data)
        rows, train = (torch.from_numpy(index.rows(split)) for split in ("holdout", "train"))
        return Holdout(samples, rows, cluster[rows], train, cluster[train])

    def inside(self, cluster: int) -> Tensor:
        """Rows of a cluster, at most MOST_ROWS of them, the same each time."""
        return some_of(self.rows[self.clusters == cluster], MOST_ROWS, generator("inside", cluster))

    def outside(self, cluster: int) -> Tensor:
        """Rows of all other clusters, at most MOST_ROWS."""
        return some_of(self.rows[self.clusters != cluster], MOST_ROWS, generator("outside", cluster))

    def gaussian(self, cluster: int) -> GaussianDenoiser:
        """What somebody knows who was told the mean and variance of each latent value of a cluster's training data."""
        if cluster not in self._gaussians:
            self._gaussians[cluster] = GaussianDenoiser.fitted(self.samples.latents(self.training_rows(cluster)))
        return self._gaussians[cluster]

    def training_rows(self, cluster: int, most: int = 20_000) -> Tensor:
        return some_of(self.train[self.train_clusters == cluster], most, generator("training", cluster))

    def neighbours(self, cluster: int, count: int = 3) -> list[int]:
        """The clusters whose mean latents lie nearest, of those that have a holdout."""
        there = [k for k in self.clusters.unique().tolist() if k != cluster]
        own = self.gaussian(cluster).mean
        return sorted(there, key=lambda k: float((self.gaussian(k).mean - own).square().sum()))[:count]

    @cached_property
    def _gaussians(self) -> dict[int, GaussianDenoiser]:
        return {}


def some_of(rows: Tensor, most: int, numbers: torch.Generator) -> Tensor:
    """All rows, or `most` of them drawn by these numbers, in their order."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=numbers)[:most].sort().values]


def measure(expert: Expert, order: Order, data: Artifact, partition: Artifact, device: str = "cpu") -> ValidationLoss:
    """The recorded validation loss on the holdout, inside and outside the expert's cluster, beside a Gaussian's."""
    return recorded(expert, order, Holdout.of(data, partition, order), device)


def recorded(expert: Expert, order: Order, holdout: Holdout, device: str) -> ValidationLoss:
    cluster, times = cluster_of(order), order.acceptance.times
    inside, outside = inside_rows(holdout, cluster), holdout.outside(cluster)
    bridge = expert.denoiser(LinearFlow())
    return ValidationLoss(
        inside=holdout_error(bridge, holdout.samples, inside, times, device),
        outside=holdout_error(bridge, holdout.samples, outside, times, device) if len(outside) else None,
        gaussian=holdout_error(holdout.gaussian(cluster), holdout.samples, inside, times),
    )


def cluster_of(order: Order) -> int:
    assert order.cluster is not None, "a monolith has no cluster to be measured on"
    return order.cluster


def inside_rows(holdout: Holdout, cluster: int) -> Tensor:
    rows = holdout.inside(cluster)
    if len(rows) == 0:
        raise UserError(f"cluster {cluster} has no holdout samples to measure on; partition with fewer clusters")
    return rows


@torch.no_grad()
def holdout_error(
    denoiser: Denoiser, samples: LatentDataset, rows: Tensor, times: int, device: str = "cpu", batch: int = 512
) -> float:
    """Mean velocity error over every row at `times` fixed times, with noise fixed by the row."""
    total = 0.0
    pairs = torch.cartesian_prod(rows, torch.arange(times))
    for part in torch.split(pairs, batch):
        x0 = samples.latents(part[:, 0])
        eps = torch.stack([torch.randn(x0.shape[1:], generator=generator("holdout", *p)) for p in part.tolist()])
        condition = samples.condition(part[:, 0], torch.zeros(len(part))).to(device)
        t = widen(fixed_times(times)[part[:, 1]], torch.device(device))
        total += velocity_error(denoiser, x0.to(device), eps.to(device), t, condition).sum().item()
    return total / len(pairs)


@dataclass(frozen=True)
class Draws:
    """(sample, t, noise) that were drawn for one admission; the noise follows from the seed."""

    rows: Tensor  # int64 [n]
    t: Tensor  # float64 [n]
    u: Tensor  # float64 [n], which of a sample's captions
    seed: int

    @staticmethod
    def of(rows: Tensor, seed: int, what: str, pairs: int = PAIRS, edge: int = EDGE_PAIRS) -> Draws:
        """Stratified times over all that counts, more of them at both edges, each with a row drawn for it."""
        numbers = generator(seed, what)
        uniform = torch.rand(pairs + 2 * edge, generator=numbers, dtype=torch.float64)
        strata = (torch.arange(pairs) + uniform[:pairs]) / pairs
        near_data = EDGES[0] + (NEAR_DATA - EDGES[0]) * uniform[pairs : pairs + edge]
        near_noise = NEAR_NOISE + (1.0 - NEAR_NOISE) * uniform[pairs + edge :]
        near_noise[: min(AT_NOISE, edge)] = 1.0
        t = torch.cat([NEAR_DATA + (1.0 - NEAR_DATA) * strata, near_data, near_noise])
        chosen = rows[torch.randint(len(rows), (len(t),), generator=numbers)]
        return Draws(chosen, t, torch.rand(len(t), generator=numbers, dtype=torch.float64), seed)

    def __len__(self) -> int:
        return len(self.t)


Question = tuple[Tensor, Tensor, Tensor, Condition]  # x0, noise, t and the condition of some draws


def questions(samples: LatentDataset, draws: Draws, branch: Branch, device: str = "cpu") -> Iterator[Question]:
    """What a denoiser is asked, a batch at a time, on the device."""
    for number, part in enumerate(torch.split(torch.arange(len(draws)), BATCH)):
        x0 = samples.latents(draws.rows[part])
        eps = torch.randn(x0.shape, generator=generator(draws.seed, "noise", number))
        condition = samples.condition(draws.rows[part], draws.u[part]).to(device)
        asked = condition.null() if branch == "without it" else condition
        yield x0.to(device), eps.to(device), widen(draws.t[part], torch.device(device)), asked


@torch.no_grad()
def errors(denoiser: Denoiser, samples: LatentDataset, draws: Draws, branch: Branch, device: str = "cpu") -> Tensor:
    """The velocity error of each draw, float32 [n]."""
    asked = questions(samples, draws, branch, device)
    return torch.cat([velocity_error(denoiser, *question).float().cpu() for question in asked])


@torch.no_grad()
def difference(one: Denoiser, other: Denoiser, holdout: Holdout, draws: Draws, device: str = "cpu") -> float:
    """Mean squared difference of two experts' velocities, both behind a bridge, in units of the other's error.

    Trained apart, two experts differ even where they are equally good; a copy that was disturbed a little does not.
    """
    apart, error = 0.0, 0.0
    for x0, eps, t, condition in questions(holdout.samples, draws, BRANCHES[0], device):
        x = noisy(LinearFlow(), x0, eps, t)
        answers = [denoiser(x, t, condition) for denoiser in (one, other)]
        assert all(answer.kind is Kind.VELOCITY for answer in answers)
        truth = combine(Kind.VELOCITY, LinearFlow(), t, x0, eps).value
        apart += squared_error(answers[0].value, answers[1].value).sum().item()
        error += squared_error(answers[1].value, truth).sum().item()
    return apart / error


@dataclass(frozen=True)
class Scores:
    """Mean errors of one branch: over the times that count, and by band, the first band's as errors of x0."""

    mean: float
    bands: tuple[float, ...]

    @staticmethod
    def of(error: Tensor, t: Tensor) -> Scores:
        x0_error = error * t.float().square()  # x0 = x - t v on the linear path
        bands = []
        for number, (low, high) in enumerate(pairwise(EDGES)):
            within = (t >= low) & ((t < high) | (high == 1.0))
            bands.append(float((x0_error if number == 0 else error)[within].mean()))
        return Scores(float(error[:PAIRS][t[:PAIRS] >= NEAR_DATA].mean()), tuple(bands))


def score(denoiser: Denoiser, holdout: Holdout, draws: Draws, device: str = "cpu") -> dict[Branch, Scores]:
    """Both branches of an expert on the same draws."""
    return {branch: Scores.of(errors(denoiser, holdout.samples, draws, branch, device), draws.t) for branch in BRANCHES}


def mean_error(denoiser: Denoiser, holdout: Holdout, draws: Draws, device: str = "cpu") -> float:
    """With the condition, over the times that count."""
    return Scores.of(errors(denoiser, holdout.samples, draws, "with the condition", device), draws.t).mean


@dataclass(frozen=True)
class GaussianDenoiser:
    """The best answer of somebody who knows the mean m and variance s^2 of each latent value, and no more:
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
