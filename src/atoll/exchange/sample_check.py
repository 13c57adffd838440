"""Images sampled with the candidate in its place and without it: do they still look like data?

The measure is the median distance of a sampled latent to the nearest real one of the clusters asked for. Broken images
are far from all of them. Prompts and noise follow from the seed of one admission. Guidance is used, so that both
branches count. Half of the prompts are of the candidate's cluster, half of others, and each half is measured by itself.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import Store, UserError
from ..data.contact_sheet import COLUMNS, titled_sheet
from ..data.space import LatentConfig
from ..diffusion import Condition, Denoiser, LinearFlow
from ..islands.expert import Expert
from ..mixture.missing import RouterAmong
from ..mixture.mixture import Denoisers, Mixture
from ..mixture.routes import parse_route
from ..runtime.load import Ensemble, load_ensemble
from ..runtime.placing import Placement
from ..runtime.pool import ExpertPool
from ..sampling import Sampling, generate
from ..training.seeds import generator, seed_from
from .holdout import Holdout, some_of

IMAGES, STEPS, SOLVER, GUIDANCE = 32, 12, "dpmpp_2m", 2.0
HALF = IMAGES // 2
MOST_REAL = 2000


@dataclass(frozen=True)
class SampleCheck:
    """Median distances to the nearest real latent, inside the candidate's cluster and outside it.

    `before` is without the candidate, None where the model cannot sample yet; then only the candidate samples.
    `gaussian` is the distance of draws from the cluster's Gaussian. `images` are latents [n, C, H, W] by title.
    """

    after: tuple[float, ...]
    before: tuple[float, ...] | None
    gaussian: float
    images: dict[str, Tensor]

    def sheet(self, latent: LatentConfig) -> bytes:
        """All images as a PNG, for the organizer to look at."""
        shown = {title: latent.previews(part.nan_to_num(0.0)).cpu().numpy() for title, part in self.images.items()}
        with io.BytesIO() as stream:
            titled_sheet(shown).save(stream, format="PNG")
            return stream.getvalue()


def sample_both(run: Store, expert: Expert, cluster: int, holdout: Holdout, seed: int, device: str) -> SampleCheck:
    """Sample with the candidate of a cluster and without it, with the same prompts and noise."""
    shape, numbers = expert.card.latent.shape, generator(seed, "samples")
    inside, outside = holdout.inside(cluster), holdout.outside(cluster)
    halves = (inside, outside if len(outside) else inside)
    rows = torch.cat([half[torch.randint(len(half), (HALF,), generator=numbers)] for half in halves])
    prompts = holdout.samples.condition(rows, torch.rand(IMAGES, generator=numbers, dtype=torch.float64))
    seeds = [seed_from(seed, "image", i) for i in range(IMAGES)]
    strength = GUIDANCE if expert.card.architecture.condition != "none" else 1.0

    def sample(denoiser: Denoiser, count: int, condition: Condition = prompts, guidance: float = strength) -> Tensor:
        how = Sampling(steps=STEPS, solver=SOLVER, guidance=guidance)
        return generate(denoiser, shape, seeds[:count], condition[slice(0, count)], how, device=device).float().cpu()

    candidate = expert.denoiser(LinearFlow())
    alone = sample(candidate, HALF)
    training = holdout.training_rows(cluster)
    real = real_latents(holdout, training)
    gaussian = nearest(holdout.gaussian(cluster).draw(HALF, numbers), real)
    images = {
        f"real, cluster {cluster}": real_latents(holdout, training, COLUMNS).unflatten(1, shape),
        f"the candidate alone, prompts of cluster {cluster}": alone,
        "the candidate alone, no prompt": sample(candidate, HALF, prompts.null(), 1.0),
    }
    try:
        model = load_ensemble(run, placement=Placement((torch.device(device),)))
    except UserError:  # it has no router yet, or no expert
        return SampleCheck((nearest(alone, real),), None, gaussian, images)
    before = model.mixture(parse_route(model.version.route))
    near, distances = torch.cat([real, real_latents(holdout, holdout.train)]), []
    for title, mixture in (("with it", with_candidate(before, model, cluster, candidate)), ("as it is", before)):
        latents = sample(mixture, IMAGES)
        shown = torch.cat([latents[:COLUMNS], latents[HALF : HALF + COLUMNS]])
        images[f"the model {title}: first row cluster {cluster}, second row others"] = shown
        distances.append(tuple(nearest(half, near) for half in latents.split(HALF)))
    return SampleCheck(distances[0], distances[1], gaussian, images)


def with_candidate(before: Mixture, model: Ensemble, cluster: int, candidate: Denoiser) -> Mixture:
    """The mixture with the candidate as the expert of its cluster."""
    assert isinstance(before.experts, ExpertPool)
    clusters = range(model.version.clusters)
    denoisers = Denoisers([candidate if k == cluster else before.experts[k] for k in clusters])
    router = before.router.router if isinstance(before.router, RouterAmong) else before.router
    present = torch.tensor([k == cluster or k not in model.missing for k in clusters])
    return Mixture(denoisers, router if bool(present.all()) else RouterAmong(router, present), before.route)


def real_latents(holdout: Holdout, rows: Tensor, most: int = MOST_REAL) -> Tensor:
    """Some of these training latents as points [n, D]."""
    return holdout.samples.latents(some_of(rows, most, "real")).flatten(1)


def nearest(latents: Tensor, real: Tensor) -> float:
    """Median distance of sampled latents [n, ...] to the nearest real one [m, D]; infinite if one is not finite."""
    points = latents.flatten(1)
    if not bool(torch.isfinite(points).all()):
        return float("inf")
    return float(torch.cdist(points, real).min(1).values.median())
