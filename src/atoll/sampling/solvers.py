"""Solvers: generators that take a state along a time grid.

A solver yields the state and the time at which it needs a velocity, receives the velocity, and returns the state at the
end of the grid. Euler and Heun integrate dx/dt = velocity(x, t) in t. The others use the exact solution of a step from
t to s, or of its stochastic twin, for an x0 that is constant over the step. With e = exp(-h), h the step in
log(alpha / sigma):

    x_s = (sigma_s / sigma_t) x + alpha_s (1 - e) x0                                       (1)
    x_s = (sigma_s / sigma_t) e x + alpha_s (1 - e^2) x0 + sigma_s sqrt(1 - e^2) z         (2)

To add a solver, write a generator here and name it in SOLVERS. Times and coefficients are Python floats, so a step
costs the velocity and a few updates of the state, and never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from ..diffusion import Kind, Schedule
from ..diffusion.prediction import coefficients

Walk = Generator[tuple[Tensor, float], Tensor, Tensor]  # yields (x, t), receives velocities, returns the last state
StepNoise = Callable[[int], Tensor]  # step index -> standard normal noise shaped like the state


class GridPath:
    """A time grid with its schedule's coefficients, as floats. Step i goes from t[i] to t[i + 1].

    times: falling float64 [steps + 1] within 0 .. 1.
    """

    def __init__(self, schedule: Schedule, times: Tensor) -> None:
        if times.ndim != 1 or len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError(f"a time grid needs at least two falling times, got {times.tolist()}")
        if not 0.0 <= times[-1] < times[0] <= 1.0:
            raise ValueError(f"times must lie in 0 .. 1, got {times[0].item()} .. {times[-1].item()}")
        times = times.to("cpu", torch.float64)
        alpha, sigma = schedule.alpha(times), schedule.sigma(times)
        p, q = coefficients(Kind.VELOCITY, schedule, times)
        determinant = alpha * q - sigma * p
        self.t: list[float] = times.tolist()
        self.steps = len(self.t) - 1
        self.alpha: list[float] = alpha.tolist()
        self.sigma: list[float] = sigma.tolist()
        self._half_log_snr: list[float] = (0.5 * schedule.log_snr(times)).tolist()  # may be infinite at the ends
        self._x0_of_x: list[float] = (q / determinant).tolist()
        self._x0_of_v: list[float] = (-sigma / determinant).tolist()

    def h(self, i: int) -> float:
        """Length of step i in log(alpha / sigma); infinite from pure noise and to pure data."""
        return self._half_log_snr[i + 1] - self._half_log_snr[i]

    def e(self, i: int) -> float:
        """exp(-h) of step i, which is finite at both ends of the path."""
        return self.sigma[i + 1] * self.alpha[i] / (self.sigma[i] * self.alpha[i + 1])

    def x0(self, i: int, x: Tensor, velocity: Tensor) -> Tensor:
        """The clean sample that belongs to a velocity at t[i]."""
        return self._x0_of_x[i] * x + self._x0_of_v[i] * velocity

    def advance(self, i: int, x: Tensor, x0: Tensor) -> Tensor:
        """Equation (1) over step i."""
        return self.sigma[i + 1] / self.sigma[i] * x + self.alpha[i + 1] * (1.0 - self.e(i)) * x0

    def at_middle(self, i: int, x0: Tensor, previous: Tensor | None) -> Tensor:
        """The estimate of x0 extrapolated in log-SNR to the middle of step i; as it is beside an infinite step."""
        if previous is None or not (math.isfinite(self.h(i)) and math.isfinite(self.h(i - 1))):
            return x0
        return x0 + 0.5 * self.h(i) / self.h(i - 1) * (x0 - previous)


def euler(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """First order, one velocity a step."""
    for i in range(path.steps):
        x = x + (path.t[i + 1] - path.t[i]) * (yield x, path.t[i])
    return x


def heun(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """Second order, two velocities a step: the mean of those at both ends of an Euler step.

    A step to t = 0 is an Euler step: no network was trained on clean samples.
    """
    for i in range(path.steps):
        length = path.t[i + 1] - path.t[i]
        v = yield x, path.t[i]
        y = x + length * v
        x = y if path.t[i + 1] == 0.0 else x + 0.5 * length * (v + (yield y, path.t[i + 1]))
    return x


def dpmpp_2m(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """DPM-Solver++(2M) (arXiv 2211.01095): second order, equation (1) with x0 at the middle of the step."""
    previous = None
    for i in range(path.steps):
        x0 = path.x0(i, x, (yield x, path.t[i]))
        x, previous = path.advance(i, x, path.at_middle(i, x0, previous)), x0
    return x


def stochastic(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """SDE-DPM-Solver++(2M): equation (2) with x0 at the middle of the step. Fresh noise corrects early errors."""
    previous = None
    for i in range(path.steps):
        x0, e = path.x0(i, x, (yield x, path.t[i])), path.e(i)
        mean = path.alpha[i + 1] * (1.0 - e * e) * path.at_middle(i, x0, previous)
        x, previous = path.sigma[i + 1] / path.sigma[i] * e * x + mean, x0
        if path.sigma[i + 1] > 0.0:
            x = x + path.sigma[i + 1] * math.sqrt(1.0 - e * e) * noise(i).to(x)
    return x


def unipc(x: Tensor, path: GridPath, noise: StepNoise) -> Walk:
    """UniPC-2 with B2(h) (arXiv 2302.04867): dpmpp_2m predicts; the next velocity corrects the step that led to it."""
    past: list[Tensor] = []
    start = x
    for i in range(path.steps):
        x0 = path.x0(i, x, (yield x, path.t[i]))
        if past and math.isfinite(path.h(i - 1)):
            h = path.h(i - 1)
            b = math.expm1(-h)
            rho = -(b / h + 1.0)
            first, second = rho / b, 2.0 * (rho / -h - 0.5) / b
            correction = 0.5 * (x0 - past[-1])
            if len(past) == 2 and math.isfinite(path.h(i - 2)):
                r = -path.h(i - 2) / h
                of_past = (first - second) / (1.0 - r)
                correction = of_past / r * (past[0] - past[1]) + (first - of_past) * (x0 - past[1])
            x = path.advance(i - 1, start, past[-1] + correction)
        start = x
        x = path.advance(i, x, path.at_middle(i, x0, past[-1] if past else None))
        past = [*past[-1:], x0]
    return x


Solver = Callable[[Tensor, GridPath, StepNoise], Walk]
SOLVERS: dict[str, Solver] = {f.__name__: f for f in (euler, heun, dpmpp_2m, stochastic, unipc)}
