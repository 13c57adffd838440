"""What a student learns: to answer as its teachers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..diffusion import Condition, Objective, squared_error
from ..islands.expert import ExpertCard, expert_result
from ..islands.task import as_learned
from ..islands.validation import Validation
from ..models.dit import DiT
from ..training.compute import ComputeConfig
from ..training.loop import Batch
from ..training.result import Result
from .lessons import Lessons


@dataclass
class StudentTask:
    """A network that is to answer as its teachers do: a `Task` of training/loop.py."""

    network: DiT
    card: ExpertCard
    objective: Objective
    lessons: Lessons
    validation: Validation | None
    files: Mapping[str, bytes] = field(default_factory=dict)  # beside the expert's own

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        return self.lessons.draw(images, size, rows)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The objective's squared error per sample [B], with the teacher's answer in the place of the truth."""
        student = as_learned(network, self.card, self.objective)
        answer = student(batch["x"], batch["t"], Condition.of(batch)).value
        error = squared_error(answer, batch["target"])
        return batch["weight"].to(error.dtype) * error

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        """The validation loss on unseen data of all clusters, if there is any."""
        return {} if self.validation is None else self.validation.report(self.network, self.card, compute)

    def finish(self, compute: ComputeConfig) -> Result:
        card = self.card
        if self.validation is not None:
            card = self.validation.measured_card(self.network, card, compute)
        return expert_result(card, self.files)
