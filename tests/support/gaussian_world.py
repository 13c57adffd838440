"""The closed-form world the maths is tested against, and the full product of schedules and kinds.

A new schedule is covered everywhere by adding it to SCHEDULES.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from atoll.diffusion import VE, CosineVP, DDPMBetas, Kind, LinearFlow, Schedule, noisy
from closed_form import GaussianWorld

SCHEDULES: list[Schedule] = [
    LinearFlow(),
    CosineVP(),
    DDPMBetas("linear"),
    DDPMBetas("scaled_linear"),
    DDPMBetas("cosine"),
    VE(),
]
PRODUCT = list(itertools.product(SCHEDULES, Kind))


def name(value: object) -> str:
    """A readable test id."""
    if isinstance(value, Kind):
        return value.value
    if isinstance(value, DDPMBetas):
        return f"ddpm-{value.betas}"
    return type(value).__name__


# four clusters of unequal weight, three tilted components each, in six dimensions; two labels
WORLD = GaussianWorld.random(dimensions=6, clusters=4, components=3, labels=2, seed=0)


def states(count: int, times: list[float], schedule: Schedule | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Noisy states of the world on a path (linear unless told), `count` at each of the times: (x, t), float64."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.tensor(times, dtype=torch.float64).repeat_interleave(count)
    x0, _ = WORLD.sample(len(t), generator)
    eps = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
    return noisy(schedule or LinearFlow(), x0, eps, t), t


def relative_error(value: Tensor, truth: Tensor) -> Tensor:
    """|value - truth| / |truth| per sample [B]."""
    value, truth = value.double().flatten(1), truth.double().flatten(1)
    return (value - truth).norm(dim=1) / truth.norm(dim=1)


def covered(schedule: Schedule, t: Tensor) -> Tensor:
    """Where on the linear path a schedule has seen that signal-to-noise ratio, bool [B]."""
    log_snr = LinearFlow().log_snr(t)
    return (log_snr >= schedule.band[0]) & (log_snr <= schedule.band[1])
