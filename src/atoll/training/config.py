"""How long and how hard to train, whatever is trained. compute.py has how that is computed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainConfig(BaseModel):
    """What is learned. Progress is counted in images, so nothing here changes meaning with the batch size."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    images: int = Field(gt=0, description="budget: images seen in all")
    batch: int = Field(gt=0, description="images per optimizer step")
    learning_rate: float = Field(gt=0, description="of AdamW, after the warm-up")
    warmup_images: int = Field(0, ge=0, description="images over which the learning rate rises from zero")
    decay: Literal["constant", "linear"] = Field("constant", description="linear: the rate falls to zero at the end")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    betas: tuple[float, float] = Field((0.9, 0.999), description="of AdamW: how long its moments remember")
    gradient_clip: float | None = Field(1.0, gt=0, description="longest gradient; none: as it comes")
    ema_images: int = Field(gt=0, description="half-life of the weight average, in images")
    condition_dropout: float = Field(0.1, ge=0, lt=1, description="share of samples without their condition")
    seed: int = Field(ge=0, description="of weights, noise and order")

    def over(self, images: int, kept: Collection[str] = ()) -> TrainConfig:
        """The same training for another budget: warm-up and average keep their share of it, but for what is `kept`."""
        share = images / self.images
        scaled = {
            "warmup_images": round(self.warmup_images * share),
            "ema_images": max(min(self.batch, self.ema_images), round(self.ema_images * share)),
        }
        return self.model_copy(update={"images": images} | {k: v for k, v in scaled.items() if k not in kept})

    def learning_rate_at(self, images: int) -> float:
        """Linear warm-up, then constant, or linear down to zero at the end of the budget."""
        rise = min(1.0, (images + self.batch) / self.warmup_images) if self.warmup_images else 1.0
        left = (self.images - images) / max(self.images - self.warmup_images, 1)
        return self.learning_rate * (min(rise, left) if self.decay == "linear" else rise)
