"""Where a student begins: at random numbers, at the best of its teachers, or at their average."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..artifacts import Store, UserError, write_atomic
from ..diffusion import Kind
from ..islands.expert import Expert, ExpertCard, load_expert
from ..islands.task import process_of
from ..islands.validation import Validation
from ..runtime.placing import OpenedExpert
from ..training.compute import ComputeConfig
from .plan import DistillPlan

MOST_MEASURED = 2048  # validation samples on which teachers are compared
CHOSEN = "start.json"  # in the state's folder: which teacher was found best, so that it is found once


@dataclass(frozen=True)
class Start:
    """Weights, the process they were trained for, and where they come from."""

    weights: Mapping[str, Tensor]
    card: ExpertCard
    origin: str


@dataclass(frozen=True)
class Candidate:
    """A teacher as it lies on the disk, and how many training samples its cluster has."""

    cluster: int
    place: Store
    opened: OpenedExpert
    samples: int

    def load(self, device: torch.device | str = "cpu") -> Expert:
        return load_expert(self.place, device)


def best_start(
    candidates: Sequence[Candidate],
    validation: Validation | None,
    execution: ComputeConfig,
    device: torch.device,
    state: Path,
) -> Start:
    """The teacher with the lowest error on unseen data of all clusters."""
    record = state / CHOSEN
    chosen = json.loads(record.read_bytes()) if record.exists() else None
    if chosen is None:
        if validation is None:
            raise UserError("--start best: the data has no validation samples to compare experts on; leave it out")
        errors = {}
        for candidate in candidates:
            expert = candidate.load(device)
            errors[candidate.opened.digest] = validation.measure(expert.network, expert.card, execution)
        chosen = {"best": min(errors, key=lambda digest: errors[digest]), "errors": errors}
        write_atomic(record, json.dumps(chosen, indent=1).encode())
    best = next(candidate for candidate in candidates if candidate.opened.digest == chosen["best"])
    expert = best.load()
    return Start(expert.network.state_dict(), expert.card, f"expert {expert.digest[:12]}, the best on all clusters")


def alike(candidates: Sequence[Candidate], plan: DistillPlan) -> list[Candidate]:
    """The teachers that have the student's architecture and its process."""
    process = process_of(plan.objective)
    same = [c for c in candidates if c.opened.card.architecture == plan.network]
    return [c for c in same if (c.opened.card.schedule, c.opened.card.kind) == process]


def able(candidates: Sequence[Candidate], plan: DistillPlan) -> list[Candidate]:
    """The teachers that a student can begin at: they have its architecture, and a process it can go on from.

    That is its own. Where no teacher has it, a velocity can be learned by the weights of any one, through the bridge.
    """
    found = alike(candidates, plan)
    if not found and plan.start == "best" and plan.objective.kind is Kind.VELOCITY:
        found = [candidate for candidate in candidates if candidate.opened.card.architecture == plan.network]
    needed = {"best": 1, "average": 2}.get(plan.start or "random", 0)
    if len(found) < needed:
        raise UserError(
            f"--start {plan.start}: {len(found)} of the experts have the student's architecture and an objective it "
            f"can go on from, and it needs {needed}; change what was set of network and objective, or leave it out"
        )
    return found


def average_start(candidates: Sequence[Candidate]) -> Start:
    """The mean of teachers' weights, by the samples of their clusters, summed in float64, one in memory at a time."""
    total = sum(candidate.samples for candidate in candidates)
    mean: dict[str, Tensor] = {}
    for candidate in candidates:
        for name, value in candidate.load().network.state_dict().items():
            part = value.double() * (candidate.samples / total)
            mean[name] = mean[name] + part if name in mean else part
    weights = {name: value.float() for name, value in mean.items()}
    usual = {"bridge_limit": ExpertCard.model_fields["bridge_limit"].default}
    card = candidates[0].opened.card.model_copy(update=usual)
    return Start(weights, card, f"the average of {len(candidates)} experts")
