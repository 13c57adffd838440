"""What a network is trained for: schedule + kind + time density + weighting, in one object.

Training, validation, router training, distillation and admission all use it, so that the noisy input, the
target and the conversion at inference cannot drift apart.

The plain loss of a kind is the mean squared error of its value. Written as errors of x0 (see `x0_gain` in
prediction.py) the kinds differ only by a weight over time:

    |eps error|^2      = alpha^2 / sigma^2  |x0 error|^2
    |velocity error|^2 = 1 / sigma^2        |x0 error|^2        (linear path)
    |v error|^2        = (alpha^2 + sigma^2) / sigma^2 |x0 error|^2

and a `Weighting` replaces that weight by another one, whatever the kind. A new density or weighting is one class here,
added to its union.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .condition import Condition
from .denoiser import Denoiser
from .prediction import Kind, coefficients, convert, mix, x0_gain
from .schedule import AnySchedule, Schedule, widen

LARGEST_TARGET = 1_000.0  # mean square times weight, for data of variance 1; of usual objectives it is 1 to 5


@dataclass(frozen=True)
class Uniform:
    """t uniform on [0, 1]."""

    name: Literal["uniform"] = field(default="uniform", kw_only=True)

    def quantile(self, u: Tensor) -> Tensor:
        return widen(u)


@dataclass(frozen=True)
class LogitNormal:
    """logit(t) ~ N(mean, std^2): most training where neither data nor noise dominates (Esser et al.)."""

    mean: float = field(default=0.0, metadata={"help": "of logit(t): above 0 is nearer to noise"})
    std: float = field(default=1.0, metadata={"help": "of logit(t): how far around the mean"})
    name: Literal["logit-normal"] = field(default="logit-normal", kw_only=True)

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"std of a logit-normal density must be positive, got {self.std}")

    def quantile(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(widen(u)))


@dataclass(frozen=True)
class Shifted:
    """Uniform time pushed towards noise: t = s u / (1 + (s - 1) u); s > 1 for larger latents."""

    shift: float = field(metadata={"help": "how far towards noise; 1: uniform"})
    name: Literal["shifted"] = field(default="shifted", kw_only=True)

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift must be positive, got {self.shift}")

    def quantile(self, u: Tensor) -> Tensor:
        return shift_time(widen(u), self.shift)


TimeDensity = Uniform | LogitNormal | Shifted


def shift_time(t: Tensor, shift: float) -> Tensor:
    """t -> s t / (1 + (s - 1) t): multiplies sigma/alpha on the linear path by s."""
    return shift * t / (1.0 + (shift - 1.0) * t)


@dataclass(frozen=True)
class Plain:
    """The kind's own squared error, unweighted."""

    name: Literal["plain"] = field(default="plain", kw_only=True)

    def __call__(self, kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
        return torch.ones_like(widen(t))


@dataclass(frozen=True)
class MinSNR:
    """x0 error weighted by min(SNR, gamma) (Hang et al.), whatever kind the network predicts."""

    gamma: float = field(default=5.0, metadata={"help": "signal-to-noise ratio above which nothing weighs more"})
    name: Literal["min-snr"] = field(default="min-snr", kw_only=True)

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma of a min-SNR weighting must be positive, got {self.gamma}")

    def __call__(self, kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
        snr = schedule.log_snr(t).exp()
        return snr.clamp(max=self.gamma) * x0_gain(kind, schedule, t) ** 2


@dataclass(frozen=True)
class Sigmoid:
    """eps error weighted by sigmoid(bias - log SNR) (Kingma and Gao; Hoogeboom et al.), whatever the kind."""

    bias: float = field(default=0.0, metadata={"help": "log SNR at which an error of the noise weighs half"})
    name: Literal["sigmoid"] = field(default="sigmoid", kw_only=True)

    def __call__(self, kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
        log_snr = schedule.log_snr(t)
        return torch.sigmoid(self.bias - log_snr) * log_snr.exp() * x0_gain(kind, schedule, t) ** 2


Weighting = Plain | MinSNR | Sigmoid


def names(union: Any) -> str:
    """`name` of each class of a union."""
    return ", ".join(part.name for part in get_args(union))


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A schedule, the kind predicted on it, where in time to train, and how to weigh the error."""

    # `name` tells the classes of a union apart; pydantic reads `discriminator`
    schedule: AnySchedule = field(metadata={"help": f"data to noise: {names(AnySchedule)}", "discriminator": "name"})
    kind: Kind = field(metadata={"help": "what is predicted: x0, epsilon, velocity, v, score"})
    density: TimeDensity = field(
        default=Uniform(),
        metadata={"help": f"times to train: {names(TimeDensity)}", "discriminator": "name"},
    )
    weighting: Weighting = field(
        default=Plain(),
        metadata={"help": f"of the error over times: {names(Weighting)}", "discriminator": "name"},
    )

    def __post_init__(self) -> None:
        largest = largest_target(self)
        if not largest <= LARGEST_TARGET:  # or NaN
            raise ValueError(
                f"kind {self.kind} on {self.schedule.name} with weighting {self.weighting.name}: the target is "
                f"unbounded, its weighted mean square reaches {largest:.0e}; use another kind, or weighting min-snr"
            )

    def times(self, u: Tensor) -> Tensor:
        """Training times [B] from uniform numbers in (0, 1), kept inside the schedule's band."""
        noisiest, cleanest = (
            self.schedule.time_at(torch.tensor([end], dtype=torch.float64)).item() for end in self.schedule.band
        )
        return self.density.quantile(u).clamp(cleanest, noisiest)

    def corrupt(self, x0: Tensor, eps: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The noisy x_t, the target of the network, both in x0's precision, and the weight of its squared error [B].

        Coefficients are computed where t is, in float64 if that device has it.
        """
        target = mix(*coefficients(self.kind, self.schedule, t), x0, eps)
        return noisy(self.schedule, x0, eps, t), target, self.weighting(self.kind, self.schedule, t)


@lru_cache(maxsize=64)
def largest_target(objective: Objective) -> float:
    """Largest weight times mean square of the target p x0 + q eps over the training times, data of variance 1."""
    t = objective.times(torch.linspace(0.0, 1.0, 65, dtype=torch.float64))
    p, q = coefficients(objective.kind, objective.schedule, t)
    return (objective.weighting(objective.kind, objective.schedule, t) * (p**2 + q**2)).max().item()


def noisy(schedule: Schedule, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """x_t = alpha(t) x0 + sigma(t) eps, in x0's precision."""
    return mix(schedule.alpha(t), schedule.sigma(t), x0, eps)


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean over all but the batch of (a - b)^2, in float32 or wider [B]."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return (a.to(dtype) - b.to(dtype)).square().flatten(1).mean(1)


def velocity_error(denoiser: Denoiser, x0: Tensor, eps: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
    """The validation loss: squared error of the velocity at a fixed (sample, noise, t), [B].

    Put every expert behind a `Bridge` first; then objectives of any schedule and kind are measured in the
    same unit, and the difference of two experts is a difference in quality.
    """
    path = denoiser.schedule
    x = noisy(path, x0, eps, t)
    predicted = convert(denoiser(x, t, condition), Kind.VELOCITY, path, x, t).value
    return squared_error(predicted, mix(*coefficients(Kind.VELOCITY, path, t), x0, eps))


def fixed_times(count: int) -> Tensor:
    """Evenly spread times for a validation set: midpoints of `count` equal parts of [0, 1], float64."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count
