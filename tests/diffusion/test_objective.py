"""Objectives: densities against scipy, weightings against the identities of the papers, one validation loss."""

from __future__ import annotations

import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from atoll.diffusion import (
    Bridge,
    CosineVP,
    DDPMBetas,
    Kind,
    LinearFlow,
    LogitNormal,
    MinSNR,
    Objective,
    Plain,
    Prediction,
    Schedule,
    Shifted,
    Sigmoid,
    TimeDensity,
    Uniform,
    Weighting,
    coefficients,
    combine,
    fixed_times,
    pair,
    shift_time,
    velocity_error,
)
from closed_form import ExactDenoiser
from gaussian_world import PRODUCT, SCHEDULES, WORLD, name

TIMES = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99], dtype=torch.float64)


def sample_and_noise() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x0, eps = torch.randn(2, len(TIMES), 8, generator=generator, dtype=torch.float64)
    return x0, eps


def losses_of_the_same_mistake(schedule: Schedule, weighting: Weighting) -> dict[Kind, Tensor]:
    """Loss per time of one mistake in x0, told in every kind."""
    x0, eps = sample_and_noise()
    found = {}
    for kind in Kind:
        objective = Objective(schedule=schedule, kind=kind, weighting=weighting)  # type: ignore[arg-type]
        x = objective.noisy(x0, eps, TIMES)
        alpha, sigma = schedule.alpha(TIMES)[:, None], schedule.sigma(TIMES)[:, None]
        wrong_x0 = x0 + 0.1 * x0.roll(1, dims=1)
        wrong_eps = (x - alpha * wrong_x0) / sigma
        found[kind] = objective.loss(combine(kind, schedule, TIMES, wrong_x0, wrong_eps), x0, eps, TIMES)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_plain_losses_differ_by_the_weights_the_papers_state(schedule: Schedule) -> None:
    loss = losses_of_the_same_mistake(schedule, Plain())
    alpha, sigma = schedule.alpha(TIMES), schedule.sigma(TIMES)
    torch.testing.assert_close(loss[Kind.EPSILON], alpha**2 / sigma**2 * loss[Kind.X0], rtol=1e-7, atol=0)
    torch.testing.assert_close(loss[Kind.SCORE], alpha**2 / sigma**4 * loss[Kind.X0], rtol=1e-7, atol=0)
    torch.testing.assert_close(loss[Kind.V], (alpha**2 + sigma**2) / sigma**2 * loss[Kind.X0], rtol=1e-7, atol=0)
    if schedule == LinearFlow():
        torch.testing.assert_close(loss[Kind.VELOCITY], 1 / sigma**2 * loss[Kind.X0], rtol=1e-7, atol=0)


@pytest.mark.parametrize("weighting", [MinSNR(), MinSNR(gamma=1.0), Sigmoid(), Sigmoid(bias=-2.0)], ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_a_weighting_makes_all_kinds_lose_the_same(schedule: Schedule, weighting: Weighting) -> None:
    loss = losses_of_the_same_mistake(schedule, weighting)
    for kind in Kind:
        torch.testing.assert_close(loss[kind], loss[Kind.X0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_weightings_are_what_their_papers_define(schedule: Schedule) -> None:
    plain = losses_of_the_same_mistake(schedule, Plain())
    snr = (schedule.alpha(TIMES) / schedule.sigma(TIMES)) ** 2
    min_snr = losses_of_the_same_mistake(schedule, MinSNR(gamma=5.0))
    torch.testing.assert_close(min_snr[Kind.X0], snr.clamp(max=5.0) * plain[Kind.X0])
    sigmoid = losses_of_the_same_mistake(schedule, Sigmoid(bias=1.0))
    torch.testing.assert_close(sigmoid[Kind.EPSILON], torch.sigmoid(1.0 - snr.log()) * plain[Kind.EPSILON])


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_the_target_of_training_is_undone_by_the_conversion_of_inference(schedule: Schedule, kind: Kind) -> None:
    objective = Objective(schedule=schedule, kind=kind)  # type: ignore[arg-type]
    x0, eps = sample_and_noise()
    x, target = objective.noisy(x0, eps, TIMES), objective.target(x0, eps, TIMES)
    assert objective.loss(target, x0, eps, TIMES).max() == 0
    torch.testing.assert_close(pair(target, schedule, x, TIMES), (x0, eps), rtol=1e-9, atol=1e-9)


WEIGHTINGS: list[Weighting] = [Plain(), MinSNR(), Sigmoid()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_the_coefficients_of_a_batch_say_what_the_schedule_says(
    schedule: Schedule, kind: Kind, weighting: Weighting, dtype: torch.dtype
) -> None:
    """Bit for bit, against schedule, table and weighting asked one by one: the old way, typed out."""
    x0, eps = (value.to(dtype) for value in sample_and_noise())
    answer = x0.roll(1, dims=1)
    objective = Objective(schedule=schedule, kind=kind, weighting=weighting)  # type: ignore[arg-type]
    corruption = objective.at(TIMES)

    alpha, sigma = schedule.alpha(TIMES)[:, None].to(dtype), schedule.sigma(TIMES)[:, None].to(dtype)
    p, q = (c[:, None].to(dtype) for c in coefficients(kind, schedule, TIMES))
    state, target = alpha * x0 + sigma * eps, p * x0 + q * eps
    loss = weighting(kind, schedule, TIMES).to(dtype) * (answer - target).square().mean(1)

    assert corruption.noisy(x0, eps).equal(state)
    assert corruption.target(x0, eps).equal(target)
    assert corruption.loss(answer, x0, eps).equal(loss)
    x_t, learned, weight = objective.corrupt(x0, eps, TIMES)
    assert x_t.equal(state)
    assert learned.equal(target)
    assert weight.equal(weighting(kind, schedule, TIMES))
    assert objective.noisy(x0, eps, TIMES).equal(state)
    assert objective.target(x0, eps, TIMES).value.equal(target)
    assert objective.loss(Prediction(kind, answer), x0, eps, TIMES).equal(loss)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_coefficients_shipped_in_float32_are_rounded_once(schedule: Schedule, kind: Kind, weighting: Weighting) -> None:
    """States and targets of float32 samples are the same bits; the loss of float64 ones is off by rounding."""
    x0, eps = sample_and_noise()
    answer = x0.roll(1, dims=1)
    wide = Objective(schedule=schedule, kind=kind, weighting=weighting).at(TIMES)  # type: ignore[arg-type]
    shipped = wide.to("cpu", torch.float32)
    assert shipped.noisy(x0.float(), eps.float()).equal(wide.noisy(x0.float(), eps.float()))
    assert shipped.target(x0.float(), eps.float()).equal(wide.target(x0.float(), eps.float()))
    assert shipped.loss(answer.float(), x0.float(), eps.float()).dtype == torch.float32
    torch.testing.assert_close(shipped.loss(answer, x0, eps), wide.loss(answer, x0, eps), rtol=1e-6, atol=0)


def test_the_coefficients_of_some_samples_are_those_of_the_batch() -> None:
    x0, eps = sample_and_noise()
    corruption = Objective(schedule=CosineVP(), kind=Kind.V, weighting=MinSNR()).at(TIMES)
    loss = corruption.loss(eps, x0, eps)
    assert len(corruption) == len(TIMES)
    for rows in (slice(2, 5), torch.tensor([4, 0]), TIMES > 0.4):
        assert corruption[rows].loss(eps[rows], x0[rows], eps[rows]).equal(loss[rows])


CUMULATIVE = {
    Uniform(): lambda t: t,
    LogitNormal(): lambda t: scipy.stats.norm.cdf(scipy.special.logit(t)),
    LogitNormal(mean=-0.6, std=1.4): lambda t: scipy.stats.norm(-0.6, 1.4).cdf(scipy.special.logit(t)),
    Shifted(3.0): lambda t: t / (3.0 - 2.0 * t),
}


@pytest.mark.parametrize("density", CUMULATIVE, ids=repr)
def test_times_follow_their_density(density: TimeDensity) -> None:
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert scipy.stats.kstest(density.quantile(u).numpy(), CUMULATIVE[density]).pvalue > 1e-3


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_training_times_stay_where_the_loss_is_finite(schedule: Schedule) -> None:
    u = torch.tensor([0.0, 1e-12, 0.5, 1 - 1e-12, 1.0], dtype=torch.float64)
    x0, eps = (v[: len(u)] for v in sample_and_noise())
    for density in (Uniform(), LogitNormal(), Shifted(3.0)):
        for weighting in (Plain(), MinSNR(), Sigmoid()):
            for kind in Kind:
                objective = Objective(schedule=schedule, kind=kind, density=density, weighting=weighting)  # type: ignore[arg-type]
                t = objective.times(u)
                assert ((t >= 0) & (t <= 1)).all()
                assert (t.diff() >= 0).all()
                assert objective.loss(Prediction(kind, eps), x0, eps, t).isfinite().all()


def test_shift_multiplies_the_noise_to_signal_ratio() -> None:
    t = shift_time(TIMES, 3.0)
    torch.testing.assert_close(t / (1 - t), 3.0 * TIMES / (1 - TIMES))


def test_the_loss_of_a_bfloat16_answer_is_summed_in_float32() -> None:
    objective = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)
    x0, eps = (v.float() for v in sample_and_noise())
    loss = objective.loss(Prediction(Kind.VELOCITY, torch.zeros_like(x0).bfloat16()), x0, eps, TIMES)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (eps - x0).square().mean(1))


def test_an_answer_of_another_kind_is_a_bug_not_a_loss() -> None:
    x0, eps = sample_and_noise()
    objective = Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)
    with pytest.raises(AssertionError, match="wants velocity, the network answered epsilon"):
        objective.loss(Prediction(Kind.EPSILON, eps), x0, eps, TIMES)


def test_the_val_loss_measures_ideal_experts_of_all_kinds_alike() -> None:
    """At a fixed (sample, noise, t) an ideal expert's error is the world's own uncertainty, whatever its objective."""
    generator = torch.Generator().manual_seed(2)
    t = fixed_times(16)
    x0, _ = WORLD.sample(16, generator)
    eps = torch.randn(x0.shape, generator=generator, dtype=torch.float64)

    def error(schedule: Schedule, kind: Kind) -> Tensor:
        return velocity_error(Bridge(ExactDenoiser(WORLD, schedule, kind), limit=None), x0, eps, t, None)

    reference = error(LinearFlow(), Kind.VELOCITY)
    assert (reference > 0.01).any()
    for schedule, kind in [(CosineVP(), Kind.EPSILON), (DDPMBetas("cosine"), Kind.X0), (CosineVP(), Kind.V)]:
        torch.testing.assert_close(error(schedule, kind), reference, rtol=1e-9, atol=1e-12)


def test_fixed_times_are_midpoints() -> None:
    assert fixed_times(4).tolist() == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: LogitNormal(std=0.0), "got 0.0"), (lambda: Shifted(-1.0), "got -1.0"), (lambda: MinSNR(0.0), "got 0.0")],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
