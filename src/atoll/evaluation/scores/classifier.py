"""A linear classifier of real features: whether an image shows what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, RATE, DECAY = 400, 0.02, 1e-4


@dataclass(frozen=True, eq=False)
class Classifier:
    """Softmax regression on standardised features."""

    mean: Tensor
    std: Tensor
    weight: Tensor  # [classes, D]
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        return F.linear((features - self.mean) / self.std, self.weight, self.bias)

    def ranked(self, features: Tensor, k: int = 5) -> Tensor:
        """The k likeliest classes [N, k]."""
        return self.logits(features).topk(min(k, len(self.bias)), dim=1).indices

    @staticmethod
    def fitted(features: Tensor, labels: Tensor, classes: int) -> Classifier:
        """By Adam on all samples at once; the same numbers give the same classifier."""
        mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
        x = (features - mean) / std
        weight = torch.zeros(classes, features.shape[1], device=features.device, requires_grad=True)
        bias = torch.zeros(classes, device=features.device, requires_grad=True)
        optimizer = torch.optim.Adam([weight, bias], lr=RATE)
        with torch.enable_grad():
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = RATE * (1.0 - step / STEPS)
                optimizer.zero_grad()
                loss = F.cross_entropy(F.linear(x, weight, bias), labels) + DECAY * weight.square().sum()
                loss.backward()
                optimizer.step()
        return Classifier(mean, std, weight.detach(), bias.detach())
