"""How long and how hard to train, whatever is trained. How that is computed is in execution.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Training(BaseModel):
    """What is learned. Progress is counted in images, so nothing here changes meaning with the batch size."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    images: int = Field(gt=0, description="budget: images seen in all")
    batch: int = Field(gt=0, description="images per optimizer step")
    learning_rate: float = Field(gt=0)
    warmup_images: int = Field(0, ge=0)
    decay: Literal["constant", "linear"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    gradient_clip: float | None = Field(1.0, gt=0)
    ema_images: int = Field(gt=0, description="half-life of the weight average, in images")
    condition_dropout: float = Field(0.1, ge=0, lt=1)
    seed: int = Field(ge=0)

    def learning_rate_at(self, images: int) -> float:
        """Linear warm-up, then constant, or linear down to zero at the end of the budget."""
        rise = min(1.0, (images + self.batch) / self.warmup_images) if self.warmup_images else 1.0
        left = (self.images - images) / max(self.images - self.warmup_images, 1)
        return self.learning_rate * (min(rise, left) if self.decay == "linear" else rise)
