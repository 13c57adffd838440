"""Classifier-free guidance as a denoiser: the answer pushed away from the unconditional one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..process import Condition, Denoiser, GuidedDenoiser, Kind, Prediction, Schedule, guide, per_sample


@dataclass(frozen=True)
class Guided:
    """A denoiser with guidance of `scale`, everywhere or only where low <= t <= high.

    Outside the interval, and at scale 1, it costs one plain call. A denoiser that offers `guided` (a mixture does)
    is asked for it; any other gets both halves as one batch of twice the size.
    """

    denoiser: Denoiser
    scale: float
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and not 0.0 <= self.interval[0] < self.interval[1] <= 1.0:
            raise ValueError(f"the guidance interval needs 0 <= low < high <= 1, got {self.interval}")

    @property
    def schedule(self) -> Schedule:
        return self.denoiser.schedule

    @property
    def kind(self) -> Kind:
        return self.denoiser.kind

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        if self.scale == 1.0:
            return self.denoiser(x, t, condition)
        if condition is None:
            raise ValueError(f"guidance {self.scale} needs a condition to guide towards; use guidance 1 without one")
        if self.interval is None:
            return self._guided(x, t, condition)

        low, high = self.interval
        inside = (t >= low) & (t <= high)
        if bool(inside.all()):
            return self._guided(x, t, condition)
        plain = self.denoiser(x, t, condition)
        if not bool(inside.any()):
            return plain
        # times of a batch on both sides: both answers for the whole batch, since a row's place may mean something
        guided = self._guided(x, t, condition)
        return Prediction(plain.kind, torch.where(per_sample(inside, x), guided.value, plain.value))

    def _guided(self, x: Tensor, t: Tensor, condition: Condition) -> Prediction:
        if isinstance(self.denoiser, GuidedDenoiser):
            return self.denoiser.guided(x, t, condition, self.scale)
        twice = Condition.cat([condition, condition.null()])
        answer = self.denoiser(torch.cat([x, x]), torch.cat([t, t]), twice)
        conditional, unconditional = answer.value.chunk(2)
        return Prediction(answer.kind, guide(conditional, unconditional, self.scale))
