"""What a student is to learn, from whom, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..artifacts import UserError, canonical_json, sha256_bytes
from ..diffusion import Objective
from ..islands.order import Order
from ..models.accounting import flops_forward
from ..models.dit import DiTConfig
from ..planning.recipes import OBJECTIVES
from ..training.config import TrainConfig
from ..training.seeds import seed_from

QUARTER = 4  # DDM: a quarter of a monolith's images; with the teachers' forward passes a third of its operations
MOST_UNPROMPTED = 1 / 3  # of a student's lessons, where its teachers had fewer: best for guidance 2, if both err alike
DEFAULT_OBJECTIVE = "flow"
MOST_TRAJECTORIES = 4096  # whose states are shuffled together; more would keep a student waiting for its first
POOL_BYTES = 2**29  # of host memory for them; two such pools are kept

States = Literal["data", "samples"]
StartFrom = Literal["random", "best", "average"]
TrustIn = Literal["data", "kind", "whole"]
USUAL_TRUST: TrustIn = "data"


class DistillPlan(BaseModel):
    """Everything that decides what a student becomes, but for its teachers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    network: DiTConfig
    objective: Objective
    training: TrainConfig
    start: StartFrom | None = Field(
        None,
        description="weights: random, the best teacher's, the teachers' average; none: best, or average without data",
    )
    truth: float = Field(
        0.0, ge=0, le=1, description="share of the sample's own target in a teacher's answer; not DDM's"
    )
    trust: TrustIn | None = Field(
        None,
        description="where a teacher's errors grow on the way: whole, it is heard all the same (DDM's way); kind, the "
        "sample's own target has up to half; data, the mean of samples that may lie there has the rest; none: data",
    )
    states: States = Field("data", description="samples: states on the ensemble's own way from noise to images")
    route: str | None = Field(None, description="with samples: which experts answer")
    steps: int = Field(32, ge=2, description="with samples: states of one trajectory")
    trajectories: int | None = Field(
        None, ge=1, description="with samples: trajectories whose states are shuffled together; none: 4,096 if they fit"
    )
    prompts: tuple[str, ...] = Field((), description="with samples: what is asked for")

    def identity(self) -> dict[str, Any]:
        """What a student is known by. Plans had less to say once: where they say no more, it is what it was."""
        usual = {
            "truth": not self.truth,
            "trust": self.trust in (None, "whole"),
            "trajectories": self.trajectories is None,
        }
        return self.model_dump(mode="json", exclude={name for name, unsaid in usual.items() if unsaid})

    def digest(self) -> str:
        return sha256_bytes(canonical_json(self.identity()))


def student_plan(orders: Sequence[Order], *, objective: str | None = None, seed: int = 0) -> DistillPlan:
    """A student of the experts that these orders asked for: the largest one's network, batch and learning rate.

    It sees a quarter of what they saw together, by `objective` (flow, ddpm, v) or as the first of them that is trained
    by flow. DDM has as many steps as an expert and a larger batch; the same images in more steps at the rate that suits
    that batch teach more (docs/log.md). Twice as many of its lessons are without a prompt.
    """
    if not orders:
        raise UserError("a student's size and budget follow from its teachers' orders, and they are not in the run")
    like = max(orders, key=lambda order: flops_forward(order.architecture))
    batch, images = like.training.batch, sum(order.training.images for order in orders) // QUARTER
    training = like.training.over(max(batch, images // batch * batch))
    unprompted = {"condition_dropout": unprompted_share(like.training.condition_dropout)}
    training = training.model_copy(update={"seed": seed_from(seed, "student")} | unprompted)
    return DistillPlan(network=like.architecture, objective=named_objective(objective, orders), training=training)


def usual_trajectories(plan: DistillPlan) -> int:
    """Trajectories whose states are shuffled together: all of a training, or so many as host memory takes, to 4,096.

    Of 64, as it was once, students of digits were half as far again from the data (docs/log.md).
    """
    of_states = plan.steps * 2 * math.prod(plan.network.latent)
    of_prompt = (plan.network.text_width or 0) * (plan.network.text_length or 1)
    most, walked = max(1, min(MOST_TRAJECTORIES, POOL_BYTES // (4 * (of_states + of_prompt)))), all_trajectories(plan)
    return -(-walked // -(-walked // most))  # all pools alike: what is walked is learned


def all_trajectories(plan: DistillPlan) -> int:
    return -(-plan.training.images // plan.steps)


def unprompted_share(experts: float) -> float:
    """The share of a student's lessons without a prompt, of teachers that had `experts`: twice that, to a third.

    Without a prompt an expert's velocity v(x) is that of its cluster, a student's is that of all data, and it has but
    these lessons to learn it from. Guidance s paints by s v(x | c) - (s - 1) v(x). If the errors of both are
    independent and fall alike with their numbers of lessons, s^2 / n_c + (s - 1)^2 / n is least at a share of
    (s - 1) / (2 s - 1): a third for guidance 2, none for 1. Teachers that know no v(x) cannot teach it.
    """
    return max(experts, min(2 * experts, MOST_UNPROMPTED))


def named_objective(name: str | None, orders: Sequence[Order]) -> Objective:
    """An objective by its name, with the times and weights that an order of the run gives it, if one does."""
    if name is not None and name not in OBJECTIVES:
        raise UserError(f"--objective {name}: not known; use {', '.join(sorted(OBJECTIVES))}")
    usual = OBJECTIVES[name or DEFAULT_OBJECTIVE]
    alike = (o.objective for o in orders if (o.objective.schedule, o.objective.kind) == (usual.schedule, usual.kind))
    return next(alike, usual)


class Cost(BaseModel):
    """Operations of a whole distillation, counted as everywhere: matrix products, a backward pass as two forward."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    student: int
    teachers: int
    monolith: int | None = Field(
        None, description="of one as large as the largest expert, that sees as many images as all of them together"
    )

    @property
    def share(self) -> float | None:
        """Of a monolith's."""
        return None if self.monolith is None else (self.student + self.teachers) / self.monolith

    def sentence(self) -> str:
        said = f"{self.student:.2e} operations of the student, {self.teachers:.2e} of its teachers"
        return said if self.share is None else f"{said}: {self.share:.2f} of a monolith's training"


def cost_of(plan: DistillPlan, per_image: float, orders: Sequence[Order]) -> Cost:
    """The cost of a plan whose teachers take `per_image` operations for the answer to one state."""
    seen = sum(order.training.images for order in orders)
    largest = max((flops_forward(order.architecture) for order in orders), default=0)
    return Cost(
        student=3 * flops_forward(plan.network) * plan.training.images,
        teachers=round(per_image * plan.training.images),
        monolith=3 * largest * seen if orders else None,
    )


def mean_forward(teachers: Mapping[int, DiTConfig], sizes: Mapping[int, int]) -> float:
    """Operations of the mean answer, where the expert of a cluster answers for its `sizes` samples."""
    total = sum(sizes.values())
    return sum(flops_forward(teachers[cluster]) * size for cluster, size in sizes.items()) / total
