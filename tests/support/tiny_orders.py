"""Orders made in a moment, out of nothing but shards: for tests that must run on a bare machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.data.shards import write_shard
from atoll.data.space import LatentConfig
from atoll.diffusion import Kind, LinearFlow, Objective
from atoll.islands.order import Order, ShardRef, read_order
from atoll.islands.task import ExpertTask
from atoll.islands.train import expert_task, shards_of
from atoll.models.dit import DiTConfig
from atoll.training.config import TrainConfig

LATENT = (2, 8, 8)
CLASSES = 3
NETWORK = DiTConfig(latent=LATENT, patch=2, width=64, depth=2, heads=2, condition="labels", classes=CLASSES)
TRAINING = TrainConfig(
    images=2048, batch=32, learning_rate=2e-3, warmup_images=128, ema_images=256, condition_dropout=0.1, seed=0
)


def tiny_order(
    run: Path, *, network: DiTConfig = NETWORK, samples: int = 300, validation: int = 32, **training: object
) -> Path:
    """A run with one order, `orders/00.json`, and its shards: noisy copies of one pattern per class."""
    numbers = torch.Generator().manual_seed(7)
    patterns = torch.randn(CLASSES, *network.latent, generator=numbers)
    shards = []
    for split, count in (("train", samples), ("validation", validation)):
        labels = torch.arange(count) % CLASSES
        latents = 0.9 * patterns[labels] + 0.4 * torch.randn(count, *network.latent, generator=numbers)
        path = f"partition/clusters/00/{split}-00000.safetensors"
        entry = write_shard(run / path, {"latents": latents, "labels": labels})
        shards.append(ShardRef(path=path, sha256=entry.sha256, split=split))  # type: ignore[arg-type]
    channels = network.latent[0]
    order = Order(
        name="00",
        cluster=0,
        clusters=1,
        data="0" * 64,
        partition="0" * 64,
        latent=LatentConfig(
            autoencoder="pixels", shape=network.latent, mean=(0.0,) * channels, scale=(1.0,) * channels
        ),
        shards=tuple(shards),
        architecture=network,
        objective=Objective(schedule=LinearFlow(), kind=Kind.VELOCITY),
        training=TRAINING.model_copy(update=training),
    )
    (run / "orders").mkdir(parents=True, exist_ok=True)
    path = run / "orders" / "00.json"
    path.write_bytes(order.to_bytes())
    return path


def tiny_task(order_path: Path, device: str = "cpu") -> ExpertTask:
    """What an order's expert learns from, with fresh weights, before `fit` places it."""
    order, run = read_order(order_path)
    return expert_task(order, {s: shards_of(order, run, s) for s in ("train", "validation")}, None, device)
