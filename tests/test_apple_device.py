"""Nothing of float64 reaches a device that has none, and what comes out there is what the CPU says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apple_device import APPLE, AppleDevice, NoFloat64
from atoll.data.space import LatentConfig
from atoll.diffusion import (
    VE,
    AnySchedule,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Kind,
    LinearFlow,
    MinSNR,
    NetworkDenoiser,
    Objective,
    Plain,
    Sigmoid,
    squared_error,
    velocity_error,
    widen,
)
from atoll.diffusion.schedule import ddpm_log_snr
from atoll.mixture.mixture import Mixture
from atoll.mixture.routes import parse_route
from atoll.models.dit import DiT, DiTConfig
from atoll.models.router import RouterConfig, build_router
from atoll.router.card import RouterCard, TrainedRouter
from atoll.sampling import SOLVERS, Sampling, generate
from atoll.sampling.settings import GuidanceWeights
from atoll.training.compute import ComputeConfig
from atoll.training.loop import on_device
from closed_form import ExactDenoiser, ExactRouter
from gaussian_world import PRODUCT, WORLD, name, states
from tiny_orders import tiny_order, tiny_task

LATENT = (2, 4, 4)
CONFIG = DiTConfig(latent=LATENT, patch=2, width=16, depth=2, heads=2, condition="labels", classes=3)
EXPERTS: list[tuple[AnySchedule, Kind]] = [
    (LinearFlow(), Kind.VELOCITY),
    (DDPMBetas("linear"), Kind.EPSILON),
    (VE(), Kind.V),
    (CosineVP(), Kind.X0),
]


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The stand-in, counted among the devices without float64."""
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    ddpm_log_snr.cache_clear()
    with AppleDevice():
        yield APPLE
    ddpm_log_snr.cache_clear()


def trained(network: nn.Module, seed: int) -> nn.Module:
    """As if trained: no layer is silent."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return network.requires_grad_(False)


def batch(count: int) -> tuple[Tensor, Tensor, Condition]:
    x0, eps = torch.randn(2, count, *LATENT, generator=torch.Generator().manual_seed(0))
    return x0, eps, Condition(labels=torch.arange(count) % 3)


@pytest.mark.parametrize(
    "planted",
    [
        lambda device: torch.zeros(2, dtype=torch.float64).to(device),
        lambda device: torch.zeros(2, dtype=torch.float64, device=device),
        lambda device: torch.zeros(2, device=device).double(),
        lambda device: torch.zeros(2, device=device) / torch.zeros(2, dtype=torch.float64, device=device),
    ],
)
def test_the_stand_in_catches_a_planted_float64(apple: torch.device, planted: Callable[[torch.device], object]) -> None:
    with pytest.raises(NoFloat64):
        planted(apple)


def test_the_stand_in_catches_what_widens_there_or_stays_on_the_cpu(apple: torch.device) -> None:
    with pytest.raises(RuntimeError, match="left on the CPU"):
        torch.zeros(2, device=apple) * torch.zeros(2)


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_a_training_step_and_the_val_loss(apple: torch.device, schedule: AnySchedule, kind: Kind) -> None:
    """Loss and gradients with every weighting, with the coefficients computed on the device; and through the bridge."""
    x0, eps, condition = batch(5)
    network = trained(DiT(CONFIG), 0).requires_grad_(True)

    def computed(device: torch.device) -> list[Tensor]:
        there = deepcopy(network).to(device)
        denoiser = NetworkDenoiser(there, schedule, kind, CONFIG.time_scale)
        found = []
        bounded = kind is not Kind.SCORE and (schedule, kind) != (VE(), Kind.VELOCITY)
        for weighting in (*([Plain()] if bounded else []), MinSNR(), Sigmoid()):
            objective = Objective(schedule=schedule, kind=kind, weighting=weighting)
            t = widen(objective.times(torch.linspace(0.05, 0.95, 5, dtype=torch.float64)), device)
            x_t, target, weight = objective.corrupt(x0.to(device), eps.to(device), t)
            error = squared_error(denoiser(x_t, t, condition.to(device)).value, target)
            found.append(weight.to(error.dtype) * error)
            there.zero_grad()
            found[-1].mean().backward()
            assert there.patches.project.weight.grad is not None
            found.append(there.patches.project.weight.grad.clone())
        times = widen(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64), device)
        with torch.no_grad():
            error = velocity_error(Bridge(denoiser), x0.to(device), eps.to(device), times, condition.to(device))
        assert {value.device for value in (*found, error)} == {device}
        return [value.detach().cpu() for value in (*found, error)]

    for there, here in zip(computed(apple), computed(torch.device("cpu")), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-3 * max(1.0, here.abs().max().item()))


def ensemble(device: torch.device, route: str) -> Mixture:
    denoisers = [
        Bridge(NetworkDenoiser(trained(DiT(CONFIG), k).to(device), schedule, kind, CONFIG.time_scale))
        for k, (schedule, kind) in enumerate(EXPERTS)
    ]
    architecture = RouterConfig(trunk=CONFIG, clusters=len(EXPERTS))
    space = LatentConfig(autoencoder="pixels", shape=LATENT, mean=(0.0, 0.0), scale=(1.0, 1.0))
    card = RouterCard(architecture=architecture, latent=space, partition="", images=0)
    router = TrainedRouter(card, trained(build_router(architecture), 9).to(device), "")  # type: ignore[arg-type]
    return Mixture.of(denoisers, router, parse_route(route))


ROUTES = ["full", "top-2", "threshold-0.2", "fixed"]


@pytest.mark.parametrize(
    ("solver", "grid", "route", "guidance_weights"),
    [
        *((solver, "uniform", "full", "own") for solver in SOLVERS),
        *(("euler", grid, "top-2", "conditional") for grid in ("shifted-3", "log-snr")),
        *(("euler", "uniform", *both) for both in itertools.product(ROUTES, ["own", "conditional"])),
    ],
)
def test_sampling_with_guidance(
    apple: torch.device, solver: str, grid: str, route: str, guidance_weights: GuidanceWeights
) -> None:
    _, _, condition = batch(3)

    def latents(device: torch.device) -> Tensor:
        mixture = ensemble(device, route)
        sampling = Sampling(
            steps=4,
            solver=solver,
            grid=grid,
            guidance=2.0,
            guidance_interval=(0.2, 0.9),
            guidance_weights=guidance_weights,
        )
        return generate(mixture, LATENT, [1, 2, 3], condition, sampling, device=device).cpu()

    torch.testing.assert_close(latents(apple), latents(torch.device("cpu")), rtol=1e-2, atol=1e-2)


def test_the_closed_form(apple: torch.device) -> None:
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), schedule, kind)) for k, (schedule, kind) in enumerate(EXPERTS)]
    x, t = states(8, [0.1, 0.5, 0.9])
    mixture = Mixture.of(experts, ExactRouter(WORLD))
    found = mixture(x.float().to(apple), widen(t, apple), None).value
    torch.testing.assert_close(found.cpu(), mixture(x, t, None).value.float(), rtol=1e-2, atol=1e-2)


def test_an_experts_own_batch_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in float64 on the CPU, narrowed on the way: the loss and the validation loss are the CPU's."""
    task = tiny_task(tiny_order(tmp_path, network=CONFIG, validation=4))
    trained(task.network, 0)

    def losses(device: torch.device) -> Tensor:
        there = replace(task, network=deepcopy(task.network).to(device))
        loss = there.loss(there.network, on_device(task.batch(64, 8, slice(0, 8)), device)).cpu()
        return torch.cat([loss, torch.tensor([there.report(64, ComputeConfig(micro_batch=8))["val_loss"]])])

    expected = losses(torch.device("cpu"))
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    with AppleDevice():
        torch.testing.assert_close(losses(APPLE), expected, rtol=1e-2, atol=1e-3)
