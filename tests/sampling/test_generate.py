"""`generate`: what comes out is the world itself, and image i depends on seed i only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.diffusion import (
    VE,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    Prediction,
    Schedule,
)
from atoll.mixture import Mixture, parse_route
from atoll.sampling import SOLVERS, Request, Sampling, generate, image_seeds, stream
from closed_form import ExactDenoiser, ExactRouter, GaussianWorld
from paper_fusion import PaperFusion

# components far enough apart to tell which one a sample came from; clusters of 14 to 34 %
WORLD = GaussianWorld.random(dimensions=4, clusters=4, components=2, spread=8.0, seed=3)
TRAINED: list[tuple[Schedule, Kind]] = [
    (DDPMBetas("cosine"), Kind.EPSILON),
    (LinearFlow(), Kind.VELOCITY),
    (VE(), Kind.X0),
    (CosineVP(), Kind.V),
]


PLAIN = Sampling(guidance=1.0, solver="heun")


def ensemble(route: str = "full") -> Mixture:
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), *how)) for k, how in enumerate(TRAINED)]
    return Mixture.of(experts, ExactRouter(WORLD), parse_route(route))


def worst(solver: str, steps: int, count: int) -> dict[str, float]:
    sampling = Sampling(steps=steps, solver=solver, grid="log-snr", guidance=1.0)
    samples = generate(ensemble(), (4,), range(count), None, sampling, batch=count)
    return {what: z.abs().max().item() for what, z in WORLD.z_scores(samples).items()}


@pytest.mark.parametrize(("solver", "steps"), [("heun", 40), ("dpmpp_2m", 60)])
def test_samples_of_a_mixed_ensemble_are_samples_of_the_world(solver: str, steps: int) -> None:
    """8,000 samples, no entry of shares, means or covariances more than 4.5 standard errors off."""
    z = worst(solver, steps, 8_000)
    assert set(z) == {"shares", "means", "covariances"}
    assert max(z.values()) < 4.5, z


def test_the_same_statistics_catch_the_literal_fusion() -> None:
    experts = [
        PaperFusion(ExactDenoiser(WORLD.cluster(0), CosineVP(), Kind.EPSILON)),
        *[ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY) for k in (1, 2, 3)],
    ]
    model = Mixture.of(experts, ExactRouter(WORLD))
    samples = generate(model, (4,), range(4000), None, Sampling(guidance=1.0), batch=4000)
    assert max(z.abs().max().item() for z in WORLD.z_scores(samples).values()) > 20


def test_true_samples_pass_and_a_world_with_other_shares_does_not() -> None:
    true, _ = WORLD.sample(20_000, torch.Generator().manual_seed(1))
    assert all(z.abs().max() < 4.5 for z in WORLD.z_scores(true).values())
    skewed = GaussianWorld(
        weights=WORLD.weights.flip(0),
        means=WORLD.means,
        covariances=WORLD.covariances,
        clusters=WORLD.clusters,
        labels=WORLD.labels,
    )
    assert skewed.z_scores(true)["shares"].abs().max() > 10


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("route", ["full", "top-1", "fixed"])
def test_an_image_depends_on_its_seed_and_not_on_its_batch(route: str, solver: str) -> None:
    condition = Condition(labels=torch.arange(24) % 2)
    model, sampling = ensemble(route), Sampling(steps=8, solver=solver, guidance=2.0)

    def images(seeds: list[int], rows: list[int], batch: int) -> Tensor:
        return generate(model, (4,), seeds, condition[torch.tensor(rows)], sampling, batch=batch)

    seeds = image_seeds(100, 24)
    together = images(seeds, list(range(24)), 24)
    torch.testing.assert_close(images(seeds, list(range(24)), 7), together, rtol=0, atol=1e-4)
    some = [3, 17, 4]
    torch.testing.assert_close(images([seeds[i] for i in some], some, 2), together[some], rtol=0, atol=1e-4)
    other = images([s + 1000 for s in seeds], list(range(24)), 24)
    assert ((other - together).abs().amax(1) > 1e-3).sum() > 20


def test_guidance_reaches_the_condition_asked_for() -> None:
    labels = torch.arange(200) % 2
    model = ensemble("top-1")
    samples = generate(model, (4,), range(200), Condition(labels=labels), Sampling(steps=30, guidance=2.0))
    clean = torch.zeros(200, dtype=torch.float64)
    component = WORLD.posterior(samples, clean, LinearFlow(), None).components.argmax(1)
    assert (WORLD.labels[component] == labels).float().mean() > 0.97


@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_show_every_time_and_the_preview_becomes_the_result(solver: str) -> None:
    sampling = Sampling(steps=30, solver=solver, grid="log-snr", guidance=1.0)
    seen = list(stream(ensemble("top-2"), (4,), Request(range(12), None, sampling), batch=8))
    first, second = seen[:30], seen[30:]
    for steps, images in ((first, slice(0, 8)), (second, slice(8, 12))):
        assert [step.index for step in steps] == list(range(30))
        assert [step.time for step in steps] == sampling.times(LinearFlow())[:-1].tolist()
        assert all(step.images == images for step in steps)
        assert all((step.chosen > 0).sum(1).max() <= 2 for step in steps)
        assert [step.latents is None for step in steps] == [True] * 29 + [False]
        torch.testing.assert_close(steps[-1].x0.float(), steps[-1].latents, rtol=0, atol=1e-4)
    # at t = 1 the best estimate is the mean of all data
    mean = (WORLD.weights[:, None] * WORLD.means).sum(0)
    exact = next(stream(ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY), (4,), Request(range(8), None, sampling)))
    torch.testing.assert_close(exact.x0, mean.expand(8, -1), rtol=0, atol=1e-4, check_dtype=False)


def test_no_image_is_no_work() -> None:
    assert generate(ensemble(), (4,), [], None, PLAIN).shape == (0, 4)


def test_a_denoiser_on_another_path_starts_at_that_paths_noise() -> None:
    class First:
        schedule, kind = VE(), Kind.X0
        x: Tensor

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            if not hasattr(self, "x"):
                self.x = x
            return Prediction(Kind.X0, torch.zeros_like(x))

    model = First()
    assert isinstance(model, Denoiser)
    sampling = Sampling(steps=5, solver="euler", grid="log-snr", guidance=1.0)
    samples = generate(model, (64, 64), [0], None, sampling)
    assert 79 < model.x.std() < 81
    assert samples.shape == (1, 64, 64)


def test_nothing_is_recorded_for_a_gradient() -> None:
    class Trained:
        schedule, kind = LinearFlow(), Kind.VELOCITY
        weight = torch.ones(1, requires_grad=True)

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            return Prediction(Kind.VELOCITY, self.weight * x)

    assert not generate(Trained(), (3,), [0], None, Sampling(steps=2, guidance=1.0)).requires_grad


def test_mistakes_are_named_before_any_work() -> None:
    class Untouchable:
        schedule, kind = LinearFlow(), Kind.VELOCITY

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            raise AssertionError("the denoiser was asked")

    model, labels = Untouchable(), Condition(labels=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 seeds need as many conditions, got 2"):
        generate(model, (4,), [0, 1, 2], labels)
    with pytest.raises(ValueError, match="max_images must be at least 1, got 0"):
        generate(model, (4,), [0], None, PLAIN, batch=0)
    with pytest.raises(ValueError, match="needs a condition"):
        generate(model, (4,), [0], None, Sampling(guidance=2.0))
