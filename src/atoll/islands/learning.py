"""What an expert learns from: batches of its cluster under the order's objective, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..data.dataset import LatentDataset
from ..data.stream import sample_order
from ..diffusion import Bridge, Denoiser, Kind, NetworkDenoiser, Objective, squared_error
from ..models.dit import DiT
from ..training.execution import Execution
from ..training.packing import Batch
from ..training.seeds import batch_numbers
from .expert import ExpertCard
from .order import Order
from .validation import Validation, measured_card, val_loss


@dataclass
class ExpertLearner:
    """A network that is to become the order's expert; a `Learner` of training/step.py."""

    order: Order
    card: ExpertCard
    network: DiT
    samples: LatentDataset
    validation: Validation | None

    def draw(self, images: int, batch: int, part: slice) -> Batch:
        """Rows `part` of the batch that follows `images` seen: what the samples carry, eps and t.

        A pure function of (seed, images seen), so resuming needs no memory of what was drawn before.
        """
        order, seed = self.order, self.order.training.seed
        numbers = batch_numbers(seed, images, batch, order.latent.shape, part)
        rows = sample_order(len(self.samples), seed, images, batch)[part]
        drawn = self.samples.pick(rows, numbers.caption)
        dropped = numbers.dropout < order.training.condition_dropout
        return {
            **drawn,
            "dropped": drawn["dropped"] | dropped if "dropped" in drawn else dropped,
            "eps": numbers.eps,
            "t": order.objective.times(numbers.u),
        }

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The objective's loss per sample [B]."""
        x0, condition = self.samples.fetch(batch)
        objective, t = self.order.objective, batch["t"]
        x_t, target, weight = objective.corrupt(x0, batch["eps"], t)
        error = squared_error(as_learned(network, self.card, objective)(x_t, t, condition).value, target)
        return weight.to(error.dtype) * error

    def measure(self, execution: Execution) -> dict[str, float]:
        """The validation loss on the cluster's validation samples, if it has any."""
        return val_loss(self.validation, self.network, self.card, execution)

    def finished_card(self, execution: Execution) -> ExpertCard:
        """The card of the expert this network has become: its bridge's limit is measured now."""
        return measured_card(self.validation, self.network, self.card, execution)


def as_learned(network: nn.Module, card: ExpertCard, objective: Objective) -> Denoiser:
    """The network as the objective sees it: directly, or through the bridge if it kept another process."""
    denoiser = NetworkDenoiser(network, card.schedule, card.kind, card.architecture.time_scale)
    if process_of(objective) == (card.schedule, card.kind):
        return denoiser
    return Bridge(denoiser, onto=objective.schedule, limit=card.bridge_limit)


def process_of(objective: Objective) -> tuple[object, Kind]:
    return objective.schedule, objective.kind
