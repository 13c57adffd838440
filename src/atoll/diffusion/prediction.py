"""What a network predicts, and one table that turns any kind into any other.

Every kind is a linear form in the clean sample and the noise,

    value = p x0 + q eps,                                                        (1)

and so is the state, x = alpha x0 + sigma eps. `coefficients` is the table of (p, q). Two equations, two unknowns:
any other form P x0 + Q eps follows from the state and the value,

    P x0 + Q eps = ((P q - Q p) x + (Q alpha - P sigma) value) / det,    det = alpha q - sigma p.   (2)

(P, Q) = (1, 0) is x0, (0, 1) is eps. An error e in the value is an error -sigma e / det in x0; that factor is
`x0_gain`, and it is all there is to say about how objectives weigh time against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

from .schedule import Schedule, per_sample, widen


class Kind(StrEnum):
    X0 = "x0"
    EPSILON = "epsilon"
    VELOCITY = "velocity"
    V = "v"
    SCORE = "score"


@dataclass(frozen=True, eq=False)
class Prediction:
    """A tensor shaped like the state, with what it means."""

    kind: Kind
    value: Tensor


Coefficients = tuple[Tensor, Tensor]

_TABLE: dict[Kind, Callable[[Schedule, Tensor], Coefficients]] = {
    Kind.X0: lambda path, t: (torch.ones_like(widen(t)), torch.zeros_like(widen(t))),
    Kind.EPSILON: lambda path, t: (torch.zeros_like(widen(t)), torch.ones_like(widen(t))),
    Kind.VELOCITY: lambda path, t: (path.d_alpha(t), path.d_sigma(t)),
    Kind.V: lambda path, t: _unit(-path.sigma(t), path.alpha(t)),
    Kind.SCORE: lambda path, t: (torch.zeros_like(widen(t)), -1.0 / path.sigma(t)),
}


def _unit(p: Tensor, q: Tensor) -> Coefficients:
    length = torch.hypot(p, q)
    return p / length, q / length


def coefficients(kind: Kind, schedule: Schedule, t: Tensor) -> Coefficients:
    """(p, q) of equation (1), each float64 [B]."""
    return _TABLE[kind](schedule, t)


def x0_gain(kind: Kind, schedule: Schedule, t: Tensor) -> Tensor:
    """Size of the x0 error that a unit error in `kind` makes at t: |sigma / det|, float64 [B]."""
    if kind is Kind.X0:
        return torch.ones_like(widen(t))  # also at t = 0, where sigma / det is 0 / 0
    p, q = coefficients(kind, schedule, t)
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    return (sigma / (alpha * q - sigma * p)).abs()


@lru_cache(maxsize=64)
def tells_only(kind: Kind, schedule: Schedule) -> Kind | None:
    """EPSILON or X0, if the kind is proportional to that one all along the path (p = 0 or q = 0); None: to neither.

    x0 is then had by dividing by alpha, or noise by dividing by sigma. Only noise is in epsilon and score, and in
    velocity where alpha is constant (VE).
    """
    p, q = coefficients(kind, schedule, torch.linspace(0.1, 0.9, 9, dtype=torch.float64))
    if bool((p == 0).all()):
        return Kind.EPSILON
    return Kind.X0 if bool((q == 0).all()) else None


def is_noise_only(kind: Kind, schedule: Schedule) -> bool:
    return tells_only(kind, schedule) is Kind.EPSILON


def mix(p: Tensor, q: Tensor, x0: Tensor, eps: Tensor) -> Tensor:
    """p x0 + q eps for p, q [B] of any precision, in x0's precision [B, ...]: every state, every target."""
    p, q = (per_sample(c, x0).to(x0.dtype) for c in (p, q))
    return p * x0 + q * eps


def combine(kind: Kind, schedule: Schedule, t: Tensor, x0: Tensor, eps: Tensor) -> Prediction:
    """The prediction of `kind` that belongs to a known pair: p x0 + q eps."""
    return Prediction(kind, mix(*coefficients(kind, schedule, t), x0, eps))


def recombine(prediction: Prediction, schedule: Schedule, x: Tensor, t: Tensor, form: Coefficients) -> Tensor:
    """P x0 + Q eps by equation (2), for `form` = (P, Q) [B]; in float32 or wider whatever the inputs' precision."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, prediction.value.dtype), torch.float32)
    p, q = coefficients(prediction.kind, schedule, t)
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    det = alpha * q - sigma * p
    of_state, of_value = (form[0] * q - form[1] * p) / det, (form[1] * alpha - form[0] * sigma) / det
    return per_sample(of_state, x).to(dtype) * x + per_sample(of_value, x).to(dtype) * prediction.value


def convert(prediction: Prediction, to: Kind, schedule: Schedule, x: Tensor, t: Tensor) -> Prediction:
    """The same prediction as another kind on the same path; the same kind comes back untouched."""
    if prediction.kind is to:
        return prediction
    return Prediction(to, recombine(prediction, schedule, x, t, coefficients(to, schedule, t)))
