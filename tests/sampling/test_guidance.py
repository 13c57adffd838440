"""Guidance: against its formula, in every kind, inside its interval, at its price."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.ensemble import Mixture
from atoll.evaluation.closed_form import ExactDenoiser, ExactRouter
from atoll.process import Bridge, Condition, Kind, LinearFlow, Prediction, Schedule, guide
from atoll.sampling import Guided
from gaussian_world import PRODUCT, WORLD, name, relative_error, states

TIMES = [0.02, 0.2, 0.5, 0.8, 0.98]
TRUTH = ExactDenoiser(WORLD, LinearFlow(), Kind.VELOCITY)


class Counted(ExactDenoiser):
    rows: list[int]

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        self.rows.append(len(x))
        return super().__call__(x, t, condition)


def counted() -> Counted:
    denoiser = Counted(WORLD, LinearFlow(), Kind.VELOCITY)
    object.__setattr__(denoiser, "rows", [])
    return denoiser


def batch() -> tuple[Tensor, Tensor, Condition]:
    x, t = states(8, TIMES)
    return x, t, Condition(labels=torch.arange(len(x)) % 2)


def by_formula(x: Tensor, t: Tensor, condition: Condition, scale: float) -> Tensor:
    conditional, unconditional = (TRUTH(x, t, c).value for c in (condition, condition.null()))
    return unconditional + scale * (conditional - unconditional)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0, 7.5])
def test_it_is_the_formula(scale: float) -> None:
    x, t, condition = batch()
    torch.testing.assert_close(Guided(TRUTH, scale)(x, t, condition).value, by_formula(x, t, condition, scale))


@pytest.mark.parametrize(("schedule", "kind"), PRODUCT, ids=name)
def test_guiding_an_expert_before_its_bridge_is_guiding_it_after(schedule: Schedule, kind: Kind) -> None:
    x, t = states(8, [0.1, 0.5, 0.9])
    condition = Condition(labels=torch.arange(len(x)) % 2)
    guided = Bridge(Guided(ExactDenoiser(WORLD, schedule, kind), 3.0), limit=None)(x, t, condition).value
    assert relative_error(guided, by_formula(x, t, condition, 3.0)).max() < 1e-9


def test_outside_its_interval_it_is_the_plain_call() -> None:
    x, t, condition = batch()
    answer = Guided(TRUTH, 3.0, interval=(0.2, 0.8))(x, t, condition).value
    inside = (t >= 0.2) & (t <= 0.8)
    torch.testing.assert_close(answer[inside], by_formula(x, t, condition, 3.0)[inside])
    torch.testing.assert_close(answer[~inside], TRUTH(x, t, condition).value[~inside])


@pytest.mark.parametrize(
    ("time", "scale", "interval", "rows"),
    [(0.5, 1.0, None, [8]), (0.5, 3.0, None, [16]), (0.5, 3.0, (0.3, 0.6), [16]), (0.9, 3.0, (0.3, 0.6), [8])],
)
def test_two_halves_are_one_call_and_no_guidance_is_half_of_it(
    time: float, scale: float, interval: tuple[float, float] | None, rows: list[int]
) -> None:
    denoiser = counted()
    x, t = states(8, [time])
    Guided(denoiser, scale, interval)(x, t, Condition(labels=torch.arange(8) % 2))
    assert denoiser.rows == rows


def test_a_mixture_is_asked_for_its_own_way() -> None:
    x, t, condition = batch()
    experts = [Bridge(ExactDenoiser(WORLD.cluster(k), LinearFlow(), Kind.VELOCITY)) for k in range(4)]
    mix = Mixture(experts, ExactRouter(WORLD), guidance_weights="conditional")
    answer = Guided(mix, 3.0)(x, t, condition).value
    assert torch.equal(answer, mix.guided(x, t, condition, 3.0, weights="conditional").value)
    assert not torch.equal(answer, mix.guided(x, t, condition, 3.0, weights="own").value)


def test_bfloat16_answers_are_combined_in_float32() -> None:
    halves = torch.ones(2, 3, dtype=torch.bfloat16)
    assert guide(halves, halves, 7.5).dtype == torch.float32


def test_mistakes_are_named() -> None:
    x, t, _ = batch()
    with pytest.raises(ValueError, match=r"guidance 3\.0 needs a condition"):
        Guided(TRUTH, 3.0)(x, t, None)
    assert torch.equal(Guided(TRUTH, 1.0)(x, t, None).value, TRUTH(x, t, None).value)
    for interval in ((0.5, 0.5), (0.8, 0.2), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(ValueError, match="0 <= low < high <= 1"):
            Guided(TRUTH, 3.0, interval)
