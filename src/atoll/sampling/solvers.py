"""Solvers: walk a state along a time grid, asking a denoiser on the way.

One class per solver. All work on any denoiser on any schedule. What they integrate is

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


@dataclass(frozen=True, eq=False)
class Ask:
    """One question of a step: at which time, in which `role`, and with which numbers the answer is used.

    The numbers are floats for a batch that goes in step; one value per row, [B, 1, ...], for rows out of step.
    """

    time: float | Tensor
    role: str
    numbers: tuple[float | Tensor, ...]


@dataclass(frozen=True, eq=False)
class Stand:
    """Where a walk stands: the state of the last whole step, where the next question is asked, and what is kept."""

    x: Tensor
    point: Tensor
    kept: Tensor


class Solver:
    """How a state goes through a time grid: the questions of each step, and what becomes of each answer.

    Both are the same for a batch in step (`walk`) and for rows that each have a step of their own (out_of_step.py).
    """

    needs_noise = False

    def asks(self, path: Path, index: int) -> list[Ask]:
        """The questions of step `index`, with floats."""
        raise NotImplementedError

    def advance(self, path: Path, ask: Ask, now: Stand, velocity: Tensor, noise: Tensor | None) -> Stand:
        """What an answer makes of a state; after the last question of a step, point is x. No noise: none is added."""
        raise NotImplementedError

    def walk(
        self,
        denoiser: Denoiser,
        x: Tensor,
        times: Tensor,
        condition: Condition | None = None,
        noise: StepNoise | None = None,
    ) -> Iterator[Step]:
        """Step by step; nothing is computed before it is asked for, and the last step's `after` is the result."""
        if self.needs_noise and noise is None:
            raise ValueError("the stochastic solver needs noise: a function from the step index to a tensor like x")
        denoiser = as_velocity(denoiser)
        path = Path(denoiser.schedule, times)
        now = Stand(x, x, torch.zeros_like(x))
        for index in range(path.steps):
            begin, fresh, velocities = now.x, None, []
            if self.needs_noise and noise is not None and path.sigma[index + 1] > 0.0:
                fresh = noise(index).to(x)
            for ask in self.asks(path, index):
                assert isinstance(ask.time, float)
                velocities.append(asked(denoiser, now.point, _batch_time(x, ask.time), condition))
                now = self.advance(path, ask, now, velocities[-1], fresh)
            time, next_time = path.times[index : index + 2]
            yield Step(index, time, next_time, begin, velocities[0], now.x, path.schedule)

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


class Euler(Solver):
    """First order, one call a step: x' = x + (t' - t) v."""

    def asks(self, path: Path, index: int) -> list[Ask]:
        return [Ask(path.times[index], "only", (path.length(index),))]

    def advance(self, path: Path, ask: Ask, now: Stand, velocity: Tensor, noise: Tensor | None) -> Stand:
        (length,) = ask.numbers
        x = now.x + length * velocity
        return Stand(x, x, now.kept)


class Heun(Euler):
    """Second order, two calls a step: the mean of the velocity here and at the end of an Euler step.

    A step that ends at t = 0 is an Euler step: a trained network has never been asked about a clean sample.
    """

    def asks(self, path: Path, index: int) -> list[Ask]:
        here, length = path.times[index], path.length(index)
        if path.times[index + 1] == 0.0:
            return super().asks(path, index)
        return [Ask(here, "begin", (length,)), Ask(path.times[index + 1], "end", (0.5 * length,))]

    def advance(self, path: Path, ask: Ask, now: Stand, velocity: Tensor, noise: Tensor | None) -> Stand:
        (length,) = ask.numbers
        if ask.role == "begin":
            return Stand(now.x, now.x + length * velocity, velocity)
        if ask.role == "end":
            x = now.x + length * (now.kept + velocity)
            return Stand(x, x, now.kept)
        return super().advance(path, ask, now, velocity, noise)


class DPMpp2M(Solver):
    """DPM-Solver++(2M) (Lu et al.): second order, one call a step, equation (2) with x0 extrapolated."""

    def asks(self, path: Path, index: int) -> list[Ask]:
        e = path.shrink(index)
        of_state = path.sigma[index + 1] / path.sigma[index]
        return [Ask(path.times[index], "only", (path.stretch(index), of_state, path.alpha[index + 1] * (1.0 - e)))]

    def advance(self, path: Path, ask: Ask, now: Stand, velocity: Tensor, noise: Tensor | None) -> Stand:
        stretch, of_state, of_x0 = ask.numbers
        estimate = _clean(path.schedule, now.x, velocity, ask.time)
        x = of_state * now.x + of_x0 * extrapolated(estimate, now.kept, stretch)
        return Stand(x, x, estimate)


class Stochastic(Solver):
    """SDE-DPM-Solver++(2M) (Lu et al.): equation (3) with x0 extrapolated; fresh noise forgets early errors.

    Without the extrapolation it is the ancestral sampler of DDPM.
    """

    needs_noise = True

    def asks(self, path: Path, index: int) -> list[Ask]:
        e = path.shrink(index)
        of_state = path.sigma[index + 1] / path.sigma[index] * e
        of_noise = path.sigma[index + 1] * math.sqrt(1.0 - e * e)
        numbers = path.stretch(index), of_state, path.alpha[index + 1] * (1.0 - e * e), of_noise
        return [Ask(path.times[index], "only", numbers)]

    def advance(self, path: Path, ask: Ask, now: Stand, velocity: Tensor, noise: Tensor | None) -> Stand:
        stretch, of_state, of_x0, of_noise = ask.numbers
        estimate = _clean(path.schedule, now.x, velocity, ask.time)
        x = of_state * now.x + of_x0 * extrapolated(estimate, now.kept, stretch)
        if noise is not None:
            x = x + of_noise * noise
        return Stand(x, x, estimate)


def extrapolated(x0: Tensor, before: Tensor, stretch: float | Tensor) -> Tensor:
    """x0 at the middle of the step in log-SNR, on the line through the last two estimates."""
    return x0 + stretch * (x0 - before)


euler, heun, dpmpp_2m, stochastic = Euler(), Heun(), DPMpp2M(), Stochastic()
SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m, "stochastic": stochastic}


def parse_solver(name: str) -> Solver:
    if name not in SOLVERS:
        raise ValueError(f"unknown solver {name!r}: use one of {', '.join(SOLVERS)}")
    return SOLVERS[name]


class Path:
    """A time grid with its schedule's coefficients: floats, from float64."""

    def __init__(self, schedule: Schedule, times: Tensor) -> None:
        if times.ndim != 1 or len(times) < 2 or not bool((times.diff() < 0).all()):
            raise ValueError(f"a time grid needs at least two falling times, got {times.tolist()}")
        if not 0.0 <= times[-1] < times[0] <= 1.0:
            raise ValueError(f"times must lie in 0 .. 1, got {times[0].item()} .. {times[-1].item()}")
        times = times.to("cpu", torch.float64)
        self.schedule = schedule
        self.times: list[float] = times.tolist()
        self.alpha: list[float] = schedule.alpha(times).tolist()
        self.sigma: list[float] = schedule.sigma(times).tolist()
        self._log_snr: list[float] = schedule.log_snr(times).tolist()

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    def length(self, index: int) -> float:
        """t' - t of the step."""
        return self.times[index + 1] - self.times[index]

    def shrink(self, index: int) -> float:
        """exp(-h) of the step: sigma' alpha / (sigma alpha')."""
        return self.sigma[index + 1] * self.alpha[index] / (self.sigma[index] * self.alpha[index + 1])

    def stretch(self, index: int) -> float:
        """How far the middle of the step lies beyond its begin, in log-SNR and units of the step before.

        0, so that an estimate stands as it is, on the first step, and where a log-SNR is infinite and has no middle.
        """
        if index == 0:
            return 0.0
        here = self._log_snr[index + 1] - self._log_snr[index]
        last = self._log_snr[index] - self._log_snr[index - 1]
        return 0.5 * here / last if math.isfinite(here) and math.isfinite(last) else 0.0


def as_velocity(denoiser: Denoiser) -> Denoiser:
    return denoiser if denoiser.kind is Kind.VELOCITY else Bridge(denoiser, onto=denoiser.schedule)


def asked(denoiser: Denoiser, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
    answer = denoiser(x, t, condition)
    assert answer.kind is Kind.VELOCITY, f"the denoiser says it gives velocity and answered {answer.kind}"
    return answer.value.to(x.dtype)


def _clean(schedule: Schedule, x: Tensor, velocity: Tensor, time: float | Tensor) -> Tensor:
    """x0 as the velocity at this time, or these times [B], says."""
    t = time if isinstance(time, Tensor) else _batch_time(x, time)
    return convert(Prediction(Kind.VELOCITY, velocity), Kind.X0, schedule, x, t).value


def _batch_time(x: Tensor, time: float) -> Tensor:
    return torch.full((len(x),), time, dtype=wide_dtype(x.device), device=x.device)
