"""What an expert learns from: batches of its cluster under the order's objective, and how well it does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..data.dataset import LatentDataset
from ..data.stream import sample_order
from ..diffusion import Bridge, Condition, Denoiser, Kind, NetworkDenoiser, Objective, squared_error
from ..models.dit import DiT
from ..training.compute import ComputeConfig
from ..training.loop import Batch
from ..training.result import Result
from ..training.seeds import batch_numbers
from .expert import ExpertCard, expert_result
from .order import Order
from .sheets import Sheets
from .validation import Validation


@dataclass
class ExpertTask:
    """A network that is to become the order's expert: a `Task` of training/loop.py."""

    order: Order
    card: ExpertCard
    network: DiT
    samples: LatentDataset
    validation: Validation
    sheets: Sheets | None = None

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        """`rows` of the batch that follows `images` seen: x0, eps, t and the condition."""
        order, seed = self.order, self.order.training.seed
        numbers = batch_numbers(seed, images, size, order.latent.shape, rows)
        chosen = sample_order(len(self.samples), seed, images, size)[rows]
        condition = self.samples.condition(chosen, numbers.caption)
        condition = condition.drop(numbers.dropout < order.training.condition_dropout)
        t = order.objective.times(numbers.u)
        return {"x0": self.samples.latents(chosen), "eps": numbers.eps, "t": t, **condition.tensors()}

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The objective's loss per sample [B]."""
        objective, t = self.order.objective, batch["t"]
        x_t, target, weight = objective.corrupt(batch["x0"], batch["eps"], t)
        prediction = as_learned(network, self.card, objective)(x_t, t, Condition.of(batch)).value
        error = squared_error(prediction, target)
        return weight.to(error.dtype) * error

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        """The validation loss on the cluster's validation samples, if it has any; and a sheet, if one is due."""
        if self.sheets is not None:
            self.sheets.update(self.network, self.card, images, self.order.training, compute)
        return self.validation.report(self.network, self.card, compute)

    def finish(self, compute: ComputeConfig) -> Result:
        return expert_result(self.validation.measured_card(self.network, self.card, compute))


def as_learned(network: nn.Module, card: ExpertCard, objective: Objective) -> Denoiser:
    """The network as the objective sees it: directly, or through the bridge if it kept another process."""
    denoiser = NetworkDenoiser(network, card.schedule, card.kind, card.architecture.time_scale)
    if process_of(objective) == (card.schedule, card.kind):
        return denoiser
    return Bridge(denoiser, onto=objective.schedule, limit=card.bridge_limit)


def process_of(objective: Objective) -> tuple[object, Kind]:
    return objective.schedule, objective.kind
