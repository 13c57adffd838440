"""Time grids: ends, order, spacing, names."""

from __future__ import annotations

import pytest
import torch

from atoll.diffusion import LinearFlow, Schedule
from atoll.sampling.grids import log_snr, parse_grid, shifted, uniform
from gaussian_world import SCHEDULES, name


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50, 400])
@pytest.mark.parametrize("grid", ["uniform", "shifted-3", "shifted-0.5", "log-snr"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_a_grid_falls_from_exactly_one_to_exactly_zero(schedule: Schedule, grid: str, steps: int) -> None:
    times = parse_grid(grid)(steps, schedule)
    assert times.shape == (steps + 1,)
    assert times.dtype == torch.float64
    assert (times[0], times[-1]) == (1.0, 0.0)
    assert (times.diff() < 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_log_snr_steps_are_equal_between_the_ends(schedule: Schedule) -> None:
    inner = schedule.log_snr(log_snr(20, schedule))[1:-1]
    torch.testing.assert_close(inner.diff(), inner.diff().mean().expand(len(inner) - 1), rtol=1e-6, atol=0)


def test_shifting_by_one_changes_nothing_and_by_more_goes_towards_noise() -> None:
    plain = uniform(10, LinearFlow())
    assert torch.equal(shifted(10, LinearFlow(), 1.0), plain)
    assert (shifted(10, LinearFlow(), 3.0)[1:-1] > plain[1:-1]).all()


@pytest.mark.parametrize(
    "text", ["", "karras", "shifted", "shifted-", "shifted-0", "shifted--2", "shifted-inf", "log_snr"]
)
def test_unknown_names_are_told_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="use uniform, log-snr or shifted-S") as caught:
        parse_grid(text)
    assert repr(text) in str(caught.value)
