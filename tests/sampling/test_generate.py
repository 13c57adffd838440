"""`generate`: what comes out is the world itself, and image i depends on seed i only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.artifacts import UserError
from atoll.ensemble import Mixture, parse_route
from atoll.evaluation.closed_form import ExactDenoiser, ExactRouter, GaussianWorld
from atoll.process import (
    EDM,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Denoiser,
    Kind,
    LinearFlow,
    PaperFusion,
    Prediction,
    Schedule,
)
from atoll.sampling import SOLVERS, Step, generate, image_seeds

# components far enough apart to tell which one a sample came from; clusters of 14 to 34 %
WORLD = GaussianWorld.random(dimensions=4, clusters=4, components=2, spread=8.0, seed=3)
TRAINED: list[tuple[Schedule, Kind]] = [
    (DDPMBetas("cosine"), Kind.EPSILON),
    (LinearFlow(), Kind.VELOCITY),
    (EDM(), Kind.X0),
    (CosineVP(), Kind.V),
]


def ensemble(route: str = "full", clusters: list[int] | None = None) -> Mixture:
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), *how)) for k, how in enumerate(TRAINED)]
    return Mixture(experts, ExactRouter(WORLD), parse_route(route, clusters))


def worst(solver: str, steps: int, count: int) -> dict[str, float]:
    samples = generate(ensemble(), (4,), range(count), steps=steps, solver=solver, grid="log-snr", batch=count)
    return {what: z.abs().max().item() for what, z in WORLD.z_scores(samples).items()}


@pytest.mark.parametrize(("solver", "steps"), [("heun", 50), ("dpmpp_2m", 80)])
def test_samples_of_a_mixed_ensemble_are_samples_of_the_world(solver: str, steps: int) -> None:
    """20,000 samples, no entry of shares, means or covariances more than 4.5 standard errors off."""
    z = worst(solver, steps, 20_000)
    assert set(z) == {"shares", "means", "covariances"}
    assert max(z.values()) < 4.5, z


def test_the_same_statistics_catch_the_literal_fusion() -> None:
    experts = [
        PaperFusion(ExactDenoiser(WORLD.cluster(0), CosineVP(), Kind.EPSILON)),
        *[ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY) for k in (1, 2, 3)],
    ]
    samples = generate(Mixture(experts, ExactRouter(WORLD)), (4,), range(4000), solver="dpmpp_2m", batch=4000)
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
@pytest.mark.parametrize("route", ["full", "top-1", "sampled", "fixed", "oracle"])
def test_an_image_depends_on_its_seed_and_not_on_its_batch(route: str, solver: str) -> None:
    clusters = [i % 4 for i in range(24)]
    condition = Condition(labels=torch.arange(24) % 2)

    def images(seeds: list[int], rows: list[int], batch: int) -> Tensor:
        model = ensemble(route, [clusters[row] for row in rows])
        return generate(
            model, (4,), seeds, condition[torch.tensor(rows)], steps=8, solver=solver, guidance=2.0, batch=batch
        )

    seeds = image_seeds(100, 24)
    together = images(seeds, list(range(24)), 24)
    torch.testing.assert_close(images(seeds, list(range(24)), 7), together, rtol=0, atol=1e-4)
    some = [3, 17, 4]
    torch.testing.assert_close(images([seeds[i] for i in some], some, 2), together[some], rtol=0, atol=1e-4)
    other = images([s + 1000 for s in seeds], list(range(24)), 24)
    assert ((other - together).abs().amax(1) > 1e-3).sum() > 20


def test_noise_is_equal_bit_for_bit_in_any_batch() -> None:
    def first_states(batch: int) -> Tensor:
        found = torch.empty(10, 4)

        def watch(rows: slice, step: Step) -> None:
            if step.index == 0:
                found[rows] = step.x

        generate(ensemble(), (4,), range(10), steps=2, batch=batch, watch=watch)
        return found

    assert torch.equal(first_states(10), first_states(3))


def test_guidance_reaches_the_condition_asked_for() -> None:
    labels = torch.arange(200) % 2
    model = ensemble("top-1")
    samples = generate(model, (4,), range(200), Condition(labels=labels), steps=30, solver="dpmpp_2m", guidance=2.0)
    clean = torch.zeros(200, dtype=torch.float64)
    component = WORLD.posterior(samples, clean, LinearFlow(), None).components.argmax(1)
    assert (WORLD.labels[component] == labels).float().mean() > 0.97


def test_the_watcher_can_tell_which_expert_works_when() -> None:
    """What the report draws: the routed weights at every step, for every image of the call."""
    model = ensemble("top-1")
    used = torch.zeros(12, 6, 4)

    def watch(rows: slice, step: Step) -> None:
        t = torch.full((len(step.x),), step.time, dtype=torch.float64)
        used[rows, step.index] = model.weights(step.x, t, None).float()

    generate(model, (4,), range(12), steps=6, batch=5, solver="euler", watch=watch)
    assert torch.equal(used.sum(2), torch.ones(12, 6))


def test_progress_counts_every_image_and_step_once() -> None:
    seen: list[tuple[int, int]] = []
    generate(ensemble(), (4,), range(7), steps=3, batch=3, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [3, 6, 9, 12, 15, 18, 19, 20, 21]
    assert {total for _, total in seen} == {21}


def test_no_image_is_no_work() -> None:
    assert generate(ensemble(), (4,), [], steps=3).shape == (0, 4)


def test_a_denoiser_on_another_path_starts_at_that_paths_noise() -> None:
    class First:
        schedule, kind = EDM(), Kind.X0
        x: Tensor

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            if not hasattr(self, "x"):
                self.x = x
            return Prediction(Kind.X0, torch.zeros_like(x))

    model = First()
    assert isinstance(model, Denoiser)
    samples = generate(model, (64, 64), [0], steps=5, solver="euler", grid="log-snr")
    assert 79 < model.x.std() < 81
    assert samples.shape == (1, 64, 64)


def test_nothing_is_recorded_for_a_gradient() -> None:
    class Trained:
        schedule, kind = LinearFlow(), Kind.VELOCITY
        weight = torch.ones(1, requires_grad=True)

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            return Prediction(Kind.VELOCITY, self.weight * x)

    assert not generate(Trained(), (3,), [0], steps=2).requires_grad


def test_mistakes_are_named_before_any_work() -> None:
    class Untouchable:
        schedule, kind = LinearFlow(), Kind.VELOCITY

        def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
            raise AssertionError("the denoiser was asked")

    model, labels = Untouchable(), Condition(labels=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 seeds need a condition of 3 rows, got 2"):
        generate(model, (4,), [0, 1, 2], labels)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        generate(model, (4,), [0], batch=0)
    with pytest.raises(UserError, match="--solver rk45: not known"):
        generate(model, (4,), [0], solver="rk45")
    with pytest.raises(UserError, match="--grid karras: not known"):
        generate(model, (4,), [0], grid="karras")
    with pytest.raises(UserError, match="--steps 0: use a whole number of at least 1"):
        generate(model, (4,), [0], steps=0)
    with pytest.raises(ValueError, match="needs a condition"):
        generate(model, (4,), [0], guidance=2.0)
    with pytest.raises(UserError, match=r"--guidance-interval 0\.9 0\.1: use two times"):
        generate(model, (4,), [0, 1], labels, guidance=2.0, guidance_interval=(0.9, 0.1))
