"""Nothing of float64 reaches a device that has none, and what comes out there is what the CPU says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from apple_device import APPLE, AppleDevice, NoFloat64
from atoll.data.space import LatentConfig
from atoll.diffusion import (
    EDM,
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
    Schedule,
    Sigmoid,
    Weighting,
    velocity_error,
    widen,
)
from atoll.diffusion.schedule import _ddpm_log_snr_on
from atoll.mixture.mixture import Mixture
from atoll.mixture.routes import parse_route
from atoll.models.dit import DiT, DiTConfig
from atoll.models.router import Router, RouterConfig
from atoll.router.card import RouterCard, TrainedRouter
from atoll.sampling import SOLVERS, Sampling, generate
from atoll.sampling.settings import GuidanceWeights
from closed_form import ExactDenoiser, ExactRouter
from gaussian_world import PRODUCT, WORLD, name, states

LATENT = (2, 4, 4)
CONFIG = DiTConfig(latent=LATENT, patch=2, width=16, depth=2, heads=2, condition="labels", classes=3)
EXPERTS: list[tuple[AnySchedule, Kind]] = [
    (LinearFlow(), Kind.VELOCITY),
    (DDPMBetas("linear"), Kind.EPSILON),
    (EDM(), Kind.V),
    (CosineVP(), Kind.X0),
]


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The stand-in, counted among the devices without float64."""
    monkeypatch.setattr("atoll.diffusion.schedule.WITHOUT_FLOAT64", ("mps", APPLE.type))
    _ddpm_log_snr_on.cache_clear()
    with AppleDevice():
        yield APPLE
    _ddpm_log_snr_on.cache_clear()


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
        lambda device: torch.arange(2, device=device).to(torch.float64),
        lambda device: Objective(schedule=EDM(), kind=Kind.V).at(torch.rand(2)).to(device),
    ],
)
def test_the_stand_in_catches_a_planted_float64(apple: torch.device, planted: Callable[[torch.device], object]) -> None:
    with pytest.raises(NoFloat64):
        planted(apple)


def test_the_stand_in_catches_a_schedule_that_widens_there() -> None:
    """The same code with the device left out of those without float64."""
    with AppleDevice(), pytest.raises(NoFloat64):
        LinearFlow().alpha(torch.rand(2).to(APPLE))


def test_the_stand_in_catches_a_tensor_left_on_the_cpu(apple: torch.device) -> None:
    with pytest.raises(RuntimeError, match="left on the CPU"):
        torch.zeros(2, device=apple) * torch.zeros(2)


@pytest.mark.parametrize("weighting", [Plain(), MinSNR(), Sigmoid()], ids=repr)
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_a_training_step(apple: torch.device, schedule: AnySchedule, kind: Kind, weighting: Weighting) -> None:
    """Loss and gradients, with the coefficients shipped from the CPU and with them computed on the device."""
    objective = Objective(schedule=schedule, kind=kind, weighting=weighting)
    x0, eps, condition = batch(5)
    t = objective.times(torch.linspace(0.05, 0.95, 5, dtype=torch.float64))
    network = trained(DiT(CONFIG), 0).requires_grad_(True)

    def step(device: torch.device, shipped: bool) -> tuple[Tensor, Tensor]:
        on_device = deepcopy(network).to(device)
        denoiser = NetworkDenoiser(on_device, schedule, kind, CONFIG.time_scale)
        x0_, eps_, t_ = x0.to(device), eps.to(device), widen(t, device)
        if shipped:
            corruption = objective.at(t).to(device, torch.float32)
            answer = denoiser(corruption.noisy(x0_, eps_), t_.float(), condition.to(device))
            loss = corruption.loss(answer.value, x0_, eps_)
        else:
            answer = denoiser(objective.noisy(x0_, eps_, t_), t_, condition.to(device))
            loss = objective.loss(answer, x0_, eps_, t_)
        loss.mean().backward()
        gradient = on_device.patches.project.weight.grad
        assert gradient is not None
        assert {loss.device, gradient.device} == {device}
        return loss.detach().cpu(), gradient.cpu()

    loss, gradient = step(torch.device("cpu"), False)
    for shipped in (True, False):
        on_apple, apples_gradient = step(apple, shipped)
        torch.testing.assert_close(on_apple, loss, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(apples_gradient, gradient, rtol=1e-2, atol=1e-3 * gradient.abs().max().item())


@pytest.mark.parametrize(("schedule", "kind"), EXPERTS, ids=name)
def test_the_val_loss_through_the_bridge(apple: torch.device, schedule: Schedule, kind: Kind) -> None:
    x0, eps, condition = batch(5)
    t = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    network = trained(DiT(CONFIG), 0)

    def error(device: torch.device) -> Tensor:
        bridge = Bridge(NetworkDenoiser(deepcopy(network).to(device), schedule, kind, CONFIG.time_scale))
        times = widen(t, device)
        return velocity_error(bridge, x0.to(device), eps.to(device), times, condition.to(device)).cpu()

    torch.testing.assert_close(error(apple), error(torch.device("cpu")), rtol=1e-2, atol=1e-3)


def ensemble(device: torch.device, route: str) -> Mixture:
    denoisers = [
        Bridge(NetworkDenoiser(trained(DiT(CONFIG), k).to(device), schedule, kind, CONFIG.time_scale))
        for k, (schedule, kind) in enumerate(EXPERTS)
    ]
    architecture = RouterConfig(trunk=CONFIG, clusters=len(EXPERTS))
    space = LatentConfig(autoencoder="pixels", shape=LATENT, mean=(0.0, 0.0), scale=(1.0, 1.0))
    card = RouterCard(architecture=architecture, latent=space, partition="", images=0)
    router = TrainedRouter(card, trained(Router(architecture), 9).to(device), "")  # type: ignore[arg-type]
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
