"""Express an expert of any schedule and kind as a velocity on the sampling path.

On the sampling path the state is x = a x0 + b eps, on the expert's own path y = alpha x0 + sigma eps. Choose
the expert's time s so that both hold the same signal-to-noise ratio; then alpha/sigma = a/b and

    y = c x,    c = sqrt(alpha(s)^2 + sigma(s)^2) / sqrt(a^2 + b^2)                 (1)

is *the same random variable*: the posterior of (x0, eps) given x and given y agree. So evaluate the expert at
(c x, s) and read the velocity off its prediction and y, on its own path (prediction.py, equation 2):

    v = a' x0 + b' eps.                                                           (2)

No derivative of the time map enters, nothing is tuned, and an ideal expert gives the ideal velocity.
docs/process.md has the derivation and the figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .condition import Condition
from .denoiser import Denoiser
from .prediction import Kind, Prediction, coefficients, is_noise_only, recombine
from .schedule import LinearFlow, Schedule, scaled


@dataclass(frozen=True)
class Bridge:
    """A denoiser on `onto`, made from a denoiser on any schedule.

    Two limits. Outside the expert's band s is clamped to the band's end. And a kind proportional to eps carries its
    error times sigma/alpha into x0, so such experts are evaluated at sigma/alpha <= `limit` at most (None: no limit,
    for exactness tests). A velocity already on `onto` passes through untouched.
    """

    denoiser: Denoiser
    onto: Schedule = LinearFlow()
    limit: float | None = 100.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"the bridge's limit on sigma/alpha must be positive or None, got {self.limit}")

    @property
    def schedule(self) -> Schedule:
        return self.onto

    @property
    def kind(self) -> Kind:
        return Kind.VELOCITY

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        own = self.denoiser.schedule
        if own == self.onto and self.denoiser.kind is Kind.VELOCITY:
            return self.denoiser(x, t, condition)

        s = self.expert_time(t)
        scale = torch.hypot(own.alpha(s), own.sigma(s)) / torch.hypot(self.onto.alpha(t), self.onto.sigma(t))
        y = scaled(x, scale)
        prediction = self.denoiser(y.to(x.dtype), s, condition)
        velocity = coefficients(Kind.VELOCITY, self.onto, t)
        return Prediction(Kind.VELOCITY, recombine(prediction, own, y, s, velocity))

    def expert_time(self, t: Tensor) -> Tensor:
        """The expert's time s for times t [B] on `onto`: equal log-SNR, within the band and the limit."""
        own = self.denoiser.schedule
        log_snr = self.onto.log_snr(t)
        if self.limit is not None and is_noise_only(self.denoiser.kind, own):
            log_snr = log_snr.clamp(min=-2.0 * math.log(self.limit))
        return own.time_at(log_snr)
