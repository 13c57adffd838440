"""One table of kinds: definitions typed out once more, all round trips, and how errors travel."""

from __future__ import annotations

import itertools

import pytest
import torch

from atoll.diffusion import (
    VE,
    Kind,
    LinearFlow,
    Prediction,
    Schedule,
    combine,
    convert,
    is_noise_only,
    noisy,
    x0_gain,
)
from gaussian_world import PRODUCT, SCHEDULES, name, states

TIMES = torch.tensor([0.001, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999], dtype=torch.float64)


def known_pair(schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x0, eps = torch.randn(2, len(TIMES), 4, 3, generator=generator, dtype=torch.float64)
    return x0, eps, noisy(schedule, x0, eps, TIMES)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_each_kind_is_what_the_design_says(schedule: Schedule) -> None:
    x0, eps, x = known_pair(schedule)
    alpha, sigma, d_alpha, d_sigma = (
        getattr(schedule, part)(TIMES)[:, None, None] for part in ("alpha", "sigma", "d_alpha", "d_sigma")
    )
    torch.testing.assert_close(x, alpha * x0 + sigma * eps)
    by_hand = {
        Kind.X0: x0,
        Kind.EPSILON: eps,
        Kind.VELOCITY: d_alpha * x0 + d_sigma * eps,
        Kind.V: (alpha * eps - sigma * x0) / (alpha**2 + sigma**2).sqrt(),
        Kind.SCORE: -eps / sigma,
    }
    assert set(by_hand) == set(Kind)
    for kind, value in by_hand.items():
        torch.testing.assert_close(combine(kind, schedule, TIMES, x0, eps).value, value)


@pytest.mark.parametrize(("start", "via"), list(itertools.product(Kind, Kind)), ids=name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_every_round_trip_returns(schedule: Schedule, start: Kind, via: Kind) -> None:
    x0, eps, x = known_pair(schedule)
    first = combine(start, schedule, TIMES, x0, eps)
    there = convert(first, via, schedule, x, TIMES)
    assert there.kind is via
    back = convert(there, start, schedule, x, TIMES)
    # dividing by alpha or sigma at the ends costs up to four digits of sixteen
    torch.testing.assert_close(back.value, first.value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_x0_gain_is_what_an_error_in_the_value_does_to_x0(schedule: Schedule, kind: Kind) -> None:
    x0, eps, x = known_pair(schedule)
    exact = combine(kind, schedule, TIMES, x0, eps)
    wrong = Prediction(kind, exact.value + 1.0)
    moved = convert(wrong, Kind.X0, schedule, x, TIMES).value - x0
    expected = x0_gain(kind, schedule, TIMES)[:, None, None].expand_as(x0)
    torch.testing.assert_close(moved.abs(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_which_kinds_hold_nothing_but_noise(schedule: Schedule, kind: Kind) -> None:
    expected = kind in (Kind.EPSILON, Kind.SCORE) or (kind is Kind.VELOCITY and schedule == VE())
    assert is_noise_only(kind, schedule) == expected


@pytest.mark.parametrize("kind", Kind, ids=name)
def test_bfloat16_is_converted_in_float32(kind: Kind) -> None:
    x, t = states(4, [0.3, 0.7])
    x = x.bfloat16()
    other = Kind.X0 if kind is Kind.EPSILON else Kind.EPSILON
    assert convert(Prediction(kind, x), other, LinearFlow(), x, t).value.dtype == torch.float32


def test_the_same_kind_comes_back_untouched_even_where_it_holds_nothing_else() -> None:
    ends = torch.tensor([0.0, 1.0])
    answer = Prediction(Kind.EPSILON, torch.ones(2, 3))
    assert convert(answer, Kind.EPSILON, LinearFlow(), torch.ones(2, 3), ends) is answer


def test_linear_velocity_gives_both_parts_at_the_very_ends() -> None:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    x0, eps = torch.randn(2, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = noisy(LinearFlow(), x0, eps, ends)
    velocity = combine(Kind.VELOCITY, LinearFlow(), ends, x0, eps)
    back = (convert(velocity, kind, LinearFlow(), x, ends).value for kind in (Kind.X0, Kind.EPSILON))
    torch.testing.assert_close(tuple(back), (x0, eps))
