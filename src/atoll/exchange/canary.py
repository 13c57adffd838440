"""A canary: paint with the candidate in its place and without it, and see whether the images still look like data.

What is measured is plain: the median distance of a painted latent to the nearest real one of the clusters asked for.
Broken images are far from everything. It is drawn from the seed of one admission, with guidance, so that both branches
count, half of it in the candidate's cluster and half in others, and the halves are looked at by themselves.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import Store, UserError
from ..data.contact_sheet import COLUMNS, titled_sheet
from ..data.space import LatentConfig
from ..ensemble.load import Ensemble, load_ensemble
from ..ensemble.missing import RouterAmong
from ..ensemble.mixture import Denoisers, Mixture
from ..ensemble.placing import Placement
from ..ensemble.pool import ExpertPool
from ..ensemble.routes import parse_route
from ..ensemble.versions import Version
from ..islands.expert import Expert
from ..process import Condition, Denoiser, LinearFlow
from ..sampling import Sampling, generate
from ..training.seeds import generator, seed_from
from .measure import Holdout

IMAGES, STEPS, SOLVER, GUIDANCE = 32, 12, "dpmpp_2m", 2.0
MOST_REAL = 2000


@dataclass(frozen=True)
class Canary:
    """Median distances to the nearest real latent, in the candidate's cluster and in others, and what was painted:
    float32 [N, C, H, W] each.

    `before` is without the candidate, None where the model cannot paint yet; then the candidate paints alone.
    `gaussian` is the distance of draws from the cluster's Gaussian: what knows only means and variances does not look
    like data, and nobody should be much further away.
    """

    after: tuple[float, ...]
    before: tuple[float, float] | None
    gaussian: float
    with_it: Tensor | None
    without_it: Tensor | None
    alone: Tensor
    unguided: Tensor
    real: Tensor
    cluster: int

    def sheet(self, latent: LatentConfig) -> bytes:
        """A PNG for the organizer's eye: the candidate beside real images, and the model with it and without it."""
        both = f"first row cluster {self.cluster}, second row others"
        parts = {
            f"real, cluster {self.cluster}": self.real,
            f"the candidate alone, asked for cluster {self.cluster}": self.alone[: 2 * COLUMNS],
            "the candidate alone, asked for nothing": self.unguided[: 2 * COLUMNS],
        }
        if self.with_it is not None and self.without_it is not None:
            parts[f"the model with it: {both}"] = rows_of_both(self.with_it)
            parts[f"the model as it is: {both}"] = rows_of_both(self.without_it)
        shown = {title: latent.previews(part.nan_to_num(0.0)).cpu().numpy() for title, part in parts.items()}
        with io.BytesIO() as stream:
            titled_sheet(shown).save(stream, format="PNG")
            return stream.getvalue()


def rows_of_both(painted: Tensor) -> Tensor:
    """A row from inside the cluster, and one from outside, which are the two halves of what a model painted."""
    half = len(painted) // 2
    return torch.cat([painted[:COLUMNS], painted[half : half + COLUMNS]])


def canary(
    run: Store, version: Version, expert: Expert, cluster: int, holdout: Holdout, seed: int, device: str
) -> Canary:
    """Paint with and without the candidate of a cluster."""
    inside, outside = holdout.inside(cluster), holdout.outside(cluster)
    numbers = generator(seed, "canary")
    half = IMAGES // 2
    chosen = [pick(inside, half, numbers), pick(outside if len(outside) else inside, half, numbers)]
    rows = torch.cat(chosen)
    condition = holdout.samples.condition(rows, torch.rand(len(rows), generator=numbers, dtype=torch.float64))
    seeds = [seed_from(seed, "image", i) for i in range(len(rows))]

    def paint(denoiser: Denoiser, asked: Condition, count: int, guidance: float) -> Tensor:
        latents = generate(
            denoiser,
            version.latent.shape,
            seeds[:count],
            asked[slice(0, count)],
            Sampling(steps=STEPS, solver=SOLVER, guidance=guidance),
            device=device,
        )
        return latents.float().cpu()

    reads = expert.card.architecture.condition != "none"
    candidate = expert.denoiser(LinearFlow())
    alone = paint(candidate, condition, half, GUIDANCE if reads else 1.0)
    unguided = paint(candidate, condition.null(), half, 1.0)
    whole = present_model(run, device)
    real = real_latents(holdout, cluster)
    gaussian = nearest(holdout.gaussian(cluster).draw(half, numbers), real)
    some = real[:: max(1, len(real) // COLUMNS)][:COLUMNS].unflatten(1, version.latent.shape)
    if whole is None:
        return Canary((nearest(alone, real),), None, gaussian, None, None, alone, unguided, some, cluster)
    guidance = GUIDANCE if reads else 1.0
    before = whole.mixture(parse_route(version.route))
    assert isinstance(before.experts, ExpertPool)
    denoisers = Denoisers([candidate if k == cluster else before.experts[k] for k in range(version.clusters)])
    router = before.router.router if isinstance(before.router, RouterAmong) else before.router
    present = torch.tensor([k == cluster or k not in whole.missing for k in range(version.clusters)])
    after = Mixture(denoisers, router if bool(present.all()) else RouterAmong(router, present), before.route)
    with_it, without_it = (paint(mixture, condition, len(rows), guidance) for mixture in (after, before))
    near = torch.cat([real, real_latents(holdout, None)])

    def distances(painted: Tensor) -> tuple[float, float]:
        return nearest(painted[:half], near), nearest(painted[half:], near)

    return Canary(
        distances(with_it), distances(without_it), gaussian, with_it, without_it, alone, unguided, some, cluster
    )


def present_model(run: Store, device: str) -> Ensemble | None:
    """The model as it is now; None where it cannot paint yet, for want of a router or of any expert."""
    try:
        return load_ensemble(run, placement=Placement((torch.device(device),)))
    except UserError:
        return None


def pick(rows: Tensor, count: int, numbers: torch.Generator) -> Tensor:
    return rows[torch.randint(len(rows), (count,), generator=numbers)]


def real_latents(holdout: Holdout, cluster: int | None) -> Tensor:
    """Training latents of a cluster, or of all, as points [n, D]."""
    rows = holdout.train if cluster is None else holdout.training_rows(cluster)
    rows = rows[torch.linspace(0, len(rows) - 1, min(MOST_REAL, len(rows))).long()]
    return holdout.samples.latents(rows).flatten(1)


def nearest(painted: Tensor, real: Tensor) -> float:
    """Median distance of painted latents [n, ...] to the nearest real one [m, D]; infinite if one is not finite."""
    points = painted.flatten(1)
    if not bool(torch.isfinite(points).all()):
        return float("inf")
    return float(torch.cdist(points, real).min(1).values.median())
