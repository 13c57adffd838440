"""The claim of exactness, checked for the very mix of objectives an ensemble has.

In a world of Gaussians the ideal expert of a cluster, the ideal router and the ideal model of everything are closed
forms. Give each cluster's ideal expert the schedule and kind that a real expert of the ensemble has, mix them, and
what is left is the error of the fusion alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ensemble.mixture import Mixture
from ..process import Bridge, Denoiser, Kind, LinearFlow, PaperFusion, Schedule, noisy
from .closed_form import ExactDenoiser, ExactRouter, GaussianWorld

TIMES = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
STATES = 64  # noisy samples at each time


def fusion_errors(objectives: Sequence[tuple[Schedule, Kind]]) -> dict[str, list[float]]:
    """Mean relative error of the mixed velocity at TIMES, with the exact bridge and with the paper's recipe.

    The second curve is missing if an expert is of a kind the paper does not fuse.
    """
    world = GaussianWorld.random(dimensions=6, clusters=len(objectives), components=2, seed=0)
    numbers = torch.Generator().manual_seed(0)
    t = TIMES.repeat_interleave(STATES)
    x0, _ = world.sample(len(t), numbers)
    x = noisy(LinearFlow(), x0, torch.randn(x0.shape, generator=numbers, dtype=torch.float64), t)
    truth = ExactDenoiser(world, LinearFlow(), Kind.VELOCITY)(x, t, None).value

    def error(wrap: Callable[[Denoiser], Denoiser]) -> list[float]:
        experts = [wrap(ExactDenoiser(world.cluster(k), *objective)) for k, objective in enumerate(objectives)]
        answer = Mixture.of(experts, ExactRouter(world))(x, t, None).value
        relative = (answer - truth).norm(dim=1) / truth.norm(dim=1)
        means: list[float] = relative.reshape(len(TIMES), STATES).mean(1).tolist()
        return means

    curves = {"exact bridge": error(lambda expert: Bridge(expert, limit=None))}
    flow = (LinearFlow(), Kind.VELOCITY)
    if all(kind is Kind.EPSILON or (schedule, kind) == flow for schedule, kind in objectives):
        curves["fed straight in (our reading of the HDDM paper)"] = error(PaperFusion)
    return curves
