"""A world in which everything is known.

`GaussianWorld` is a data set given as a Gaussian mixture whose components are dealt out to clusters. Noise keeps it a
Gaussian mixture: with component m in state x at (alpha, sigma)

    x | m ~ N(alpha mu_m, S_m),       S_m = alpha^2 C_m + sigma^2 I,                       (1)
    E[x0 | x, m]  = mu_m + alpha C_m S_m^-1 (x - alpha mu_m),                              (2)
    E[eps | x, m] = sigma S_m^-1 (x - alpha mu_m),                                         (3)

and p(m | x) follows from (1) by Bayes. So the ideal expert of every cluster, of every schedule and kind, the ideal
router and the ideal model of all data are closed forms: what the bridge and the mixture are measured against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.diffusion import (
    Condition,
    Denoiser,
    Kind,
    LinearFlow,
    Prediction,
    Schedule,
    coefficients,
    combine,
    per_sample,
    wide_dtype,
)


@dataclass(frozen=True, eq=False)
class GaussianWorld:
    """Data as a Gaussian mixture of M components in D dimensions, each with a cluster and a class label.

    weights      float64 [M]           share of the data, sums to one
    means        float64 [M, D]
    covariances  float64 [M, D, D]     symmetric, positive definite
    clusters     int64 [M]             0 .. K-1, none empty
    labels       int64 [M]             what `Condition.labels` selects
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor
    clusters: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if not torch.isclose(self.weights.sum(), torch.ones((), dtype=self.weights.dtype)):
            raise ValueError(f"component weights must sum to one, got {self.weights.sum().item()}")
        if not bool((torch.linalg.eigvalsh(self.covariances) > 0).all()):
            raise ValueError("every covariance must be positive definite")

    @staticmethod
    def random(
        *, dimensions: int, clusters: int, components: int, labels: int = 2, spread: float = 4.0, seed: int = 0
    ) -> GaussianWorld:
        """`components` per cluster with unequal weights and tilted covariances, `spread` times as far apart as they
        are wide. Component j of a cluster has label j % labels. Like the latents of a data set, all of it together
        has mean 0 and standard deviation 1 in every dimension."""
        generator = torch.Generator().manual_seed(seed)
        count = clusters * components

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def between(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

        weights = between(0.3, 1.3, count)
        weights = weights / weights.sum()
        means = spread * normal(count, dimensions)
        axes, _ = torch.linalg.qr(normal(count, dimensions, dimensions))
        covariances = axes @ torch.diag_embed(between(0.3, 1.7, count, dimensions) ** 2) @ axes.mT

        means = means - weights @ means
        deviation = (weights @ (means**2 + covariances.diagonal(dim1=1, dim2=2))).sqrt()
        return GaussianWorld(
            weights=weights,
            means=means / deviation,
            covariances=covariances / deviation / deviation[:, None],
            clusters=torch.arange(count) // components,
            labels=torch.arange(count) % components % labels,
        )

    @property
    def cluster_count(self) -> int:
        return int(self.clusters.max()) + 1

    @property
    def cluster_weights(self) -> Tensor:
        """Share of the data in each cluster [K]."""
        return torch.zeros(self.cluster_count, dtype=self.weights.dtype).index_add(0, self.clusters, self.weights)

    def cluster(self, index: int) -> GaussianWorld:
        """The data of one cluster alone, which is all its expert ever sees."""
        mine = self.clusters == index
        return GaussianWorld(
            weights=self.weights[mine] / self.weights[mine].sum(),
            means=self.means[mine],
            covariances=self.covariances[mine],
            clusters=torch.zeros_like(self.clusters[mine]),
            labels=self.labels[mine],
        )

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Clean samples float64 [count, D] and the component of each [count]."""
        component = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        eps = torch.randn(count, self.means.shape[1], generator=generator, dtype=torch.float64)
        roots = torch.linalg.cholesky(self.covariances)
        return self.means[component] + (roots[component] @ eps[:, :, None])[:, :, 0], component

    def posterior(self, x: Tensor, t: Tensor, schedule: Schedule, condition: Condition | None) -> Posterior:
        """What x [B, ...] at t [B] on a schedule says about the component, the clean sample and the noise."""
        dtype = wide_dtype(x.device)
        state = x.flatten(1).to(dtype)
        means, clusters, labels = (v.to(x.device) for v in (self.means.to(dtype), self.clusters, self.labels))
        spectrum, axes = (v.to(dtype).to(x.device) for v in torch.linalg.eigh(self.covariances))  # [M, D], [M, D, D]
        log_prior = self.weights.log().to(dtype).to(x.device).expand(len(x), -1)
        if condition is not None and condition.labels is not None:
            asked = condition.labels >= 0  # -1 says that there is no label
            if condition.dropped is not None:
                asked = asked & ~condition.dropped
            excluded = (condition.labels[:, None] != labels) & asked[:, None]
            log_prior = log_prior.masked_fill(excluded, -torch.inf)

        alpha, sigma = schedule.alpha(t)[:, None, None], schedule.sigma(t)[:, None, None]
        variance = alpha**2 * spectrum + sigma**2  # [B, M, D], along the axes
        onto_axes = axes.movedim(1, 0).flatten(1)  # [D, M D]: every component's axes side by side
        offset = (state @ onto_axes).unflatten(1, spectrum.shape) - alpha * (means[:, None] @ axes)[:, 0]
        scaled = offset / variance
        log_likelihood = -0.5 * (offset * scaled + variance.log()).sum(2)
        components = torch.softmax(log_prior + log_likelihood, dim=1)

        def back(along_axes: Tensor) -> Tensor:
            """From the components' axes to state coordinates, averaged over components."""
            return torch.mm((components[:, :, None] * along_axes).flatten(1), onto_axes.T)

        x0 = components @ means + back(alpha * spectrum * scaled)
        eps = back(sigma * scaled)
        return Posterior(components, clusters, x0.reshape(x.shape), eps.reshape(x.shape))

    def z_scores(self, samples: Tensor) -> dict[str, Tensor]:
        """How far samples [N, D] are from the world, in standard errors of a true sample of that size.

        shares [K]: part in each cluster; means [M, D]; covariances [M, D, D], about the true means. A sample counts
        for the component it most likely came from, so the components must not overlap.
        """
        samples = samples.to("cpu", torch.float64)
        count = len(samples)
        clean = torch.zeros(count, dtype=torch.float64)
        component = self.posterior(samples, clean, LinearFlow(), None).components.argmax(dim=1)
        shares = self.cluster_weights
        found = torch.bincount(self.clusters[component], minlength=len(shares))
        means, covariances = [], []
        for m, true in enumerate(self.covariances):
            offsets = samples[component == m] - self.means[m]
            variances = true.diagonal()
            root = max(len(offsets), 1) ** 0.5
            means.append(root * offsets.mean(dim=0) / variances.sqrt())
            error = offsets.T @ offsets / max(len(offsets), 1) - true
            covariances.append(root * error / (variances[:, None] * variances + true**2).sqrt())
        return {
            "shares": (found - count * shares) / (count * shares * (1 - shares)).sqrt(),
            "means": torch.stack(means),
            "covariances": torch.stack(covariances),
        }


@dataclass(frozen=True, eq=False)
class Posterior:
    """p(component | x) [B, M], the component's clusters [M], and E[x0 | x], E[eps | x] shaped like x; float64."""

    components: Tensor
    component_clusters: Tensor
    x0: Tensor
    eps: Tensor

    @property
    def clusters(self) -> Tensor:
        """p(cluster | x) [B, K]."""
        count = int(self.component_clusters.max()) + 1
        empty = self.components.new_zeros(len(self.components), count)
        return empty.index_add(1, self.component_clusters, self.components)


@dataclass(frozen=True, eq=False)
class ExactDenoiser:
    """The ideal model of a world for any schedule and kind, answering in the precision it is asked in."""

    world: GaussianWorld
    schedule: Schedule
    kind: Kind

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        known = self.world.posterior(x, t, self.schedule, condition)
        return Prediction(self.kind, combine(self.kind, self.schedule, t, known.x0, known.eps).value.to(x.dtype))


@dataclass(frozen=True, eq=False)
class ImperfectDenoiser:
    """A denoiser whose answer is off by `share` of the size of what its kind is trained on, in a random direction.

    That size is the root mean square of p x0 + q eps for data of standard deviation 1. The direction of row i is the
    same in every call, so two calls differ by what was asked and nothing else.
    """

    denoiser: Denoiser
    share: float
    seed: int = 0

    @property
    def schedule(self) -> Schedule:
        return self.denoiser.schedule

    @property
    def kind(self) -> Kind:
        return self.denoiser.kind

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        answer = self.denoiser(x, t, condition)
        return Prediction(answer.kind, answer.value + self.mistake(answer.value, t))

    def mistake(self, value: Tensor, t: Tensor) -> Tensor:
        """What is added to an answer shaped like `value`."""
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        size = self.share * torch.hypot(*coefficients(self.kind, self.schedule, t))
        return per_sample(size, value).to(value) * direction.to(value)


@dataclass(frozen=True, eq=False)
class ExactRouter:
    """The ideal router of a world: p(cluster | x, t, condition) [B, K], float64."""

    world: GaussianWorld
    schedule: Schedule = LinearFlow()

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return self.world.posterior(x, t, self.schedule, condition).clusters
