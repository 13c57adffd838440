"""HDDM's hand-tuned fusion, to compare the exact bridge with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.diffusion import Condition, DDPMBetas, Denoiser, Kind, LinearFlow, Prediction, Schedule, per_sample, widen


@dataclass(frozen=True)
class PaperFusion:
    """Our reading of HDDM's hand-tuned fusion (the paper gives no formula).

    The noise expert is fed x and t of the linear path as they are (a discrete DDPM gets its nearest step);
    x0 = (x - t eps) / max(1 - t, 0.01) is clamped to +-20 and the velocity eps - x0 is scaled by 1 - (t - 0.85)
    above t = 0.85. Flow experts pass.
    """

    denoiser: Denoiser
    floor: float = 0.01
    clamp: float = 20.0
    scale_above: float = 0.85

    def __post_init__(self) -> None:
        if self.denoiser.kind is not Kind.EPSILON and not self._passes:
            raise ValueError(
                f"the paper fuses epsilon and linear-flow velocity experts only, "
                f"got {self.denoiser.kind} on {self.denoiser.schedule}"
            )

    @property
    def _passes(self) -> bool:
        return self.denoiser.kind is Kind.VELOCITY and self.denoiser.schedule == LinearFlow()

    @property
    def schedule(self) -> Schedule:
        return LinearFlow()

    @property
    def kind(self) -> Kind:
        return Kind.VELOCITY

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        if self._passes:
            return self.denoiser(x, t, condition)
        time = widen(t)
        asked = time
        if isinstance(self.denoiser.schedule, DDPMBetas):
            last = self.denoiser.schedule.steps - 1
            asked = (time * last).round() / last
        eps = self.denoiser(x, asked, condition).value
        wide = torch.promote_types(x.dtype, torch.float32)
        x, eps = x.to(wide), eps.to(wide)
        sigma, alpha = (per_sample(c, x).to(wide) for c in (time, (1.0 - time).clamp(min=self.floor)))
        x0 = ((x - sigma * eps) / alpha).clamp(-self.clamp, self.clamp)
        damping = 1.0 - (time - self.scale_above).clamp(min=0.0)
        return Prediction(Kind.VELOCITY, per_sample(damping, x).to(wide) * (eps - x0))
