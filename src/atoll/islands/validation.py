"""Validation on fixed (sample, noise, t) triples, so that two numbers differ only by the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.dataset import LatentDataset
from ..data.stream import sample_order
from ..diffusion import Condition, LinearFlow, carries_only_noise, fixed_times, velocity_error, widen
from ..training.execution import Execution, autocast
from ..training.seeds import generator
from ..training.step import micro_batches
from .expert import ExpertCard, bridged

LIMITS = (100.0, 50.0, 20.0, 10.0, 5.0, 3.0)  # largest sigma/alpha a noise expert may be asked at
MOST_SAMPLES = 256
TIMES = 8


@dataclass(frozen=True)
class Validation:
    """Every validation sample of a cluster, at most MOST_SAMPLES, at TIMES times."""

    x0: Tensor
    eps: Tensor
    t: Tensor
    condition: Condition

    @staticmethod
    def fixed(
        samples: LatentDataset, seed: int, among: Tensor | None = None, most: int = MOST_SAMPLES
    ) -> Validation | None:
        """The triples of at most `most` samples, drawn from all or from the rows `among`; None where there are none."""
        among = torch.arange(len(samples)) if among is None else among
        if len(among) == 0:
            return None
        count = min(len(among), most)
        rows = among[sample_order(len(among), seed, 0, count)].repeat_interleave(TIMES)
        x0 = samples.latents(rows)
        eps = torch.randn(x0.shape, generator=generator(seed, "validation"))
        condition = samples.condition(rows, torch.zeros(len(rows)))
        return Validation(x0, eps, fixed_times(TIMES).repeat(count), condition)

    def measure(self, network: nn.Module, card: ExpertCard, execution: Execution) -> float:
        """The validation loss of diffusion/objective.py, mean over all triples."""
        return self._error(network, card, execution, self.t)

    def best_limit(self, network: nn.Module, card: ExpertCard, execution: Execution) -> float | None:
        """The bridge's limit that gives the smallest validation loss where limits matter, at times near noise.

        Only a kind proportional to eps is limited. How far such an expert can be trusted towards t = 1 depends on
        how well it was trained, so it is measured.
        """
        if not carries_only_noise(card.kind, card.schedule):
            return card.bridge_limit
        noisy_end = 0.6 + 0.4 * self.t
        errors = {
            limit: self._error(network, card.model_copy(update={"bridge_limit": limit}), execution, noisy_end)
            for limit in LIMITS
        }
        return min(errors, key=lambda limit: errors[limit])

    @torch.no_grad()
    def _error(self, network: nn.Module, card: ExpertCard, execution: Execution, t: Tensor) -> float:
        """In parts of a micro-batch, so that it needs less memory than a training step."""
        device = next(network.parameters()).device
        denoiser = bridged(network, card, LinearFlow())
        total = 0.0
        for part in micro_batches(len(t), execution.micro_batch or MOST_SAMPLES):
            condition = self.condition[part].to(device)
            x0, eps = (value[part].to(device) for value in (self.x0, self.eps))
            with autocast(execution):
                total += velocity_error(denoiser, x0, eps, widen(t[part], device), condition).sum().item()
        return total / len(t)


def val_loss(
    validation: Validation | None, network: nn.Module, card: ExpertCard, execution: Execution
) -> dict[str, float]:
    """What a learner reports of itself: its error, where there is anything to measure it on."""
    return {} if validation is None else {"val_loss": validation.measure(network, card, execution)}


def measured_card(
    validation: Validation | None, network: nn.Module, card: ExpertCard, execution: Execution
) -> ExpertCard:
    """The card of a finished network, with the bridge's limit that suits it best."""
    if validation is None:
        return card
    return card.model_copy(update={"bridge_limit": validation.best_limit(network, card, execution)})
