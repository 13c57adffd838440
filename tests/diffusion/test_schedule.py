"""Schedules: derivatives, inverse, band, and the tables other people trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from atoll.diffusion import (
    VE,
    Bridge,
    Condition,
    CosineVP,
    DDPMBetas,
    Kind,
    LinearFlow,
    NetworkDenoiser,
    Schedule,
    convert,
    per_sample,
    widen,
)
from closed_form import ExactDenoiser
from gaussian_world import SCHEDULES, WORLD, name, relative_error, states

# off the knots of a 1000-step table, where a piecewise path has one slope on each side
INSIDE = torch.linspace(0.0013, 0.9987, 501, dtype=torch.float64)
ENDS = torch.tensor([0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
@pytest.mark.parametrize("part", ["alpha", "sigma"])
def test_derivatives_agree_with_autograd(schedule: Schedule, part: str) -> None:
    t = INSIDE.clone().requires_grad_()
    value = getattr(schedule, part)(t) + 0.0 * t  # VE's alpha does not depend on t at all
    (expected,) = torch.autograd.grad(value.sum(), t)
    torch.testing.assert_close(getattr(schedule, f"d_{part}")(INSIDE), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_log_snr_is_the_log_of_the_ratio_and_falls(schedule: Schedule) -> None:
    log_snr = schedule.log_snr(INSIDE)
    ratio = (schedule.alpha(INSIDE) / schedule.sigma(INSIDE)) ** 2
    torch.testing.assert_close(log_snr, ratio.log(), rtol=1e-9, atol=1e-9)
    assert (log_snr.diff() < 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_time_at_inverts_log_snr(schedule: Schedule) -> None:
    torch.testing.assert_close(schedule.time_at(schedule.log_snr(INSIDE)), INSIDE, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_time_at_clamps_to_the_band_and_the_band_is_the_schedules_own(schedule: Schedule) -> None:
    noisiest, cleanest = schedule.band
    far = torch.tensor([-1e3, -math.inf, 1e3, math.inf], dtype=torch.float64)
    times = schedule.time_at(far)
    reached = schedule.log_snr(times)
    torch.testing.assert_close(reached[:2], torch.full((2,), noisiest).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(reached[2:], torch.full((2,), cleanest).double(), rtol=1e-6, atol=0)
    assert ((times >= 0) & (times <= 1)).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_everything_but_the_log_is_finite_at_both_ends(schedule: Schedule) -> None:
    for part in ("alpha", "sigma", "d_alpha", "d_sigma"):
        assert getattr(schedule, part)(ENDS).isfinite().all()
    assert not schedule.log_snr(ENDS).isnan().any()
    assert schedule.time_at(schedule.log_snr(ENDS)).isfinite().all()


@pytest.mark.parametrize("schedule", [CosineVP(), *[s for s in SCHEDULES if isinstance(s, DDPMBetas)]], ids=name)
def test_variance_preserving_paths_preserve_variance(schedule: Schedule) -> None:
    t = torch.cat([ENDS, INSIDE])
    torch.testing.assert_close(schedule.alpha(t) ** 2 + schedule.sigma(t) ** 2, torch.ones_like(t))


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_low_precision_times_are_widened_before_any_arithmetic(schedule: Schedule, low: torch.dtype) -> None:
    t = INSIDE.to(low)
    assert schedule.alpha(t).dtype == torch.float64
    assert torch.equal(schedule.alpha(t), schedule.alpha(t.double()))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DDPMBetas("linear"), {"beta_schedule": "linear"}),
        (DDPMBetas("scaled_linear"), {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}),
        (DDPMBetas("cosine"), {"beta_schedule": "squaredcos_cap_v2"}),
    ],
    ids=lambda v: name(v) if isinstance(v, DDPMBetas) else "",
)
def test_ddpm_tables_are_those_of_diffusers_at_every_step(ours: DDPMBetas, theirs: dict[str, object]) -> None:
    table = DDPMScheduler(num_train_timesteps=1000, **theirs).alphas_cumprod.double()
    knots = torch.arange(1000, dtype=torch.float64) / 999
    torch.testing.assert_close(ours.alpha(knots), table.sqrt(), rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.sigma(knots), (1 - table).sqrt(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "cosine"])
def test_ddpm_is_exact_at_the_knots_and_linear_in_log_snr_between(betas: str) -> None:
    schedule = DDPMBetas(betas, steps=50)  # type: ignore[arg-type]
    knots = torch.arange(50, dtype=torch.float64) / 49
    half = (knots[1:] + knots[:-1]) / 2
    at_knots = schedule.log_snr(knots)
    torch.testing.assert_close(schedule.log_snr(half), (at_knots[1:] + at_knots[:-1]) / 2)
    torch.testing.assert_close(schedule.time_at(at_knots), knots, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPMBetas("quadratic"), "linear, scaled_linear or cosine, got 'quadratic'"),  # type: ignore[arg-type]
        (lambda: DDPMBetas("linear", steps=1), "at least 2, got 1"),
        (lambda: DDPMBetas("linear", steps=10).band, "use more steps"),
        (lambda: VE(sigma_min=3.0, sigma_max=1.0), "got 3.0 and 1.0"),
        (lambda: VE(rho=0.0), "rho must be positive"),
        (lambda: per_sample(torch.ones(3), torch.ones(2, 4)), r"shape \[2\], got \[3\]"),
        (lambda: per_sample(torch.ones(2, 1), torch.ones(2, 4)), r"got \[2, 1\]"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != VE()], ids=name)
def test_networks_of_other_paths_are_fed_the_state_itself(schedule: Schedule) -> None:
    """Foreign DiT and SiT checkpoints expect it; and no copy of it is made."""
    fed = []
    network = NetworkDenoiser(lambda x, time, condition: (fed.append(x), x)[1], schedule, Kind.V)
    x, t = states(4, [0.2, 0.8], schedule=schedule)
    network(x, t, None)
    assert fed[0] is x


def test_v_on_ve_is_edms_preconditioning() -> None:
    """D(x) = c_skip x + c_out F(c_in x), as the EDM paper's table 1 has it for sigma_data = 1, with F = -v."""
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def network(x: Tensor, time: Tensor, condition: Condition | None) -> Tensor:
        return torch.tanh(x @ matrix) * time[:, None]

    x, t = states(4, [0.05, 0.3, 0.6, 0.95], schedule=VE())
    sigma = VE().sigma(t)[:, None]
    c_skip, c_out, c_in = 1 / (sigma**2 + 1), sigma / (sigma**2 + 1).sqrt(), 1 / (sigma**2 + 1).sqrt()
    expected = c_skip * x + c_out * -network(c_in * x, t, None)
    answer = NetworkDenoiser(network, VE(), Kind.V)(x, t, None)
    torch.testing.assert_close(convert(answer, Kind.X0, VE(), x, t).value, expected, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class Circle(Schedule):
    """CosineVP with alpha and sigma alone, as a new schedule is written."""

    name: str = "circle"

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * (1.0 - widen(t)))

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * widen(t))


def test_derivatives_band_and_inverse_have_defaults() -> None:
    mine, theirs = Circle(), CosineVP()
    assert mine.band == theirs.band
    for part in ("d_alpha", "d_sigma", "log_snr"):
        torch.testing.assert_close(getattr(mine, part)(INSIDE), getattr(theirs, part)(INSIDE), rtol=1e-12, atol=1e-12)
    far = torch.tensor([-40.0, -3.0, 0.0, 3.0, 40.0], dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(mine.time_at(far), theirs.time_at(far), rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.d_alpha(INSIDE), theirs.d_alpha(INSIDE))
    x, t = states(16, [0.1, 0.5, 0.9])
    expert = ExactDenoiser(WORLD, mine, Kind.EPSILON)
    truth = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)(x, t, None).value
    assert relative_error(Bridge(expert, limit=None)(x, t, None).value, truth).max() < 1e-9
