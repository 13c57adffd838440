"""What docs/extend.md says of schedules, weightings, solvers, metrics, routers and the backbone, done here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from atoll.diffusion import Bridge, Condition, Kind, LinearFlow, Objective, Schedule, squared_error, widen, x0_gain
from atoll.evaluation.scores import SCORES, Real, Sets, score, scored
from atoll.mixture import Mixture, parse_route
from atoll.models.accounting import account
from atoll.models.dit import DiTConfig
from atoll.models.presets import preset
from atoll.models.router import ROUTERS, Router, RouterConfig, build_router, cluster_weights, router
from atoll.sampling import SOLVERS, Sampling, generate
from atoll.sampling.solvers import GridPath, StepNoise, Walk
from atoll.training.result import read_network
from closed_form import ExactDenoiser, ExactRouter, GaussianWorld
from gaussian_world import WORLD, relative_error, states

LATENTS = GaussianWorld.random(dimensions=4, clusters=2, components=2, spread=8.0, seed=3)  # as latents [1, 2, 2]


@dataclass(frozen=True)
class Parabola(Schedule):
    name: str = "parabola"

    def alpha(self, t: Tensor) -> Tensor:
        return 1.0 - widen(t) ** 2

    def sigma(self, t: Tensor) -> Tensor:
        return widen(t)


@dataclass(frozen=True)
class SoftMinSNR:
    """x0 error weighted by 5 SNR / (SNR + 5): min-SNR without a corner."""

    name: str = "soft-min-snr"

    def __call__(self, kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
        return 5.0 * torch.sigmoid(schedule.log_snr(t) - math.log(5.0)) * x0_gain(kind, schedule, t) ** 2


def midpoint(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """Second order: the velocity in the middle of an Euler step."""
    for i in range(path.steps):
        length = path.t[i + 1] - path.t[i]
        v = yield x, path.t[i]
        x = x + length * (yield x + 0.5 * length * v, path.t[i] + 0.5 * length)
    return x


class MLPRouter(Router):
    """Two linear maps of the flattened latent and the time; it sees no condition."""

    def __init__(self, config: RouterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList()
        self.enter = nn.Linear(torch.Size(config.trunk.latent).numel() + 1, config.trunk.width)
        self.leave = nn.Linear(config.trunk.width, config.clusters)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        t = time[:, None].to(x.dtype) / self.config.trunk.time_scale
        logits: Tensor = self.leave(F.silu(self.enter(torch.cat([x.flatten(1), t], dim=1))))
        return logits


@pytest.fixture
def mlp() -> Iterator[str]:
    router("mlp")(MLPRouter)
    yield "mlp"
    del ROUTERS["mlp"]


@pytest.mark.parametrize("kind", [Kind.X0, Kind.EPSILON, Kind.VELOCITY, Kind.V])
def test_a_schedule_is_two_functions(kind: Kind) -> None:
    """Bridged exactly, and trained on."""
    x, t = states(16, [0.05, 0.3, 0.6, 0.9])
    truth = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)(x, t, None).value
    found = Bridge(ExactDenoiser(WORLD, Parabola(), kind), limit=None)(x, t, None).value
    assert relative_error(found, truth).max() < 1e-9
    objective = Objective(schedule=Parabola(), kind=kind)  # type: ignore[arg-type]
    x_t, target, weight = objective.corrupt(x, torch.zeros_like(x), objective.times(t))
    assert x_t.isfinite().all()
    assert target.isfinite().all()
    assert (weight == 1).all()


def test_a_weighting_is_one_function() -> None:
    x, t = states(4, [0.2, 0.9])
    objective = Objective(schedule=LinearFlow(), kind=Kind.EPSILON, weighting=SoftMinSNR())  # type: ignore[arg-type]
    _, target, weight = objective.corrupt(x, x.roll(1, 0), t)
    snr = ((1 - t) / t) ** 2
    torch.testing.assert_close(weight, 5.0 / (snr + 5.0))
    assert (weight * squared_error(torch.zeros_like(target), target)).isfinite().all()


def test_a_solver_is_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same number of velocities its images are nearer to those of many steps than Euler's."""
    monkeypatch.setitem(SOLVERS, "midpoint", midpoint)
    experts = [ExactDenoiser(LATENTS.cluster(k), LinearFlow(), Kind.VELOCITY) for k in range(2)]
    model = Mixture.of(experts, ExactRouter(LATENTS))

    def images(solver: str, steps: int) -> Tensor:
        return generate(model, (4,), range(64), None, Sampling(steps=steps, solver=solver, guidance=1.0))

    exact = images("heun", 400)
    assert (images("midpoint", 20) - exact).norm() < 0.5 * (images("euler", 40) - exact).norm()


def test_a_metric_is_a_function_of_sets() -> None:
    @score("mean_distance", title="distance of means")
    def mean_distance(sets: Sets) -> float:
        """Distance between the mean features of generated and real images."""
        return (sets.features.mean(0) - sets.real.features.mean(0)).norm().item()

    try:
        real = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
        sets = Sets(real[:30] + 1.0, Real(real, real, torch.full((50,), -1)))
        assert SCORES["mean_distance"].explanation.startswith("Distance between")
        assert scored(sets)["mean_distance"].value == pytest.approx(8**0.5, rel=0.2)
    finally:
        del SCORES["mean_distance"]


def test_a_router_architecture_is_a_class(mlp: str, tmp_path: Path) -> None:
    """It learns, is written and read like any other, and routes a mixture."""
    config = RouterConfig(name=mlp, trunk=DiTConfig(latent=(1, 2, 2), patch=1, width=32, depth=1, heads=1), clusters=2)
    torch.manual_seed(0)
    network = build_router(config)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(150):
        x0, component = LATENTS.sample(256, numbers)
        t = torch.rand(256, generator=numbers)
        x = (1 - t)[:, None] * x0.float() + t[:, None] * torch.randn(256, 4, generator=numbers)
        logits = network(x.view(-1, 1, 2, 2), t * config.trunk.time_scale, None)
        loss = F.cross_entropy(logits, LATENTS.clusters[component])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    save_file(dict(network.state_dict()), tmp_path / "model.safetensors")
    trained = read_network(lambda: build_router(config), config.trunk, tmp_path / "model.safetensors", "cpu")

    def routed(x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return cluster_weights(trained, config.trunk.time_scale, x, t, condition)

    experts = [ExactDenoiser(LATENTS.cluster(k), LinearFlow(), Kind.VELOCITY) for k in range(2)]
    model = Mixture.of(experts, routed, parse_route("top-1"))
    images = generate(model, (1, 2, 2), range(400), None, Sampling(steps=20, guidance=1.0), batch=400)
    component = LATENTS.posterior(images, torch.zeros(400), LinearFlow(), None).clusters.argmax(1)
    shares = torch.bincount(component, minlength=2) / 400
    torch.testing.assert_close(shares.double(), LATENTS.cluster_weights, atol=0.1, rtol=0)


def test_an_unknown_router_is_refused_with_the_known_ones() -> None:
    trunk = DiTConfig(latent=(1, 2, 2), patch=1, width=32, depth=1, heads=1)
    with pytest.raises(ValueError, match="name must be one of dit, got 'mlp'"):
        RouterConfig(name="mlp", trunk=trunk, clusters=2)


def test_a_backbone_option_needs_no_other_file() -> None:
    """A preset takes any field of the backbone, and its cost is counted from what is computed."""
    usual = preset("s/2", latent=(4, 32, 32))
    other = preset("s/2", latent=(4, 32, 32), mlp_ratio=2.0, qk_norm=True)
    assert other.qk_norm
    # two maps of 384 x 768 less in each of 12 blocks, for each of 256 tokens
    assert account(usual).flops_forward - account(other).flops_forward == 2 * 12 * 256 * 2 * 384 * 768
