"""Solvers: walk a state along a time grid, asking a denoiser on the way.

One rule per solver, one signature. All work on any denoiser on any schedule. What they integrate is

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..process import Bridge, Condition, Denoiser, Kind, Prediction, Schedule, convert, wide_dtype

StepNoise = Callable[[int], Tensor]  # step index -> standard normal noise shaped like the state


@dataclass(frozen=True)
class Step:
    """One step as a watcher sees it: the denoiser was asked at (x, time), and the state is now `after`."""

    index: int
    time: float
    next_time: float
    x: Tensor
    velocity: Tensor
    after: Tensor
    schedule: Schedule

    @property
    def x0(self) -> Tensor:
        """The clean sample as estimated at `time`: a preview."""
        return _clean(self.schedule, self.x, self.velocity, self.time)


OnStep = Callable[[Step], None]
Rule = Callable[["_Walk", Tensor, StepNoise | None], Iterator[Step]]


@dataclass(frozen=True)
class Solver:
    """A rule that goes through a time grid, as a function of its end or as a walk that can be watched."""

    rule: Rule

    def walk(
        self,
        denoiser: Denoiser,
        x: Tensor,
        times: Tensor,
        condition: Condition | None = None,
        noise: StepNoise | None = None,
    ) -> Iterator[Step]:
        """Step by step; nothing is computed before it is asked for, and the last step's `after` is the result."""
        return self.rule(_Walk(denoiser, times, condition), x, noise)

    def __call__(
        self,
        denoiser: Denoiser,
        x: Tensor,
        times: Tensor,
        condition: Condition | None = None,
        noise: StepNoise | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """The state at the end of the grid."""
        for step in self.walk(denoiser, x, times, condition, noise):
            if on_step is not None:
                on_step(step)
            x = step.after
        return x


@Solver
def euler(walk: _Walk, x: Tensor, noise: StepNoise | None) -> Iterator[Step]:
    """First order, one call a step: x' = x + (t' - t) v."""
    for index in range(walk.steps):
        velocity = walk.velocity(x, walk.times[index])
        step = walk.step(index, x, velocity, after=x + walk.length(index) * velocity)
        yield step
        x = step.after


@Solver
def heun(walk: _Walk, x: Tensor, noise: StepNoise | None) -> Iterator[Step]:
    """Second order, two calls a step: the mean of the velocity here and at the end of an Euler step.

    A step that ends at t = 0 is an Euler step: a trained network has never been asked about a clean sample.
    """
    for index in range(walk.steps):
        velocity = walk.velocity(x, walk.times[index])
        length, next_time = walk.length(index), walk.times[index + 1]
        after = x + length * velocity
        if next_time > 0.0:
            after = x + 0.5 * length * (velocity + walk.velocity(after, next_time))
        yield walk.step(index, x, velocity, after)
        x = after


@Solver
def dpmpp_2m(walk: _Walk, x: Tensor, noise: StepNoise | None) -> Iterator[Step]:
    """DPM-Solver++(2M) (Lu et al.): second order, one call a step, equation (2) with x0 extrapolated."""
    before: Tensor | None = None
    for index in range(walk.steps):
        velocity = walk.velocity(x, walk.times[index])
        estimate = walk.clean(index, x, velocity)
        x0 = walk.extrapolated(index, estimate, before)
        before = estimate
        e = walk.shrink(index)
        after = walk.sigma[index + 1] / walk.sigma[index] * x + walk.alpha[index + 1] * (1.0 - e) * x0
        yield walk.step(index, x, velocity, after)
        x = after


@Solver
def stochastic(walk: _Walk, x: Tensor, noise: StepNoise | None) -> Iterator[Step]:
    """SDE-DPM-Solver++(2M) (Lu et al.): equation (3) with x0 extrapolated; fresh noise forgets early errors.

    Without the extrapolation it is the ancestral sampler of DDPM.
    """
    if noise is None:
        raise ValueError("the stochastic solver needs noise: a function from the step index to a tensor like x")
    before: Tensor | None = None
    for index in range(walk.steps):
        velocity = walk.velocity(x, walk.times[index])
        estimate = walk.clean(index, x, velocity)
        x0 = walk.extrapolated(index, estimate, before)
        before = estimate
        e = walk.shrink(index)
        after = walk.sigma[index + 1] / walk.sigma[index] * e * x + walk.alpha[index + 1] * (1.0 - e * e) * x0
        if walk.sigma[index + 1] > 0.0:
            after = after + walk.sigma[index + 1] * math.sqrt(1.0 - e * e) * noise(index).to(x)
        yield walk.step(index, x, velocity, after)
        x = after


SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m, "stochastic": stochastic}


def parse_solver(name: str) -> Solver:
    if name not in SOLVERS:
        raise ValueError(f"unknown solver {name!r}: use one of {', '.join(SOLVERS)}")
    return SOLVERS[name]


class _Walk:
    """The grid with its path's coefficients, and the velocity to follow."""

    def __init__(self, denoiser: Denoiser, times: Tensor, condition: Condition | None) -> None:
        if times.ndim != 1 or len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError(f"a time grid needs at least two falling times, got {times.tolist()}")
        if not 0.0 <= times[-1] < times[0] <= 1.0:
            raise ValueError(f"times must lie in 0 .. 1, got {times[0].item()} .. {times[-1].item()}")
        self._denoiser = denoiser if denoiser.kind is Kind.VELOCITY else Bridge(denoiser, onto=denoiser.schedule)
        self._condition = condition
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

    def step(self, index: int, x: Tensor, velocity: Tensor, after: Tensor) -> Step:
        time, next_time = self.times[index : index + 2]
        return Step(index, time, next_time, x, velocity, after, self._denoiser.schedule)

    def length(self, index: int) -> float:
        """t' - t of the step."""
        return self.times[index + 1] - self.times[index]

    def clean(self, index: int, x: Tensor, velocity: Tensor) -> Tensor:
        """x0 as the velocity at the beginning of the step says."""
        return _clean(self._denoiser.schedule, x, velocity, self.times[index])

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


def _clean(schedule: Schedule, x: Tensor, velocity: Tensor, time: float) -> Tensor:
    return convert(Prediction(Kind.VELOCITY, velocity), Kind.X0, schedule, x, _batch_time(x, time)).value


def _batch_time(x: Tensor, time: float) -> Tensor:
    return torch.full((len(x),), time, dtype=wide_dtype(x.device), device=x.device)
