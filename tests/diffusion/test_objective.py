"""Objectives: densities against scipy, weightings against the identities of the papers, one validation loss."""

from __future__ import annotations

import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from atoll.diffusion import (
    VE,
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
    convert,
    fixed_times,
    noisy,
    shift_time,
    squared_error,
    velocity_error,
)
from closed_form import ExactDenoiser
from gaussian_world import PRODUCT, SCHEDULES, WORLD, name

TIMES = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99], dtype=torch.float64)
WEIGHTINGS: list[Weighting] = [Plain(), MinSNR(), Sigmoid()]


def sample_and_noise() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x0, eps = torch.randn(2, len(TIMES), 8, generator=generator, dtype=torch.float64)
    return x0, eps


def losses_of_the_same_mistake(schedule: Schedule, weighting: Weighting) -> dict[Kind, Tensor]:
    """Loss per time of one mistake in x0, for every kind."""
    x0, eps = sample_and_noise()
    alpha, sigma = schedule.alpha(TIMES)[:, None], schedule.sigma(TIMES)[:, None]
    wrong_x0 = x0 + 0.1 * x0.roll(1, dims=1)
    wrong_eps = (noisy(schedule, x0, eps, TIMES) - alpha * wrong_x0) / sigma
    return {
        kind: weighting(kind, schedule, TIMES)
        * squared_error(
            combine(kind, schedule, TIMES, wrong_x0, wrong_eps).value, combine(kind, schedule, TIMES, x0, eps).value
        )
        for kind in Kind
    }


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
def test_a_weighting_gives_all_kinds_the_loss_its_paper_defines(schedule: Schedule, weighting: Weighting) -> None:
    plain, loss = losses_of_the_same_mistake(schedule, Plain()), losses_of_the_same_mistake(schedule, weighting)
    for kind in Kind:
        torch.testing.assert_close(loss[kind], loss[Kind.X0], rtol=1e-6, atol=0)
    snr = (schedule.alpha(TIMES) / schedule.sigma(TIMES)) ** 2
    if isinstance(weighting, MinSNR):
        torch.testing.assert_close(loss[Kind.X0], snr.clamp(max=weighting.gamma) * plain[Kind.X0])
    if isinstance(weighting, Sigmoid):
        expected = torch.sigmoid(weighting.bias - snr.log()) * plain[Kind.EPSILON]
        torch.testing.assert_close(loss[Kind.EPSILON], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_a_corrupted_batch_is_state_target_and_weight(schedule: Schedule, kind: Kind, dtype: torch.dtype) -> None:
    """Bit for bit, and the target is undone by the conversion of inference."""
    x0, eps = (value.to(dtype) for value in sample_and_noise())
    objective = Objective(schedule=schedule, kind=kind, weighting=MinSNR())  # type: ignore[arg-type]
    x_t, target, weight = objective.corrupt(x0, eps, TIMES)
    alpha, sigma = schedule.alpha(TIMES)[:, None].to(dtype), schedule.sigma(TIMES)[:, None].to(dtype)
    p, q = (c[:, None].to(dtype) for c in coefficients(kind, schedule, TIMES))
    assert x_t.equal(alpha * x0 + sigma * eps)
    assert target.equal(p * x0 + q * eps)
    assert weight.equal(MinSNR()(kind, schedule, TIMES))
    if dtype == torch.float64:
        for other, known in ((Kind.X0, x0), (Kind.EPSILON, eps)):
            back = convert(Prediction(kind, target), other, schedule, x_t, TIMES).value
            torch.testing.assert_close(back, known, rtol=1e-9, atol=1e-9)


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


UNBOUNDED = {
    *((schedule, Kind.SCORE) for schedule in SCHEDULES),
    (VE(), Kind.VELOCITY),  # d_sigma up to 300
}


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=repr)
@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_targets_are_bounded_or_refused(schedule: Schedule, kind: Kind, weighting: Weighting) -> None:
    """From end to end of the training times, in float32, the loss of a network that predicts 0 stays small."""
    u = torch.tensor([0.0, 1e-12, 0.5, 1 - 1e-12, 1.0], dtype=torch.float64)
    x0, eps = (value[: len(u)].float() for value in sample_and_noise())
    for density in (Uniform(), LogitNormal(), Shifted(3.0)):
        settings = {"schedule": schedule, "kind": kind, "density": density, "weighting": weighting}
        if (schedule, kind) in UNBOUNDED and weighting == Plain():
            with pytest.raises(
                ValueError, match=rf"kind {kind} on {schedule.name} with weighting plain: .*use another"
            ):
                Objective(**settings)  # type: ignore[arg-type]
            continue
        objective = Objective(**settings)  # type: ignore[arg-type]
        t = objective.times(u)
        assert ((t >= 0) & (t <= 1)).all()
        assert (t.diff() >= 0).all()
        _, target, weight = objective.corrupt(x0, eps, t)
        assert (weight * target.square().mean(1)).max() < 2_000


def test_shift_multiplies_the_noise_to_signal_ratio() -> None:
    t = shift_time(TIMES, 3.0)
    torch.testing.assert_close(t / (1 - t), 3.0 * TIMES / (1 - TIMES))


def test_the_error_of_a_bfloat16_prediction_is_summed_in_float32() -> None:
    x0, eps = (v.float() for v in sample_and_noise())
    error = squared_error(torch.zeros_like(x0).bfloat16(), eps - x0)
    assert error.dtype == torch.float32
    torch.testing.assert_close(error, (eps - x0).square().mean(1))


def test_the_val_loss_measures_ideal_experts_of_all_kinds_alike() -> None:
    """At a fixed (sample, noise, t) an ideal expert's error is the world's own uncertainty, whatever its objective."""
    generator = torch.Generator().manual_seed(2)
    t = fixed_times(16)
    assert t[:2].tolist() == [1 / 32, 3 / 32]
    x0, _ = WORLD.sample(16, generator)
    eps = torch.randn(x0.shape, generator=generator, dtype=torch.float64)

    def error(schedule: Schedule, kind: Kind) -> Tensor:
        return velocity_error(Bridge(ExactDenoiser(WORLD, schedule, kind), limit=None), x0, eps, t, None)

    reference = error(LinearFlow(), Kind.VELOCITY)
    assert (reference > 0.01).any()
    for schedule, kind in [(CosineVP(), Kind.EPSILON), (DDPMBetas("cosine"), Kind.X0), (CosineVP(), Kind.V)]:
        torch.testing.assert_close(error(schedule, kind), reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: LogitNormal(std=0.0), "got 0.0"), (lambda: Shifted(-1.0), "got -1.0"), (lambda: MinSNR(0.0), "got 0.0")],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
