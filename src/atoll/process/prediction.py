"""What a network predicts, and one table that turns any kind into any other.

Every kind is a linear form in the clean sample and the noise,

    value = p x0 + q eps,                                                        (1)

and so is the state, x_t = alpha x0 + sigma eps. `coefficients` is the table of (p, q). The two equations
solve for the pair (x0, eps):

    det = alpha q - sigma p,    x0 = (q x - sigma value) / det,    eps = (alpha value - p x) / det,   (2)

and any other kind follows from (1). An error e in the value is an error -sigma e / det in x0; that factor
is `x0_gain`, and it is all there is to say about how objectives weigh time against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from .schedule import Schedule, per_sample


class Kind(StrEnum):
    X0 = "x0"
    EPSILON = "epsilon"
    VELOCITY = "velocity"
    V = "v"
    SCORE = "score"


@dataclass(frozen=True)
class Prediction:
    """A tensor shaped like the state, with what it means."""

    kind: Kind
    value: Tensor


Coefficients = tuple[Tensor, Tensor]

_TABLE: dict[Kind, Callable[[Schedule, Tensor], Coefficients]] = {
    Kind.X0: lambda path, t: (torch.ones_like(path.sigma(t)), torch.zeros_like(path.sigma(t))),
    Kind.EPSILON: lambda path, t: (torch.zeros_like(path.sigma(t)), torch.ones_like(path.sigma(t))),
    Kind.VELOCITY: lambda path, t: (path.d_alpha(t), path.d_sigma(t)),
    Kind.V: lambda path, t: (-path.sigma(t) / _norm(path, t), path.alpha(t) / _norm(path, t)),
    Kind.SCORE: lambda path, t: (torch.zeros_like(path.sigma(t)), -1.0 / path.sigma(t)),
}


def _norm(path: Schedule, t: Tensor) -> Tensor:
    return torch.hypot(path.alpha(t), path.sigma(t))


def coefficients(kind: Kind, schedule: Schedule, t: Tensor) -> Coefficients:
    """(p, q) of equation (1), each float64 [B]."""
    return _TABLE[kind](schedule, t)


def _determinant(kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
    p, q = coefficients(kind, schedule, t)
    return schedule.alpha(t) * q - schedule.sigma(t) * p


def x0_gain(kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
    """Size of the x0 error that a unit error in `kind` makes at t: |sigma / det|, float64 [B]."""
    if kind is Kind.X0:
        return torch.ones_like(schedule.sigma(t))  # also at t = 0, where sigma / det is 0 / 0
    return (schedule.sigma(t) / _determinant(kind, schedule, t)).abs()


@lru_cache(maxsize=64)
def carries_only_noise(kind: Kind, schedule: Schedule) -> bool:
    """True if the kind is proportional to eps all along the path (p = 0): x0 is then had by dividing by alpha.

    So for epsilon and score, and for velocity where alpha is constant (EDM).
    """
    inside = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    p, _ = coefficients(kind, schedule, inside)
    return bool((p == 0).all())


def combine(kind: Kind, schedule: Schedule, t: Tensor, x0: Tensor, eps: Tensor) -> Prediction:
    """The prediction of `kind` that belongs to a known pair: p x0 + q eps."""
    p, q = (per_sample(c, x0).to(x0.dtype) for c in coefficients(kind, schedule, t))
    return Prediction(kind, p * x0 + q * eps)


def pair(prediction: Prediction, schedule: Schedule, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(x0, eps) by equation (2), in float32 or wider whatever the inputs' precision."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, prediction.value.dtype), torch.float32)
    x, value = x.to(dtype), prediction.value.to(dtype)
    p, q = coefficients(prediction.kind, schedule, t)
    det = _determinant(prediction.kind, schedule, t)

    def weigh(numerator: Tensor) -> Tensor:
        return per_sample(numerator / det, x).to(dtype)

    if prediction.kind is Kind.X0:
        x0 = value
    else:
        x0 = weigh(q) * x - weigh(schedule.sigma(t)) * value
    if prediction.kind is Kind.EPSILON:
        eps = value
    else:
        eps = weigh(schedule.alpha(t)) * value - weigh(p) * x
    return x0, eps


def convert(prediction: Prediction, to: Kind, schedule: Schedule, x: Tensor, t: Tensor) -> Prediction:
    """The same answer as another kind on the same path; the same kind comes back untouched."""
    if prediction.kind is to:
        return prediction
    x0, eps = pair(prediction, schedule, x, t)
    return combine(to, schedule, t, x0, eps)
