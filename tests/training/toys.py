"""The smallest thing `fit` can train: a linear map with one block, on noise that is a function of the images seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.training.compute import ComputeConfig
from atoll.training.config import TrainConfig
from atoll.training.loop import Batch, Fitted, fit
from atoll.training.seeds import generator, seed_from

TRAINING = TrainConfig(images=640, batch=16, learning_rate=0.05, ema_images=64, seed=5)


class Toy(nn.Module):
    """4 numbers -> 3, through blocks of one layer."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(size, 3)])

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.blocks[0](x)
        return answer


def fresh(size: int = 4) -> Toy:
    torch.manual_seed(seed_from("weights"))
    return Toy(size)


@dataclass
class ToyTask:
    """Learns a fixed linear map from noisy examples; remembers what it was asked for."""

    network: Toy = field(default_factory=fresh)
    drawn: list[tuple[int, int]] = field(default_factory=list)  # images seen, batch
    measured: int = 0

    def batch(self, images: int, size: int, rows: slice) -> Batch:
        self.drawn.append((images, size))
        numbers = generator("toy", images)
        x = torch.randn(size, self.network.blocks[0].in_features, generator=numbers)
        noise = 0.1 * torch.randn(size, 3, generator=numbers)
        return {"x": x[rows], "y": (x[:, :3].flip(1) + noise)[rows]}

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return (network(batch["x"]) - batch["y"]).square().mean(1)

    def report(self, images: int, compute: ComputeConfig) -> dict[str, float]:
        self.measured += 1
        return {"val_loss": float(next(self.network.parameters()).abs().sum())}


def fitted(folder: Path, task: ToyTask | None = None, training: TrainConfig = TRAINING, **settings: Any) -> Fitted:
    """`fit` on a toy; settings are fit's, `compute` among them."""
    compute = settings.pop("compute", ComputeConfig())
    defaults = {"identity": {"toy": 1}, "what": "toy"}
    return fit(task or ToyTask(), training, compute, folder, **{**defaults, **settings})


def same(one: Fitted, other: Fitted) -> bool:
    """Whether two trainings ended in the same state to the bit, with the same rows."""
    mine, its = one.state.tensors(), other.state.tensors()
    return one.rows == other.rows and all(torch.equal(value, its[name]) for name, value in mine.items())
