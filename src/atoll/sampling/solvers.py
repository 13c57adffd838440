"""Solvers: walk a state along a time grid, asking a denoiser on the way.

One function per solver, one signature. All work on any denoiser on any schedule. What they integrate is

    dx/dt = velocity(x, t) = alpha' x0 + sigma' eps,                                       (1)

Euler and Heun in t as it stands, the other two through the exact solution of (1), or of its stochastic twin, for
an x0 that is constant (or linear in log-SNR) over the step. With e = exp(-h), h the step in log(alpha/sigma):

    x' = (sigma'/sigma) x + alpha' (1 - e) x0                                              (2)
    x' = (sigma'/sigma) e x + alpha' (1 - e^2) x0 + sigma' sqrt(1 - e^2) z                 (3)

e = sigma' alpha / (sigma alpha') is finite at both ends of the path: 0 from pure noise (alpha = 0) and 0 to pure
data (sigma' = 0).

A denoiser of another kind than velocity is put behind a `Bridge` onto its own schedule, which keeps it inside its
band: epsilon at t = 1 and x0 at t = 0 hold no velocity. Coefficients are Python floats, so a step costs the
denoiser and a few updates of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..process import Bridge, Condition, Denoiser, Kind, Prediction, Schedule, convert, wide_dtype

StepNoise = Callable[[int], Tensor]  # step index -> standard normal noise shaped like the state


@dataclass(frozen=True)
class Step:
    """One step as a watcher sees it: the denoiser has just been asked at (x, time)."""

    index: int
    time: float
    next_time: float
    x: Tensor
    velocity: Tensor
    schedule: Schedule

    @property
    def x0(self) -> Tensor:
        """The clean sample as estimated now: a preview."""
        answer = Prediction(Kind.VELOCITY, self.velocity)
        return convert(answer, Kind.X0, self.schedule, self.x, _batch_time(self.x, self.time)).value


OnStep = Callable[[Step], None]
Solver = Callable[[Denoiser, Tensor, Tensor, Condition | None, StepNoise | None, OnStep | None], Tensor]


def euler(
    denoiser: Denoiser,
    x: Tensor,
    times: Tensor,
    condition: Condition | None = None,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """First order, one call a step: x' = x + (t' - t) v."""
    walk = _Walk(denoiser, times, condition, on_step)
    for index in range(walk.steps):
        step = walk.begin(index, x)
        x = x + (step.next_time - step.time) * step.velocity
    return x


def heun(
    denoiser: Denoiser,
    x: Tensor,
    times: Tensor,
    condition: Condition | None = None,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """Second order, two calls a step: the mean of the velocity here and at the end of an Euler step.

    A step that ends at t = 0 is an Euler step: a trained network has never been asked about a clean sample.
    """
    walk = _Walk(denoiser, times, condition, on_step)
    for index in range(walk.steps):
        step = walk.begin(index, x)
        length = step.next_time - step.time
        end = x + length * step.velocity
        if step.next_time > 0.0:
            end = x + 0.5 * length * (step.velocity + walk.velocity(end, step.next_time))
        x = end
    return x


def dpmpp_2m(
    denoiser: Denoiser,
    x: Tensor,
    times: Tensor,
    condition: Condition | None = None,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al.): second order, one call a step, equation (2) with x0 extrapolated."""
    walk = _Walk(denoiser, times, condition, on_step)
    before: Tensor | None = None
    for index in range(walk.steps):
        step = walk.begin(index, x)
        estimate = step.x0
        x0 = walk.extrapolated(index, estimate, before)
        before = estimate
        e = walk.shrink(index)
        x = walk.sigma[index + 1] / walk.sigma[index] * x + walk.alpha[index + 1] * (1.0 - e) * x0
    return x


def stochastic(
    denoiser: Denoiser,
    x: Tensor,
    times: Tensor,
    condition: Condition | None = None,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """SDE-DPM-Solver++(2M) (Lu et al.): equation (3) with x0 extrapolated; fresh noise forgets early errors.

    Without the extrapolation it is the ancestral sampler of DDPM.
    """
    if noise is None:
        raise ValueError("the stochastic solver needs noise: a function from the step index to a tensor like x")
    walk = _Walk(denoiser, times, condition, on_step)
    before: Tensor | None = None
    for index in range(walk.steps):
        step = walk.begin(index, x)
        estimate = step.x0
        x0 = walk.extrapolated(index, estimate, before)
        before = estimate
        e = walk.shrink(index)
        x = walk.sigma[index + 1] / walk.sigma[index] * e * x + walk.alpha[index + 1] * (1.0 - e * e) * x0
        if walk.sigma[index + 1] > 0.0:
            x = x + walk.sigma[index + 1] * math.sqrt(1.0 - e * e) * noise(index).to(x)
    return x


SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m, "stochastic": stochastic}


def parse_solver(name: str) -> Solver:
    if name not in SOLVERS:
        raise ValueError(f"unknown solver {name!r}: use one of {', '.join(SOLVERS)}")
    return SOLVERS[name]


class _Walk:
    """The grid with its path's coefficients, and the velocity to follow."""

    def __init__(self, denoiser: Denoiser, times: Tensor, condition: Condition | None, on_step: OnStep | None) -> None:
        if times.ndim != 1 or len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError(f"a time grid needs at least two falling times, got {times.tolist()}")
        if not 0.0 <= times[-1] < times[0] <= 1.0:
            raise ValueError(f"times must lie in 0 .. 1, got {times[0].item()} .. {times[-1].item()}")
        self._denoiser = denoiser if denoiser.kind is Kind.VELOCITY else Bridge(denoiser, onto=denoiser.schedule)
        self._condition = condition
        self._on_step = on_step
        times = times.to("cpu", torch.float64)
        self.times: list[float] = times.tolist()
        self.alpha: list[float] = denoiser.schedule.alpha(times).tolist()
        self.sigma: list[float] = denoiser.schedule.sigma(times).tolist()
        self._log_snr: list[float] = denoiser.schedule.log_snr(times).tolist()

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    def velocity(self, x: Tensor, time: float) -> Tensor:
        answer = self._denoiser(x, _batch_time(x, time), self._condition)
        assert answer.kind is Kind.VELOCITY, f"the denoiser says it gives velocity and answered {answer.kind}"
        return answer.value.to(x.dtype)

    def begin(self, index: int, x: Tensor) -> Step:
        time, next_time = self.times[index : index + 2]
        step = Step(index, time, next_time, x, self.velocity(x, time), self._denoiser.schedule)
        if self._on_step is not None:
            self._on_step(step)
        return step

    def shrink(self, index: int) -> float:
        """exp(-h) of the step: sigma' alpha / (sigma alpha')."""
        return self.sigma[index + 1] * self.alpha[index] / (self.sigma[index] * self.alpha[index + 1])

    def extrapolated(self, index: int, x0: Tensor, before: Tensor | None) -> Tensor:
        """x0 at the middle of the step in log-SNR, on the line through the last two estimates.

        The estimate stands as it is on the first step, and where a log-SNR is infinite and there is no middle.
        """
        if before is None:
            return x0
        here = self._log_snr[index + 1] - self._log_snr[index]
        last = self._log_snr[index] - self._log_snr[index - 1]
        if not (math.isfinite(here) and math.isfinite(last)):
            return x0
        return x0 + 0.5 * here / last * (x0 - before)


def _batch_time(x: Tensor, time: float) -> Tensor:
    return torch.full((len(x),), time, dtype=wide_dtype(x.device), device=x.device)
