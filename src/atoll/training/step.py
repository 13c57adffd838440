"""One optimizer step, guarded: nothing is updated from a loss or gradient that is not finite."""

from __future__ import annotations

import math

import torch

from ..artifacts import UserError
from .checkpoint import TrainingState
from .plan import Training


def take_step(state: TrainingState, plan: Training, loss: float, batch: int) -> None:
    """Clip, check, update the weights and their average, and count the images."""
    limit = plan.gradient_clip or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(state.module.parameters(), limit))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"loss {loss} and gradient norm {norm} after {state.images:,} images; nothing was updated: "
            "lower training.learning_rate or use training.precision float32, and start again"
        )
    for group in state.optimizer.param_groups:
        group["lr"] = plan.learning_rate_at(state.images)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.images += batch
    state.average.update(state.images, batch)


def micro_batches(batch: int, size: int | None) -> list[slice]:
    """A batch cut into forward passes; the optimizer step does not depend on the cut."""
    size = size or batch
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def report_due(images: int, batch: int, total: int, reports: int = 40) -> bool:
    """True when the step that ended at `images` crossed one of `reports` evenly spaced marks."""
    return images == total or images * reports // total > (images - batch) * reports // total
