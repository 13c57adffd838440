"""Validation on fixed (sample, noise, t) triples, so that two numbers differ only by the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.dataset import LatentDataset
from ..data.stream import sample_order
from ..diffusion import Condition, LinearFlow, fixed_times, is_noise_only, velocity_error, widen
from ..training.compute import ComputeConfig
from ..training.loop import micro_batches
from ..training.seeds import generator
from .expert import ExpertCard, bridged

LIMITS = (100.0, 50.0, 20.0, 10.0, 5.0, 3.0)  # largest sigma/alpha at which a noise expert may be evaluated
MOST_SAMPLES = 256
TIMES = 8


@dataclass(frozen=True)
class Validation:
    """Validation samples, each at TIMES times; N triples, maybe none."""

    x0: Tensor
    eps: Tensor
    t: Tensor
    condition: Condition

    @staticmethod
    def fixed(samples: LatentDataset, seed: int, among: Tensor | None = None, most: int = MOST_SAMPLES) -> Validation:
        """The triples of at most `most` samples, drawn from all or from the rows `among`."""
        among = torch.arange(len(samples)) if among is None else among
        if len(among) == 0:
            nothing = torch.zeros(0)
            return Validation(nothing, nothing, nothing, Condition(labels=nothing))
        count = min(len(among), most)
        rows = among[sample_order(len(among), seed, 0, count)].repeat_interleave(TIMES)
        x0 = samples.latents(rows)
        eps = torch.randn(x0.shape, generator=generator(seed, "validation"))
        condition = samples.condition(rows, torch.zeros(len(rows)))
        return Validation(x0, eps, fixed_times(TIMES).repeat(count), condition)

    def report(self, network: nn.Module, card: ExpertCard, compute: ComputeConfig) -> dict[str, float]:
        """A row of metrics: the validation loss, where there is anything to measure it on."""
        return {"val_loss": self.measure(network, card, compute)} if len(self.t) else {}

    def measure(self, network: nn.Module, card: ExpertCard, compute: ComputeConfig) -> float:
        """The validation loss of diffusion/objective.py, mean over all triples."""
        return self._error(network, card, compute, self.t)

    def measured_card(self, network: nn.Module, card: ExpertCard, compute: ComputeConfig) -> ExpertCard:
        """The card with the bridge's limit that gives the smallest validation loss at times near noise.

        Only a kind proportional to eps is limited. How far such an expert is right towards t = 1 depends on how well it
        was trained, so it is measured.
        """
        if len(self.t) == 0 or not is_noise_only(card.kind, card.schedule):
            return card
        cards = [card.model_copy(update={"bridge_limit": limit}) for limit in LIMITS]
        return min(cards, key=lambda each: self._error(network, each, compute, 0.6 + 0.4 * self.t))

    @torch.no_grad()
    def _error(self, network: nn.Module, card: ExpertCard, compute: ComputeConfig, t: Tensor) -> float:
        """In parts of a micro-batch, so that it needs less memory than a training step."""
        device = next(network.parameters()).device
        denoiser = bridged(network, card, LinearFlow())
        total = 0.0
        for part in micro_batches(len(t), compute.micro_batch or MOST_SAMPLES):
            condition = self.condition[part].to(device)
            x0, eps = (value[part].to(device) for value in (self.x0, self.eps))
            with compute.autocast():
                total += velocity_error(denoiser, x0, eps, widen(t[part], device), condition).sum().item()
        return total / len(t)
