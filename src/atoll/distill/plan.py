"""What a student is to learn, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import UserError, canonical_json, sha256_bytes
from ..diffusion import Objective
from ..islands.order import Order
from ..models.accounting import flops_forward
from ..models.dit import DiTConfig
from ..planning.recipes import OBJECTIVES
from ..training.config import TrainConfig
from ..training.seeds import seed_from

QUARTER = 4  # DDM: a quarter of a monolith's images; with the teachers' forward passes a third of its FLOPs
MOST_DROPPED = 1 / 3  # condition dropout of a student, where its teachers had less
REUSED = 32  # times that a generated image is learned on, with other noise each time
DEFAULT_OBJECTIVE = "flow"


class DistillPlan(BaseModel):
    """Everything that decides what a student becomes, but for its teachers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: DiTConfig
    objective: Objective
    training: TrainConfig
    start: Literal["best", "random"] | None = Field(
        None, description="weights: random, or of the best teacher with the student's network and objective; none: best"
    )
    data_weight: float = Field(
        0.0, ge=0, le=1, description="weight of the image's own target; the teacher's has the rest (DDM: 0)"
    )
    samples: int | None = Field(None, gt=0, description="with --from-samples: images to generate and learn on")
    route: str | None = Field(None, description="with --from-samples: experts that generate and predict")
    steps: int = Field(50, gt=0, description="with --from-samples: solver steps")
    prompts: tuple[str, ...] = Field((), description="with --from-samples: what to generate")

    def digest(self) -> str:
        return sha256_bytes(canonical_json(self.model_dump(mode="json")))

    def from_samples(self, prompts: Sequence[str]) -> DistillPlan:
        """The same on generated images instead of the data."""
        samples = self.samples or max(1, self.training.images // REUSED)
        return self.model_copy(update={"samples": samples, "prompts": tuple(prompts)})


def student_plan(orders: Sequence[Order], *, objective: str | None = None, seed: int = 0) -> DistillPlan:
    """A student of the experts that these orders asked for: the largest one's network, batch and learning rate.

    It sees a quarter of the images they saw together, by `objective` (flow, ddpm, v). Twice as many without a
    condition: an expert's unconditional prediction is of its cluster, a student's of all data.
    """
    if not orders:
        raise UserError("a student's size and budget follow from its teachers' orders, and they are not in the run")
    like = max(orders, key=lambda order: flops_forward(order.architecture))
    batch, images = like.training.batch, sum(order.training.images for order in orders) // QUARTER
    dropout = like.training.condition_dropout
    changes = {"seed": seed_from(seed, "student"), "condition_dropout": max(dropout, min(2 * dropout, MOST_DROPPED))}
    training = like.training.over(max(batch, images // batch * batch)).model_copy(update=changes)
    return DistillPlan(network=like.architecture, objective=named_objective(objective, orders), training=training)


def named_objective(name: str | None, orders: Sequence[Order]) -> Objective:
    """An objective by its name, with the times and weights that an order of the run gives it, if one does."""
    if name is not None and name not in OBJECTIVES:
        raise UserError(f"--objective {name}: not known; use {', '.join(sorted(OBJECTIVES))}")
    usual = OBJECTIVES[name or DEFAULT_OBJECTIVE]
    alike = (o.objective for o in orders if (o.objective.schedule, o.objective.kind) == (usual.schedule, usual.kind))
    return next(alike, usual)
