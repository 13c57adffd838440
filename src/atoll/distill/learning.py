"""What a student learns: to answer as its teachers do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..diffusion import Condition, Objective, squared_error
from ..islands.expert import ExpertCard
from ..islands.learning import as_learned
from ..islands.validation import Validation, measured_card, val_loss
from ..models.dit import DiT
from ..training.execution import Execution
from ..training.packing import Batch
from .lessons import Lessons


@dataclass
class StudentLearner:
    """A network that is to answer as its teachers do; a `Learner` of training/step.py."""

    network: DiT
    card: ExpertCard
    objective: Objective
    lessons: Lessons
    validation: Validation | None

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        return self.lessons.draw(images, batch, part)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The objective's squared error per sample [B], with the teacher's answer in the place of the truth."""
        student = as_learned(network, self.card, self.objective)
        answer = student(batch["x"], batch["t"], Condition.of(batch)).value
        error = squared_error(answer, batch["target"])
        return batch["weight"].to(error.dtype) * error

    def measure(self, execution: Execution) -> dict[str, float]:
        """The validation loss on unseen data of all clusters, if there is any."""
        return val_loss(self.validation, self.network, self.card, execution)

    def finished_card(self, execution: Execution) -> ExpertCard:
        """The card of the expert this network has become: its bridge's limit is measured now."""
        return measured_card(self.validation, self.network, self.card, execution)
