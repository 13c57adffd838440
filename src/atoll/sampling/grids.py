"""Time grids: where between noise and data a solver evaluates the velocity.

A grid is steps + 1 falling times from exactly 1 to exactly 0, float64, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..diffusion import Schedule, shift_time

Grid = Callable[[int, Schedule], Tensor]
GRIDS = "uniform, log-snr or shifted-S, for example shifted-3"
CLEANEST, NOISIEST = 0.002, 80.0  # Karras et al.'s range of sigma/alpha


def uniform(steps: int, schedule: Schedule) -> Tensor:
    """Equal steps of t."""
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)


def shifted(steps: int, schedule: Schedule, shift: float) -> Tensor:
    """Equal steps pushed towards noise (shift > 1) or towards data: t -> s t / (1 + (s - 1) t)."""
    return shift_time(uniform(steps, schedule), shift)


def log_snr(steps: int, schedule: Schedule) -> Tensor:
    """Equal steps of log-SNR between sigma/alpha = 80 and 0.002, or the schedule's band where that is narrower.

    A path that reaches further, as the linear one does to pure noise and pure data, gets one step more at that
    end, to t = 1 or t = 0.
    """
    noisiest, cleanest = schedule.band
    low, high = max(noisiest, -2.0 * math.log(NOISIEST)), min(cleanest, -2.0 * math.log(CLEANEST))
    latest, earliest = schedule.time_at(torch.tensor([low, high], dtype=torch.float64)).tolist()
    before, after = int(latest < 1.0 - 1e-9), int(earliest > 1e-9)
    count = steps + 1 - before - after
    spread = torch.linspace(low, high, count, dtype=torch.float64) if count != 1 else torch.tensor([(low + high) / 2])
    times = torch.cat([torch.ones(before), schedule.time_at(spread.double()), torch.zeros(after)])
    times[0], times[-1] = 1.0, 0.0  # exactly, whatever time_at rounds to
    return times


def parse_grid(name: str) -> Grid:
    """A grid from its name: uniform, log-snr, or shifted-S with a number S."""
    if name in ("uniform", "log-snr"):
        return uniform if name == "uniform" else log_snr
    word, _, number = name.partition("-")
    try:
        shift = float(number)
    except ValueError:
        shift = math.nan
    if word != "shifted" or not 0.0 < shift < math.inf:
        raise ValueError(f"unknown time grid {name!r}: use {GRIDS}")
    return partial(shifted, shift=shift)
